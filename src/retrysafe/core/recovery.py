"""Recovery: operations whose owner is gone are finished without their caller, or reported.

Owns which abandoned claims a worker takes over, and when. A claim is taken over by the token that
it was seen with, so any number of workers and callers may want it: one gets it. It must not know
how an operation is found or called; a resumer does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from retrysafe.core.call import Answer
from retrysafe.core.events import EventKind, Reporter
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.core.model import Condition, Record, StoredKey
from retrysafe.core.ports import Lock, Store, WorkerPool
from retrysafe.core.values.trees import NotReadable
from retrysafe.errors import ClaimLost, Closed, OperationInFlight

# Records per look. Each may bring its arguments along, so a page is not large.
PAGE_LIMIT: Final = 50
# Of abandoned records a look shows so many; an operator lists the others.
REPORT_LIMIT: Final = 1_000
# How many abandoned claims a worker remembers having reported, so as not to repeat itself.
REPORTED_LIMIT: Final = 10_000
# An operation that kills its workers, or fails again and again, waits this long at most.
BACK_OFF_MAXIMUM_MS: Final = 15 * 60 * 1000


@dataclass(slots=True)
class RecoveryReport:
    """What a worker has recovered so far."""

    # Operations that were run to their end, and those whose run raised or was cut off: stored as
    # their failure, or left to be tried again.
    resumed: int = 0
    failed: int = 0
    # Claims that somebody else got first, or has ended meanwhile.
    lost: int = 0


@dataclass(slots=True)
class AbandonedReport:
    """What a worker has reported so far."""

    # Claims that nobody here can resume; the next retry takes them over.
    reported: int = 0


class Resumer(Protocol):
    """An operation that can be run again from what is stored of it."""

    def prepare(self, stored: StoredKey) -> Callable[[], Awaitable[Answer[Any]]]:
        """What takes the claim over and runs the operation; raises `NotReadable`.

        Nothing is claimed before it is called: arguments that cannot be read here must not use up
        the attempts of a key that another worker can resume.
        """


class Notices(Protocol):
    """Who hears of what no caller does."""

    def failed(self, key: Key, error: BaseException) -> None:
        """A resumed operation raised, or was cut off."""

    def is_full(self, size: int) -> None:
        """An operation has waited for long, because so many others are under way."""

    def has_more(self, limit: int) -> None:
        """More records than this are abandoned; a look has seen no more of them."""


def key_of(record: Record) -> Key:
    """The key that a record is of."""
    return Key(record.text, caller=record.caller or GLOBAL)


def back_off_ms(attempt: int, base_ms: int) -> int:
    """How long after its lease an attempt is followed by the next one.

    The first is followed at once: its process is gone, and nothing speaks against the operation.
    """
    if attempt <= 1:
        return 0
    return int(min(BACK_OFF_MAXIMUM_MS, base_ms * 2 ** min(attempt - 2, 30)))


class Recovery:
    """Takes over what is abandoned in one store."""

    def __init__(
        self,
        *,
        store: Store,
        resumers: Mapping[str, Resumer],
        pool: WorkerPool,
        lock: Lock,
        report: Reporter,
        back_off_ms: int,
        patience_seconds: float,
        notices: Notices,
    ) -> None:
        self._store = store
        self._resumers = resumers
        self._pool = pool
        self._lock = lock
        self._report = report
        self._back_off_ms = back_off_ms
        # An operation that waits longer than this for room in the pool is reported.
        self._patience_seconds = patience_seconds
        self._notices = notices
        self._is_full_noted = False
        self._summary = RecoveryReport()
        self._abandoned = AbandonedReport()
        self._reported: dict[bytes, None] = {}

    @property
    def report(self) -> RecoveryReport:
        """A copy of the counts so far."""
        with self._lock:
            return replace(self._summary)

    @property
    def abandoned(self) -> AbandonedReport:
        """The same of what was reported."""
        with self._lock:
            return replace(self._abandoned)

    async def resume_all(self) -> None:
        """Starts every operation that can be resumed now, as soon as the pool has room for it."""
        after = b""
        self._is_full_noted = False
        while True:
            page = await self._store.list_resumable(PAGE_LIMIT, after, tuple(self._resumers))
            for stored in page:
                run = self._prepared(stored)
                if run is None:
                    continue
                if not await self._has_room():
                    return
                self._pool.start(self._resume(stored, run))
            if len(page) < PAGE_LIMIT:
                return
            # Onwards from the last one, started or not: what cannot be resumed holds up nobody.
            after = page[-1].record.digest

    async def _has_room(self) -> bool:
        """Waits for room, and reports once in a walk that it takes long: operations may hang."""
        if not self._is_full_noted and not await self._pool.wait_for_room(self._patience_seconds):
            self._is_full_noted = True
            self._notices.is_full(self._pool.size)
        return await self._pool.has_room()

    def _prepared(self, stored: StoredKey) -> Callable[[], Awaitable[Answer[Any]]] | None:
        record = stored.record
        resumer = self._resumers[record.operation]
        waited_ms = stored.now_ms - record.lease_ends_at_ms
        if waited_ms < back_off_ms(record.attempt, self._back_off_ms):
            return None
        try:
            return resumer.prepare(stored)
        except NotReadable as error:
            self._report_abandoned(stored, f"its arguments cannot be used here: {error}")
            return None

    async def _resume(self, stored: StoredKey, run: Callable[[], Awaitable[Answer[Any]]]) -> None:
        try:
            answer = await run()
        except (OperationInFlight, ClaimLost, Closed):
            self._count("lost")
        except GeneratorExit:
            # Closed by whoever gives its memory back, perhaps while this thread holds the lock.
            raise
        except Exception as error:
            self._report_failure(stored, error)
        except BaseException as error:
            # A cancellation or an exit of the operation's own would leave no trace otherwise. One
            # of a worker that gives up says nothing about the operation.
            if not self._pool.has_given_up:
                self._report_failure(stored, error)
            raise
        else:
            # A replay is the outcome of somebody who was quicker.
            self._count("lost" if answer.replayed else "resumed")

    def _report_failure(self, stored: StoredKey, error: BaseException) -> None:
        self._count("failed")
        self._notices.failed(key_of(stored.record), error)

    async def report_abandoned(self) -> None:
        """Reports each abandoned claim that nobody here can resume, once; it stays claimable."""
        found = await self._store.list_abandoned(REPORT_LIMIT + 1)
        self._report.worked(EventKind.LOOKED, min(len(found), REPORT_LIMIT))
        if len(found) > REPORT_LIMIT:
            self._notices.has_more(REPORT_LIMIT)
        for stored in found[:REPORT_LIMIT]:
            if stored.condition is not Condition.ABANDONED or stored.record.token in self._reported:
                continue
            reason = await self._reason(stored.record)
            if reason is not None:
                self._report_abandoned(stored, reason)

    async def _reason(self, record: Record) -> str | None:
        """Why the claim is not resumed; None when it is, or is no longer what it was."""
        if record.operation not in self._resumers:
            return "no resumable operation of that name is registered here"
        found = await self._store.read(key_of(record))
        if found is None or found.record.token != record.token or found.arguments is not None:
            return None
        return "it was claimed without its arguments"

    def _report_abandoned(self, stored: StoredKey, reason: str) -> None:
        record = stored.record
        with self._lock:
            if record.token in self._reported:
                return
            self._reported[record.token] = None
            if len(self._reported) > REPORTED_LIMIT:
                del self._reported[next(iter(self._reported))]
            self._abandoned.reported += 1
        self._report.beside(
            EventKind.ABANDONED,
            key_of(record),
            record.operation,
            record.attempt,
            f"{reason}; the next retry takes it over",
        )

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self._summary, name, getattr(self._summary, name) + 1)

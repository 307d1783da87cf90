"""Records in this process: for tests, for trying things out, and as the plainest store to read.

Nothing survives the process and no other process sees it, so it never protects production.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from retrysafe import forks
from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.listing import RecordPage, RecordQuery
from retrysafe.core.machine import Trigger, condition_of, decide
from retrysafe.core.model import (
    NO_NOTE,
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Extension,
    OperatorAction,
    OperatorCommand,
    OperatorNote,
    Payload,
    Record,
    SettleAnswer,
    Settlement,
    State,
    Step,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.ports import Capabilities, ClaimResult, ExtendResult, SettleResult, Waits
from retrysafe.core.size import StoreSize, TableSize
from retrysafe.errors import StoreError
from retrysafe.reentry import ReentrantLock, new_lock, unheld
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.memory.outbox import MemoryOutbox
from retrysafe.stores.memory.packed import (
    PackedOutcome,
    Records,
    ending_of,
    payload_of,
    stored_outcome,
)

_logger: Final = logging.getLogger("retrysafe")
# The states whose outcome is replayed.
_REPLAYED: Final = (State.SUCCEEDED, State.FAILED)

# What operators did to the keys of a process ends with it.
_ACTIONS_KEPT: Final = 1_000


class MemoryStore:
    """A store in dictionaries, atomic by one lock."""

    def __init__(self, *, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._now_ms = now_ms
        self._lock = new_lock()
        self._records = Records()
        self._outcomes: dict[bytes, tuple[PackedOutcome, ...]] = {}
        # Endings whose record a signal's handler may have kept from being written.
        self._half_written: dict[bytes, PackedOutcome] = {}
        self._steps: dict[bytes, dict[str, Step]] = {}
        self._arguments: dict[bytes, Payload] = {}
        self._actions: deque[tuple[bytes, OperatorAction]] = deque(maxlen=_ACTIONS_KEPT)
        self.outbox = MemoryOutbox(self._locked, now_ms)
        # Whether this is the copy of a forked process, and nobody was told.
        self._is_copy = False
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Goes on with a copy of the records: a thread of the parent may hold the old lock."""
        self._lock = new_lock()
        self._is_copy = True

    @property
    def capabilities(self) -> Capabilities:
        """Never waits, so merging rows gains nothing beyond one lock per batch."""
        return Capabilities(Waits.NEVER, has_outbox=True)

    def _locked(self) -> ReentrantLock:
        return unheld(self._lock, "memory://")

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Applies a batch under the lock."""
        if self._is_copy:
            self._is_copy = False
            _logger.warning(
                "memory:// is used in a forked process: each process has keys of its own, so a "
                "retry that reaches another one runs again. Use sqlite:/// or postgresql:// for "
                "several workers"
            )
        with self._locked():
            now_ms = self._now_ms()
            # Endings first: an outcome that is there must not lose to a claim beside it.
            settled: list[SettleResult] = (
                [self._settle(item, now_ms) for item in settlements] if settlements else []
            )
            claimed = [self._claim(request, now_ms) for request in claims] if claims else []
        self.outbox.notify_staged()
        return claimed, settled

    def _claim(self, request: ClaimRequest, now_ms: int) -> ClaimResult:
        digest = request.key.digest
        record = self._records.find(digest)
        try:
            changed, answer = transitions.claim(record, request, now_ms)
        except StoreError as error:
            return error
        if changed is not None:
            if record is None or transitions.is_new_request(record, changed, answer.decision):
                # A new life of the key must not resume from the steps of an earlier one, nor with
                # its arguments; neither must a corrected request.
                self._steps.pop(digest, None)
                self._arguments.pop(digest, None)
            self._half_written.pop(digest, None)
            self._records[digest] = changed
            if request.arguments is not None:
                self._arguments.setdefault(digest, request.arguments)
        elif answer.decision is Decision.REPLAY:
            ending = self._ending(self._records[digest])
            answer.payload = None if ending is None else payload_of(ending)
        return answer

    def _settle(self, settlement: Settlement, now_ms: int) -> SettleAnswer:
        digest = settlement.key.digest
        changed, answer = transitions.settle(self._records.find(digest), settlement, now_ms)
        if changed is not None:
            # With a step stored, something has happened. None can come after the ending.
            changed.nothing_happened = changed.nothing_happened and not self._steps.get(digest)
            if settlement.payload is not None:
                # Before the record, and as often as it is asked for: a signal's handler may raise
                # in between.
                ending = ending_of(settlement, settlement.payload, changed, now_ms)
                half = self._half_written.get(digest)
                others = [item for item in self._outcomes.get(digest, ()) if item is not half]
                self._half_written[digest] = ending
                self._outcomes[digest] = (*others, ending)
                self.outbox.insert(settlement.entries, settlement.key, now_ms)
            self._records[digest] = changed
            self._half_written.pop(digest, None)
            if settlement.drops_arguments:
                self._arguments.pop(digest, None)
        return answer

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases under the lock, which nobody holds for long."""
        with self._locked():
            now_ms = self._now_ms()
            answers: list[ExtendResult] = []
            for item in extensions:
                digest = item.key.digest
                changed, answer = transitions.extend(self._records.find(digest), item, now_ms)
                if changed is not None:
                    self._records[digest] = changed
                answers.append(answer)
            return answers

    def _ending(self, record: Record) -> PackedOutcome | None:
        """What the attempt that settled the record left behind."""
        for ending in reversed(self._outcomes.get(record.digest, ())):
            if ending[0] == record.token:
                return ending
        return None

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result while the token holds the key."""
        with self._locked():
            digest = write.key.digest
            stored = self._steps.get(digest, {}).get(write.step.name)
            decision = transitions.record_step(
                self._records.find(digest),
                write,
                None if stored is None else stored.payload,
                self._now_ms(),
            )
            if stored is None and decision is Decision.APPLY:
                self._steps.setdefault(digest, {})[write.step.name] = write.step
            return decision

    def _record_of(self, key: Key) -> Record | None:
        """The record of exactly this key: one of another key with the same digest is not it."""
        record = self._records.find(key.digest)
        if record is None or record.text != key.text or record.caller != key.caller:
            return None
        return record

    async def read(self, key: Key, *, with_audit: bool = False) -> StoredKey | None:
        """The record of a key with its steps and the outcome to replay, or its whole audit."""
        with self._locked():
            record = self._record_of(key)
            if record is None:
                return None
            now_ms = self._now_ms()
            if with_audit:
                endings = self._outcomes.get(key.digest, ())
            else:
                ending = self._ending(record) if record.state in _REPLAYED else None
                endings = () if ending is None else (ending,)
            return StoredKey(
                record,
                condition_of(record, now_ms),
                now_ms,
                sorted(self._steps.get(key.digest, {}).values(), key=lambda step: step.position),
                [stored_outcome(ending) for ending in endings],
                self._arguments.get(key.digest),
            )

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending of the key's present life."""
        with self._locked():
            record = self._record_of(key)
            endings = self._outcomes.get(key.digest, ())
            if record is None or not endings:
                return None
            last = stored_outcome(endings[-1])
            return last if last.settled_at_ms >= record.first_claimed_at_ms else None

    async def list_records(self, query: RecordQuery) -> RecordPage:
        """Records for an operator, newest claim first."""
        with self._locked():
            now_ms = self._now_ms()
            return query.page_of(
                StoredKey(record, condition_of(record, now_ms), now_ms)
                for record in self._records.values()
            )

    # Recovery.

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """At most `limit` pending records whose lease has ended, longest ended first."""
        with self._locked():
            found = self._abandoned(self._records)
        found.sort(key=lambda item: (item.record.lease_ends_at_ms, item.record.digest))
        return found[:limit]

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """At most `limit` abandoned records of operations behind a digest that have arguments."""
        with self._locked():
            behind = self._abandoned(sorted(item for item in self._arguments if item > after))
            found = [item for item in behind if item.record.operation in operations][:limit]
            for item in found:
                item.arguments = self._arguments[item.record.digest]
            return found

    def _abandoned(self, digests: Iterable[bytes]) -> list[StoredKey]:
        now_ms = self._now_ms()
        return [
            StoredKey(record, condition, now_ms)
            for record in map(self._records.__getitem__, digests)
            if (condition := condition_of(record, now_ms)) is Condition.ABANDONED
        ]

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims a key that is abandoned by the owner of that token."""
        with self._locked():
            record = self._records.find(request.key.digest)
            changed, answer = transitions.take_over(record, request, held, self._now_ms())
            if changed is not None:
                self._records[request.key.digest] = changed
            return answer

    async def operate(
        self, key: Key, command: OperatorCommand, note: OperatorNote = NO_NOTE
    ) -> Decision:
        """Applies an operator's command."""
        with self._locked():
            now_ms = self._now_ms()
            record = self._record_of(key)
            changed, decision = transitions.operate(record, command, now_ms, note.seen)
            if changed is not None and record is not None:
                self._records[key.digest] = changed
                action = transitions.action_of(record, command, note, now_ms)
                self._actions.append((key.digest, action))
            return decision

    async def read_actions(self, key: Key) -> list[OperatorAction]:
        """What operators did to a key, oldest first; the last thousand of all keys."""
        with self._locked():
            return [action for digest, action in self._actions if digest == key.digest]

    async def sweep(self, limit: int) -> SweepReport:
        """Removes outlived keys with their steps, and outcomes past their audit window."""
        with self._locked():
            now_ms = self._now_ms()
            outlived = [
                digest
                for digest, record in self._records.items()
                if decide(Trigger.SWEEP, condition_of(record, now_ms)) is Decision.DELETE
            ]
            for digest in outlived[:limit]:
                del self._records[digest]
                self._steps.pop(digest, None)
                self._arguments.pop(digest, None)
            past = [
                (digest, ending)
                for digest, endings in self._outcomes.items()
                for ending in endings
                if now_ms >= ending[-1]
            ]
            for digest, ending in past[:limit]:
                left = tuple(item for item in self._outcomes[digest] if item is not ending)
                if left:
                    self._outcomes[digest] = left
                else:
                    del self._outcomes[digest]
            needless = [
                digest
                for digest in self._arguments
                if self._records[digest].state in (State.SUCCEEDED, State.FAILED)
            ]
            for digest in needless[:limit]:
                del self._arguments[digest]
            entries = self.outbox.sweep(limit, now_ms)
            has_more = max(len(outlived), len(past), len(needless)) > limit or entries == limit
            return SweepReport(
                min(limit, len(outlived)), min(limit, len(past)), has_more, entries=entries
            )

    async def measure(self) -> StoreSize:
        """How many rows there are; memory is not measured."""
        waiting, dead, oldest_seconds = await self.outbox.measure()
        return StoreSize(
            {
                "keys": TableSize(len(self._records)),
                "outcomes": TableSize(sum(map(len, list(self._outcomes.values())))),
                "steps": TableSize(sum(map(len, list(self._steps.values())))),
                "outbox": TableSize(len(self.outbox)),
            },
            outbox_waiting=waiting,
            outbox_dead=dead,
            outbox_oldest_seconds=oldest_seconds,
        )

    async def close(self) -> None:
        """Keeps everything: another object may share this store."""

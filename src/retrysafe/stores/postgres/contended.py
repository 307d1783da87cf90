"""Batches that meet somebody else: what can be written apart from an open transaction is.

Owns the keys that are known to be busy, the transaction that writes a batch without the rows that
are locked, and the write that compares a row with what a decision was made from. A user's
transaction holds a key in two ways: an atomic run has inserted or replaced its row, or a leased
attempt has written something there with `complete_in` or a joined step. Neither may hold up the
other rows of a batch for as long as that transaction lasts. Knows nothing of answers: whatever was
not written is answered in `claims` and `settlements`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

from retrysafe.core.keys.key import Key
from retrysafe.core.model import ClaimRequest, Payload, Record, Settlement
from retrysafe.errors import StoreUnavailable
from retrysafe.stores.postgres import rows
from retrysafe.stores.postgres.atomic import lock_number
from retrysafe.stores.postgres.drivers.port import Locked
from retrysafe.stores.postgres.outbox import PostgresOutbox
from retrysafe.stores.postgres.rows import Written
from retrysafe.stores.postgres.schema import LOCK_WAIT
from retrysafe.stores.postgres.statements import Fetch, Statements

# Whether locked rows are skipped, and claims and endings to be written together.
Part = tuple[bool, Collection[ClaimRequest], Collection[Settlement]]
# Writes claims and endings by one statement.
Write = Callable[[Fetch, Collection[ClaimRequest], Collection[Settlement]], Awaitable[Written]]

# For so long a busy key is skipped at once, instead of holding up the batch that it comes in. Who
# waits for it asks twice a second.
BUSY_SECONDS: Final = 5.0
# More than the open transactions of most servers. A key that is forgotten costs a wait again.
BUSY_LIMIT: Final = 1000
# Rivals that keep changing a row between our read and our write make us read again. Each round
# means that somebody else made progress, so a bound only guards against a bug.
ROUNDS_LIMIT: Final = 50

# What `skip_locked` says of a row.
_NEW: Final = 1
_ENDED: Final = 2
_HELD: Final = 3


def being_written(key: Key) -> StoreUnavailable:
    """The answer for a row that somebody else is at."""
    return StoreUnavailable("the record is being written", key=key.text)


def kept_changing(key: Key) -> StoreUnavailable:
    """The answer for a row that was another one in each of the rounds."""
    return StoreUnavailable("the record changed under us again and again", key=key.text)


class BusyKeys:
    """The keys that a transaction held when they were last asked for."""

    def __init__(self) -> None:
        # When each key was last seen busy.
        self._busy: dict[bytes, float] = {}

    def knows_any(self, digests: set[bytes]) -> bool:
        """Whether one of them was seen busy a moment ago."""
        return bool(self._busy) and not self._busy.keys().isdisjoint(digests)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._busy

    def note(self, digests: Iterable[bytes]) -> None:
        """Remembers keys that are busy now."""
        now = time.monotonic()
        for digest in digests:
            # Taken out first, so that those seen longest ago come first.
            self._busy.pop(digest, None)
            self._busy[digest] = now
        self._forget(now - BUSY_SECONDS)

    def free(self, digest: bytes) -> None:
        """Forgets a key that nobody holds any more."""
        self._busy.pop(digest, None)

    def parted(
        self, claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> list[Part]:
        """The rows that are to be written as they are, and those of busy keys."""
        self._forget(time.monotonic() - BUSY_SECONDS)
        if not self._busy:
            return [(False, claims, endings)]
        busy = self._busy.copy()
        parts: list[Part] = []
        for skips_locked in (False, True):
            requests = [item for item in claims if (item.key.digest in busy) is skips_locked]
            ends = [item for item in endings if (item.key.digest in busy) is skips_locked]
            if requests or ends:
                parts.append((skips_locked, requests, ends))
        return parts

    def _forget(self, before: float) -> None:
        for digest, seen in self._busy.copy().items():
            if seen > before and len(self._busy) <= BUSY_LIMIT:
                break
            self._busy.pop(digest, None)


class Contended:
    """Writes what one plain statement cannot."""

    def __init__(self, statements: Statements, outbox: PostgresOutbox) -> None:
        self._statements = statements
        self._outbox = outbox
        self.busy_keys = BusyKeys()

    def is_plain(self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]) -> bool:
        """Whether one statement takes the batch: one row per key, and none that needs more."""
        digests = {request.key.digest for request in claims}
        digests.update(item.key.digest for item in settlements)
        return (
            len(digests) == len(claims) + len(settlements)
            and not any(item.entries or item.drops_arguments for item in settlements)
            and all(request.arguments is None for request in claims)
            and not self.busy_keys.knows_any(digests)
        )

    async def write(
        self,
        claims: Sequence[ClaimRequest],
        settlements: Sequence[Settlement],
        *,
        is_locked: bool = False,
    ) -> Written:
        """Writes the first row of each key; what is known to be locked is skipped at once.

        Settlements come first: an outcome that is there must not lose to a claim beside it.
        """
        endings: dict[bytes, Settlement] = {}
        for item in settlements:
            endings.setdefault(item.key.digest, item)
        new: dict[bytes, ClaimRequest] = {}
        for request in claims:
            if request.key.digest not in endings:
                new.setdefault(request.key.digest, request)
        written = Written({}, set())
        for write, requests, ends in self._statements_of(new.values(), endings.values()):
            parts = [(True, requests, ends)] if is_locked else self.busy_keys.parted(requests, ends)
            for part in parts:
                found = await self._write_part(write, *part)
                written.admissions.update(found.admissions)
                written.ended.update(found.ended)
                if found.ended and any(item.entries for item in ends):
                    self._outbox.hints.tell()
        return written

    def _statements_of(
        self, claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> Iterator[tuple[Write, Collection[ClaimRequest], Collection[Settlement]]]:
        """What brings more than a row goes in statements of its own.

        Those are endings with their entries or the arguments that they drop, and claims with their
        arguments.
        """
        staged = [item for item in endings if item.entries or item.drops_arguments]
        if staged:
            yield self._settle_staged, (), staged
            endings = [item for item in endings if not (item.entries or item.drops_arguments)]
        resumable = [request for request in claims if request.arguments is not None]
        if resumable:
            yield self._claim_resumable, resumable, ()
            claims = [request for request in claims if request.arguments is None]
        if claims or endings:
            yield rows.write, claims, endings

    async def _settle_staged(
        self, fetch: Fetch, _claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> Written:
        return Written({}, await self._outbox.settle_staged(fetch, endings))

    async def _claim_resumable(
        self, fetch: Fetch, claims: Collection[ClaimRequest], _endings: Collection[Settlement]
    ) -> Written:
        return await rows.write_resumable(fetch, claims)

    async def _write_part(
        self,
        write: Write,
        skips_locked: bool,
        claims: Collection[ClaimRequest],
        endings: Collection[Settlement],
    ) -> Written:
        if not skips_locked:
            try:
                return await write(self._statements.fetch, claims, endings)
            except Locked:
                pass  # The rows beside it have waited with it, once; they go on without it.
        return await self._write_unlocked(write, claims, endings)

    async def _write_unlocked(
        self, write: Write, claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> Written:
        """Writes what waits for no user's transaction, and notes the rest as busy."""
        found: set[tuple[int, bytes]] = set()
        schema_name = self._statements.schema_name

        async def flow(fetch: Fetch) -> Written:
            seen = await fetch(
                "skip_locked",
                [request.key.digest for request in claims],
                [lock_number(schema_name, request.key.digest) for request in claims],
                [item.key.digest for item in endings],
                [item.token for item in endings],
            )
            found.clear()
            found.update((kind, bytes(digest)) for kind, digest in seen)
            new = [item for item in claims if (_NEW, item.key.digest) in found]
            held = [item for item in endings if (_HELD, item.key.digest) in found]
            return await write(fetch, new, held) if new or held else Written({}, set())

        written = await self._statements.transact(flow)
        busy = {item.key.digest for item in claims} | {item.key.digest for item in endings}
        for kind, digest in found:
            busy.discard(digest)
            if kind != _ENDED:  # Of such a row it is not known yet whether it can be replaced.
                self.busy_keys.free(digest)
        self.busy_keys.note(busy)
        return written

    # One row, by comparing.

    async def confirm(self, record: Record) -> bool:
        """Writes a record as it is, before anybody is told that it stands; False when it changed.

        A commit that waits for a synchronous standby can be ended by a cancelled statement or a
        restart. It is visible then and may be on this server alone: after a failover nobody knows
        of the claim or the outcome. A commit that comes after it waits for both.
        """
        return await self.replace(record, record, lock_wait=LOCK_WAIT)

    async def replace(
        self,
        old: Record,
        new: Record,
        *,
        is_new_request: bool = False,
        arguments: Payload | None = None,
        lock_wait: str | None = None,
    ) -> bool:
        """Writes a decided transition; False when the row is no longer the old one.

        Raises `Locked` when somebody else's transaction has the row for longer than the wait.
        """
        ((count,),) = await self._statements.fetch(
            "replace_record",
            *rows.replacement(
                old, new, is_new_request=is_new_request, arguments=arguments, lock_wait=lock_wait
            ),
        )
        return bool(count)

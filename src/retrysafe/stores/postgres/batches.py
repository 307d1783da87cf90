"""The hot path of the PostgreSQL store: many claims and settlements in one statement.

Owns what follows when a row of a batch was skipped: that row is read, decided by the core's table
with the server's clock, and written by comparing with what was read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from retrysafe.core import transitions
from retrysafe.core.keys.canonical import DIGEST_BYTES
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Payload,
    Record,
    Settlement,
)
from retrysafe.core.ports import ClaimResult, SettleResult
from retrysafe.errors import DigestCollision, StoreRejected, StoreUnavailable
from retrysafe.stores.postgres import packing, takeovers
from retrysafe.stores.postgres.busy_keys import BusyKeys, Fetch, Write, Written
from retrysafe.stores.postgres.drivers.port import Locked
from retrysafe.stores.postgres.outbox import PostgresOutbox
from retrysafe.stores.postgres.packing import split
from retrysafe.stores.postgres.reading import Found, Reader
from retrysafe.stores.postgres.rows import admitted, in_flight, replacement
from retrysafe.stores.postgres.schema import LOCK_WAIT
from retrysafe.stores.postgres.takeovers import Takeover
from retrysafe.stores.postgres.unsettled import APPLIED, NO_RECORD, ROUNDS_LIMIT, UnsettledEndings

# How long new keys are remembered against replays: a few retries among new keys must not make
# those pay for a look first, and one full batch of retries is enough to look.
BALANCE_LIMIT: Final = 32

# For a row that was busy a moment ago: a look at its lock, and no wait.
_NO_WAIT: Final = "1ms"


def _is_plain_ending(item: Settlement) -> bool:
    return not item.entries


def _is_plain_claim(request: ClaimRequest) -> bool:
    return request.arguments is None


def _all_admitted(claims: Sequence[ClaimRequest], now_ms: int) -> list[ClaimResult]:
    """The answers to claims that all met no row; those with equal leases share one."""
    answers: dict[int, ClaimResult] = {}
    results: list[ClaimResult] = []
    for request in claims:
        answer = answers.get(request.lease_ms)
        if answer is None:
            answer = answers[request.lease_ms] = admitted(request, now_ms)
        results.append(answer)
    return results


class Batches:
    """Claims and settlements over one statement port."""

    __slots__ = ("_balance", "_busy_keys", "_fetch", "_outbox", "_reader", "_unsettled")

    def __init__(
        self, fetch: Fetch, reader: Reader, outbox: PostgresOutbox, busy_keys: BusyKeys
    ) -> None:
        self._fetch = fetch
        self._reader = reader
        self._outbox = outbox
        self._busy_keys = busy_keys
        self._unsettled = UnsettledEndings(reader, busy_keys, self._end, self.confirm)
        # By how much the last claims that met a row outnumber those of new keys, within the limit.
        self._balance = -BALANCE_LIMIT

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Applies a batch; raises `StoreRejected` when a row of it cannot be taken."""
        # An ending does not wait for a look that it does not need.
        if self._balance > 0 and not settlements:
            return await self._read_and_claim(claims), []
        return await self._write(claims, settlements)

    async def _read_and_claim(self, claims: Sequence[ClaimRequest]) -> list[ClaimResult]:
        """Reads first, which is all that replays need, and then writes the new keys.

        A key that gets its row in between is found out by the write, as ever.
        """
        found = await self._reader.read_payloads([request.key.digest for request in claims])
        new = [request for request in claims if request.key.digest not in found]
        self._weigh(len(found))
        results: list[ClaimResult | None] = [None] * len(claims)
        if new:
            written, _ = await self._write(new, [])
            answers = iter(written)
            results = [None if request.key.digest in found else next(answers) for request in claims]
        return await self._answer_rest(claims, results, found)

    def _weigh(self, met: int) -> None:
        """Counts claims that met a row, or those of new keys as a negative number."""
        self._balance = max(-BALANCE_LIMIT, min(BALANCE_LIMIT, self._balance + met))

    async def _write(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Writes first, which is all that new keys and endings need."""
        digests = {request.key.digest for request in claims}
        digests.update([item.key.digest for item in settlements])
        if (
            len(digests) < len(claims) + len(settlements)
            or not all(map(_is_plain_ending, settlements))
            or not all(map(_is_plain_claim, claims))
            or self._busy_keys.knows_any(digests)
        ):
            return await self._commit_mixed(claims, settlements)
        try:
            now_ms, claimed, settled = await packing.write(self._fetch, claims, settlements)
        except Locked:
            return await self._commit_mixed(claims, settlements, is_locked=True)
        if len(settled) == len(settlements) * DIGEST_BYTES:
            # What nearly every batch is: all attempts are ended, and all keys are new.
            endings: list[SettleResult] = [APPLIED] * len(settlements)
        else:
            written = split(settled)
            endings = await self._unsettled.answered(
                settlements,
                [APPLIED if item.key.digest in written else None for item in settlements],
            )
        if len(claimed) == len(claims) * DIGEST_BYTES:
            self._weigh(-len(claims))
            return _all_admitted(claims, now_ms), endings
        admissions = dict.fromkeys(split(claimed), now_ms)
        return await self._answer_claims(claims, admissions), endings

    async def _commit_mixed(
        self,
        claims: Sequence[ClaimRequest],
        settlements: Sequence[Settlement],
        *,
        is_locked: bool = False,
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Writes at most one row per key at once; further rows for a key follow one by one.

        Settlements come first: an outcome that is there must not lose to a claim beside it. What is
        known to be locked is skipped at once.
        """
        endings: dict[bytes, Settlement] = {}
        for item in settlements:
            endings.setdefault(item.key.digest, item)
        first_claims: dict[bytes, ClaimRequest] = {}
        for request in claims:
            if request.key.digest not in endings:
                first_claims.setdefault(request.key.digest, request)
        admissions, written = await self._write_apart(
            first_claims.values(), endings.values(), is_locked=is_locked
        )
        settled: list[SettleResult | None] = []
        for item in settlements:
            digest = item.key.digest
            # Each write answers the first row of its key; a second one asks for itself.
            is_written = endings.pop(digest, None) is not None and digest in written
            settled.append(APPLIED if is_written else None)
        ended = await self._unsettled.answered(settlements, settled)
        return await self._answer_claims(claims, admissions), ended

    async def _end(self, settlement: Settlement) -> bool:
        """Writes an ending by itself; False when its row is somebody else's by now, or locked."""
        return bool((await self._write_apart([], [settlement]))[1])

    async def _write_apart(
        self,
        claims: Collection[ClaimRequest],
        endings: Collection[Settlement],
        *,
        is_locked: bool = False,
    ) -> Written:
        """Writes each kind of row by its own statement, and busy keys apart from the others.

        Gives the instants at which keys were admitted, by digest, and the digests that were ended.
        """
        admissions: dict[bytes, int] = {}
        written: set[bytes] = set()
        for write, requests, ends in self._statements_of(claims, endings):
            parts = (
                [(True, requests, ends)] if is_locked else self._busy_keys.parted(requests, ends)
            )
            for skips_locked, some_requests, some_ends in parts:
                if skips_locked:
                    found = await self._busy_keys.write(write, some_requests, some_ends)
                else:
                    try:
                        found = await write(self._fetch, some_requests, some_ends)
                    except Locked:
                        found = await self._busy_keys.write(write, some_requests, some_ends)
                admissions |= found[0]
                written |= found[1]
                if found[1] and write == self._settle_staged:
                    self._outbox.hints.tell()
        return admissions, written

    def _statements_of(
        self, claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> Iterator[tuple[Write, Collection[ClaimRequest], Collection[Settlement]]]:
        """What brings more than a row goes in statements of its own.

        Those are endings with their entries, and claims with their arguments.
        """
        staged = [item for item in endings if item.entries]
        if staged:
            yield self._settle_staged, (), staged
            endings = [item for item in endings if not item.entries]
        resumable = [request for request in claims if request.arguments is not None]
        if resumable:
            yield self._claim_resumable, resumable, ()
            claims = [request for request in claims if request.arguments is None]
        if claims or endings:
            yield self._write_plain, claims, endings

    async def _settle_staged(
        self, fetch: Fetch, _claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> Written:
        return {}, await self._outbox.settle_staged(fetch, endings)

    async def _write_plain(
        self, fetch: Fetch, claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> Written:
        now_ms, claimed, ended = await packing.write(fetch, claims, endings)
        return dict.fromkeys(split(claimed), now_ms), split(ended)

    async def _claim_resumable(
        self, fetch: Fetch, claims: Collection[ClaimRequest], _endings: Collection[Settlement]
    ) -> Written:
        return await packing.claim_resumable(fetch, claims), set()

    async def _answer_claims(
        self, claims: Sequence[ClaimRequest], admissions: dict[bytes, int]
    ) -> list[ClaimResult]:
        """Admits the keys that were written, and looks at the others together."""
        results: list[ClaimResult | None] = []
        for request in claims:
            # A second claim of the key in the same batch must meet the first one's record.
            admitted_at_ms = admissions.pop(request.key.digest, None)
            results.append(None if admitted_at_ms is None else admitted(request, admitted_at_ms))
        digests = [
            request.key.digest
            for request, result in zip(claims, results, strict=True)
            if result is None
        ]
        # Those that were read before have been counted already.
        self._weigh(2 * len(digests) - len(claims))
        found = await self._reader.read_payloads(digests) if digests else {}
        return await self._answer_rest(claims, results, found)

    async def _answer_rest(
        self,
        claims: Sequence[ClaimRequest],
        results: Sequence[ClaimResult | None],
        found: dict[bytes, Found],
    ) -> list[ClaimResult]:
        """Answers the claims that are not answered yet, by what was read of their keys.

        Claims of one key are answered one after the other.
        """
        decided = list(results)
        taken_over: dict[bytes, Takeover | None] = {}
        for position, request in enumerate(claims):
            digest = request.key.digest
            known = found.get(digest) if decided[position] is None else None
            if known is None or digest in taken_over:
                continue  # Not there, or judged after the earlier claim that wants to change it.
            judged = takeovers.judged(request, known, position)
            if not isinstance(judged, Takeover):
                decided[position] = judged
            else:
                # What is busy or brings arguments goes alone, and later claims of its key after it.
                is_plain = request.arguments is None and not self._busy_keys.is_busy(digest)
                taken_over[digest] = judged if is_plain else None
        together = {digest: item for digest, item in taken_over.items() if item is not None}
        lock_wait = LOCK_WAIT
        if len(together) > 1 and await self._take_over(together, claims, decided, found):
            lock_wait = _NO_WAIT
        answers: list[ClaimResult] = []
        claimed: set[bytes] = set()
        for request, result in zip(claims, decided, strict=True):
            if result is not None:
                answers.append(result)
                continue
            digest = request.key.digest
            known = found.get(digest)
            if digest in claimed:
                known = await self._reader.read_payload(digest)
            claimed.add(digest)
            answers.append(await self._claim_existing(request, known, lock_wait))
            if self._busy_keys.is_busy(digest):
                # The batch has waited once, and its other rows with it. That is enough.
                lock_wait = _NO_WAIT
        return answers

    async def _take_over(
        self,
        taken_over: dict[bytes, Takeover],
        claims: Sequence[ClaimRequest],
        decided: list[ClaimResult | None],
        found: dict[bytes, Found],
    ) -> bool:
        """Takes keys over together, and answers those claims; says whether it has waited in vain.

        The other claims of these keys come after a rival, or after the one that was answered, so
        what was found for them is read again.
        """
        taken, has_waited = await takeovers.write(self._fetch, taken_over.values())
        if taken is None:
            return has_waited
        for digest in taken:
            decided[taken_over[digest].position] = taken_over[digest].answer
        late = {
            request.key.digest
            for request, result in zip(claims, decided, strict=True)
            if result is None and request.key.digest in taken_over
        }
        if late:
            found |= await self._reader.read_payloads(list(late))
        return has_waited

    async def _claim_existing(
        self, request: ClaimRequest, found: Found | None, lock_wait: str
    ) -> ClaimResult:
        """Claims a key that has a row: by the table, and by comparing what is replaced."""
        digest = request.key.digest
        for _ in range(ROUNDS_LIMIT):
            try:
                if found is None:
                    if self._busy_keys.is_busy(digest):
                        return in_flight()  # In a transaction that nobody else can look into.
                    # Swept away in between, so the key is free again.
                    admissions, _ = await self._write_apart([request], [])
                    for now_ms in admissions.values():
                        return admitted(request, now_ms)
                else:
                    record, payload, now_ms = found
                    changed, answer = transitions.claim(record, request, now_ms)
                    arguments = request.arguments
                    if answer.decision is Decision.CONFIRM:
                        # Written as it is, see `confirm`.
                        changed, arguments = record, None
                    if changed is None:
                        answer.payload = payload if answer.decision is Decision.REPLAY else None
                        return answer
                    if await self.replace(
                        record,
                        changed,
                        is_new_request=transitions.is_new_request(record, changed, answer.decision),
                        arguments=arguments,
                        lock_wait=_NO_WAIT if self._busy_keys.is_busy(digest) else lock_wait,
                    ):
                        return answer
            except Locked:
                self._busy_keys.note([digest])
                return in_flight()  # Its owner, or another one, is writing it.
            except (StoreRejected, DigestCollision) as error:
                return error
            found = await self._reader.read_payload(digest)
        raise StoreUnavailable("the record changed under us again and again", key=request.key.text)

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims a key that is abandoned by the owner of that token, by comparing as ever."""
        for _ in range(ROUNDS_LIMIT):
            record, now_ms = await self._reader.read(request.key.digest) or NO_RECORD
            changed, answer = transitions.take_over(record, request, held, now_ms)
            if answer.decision is Decision.CONFIRM:
                changed = record
            if changed is None or record is None:
                return answer
            try:
                if await self.replace(record, changed, lock_wait=LOCK_WAIT):
                    return answer
            except Locked:
                # Somebody is writing it, the owner who was given up perhaps.
                return ClaimAnswer(Decision.LOST, Condition.RUNNING)
        raise StoreUnavailable("the record changed under us again and again", key=request.key.text)

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
        ((count,),) = await self._fetch(
            "replace_record",
            *replacement(
                old, new, is_new_request=is_new_request, arguments=arguments, lock_wait=lock_wait
            ),
        )
        return bool(count)

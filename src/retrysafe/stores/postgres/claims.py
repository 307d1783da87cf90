"""Claims, answered: keys that were free, and what the table says of the others.

Where the table is spelled out in SQL: a claim of a key that has no row is admitted (`commit` and
`claim_one` in claims.sql). A claim that meets a row is decided here by `core.transitions`, with the
server's clock, and written by comparing with what was read. The store suite's `table` cases prove
that both say the same.

Owns also the guess whether the next claims meet rows: they are then read before anything is
written (decision 29).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from retrysafe.core import transitions
from retrysafe.core.model import ClaimAnswer, ClaimRequest, Condition, Decision, Record
from retrysafe.core.ports import ClaimResult
from retrysafe.errors import DigestCollision, StoreRejected
from retrysafe.stores.postgres.contended import ROUNDS_LIMIT, Contended, kept_changing
from retrysafe.stores.postgres.drivers.port import Locked
from retrysafe.stores.postgres.reading import NO_RECORD, Found, Reader
from retrysafe.stores.postgres.rows import columns_of, in_flight, split
from retrysafe.stores.postgres.schema import LOCK_WAIT
from retrysafe.stores.postgres.statements import Fetch, Statements

# How long new keys are remembered against replays: a few retries among new keys must not make
# those pay for a look first, and one full batch of retries is enough to look.
BALANCE_LIMIT: Final = 32

# For a row that was busy a moment ago: a look at its lock, and no wait.
_NO_WAIT: Final = "1ms"


class Takeover(NamedTuple):
    """What the table makes of a record for a claim, until it is written."""

    old: Record
    new: Record
    answer: ClaimAnswer
    # Of the claim in its batch.
    position: int


def judged(request: ClaimRequest, found: Found, position: int) -> ClaimResult | Takeover:
    """The answer of the table, or what it writes for the claim at that position of its batch."""
    record, payload, now_ms = found
    try:
        changed, answer = transitions.claim(record, request, now_ms)
    except DigestCollision as error:
        return error
    if answer.decision is Decision.CONFIRM:
        # Written as it is, see `Contended.confirm`.
        changed = record
    if changed is not None:
        return Takeover(record, changed, answer, position)
    if answer.decision is Decision.REPLAY:
        answer.payload = payload
    return answer


class Claims:
    """Answers claims."""

    def __init__(self, statements: Statements, reader: Reader, contended: Contended) -> None:
        self._statements = statements
        self._reader = reader
        self._contended = contended
        # By how much the last claims that met a row outnumber those of new keys, within the limit.
        self.balance = -BALANCE_LIMIT

    @property
    def mostly_meet_rows(self) -> bool:
        """Whether reading the next claims' keys first is likely to be all that they need."""
        return self.balance > 0

    def _weigh(self, met: int) -> None:
        """Counts claims that met a row, or those of new keys as a negative number."""
        self.balance = max(-BALANCE_LIMIT, min(BALANCE_LIMIT, self.balance + met))

    async def read(self, claims: Sequence[ClaimRequest]) -> dict[bytes, Found]:
        """What is there under the keys of these claims, by digest."""
        return await self._reader.read_payloads([request.key.digest for request in claims])

    async def answered(
        self,
        claims: Sequence[ClaimRequest],
        admissions: dict[bytes, int],
        found: dict[bytes, Found],
    ) -> list[ClaimResult]:
        """The answers to the claims of a batch, of which those keys were admitted.

        What was found under other keys before the batch was written need not be read again.
        """
        left = dict(admissions)
        results: list[ClaimResult | None] = []
        for request in claims:
            # A second claim of the key in the same batch must meet the first one's record.
            now_ms = left.pop(request.key.digest, None)
            results.append(None if now_ms is None else transitions.admitted(request, now_ms))
        self._weigh(len(claims) - 2 * len(admissions))
        unread = [
            request.key.digest
            for request, result in zip(claims, results, strict=True)
            if result is None and request.key.digest not in found
        ]
        if unread:
            found = found | await self._reader.read_payloads(unread)
        return await self._answer_rest(claims, results, found)

    async def _answer_rest(
        self,
        claims: Sequence[ClaimRequest],
        results: list[ClaimResult | None],
        found: dict[bytes, Found],
    ) -> list[ClaimResult]:
        """Answers the claims that are not answered yet, by what was read of their keys.

        Claims of one key are answered one after the other.
        """
        together = self._judge(claims, results, found)
        lock_wait = LOCK_WAIT
        if len(together) > 1 and await self._take_over_all(together, claims, results, found):
            lock_wait = _NO_WAIT
        answers: list[ClaimResult] = []
        claimed: set[bytes] = set()
        for request, result in zip(claims, results, strict=True):
            if result is not None:
                answers.append(result)
                continue
            digest = request.key.digest
            known = found.get(digest)
            if digest in claimed:
                known = await self._reader.read_payload(digest)
            claimed.add(digest)
            answers.append(await self._claim(request, known, lock_wait))
            if digest in self._contended.busy_keys:
                # The batch has waited once, and its other rows with it. That is enough.
                lock_wait = _NO_WAIT
        return answers

    def _judge(
        self,
        claims: Sequence[ClaimRequest],
        results: list[ClaimResult | None],
        found: dict[bytes, Found],
    ) -> dict[bytes, Takeover]:
        """Fills in the answers that change nothing; what can be replaced together, by digest."""
        taken_over: dict[bytes, Takeover | None] = {}
        for position, request in enumerate(claims):
            digest = request.key.digest
            known = found.get(digest) if results[position] is None else None
            if known is None or digest in taken_over:
                continue  # Not there, or judged after the earlier claim that wants to change it.
            verdict = judged(request, known, position)
            if not isinstance(verdict, Takeover):
                results[position] = verdict
            else:
                # What is busy or brings arguments goes alone, and later claims of its key after it.
                is_plain = request.arguments is None and digest not in self._contended.busy_keys
                taken_over[digest] = verdict if is_plain else None
        return {digest: item for digest, item in taken_over.items() if item is not None}

    async def _take_over_all(
        self,
        takeovers: dict[bytes, Takeover],
        claims: Sequence[ClaimRequest],
        results: list[ClaimResult | None],
        found: dict[bytes, Found],
    ) -> bool:
        """Takes keys over together, and answers those claims; says whether it has waited in vain.

        The other claims of these keys come after a rival, or after the one that was answered, so
        what was found for them is read again.
        """
        taken, has_waited = await write_takeovers(self._statements.fetch, takeovers.values())
        if taken is None:
            return has_waited
        for digest in taken:
            results[takeovers[digest].position] = takeovers[digest].answer
        late = {
            request.key.digest
            for request, result in zip(claims, results, strict=True)
            if result is None and request.key.digest in takeovers
        }
        if late:
            found |= await self._reader.read_payloads(list(late))
        return has_waited

    async def _claim(
        self, request: ClaimRequest, found: Found | None, lock_wait: str
    ) -> ClaimResult:
        """A claim of its own, until the row was written or says why not."""
        digest, contended = request.key.digest, self._contended
        for _ in range(ROUNDS_LIMIT):
            try:
                if found is None:
                    if digest in contended.busy_keys:
                        return in_flight()  # In a transaction that nobody else can look into.
                    # Swept away in between, so the key is free again.
                    for now_ms in (await contended.write([request], [])).admissions.values():
                        return transitions.admitted(request, now_ms)
                else:
                    verdict = judged(request, found, 0)
                    if not isinstance(verdict, Takeover):
                        return verdict
                    old, new, answer, _ = verdict
                    # What only confirms brings no arguments: they came with what it confirms.
                    is_confirmed = answer.decision is Decision.CONFIRM
                    if await contended.replace(
                        old,
                        new,
                        is_new_request=transitions.is_new_request(old, new, answer.decision),
                        arguments=None if is_confirmed else request.arguments,
                        lock_wait=_NO_WAIT if digest in contended.busy_keys else lock_wait,
                    ):
                        return answer
            except Locked:
                contended.busy_keys.note([digest])
                return in_flight()  # Its owner, or another one, is writing it.
            except StoreRejected as error:
                return error
            found = await self._reader.read_payload(digest)
        raise kept_changing(request.key)

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
                if await self._contended.replace(record, changed, lock_wait=LOCK_WAIT):
                    return answer
            except Locked:
                # Somebody is writing it, the owner who was given up perhaps.
                return ClaimAnswer(Decision.LOST, Condition.RUNNING)
        raise kept_changing(request.key)


async def write_takeovers(
    fetch: Fetch, takeovers: Iterable[Takeover]
) -> tuple[set[bytes] | None, bool]:
    """Replaces the records that are still what was judged: their digests, and whether it waited.

    None when nothing could be written together.
    """
    columns = columns_of(map(_takeover_row, takeovers))
    has_waited = False
    try:
        try:
            ((replaced,),) = await fetch("replace_records", *columns)
        except Locked:
            # Everybody in the batch has waited once; whom nobody holds up goes on without the rest.
            has_waited = True
            ((replaced,),) = await fetch("replace_records_unlocked", *columns)
    except (Locked, StoreRejected):
        return None, has_waited
    return split(bytes(replaced)), has_waited


def _takeover_row(takeover: Takeover) -> tuple[Any, ...]:
    """The pending record, and what must still be there."""
    old, new, answer, _ = takeover
    return (
        old.digest,
        new.operation,
        new.rule,
        new.fingerprint,
        new.token,
        new.attempt,
        new.first_claimed_at_ms,
        new.claimed_at_ms,
        new.lease_ends_at_ms,
        new.owner,
        transitions.is_new_request(old, new, answer.decision),
        old.token,
        old.state.value,
        old.attempt,
        old.lease_ends_at_ms,
        old.expires_at_ms,
        new.releases,
        new.is_uncertain,
        new.corrected_at_ms,
        old.nothing_happened,
    )

"""Verbs for one row at a time, so that a case reads as what happens to a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from retrysafe.core.keys.key import Caller, Key
from retrysafe.core.listing import RecordPage, RecordQuery
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    ExtendAnswer,
    Extension,
    Fingerprint,
    OperatorCommand,
    OperatorNote,
    Payload,
    Seen,
    SettleAnswer,
    SettleKind,
    Settlement,
    Step,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.ports import ClaimResult, ExtendResult, SettleResult, Store
from retrysafe.errors import StoreError
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.clock import ManualClock

LEASE_MS: Final = 30_000
ACTIVE_MS: Final = 3_600_000
# Longer than the active window, as every sensible policy has it.
AUDIT_MS: Final = 3 * ACTIVE_MS

# What the cases' requests ask for, and what a different request asks for, under one rule.
ASKED: Final = Fingerprint(1, b"asked asked ask.")
OTHER: Final = Fingerprint(1, b"other other oth.")

RESULT: Final = Payload("json.1", b"", b'{"charged": 1000}')
FAILURE: Final = Payload("failure.1", b"", b'{"type": "CardDeclined"}')

# Only a store that hangs lets a renewal take so long.
PATIENCE_SECONDS: Final = 30.0

ENDINGS: Final = (SettleKind.COMPLETE, SettleKind.FAIL, SettleKind.RELEASE)
# The conditions in which a key has a row.
PRESENT: Final[tuple[Condition, ...]] = tuple(
    item for item in Condition if item is not Condition.ABSENT
)

_ENDING_OF: Final = {
    Condition.SUCCEEDED: SettleKind.COMPLETE,
    Condition.FAILED: SettleKind.FAIL,
    Condition.RELEASED: SettleKind.RELEASE,
    Condition.OUTLIVED: SettleKind.COMPLETE,
}


def kind_name(kind: SettleKind) -> str:
    """How a kind is shown in the name of a case."""
    return kind.name.lower()


def key_of(text: str, *, caller: Caller = "caller-1") -> Key:
    """A key of the cases' usual caller."""
    return Key(text, caller=caller)


KEY: Final = key_of("key-1")


def request(
    key: Key = KEY,
    token: bytes | None = None,
    *fingerprints: Fingerprint,
    lease_ms: int = LEASE_MS,
    operation: str = "charge",
    owner: str = "owner-1",
    arguments: Payload | None = None,
    takes_corrections: bool = False,
) -> ClaimRequest:
    """A claim, with a fresh token unless one is given."""
    return ClaimRequest(
        key,
        fingerprints or (ASKED,),
        token or mint_token(),
        lease_ms,
        operation,
        owner,
        arguments,
        takes_corrections,
    )


def settlement(
    kind: SettleKind,
    key: Key,
    token: bytes,
    *,
    payload: Payload | None = RESULT,
    active_ms: int = ACTIVE_MS,
    audit_ms: int = AUDIT_MS,
    nothing_happened: bool = False,
) -> Settlement:
    """An owner's ending."""
    return Settlement(
        kind,
        key,
        token,
        payload,
        active_ms=active_ms,
        audit_ms=audit_ms,
        nothing_happened=nothing_happened,
    )


class Probe:
    """A store, its clock, and the way to drive it."""

    def __init__(self, store: Store, clock: ManualClock, run: Callable[[Any], Any]) -> None:
        self.store = store
        self.clock = clock
        self._run = run

    # Batches and single rows.

    def commit(
        self, claims: Sequence[ClaimRequest] = (), settlements: Sequence[Settlement] = ()
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """One batch; asserts that every row has an answer."""
        claimed, settled = self._run(self.store.commit(claims, settlements))
        assert (len(claimed), len(settled)) == (len(claims), len(settlements))
        return claimed, settled

    def ask(self, wish: ClaimRequest) -> ClaimAnswer:
        """A claim as it is; raises the row's error."""
        return answered(self.commit([wish])[0][0])

    def claim(
        self,
        key: Key = KEY,
        token: bytes | None = None,
        *fingerprints: Fingerprint,
        lease_ms: int = LEASE_MS,
        arguments: Payload | None = None,
    ) -> ClaimAnswer:
        """A claim in the usual words."""
        wish = request(key, token, *fingerprints, lease_ms=lease_ms, arguments=arguments)
        return self.ask(wish)

    def hold(
        self,
        key: Key = KEY,
        *fingerprints: Fingerprint,
        lease_ms: int = LEASE_MS,
        arguments: Payload | None = None,
    ) -> bytes:
        """Claims a key that is free; gives the token of its new owner."""
        token = mint_token()
        answer = self.claim(key, token, *fingerprints, lease_ms=lease_ms, arguments=arguments)
        assert answer.decision in (Decision.ADMIT, Decision.TAKE_OVER)
        return token

    def settle(self, wish: Settlement) -> SettleAnswer:
        """An owner's ending as it is; raises the row's error."""
        result = self.commit([], [wish])[1][0]
        if isinstance(result, StoreError):
            raise result
        return result

    def end(
        self,
        kind: SettleKind,
        token: bytes,
        key: Key = KEY,
        *,
        payload: Payload | None = RESULT,
        active_ms: int = ACTIVE_MS,
        audit_ms: int = AUDIT_MS,
        nothing_happened: bool = False,
    ) -> Decision:
        """Ends an attempt."""
        return self.settle(
            settlement(
                kind,
                key,
                token,
                payload=payload,
                active_ms=active_ms,
                audit_ms=audit_ms,
                nothing_happened=nothing_happened,
            )
        ).decision

    def extend_all(self, extensions: Sequence[Extension]) -> list[ExtendResult]:
        """Extends leases together; asserts that every row has an answer."""
        answers: list[ExtendResult] = self._run(self.store.extend(extensions, PATIENCE_SECONDS))
        assert len(answers) == len(extensions)
        return answers

    def extend(self, token: bytes, key: Key = KEY, *, lease_ms: int = LEASE_MS) -> ExtendAnswer:
        """Extends a lease; raises the row's error."""
        (result,) = self.extend_all([Extension(key, token, lease_ms)])
        if isinstance(result, StoreError):
            raise result
        return result

    def record(
        self,
        token: bytes,
        name: str = "reserve",
        position: int = 1,
        *,
        key: Key = KEY,
        payload: Payload = RESULT,
    ) -> Decision:
        """Records a step."""
        write = StepWrite(key, token, Step(name, position, payload))
        decision: Decision = self._run(self.store.record_step(write))
        return decision

    # Workers.

    def take_over(self, wish: ClaimRequest, held: bytes) -> ClaimAnswer:
        """A worker's claim of what it saw held by that token."""
        answer: ClaimAnswer = self._run(self.store.take_over(wish, held))
        return answer

    def abandoned(self, limit: int = 100) -> list[StoredKey]:
        """The records that nobody holds any more."""
        found: list[StoredKey] = self._run(self.store.list_abandoned(limit))
        return found

    def resumable(
        self, limit: int = 100, after: bytes = b"", operations: Sequence[str] = ("charge",)
    ) -> list[StoredKey]:
        """Those of the operations that have arguments."""
        found: list[StoredKey] = self._run(self.store.list_resumable(limit, after, operations))
        return found

    # Operators.

    def operate(
        self, command: OperatorCommand, key: Key = KEY, seen: Seen | None = None
    ) -> Decision:
        """An operator's command."""
        note = OperatorNote(seen=seen)
        decision: Decision = self._run(self.store.operate(key, command, note))
        return decision

    def find(self, key: Key = KEY, *, with_audit: bool = True) -> StoredKey | None:
        """What is stored of a key, if anything."""
        found: StoredKey | None = self._run(self.store.read(key, with_audit=with_audit))
        return found

    def read(self, key: Key = KEY, *, with_audit: bool = True) -> StoredKey:
        """What is stored of a key that has a row."""
        found = self.find(key, with_audit=with_audit)
        assert found is not None, f"{key} has no record"
        return found

    def last(self, key: Key = KEY) -> StoredOutcome | None:
        """The newest ending of a key's present life."""
        found: StoredOutcome | None = self._run(self.store.last_outcome(key))
        return found

    def stored(self, key: Key = KEY) -> tuple[Any, ...] | None:
        """Everything stored of a key, to compare before and after; no instant of the reading."""
        found = self.find(key)
        return None if found is None else (found.record, found.steps, found.outcomes)

    def listed(self, query: RecordQuery) -> list[StoredKey]:
        """The records of a query."""
        return self.page(query).keys

    def page(self, query: RecordQuery) -> RecordPage:
        """The records of a query, and where they go on."""
        page: RecordPage = self._run(self.store.list_records(query))
        return page

    def sweep(self, limit: int = 1000) -> SweepReport:
        """One bounded sweep."""
        report: SweepReport = self._run(self.store.sweep(limit))
        return report

    def close(self) -> None:
        """Closes the store."""
        self._run(self.store.close())

    # Time.

    def advance(self, by_ms: int) -> None:
        """Moves the store's clock forward."""
        self.clock.advance(timedelta(milliseconds=by_ms))

    # Scenes.

    def arrange(
        self,
        condition: Condition,
        key: Key = KEY,
        *,
        arguments: Payload | None = None,
        nothing_happened: bool = False,
    ) -> bytes:
        """Brings a key into a condition; gives its last owner's token.

        One step is recorded, unless nothing happened.
        """
        if condition is Condition.ABSENT:
            return mint_token()
        token = self.hold(key, arguments=arguments)
        if not nothing_happened:
            assert self.record(token, "arranged", key=key) is Decision.APPLY
        if condition in _ENDING_OF:
            ended = self.end(_ENDING_OF[condition], token, key, nothing_happened=nothing_happened)
            assert ended is Decision.APPLY
        if condition is Condition.ABANDONED:
            self.advance(LEASE_MS)
        if condition is Condition.OUTLIVED:
            self.advance(ACTIVE_MS)
        assert self.read(key).condition is condition
        return token


def answered(result: ClaimResult) -> ClaimAnswer:
    """The answer of a claim; raises the row's error."""
    if isinstance(result, StoreError):
        raise result
    return result


def colliding(key: Key, text: str, *, caller: Caller = "caller-1") -> Key:
    """Another key with the digest of the first: what nobody can find, made by hand."""
    twin = Key(text, caller=caller)
    assert twin != key
    twin.digest = key.digest
    return twin


def without_payload(answer: ClaimAnswer) -> ClaimAnswer:
    """The part of an answer that the state machine gives."""
    return replace(answer, payload=None)

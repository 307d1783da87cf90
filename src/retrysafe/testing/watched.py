"""A store that a test watches: what it grants, attempts that die in it, and keys that it is given.

Owns how a death looks from the store: a claim whose lease runs out, and nothing else written by its
owner. And how a state of a key is made from a real request, through the store's own port, so that
no test writes into tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    ExtendAnswer,
    Extension,
    Payload,
    SettleAnswer,
    SettleKind,
    Settlement,
    StepWrite,
)
from retrysafe.core.policy import Policy
from retrysafe.core.ports import (
    ClaimResult,
    ExtendResult,
    SettleResult,
    Store,
    Transaction,
    Waits,
)
from retrysafe.errors import StoreRejected
from retrysafe.runtime.drive import run_sync

# The lease of an attempt that is going to die, as the store has it; over as soon as it is dead.
_DEAD_LEASE_MS: Final = 1
# That of a key which is given as running: longer than any test.
_LONG_LEASE_MS: Final = 3_600_000
_GRANTS: Final = (Decision.ADMIT, Decision.TAKE_OVER)

SeedState = Literal["completed", "failed", "running", "abandoned"]


class AttemptKilled(StoreRejected):
    """What a test sees of an attempt that it has killed."""


class KeySeeded(StoreRejected):
    """Ends a call inside of `seeding`: its key has the state, and nothing was run."""


@dataclass(slots=True)
class Crash:
    """The death of the next attempt: before its operation, after it, or after a step."""

    point: str
    has_happened: bool = False

    def killed(self) -> AttemptKilled:
        """The error that the attempt's last word comes to."""
        return AttemptKilled(f"this attempt was killed by the test, {self.told}")

    @property
    def told(self) -> str:
        """When it dies, in words."""
        words = {"before": "before the operation", "after": "before its outcome was stored"}
        return words.get(self.point, f"after the step {self.point!r}")


@dataclass(slots=True)
class Seed:
    """The state that the keys of the next calls are given."""

    state: SeedState
    payload: Payload | None
    # Those that can be written only when their caller's transaction has ended.
    waiting: list[ClaimRequest] = field(default_factory=list)
    count: int = 0


class WatchedStore:
    """Any store, with a count of what it has granted; as the store itself otherwise."""

    def __init__(self, store: Store) -> None:
        self._store: Any = store
        self._lock = threading.Lock()
        self.granted: list[Key] = []
        self.crash: Crash | None = None
        # The tokens of attempts that are going to die, and of those that have: of these nothing
        # more is written.
        self.doomed: set[bytes] = set()
        self.dead: set[bytes] = set()
        self.seed: Seed | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Makes a batch durable, but for the endings of the dead."""
        crash, seed = self.crash, self.seed
        if seed is not None and claims:
            answers = [await self._seeded(seed, request) for request in claims]
            return answers, (await self.commit([], settlements))[1]
        written = [item for item in settlements if not self.dies_at_its_end(item)]
        sent = claims
        if crash is not None:
            sent = [replace(request, lease_ms=_DEAD_LEASE_MS) for request in claims]
        claimed, settled = await self._store.commit(sent, written)
        claimed = [
            self._granted(request, answer) for request, answer in zip(claims, claimed, strict=True)
        ]
        results = dict(zip((id(item) for item in written), settled, strict=True))
        lost = SettleAnswer(Decision.LOST)
        return claimed, [results.get(id(item), lost) for item in settlements]

    def _granted(self, request: ClaimRequest, answer: ClaimResult) -> ClaimResult:
        if not isinstance(answer, ClaimAnswer) or answer.decision not in _GRANTS:
            return answer
        self.note(request.key)
        crash = self.crash
        if crash is None:
            return answer
        if self.dies_at_its_claim(request):
            return crash.killed()
        # Its owner believes in the lease that it asked for.
        answer.lease_ends_at_ms += request.lease_ms - answer.remaining_ms
        answer.remaining_ms = request.lease_ms
        return answer

    def dies_at_its_claim(self, request: ClaimRequest) -> bool:
        """Whether an attempt dies before its operation; it is doomed in any case."""
        self.doomed.add(request.token)
        return self._dies(request.token, "before")

    def dies_at_its_end(self, settlement: Settlement) -> bool:
        """Whether nothing of an ending is written."""
        return settlement.token in self.dead or self._dies(settlement.token, "after")

    def _dies(self, token: bytes, point: str) -> bool:
        crash = self.crash
        if crash is None or crash.point != point or token not in self.doomed:
            return False
        crash.has_happened = True
        self.dead.add(token)
        return True

    def note(self, key: Key) -> None:
        """Counts a claim that was granted."""
        with self._lock:
            self.granted.append(key)

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases; those of the dead in their own minds only."""
        dead = self.doomed
        sent = [item for item in extensions if item.token not in dead]
        answers = iter(await self._store.extend(sent, timeout_seconds))
        return [
            ExtendAnswer(Decision.APPLY, item.lease_ms, 0) if item.token in dead else next(answers)
            for item in extensions
        ]

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result, which may be the last thing that its attempt does."""
        decision: Decision = await self._store.record_step(write)
        return self.after_step(write, decision)

    def after_step(self, write: StepWrite, decision: Decision) -> Decision:
        """What the attempt hears of its step."""
        return Decision.LOST if self._dies(write.token, write.step.name) else decision

    @property
    def join(self) -> Callable[[object], Transaction]:
        """Joins a user's transaction, watched as well."""
        join: Callable[[object], Transaction] = self._store.join
        return lambda connection: cast("Transaction", _WatchedTransaction(join(connection), self))

    # Seeding.

    async def _seeded(self, seed: Seed, request: ClaimRequest) -> ClaimResult:
        lease_ms = _DEAD_LEASE_MS if seed.state == "abandoned" else _LONG_LEASE_MS
        (answer,), _ = await self._store.commit([replace(request, lease_ms=lease_ms)], [])
        if not isinstance(answer, ClaimAnswer) or answer.decision not in _GRANTS:
            raise ValueError(f"{request.key} has a record already: {answer}")
        seed.count += 1
        if seed.payload is None:
            return KeySeeded(f"{request.key} is {seed.state} now")
        kind = SettleKind.FAIL if seed.state == "failed" else SettleKind.COMPLETE
        policy = Policy()
        ending = Settlement(
            kind,
            request.key,
            request.token,
            payload=seed.payload,
            active_ms=policy.active_ms,
            audit_ms=policy.audit_ms,
        )
        await self._store.commit([], [ending])
        (answer,), _ = await self._store.commit([request], [])
        return cast("ClaimResult", answer)

    async def seed_later(self, request: ClaimRequest) -> KeySeeded:
        """Gives a key its state, if that does not have to wait for its caller's transaction."""
        seed = self.seed
        assert seed is not None  # Or nobody would ask.
        if self.capabilities.waits is Waits.SUSPENDING:
            await self._seeded(seed, request)
        else:
            # SQLite's one writer is the caller's transaction at this moment.
            seed.waiting.append(request)
            seed.count += 1
        return KeySeeded(f"{request.key} is {seed.state} now")

    def finish_seeding(self, seed: Seed) -> None:
        """Writes what waited for the transactions of callers."""
        self.seed = None
        for request in seed.waiting:
            run_sync(self._seeded(seed, request))


class _WatchedTransaction:
    """A user's transaction on a watched store."""

    def __init__(self, transaction: Transaction, store: WatchedStore) -> None:
        self._transaction: Any = transaction
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        store = self._store
        if store.seed is not None:
            raise await store.seed_later(request)
        answer: ClaimAnswer = await self._transaction.claim(request)
        if answer.decision in _GRANTS:
            store.note(request.key)
            if store.crash is not None and store.dies_at_its_claim(request):
                raise store.crash.killed()
        return answer

    async def settle(self, settlement: Settlement) -> Decision:
        if self._store.dies_at_its_end(settlement):
            raise (self._store.crash or Crash("after")).killed()
        decision: Decision = await self._transaction.settle(settlement)
        return decision

    async def record_step(self, write: StepWrite) -> Decision:
        decision: Decision = await self._transaction.record_step(write)
        return self._store.after_step(write, decision)

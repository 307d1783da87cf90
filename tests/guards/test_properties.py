"""One property per guard, each as a plain function that needs no fixture.

They pass on the code as it is. `test_guards` removes each guard in turn and sees its property
fail; that is why they build everything they need, and why they are short.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from retrysafe import (
    AsyncIdempotency,
    Attempt,
    ClaimLost,
    Ending,
    Idempotency,
    Key,
    KeyReused,
    OperationInFlight,
    OutcomeNotStored,
    OutcomeUnavailable,
    Policy,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.core.cache import ReplayCache
from retrysafe.core.call import Call
from retrysafe.core.engine import Engine
from retrysafe.core.events import Event, Reporter
from retrysafe.core.flights import Flight, Flights, Phase
from retrysafe.core.lease import Lease
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    ExtendAnswer,
    Extension,
    Fingerprint,
    OperatorCommand,
    Payload,
    SettleKind,
    Settlement,
    State,
    Step,
    StepWrite,
)
from retrysafe.core.ports import Capabilities, ClaimResult, LocalClock, SettleResult, Store, Waits
from retrysafe.core.settings import Settings
from retrysafe.core.values.codec import ValueCodec
from retrysafe.errors import AttemptsExhausted, DigestCollision, OperatorRefused, StoreMissing
from retrysafe.http import IdempotencyMiddleware, bearer_token
from retrysafe.http.asgi_run import AppRun
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit.direct import DirectWriter
from retrysafe.runtime.group_commit.tasks import TaskGroupCommit
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit, _QueuedRow
from retrysafe.runtime.thread_ports import ThreadClock, ThreadSignal
from retrysafe.stores import Condition, MemoryStore, SqliteStore
from tests.core.driving import ports_over
from tests.http.driving import ask

LEASE_MS = 30_000
POLICY = Policy(lease=timedelta(milliseconds=LEASE_MS), settle_patience=timedelta(0))
# So short that keys outlive it within a test; the clock is the test's own.
BRIEF = Policy(
    lease=timedelta(seconds=1), active_window=timedelta(seconds=2), settle_patience=timedelta(0)
)
KEY = Key("k", caller="tenant")
OTHER_KEY = Key("other", caller="tenant")
PAYLOAD = Payload("json.1", b"", b"1")


class Clock:
    """A store's clock that only moves when told to."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms


class Interfering:
    """A store whose commits are interfered with: `before` and `after` may raise."""

    def __init__(
        self,
        store: Store,
        *,
        before: Callable[[Sequence[Any], Sequence[Any]], None] | None = None,
        after: Callable[[Sequence[Any], Sequence[Any]], None] | None = None,
    ) -> None:
        self._store = store
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, claims: Sequence[Any], settlements: Sequence[Any]) -> Any:
        if self._before is not None:
            self._before(claims, settlements)
        answers = await self._store.commit(claims, settlements)
        if self._after is not None:
            self._after(claims, settlements)
        return answers


@contextmanager
def process(store: Store, policy: Policy = POLICY, *, cache: bool = False) -> Iterator[Idempotency]:
    """An object as another process would have it: it shares nothing but the store."""
    with Idempotency(store, caller="tenant", policy=policy, cache=cache) as idempotency:
        yield idempotency


@contextmanager
def sqlite_store(clock: Callable[[], int]) -> Iterator[SqliteStore]:
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "guards.db", now_ms=clock)
        try:
            yield store
        finally:
            run_sync(store.close())


def claim_of(token: bytes, key: Key = KEY, lease_ms: int = LEASE_MS) -> ClaimRequest:
    return ClaimRequest(key, (Fingerprint(1, bytes(16)),), token, lease_ms)


class Unconfirming:
    """A store that confirms no lease: what is done then is decided without it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def extend(self, extensions: object, timeout_seconds: float) -> None:
        raise StoreUnavailable("no answer")


class NoRenewals:
    """Renews nothing: the clocks of these tests move only when told to."""

    def add(self, lease: Lease) -> None:
        pass

    def remove(self, lease: Lease) -> None:
        pass


def engine_over(
    store: Store, clock: LocalClock, listener: Callable[[Event], None] | None = None
) -> Engine:
    ports = ports_over(
        DirectWriter(store),
        clock,
        store=Unconfirming(store),
        lock=threading.Lock(),
        renewals=NoRenewals(),
        report=Reporter(listener),
    )
    return Engine(ports, Settings(has_cache=False))


# Ownership.


def test_a_zombie_is_refused():
    """An owner whose key was taken over cannot change the new owner's outcome."""
    clock = Clock()
    store = MemoryStore(now_ms=clock)

    def zombie() -> str:
        clock.now_ms += LEASE_MS + 1
        with process(store) as other:
            assert other.run("k", lambda: "second", request=1, name="pay") == "second"
        return "first"

    with process(store) as owner, pytest.raises(ClaimLost):
        owner.run("k", zombie, request=1, name="pay")
    with process(store) as later:
        assert later.run("k", lambda: "third", request=1, name="pay") == "second"


def test_a_zombie_is_refused_by_sqlite():
    """SQLite settles without a look at the table; a zombie must not end its successor's run."""
    clock = Clock()
    with sqlite_store(clock) as store:
        run_sync(store.commit([claim_of(b"t" * 16)], []))
        clock.now_ms += LEASE_MS
        run_sync(store.commit([claim_of(b"u" * 16)], []))
        zombie = Settlement(SettleKind.COMPLETE, KEY, b"t" * 16, PAYLOAD, active_ms=LEASE_MS)
        _, (answer,) = run_sync(store.commit([], [zombie]))
        assert answer.decision is Decision.LOST
        assert run_sync(store.read(KEY)).record.state is State.PENDING


def _settle_a_zombie_and_an_honest_owner(store: SqliteStore, clock: Clock) -> list[Decision]:
    run_sync(store.commit([claim_of(b"t" * 16)], []))
    clock.now_ms += LEASE_MS
    run_sync(store.commit([claim_of(b"u" * 16), claim_of(b"v" * 16, OTHER_KEY)], []))
    endings = [
        Settlement(SettleKind.COMPLETE, KEY, b"t" * 16, PAYLOAD, active_ms=LEASE_MS),
        Settlement(SettleKind.COMPLETE, OTHER_KEY, b"v" * 16, PAYLOAD, active_ms=LEASE_MS),
    ]
    _, answers = run_sync(store.commit([], endings))
    return [answer.decision for answer in answers]


def test_a_zombie_in_a_batch_is_refused_by_sqlite():
    """An honest ending in the same batch does not carry the zombie's along."""
    clock = Clock()
    with sqlite_store(clock) as store:
        decisions = _settle_a_zombie_and_an_honest_owner(store, clock)
        assert decisions == [Decision.LOST, Decision.APPLY]
        assert run_sync(store.read(KEY)).record.state is State.PENDING


def test_a_batch_of_endings_is_taken_back_when_one_is_refused():
    """What is reported as stored is stored, and a refused ending leaves no outcome behind."""
    clock = Clock()
    with sqlite_store(clock) as store:
        decisions = _settle_a_zombie_and_an_honest_owner(store, clock)
        assert decisions == [Decision.LOST, Decision.APPLY]
        assert run_sync(store.read(KEY, with_audit=True)).outcomes == []
        (stored,) = run_sync(store.read(OTHER_KEY, with_audit=True)).outcomes
        assert stored.token == b"v" * 16


def test_nothing_starts_on_a_lease_that_has_run_out():
    """A process that stood still after its claim asks again before it runs anything."""
    clock = Clock()
    now = [0.0]
    store = MemoryStore(now_ms=clock)
    stalls = [LEASE_MS + 1]
    asked = []

    def after(claims: Sequence[Any], settlements: Sequence[Any]) -> None:
        asked.extend(claims)
        if claims and stalls:
            pause_ms = stalls.pop()
            clock.now_ms += pause_ms
            now[0] += pause_ms / 1000

    numbers = []

    async def operation(attempt: Attempt) -> str:
        numbers.append(attempt.number)
        return "done"

    local = ThreadClock()
    local.monotonic = lambda: now[0]
    engine = engine_over(Interfering(store, after=after), local)
    call = Call(KEY, (Fingerprint(1, bytes(16)),), POLICY, "pay", ValueCodec())
    assert run_sync(engine.answer(call, operation)).value == "done"
    assert (len(asked), numbers) == (2, [1])


def test_a_lease_is_looked_at_right_before_the_operation():
    """A process that stood still after its grant, and cannot ask the store, runs nothing."""
    now = [0.0]
    ran = []

    def stand_still(event: Event) -> None:
        now[0] += LEASE_MS / 1000

    async def operation(attempt: Attempt) -> None:
        ran.append(attempt.number)

    local = ThreadClock()
    local.monotonic = lambda: now[0]
    engine = engine_over(MemoryStore(), local, stand_still)
    call = Call(KEY, (Fingerprint(1, bytes(16)),), POLICY, "pay", ValueCodec())
    with pytest.raises(ClaimLost):
        run_sync(engine.answer(call, operation))
    assert ran == []


def test_the_task_of_an_application_looks_at_the_lease():
    """It gets its turn when the loop is free, which may be after the lease."""
    store, invoke = MemoryStore(), AppRun.invoke
    served = []

    def late(run: AppRun, attempt: Attempt) -> asyncio.Future[Any]:
        complete = invoke(run, attempt)
        attempt._lease.ends_monotonic = 0.0
        run_sync(store.operate(attempt.key, OperatorCommand.FORCE_RELEASE))
        return complete

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])

    async def main() -> None:
        async with AsyncIdempotency(store) as idem:
            await ask(IdempotencyMiddleware(app, idem, caller=bearer_token))

    AppRun.invoke = late
    try:
        asyncio.run(main())
    finally:
        AppRun.invoke = invoke
    assert served == []


def test_a_lost_operation_does_not_end_the_run():
    """An operation that stops itself because its claim is lost stores nothing."""
    clock = Clock()
    store = MemoryStore(now_ms=clock)
    policy = POLICY.with_changes(unlisted=Ending.FAILED)
    now = [0.0]

    async def operation(attempt: Attempt) -> str:
        clock.now_ms += LEASE_MS + 1
        now[0] += LEASE_MS / 1000 + 1
        attempt.raise_if_lost()
        return "never"

    local = ThreadClock()
    local.monotonic = lambda: now[0]
    engine = engine_over(store, local)
    call = Call(KEY, (Fingerprint(1, bytes(16)),), policy, "pay", ValueCodec())
    with pytest.raises(ClaimLost):
        run_sync(engine.answer(call, operation))
    assert run_sync(store.read(KEY)).condition is Condition.ABANDONED


def _force_release(store: Store) -> None:
    with process(store) as owner:

        def operation() -> str:
            owner.release("k", force=True)
            return "late"

        with pytest.raises(ClaimLost):
            owner.run("k", operation, request=1, name="pay")


def test_a_forced_release_refuses_the_old_owner():
    """An operator's force ends the claim: what its owner writes later is refused."""
    _force_release(MemoryStore())


def test_a_forced_release_refuses_the_old_owner_in_sqlite():
    """The same on SQLite, where the token alone would still match."""
    with sqlite_store(Clock()) as store:
        _force_release(store)


def test_a_running_operation_is_not_run_again():
    """While the lease holds, another process is told to wait."""
    store = MemoryStore(now_ms=Clock())

    def operation() -> str:
        with process(store) as other, pytest.raises(OperationInFlight):
            other.run("k", lambda: "again", request=1, name="pay")
        return "first"

    with process(store) as owner:
        assert owner.run("k", operation, request=1, name="pay") == "first"


def test_a_running_operation_is_renewed():
    """The heartbeat knows the lease for as long as the operation runs, and no longer."""
    with process(MemoryStore()) as owner:
        known = owner.run("k", lambda: len(owner._calls._heartbeat.leases), request=1, name="pay")
        assert known == 1
        assert not owner._calls._heartbeat.leases


def test_an_extend_never_shortens_a_lease():
    """An extend that was long on its way leaves a longer lease as it is."""
    store = MemoryStore(now_ms=Clock())
    run_sync(store.commit([claim_of(b"t" * 16)], []))
    (answer,) = run_sync(store.extend([Extension(KEY, b"t" * 16, 1)], 1.0))
    assert answer.remaining_ms == LEASE_MS


def test_an_operator_cannot_release_a_running_operation():
    """Only force frees a key under a live owner; a plain release is refused."""
    with process(MemoryStore()) as owner:

        def operation() -> None:
            with pytest.raises(OperatorRefused):
                owner.release("k")

        owner.run("k", operation, request=1, name="pay")


# Requests.


def test_another_request_is_refused():
    """A key that another process used for another request is refused, and nothing is shown."""
    store = MemoryStore()
    with process(store) as first, process(store) as second:
        first.run("k", lambda: "secret", request=1, name="pay")
        with pytest.raises(KeyReused):
            second.run("k", lambda: "other", request=2, name="pay")


def test_another_request_is_refused_while_the_first_runs_here():
    """The same holds in the process that runs the first request, before any waiting."""
    with process(MemoryStore()) as owner:

        def operation() -> str:
            with pytest.raises(KeyReused):
                owner.run("k", lambda: "other", request=2, name="pay")
            return "first"

        assert owner.run("k", operation, request=1, name="pay") == "first"


def test_a_refusal_is_not_passed_on():
    """A follower whose leader was refused for its own request asks the store for itself."""
    stranger = Flight((Fingerprint(1, b"s" * 16),), "pay")
    stranger.first_operation = "pay"
    call = Call(KEY, (Fingerprint(1, b"f" * 16),), POLICY, "pay", ValueCodec())
    with process(MemoryStore()) as owner:
        assert owner._calls._engine._disembark(stranger, call, None) is None


def test_another_request_is_refused_from_the_cache():
    """The replay cache shows an outcome to its own request only."""
    with process(MemoryStore(), cache=True) as owner:
        owner.run("k", lambda: "secret", request=1, name="pay")
        with pytest.raises(KeyReused):
            owner.run("k", lambda: "other", request=2, name="pay")


def test_a_colliding_digest_is_refused():
    """Two keys with one digest are told apart by their text."""
    store = MemoryStore()
    other = Key("other", caller="tenant")
    other.digest = KEY.digest
    run_sync(store.commit([claim_of(b"t" * 16)], []))
    (answer,), _ = run_sync(store.commit([claim_of(b"u" * 16, other)], []))
    assert isinstance(answer, DigestCollision)


# Endings.


def test_a_cancelled_operation_keeps_its_key():
    """Nobody knows how far a cancelled operation got, so only its lease frees the key."""
    store = MemoryStore(now_ms=Clock())

    def operation() -> None:
        raise KeyboardInterrupt

    with process(store) as owner, process(store) as other:
        with pytest.raises(KeyboardInterrupt):
            owner.run("k", operation, request=1, name="pay")
        with pytest.raises(OperationInFlight):
            other.run("k", lambda: "again", request=1, name="pay")


def test_attempts_end_at_their_limit():
    """An operation that was cut off as often as it may is not run again."""
    runs = []
    clock = Clock()

    def operation() -> None:
        runs.append(1)
        raise KeyboardInterrupt

    policy = POLICY.with_changes(attempt_limit=2)
    with process(MemoryStore(now_ms=clock), policy) as owner:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                owner.run("k", operation, request=1, name="pay")
            clock.now_ms += policy.lease_ms
        with pytest.raises(AttemptsExhausted):
            owner.run("k", lambda: runs.append(1), request=1, name="pay")
    assert len(runs) == 2


def test_an_abandoned_attempt_is_remembered():
    """A pending record outlives every window: it is neither swept nor counted as absent."""
    clock = Clock()
    store = MemoryStore(now_ms=clock)

    def dies() -> None:
        raise KeyboardInterrupt

    with process(store, BRIEF) as owner:
        with pytest.raises(KeyboardInterrupt):
            owner.run("k", dies, request=1, name="pay")
        clock.now_ms += 3_600_000
        assert owner.sweep().keys == 0
        assert owner.run("k", lambda: current_attempt().number, request=1, name="pay") == 2


def test_a_running_retry_is_not_swept():
    """A retry that runs past the window of the failure before it keeps its row in SQLite."""
    clock = Clock()
    with sqlite_store(clock) as store, process(store, BRIEF) as owner:

        def fails() -> None:
            raise OSError("unreachable")

        def runs_long() -> int:
            clock.now_ms += 500
            return owner.sweep().keys

        with pytest.raises(OSError, match="unreachable"):
            owner.run("k", fails, request=1, name="pay")
        clock.now_ms += 1_900
        assert owner.run("k", runs_long, request=1, name="pay") == 0


def test_a_key_that_came_back_is_not_swept():
    """A claim between the sweep's look and its removal keeps its row."""
    clock = Clock()
    with sqlite_store(clock) as store:
        run_sync(store.commit([claim_of(b"a" * 16)], []))
        done = Settlement(SettleKind.COMPLETE, KEY, b"a" * 16, PAYLOAD, active_ms=1_000)
        run_sync(store.commit([], [done]))
        clock.now_ms += 1_000
        write = store._sweeping._write

        def claimed_before(work: Callable[[sqlite3.Connection], Any]) -> Any:
            run_sync(store.commit([claim_of(b"b" * 16)], []))
            return write(work)

        store._sweeping._write = claimed_before
        run_sync(store.sweep(10))
        found = run_sync(store.read(KEY))
    assert found is not None
    assert found.record.token == b"b" * 16


def test_a_claim_with_a_lost_answer_is_found_again():
    """A claim that happened although its answer was lost runs its operation now."""
    failures = [StoreUnavailable("the answer was lost")]

    def after(claims: Sequence[Any], settlements: Sequence[Any]) -> None:
        if claims and failures:
            raise failures.pop()

    with process(Interfering(MemoryStore(), after=after)) as owner:
        assert owner.run("k", lambda: "done", request=1, name="pay") == "done"
    assert not failures


def test_an_outcome_is_stored_before_it_is_shown():
    """A result that could not be stored is not returned as if it were."""

    def before(claims: Sequence[Any], settlements: Sequence[Any]) -> None:
        if settlements:
            raise StoreUnavailable("down")

    store = Interfering(MemoryStore(), before=before)
    with process(store) as owner, pytest.raises(OutcomeNotStored):
        owner.run("k", lambda: "done", request=1, name="pay")


def test_a_result_that_cannot_be_stored_does_not_free_the_key():
    """The operation has run: a retry is told so, and does not run it again."""
    runs = []

    def operation() -> object:
        runs.append(1)
        return object()

    with process(MemoryStore()) as owner:
        owner.run("k", operation, request=1, name="pay")
        with pytest.raises(OutcomeUnavailable):
            owner.run("k", operation, request=1, name="pay")
    assert len(runs) == 1


def test_an_outcome_survives_its_cancelled_caller():
    """A caller that is interrupted while its outcome is written leaves a stored outcome."""
    interrupts = [KeyboardInterrupt()]

    def before(claims: Sequence[Any], settlements: Sequence[Any]) -> None:
        if settlements and interrupts:
            raise interrupts.pop()

    store = MemoryStore(now_ms=Clock())
    with process(Interfering(store, before=before)) as owner, process(store) as other:
        with pytest.raises(KeyboardInterrupt):
            owner.run("k", lambda: "first", request=1, name="pay")
        assert other.run("k", lambda: "second", request=1, name="pay") == "first"


def test_a_cached_outcome_ends_with_its_window():
    """The cache never replays longer than the record itself would."""
    cache = ReplayCache()
    cache.keep(KEY.digest, Flight((), "pay"), PAYLOAD, 1, asked_monotonic=100.0, remaining_ms=500)
    assert cache.find(KEY.digest, 100.4).payload == PAYLOAD
    assert cache.find(KEY.digest, 100.6) is None


def test_a_landing_wakes_everybody():
    """Whoever waits for a local leader is woken when it ends, however it ends."""
    flights = Flights(threading.Lock())
    flight = flights.join(KEY.digest, Flight((), "pay"), 0.0)
    signal = ThreadSignal()
    assert flights.enlist(flight, Phase.CLAIMING, signal)
    flights.land(KEY.digest, flight)
    assert run_sync(signal.wait(0))


class _MovingOn(list[ThreadSignal]):
    """Waiters whose leader has looked at them and moved on just before somebody signs up."""

    def __init__(self, flight: Flight) -> None:
        super().__init__()
        self._flight = flight

    def append(self, signal: ThreadSignal) -> None:
        self._flight.phase = Phase.RUNNING
        super().append(signal)


def test_nobody_signs_up_for_news_that_are_over():
    """Who signs up while the leader moves on is told so, and does not wait for what has been."""
    flights = Flights(threading.Lock())
    flight = flights.join(KEY.digest, Flight((), "pay"), 0.0)
    flight.waiters = _MovingOn(flight)
    assert not flights.enlist(flight, Phase.CLAIMING, ThreadSignal())
    assert not flight.waiters


class _Raced(dict[bytes, Flight]):
    """A dictionary in which a rival joins right after every look that is not a join itself."""

    rivals: list[Flight]

    def get(self, digest: bytes, default: Any = None) -> Any:
        found = super().get(digest, default)
        rival = Flight((), "rival")
        self.rivals.append(rival)
        self.setdefault(digest, rival)
        return found


def test_one_of_two_leads_a_key():
    """However two threads come for a key, one leads and the other follows that one."""
    flights = Flights(threading.Lock())
    flights._by_digest = raced = _Raced()
    raced.rivals = []
    flight = flights.join(KEY.digest, Flight((), "pay"), 0.0)
    first = raced.rivals[0] if raced.rivals else flight
    assert flight is first


# Steps.


def _start_a_new_life(store: Store, clock: Clock) -> None:
    run_sync(store.commit([claim_of(b"t" * 16)], []))
    run_sync(store.record_step(StepWrite(KEY, b"t" * 16, Step("charge", 1, PAYLOAD))))
    done = Settlement(SettleKind.COMPLETE, KEY, b"t" * 16, PAYLOAD, active_ms=1_000, audit_ms=1_000)
    run_sync(store.commit([], [done]))
    clock.now_ms += 1_000
    run_sync(store.commit([claim_of(b"u" * 16)], []))
    stored = run_sync(store.read(KEY))
    assert stored is not None
    assert stored.steps == []


def test_a_new_life_starts_without_steps():
    """A key that is used anew after its window does not skip the steps of its past."""
    clock = Clock()
    _start_a_new_life(MemoryStore(now_ms=clock), clock)


def test_a_new_life_starts_without_steps_in_sqlite():
    """The same on SQLite."""
    clock = Clock()
    with sqlite_store(clock) as store:
        _start_a_new_life(store, clock)


# SQLite and group commit.


def test_sqlite_reads_the_clock_under_the_write_lock():
    """The wait for the write lock does not eat up a lease: nobody else writes meanwhile."""
    found: list[bool] = []

    class WatchingClock(Clock):
        def __call__(self) -> int:
            found.append(_is_write_locked(store.path))
            return super().__call__()

    with sqlite_store(WatchingClock()) as store:
        run_sync(store.read(KEY))
        found.clear()
        run_sync(store.commit([claim_of(b"t" * 16)], []))
    assert found == [True]


def _is_write_locked(path: Path) -> bool:
    rival = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        rival.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return True
    finally:
        rival.close()
    return False


def test_sqlite_spares_an_owner_that_could_not_write():
    """A claim that had to wait for the write lock leaves the owner the time to renew first."""
    clock = Clock()
    with sqlite_store(clock) as store:
        run_sync(store.commit([claim_of(b"a" * 16)], []))
        clock.now_ms += LEASE_MS
        grace = store._connections.grace
        grace.note_wait(grace.monotonic() - 1)
        ((answer,), _) = run_sync(store.commit([claim_of(b"b" * 16)], []))
        assert isinstance(answer, ClaimAnswer)
        assert answer.decision is Decision.IN_FLIGHT
        (renewed,) = run_sync(store.extend([Extension(KEY, b"a" * 16, LEASE_MS)], 1.0))
        assert isinstance(renewed, ExtendAnswer)
        assert renewed.decision is Decision.APPLY


def test_sqlite_commits_reach_the_disk():
    """`synchronous` is FULL (2): a power cut does not forget a claim that was answered."""
    with sqlite_store(Clock()) as store:
        run_sync(store.commit([claim_of(b"t" * 16)], []))
        assert store._connections.writer.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_deleted_sqlite_file_grants_no_claim():
    """Who has the old file open does not grant a key that somebody may have in the new one."""
    with sqlite_store(Clock()) as store:
        run_sync(store.commit([claim_of(b"t" * 16, OTHER_KEY)], []))
        for ending in ("", "-wal", "-shm"):
            Path(f"{store.path}{ending}").unlink()
        later = SqliteStore(store.path, now_ms=Clock())  # As a process that starts now has it.
        try:
            claimed, _ = run_sync(later.commit([claim_of(b"u" * 16)], []))
            assert [answer.decision for answer in claimed] == [Decision.ADMIT]
            with pytest.raises(StoreMissing):
                run_sync(store.commit([claim_of(b"v" * 16)], []))
        finally:
            run_sync(later.close())


def test_sqlite_without_its_shared_locks_grants_no_claim():
    """Who holds locks that a process that starts now cannot see grants nothing."""
    with sqlite_store(Clock()) as store:
        run_sync(store.commit([claim_of(b"t" * 16, OTHER_KEY)], []))
        for ending in ("-wal", "-shm"):
            Path(f"{store.path}{ending}").unlink()
        with pytest.raises(StoreMissing):
            run_sync(store.commit([claim_of(b"v" * 16)], []))


class InterruptedStore:
    """A store whose commit is interrupted in the thread or task that carries it."""

    capabilities = Capabilities(Waits.BLOCKING)

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.meanwhile = lambda: None

    async def commit(self, claims: Sequence[Any], settlements: Sequence[Any]) -> Any:
        self.meanwhile()
        raise self._error


def test_an_interrupted_carrier_hands_over():
    """When the thread that carries a batch is interrupted, the next one carries the queue."""
    passenger = _QueuedRow(claim_of(b"u" * 16))
    passenger.gate = threading.Lock()
    passenger.gate.acquire()
    store = InterruptedStore(KeyboardInterrupt())
    group = ThreadGroupCommit(store)
    store.meanwhile = lambda: group._queue.append(passenger)
    with pytest.raises(KeyboardInterrupt):
        run_sync(group.claim(claim_of(b"t" * 16)))
    assert passenger.gate.acquire(blocking=False)
    assert passenger.batch == [passenger]


def test_an_interrupted_batch_tells_every_task():
    """When the task that carries a batch is cancelled, nobody waits for ever."""

    async def scenario() -> list[bool]:
        group = TaskGroupCommit(
            InterruptedStore(asyncio.CancelledError()), asyncio.get_running_loop()
        )
        rows = [group.claim(claim_of(b"t" * 16)), group.claim(claim_of(b"u" * 16))]
        await group.drain()
        told = [row.done() and isinstance(row.exception(), StoreUnavailable) for row in rows]
        for row in rows:
            row.cancel()
        return told

    assert asyncio.run(scenario()) == [True, True]


class SlowStore(MemoryStore):
    """Answers to an ending later, as a server does."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, waits=Waits.SUSPENDING)

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        if settlements:
            await asyncio.sleep(0.05)
        return await super().commit(claims, settlements)


def test_what_is_queued_is_stored_before_its_loop_ends():
    """The end of `asyncio.run` cancels the caller of an operation that has run."""
    store = SlowStore()
    runs: list[asyncio.Task[None]] = []

    async def main() -> None:
        idem = AsyncIdempotency(store, caller="owner")
        has_run = asyncio.Event()

        async def charge() -> None:
            has_run.set()

        runs.append(asyncio.create_task(idem.run("k", charge, request=None)))
        await has_run.wait()
        await asyncio.sleep(0)

    asyncio.run(main())
    stored = run_sync(store.read(Key("k", caller="owner")))
    assert stored is not None
    assert stored.record.state is State.SUCCEEDED

"""A user's open transaction holds up its own key, and no other row of a batch."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from retrysafe import Idempotency, InFlight, Key, OperationInFlight, Policy
from retrysafe.core.model import (
    Decision,
    Extension,
    Payload,
    SettleKind,
    StagedEntry,
    Step,
    StepWrite,
)
from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import contended, rows
from retrysafe.stores.postgres.claims import BALANCE_LIMIT
from retrysafe.stores.postgres.drivers.port import Locked
from retrysafe.stores.postgres.schema import LOCK_WAIT
from retrysafe.testing.suite.probe import KEY, key_of, request, settlement

PATIENCE_SECONDS = 30
WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=PATIENCE_SECONDS))
ARGUMENTS = Payload("json.1", b"", b"[[1],{}]")
STEP = Step("charge", 1, Payload("json.1", b"", b"1"))


class Scene:
    """A store, and a user's connection that its records can be written on."""

    def __init__(self, face: str, url: str, reached: str) -> None:
        self._runner = asyncio.Runner() if face == "async" else None
        options = "&prepared=off" if face == "pooled" else ""
        self.store = postgres_store(f"{reached}{options}", is_async=face == "async")
        self.url = url.partition("?")[0]
        self.user = psycopg.connect(self.url)
        self.locked = 0
        fetch = self.store._connector.fetch

        async def counting(sql: str, params: Any = ()) -> Any:
            try:
                return await fetch(sql, params)
            except Locked:
                self.locked += 1
                raise

        self.store._connector.fetch = counting  # type: ignore[method-assign]

    def run(self, flow: Any) -> Any:
        return run_sync(flow) if self._runner is None else self._runner.run(flow)

    def commit(self, claims: Any = (), settlements: Any = ()) -> Any:
        return self.run(self.store.commit(list(claims), list(settlements)))

    def claim(self, **kwargs: Any) -> Decision:
        ((answer,), _) = self.commit([request(KEY, **kwargs)])
        return answer.decision

    def start_atomic_run(self) -> Decision:
        """An atomic run in the user's transaction, with its outcome, up to the commit."""
        token = mint_token()
        transaction = self.store.join(self.user)
        self.user.execute("SELECT 1")
        run_sync(transaction.begin())
        assert run_sync(transaction.lock(KEY, None))
        answer = run_sync(transaction.claim(request(KEY, token)))
        ending = settlement(SettleKind.COMPLETE, KEY, token)
        assert run_sync(transaction.settle(ending)) is Decision.APPLY
        run_sync(transaction.keep())
        return answer.decision

    def complete_in(self, token: bytes) -> None:
        """Ends a leased attempt in the user's transaction, up to the commit."""
        self.user.execute("SELECT 1")
        ending = settlement(SettleKind.COMPLETE, KEY, token)
        assert run_sync(self.store.join(self.user).settle(ending)) is Decision.APPLY

    def record_step_in(self, token: bytes) -> None:
        """Records a step in the user's transaction, up to the commit."""
        self.user.execute("SELECT 1")
        write = StepWrite(KEY, token, STEP)
        assert run_sync(self.store.join(self.user).record_step(write)) is Decision.APPLY

    def close(self) -> None:
        self.user.close()
        self.run(self.store.close())
        if self._runner is not None:
            self._runner.close()


@pytest.fixture
def scene(request, migrated_url, postgres_server):
    face = request.param if hasattr(request, "param") else "blocking"
    reached = migrated_url
    if face == "pooled":
        port = request.getfixturevalue("pgbouncer").port
        reached = reached.replace(f":{postgres_server.port}/", f":{port}/")
    made = Scene(face, migrated_url, reached)
    yield made
    made.close()


EVERY_FACE = pytest.mark.parametrize("scene", ["blocking", "async", "pooled"], indirect=True)


def others(count: int = 20) -> list[Any]:
    """Claims of other keys, whose digests come before and after that of the busy one."""
    made = [request(key_of(f"other-{number}")) for number in range(count)]
    digests = {item.key.digest < KEY.digest for item in made}
    assert digests == {True, False}
    return made


def decisions(answers: list[Any]) -> set[Decision]:
    return {answer.decision for answer in answers}


@EVERY_FACE
def test_other_claims_do_not_wait_for_an_atomic_run(scene):
    """The key of an open run is in flight, the keys beside it are claimed; then it replays."""
    scene.start_atomic_run()
    (busy, *answers), _ = scene.commit([request(KEY), *others()])
    assert busy.decision is Decision.IN_FLIGHT
    assert busy.remaining_ms == rows.RETRY_AFTER_MS
    assert decisions(answers) == {Decision.ADMIT}
    scene.user.commit()
    ((answer,), _) = scene.commit([request(KEY)])
    assert answer.decision is Decision.REPLAY
    assert answer.payload == settlement(SettleKind.COMPLETE, KEY, b"").payload


@EVERY_FACE
def test_a_rollback_frees_the_key_for_a_leased_claim(scene):
    """What the atomic run claimed is gone with it, and nobody is told of it afterwards."""
    scene.start_atomic_run()
    assert scene.claim() is Decision.IN_FLIGHT
    scene.user.rollback()
    assert scene.claim() is Decision.ADMIT
    assert scene.claim() is Decision.IN_FLIGHT


@EVERY_FACE
def test_endings_in_the_batch_do_not_wait_either(scene):
    """Claims and endings share a statement, and neither is held up by the busy claim."""
    held = others()
    scene.commit(held)
    scene.start_atomic_run()
    endings = [settlement(SettleKind.COMPLETE, item.key, item.token) for item in held]
    (busy,), settled = scene.commit([request(KEY)], endings)
    assert busy.decision is Decision.IN_FLIGHT
    assert decisions(settled) == {Decision.APPLY}


def test_only_the_first_batch_waits_at_all(scene):
    """A key that was busy a moment ago is looked at apart, so that asking often costs others
    nothing."""
    scene.start_atomic_run()
    assert scene.claim() is Decision.IN_FLIGHT
    assert scene.locked == 1
    for _ in range(3):
        (busy, *answers), _ = scene.commit([request(KEY), *others()])
        assert busy.decision is Decision.IN_FLIGHT
    assert decisions(answers) == {Decision.IN_FLIGHT}
    assert scene.locked == 1


def test_a_batch_goes_on_before_the_server_looks_for_deadlocks(scene):
    """Else the user's transaction, when it comes to a key of the batch, could be the one that is
    ended."""
    ((timeout,),) = scene.user.execute(
        "SELECT setting::integer FROM pg_settings WHERE name = 'deadlock_timeout'"
    ).fetchall()
    sql = scene.store._statements.texts["commit"]
    limit_ms = int(sql.partition("'lock_timeout', '")[2].partition("ms'")[0])
    assert 0 < limit_ms <= timeout / 10


@EVERY_FACE
def test_the_limit_ends_with_the_statement(scene):
    """It is of the statement's transaction, so whoever shares the connection never sees it."""
    scene.commit(others())
    ((timeout,),) = scene.run(
        scene.store._connector.fetch("SELECT current_setting('lock_timeout')")
    )
    assert timeout == "0"


def test_claims_with_arguments_do_not_wait_either(scene):
    """They have a statement of their own, and the same promise."""
    scene.start_atomic_run()
    claims = [request(item.key, item.token, arguments=ARGUMENTS) for item in others()]
    (busy, *answers), _ = scene.commit([request(KEY, arguments=ARGUMENTS), *claims])
    assert busy.decision is Decision.IN_FLIGHT
    assert decisions(answers) == {Decision.ADMIT}
    assert run_sync(scene.store.read(claims[0].key)).arguments == ARGUMENTS
    scene.user.rollback()
    assert scene.claim(arguments=ARGUMENTS) is Decision.ADMIT
    assert run_sync(scene.store.read(KEY)).arguments == ARGUMENTS


@EVERY_FACE
def test_a_duplicate_of_an_attempt_that_completes_in_a_transaction(scene):
    """The row is being updated by its owner: the duplicate is told so, its neighbours go on."""
    token = mint_token()
    scene.claim(token=token)
    scene.complete_in(token)
    (busy, *answers), _ = scene.commit([request(KEY), *others()])
    assert busy.decision is Decision.IN_FLIGHT
    assert decisions(answers) == {Decision.ADMIT}
    scene.user.commit()
    assert scene.claim() is Decision.REPLAY


@EVERY_FACE
@pytest.mark.parametrize("has_row", [False, True], ids=["new", "released"])
def test_a_batch_that_is_read_first_waits_no_longer(scene, has_row):
    """The look waits for nobody; what must be written waits once, and its neighbours with it."""
    if has_row:
        token = mint_token()
        scene.claim(token=token)
        scene.commit([], [settlement(SettleKind.RELEASE, KEY, token)])
    scene.start_atomic_run()
    for neighbours, locked in ((others(), 1), ([], 2 if has_row else 1)):
        scene.store._claims.balance = BALANCE_LIMIT
        (busy, *free), _ = scene.commit([request(KEY), *neighbours])
        assert busy.decision is Decision.IN_FLIGHT
        assert [answer.decision for answer in free] == [Decision.ADMIT] * len(neighbours)
        assert scene.locked == locked
    scene.user.commit()
    scene.store._claims.balance = BALANCE_LIMIT
    assert scene.claim() is Decision.REPLAY


def test_nobody_takes_over_while_the_owner_completes(scene):
    """Its lease is over, but its transaction may still commit: then that outcome is the one."""
    token = mint_token()
    scene.claim(token=token, lease_ms=0)
    scene.complete_in(token)
    for _ in range(2):
        (busy, *_), _ = scene.commit([request(KEY), *others()])
        assert busy.decision is Decision.IN_FLIGHT
    taken = scene.run(scene.store.take_over(request(KEY), token))
    assert taken.decision is Decision.LOST
    scene.user.commit()
    assert scene.claim() is Decision.REPLAY


def test_a_rollback_leaves_the_abandoned_key_to_the_next(scene):
    """The attempt goes on as if nothing had been completed; its lease is over."""
    token = mint_token()
    scene.claim(token=token, lease_ms=0)
    scene.complete_in(token)
    assert scene.claim() is Decision.IN_FLIGHT
    scene.user.rollback()
    assert scene.claim() is Decision.TAKE_OVER


class Rival:
    """An atomic run that has the key's lock and has not claimed it yet."""

    def __init__(self, scene: Scene) -> None:
        self.connection = psycopg.connect(scene.url)
        # A wait for the user's transaction is a failure, and not the end of the test run.
        self.connection.execute("SET LOCAL lock_timeout = '5s'")
        self.transaction = scene.store.join(self.connection)
        run_sync(self.transaction.begin())
        assert run_sync(self.transaction.lock(KEY, None))

    def claim(self) -> Decision:
        return run_sync(self.transaction.claim(request(KEY))).decision

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def rival(scene):
    made = []

    def make() -> Rival:
        made.append(Rival(scene))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.mark.parametrize("has_ended", [False, True], ids=["leased", "lease over"])
@pytest.mark.parametrize("writes", ["complete_in", "record_step_in"])
def test_an_atomic_run_does_not_wait_for_a_leased_attempt(scene, rival, writes, has_ended):
    """Also when the attempt comes to its row in between the lock and the claim of the run, which
    goes on asking and goes on by itself as soon as the row is free."""
    token = mint_token()
    scene.claim(token=token, lease_ms=0 if has_ended else 60_000)
    run = rival()
    getattr(scene, writes)(token)
    for _ in range(2):
        assert run.claim() is Decision.IN_FLIGHT
    scene.user.commit()
    if writes == "complete_in":
        assert run.claim() is Decision.REPLAY
    else:
        assert run.claim() is (Decision.TAKE_OVER if has_ended else Decision.IN_FLIGHT)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("writes", ["complete_in", "record_step_in"])
def test_a_leased_attempt_shares_the_lock_of_atomic_runs(scene, writes, ending):
    """They find out by that lock, at every isolation level, until its transaction ends."""
    token = mint_token()
    scene.claim(token=token)
    getattr(scene, writes)(token)
    with psycopg.connect(scene.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        transaction = scene.store.join(connection)
        connection.execute("SELECT 1")
        run_sync(transaction.begin())
        assert not run_sync(transaction.lock(KEY, None))
        assert run_sync(transaction.look(request(KEY))).decision is Decision.IN_FLIGHT
        getattr(scene.user, ending)()
        assert run_sync(transaction.lock(KEY, None))


def test_the_claim_of_a_new_key_reads_nothing_under_serializable(scene):
    """What it read would be a page of the index, and a conflict with every key that comes there."""
    with psycopg.connect(scene.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        connection.execute("SELECT 1")
        answer = run_sync(scene.store.join(connection).claim(request(KEY)))
        assert answer.decision is Decision.ADMIT
        index = f"{scene.store.schema_name}.keys_pkey"
        held = "SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND relation = %s::regclass"
        assert connection.execute(held, (index,)).fetchone() == (0,)


@pytest.mark.parametrize("kind", [SettleKind.RELEASE, SettleKind.COMPLETE])
def test_an_atomic_run_over_an_earlier_record(scene, kind):
    """A released or outlived row is replaced in the user's transaction: in flight, and no wait."""
    token = mint_token()
    scene.claim(token=token)
    scene.commit([], [settlement(kind, KEY, token, active_ms=0)])
    assert scene.start_atomic_run() in (Decision.ADMIT, Decision.TAKE_OVER)
    for locked in (2, 3):
        # The first time the batch and the replacement wait, then the replacement only looks.
        (busy, *_), _ = scene.commit([request(KEY), *others()])
        assert busy.decision is Decision.IN_FLIGHT
        assert scene.locked == locked
    scene.user.commit()
    assert scene.claim() is Decision.REPLAY


@EVERY_FACE
def test_an_ending_waits_for_the_transaction_of_its_own_step(scene):
    """It is told to come back; the endings beside it are written, and later it is too."""
    token = mint_token()
    held = others()
    scene.commit([request(KEY, token), *held])
    scene.record_step_in(token)
    wishes = [settlement(SettleKind.COMPLETE, item.key, item.token) for item in held]
    own = settlement(SettleKind.COMPLETE, KEY, token)
    _, (busy, *settled) = scene.commit([], [own, *wishes])
    assert isinstance(busy, StoreUnavailable)
    assert decisions(settled) == {Decision.APPLY}
    locked = scene.locked
    _, (busy,) = scene.commit([], [own])
    assert isinstance(busy, StoreUnavailable)
    assert scene.locked == locked
    scene.user.commit()
    _, (answer,) = scene.commit([], [own])
    assert answer.decision is Decision.APPLY
    assert scene.run(scene.store.read(KEY)).steps == [STEP]


@EVERY_FACE
def test_renewals_do_not_wait_for_an_attempt_that_completes(scene):
    """Else one slow transaction would let the leases of all other operations run out. Its own is
    written beside the row, also when it has joined after the renewal was on its way."""
    token = mint_token()
    held = others()
    scene.commit([request(KEY, token), *held])
    scene.complete_in(token)
    wishes = [Extension(item.key, item.token, 30_000) for item in held]
    own = Extension(KEY, token, 30_000)
    assert decisions(scene.run(scene.store.extend([own, *wishes], 30.0))) == {Decision.APPLY}
    assert scene.locked == 0


def test_an_ending_with_entries_waits_alone(scene):
    """The entries of the others are staged; those of the busy one come with its ending."""
    token = mint_token()
    held = others()
    scene.commit([request(KEY, token), *held])
    scene.record_step_in(token)
    endings = []
    for claimed_key, claimed_token in [(KEY, token), *((item.key, item.token) for item in held)]:
        ending = settlement(SettleKind.COMPLETE, claimed_key, claimed_token)
        ending.entries = (StagedEntry(claimed_key.text, "topic", "text/plain", b"body"),)
        endings.append(ending)
    told = []
    scene.store.outbox.hints.listen(lambda: told.append(entries(scene)))
    _, (busy, *settled) = scene.commit([], endings)
    assert isinstance(busy, StoreUnavailable)
    assert decisions(settled) == {Decision.APPLY}
    assert told == [len(held)]
    scene.user.commit()
    _, (answer,) = scene.commit([], endings[:1])
    assert answer.decision is Decision.APPLY
    assert told == [len(held), len(held) + 1]


def entries(scene: Scene) -> int:
    with psycopg.connect(scene.url) as connection:
        found = connection.execute(f"SELECT count(*) FROM {scene.store.schema_name}.outbox")
        return found.fetchone()[0]


def test_a_zombies_ending_is_lost_at_once(scene):
    """While an atomic run takes the key over, the ending is told to come back; then it is lost."""
    token = mint_token()
    scene.claim(token=token, lease_ms=0)
    scene.start_atomic_run()
    own = settlement(SettleKind.COMPLETE, KEY, token)
    _, (busy,) = scene.commit([], [own])
    assert isinstance(busy, StoreUnavailable)
    scene.user.commit()
    _, (answer,) = scene.commit([], [own])
    assert answer.decision is Decision.LOST


def test_the_sweep_does_not_wait_for_an_atomic_run(scene):
    """The run drops the arguments of an earlier life in its transaction; those of others go."""
    keys = [KEY, key_of("other")]
    claims = [request(key, arguments=ARGUMENTS) for key in keys]
    scene.commit(claims)
    # Only the first is outlived, so that the sweep of keys takes no arguments along.
    windows = {KEY: 0, keys[1]: 60_000}
    for item in claims:
        ending = settlement(SettleKind.COMPLETE, item.key, item.token, active_ms=windows[item.key])
        scene.commit([], [ending])
    assert scene.start_atomic_run() is Decision.ADMIT
    run_sync(scene.store.sweep(100))
    scene.user.rollback()
    assert [run_sync(scene.store.read(key)).arguments for key in keys] == [ARGUMENTS, None]


def test_busy_keys_are_forgotten(scene, monkeypatch):
    """After some seconds, and the oldest ones when there are too many: a key that is free again is
    not looked at apart for ever."""
    now = 100.0
    monkeypatch.setattr(contended.time, "monotonic", lambda: now)
    busy = scene.store._contended.busy_keys
    busy.note([b"first"])
    busy.note(bytes([number // 256, number % 256]) for number in range(contended.BUSY_LIMIT))
    assert b"first" not in busy
    assert b"\x00\x00" in busy
    busy.note([b"late"])
    assert b"\x00\x00" not in busy
    now += contended.BUSY_SECONDS
    claims = others()
    assert busy.parted(claims, []) == [(False, claims, [])]
    assert not busy.knows_any({b"late"})


# Through the face, where policies decide who waits.


class Shop:
    """A table that shows every execution, and two ways to write to it under one key."""

    def __init__(self, scene: Scene) -> None:
        self.store = scene.store
        self.url = scene.url
        self._faces: list[Idempotency] = []
        self.table = f"{scene.store.schema_name}.orders"
        with psycopg.connect(self.url) as connection:
            connection.execute(f"CREATE TABLE {self.table} (key text, mode text)")

    def face(self) -> Idempotency:
        self._faces.append(Idempotency(self.store, caller="shop"))
        return self._faces[-1]

    def close(self) -> None:
        for face in self._faces:
            assert face.close()

    def insert(self, connection: Any, key: str, mode: str) -> str:
        connection.execute(f"INSERT INTO {self.table} VALUES (%s, %s)", (key, mode))
        return mode

    def run_leased(self, idem: Idempotency, key: str, policy: Policy) -> str:
        def operation() -> str:
            with psycopg.connect(self.url) as connection:
                return self.insert(connection, key, "leased")

        return idem.run(key, operation, name="order", request=key, policy=policy)

    def run_atomic(self, idem: Idempotency, connection: Any, key: str, policy: Policy) -> str:
        with idem.atomic(connection, key, name="order", request=key, policy=policy) as run:
            if not run.replayed:
                run.complete(self.insert(connection, key, "atomic"))
        return run.value

    def orders(self) -> list[tuple[str, str]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(f"SELECT key, mode FROM {self.table} ORDER BY key").fetchall()


@pytest.fixture
def shop(scene):
    made = Shop(scene)
    yield made
    made.close()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_leased_call_waits_by_its_policy(scene, shop, ending):
    """It goes on asking while others are served, and replays the outcome, or runs itself."""
    has_asked = threading.Event()
    original = scene.store._contended._write_unlocked

    async def told(*args: Any) -> Any:
        written = await original(*args)
        has_asked.set()
        return written

    scene.store._contended._write_unlocked = told
    idem = shop.face()
    answers = []
    shop.run_atomic(idem, scene.user, "order-1", WAITING)
    # Another process would see no more of the open run than this face, which is not told of it.
    rival = shop.face()
    waiter = threading.Thread(
        target=lambda: answers.append(shop.run_leased(rival, "order-1", WAITING))
    )
    waiter.start()
    assert has_asked.wait(PATIENCE_SECONDS)
    with pytest.raises(OperationInFlight):
        shop.run_leased(shop.face(), "order-1", Policy())
    assert shop.run_leased(idem, "order-2", WAITING) == "leased"
    assert answers == []
    getattr(scene.user, ending)()
    waiter.join(PATIENCE_SECONDS)
    winner = "atomic" if ending == "commit" else "leased"
    assert answers == [winner]
    assert shop.orders() == [("order-1", winner), ("order-2", "leased")]


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
def test_both_modes_race_for_one_key(scene, shop, is_known):
    """Whoever wins each round, there is one execution, and both are told of the same. Keys that are
    known to be busy are skipped where locked, which races with the lock of the atomic run."""
    rounds = 60
    barrier = threading.Barrier(2)
    found: dict[str, list[str]] = {"leased": [], "atomic": []}

    def key_in(number: int) -> str:
        return f"order-{number:03}"

    def compete_leased() -> None:
        idem = shop.face()
        busy = scene.store._contended.busy_keys
        for number in range(rounds):
            if is_known:
                busy.note([Key(key_in(number), caller="shop").digest])
            barrier.wait(PATIENCE_SECONDS)
            found["leased"].append(shop.run_leased(idem, key_in(number), WAITING))

    def compete_atomic() -> None:
        idem = shop.face()
        with psycopg.connect(shop.url) as connection:
            for number in range(rounds):
                barrier.wait(PATIENCE_SECONDS)
                if number % 3 == 0:
                    # The first run of the round is undone, whatever the other one saw of it.
                    shop.run_atomic(idem, connection, key_in(number), WAITING)
                    connection.rollback()
                found["atomic"].append(shop.run_atomic(idem, connection, key_in(number), WAITING))
                connection.commit()

    threads = [threading.Thread(target=compete_leased), threading.Thread(target=compete_atomic)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_SECONDS)
    assert len(found["leased"]) == rounds
    assert found["leased"] == found["atomic"]
    assert shop.orders() == [(key_in(n), mode) for n, mode in enumerate(found["leased"])]


def test_busy_keys_with_old_outcomes_hold_a_batch_up_once(scene):
    """Each of them has a row that is about to be replaced; their waits do not add up."""
    names = [f"old {number}" for number in range(5)]
    scene.user.execute("SELECT 1")
    transaction = scene.store.join(scene.user)
    for key in map(key_of, names):
        token = mint_token()
        scene.commit([request(key, token)])
        scene.commit([], [settlement(SettleKind.RELEASE, key, token)])
        run_sync(transaction.begin())
        assert run_sync(transaction.lock(key, None))
        assert run_sync(transaction.claim(request(key))).decision is Decision.TAKE_OVER
        run_sync(transaction.keep())
    waits = []
    fetch = scene.store._connector.fetch

    async def noting(sql: str, params: Any = ()) -> Any:
        if sql == scene.store._statements.texts["replace_record"]:
            waits.append(params[-1])
        return await fetch(sql, params)

    scene.store._connector.fetch = noting
    claims = [request(key_of(name)) for name in (*names, "new")]
    answers, _ = scene.commit(claims)
    decisions = [answer.decision for answer in answers]
    assert decisions == [Decision.IN_FLIGHT] * 5 + [Decision.ADMIT]
    # They have waited together, so each of them only looks.
    assert LOCK_WAIT not in waits
    assert len(waits) == 5

"""Transactions of users that last longer than the lease of the operation inside them.

Attacked: a step or an outcome is written in the user's own transaction, which then stays open
beyond the lease while its owner is healthy. What must hold: nobody takes the key over, neither
while the transaction is open nor at the moment it commits or rolls back; a dead owner still loses
the key one lease after its last renewal; a renewal counts for the claim that made it, and for no
other.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
import pytest

from retrysafe import AsyncIdempotency, Idempotency, OperationInFlight, Policy, current_attempt
from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import (
    Decision,
    ExtendAnswer,
    Extension,
    OperatorCommand,
    Payload,
    SettleKind,
    Step,
    StepWrite,
)
from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import store as postgres
from retrysafe.stores.sqlite import SqliteStore
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import key_of, request, settlement
from retrysafe.transactions import is_conflict, retry_serialization
from tests.postgres.conftest import Spied
from tests.servers.fixtures import migrated, schema_on

ISOLATIONS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
WRITES = ("step", "outcome")
ENDINGS = ("commit", "rollback")
# Longer than any test; a lease of 0 ms is over when the next statement begins.
LONG_MS = 600_000
TIMEOUT_SECONDS = 10.0
ARGUMENTS = Payload("json.1", b"", b"[[1],{}]")


@pytest.fixture(scope="module")
def url(postgres_server) -> Iterator[str]:
    with schema_on(postgres_server.url()) as made:
        yield migrated(made)


class Scene:
    """An owner's store, and the user's connection that its operation writes on."""

    def __init__(self, face: str, url: str, reached: str) -> None:
        self._runner = asyncio.Runner() if face == "asyncpg" else None
        options = "&prepared=off" if face == "pooled" else ""
        self.store = postgres_store(f"{reached}{options}", is_async=face == "asyncpg")
        # Not through the pooler's port: this one is the user's own business.
        self.url = url.partition("?")[0]
        self.user = psycopg.connect(self.url)
        self.key = key_of(f"order-{mint_token().hex()}")
        self.token = mint_token()

    def run(self, flow: Any) -> Any:
        return run_sync(flow) if self._runner is None else self._runner.run(flow)

    def sql(self, statement: str, *params: object) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            text = statement.replace("{schema}", self.store.schema_name)
            cursor = connection.execute(text, params or None)
            return cursor.fetchall() if cursor.description else []

    # The owner.

    def claim(self, token: bytes | None = None, **kwargs: Any) -> Decision:
        wish = request(self.key, token or mint_token(), **kwargs)
        ((answer,), _) = self.run(self.store.commit([wish], []))
        return answer.decision

    def begin(self, isolation: str) -> None:
        """A transaction whose snapshot is of now."""
        self.user.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        self.user.execute("SELECT 1")

    def write(self, what: str) -> None:
        """The step or the outcome, in the user's transaction."""
        transaction = self.store.join(self.user)
        if what == "step":
            step = Step("book", 1, Payload("json.1", b"", b"1"))
            decision = run_sync(transaction.record_step(StepWrite(self.key, self.token, step)))
        else:
            ending = settlement(SettleKind.COMPLETE, self.key, self.token)
            decision = run_sync(transaction.settle(ending))
        assert decision is Decision.APPLY

    def extend(
        self, token: bytes | None = None, *, lease_ms: int = LONG_MS, is_joined: bool = True
    ) -> ExtendAnswer | StoreUnavailable:
        wish = Extension(self.key, token or self.token, lease_ms, is_joined)
        (answer,) = self.run(self.store.extend([wish], TIMEOUT_SECONDS))
        return answer

    def row_holds(self) -> bool:
        """Whether the lease holds by the key's row alone."""
        ((holds,),) = self.sql(
            "SELECT lease_ends_at_ms > extract(epoch FROM clock_timestamp()) * 1000 "
            "FROM {schema}.keys WHERE digest = %s",
            self.key.digest,
        )
        return holds

    def end(self) -> Decision:
        ending = settlement(SettleKind.COMPLETE, self.key, self.token)
        _, (answer,) = self.run(self.store.commit([], [ending]))
        return answer.decision

    # Whoever wants the key.

    def claimed(self) -> Decision:
        return self.claim()

    def claimed_in_a_batch(self) -> Decision:
        """Beside another key that is abandoned, so that both are taken over by one statement."""
        other = key_of(f"beside-{mint_token().hex()}")
        self.run(self.store.commit([request(other, mint_token(), lease_ms=0)], []))
        wishes = [request(other), request(self.key)]
        answers, _ = self.run(self.store.commit(wishes, []))
        assert answers[0].decision is Decision.TAKE_OVER
        return answers[1].decision

    def recovered(self) -> Decision:
        """By a worker that has seen the key abandoned."""
        return self.run(self.store.take_over(request(self.key), self.token)).decision

    def released(self) -> Decision:
        """By an operator, who may release what is abandoned."""
        return self.run(self.store.operate(self.key, OperatorCommand.RELEASE))

    def run_atomically(self) -> Decision:
        """By an atomic run in another user's transaction."""
        with closing(psycopg.connect(self.url)) as connection:
            connection.execute("SET LOCAL lock_timeout = '5s'")
            transaction = self.store.join(connection)
            run_sync(transaction.begin())
            return run_sync(transaction.claim(request(self.key))).decision

    def close(self) -> None:
        self.user.close()
        self.run(self.store.close())
        if self._runner is not None:
            self._runner.close()


TAKERS: list[Callable[[Scene], Decision]] = [
    Scene.claimed,
    Scene.claimed_in_a_batch,
    Scene.recovered,
    Scene.released,
    Scene.run_atomically,
]
TAKEN = {Decision.TAKE_OVER, Decision.ADMIT, Decision.APPLY}


@pytest.fixture
def scene(request, url, postgres_server) -> Iterator[Scene]:
    face = getattr(request, "param", "psycopg")
    reached = url
    if face == "pooled":
        port = request.getfixturevalue("pgbouncer").port
        reached = url.replace(f":{postgres_server.port}/", f":{port}/")
    made = Scene(face, url, reached)
    yield made
    made.close()


EVERY_FACE = pytest.mark.parametrize("scene", ["psycopg", "asyncpg", "pooled"], indirect=True)


# Who is healthy stays the owner.


@EVERY_FACE
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("what", WRITES)
def test_a_renewed_owner_keeps_its_key(scene, what, isolation, ending):
    """During its transaction and after it; a commit of the outcome is what duplicates get then."""
    scene.claim(scene.token, lease_ms=0, arguments=ARGUMENTS)
    scene.begin(isolation)
    scene.write(what)
    assert scene.extend().decision is Decision.APPLY
    assert [taken(scene) in TAKEN for taken in TAKERS] == [False] * len(TAKERS)
    getattr(scene.user, ending)()
    if (what, ending) == ("outcome", "commit"):
        assert scene.claimed() is Decision.REPLAY
        assert scene.extend().decision is Decision.LOST
    else:
        assert [taken(scene) in TAKEN for taken in TAKERS] == [False] * len(TAKERS)
        assert scene.extend().decision is Decision.APPLY
        assert scene.end() is Decision.APPLY
        assert scene.claimed() is Decision.REPLAY


@EVERY_FACE
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_renewals_return_to_the_row_when_the_transaction_of_a_step_is_over(
    scene, isolation, ending
):
    """A process of the previous release looks there alone. While the transaction has the row they
    wait for nothing and leave it as it is."""
    scene.claim(scene.token, lease_ms=0)
    scene.begin(isolation)
    scene.write("step")
    assert scene.extend(is_joined=False).decision is Decision.APPLY
    assert scene.row_holds() is False
    assert [taken(scene) in TAKEN for taken in TAKERS] == [False] * len(TAKERS)
    getattr(scene.user, ending)()
    assert [taken(scene) in TAKEN for taken in TAKERS] == [False] * len(TAKERS)
    assert scene.extend(is_joined=False).decision is Decision.APPLY
    assert scene.row_holds() is True


@pytest.mark.parametrize("taken", TAKERS, ids=lambda item: item.__name__)
@pytest.mark.parametrize("what", WRITES)
def test_a_dead_owner_loses_its_key_when_its_transaction_is_over(scene, what, taken, monkeypatch):
    """Not before, because it might commit; and the renewal beside the row ends like any other."""
    monkeypatch.setattr(postgres, "_OPERATOR_LOCK_WAIT", "50ms")
    scene.claim(scene.token, lease_ms=0)
    scene.begin("READ COMMITTED")
    scene.write(what)
    assert scene.extend(lease_ms=0).decision is Decision.APPLY
    if taken is Scene.released:
        with pytest.raises(StoreUnavailable, match="an open transaction holds"):
            taken(scene)
    else:
        assert taken(scene) not in TAKEN
    scene.user.rollback()
    assert taken(scene) in TAKEN


def test_everybody_who_looks_sees_the_renewed_lease(scene):
    """The record, the lists of operators and workers, and the view for people."""
    scene.claim(scene.token, lease_ms=0, arguments=ARGUMENTS)
    query = RecordQuery(text_prefix=scene.key.text)

    def seen() -> tuple[bool, str, bool, bool, bool]:
        found = scene.run(scene.store.read(scene.key))
        (listed,) = scene.run(scene.store.list_records(query)).keys
        assert listed.record == found.record
        abandoned = scene.run(scene.store.list_abandoned(1000))
        resumable = scene.run(scene.store.list_resumable(1000, b"", ["charge"]))
        ((is_live,),) = scene.sql(
            "SELECT lease_ends_at > now() FROM {schema}.records WHERE key = %s", scene.key.text
        )
        return (
            found.record.lease_ends_at_ms > found.now_ms,
            listed.condition.value,
            found.record in [item.record for item in abandoned],
            found.record in [item.record for item in resumable],
            is_live,
        )

    assert seen() == (False, "abandoned", True, True, False)
    assert scene.extend().decision is Decision.APPLY
    assert seen() == (True, "running", False, False, True)


# A renewal that comes between the look of a taker and its write.


@pytest.mark.parametrize("taken", TAKERS, ids=lambda item: item.__name__)
def test_a_renewal_beats_a_takeover_that_has_only_looked(scene, taken):
    """What was read is compared in both places, whatever the snapshot of the write shows."""
    scene.claim(scene.token, lease_ms=0)
    if taken is Scene.run_atomically:
        texts = scene.store._statements.texts
        scene.store._statements.texts = Watched(texts, "replace_record", scene.extend)
    else:
        acts = dict.fromkeys(("replace_record", "replace_records"), scene.extend)
        Spied(scene.store).before = acts
    assert taken(scene) not in TAKEN
    assert scene.extend().decision is Decision.APPLY


class Watched(dict[str, str]):
    """Statements, and what is done just before one of them."""

    def __init__(self, statements: dict[str, str], name: str, act: Callable[[], object]) -> None:
        super().__init__(statements)
        self._name = name
        self._act = act

    def __getitem__(self, name: str) -> str:
        if name == self._name:
            self._act()
        return super().__getitem__(name)


@pytest.mark.parametrize("isolation", ISOLATIONS[1:])
def test_a_renewal_after_the_snapshot_of_an_atomic_run_is_a_conflict(scene, isolation):
    """It cannot see the renewal, so it must not take over: the transaction starts over."""
    scene.claim(scene.token, lease_ms=0)
    with closing(psycopg.connect(scene.url)) as connection:
        connection.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        transaction = scene.store.join(connection)
        run_sync(transaction.begin())
        assert scene.extend().decision is Decision.APPLY
        with pytest.raises(psycopg.errors.SerializationFailure) as raised:
            run_sync(transaction.claim(request(scene.key)))
    assert is_conflict(raised.value)
    assert scene.extend().decision is Decision.APPLY


def test_nobody_takes_over_while_a_renewal_is_being_written(scene):
    """Its statement has the key's row until it commits; whoever looks meanwhile is told so."""
    scene.claim(scene.token, lease_ms=0)
    with psycopg.connect(scene.url) as connection:
        sql = scene.store._statements.texts["extend_beside"]
        for number, place in ((3, "%s"), (2, "%s"), (1, "%s")):
            sql = sql.replace(f"${number}", place)
        connection.execute(sql, ([scene.key.digest], [scene.token], [LONG_MS]))
        assert scene.claimed() is Decision.IN_FLIGHT
        assert scene.recovered() is Decision.LOST
        connection.commit()
    assert scene.claimed() is Decision.IN_FLIGHT


def test_a_renewal_waits_for_no_atomic_run_that_takes_over(scene):
    """Its row is left out, the others of the batch are renewed, and afterwards it is lost."""
    scene.claim(scene.token, lease_ms=0)
    other, token = key_of(f"beside-{mint_token().hex()}"), mint_token()
    scene.run(scene.store.commit([request(other, token)], []))
    run = scene.store.join(scene.user)
    scene.begin("READ COMMITTED")
    assert run_sync(run.claim(request(scene.key))).decision is Decision.TAKE_OVER
    wishes = [Extension(key, held, LONG_MS, True) for key, held in
              ((scene.key, scene.token), (other, token))]  # fmt: skip
    own, beside = scene.run(scene.store.extend(wishes, TIMEOUT_SECONDS))
    assert isinstance(own, StoreUnavailable)
    assert beside.decision is Decision.APPLY
    scene.user.commit()
    assert scene.extend().decision is Decision.LOST


# A renewal counts for its own claim.


def test_a_renewal_ends_with_the_claim_that_made_it(scene):
    """The next owner's lease is its own, however far ahead the earlier one was renewed."""
    scene.claim(scene.token)
    assert scene.extend().decision is Decision.APPLY
    ending = settlement(SettleKind.RELEASE, scene.key, scene.token)
    scene.run(scene.store.commit([], [ending]))
    assert scene.claim(lease_ms=0) is Decision.TAKE_OVER
    assert scene.claim(lease_ms=0) is Decision.TAKE_OVER


def test_a_new_life_of_the_key_does_not_inherit_a_renewal(scene):
    scene.claim(scene.token)
    assert scene.extend().decision is Decision.APPLY
    ending = settlement(SettleKind.COMPLETE, scene.key, scene.token, active_ms=0)
    scene.run(scene.store.commit([], [ending]))
    assert scene.claim(lease_ms=0) is Decision.ADMIT
    assert scene.claim(lease_ms=0) is Decision.TAKE_OVER


def test_a_zombie_renews_nothing(scene):
    """Neither for itself nor for its successor, whose renewals stay as they are."""
    scene.claim(scene.token, lease_ms=0)
    successor = mint_token()
    assert scene.claim(successor, lease_ms=0) is Decision.TAKE_OVER
    assert scene.extend(successor).decision is Decision.APPLY
    assert scene.extend().decision is Decision.LOST
    assert scene.claimed() is Decision.IN_FLIGHT


def test_the_sweep_removes_renewals_that_are_over_and_no_others(scene):
    for lease_ms, left in ((LONG_MS, 1), (0, 0)):
        scene.token = mint_token()
        scene.key = key_of(f"order-{scene.token.hex()}")
        scene.claim(scene.token, lease_ms=0)
        assert scene.extend(lease_ms=lease_ms).decision is Decision.APPLY
        run_sync(scene.store.sweep(1000))
        found = scene.sql("SELECT 1 FROM {schema}.renewals WHERE digest = %s", scene.key.digest)
        assert len(found) == left


def test_a_process_of_the_previous_release_may_take_over_as_ever(scene):
    """It does not know the renewals beside the rows. What it takes is its own from then on, and the
    former owner hears of it."""
    scene.claim(scene.token, lease_ms=0)
    assert scene.extend().decision is Decision.APPLY
    scene.sql(
        "UPDATE {schema}.keys SET token = %s, attempt = attempt + 1, lease_ends_at_ms = 0 "
        "WHERE digest = %s AND lease_ends_at_ms <= extract(epoch FROM clock_timestamp()) * 1000",
        mint_token(),
        scene.key.digest,
    )
    assert scene.extend().decision is Decision.LOST
    assert scene.claimed() is Decision.TAKE_OVER


# Snapshots that are older than a renewal.


@pytest.mark.parametrize("isolation", ISOLATIONS[1:])
@pytest.mark.parametrize("what", WRITES)
def test_a_transaction_on_a_snapshot_is_not_disturbed_by_renewals_beside(scene, what, isolation):
    """The row is the same as in its snapshot. One that is renewed itself is a conflict, which is
    why an operation that has joined a transaction renews beside it from then on."""
    scene.claim(scene.token)
    scene.begin(isolation)
    assert scene.extend(is_joined=False).decision is Decision.APPLY
    with pytest.raises(psycopg.errors.SerializationFailure):
        scene.write(what)
    scene.user.rollback()
    scene.begin(isolation)
    assert scene.extend().decision is Decision.APPLY
    scene.write(what)
    assert scene.extend().decision is Decision.APPLY
    scene.user.commit()


# SQLite, where nobody can renew while the transaction has the file.


def test_a_step_on_sqlite_commits_with_a_lease_that_holds(tmp_path):
    """However long the transaction had the file before: the step renews the lease in it."""
    clock = ManualClock()
    store = SqliteStore(tmp_path / "shop.db", now_ms=clock)
    key, token = key_of("order-1"), mint_token()
    try:
        run_sync(store.commit([request(key, token, lease_ms=1_000)], []))
        with closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            clock.advance(timedelta(seconds=5))
            step = Step("book", 1, Payload("json.1", b"", b"1"))
            write = StepWrite(key, token, step, lease_ms=1_000)
            joined = store.join(connection)
            run_sync(joined.begin())
            assert run_sync(joined.record_step(write)) is Decision.APPLY
            run_sync(joined.keep())
            connection.execute("COMMIT")
        ((answer,), _) = run_sync(store.commit([request(key)], []))
        assert answer.decision is Decision.IN_FLIGHT
    finally:
        run_sync(store.close())


# Through the face, with leases that really end.


class Desk:
    """An owner and a rival with stores of their own, and what was executed."""

    def __init__(self, url: str, reached: str, lease: timedelta) -> None:
        self.url = url.partition("?")[0]
        self.reached = reached
        self.policy = Policy(lease=lease)
        self.lease_seconds = lease.total_seconds()
        self.executed: list[str] = []

    def cases(self) -> list[tuple[str, str, str]]:
        return [
            (what, isolation, ending)
            for what in WRITES
            for isolation in ISOLATIONS
            for ending in ENDINGS
        ]

    def expected(self, what: str, ending: str, key: str, rival: object) -> None:
        """What the rival got in the very moment after the transaction was over."""
        if (what, ending) == ("outcome", "commit"):
            assert rival == key
        else:
            assert isinstance(rival, OperationInFlight), (what, ending, rival)


def run_in_threads(desk: Desk) -> None:
    with (
        Idempotency(desk.reached, caller="shop") as owner,
        Idempotency(desk.reached, caller="shop", cache=False) as rival,
    ):

        def ask(key: str) -> object:
            def never() -> str:
                desk.executed.append(f"{key} by the rival")
                return "rival"

            try:
                return rival.run(key, never, name="place", request=None, policy=desk.policy)
            except OperationInFlight as refusal:
                return refusal

        def case(what: str, isolation: str, ending: str) -> None:
            key = f"{what}-{isolation}-{ending}-{mint_token().hex()}"

            def operation() -> str:
                desk.executed.append(key)
                # As the guide says: a renewal that was under way conflicts with a snapshot, once.
                retry_serialization(write, current_attempt())
                return key

            def write(attempt) -> None:
                with psycopg.connect(desk.url) as connection:
                    connection.execute(f"BEGIN ISOLATION LEVEL {isolation}")
                    if what == "step":
                        attempt.step("book", lambda: 1, in_transaction=connection)
                    else:
                        attempt.complete_in(connection, key)
                    time.sleep(desk.lease_seconds * 1.3)
                    assert isinstance(ask(key), OperationInFlight)
                    getattr(connection, ending)()
                    desk.expected(what, ending, key, ask(key))

            told = owner.run(key, operation, name="place", request=None, policy=desk.policy)
            assert told == key
            assert ask(key) == key

        with ThreadPoolExecutor(12) as pool:
            for done in [pool.submit(case, *item) for item in desk.cases()]:
                done.result()


def run_in_tasks(desk: Desk) -> None:
    async def main() -> None:
        async with (
            AsyncIdempotency(desk.reached, caller="shop") as owner,
            AsyncIdempotency(desk.reached, caller="shop", cache=False) as rival,
        ):

            async def ask(key: str) -> object:
                async def never() -> str:
                    desk.executed.append(f"{key} by the rival")
                    return "rival"

                try:
                    return await rival.run(
                        key, never, name="place", request=None, policy=desk.policy
                    )
                except OperationInFlight as refusal:
                    return refusal

            async def case(what: str, isolation: str, ending: str) -> None:
                key = f"{what}-{isolation}-{ending}-{mint_token().hex()}"

                async def one() -> int:
                    return 1

                async def operation() -> str:
                    desk.executed.append(key)
                    await retry_serialization(write, current_attempt())
                    return key

                async def write(attempt) -> None:
                    connection = await asyncpg.connect(desk.url)
                    try:
                        await connection.execute(f"BEGIN ISOLATION LEVEL {isolation}")
                        if what == "step":
                            await attempt.step("book", one, in_transaction=connection)
                        else:
                            await attempt.complete_in(connection, key)
                        await asyncio.sleep(desk.lease_seconds * 1.3)
                        assert isinstance(await ask(key), OperationInFlight)
                        await connection.execute(ending)
                        desk.expected(what, ending, key, await ask(key))
                    finally:
                        await connection.close()

                told = await owner.run(
                    key, operation, name="place", request=None, policy=desk.policy
                )
                assert told == key
                assert await ask(key) == key

            await asyncio.gather(*(case(*item) for item in desk.cases()))

    asyncio.run(main())


@pytest.mark.parametrize(
    "lease_seconds", [1, pytest.param(30, marks=pytest.mark.long)], ids=["short", "default"]
)
@pytest.mark.parametrize("face", ["threads", "tasks", "pooled threads"])
def test_operations_in_long_transactions_run_once(
    request, url, postgres_server, face, lease_seconds
):
    """A step or an outcome, committed or rolled back, at every isolation level, all at once: the
    rival that asks in the moment after the transaction never runs, and nobody loses a claim."""
    reached = url
    if face == "pooled threads":
        port = request.getfixturevalue("pgbouncer").port
        reached = url.replace(f":{postgres_server.port}/", f":{port}/") + "&prepared=off"
    desk = Desk(url, reached, timedelta(seconds=lease_seconds))
    (run_in_tasks if face == "tasks" else run_in_threads)(desk)
    assert len(desk.executed) == len(set(desk.executed)) == len(desk.cases())


@pytest.mark.parametrize("isolation", ISOLATIONS[1:])
def test_a_long_transaction_on_a_snapshot_commits_when_it_is_tried_again(url, isolation):
    """Renewals before the operation has joined are a conflict once; the second try is renewed
    beside its row, so it may last as long as it likes."""
    policy = Policy(lease=timedelta(seconds=1))
    tries = []

    def place() -> str:
        with psycopg.connect(url.partition("?")[0]) as connection:
            connection.execute(f"BEGIN ISOLATION LEVEL {isolation}")
            connection.execute("SELECT 1")
            tries.append(time.monotonic())
            time.sleep(1.2)
            current_attempt().complete_in(connection, "placed")
        return "placed"

    with Idempotency(url, caller="shop") as idem:
        told = idem.run(
            f"order-{isolation}", lambda: retry_serialization(place), name="place", request=None,
            policy=policy,
        )  # fmt: skip
        stored = idem.read(f"order-{isolation}")
    assert told == "placed"
    assert len(tries) == 2
    assert (stored.record.attempt, stored.condition.value) == (1, "succeeded")

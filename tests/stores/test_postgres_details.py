"""What is particular to PostgreSQL: refused rows, locks, schemas, the server's clock, the pool."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest

from retrysafe import Key, StoreUnavailable
from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import (
    ClaimAnswer,
    Decision,
    Extension,
    Payload,
    SettleKind,
    Step,
    StepWrite,
)
from retrysafe.errors import StoreError, StoreRejected
from retrysafe.runtime.identity import mint_token
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.postgres.drivers.asyncpg import AsyncpgConnector
from retrysafe.stores.postgres.drivers.port import PoolOptions
from retrysafe.stores.postgres.drivers.psycopg import PsycopgConnector
from retrysafe.testing.suite.probe import key_of, request, settlement
from tests.servers.fixtures import migrated

FACES = pytest.mark.parametrize("face", ["blocking", "async"])
LONG = timedelta(seconds=60)
SHORT = PoolOptions(
    size_limit=2, connect_timeout=timedelta(seconds=1), statement_timeout=timedelta(seconds=1)
)


def split(url: str) -> tuple[str, str]:
    """The URL without its schema, and the schema."""
    plain, _, schema = url.partition("?schema=")
    return plain, schema


class Scene:
    """A store of one kind, and the way to drive it."""

    def __init__(self, face: str, url: str, options: PoolOptions = SHORT) -> None:
        plain, schema = split(url)
        self._runner = asyncio.Runner() if face == "async" else None
        kind = AsyncpgConnector if face == "async" else PsycopgConnector
        self.store = PostgresStore(kind(plain, plain, options), location=plain, schema_name=schema)

    def run(self, flow):
        if self._runner is not None:
            return self._runner.run(flow)
        try:
            flow.send(None)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("a blocking store suspended")

    def extend(self, *extensions):
        return self.run(self.store.extend(extensions, 30.0))

    def commit(self, claims=(), settlements=()):
        return self.run(self.store.commit(claims, settlements))

    def close(self) -> None:
        self.run(self.store.close())
        if self._runner is not None:
            self._runner.close()


@pytest.fixture
def scene(migrated_url, face):
    made = Scene(face, migrated_url)
    yield made
    made.close()


@contextmanager
def locked(url: str, *keys: Key):
    """Somebody else's transaction that holds the rows of these keys."""
    plain, schema = split(url)
    with psycopg.connect(plain) as connection:
        for key in keys:
            found = connection.execute(
                f"SELECT 1 FROM {schema}.keys WHERE digest = %s FOR UPDATE", (key.digest,)
            )
            assert found.fetchone() == (1,)
        yield


def step_of(key: Key, token: bytes) -> StepWrite:
    return StepWrite(key, token, Step("charge", 1, Payload("json.1", b"", b"1")))


@FACES
@pytest.mark.parametrize("poison", ["\x00", "\ud800"])
def test_a_poisoned_row_is_refused_alone(scene, poison):
    """In a batch of 100, only the row that PostgreSQL cannot hold is refused, on every path."""
    keys = [key_of(f"key-{number}") for number in range(100)]
    claims = [request(key) for key in keys]
    claims[37] = request(keys[37], operation=poison)
    claimed, _ = scene.commit(claims)
    assert isinstance(claimed.pop(37), StoreRejected)
    assert all(answer.decision is Decision.ADMIT for answer in claimed)
    endings = [settlement(SettleKind.COMPLETE, item.key, item.token) for item in claims]
    endings[11].payload = Payload(poison, b"", b"")
    _, settled = scene.commit([], endings)
    assert isinstance(settled[11], StoreRejected)
    assert settled[37].decision is Decision.LOST
    assert [item.decision for n, item in enumerate(settled) if n not in (11, 37)] == (
        [Decision.APPLY] * 98
    )
    assert scene.run(scene.store.read(keys[37])) is None


@FACES
def test_refusals_are_errors_of_the_store_everywhere(scene):
    """A step's name that is too long for its index, or holds NUL, is refused as a row is."""
    key, token = key_of("key"), mint_token()
    scene.commit([request(key, token)])
    payload = Payload("json.1", b"", b"1")
    # Long enough that compression does not help, short enough that nothing else is wrong.
    long = "".join(chr(0x4E00 + number % 20_000) for number in range(30_000))
    for name in ("a\x00b", long):
        with pytest.raises(StoreRejected):
            scene.run(scene.store.record_step(StepWrite(key, token, Step(name, 1, payload))))
    with pytest.raises(StoreError):
        scene.run(scene.store.list_records(RecordQuery(text_prefix="a\x00")))
    ((rejected,), _) = scene.commit([replace(request(key_of("other")), lease_ms=2**70)])
    assert isinstance(rejected, StoreRejected)
    assert scene.run(scene.store.read(key)).steps == []


@FACES
def test_an_extend_of_one_does_not_wait_either(scene, migrated_url):
    """A user's transaction that has recorded a step must not hold up the renewals of others."""
    key, token = key_of("key"), mint_token()
    scene.commit([request(key, token)])
    extension = Extension(key, token, 30_000)
    with locked(migrated_url, key):
        (answer,) = scene.extend(extension)
    assert isinstance(answer, StoreUnavailable)
    assert scene.extend(extension)[0].decision is Decision.APPLY


@FACES
def test_an_extend_of_many_never_waits_for_a_row(scene, migrated_url):
    """A row that somebody is writing is answered as busy; the leases beside it are extended."""
    keys = [key_of(f"key-{number}") for number in range(3)]
    claims = [request(key) for key in keys]
    scene.commit(claims)
    extensions = [Extension(item.key, item.token, 30_000) for item in claims]
    with locked(migrated_url, keys[1]):
        answers = scene.extend(*extensions)
    assert isinstance(answers[1], StoreUnavailable)
    assert [answers[0].decision, answers[2].decision] == [Decision.APPLY] * 2
    assert [answer.decision for answer in scene.extend(*extensions)] == [Decision.APPLY] * 3


@FACES
def test_a_statement_that_waits_too_long_is_given_up(scene, migrated_url):
    """The caller is told within the limit, and the store works on over another connection."""
    key, token = key_of("key"), mint_token()
    scene.commit([request(key, token)])
    with locked(migrated_url, key):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            scene.run(scene.store.record_step(step_of(key, token)))
        assert time.monotonic() - started < 5
        assert scene.commit([request(key_of("other"))])[0][0].decision is Decision.ADMIT
    # The server may have gone on with the statement when the row was free.
    assert scene.run(scene.store.record_step(step_of(key, token))) is Decision.APPLY
    assert len(scene.run(scene.store.read(key)).steps) == 1


@FACES
def test_a_pool_that_is_used_up_says_so_in_time(migrated_url, face):
    """With all connections busy a call waits for its limit and no longer; then all goes on."""
    patient = replace(SHORT, statement_timeout=timedelta(seconds=30))
    scene = Scene(face, migrated_url, patient)
    held = [request(key_of(f"held-{number}")) for number in range(SHORT.size_limit)]
    scene.commit(held)
    steps = [step_of(item.key, item.token) for item in held]
    plain, _ = split(migrated_url)
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
    )
    schema = scene.store.schema_name

    def wait_until_blocked() -> None:
        with psycopg.connect(plain, autocommit=True) as connection:
            for _ in range(2000):
                row = connection.execute(waiting, (f"%{schema}%",)).fetchone()
                if row == (SHORT.size_limit,):
                    return
                time.sleep(0.01)
        raise AssertionError("the statements do not wait for the lock")

    if face == "async":

        async def scenario():
            lock = locked(migrated_url, *(item.key for item in held))
            with lock:
                tasks = [asyncio.ensure_future(scene.store.record_step(item)) for item in steps]
                await asyncio.to_thread(wait_until_blocked)
                started = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    await scene.store.read(key_of("other"))
                assert time.monotonic() - started < 5
            return [await task for task in tasks]

        decisions = scene.run(scenario())
    else:
        with ThreadPoolExecutor(SHORT.size_limit) as pool:
            with locked(migrated_url, *(item.key for item in held)):
                futures = [
                    pool.submit(lambda item: scene.run(scene.store.record_step(item)), item)
                    for item in steps
                ]
                wait_until_blocked()
                started = time.monotonic()
                with pytest.raises(StoreUnavailable, match="busy"):
                    scene.run(scene.store.read(key_of("other")))
                assert time.monotonic() - started < 5
            decisions = [future.result(30) for future in futures]
    assert decisions == [Decision.APPLY] * SHORT.size_limit
    assert scene.run(scene.store.read(key_of("other"))) is None
    scene.close()


@FACES
def test_a_server_that_accepts_and_says_nothing_is_given_up(face):
    """A connection is not waited for without end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        scene = Scene(face, f"postgresql://nobody@127.0.0.1:{port}/none?schema=s")
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            scene.run(scene.store.read(key_of("key")))
        # The drivers wait two seconds at least.
        assert time.monotonic() - started < 8
        scene.close()


def test_schemas_of_one_database_are_independent(new_postgres_url):
    """The same key in two schemas is two keys; a sweep of one leaves the other."""
    scenes = [Scene("blocking", migrated(new_postgres_url())) for _ in range(2)]
    key = key_of("key")
    tokens = [mint_token(), mint_token()]
    for scene, token in zip(scenes, tokens, strict=True):
        ((answer,), _) = scene.commit([request(key, token)])
        assert answer.decision is Decision.ADMIT
    _, (lost,) = scenes[1].commit([], [settlement(SettleKind.COMPLETE, key, tokens[0])])
    assert lost.decision is Decision.LOST
    scenes[0].commit([], [settlement(SettleKind.COMPLETE, key, tokens[0], active_ms=0)])
    assert scenes[0].run(scenes[0].store.sweep(10)).keys == 1
    assert scenes[0].run(scenes[0].store.read(key)) is None
    assert scenes[1].run(scenes[1].store.read(key)).record.token == tokens[1]
    for scene in scenes:
        scene.close()


@FACES
@pytest.mark.parametrize("skew_seconds", [-7200, 7200])
def test_the_server_s_clock_decides(scene, monkeypatch, skew_seconds):
    """A host two hours off neither takes over a running key nor waits for an abandoned one."""
    honest = time.time_ns()
    running, abandoned = key_of("running"), key_of("abandoned")
    scene.commit([request(running), request(abandoned, lease_ms=0)])
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + skew_seconds)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + skew_seconds * 10**9)
    claimed, _ = scene.commit([request(running), request(abandoned)])
    assert [item.decision for item in claimed] == [Decision.IN_FLIGHT, Decision.TAKE_OVER]
    assert 0 < claimed[0].remaining_ms <= 30_000
    now_ms = scene.run(scene.store.read(running)).now_ms
    assert abs(now_ms - honest // 10**6) < 600_000


def test_threads_share_the_pool_and_leave_its_connections_fit_for_use(migrated_url):
    """Many threads over two connections: every call is answered, and two are kept at most."""
    scene = Scene("blocking", migrated_url)
    barrier = threading.Barrier(8)

    def work(number: int) -> list[ClaimAnswer]:
        barrier.wait(30)
        claims = [request(key_of(f"key-{number}-{index}")) for index in range(20)]
        return [scene.commit([claim])[0][0] for claim in claims]

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for done in pool.map(work, range(8)) for answer in done]
    assert [answer.decision for answer in answers] == [Decision.ADMIT] * 160
    assert 1 <= len(scene.store._connector._pool._idle) <= SHORT.size_limit
    scene.close()
    assert scene.store._connector._pool._idle == []


def test_a_statement_of_a_closed_pool_leaves_the_next_pool_alone(postgres_url):
    """It fails after the store was closed and used again, and takes no connection with it."""
    plain, _ = split(postgres_url)

    async def main() -> None:
        connector = AsyncpgConnector(plain, plain, replace(SHORT, statement_timeout=LONG))
        statement = asyncio.create_task(connector.fetch("SELECT pg_sleep(60), 'of the old pool'"))
        async with await psycopg.AsyncConnection.connect(plain, autocommit=True) as desk:
            for _ in range(3000):
                if pids := await _running(desk, "of the old pool"):
                    break
                await asyncio.sleep(0.01)
            closing = asyncio.create_task(connector.close())
            await asyncio.sleep(0)
            assert connector._pool is None
            await connector.fetch("SELECT 1")
            await desk.execute("SELECT pg_terminate_backend(%s)", pids)
            with pytest.raises(StoreUnavailable):
                await statement
        await asyncio.wait_for(closing, 30)
        assert len(connector._resting) == 1
        await asyncio.wait_for(connector.close(), 30)

    asyncio.run(main())


async def _running(desk, words: str) -> list[int]:
    cursor = await desk.execute(
        "SELECT pid FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()",
        [f"%{words}%"],
    )
    return [pid for (pid,) in await cursor.fetchall()]

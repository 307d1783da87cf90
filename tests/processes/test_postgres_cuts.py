"""Connections that are cut during COMMIT, and a server that is killed between claim and settle."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from datetime import timedelta

import asyncpg
import psycopg
import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    Key,
    OutcomeNotStored,
    Policy,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.core.model import Payload, SettleKind, Settlement, State, Step, StepWrite
from retrysafe.stores import Condition
from retrysafe.stores.opening import open_store
from retrysafe.stores.postgres.atomic import PostgresTransaction
from retrysafe.stores.postgres.drivers.port import Conflict, RowRefused
from retrysafe.stores.postgres.same_database import SameDatabase
from retrysafe.stores.postgres.schema import statements
from retrysafe.stores.postgres.user_connections import adapted
from tests.servers.cutting import Cut, CuttingProxy
from tests.servers.fixtures import migrated
from tests.servers.postgres import PostgresServer

POLICY = Policy(settle_patience=timedelta(seconds=60))
KEY = Key("the key", caller="owner")
FACES = pytest.mark.parametrize("face", ["blocking", "async"])


def run_once(face: str, url: str, body) -> tuple[str, int]:
    """One call on a fresh object; the value and the attempt."""
    if face == "blocking":
        with Idempotency(url, caller="owner", policy=POLICY) as idem:
            answer = idem.answer("the key", body, name="op", request="r")
        return answer.value, answer.attempt

    async def call() -> tuple[str, int]:
        async def operation() -> str:
            return await asyncio.to_thread(body)

        async with AsyncIdempotency(url, caller="owner", policy=POLICY) as idem:
            answer = await idem.answer("the key", operation, name="op", request="r")
        return answer.value, answer.attempt

    return asyncio.run(call())


def stored_in(url: str):
    with Idempotency(url, caller="owner") as idem:
        return idem.read("the key")


@pytest.fixture
def proxy(postgres_server):
    proxy = CuttingProxy(postgres_server.port)
    yield proxy
    proxy.close()


@FACES
@pytest.mark.parametrize("cut", list(Cut))
@pytest.mark.parametrize("moment", ["claim", "settle"])
def test_a_cut_during_commit_is_found_out_by_the_token(
    postgres_server, migrated_url, proxy, face, cut, moment
):
    """Whether the commit happened or not, the operation runs once and its outcome is stored once.

    A cut before the server has the statement means that nothing happened; a cut of the answer means
    that it did. The client cannot tell them apart, so it asks again with the same token.
    """
    url = migrated_url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
    runs = []

    def body() -> str:
        runs.append(1)
        if moment == "settle":
            proxy.arm(KEY.digest, cut)
        return "done"

    if moment == "claim":
        proxy.arm(KEY.digest, cut)
    assert run_once(face, url, body) == ("done", 1)
    assert proxy.cuts == 1
    assert len(runs) == 1
    stored = stored_in(migrated_url)
    assert stored.condition is Condition.SUCCEEDED
    assert len(stored.outcomes) == 1
    assert run_once(face, migrated_url, body) == ("done", 1)
    assert len(runs) == 1


@FACES
def test_a_server_killed_between_claim_and_settle_changes_nothing(mortal_server, face):
    """kill -9 of the whole server while the operation runs: the ending is stored after the restart.

    The same object goes on working: it reconnects by itself.
    """
    url = migrated(f"{mortal_server.url()}?schema=killed_{face}")
    runs = []
    # Comes back while the ending is being tried already.
    restart = threading.Timer(0.5, mortal_server.start)

    def body() -> str:
        runs.append(1)
        mortal_server.kill()
        restart.start()
        return "done"

    assert run_once(face, url, body) == ("done", 1)
    restart.join(60)
    assert len(runs) == 1
    stored = stored_in(url)
    assert (stored.condition, len(stored.outcomes)) == (Condition.SUCCEEDED, 1)
    assert run_once(face, url, body) == ("done", 1)
    assert len(runs) == 1


@FACES
def test_a_server_killed_while_nobody_looks_is_found_again(mortal_server, face):
    """Idle connections of an earlier server are not used: the next call needs no second try."""
    url = migrated(f"{mortal_server.url()}?schema=idle_{face}")
    store = open_store(url, is_async=face == "async")

    async def apart(function) -> None:
        # The loop has to see that its connections end, as a loop that is in use does.
        if face == "async":
            await asyncio.to_thread(function)
        else:
            function()

    async def scenario() -> None:
        assert await store.read(KEY) is None
        await apart(mortal_server.kill)
        with pytest.raises(StoreUnavailable):
            await store.read(KEY)
        await apart(mortal_server.start)
        assert await store.read(KEY) is None
        await apart(mortal_server.stop)
        await apart(mortal_server.start)
        assert await store.read(KEY) is None
        await store.close()

    drive(face, scenario())


@FACES
def test_a_server_that_stays_away_is_reported_and_the_operation_is_not_repeated(
    mortal_server, face
):
    """Without a server the caller is told that it ran; the value is in the error."""
    url = migrated(f"{mortal_server.url()}?schema=away_{face}")
    runs = []
    patience = POLICY.with_changes(settle_patience=timedelta(milliseconds=300))

    def body() -> str:
        runs.append(1)
        mortal_server.kill()
        return "done"

    async def body_async() -> str:
        return body()

    async def call() -> None:
        async with AsyncIdempotency(url, caller="owner", policy=patience) as idem:
            await idem.run("the key", body_async, name="op", request="r")

    try:
        with pytest.raises(OutcomeNotStored) as raised:
            if face == "async":
                asyncio.run(call())
            else:
                with Idempotency(url, caller="owner", policy=patience) as idem:
                    idem.run("the key", body, name="op", request="r")
        assert raised.value.value == "done"
        with pytest.raises(StoreUnavailable):
            run_once(face, url, body)
        assert len(runs) == 1
    finally:
        mortal_server.start()
    assert stored_in(url).condition is Condition.RUNNING


# What the drivers say when the connection is gone.
LOST = (psycopg.OperationalError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)


class Book:
    """A user's table, and a connection to it that is lost with the server at its first commit."""

    def __init__(self, face: str, server: PostgresServer) -> None:
        self.face = face
        self.server = server
        self.url = migrated(f"{server.url()}?schema=users_{face}_{uuid.uuid4().hex[:8]}")
        self.table = f"book_{uuid.uuid4().hex[:8]}"
        self.inserts = 0
        with psycopg.connect(server.url()) as connection:
            connection.execute(f"CREATE TABLE {self.table} (line text)")

    def lines(self) -> list[str]:
        with psycopg.connect(self.server.url()) as connection:
            return [line for (line,) in connection.execute(f"SELECT line FROM {self.table}")]

    @property
    def statement(self) -> str:
        self.inserts += 1
        return f"INSERT INTO {self.table} VALUES ('line {self.inserts}')"

    def crash(self) -> None:
        """Once, before the commit."""
        if self.inserts == 1:
            self.server.kill()
            self.server.start()


def write_down(book: Book, way: str) -> str:
    """A line in a transaction of its own, with the outcome or as a step."""
    with contextlib.closing(psycopg.connect(book.server.url())) as connection:
        if way == "outcome":
            connection.execute(book.statement)
            current_attempt().complete_in(connection, "done")
        else:

            def insert() -> str:
                connection.execute(book.statement)
                return "done"

            connection.execute("SELECT 1")
            current_attempt().step("write", insert, in_transaction=connection)
        book.crash()
        connection.commit()
    return "done"


async def write_down_async(book: Book, way: str) -> str:
    connection = await asyncpg.connect(book.server.url())
    try:
        async with connection.transaction():
            if way == "outcome":
                await connection.execute(book.statement)
                await current_attempt().complete_in(connection, "done")
            else:

                async def insert() -> str:
                    await connection.execute(book.statement)
                    return "done"

                await current_attempt().step("write", insert, in_transaction=connection)
            await asyncio.to_thread(book.crash)
    finally:
        connection.terminate()
    return "done"


def run_written(book: Book, blocking, suspending) -> str:
    if book.face == "blocking":
        with Idempotency(book.url, caller="owner") as idem:
            return idem.run("the key", blocking, name="op", request="r")

    async def call() -> str:
        async with AsyncIdempotency(book.url, caller="owner") as idem:
            return await idem.run("the key", suspending, name="op", request="r")

    return asyncio.run(call())


@FACES
def test_a_server_killed_before_the_users_commit_frees_the_key(mortal_server, face):
    """The crashed server knows nothing of the transaction: the user's own error is told, and the
    next call runs at once."""
    book = Book(face, mortal_server)

    def call() -> str:
        return run_written(
            book, lambda: write_down(book, "outcome"), lambda: write_down_async(book, "outcome")
        )

    with pytest.raises(LOST):
        call()
    assert stored_in(book.url).condition is Condition.RELEASED
    assert call() == "done"
    assert book.lines() == ["line 2"]
    endings = [outcome.state for outcome in stored_in(book.url).outcomes]
    assert endings == [State.RELEASED, State.SUCCEEDED]
    assert call() == "done"
    assert book.inserts == 2


@FACES
def test_a_server_killed_before_the_commit_of_a_step_forgets_the_step(mortal_server, face):
    """The operation goes on by itself: the step is not done, so it is done again."""
    book = Book(face, mortal_server)

    def blocking() -> str:
        with pytest.raises(LOST):
            write_down(book, "step")
        # A step outside a transaction asks what became of the one before it.
        current_attempt().step("look", list)
        return write_down(book, "step")

    async def look() -> list[str]:
        return []

    async def suspending() -> str:
        with pytest.raises(LOST):
            await write_down_async(book, "step")
        await current_attempt().step("look", look)
        return await write_down_async(book, "step")

    assert run_written(book, blocking, suspending) == "done"
    assert book.lines() == ["line 2"]
    assert sorted(step.name for step in stored_in(book.url).steps) == ["look", "write"]


class Refusing:
    """A connector that knows of no outcome and no step, and fails at one of the questions."""

    def __init__(self, error: Exception, words: str) -> None:
        self.error = error
        self.words = words

    async def fetch(self, sql: str, params: object = ()) -> list[tuple[object]]:
        if self.words in sql:
            raise self.error
        return [("aborted" if "pg_xact_status" in sql else 0,)]


@pytest.mark.parametrize("error", [RowRefused("refused"), Conflict("a deadlock")], ids=repr)
@pytest.mark.parametrize("words", ["pg_xact_status", "count(*)"])
def test_what_the_store_does_not_understand_is_an_error_of_the_store(mortal_server, error, words):
    """Whoever asks for a fate is told that nobody knows, and never by an internal error."""
    payload = Payload("json.1", b"", b"1")
    ending = Settlement(SettleKind.COMPLETE, KEY, b"token", payload)
    write = StepWrite(KEY, b"token", Step("write", 1, payload))
    connector, sql = Refusing(error, words), statements("retrysafe")
    with psycopg.connect(mortal_server.url()) as connection:
        transaction = PostgresTransaction(
            adapted(connection),
            connector=connector,
            statements=sql,
            schema_name="retrysafe",
            location="the server",
            same_database=SameDatabase(
                connector, statements=sql, location="the server", doubt=lambda: None
            ),
        )
        for fate in (transaction.fate(ending), transaction.step_fate(write)):
            with pytest.raises(StoreUnavailable, match="the server does not tell"):
                drive("blocking", fate)


def drive(face: str, flow) -> None:
    if face == "async":
        asyncio.run(flow)
        return
    try:
        flow.send(None)
    except StopIteration:
        return
    raise AssertionError("a blocking store suspended")

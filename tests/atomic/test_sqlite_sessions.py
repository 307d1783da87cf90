"""SQLAlchemy's sessions and connections, and aiosqlite's, on the embedded store."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import aiosqlite
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session
from sqlalchemy.orm import sessionmaker as session_maker

from retrysafe import (
    AsyncIdempotency,
    ClaimLost,
    Idempotency,
    InvalidInput,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.errors import OutcomeMissing, TransactionMissing

INSERT = "INSERT INTO orders (name) VALUES ('{}')"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Undo(Exception):
    """Ends a transaction on purpose."""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT)")
    return path


def orders(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM orders")]


def states(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [state for (state,) in connection.execute("SELECT state FROM retrysafe_keys")]


# Blocking.


@contextlib.contextmanager
def by_session(engine):
    with Session(engine) as session, session.begin():
        yield session, lambda name: session.add(Order(name=name))


@contextlib.contextmanager
def by_scoped_session(engine):
    session = scoped_session(session_maker(engine))
    try:
        yield session, lambda name: session.add(Order(name=name))
        session.commit()
    finally:
        session.remove()


@contextlib.contextmanager
def by_connection(engine):
    with engine.begin() as connection:
        yield connection, lambda name: connection.execute(sqlalchemy.text(INSERT.format(name)))


@pytest.fixture(params=[by_session, by_scoped_session, by_connection])
def transaction(request, path):
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    yield lambda: request.param(engine)
    engine.dispose()


@pytest.fixture
def idem(path):
    with Idempotency(f"sqlite:///{path}", caller="shop") as made:
        # A transaction that has written cannot wait for the schema to be made.
        assert made.read("nothing") is None
        yield made


def run(idem, operation):
    return idem.run("order-1", operation, name="order", request=None)


def test_a_session_completes_a_leased_operation(idem, path, transaction):
    """After its own writes, which hold the file's lock: nobody waits for that."""

    def place():
        with transaction() as (owner, write):
            write("pen")
            current_attempt().complete_in(owner, {"order": "pen"})

    assert [run(idem, place) for _ in range(2)] == [{"order": "pen"}] * 2
    assert orders(path) == ["pen"]


def test_a_session_that_rolls_back_leaves_the_usual_path(idem, path, transaction):
    def place():
        with contextlib.suppress(Undo), transaction() as (owner, write):
            write("pen")
            current_attempt().complete_in(owner, "in the transaction")
            raise Undo
        return "after it"

    assert run(idem, place) == "after it"
    assert orders(path) == []
    assert run(idem, place) == "after it"


def test_a_zombies_session_loses_its_writes(idem, path, transaction):
    def place():
        with transaction() as (owner, write):
            idem.release("order-1", force=True)
            write("pen")
            current_attempt().complete_in(owner, "zombie")

    with pytest.raises(ClaimLost):
        run(idem, place)
    assert orders(path) == []


def test_a_session_around_the_run_decides(idem, path, transaction):
    """Its lock is held when the operation ends: the call returns, and the commit stores."""
    with transaction() as (owner, write):

        def place():
            write("pen")
            current_attempt().complete_in(owner, "in the transaction")

        assert run(idem, place) == "in the transaction"
    assert run(idem, place) == "in the transaction"
    assert orders(path) == ["pen"]


def test_a_session_carries_atomic_blocks(idem, path, transaction):
    for replayed in (False, True):
        with transaction() as (owner, write):
            with idem.atomic(owner, "order-1", request="pen") as block:
                assert block.replayed is replayed
                if not replayed:
                    write("pen")
                    block.complete({"order": "pen"})
            assert block.value == {"order": "pen"}
    assert orders(path) == ["pen"]


def test_a_sessions_block_that_fails_is_undone_alone(idem, path, transaction):
    """The session forgets the block's objects, and commits what is its own."""
    with transaction() as (owner, write):
        write("outer")
        with pytest.raises(OutcomeMissing), idem.atomic(owner, "order-1"):
            write("inner")
        with pytest.raises(StoreUnavailable), idem.atomic(owner, "order-1"):
            run(idem, lambda: "would wait for the block")
    assert orders(path) == ["outer"]
    assert states(path) == []


def test_a_session_that_commits_in_its_block_is_reported(idem, path):
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with Session(engine) as session:
        block = idem.atomic(session, "order-1")
        run = block.__enter__()
        run.complete(1)
        session.commit()
        with pytest.raises(TransactionMissing):
            block.__exit__(None, None, None)
    engine.dispose()


def test_what_cannot_commit_together_is_refused(idem, path, postgres_server):
    """Another file, a file in memory, a connection without a transaction, another database."""
    url = postgres_server.url().replace("postgresql://", "postgresql+psycopg://")
    engines = {
        "one file": sqlalchemy.create_engine(f"sqlite:///{path}.other"),
        "in memory": sqlalchemy.create_engine("sqlite://"),
        r"postgresql\+psycopg": sqlalchemy.create_engine(url),
    }
    for words, engine in engines.items():
        with (
            Session(engine) as session,
            pytest.raises(InvalidInput, match=words),
            idem.atomic(session, "order-1"),
        ):
            pass
        engine.dispose()
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with (
        engine.connect() as connection,
        pytest.raises(TransactionMissing, match="begin"),
        idem.atomic(connection, "order-1"),
    ):
        pass
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        connection.begin(),
        pytest.raises(TransactionMissing),
        idem.atomic(connection, "order-1"),
    ):
        pass
    engine.dispose()


# Async.


@contextlib.asynccontextmanager
async def by_async_session(engine, path):
    async with AsyncSession(engine) as session, session.begin():

        async def write(name):
            session.add(Order(name=name))

        yield session, write


@contextlib.asynccontextmanager
async def by_async_connection(engine, path):
    async with engine.begin() as connection:

        async def write(name):
            await connection.execute(sqlalchemy.text(INSERT.format(name)))

        yield connection, write


@contextlib.asynccontextmanager
async def by_aiosqlite(engine, path):
    async with aiosqlite.connect(path) as connection:

        async def write(name):
            await connection.execute(INSERT.format(name))

        yield connection, write
        await connection.commit()


@pytest.fixture(params=[by_async_session, by_async_connection, by_aiosqlite])
def play(request, path):
    """Plays a scene with an object on the store, and what opens transactions."""

    def play(scene):
        async def played():
            engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
            try:
                async with AsyncIdempotency(f"sqlite:///{path}", caller="shop") as idem:
                    await scene(idem, lambda: request.param(engine, path))
            finally:
                await engine.dispose()

        asyncio.run(played())

    return play


def test_an_async_session_completes_a_leased_operation(play, path):
    async def scene(idem, transaction):
        async def place():
            async with transaction() as (owner, write):
                await write("pen")
                await current_attempt().complete_in(owner, {"order": "pen"})

        for _ in range(2):
            assert await idem.run("order-1", place, name="", request=None) == {"order": "pen"}

    play(scene)
    assert orders(path) == ["pen"]


def test_an_async_session_that_rolls_back_leaves_the_usual_path(play, path):
    async def scene(idem, transaction):
        async def place():
            with contextlib.suppress(Undo):
                async with transaction() as (owner, write):
                    await write("pen")
                    await current_attempt().complete_in(owner, "in the transaction")
                    raise Undo
            return "after it"

        assert await idem.run("order-1", place, name="", request=None) == "after it"

    play(scene)
    assert orders(path) == []


def test_an_async_session_around_the_run_decides(play, path):
    async def scene(idem, transaction):
        async with transaction() as (owner, write):

            async def place():
                await write("pen")
                await current_attempt().complete_in(owner, "in the transaction")

            for_both = await idem.run("order-1", place, name="", request=None)
        assert await idem.run("order-1", place, name="", request=None) == for_both

    play(scene)
    assert orders(path) == ["pen"]


def test_an_async_session_carries_atomic_blocks(play, path):
    """A block that fails is undone alone; a leased call inside of one does not wait for itself."""

    async def scene(idem, transaction):
        for replayed in (False, True):
            async with transaction() as (owner, write):
                async with idem.atomic(owner, "order-1", request="pen") as block:
                    assert block.replayed is replayed
                    if not replayed:
                        await write("pen")
                        with pytest.raises(StoreUnavailable, match="inside of an atomic block"):
                            await idem.run("other", asyncio.sleep, 0, request=None)
                        await block.complete("placed")
                with pytest.raises(OutcomeMissing):
                    async with idem.atomic(owner, "order-2"):
                        await write("ink")
            assert block.value == "placed"

    play(scene)
    assert orders(path) == ["pen"]
    assert len(states(path)) == 1

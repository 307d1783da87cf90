"""Atomic mode on PostgreSQL where one driver is enough: races, decorators, refusals."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from retrysafe import (
    FOREVER,
    AsyncIdempotency,
    ClaimLost,
    Idempotency,
    InFlight,
    InvalidInput,
    OperationFailed,
    OperationInFlight,
    Policy,
)
from retrysafe.errors import (
    AttemptsExhausted,
    Closed,
    KeyInvalid,
    SchemaMissing,
    TransactionMissing,
)
from retrysafe.stores import MemoryStore
from retrysafe.stores.postgres.atomic import lock_number
from retrysafe.stores.postgres.user_connections import with_percent_signs
from retrysafe.transactions import is_conflict, retry_serialization

PATIENCE_SECONDS = 30
WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=PATIENCE_SECONDS))
SECRET = "0123456789abcdef"


@pytest.fixture
def connection(shop):
    with psycopg.connect(shop.server_url) as made:
        yield made


def insert(shop, connection, name):
    connection.execute(f"INSERT INTO {shop.schema}.orders (name) VALUES ('{name}')")


def test_many_transactions_race_for_one_key(shop, idem):
    """Eight threads start together: one writes, and all get its outcome."""
    barrier = threading.Barrier(8)
    answers = []

    def compete(number):
        with psycopg.connect(shop.server_url) as connection:
            barrier.wait(PATIENCE_SECONDS)
            with idem.atomic(connection, "order-1", policy=WAITING) as run:
                if not run.replayed:
                    insert(shop, connection, f"by {number}")
                    run.complete(number)
            answers.append((run.value, run.replayed))

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len(answers) == 8
    assert sum(not replayed for _, replayed in answers) == 1
    (winner,) = {value for value, _ in answers}
    assert shop.orders() == [f"by {winner}"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_many_transactions_race_with_a_snapshot(shop, idem, isolation):
    """The same where rivals show as serialization failures: the documented retry, one write."""
    barrier = threading.Barrier(4)
    answers = []

    def compete(number):
        def place():
            with psycopg.connect(shop.server_url) as connection:
                connection.isolation_level = psycopg.IsolationLevel[isolation.replace(" ", "_")]
                with idem.atomic(connection, "order-1", policy=WAITING) as run:
                    if not run.replayed:
                        insert(shop, connection, f"by {number}")
                        run.complete(number)
                return run.value

        barrier.wait(PATIENCE_SECONDS)
        answers.append(retry_serialization(place))

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len(answers) == 4
    (winner,) = set(answers)
    assert shop.orders() == [f"by {winner}"]


def test_two_transactions_that_wait_for_each_other(shop, idem):
    """The server sees the deadlock that polling would sit out: one of them is told to try again,
    and both orders are placed."""
    barrier = threading.Barrier(2)
    tries = []

    def compete(first, second):
        def place():
            tries.append(first)
            with psycopg.connect(shop.server_url) as connection:
                for key in (first, second):
                    with idem.atomic(connection, key, policy=WAITING) as run:
                        if not run.replayed:
                            run.complete(key)
                    if key == first and tries.count(first) == 1:
                        barrier.wait(PATIENCE_SECONDS)

        retry_serialization(place)

    threads = [threading.Thread(target=compete, args=pair) for pair in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert shop.states() == [2, 2]
    assert len(tries) == 3


def test_waiting_does_not_change_the_transactions_own_lock_timeout(shop, idem, connection):
    """The bound of the wait is for the wait alone."""
    connection.execute("SET lock_timeout = '7s'")
    with psycopg.connect(shop.server_url) as holder:
        number = lock_number(shop.schema, idem_key_digest())
        holder.execute("SELECT pg_advisory_xact_lock(%s)", (number,))
        soon = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(milliseconds=10))
        with pytest.raises(OperationInFlight), idem.atomic(connection, "order-1", policy=soon):
            pass
        assert connection.execute("SHOW lock_timeout").fetchone() == ("7s",)
        waiter = threading.Thread(target=release_when_waited_for, args=(shop, holder))
        waiter.start()
        with idem.atomic(connection, "order-1", policy=WAITING) as run:
            assert connection.execute("SHOW lock_timeout").fetchone() == ("7s",)
            run.complete(1)
        waiter.join(PATIENCE_SECONDS)


def idem_key_digest():
    from retrysafe import Key

    return Key("order-1", caller="shop").digest


def release_when_waited_for(shop, holder):
    from tests.atomic.test_drivers import wait_until_waiting

    wait_until_waiting(shop)
    holder.rollback()


def test_a_leased_owner_is_waited_for_under_read_committed_only(shop, idem):
    """A snapshot cannot show its end, so there the caller is told at once to come back."""

    def operation():
        with psycopg.connect(shop.server_url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            with (
                pytest.raises(OperationInFlight),
                idem.atomic(connection, "order-1", policy=WAITING),
            ):
                pass
        started.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return "leased"

    started, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: idem.run("order-1", operation, name="", request=None))
    thread.start()
    assert started.wait(PATIENCE_SECONDS)
    with psycopg.connect(shop.server_url) as connection:
        waiting = idem.atomic(connection, "order-1", policy=WAITING)
        may_end.set()
        with waiting as run:
            assert run.value == "leased"
    thread.join(PATIENCE_SECONDS)


def test_a_released_key_goes_on_with_the_next_attempt(shop, idem, connection):
    """A leased attempt that failed retryably is followed by an atomic one."""

    def operation():
        raise OSError

    with pytest.raises(OSError):
        idem.run("order-1", operation, name="", request=None)
    with idem.atomic(connection, "order-1") as run:
        assert run.attempt == 2
        run.complete("atomic")
    connection.commit()
    assert idem.run("order-1", operation, name="", request=None) == "atomic"


def test_used_up_attempts_are_not_tried_atomically_either(shop, idem, connection):
    def operation():
        raise OSError

    once = Policy(release_limit=1)
    with pytest.raises(OSError):
        idem.run("order-1", operation, name="", request=None, policy=once)
    with pytest.raises(AttemptsExhausted), idem.atomic(connection, "order-1", policy=once):
        pass
    assert shop.states() == [4]


def test_an_outlived_key_starts_a_new_life(shop, idem, connection):
    """Past its active window the key counts as absent, and keeps the audit of its past."""
    for number in (1, 2):
        with idem.atomic(connection, "order-1") as run:
            assert run.attempt == 1
            run.complete(number)
        connection.commit()
        idem.expire("order-1")
    assert [item.payload.body for item in idem.read("order-1").outcomes] == [b"1", b"2"]


class Declined(Exception):
    pass


def test_a_failure_is_stored_on_demand_and_raised_again(shop, idem, connection):
    """fail() commits with the transaction; later uses raise it as in leased mode."""
    policy = Policy(terminal=Declined)
    with idem.atomic(connection, "order-1", policy=policy) as run:
        run.fail(Declined("no funds"))
    connection.commit()
    with (
        pytest.raises(Declined, match="no funds"),
        idem.atomic(connection, "order-1", policy=policy),
    ):
        pass
    with pytest.raises(OperationFailed), idem.atomic(connection, "order-1"):
        pass
    with pytest.raises(Declined):
        idem.run("order-1", lambda: 1, name="", request=None, policy=policy)


def test_a_transaction_that_is_rolled_back_inside_the_block(shop, idem, connection):
    """Completing then is refused: the claim is gone, and somebody else may have it."""
    with pytest.raises(ClaimLost), idem.atomic(connection, "order-1") as run:
        connection.rollback()
        run.complete(1)
    connection.commit()
    assert shop.states() == []


def test_a_transaction_that_is_ended_after_completing(shop, idem, connection):
    """A commit inside the block is a mistake that is told, because an exception after it could no
    longer undo anything."""
    with (
        pytest.raises(TransactionMissing, match="inside the block"),
        idem.atomic(connection, "order-1") as run,
    ):
        run.complete(1)
        connection.commit()
        connection.autocommit = True


def test_a_cancelled_task_frees_the_key(shop):
    """Cancellation undoes the block like any exception; the next task runs."""

    async def scenario():
        connection = await asyncpg.connect(shop.server_url)
        other = await asyncpg.connect(shop.server_url)
        async with AsyncIdempotency(shop.store_url, caller="shop") as idem:
            inside = asyncio.Event()

            async def place():
                async with connection.transaction(), idem.atomic(connection, "order-1"):
                    inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(place())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with other.transaction(), idem.atomic(other, "order-1") as run:
                await run.complete("second")
            await connection.close()
            await other.close()
            return run.value

    assert asyncio.run(scenario()) == "second"
    assert shop.states() == [2]


def test_decorated_functions_run_once(shop, idem, connection):
    """The result is the outcome; the connection is no part of the request."""

    @idem.atomic_once(window=FOREVER, key="number", connection="connection")
    def place(connection, number: int, name: str) -> dict[str, int]:
        insert(shop, connection, name)
        return {"order": number}

    assert place(connection, 1, name="pen") == {"order": 1}
    connection.commit()
    with psycopg.connect(shop.server_url) as other:
        assert place(other, number=1, name="pen") == {"order": 1}
    assert shop.orders() == ["pen"]
    with pytest.raises(InvalidInput, match="not decorated"):
        idem.answer_of(place, connection, 1, "pen")


def test_decorated_async_functions_run_once(shop):
    async def scenario():
        connection = await asyncpg.connect(shop.server_url)
        async with AsyncIdempotency(shop.store_url, caller="shop") as idem:

            @idem.atomic_once(window=FOREVER, key="number", connection="connection")
            async def place(connection, number):
                await connection.execute(f"INSERT INTO {shop.schema}.orders (name) VALUES ('pen')")
                return number

            for _ in range(2):
                async with connection.transaction():
                    assert await place(connection, 1) == 1
            with pytest.raises(InvalidInput, match="not async"):
                idem.atomic_once(window=FOREVER, key="number", connection="connection")(
                    lambda number: 1
                )
        await connection.close()

    asyncio.run(scenario())
    assert shop.orders() == ["pen"]


def test_decorating_with_a_wrong_parameter_is_refused(idem):
    """A typing error shows when the module is loaded, not at the first payment."""
    with pytest.raises(KeyInvalid, match="conn"):
        idem.atomic_once(window=FOREVER, key="number", connection="conn")(
            lambda connection, number: 1
        )
    with pytest.raises(InvalidInput, match="list of parameter names"):
        idem.atomic_once(window=FOREVER, key="number", connection="connection", ignore="number")(
            lambda connection, number: 1
        )

    async def place(connection, number):
        return number

    with pytest.raises(InvalidInput, match="async"):
        idem.atomic_once(window=FOREVER, key="number", connection="connection")(place)


def test_what_cannot_be_joined_is_refused(shop, idem, connection):
    """Each refusal says what to use instead."""
    with pytest.raises(InvalidInput, match="no connection"):
        idem.atomic(object(), "order-1")
    with pytest.raises(InvalidInput, match="use Idempotency"):
        AsyncIdempotency(shop.store_url, caller="shop").atomic(connection, "order-1")
    with pytest.raises(InvalidInput, match="MemoryStore"):
        Idempotency(MemoryStore(), caller="shop").atomic(connection, "order-1")
    with sqlalchemy.create_engine("sqlite://").connect() as other:
        with pytest.raises(InvalidInput, match="sqlite"), idem.atomic(other, "order-1"):
            pass
        other.engine.dispose()
    closed = Idempotency(shop.store_url, caller="shop")
    closed.close()
    with pytest.raises(Closed), closed.atomic(connection, "order-1"):
        pass


def test_an_async_connection_needs_the_async_object(shop, idem):
    async def scenario():
        connection = await asyncpg.connect(shop.server_url)
        try:
            with pytest.raises(InvalidInput, match="use AsyncIdempotency"):
                idem.atomic(connection, "order-1")
        finally:
            await connection.close()

    asyncio.run(scenario())


def test_a_database_without_the_schema_says_what_to_do(shop, connection):
    with (
        Idempotency(f"{shop.server_url}?schema=nowhere", caller="shop") as idem,
        pytest.raises(SchemaMissing, match="retrysafe migrate"),
        idem.atomic(connection, "order-1"),
    ):
        pass


class Base(DeclarativeBase):
    pass


def test_an_orm_session_forgets_the_objects_of_an_undone_block(shop, idem):
    """The savepoint is the session's own, so the object is not taken for stored."""

    class Order(Base):
        __tablename__ = "orders"
        __table_args__ = ({"schema": shop.schema},)
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]

    url = shop.server_url.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with Session(engine) as session, session.begin():
        order = Order(name="pen")
        with pytest.raises(Declined), idem.atomic(session, "order-1"):
            session.add(order)
            session.flush()
            raise Declined
        assert order not in session
        with idem.atomic(session, "order-1") as run:
            session.add(Order(name="ink"))
            run.complete("ink")
    assert shop.orders() == ["ink"]
    engine.dispose()


def test_child_keys_in_a_block(shop, connection):
    with (
        Idempotency(shop.store_url, caller="shop", secret=SECRET) as idem,
        idem.atomic(connection, "order-1") as run,
    ):
        assert run.child_key("receipt").startswith("child:")
        assert run.key.text == "order-1"
        run.complete(1)


def test_the_lock_of_a_key_depends_on_the_schema():
    """Two applications in one database do not wait for each other; the number fits into bigint."""
    digest = bytes(range(16))
    assert lock_number("one", digest) == lock_number("one", digest)
    assert lock_number("one", digest) != lock_number("two", digest)
    assert -(2**63) <= lock_number("one", digest) < 2**63


def test_placeholders_become_percent_signs():
    """A parameter that is used twice is passed twice, and a literal percent sign stays one."""
    sql, params = with_percent_signs("SELECT $2, $1, $2, '%'", ("a", "b"))
    assert (sql, params) == ("SELECT %s, %s, %s, '%%'", ("b", "a", "b"))


class Conflict(Exception):
    sqlstate = "40001"


def test_the_retry_gives_up_with_the_drivers_error():
    """As often as asked for, and only for conflicts."""
    calls = []

    def always():
        calls.append(1)
        raise Conflict

    with pytest.raises(Conflict):
        retry_serialization(always, tries=3)
    assert len(calls) == 3

    def other(number):
        calls.append(number)
        raise OSError

    with pytest.raises(OSError):
        retry_serialization(other, 7)
    assert calls == [1, 1, 1, 7]
    with pytest.raises(InvalidInput):
        retry_serialization(always, tries=0)


def test_the_retry_of_an_async_operation_is_awaited():
    calls = []

    async def twice(value):
        calls.append(value)
        if len(calls) == 1:
            raise Conflict
        return value

    assert asyncio.run(retry_serialization(twice, 7)) == 7
    assert calls == [7, 7]

    async def never():
        calls.append(0)
        raise OSError

    with pytest.raises(OSError):
        asyncio.run(retry_serialization(never))
    assert calls == [7, 7, 0]
    assert not is_conflict(OSError())


def test_a_leased_call_inside_a_block_uses_a_connection_of_its_own(shop, idem, connection):
    """Where others may write beside an open transaction, there is nothing to wait for."""
    with connection.transaction(), idem.atomic(connection, "order-1") as run:
        assert idem.run("order-2", lambda: 2, request=None) == 2
        run.complete(1)
    assert idem.run("order-1", lambda: 3, name="", request=None) == 1


def test_a_leased_call_inside_a_tasks_block_uses_a_connection_of_its_own(shop):
    """The same in an event loop."""

    async def operation():
        return 2

    async def scenario():
        async with AsyncIdempotency(shop.store_url, caller="shop") as idem:
            own = await asyncpg.connect(shop.server_url)
            async with own.transaction(), idem.atomic(own, "order-1") as run:
                assert await idem.run("order-2", operation, request=None) == 2
                await run.complete(1)
            assert await idem.run("order-1", operation, name="", request=None) == 1
            await own.close()

    asyncio.run(scenario())

"""Atomic mode on the embedded store, with the user's own `sqlite3` connection."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sqlite3
import threading
from contextlib import closing, nullcontext
from datetime import timedelta

import pytest

from retrysafe import (
    AsyncIdempotency,
    ClaimLost,
    Idempotency,
    InFlight,
    InvalidInput,
    KeyReused,
    OperationInFlight,
    Policy,
    StoreUnavailable,
    current_attempt,
    reentry,
)
from retrysafe.errors import OutcomeMissing, SchemaMissing, StepNotStored, TransactionMissing
from retrysafe.observe import EventKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.stores.sqlite import connections
from retrysafe.testing import FaultyStore
from retrysafe.transactions import is_conflict

PATIENCE_SECONDS = 30
WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=29))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shop.db"


@pytest.fixture
def idem(path):
    with Idempotency(f"sqlite:///{path}", caller="shop") as made:
        yield made


@pytest.fixture
def open_connection(path):
    """Opens connections to the store's file, and closes them with the test."""
    made = []

    def connect(**options):
        connection = sqlite3.connect(path, **{"isolation_level": None, **options})
        made.append(connection)
        return connection

    yield connect
    for connection in made:
        connection.close()


@pytest.fixture
def connection(idem, open_connection):
    """A connection in autocommit mode to a file that has the store's schema and an orders table."""
    assert idem.read("nothing") is None
    made = open_connection(timeout=0)
    made.execute("CREATE TABLE orders (name TEXT)")
    return made


def orders(connection):
    return [row[0] for row in connection.execute("SELECT name FROM orders")]


def keys(connection):
    return [row[0] for row in connection.execute("SELECT state FROM retrysafe_keys")]


def test_write_and_outcome_commit_together(idem, connection):
    """The first transaction writes, the second replays."""
    for replayed in (False, True):
        connection.execute("BEGIN IMMEDIATE")
        with idem.atomic(connection, "order-1", request="pen") as run:
            assert run.replayed is replayed
            if not run.replayed:
                connection.execute("INSERT INTO orders VALUES ('pen')")
                run.complete({"id": 1})
        assert run.value == {"id": 1}
        connection.execute("COMMIT")
    assert orders(connection) == ["pen"]
    assert idem.run("order-1", lambda: 2, name="", request="pen") == {"id": 1}
    connection.execute("BEGIN")
    with pytest.raises(KeyReused), idem.atomic(connection, "order-1", request="ink"):
        pass


def test_a_rollback_frees_the_key(idem, connection):
    connection.execute("BEGIN IMMEDIATE")
    with idem.atomic(connection, "order-1") as run:
        connection.execute("INSERT INTO orders VALUES ('pen')")
        run.complete(1)
    connection.execute("ROLLBACK")
    assert orders(connection) == []
    assert idem.run("order-1", lambda: "leased", name="", request=None) == "leased"


def test_a_block_that_fails_is_undone_alone(idem, connection):
    """The outer transaction goes on and commits what is its own."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO orders VALUES ('outer')")
    with pytest.raises(OutcomeMissing), idem.atomic(connection, "order-1"):
        connection.execute("INSERT INTO orders VALUES ('inner')")
    connection.execute("COMMIT")
    assert orders(connection) == ["outer"]
    assert keys(connection) == []


def test_a_savepoint_that_is_rolled_back_takes_the_claim_with_it(idem, connection):
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("SAVEPOINT inner")
    with idem.atomic(connection, "order-1") as run:
        run.complete(1)
    connection.execute("ROLLBACK TO inner")
    connection.execute("COMMIT")
    assert keys(connection) == []


def test_a_rollback_inside_the_block_loses_the_claim(idem, connection):
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(ClaimLost), idem.atomic(connection, "order-1") as run:
        connection.execute("ROLLBACK")
        run.complete(1)
    assert keys(connection) == []


def test_a_commit_inside_the_block_is_reported(idem, connection):
    connection.execute("BEGIN IMMEDIATE")
    with (
        pytest.raises(TransactionMissing, match="inside the block"),
        idem.atomic(connection, "order-1") as run,
    ):
        run.complete(1)
        connection.execute("COMMIT")


@pytest.mark.parametrize("when", ["before the outcome", "after the outcome"])
def test_a_transaction_that_the_binding_began_in_the_block_is_reported(
    idem, connection, open_connection, when
):
    """The block is in one transaction; another one that stands open at its end is not taken for it.

    A claim that was committed alone looks like that of a crashed run: the lease frees it.
    """
    plain = open_connection(isolation_level="")
    with (
        pytest.raises(TransactionMissing, match="inside the block"),
        plain,
        idem.atomic(plain, "order-1") as run,
    ):
        if when == "before the outcome":
            plain.commit()
            run.complete(1)
        else:
            run.complete(1)
            plain.commit()
            plain.execute("INSERT INTO orders VALUES ('later')")
    assert not plain.in_transaction
    assert orders(connection) == []
    if when == "before the outcome":
        with pytest.raises(OperationInFlight):
            idem.run("order-1", lambda: 2, name="", request=None)
    else:
        assert idem.run("order-1", lambda: 2, name="", request=None) == 1


def test_a_leased_call_inside_a_block_does_not_wait_for_itself(path, idem, connection):
    """It is refused at once, whichever object on the file it goes by; the block goes on."""
    ran = []
    connection.execute("BEGIN IMMEDIATE")
    with (
        Idempotency(f"sqlite:///{path}", caller="shop") as other,
        idem.atomic(connection, "order-1") as run,
    ):
        for object_ in (idem, other):
            # The refusal names the block, and not a rival's lock, which is found out by a wait.
            with pytest.raises(StoreUnavailable, match="inside of an atomic block"):
                object_.run("order-2", ran.append, 1)
        run.complete(1)
    connection.execute("COMMIT")
    assert ran == []
    assert idem.run("order-2", lambda: "later", name="", request=None) == "later"
    assert idem.run("order-1", lambda: 2, name="", request=None) == 1


@pytest.mark.parametrize("way", ["kept", "undone", "replayed"])
def test_after_a_block_leased_calls_run(idem, connection, open_connection, way):
    """Also in what was started inside it, and has a copy of its context."""
    if way == "replayed":
        idem.run("order-1", lambda: 1, name="", request=None)
    connection.execute("BEGIN IMMEDIATE")
    with (
        pytest.raises(OutcomeMissing) if way == "undone" else nullcontext(),
        idem.atomic(connection, "order-1") as run,
    ):
        inside = contextvars.copy_context()
        if way == "kept":
            run.complete(1)
    connection.execute("COMMIT")
    leased = functools.partial(idem.run, "order-2", lambda: 2, name="", request=None)
    assert inside.run(leased) == 2
    assert leased() == 2


@pytest.mark.parametrize("ending", ["rolled back", "closed"])
def test_a_block_that_an_interruption_kept_from_being_left_is_over_with_its_transaction(
    idem, open_connection, ending
):
    """A signal that raises just before the body: Python calls no `__exit__` then."""
    assert idem.read("nothing") is None
    own = open_connection()
    own.execute("BEGIN IMMEDIATE")
    entered = idem.atomic(own, "order-1")
    entered.__enter__()
    with pytest.raises(StoreUnavailable, match="inside of an atomic block"):
        idem.run("order-2", lambda: 2, request=None)
    if ending == "rolled back":
        own.rollback()
    else:
        own.close()
    assert idem.run("order-2", lambda: 2, request=None) == 2
    entered.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_a_thread_with_a_copy_of_the_blocks_context_waits_for_it(idem, connection, monkeypatch):
    """As `asyncio.to_thread` makes it: it is no part of the block, which goes on and commits."""
    asked, refusals = threading.Event(), []

    def require_outside(path, thread):
        try:
            reentry.require_outside(path, thread)
        except StoreUnavailable as error:
            refusals.append(error)
            raise
        finally:
            asked.set()

    monkeypatch.setattr(connections, "require_outside", require_outside)
    connection.execute("BEGIN IMMEDIATE")
    answers = []
    with idem.atomic(connection, "order-1") as run:
        inside = contextvars.copy_context()
        leased = functools.partial(idem.run, "order-2", lambda: 2, name="", request=None)
        thread = threading.Thread(target=lambda: answers.append(inside.run(leased)))
        thread.start()
        assert asked.wait(PATIENCE_SECONDS)  # Answered while the block is open.
        run.complete(1)
    connection.execute("COMMIT")
    thread.join(PATIENCE_SECONDS)
    assert answers == [2]
    assert refusals == []  # One would be tried again, and come through after the commit.


def test_a_block_that_another_thread_is_in_is_waited_for(idem, connection):
    """Others are rivals like any other: they get the file's lock when the block's owner commits."""
    connection.execute("BEGIN IMMEDIATE")
    answers = []
    with idem.atomic(connection, "order-1") as run:
        thread = threading.Thread(
            target=lambda: answers.append(idem.run("order-2", lambda: 2, name="", request=None))
        )
        thread.start()
        run.complete(1)
    connection.execute("COMMIT")
    thread.join(PATIENCE_SECONDS)
    assert answers == [2]


def test_a_leased_call_inside_a_tasks_block_does_not_wait_for_itself(path, connection):
    """As in a thread: the block's transaction has the lock that the call would wait for."""
    ran = []

    async def operation():
        ran.append(1)
        return "later"

    async def scenario():
        async with AsyncIdempotency(f"sqlite:///{path}", caller="shop") as idem:
            own = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            own.execute("BEGIN IMMEDIATE")
            async with idem.atomic(own, "order-1") as run:
                for refused in (
                    idem.run("order-2", operation, request=None),
                    idem.expire("order-3"),
                    idem.sweep(),
                ):
                    with pytest.raises(StoreUnavailable, match="inside of an atomic block"):
                        await refused
                assert ran == []
                await run.complete(1)
            own.execute("COMMIT")
            assert await idem.run("order-2", operation, request=None) == "later"
            own.close()

    asyncio.run(scenario())
    assert ran == [1]


def test_a_step_inside_a_tasks_block_does_not_wait_for_itself(path, connection):
    """Its result would be written beside the block, which holds the lock."""

    async def operation():
        own = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        own.execute("BEGIN IMMEDIATE")
        try:
            async with idem.atomic(own, "order-1") as run:
                await run.complete(await current_attempt().step("price", price))
        finally:
            own.close()

    async def price():
        return 7

    async def scenario():
        nonlocal idem
        async with AsyncIdempotency(
            f"sqlite:///{path}", caller="shop", policy=Policy(settle_patience=timedelta(0))
        ) as idem:
            with pytest.raises(StepNotStored, match="inside of an atomic block"):
                await idem.run("order-2", operation, request=None)

    idem = None
    asyncio.run(scenario())
    assert keys(connection) == [4]  # Released, and nothing of the block was kept.


@pytest.mark.parametrize("way", ["kept", "undone", "replayed"])
def test_after_a_tasks_block_leased_calls_run(path, connection, way):
    """Also in a task that was started inside: it is no part of the block, which goes on."""
    heard = []

    async def operation():
        return 2

    async def scenario():
        async with AsyncIdempotency(
            f"sqlite:///{path}", caller="shop", observers=[heard.append]
        ) as idem:
            if way == "replayed":
                await idem.run("order-1", operation, name="", request=None)
            own = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            own.execute("BEGIN IMMEDIATE")
            with pytest.raises(OutcomeMissing) if way == "undone" else nullcontext():
                async with idem.atomic(own, "order-1") as run:
                    inside = asyncio.create_task(idem.run("order-2", operation, request=None))
                    await asyncio.sleep(0)  # It has asked by now, and waits for the lock.
                    if way == "kept":
                        await run.complete(1)
            own.execute("COMMIT")
            assert await inside == 2
            assert await idem.run("order-3", operation, request=None) == 2
            own.close()

    asyncio.run(scenario())
    # A refusal would be tried again, and come through after the commit.
    assert EventKind.STORE_UNAVAILABLE not in {event.kind for event in heard}


@pytest.mark.parametrize("wrap", [lambda store: store, FaultyStore], ids=["plain", "faulty"])
@pytest.mark.parametrize("ending", ["rolled back", "closed"])
def test_a_tasks_block_that_was_never_left_is_over_with_its_transaction(path, ending, wrap):
    """As in a thread: entered by hand, or struck just before the body, it has no `__aexit__`."""

    async def operation():
        return 2

    async def scenario():
        store = wrap(SqliteStore(path))
        async with AsyncIdempotency(store, caller="shop") as idem:
            assert await idem.read("nothing") is None
            own = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            own.execute("BEGIN IMMEDIATE")
            entered = idem.atomic(own, "order-1")
            await entered.__aenter__()
            with pytest.raises(StoreUnavailable, match="inside of an atomic block"):
                await idem.run("order-2", operation, request=None)
            if ending == "rolled back":
                own.rollback()
            else:
                own.close()
            assert await idem.run("order-2", operation, request=None) == 2
            await entered.__aexit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            own.close()
        await asyncio.to_thread(run_sync, store.close())

    asyncio.run(scenario())


def test_rows_and_texts_keep_the_shape_that_the_user_asked_for(idem, connection):
    """The user's factories neither disturb the store nor are lost."""
    connection.row_factory, connection.text_factory = sqlite3.Row, bytes
    for _ in range(2):
        connection.execute("BEGIN IMMEDIATE")
        with idem.atomic(connection, "order-1") as run:
            if not run.replayed:
                run.complete({"id": 1})
        assert run.value == {"id": 1}
        connection.execute("COMMIT")
    row = connection.execute("SELECT key FROM retrysafe_keys").fetchone()
    assert row["key"] == b"order-1"


def test_no_transaction_is_refused(idem, connection):
    wanted = pytest.raises(TransactionMissing, match="BEGIN IMMEDIATE")
    with wanted, idem.atomic(connection, "order-1"):
        pass
    assert keys(connection) == []


def test_a_connection_that_begins_by_itself(idem, open_connection):
    """The binding's default mode: the block begins, also on a file without the schema, and the
    user's `with connection` commits."""
    connection = open_connection(isolation_level="")
    with connection, idem.atomic(connection, "order-1") as run:
        connection.execute("CREATE TABLE orders (name TEXT)")
        connection.execute("INSERT INTO orders VALUES ('pen')")
        run.complete(1)
    assert orders(connection) == ["pen"]
    assert keys(connection) == [2]


def test_a_missing_schema_in_an_open_transaction_is_reported(idem, open_connection):
    """Making it would wait for this very transaction."""
    connection = open_connection()
    connection.execute("BEGIN IMMEDIATE")
    wanted = pytest.raises(SchemaMissing, match="retrysafe migrate")
    with wanted, idem.atomic(connection, "order-1"):
        pass


def test_a_locked_file_is_in_flight(idem, connection, open_connection):
    """Somebody else is writing: refused after the connection's own timeout, which is none here."""
    other = open_connection()
    other.execute("BEGIN IMMEDIATE")
    connection.execute("BEGIN")
    with pytest.raises(OperationInFlight), idem.atomic(connection, "order-1"):
        pass
    other.execute("ROLLBACK")
    with idem.atomic(connection, "order-1") as run:
        run.complete(1)
    connection.execute("COMMIT")
    assert keys(connection) == [2]


def test_a_locked_file_is_waited_for(path, idem, connection):
    """With the policy WAIT the rival's commit is awaited, and its outcome replayed."""
    locked, seen = threading.Event(), []

    def compete():
        rival = sqlite3.connect(path, isolation_level=None)
        rival.execute("BEGIN IMMEDIATE")
        with idem.atomic(rival, "order-1") as run:
            run.complete("rival")
            locked.set()
            # The lock is asked for while it is held here: SQLite itself retries until it is free.
            asked.wait(PATIENCE_SECONDS)
        rival.execute("COMMIT")
        rival.close()

    asked = threading.Event()
    thread = threading.Thread(target=compete)
    thread.start()
    assert locked.wait(PATIENCE_SECONDS)
    connection.execute("BEGIN")
    # The next statement after the bound is set asks for the lock.
    connection.set_trace_callback(lambda sql: asked.set() if "busy_timeout = 2" in sql else None)
    with idem.atomic(connection, "order-1", policy=WAITING) as run:
        seen.append(run.value)
    thread.join(PATIENCE_SECONDS)
    assert seen == ["rival"]
    assert connection.execute("PRAGMA busy_timeout").fetchone() == (0,)


def test_a_transaction_that_read_before_a_rival_wrote_is_a_conflict(
    idem, connection, open_connection
):
    """It cannot become the writer any more; the error asks for a new transaction."""
    connection.execute("BEGIN")
    assert orders(connection) == []
    open_connection().execute("INSERT INTO orders VALUES ('rival')")
    with pytest.raises(sqlite3.OperationalError) as caught, idem.atomic(connection, "order-1"):
        pass
    assert is_conflict(caught.value)
    assert not is_conflict(sqlite3.OperationalError("other"))


def test_a_leased_owner_is_in_flight_and_not_waited_for(idem, connection):
    """Its settling would wait for this transaction, so waiting here would be for ourselves."""

    def operation():
        connection.execute("BEGIN IMMEDIATE")
        with (
            pytest.raises(OperationInFlight) as caught,
            idem.atomic(connection, "order-1", policy=WAITING),
        ):
            pass
        connection.execute("ROLLBACK")
        return caught.value.retry_after == timedelta(seconds=1)

    assert idem.run("order-1", operation, name="", request=None) is True


def test_another_file_is_refused(idem, connection, tmp_path):
    """Outcome and business write in two files would be two transactions."""
    other = sqlite3.connect(tmp_path / "other.db")
    memory = sqlite3.connect(":memory:")
    for wrong in (other, memory):
        with pytest.raises(InvalidInput, match="one file"), idem.atomic(wrong, "order-1"):
            pass
        wrong.close()
    with pytest.raises(InvalidInput, match=r"sqlite3\.Connection"):
        idem.atomic(object(), "order-1")


def test_an_event_loop_works_on_a_connection_through_a_thread(path, connection, open_connection):
    """The same block, awaited: the statements run elsewhere, and the thread ends with it."""
    threads = set()
    connection = open_connection(check_same_thread=False)

    async def scenario():
        idem = AsyncIdempotency(f"sqlite:///{path}", caller="shop")
        values = []
        for _ in range(2):
            connection.execute("BEGIN IMMEDIATE")
            connection.set_trace_callback(lambda _: threads.add(threading.current_thread().name))
            async with idem.atomic(connection, "order-1", request="pen") as run:
                connection.set_trace_callback(None)
                if not run.replayed:
                    connection.execute("INSERT INTO orders VALUES ('pen')")
                    await run.complete("placed")
            connection.execute("COMMIT")
            values.append((run.value, run.replayed))
        await idem.close()
        return values

    assert asyncio.run(scenario()) == [("placed", False), ("placed", True)]
    assert orders(connection) == ["pen"]
    assert threads
    assert all(name.startswith("retrysafe-transaction") for name in threads)


@pytest.mark.usefixtures("connection")
def test_many_tasks_wait_for_one_file_and_none_of_them_starves_the_owner(path):
    """Each transaction has a thread of its own: those who wait for the lock hold no other's."""
    crowd = 40  # More than any default pool has threads.

    async def place(idem, number):
        connection = sqlite3.connect(path, timeout=PATIENCE_SECONDS, check_same_thread=False)
        # Without IMMEDIATE: the write lock is waited for inside of the block.
        async with idem.atomic(connection, f"order-{number}") as run:
            await asyncio.sleep(0)
            connection.execute("INSERT INTO orders VALUES (?)", (str(number),))
            await run.complete(number)
        connection.commit()
        connection.close()

    async def scenario():
        async with AsyncIdempotency(f"sqlite:///{path}", caller="shop") as idem:
            await asyncio.gather(*(place(idem, number) for number in range(crowd)))

    asyncio.run(scenario())
    with closing(sqlite3.connect(path)) as connection:
        assert sorted(orders(connection), key=int) == [str(number) for number in range(crowd)]


def test_an_event_loop_completes_a_leased_operation(path, connection, open_connection):
    """What the attempt's outcome came to is asked through a thread as well."""
    connection = open_connection(check_same_thread=False)

    async def operation():
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders VALUES ('pen')")
        # Not awaited, because the connection's own methods are not.
        current_attempt().complete_in(connection, "in the transaction")
        connection.execute("COMMIT")

    async def scenario():
        async with AsyncIdempotency(f"sqlite:///{path}", caller="shop") as idem:
            return [await idem.run("order-1", operation, request=None) for _ in range(2)]

    assert asyncio.run(scenario()) == ["in the transaction"] * 2
    assert orders(connection) == ["pen"]


@pytest.mark.usefixtures("connection")
def test_a_connection_of_one_thread_is_refused_in_an_event_loop(path):
    """The message says how to open it instead."""

    async def scenario():
        async with AsyncIdempotency(f"sqlite:///{path}", caller="shop") as idem:
            with closing(sqlite3.connect(path)) as bound:
                bound.execute("BEGIN IMMEDIATE")
                with pytest.raises(InvalidInput, match="check_same_thread=False"):
                    await idem.atomic(bound, "order-1").__aenter__()

    asyncio.run(scenario())


# Settling in the user's transaction.


def test_a_leased_operation_completes_in_the_transaction(idem, connection):
    """The value of complete_in is the outcome, stored once with the business write."""

    def operation():
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders VALUES ('pen')")
        current_attempt().complete_in(connection, "in the transaction")
        connection.execute("COMMIT")
        return "ignored"

    assert idem.run("order-1", operation, request=None) == "in the transaction"
    assert idem.answer("order-1", operation, request=None).replayed
    assert orders(connection) == ["pen"]
    assert len(idem.read("order-1").outcomes) == 1


def test_after_a_rollback_the_engine_settles(idem, connection):
    def operation():
        connection.execute("BEGIN IMMEDIATE")
        current_attempt().complete_in(connection, "in the transaction")
        connection.execute("ROLLBACK")
        return "by the engine"

    assert idem.run("order-1", operation, request=None) == "by the engine"
    assert idem.run("order-1", operation, request=None) == "by the engine"


def test_a_connection_that_was_closed_was_rolled_back(idem, connection, open_connection):
    def operation():
        own = open_connection()
        own.execute("BEGIN IMMEDIATE")
        current_attempt().complete_in(own, "in the transaction")
        own.close()
        return "by the engine"

    assert idem.run("order-1", operation, request=None) == "by the engine"


def test_a_zombie_loses_its_business_write(path, idem, connection):
    """Another process took over: the transaction is refused and rolled back."""

    def operation():
        with Idempotency(f"sqlite:///{path}", caller="shop") as other:
            other.release("order-1", force=True)
            other.run("order-1", lambda: "successor", name="place", request=None)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders VALUES ('zombie')")
        try:
            current_attempt().complete_in(connection, "zombie")
        except ClaimLost:
            connection.execute("ROLLBACK")
            raise

    with pytest.raises(ClaimLost):
        idem.run("order-1", operation, name="place", request=None)
    assert orders(connection) == []
    assert idem.run("order-1", operation, name="place", request=None) == "successor"


def test_a_transaction_around_the_run_decides(idem, connection):
    """The run ends while the transaction is open, without waiting for its lock."""

    def operation():
        current_attempt().complete_in(connection, "done")

    with pytest.raises(TransactionMissing):
        idem.run("order-1", operation, request=None)

    def beginning():
        connection.execute("BEGIN IMMEDIATE")
        current_attempt().complete_in(connection, "done")

    assert idem.run("order-2", beginning, request=None) == "done"
    assert connection.in_transaction
    connection.execute("COMMIT")
    assert idem.run("order-2", beginning, request=None) == "done"


# Django's connection.


@pytest.fixture
def django_connection(path, connection):
    """A connection of Django to the store's file."""
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        settings.configure(DATABASES={"default": {}})
        django.setup()
    alias = f"sqlite{path.parent.name}"
    connections.settings[alias] = connections.configure_settings(
        {"default": {}, alias: {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}}
    )[alias]
    yield connections[alias]
    connections[alias].close()
    del connections[alias], connections.settings[alias]


def test_a_leased_operation_completes_on_djangos_connection(idem, connection, django_connection):
    """Inside `transaction.atomic()`; a block that is left by an error takes the outcome along."""
    from django.db import transaction

    def operation(fails):
        with transaction.atomic(using=django_connection.alias):
            with django_connection.cursor() as cursor:
                cursor.execute("INSERT INTO orders VALUES ('pen')")
            current_attempt().complete_in(django_connection, "in the transaction")
            if fails:
                raise LookupError

    with pytest.raises(LookupError):
        idem.run("order-1", operation, True, request=1)
    assert orders(connection) == []
    assert idem.run("order-1", operation, False, request=1) == "in the transaction"
    assert idem.answer("order-1", operation, False, request=1).replayed
    assert orders(connection) == ["pen"]


def test_without_a_transaction_of_django_nothing_is_completed(idem, connection, django_connection):
    """Django would commit the outcome by itself, apart from the writes that it belongs to."""

    def operation():
        current_attempt().complete_in(django_connection, "alone")

    with pytest.raises(TransactionMissing, match=r"transaction\.atomic"):
        idem.run("order-1", operation, request=None)
    assert keys(connection) == [4]

"""Steps that are recorded in the user's transaction, on every kind of connection."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import psycopg
import pytest

from retrysafe import ClaimLost, Idempotency, InvalidInput, Key, OutcomeNotStored, current_attempt
from retrysafe.core.model import Decision, Payload, Step, StepWrite
from retrysafe.errors import StepReused
from retrysafe.runtime.calls import calls_of
from retrysafe.runtime.drive import run_sync
from retrysafe.testing.suite.probe import request
from tests.atomic.drivers import Rollback
from tests.atomic.test_drivers import in_thread


def booked(driver, key, name, *, before=None, after=None, **options):
    """Runs an operation that writes an order as a step in a transaction, and ends in a step."""
    calls = []

    if hasattr(driver, "runner"):

        async def operation():
            attempt = current_attempt()
            connection = await driver.open_async()
            try:
                async with driver.transaction_async(connection):

                    async def write():
                        calls.append("write")
                        await driver.write_async(connection, name)
                        if before is not None:
                            before()
                        return {"order": name}

                    value = await attempt.step("book", write, in_transaction=connection)
                    if after is not None:
                        after()
            finally:
                await driver.close_async(connection)
            await attempt.step("mail", calls.append, "mail")
            return value

        return calls, driver.run(
            driver.idem.run(key, operation, name="place", request=None, **options)
        )

    def operation():
        attempt = current_attempt()
        with driver.connected() as connection, driver.transaction(connection):

            def write():
                calls.append("write")
                driver.write(connection, name)
                if before is not None:
                    before()
                return {"order": name}

            value = attempt.step("book", write, in_transaction=connection)
            if after is not None:
                after()
        attempt.step("mail", calls.append, "mail")
        return value

    return calls, driver.idem.run(key, operation, name="place", request=None, **options)


def steps_of(idem, key="order-1"):
    return [(step.name, step.payload.body) for step in idem.read(key).steps]


def test_write_and_step_commit_together(driver, shop, idem):
    """After the commit both are there, and the operation goes on with steps of its own."""
    calls, value = booked(driver, "order-1", "pen")
    assert value == {"order": "pen"}
    assert calls == ["write", "mail"]
    assert shop.orders() == ["pen"]
    assert steps_of(idem) == [("book", b'{"order":"pen"}'), ("mail", b"null")]


def test_a_rollback_undoes_both(driver, shop, idem):
    """Neither the order nor the step is there, and the next attempt runs the step again."""

    def fail():
        raise Rollback

    with pytest.raises(Rollback):
        booked(driver, "order-1", "pen", after=fail)
    assert shop.orders() == []
    assert steps_of(idem) == []
    calls, _ = booked(driver, "order-1", "pen")
    assert calls == ["write", "mail"]
    assert shop.orders() == ["pen"]


def test_a_failed_call_leaves_nothing_in_the_transaction(driver, shop, idem):
    """What the step wrote before it failed is taken back even if the transaction goes on."""

    def fail():
        raise Rollback

    with pytest.raises(Rollback):
        booked(driver, "order-1", "pen", before=fail)
    assert shop.orders() == []
    assert steps_of(idem) == []


def test_a_zombie_can_neither_write_nor_record(driver, shop, idem):
    """Somebody took over while it was slow: its transaction is refused."""

    def take_over():
        idem.release("order-1", force=True)
        idem.run("order-1", lambda: "successor", name="place", request=None)

    with pytest.raises(ClaimLost):
        booked(driver, "order-1", "pen", before=lambda: in_thread(take_over))
    assert shop.orders() == []
    assert steps_of(idem) == []
    assert idem.run("order-1", lambda: "third", name="place", request=None) == "successor"


def test_a_committed_step_is_not_run_again(driver, shop, idem):
    """An attempt that fails after the commit leaves the step to the next one."""

    class Later(Exception):
        pass

    def operation():
        with psycopg.connect(shop.server_url) as connection:
            current_attempt().step("book", insert, shop, connection, in_transaction=connection)
        raise Later

    with pytest.raises(Later):
        idem.run("order-1", operation, name="place", request=None)
    calls, value = booked(driver, "order-1", "pen")
    assert calls == ["mail"]
    assert value == "inserted"
    assert shop.orders() == ["pen"]


def insert(shop, connection, name="pen"):
    connection.execute(f"INSERT INTO {shop.schema}.orders (name) VALUES ('{name}')")
    return "inserted"


def test_a_step_outside_waits_for_no_lock(shop, idem):
    """While the transaction is open, a step outside it is refused at once and runs nothing."""
    ran = []

    def operation():
        attempt = current_attempt()
        with psycopg.connect(shop.server_url) as connection:
            attempt.step("book", insert, shop, connection, in_transaction=connection)
            with pytest.raises(InvalidInput, match="still open"):
                attempt.step("mail", ran.append, "mail")
        attempt.step("mail", ran.append, "mail")

    idem.run("order-1", operation, request=None)
    assert ran == ["mail"]


def test_a_transaction_that_is_left_open_does_not_hang_the_operation(shop, idem):
    """It cannot be settled while its own transaction holds the record; the caller is told."""
    with psycopg.connect(shop.server_url) as connection:

        def operation():
            attempt = current_attempt()
            attempt.step("book", insert, shop, connection, in_transaction=connection)

        with pytest.raises(OutcomeNotStored, match="still open"):
            idem.run("order-1", operation, request=None)
    assert shop.orders() == ["pen"]
    assert steps_of(idem) == [("book", b'"inserted"')]


def test_a_transaction_may_be_tried_again_within_the_attempt(shop, idem):
    """After a rollback the same name may come again; after the commit it may not."""

    def operation():
        attempt = current_attempt()

        def book(*, is_kept):
            with psycopg.connect(shop.server_url) as connection:
                attempt.step("book", insert, shop, connection, in_transaction=connection)
                if not is_kept:
                    connection.rollback()

        book(is_kept=False)
        book(is_kept=True)
        attempt.step("mail", lambda: None)
        with pytest.raises(StepReused):
            book(is_kept=True)

    idem.run("order-1", operation, request=None)
    assert shop.orders() == ["pen"]
    positions = [(step.name, step.position) for step in idem.read("order-1").steps]
    assert positions == [("book", 1), ("mail", 2)]


def test_the_connection_must_be_of_a_known_kind(idem):
    """Anything else is refused before the call is made."""
    ran = []

    def operation():
        current_attempt().step("book", ran.append, 1, in_transaction="no connection")

    with pytest.raises(InvalidInput, match="no connection"):
        idem.run("order-1", operation, request=None)
    assert ran == []


def test_sqlite_commits_and_rolls_back_both(tmp_path):
    """The same on a file: both or neither, an open transaction is told, a closed one is undone."""
    path = tmp_path / "shop.db"
    ran = []
    with Idempotency(f"sqlite:///{path}", caller="shop") as idem:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE orders (name TEXT)")

        def operation(ending):
            attempt = current_attempt()
            connection = sqlite3.connect(path, isolation_level=None)
            with closing(connection):
                connection.execute("BEGIN IMMEDIATE")
                attempt.step(
                    "book",
                    lambda: connection.execute("INSERT INTO orders VALUES ('pen')") and "booked",
                    in_transaction=connection,
                )
                with pytest.raises(InvalidInput, match="still open"):
                    attempt.step("mail", ran.append, "early")
                if ending != "closed":
                    connection.execute(ending)
            attempt.step("mail", ran.append, "mail")
            if ending != "COMMIT":
                raise Rollback
            return "done"

        def orders():
            with closing(sqlite3.connect(path)) as connection:
                return connection.execute("SELECT name FROM orders").fetchall()

        for ending in ("ROLLBACK", "closed"):
            with pytest.raises(Rollback):
                idem.run("order-1", operation, ending, request=None)
            assert orders() == []
            assert [step.name for step in idem.read("order-1").steps] == ["mail"]
        assert idem.run("order-1", operation, "COMMIT", request=None) == "done"
        assert orders() == [("pen",)]
        assert ran == ["mail"]
        steps = [(step.name, step.position) for step in idem.read("order-1").steps]
        assert steps == [("book", 1), ("mail", 2)]


def test_a_zombie_on_sqlite_can_neither_write_nor_record(tmp_path):
    """An operator freed the key meanwhile: the step raises, and the user's writes roll back."""
    path = tmp_path / "shop.db"
    with Idempotency(f"sqlite:///{path}", caller="shop") as idem:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE orders (name TEXT)")

        def operation():
            idem.release("order-1", force=True)
            connection = sqlite3.connect(path)

            def write():
                connection.execute("INSERT INTO orders VALUES ('pen')")

            with closing(connection), connection:
                current_attempt().step("book", write, in_transaction=connection)

        with pytest.raises(ClaimLost):
            idem.run("order-1", operation, request=None)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM orders").fetchone() == (0,)
        assert idem.read("order-1").steps == []


def lost_after_another(store, connection, key):
    """Whether a step is refused in a transaction, whatever result is stored of it."""
    wish = request(key)
    run_sync(store.commit([wish], []))
    stored, other = Payload("json.1", b"", b"1"), Payload("json.1", b"", b"2")
    write = StepWrite(key, wish.token, Step("book", 1, stored))
    assert run_sync(store.record_step(write)) is Decision.APPLY
    transaction = store.join(connection)
    run_sync(transaction.begin())
    return [
        run_sync(transaction.record_step(StepWrite(key, wish.token, Step("book", 1, payload))))
        for payload in (stored, other)
    ] == [Decision.LOST, Decision.LOST]


def test_what_a_stored_step_stands_for_is_not_written_again(shop, idem, tmp_path):
    """Also with an equal result, as nothing is: the order in this transaction is a second one."""
    with closing(psycopg.connect(shop.server_url)) as connection:
        connection.execute("SELECT 1")
        assert lost_after_another(calls_of(idem).store, connection, Key("order-1", caller="shop"))
    path = tmp_path / "orders.db"
    with (
        Idempotency(f"sqlite:///{path}", caller="shop") as embedded,
        closing(sqlite3.connect(path)) as connection,
    ):
        connection.execute("CREATE TABLE orders (name text)")
        connection.commit()
        assert lost_after_another(
            calls_of(embedded).store, connection, Key("order-1", caller="shop")
        )

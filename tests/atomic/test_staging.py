"""Staging in the user's transaction on every driver: the message and the write commit together."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, InvalidInput, current_attempt
from retrysafe.core.outbox.entries import EntryQuery
from retrysafe.errors import SchemaMissing, TransactionMissing
from retrysafe.relay import Relay
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore
from tests.atomic.drivers import Rollback

# In an operation's transaction.


def test_an_atomic_block_tells_once(driver, shop):
    """The order, the outcome and the message about it are one transaction; a replay adds none."""
    for _ in range(2):
        assert driver.place_and_tell("order-1", "pen") == "pen"
    assert shop.orders() == ["pen"]
    assert shop.entries() == [b'{"order":"pen"}']


def test_a_block_that_is_undone_tells_nobody(driver, shop):
    """Neither the order nor the message is there, and the next try has both."""

    def fail():
        raise Rollback

    with pytest.raises(Rollback):
        driver.place_and_tell("order-1", "pen", then=fail)
    assert (shop.orders(), shop.entries()) == ([], [])
    driver.place_and_tell("order-1", "pen")
    assert shop.entries() == [b'{"order":"pen"}']


# In a transaction of no operation.


def test_an_entry_commits_with_the_users_write(driver, shop):
    with driver.connected() as connection:
        with driver.transaction(connection):
            driver.write(connection, "pen")
            key = driver.stage(connection, {"order": "pen"}, aggregate="pen")
            assert shop.entries() == []
        assert shop.entries() == [b'{"order":"pen"}']
    received = []
    with Idempotency(shop.store_url, caller="shop") as idem:
        Relay(idem._calls.store, received.append).drain()
    assert [(item.key, item.aggregate) for item in received] == [(key, "pen")]


def test_an_entry_rolls_back_with_the_users_write(driver, shop):
    with driver.connected() as connection:
        with pytest.raises(Rollback), driver.transaction(connection):
            driver.write(connection, "pen")
            driver.stage(connection, 1)
            raise Rollback
        assert (shop.orders(), shop.entries()) == ([], [])


def test_entries_of_one_transaction_keep_their_order(driver, shop):
    """Under keys of their own, or under those that were given."""
    with driver.connected() as connection, driver.transaction(connection):
        keys = [driver.stage(connection, number, aggregate="lane") for number in range(5)]
        given = driver.stage(connection, b"\x00\xff", key="invoice-7", aggregate="lane")
    assert shop.entries() == [b"0", b"1", b"2", b"3", b"4", b"\x00\xff"]
    assert len(set(keys)) == 5
    assert given == "invoice-7"


def test_what_cannot_be_delivered_leaves_the_transaction_as_it_was(driver, shop):
    with driver.connected() as connection:
        with driver.transaction(connection):
            driver.write(connection, "pen")
            with pytest.raises(InvalidInput):
                driver.stage(connection, object())
        assert (shop.orders(), shop.entries()) == (["pen"], [])


def test_without_a_transaction_nothing_is_staged(driver, shop):
    """It would be delivered although the business write may still fail."""
    with (
        driver.connected(autocommit=True) as connection,
        pytest.raises((TransactionMissing, InvalidInput)),
    ):
        driver.stage(connection, 1)
    assert shop.entries() == []


# Completing a leased operation in the user's transaction.


def test_a_leased_operation_that_completes_in_a_transaction_tells_in_it(idem, shop):
    """Committed together; and when the transaction is rolled back, told with the outcome."""
    import psycopg

    def operation(is_kept):
        current_attempt().outbox.stage("t", f"kept {is_kept}")
        with psycopg.connect(shop.server_url) as connection:
            connection.execute(f"INSERT INTO {shop.schema}.orders (name) VALUES ('{is_kept}')")
            current_attempt().complete_in(connection, "in it")
            if not is_kept:
                connection.rollback()
        return "after it"

    assert idem.run("order-1", operation, True) == "in it"
    assert shop.entries() == [b"kept True"]
    assert idem.run("order-2", operation, False) == "after it"
    assert shop.entries() == [b"kept True", b"kept False"]
    assert shop.orders() == ["True"]


# SQLite.


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shop.db"


@pytest.fixture
def connection(path):
    with Idempotency(f"sqlite:///{path}", caller="shop") as made:
        made.read("nothing")
    found = sqlite3.connect(path, isolation_level=None)
    found.execute("CREATE TABLE orders (name TEXT)")
    yield found
    found.close()


def bodies(idem):
    found = run_sync(idem._calls.store.outbox.list_entries(EntryQuery()))
    return [item.entry.body for item in reversed(found)]


def test_sqlite_commits_the_message_with_the_write(path, connection):
    at = datetime.now(UTC) + timedelta(hours=1)
    with Idempotency(f"sqlite:///{path}", caller="shop") as idem:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders VALUES ('pen')")
        idem.stage(connection, "t", "a", deliver_at=at)
        with idem.atomic(connection, "order-1", request=1) as run:
            run.outbox.stage("t", "b")
            run.complete(1)
        assert bodies(idem) == []
        connection.execute("COMMIT")
        assert bodies(idem) == [b"a", b"b"]
        first, second = reversed(run_sync(idem._calls.store.outbox.list_entries(EntryQuery())))
        assert first.entry.due_at_ms - second.entry.due_at_ms > 3_000_000
        assert (second.entry.caller, second.entry.origin) == ("shop", "order-1")
        connection.execute("BEGIN IMMEDIATE")
        idem.stage(connection, "t", "c")
        connection.execute("ROLLBACK")
        assert bodies(idem) == [b"a", b"b"]


def test_sqlite_without_a_transaction_or_a_schema_is_refused(path, tmp_path, connection):
    with Idempotency(f"sqlite:///{path}", caller="shop") as idem:
        with pytest.raises(TransactionMissing):
            idem.stage(connection, "t", 1)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DROP TABLE retrysafe_outbox")
        with pytest.raises(SchemaMissing, match="retrysafe migrate"):
            idem.stage(connection, "t", 1)
        connection.execute("INSERT INTO orders VALUES ('still works')")
        connection.execute("ROLLBACK")


def test_a_write_lock_that_somebody_holds_is_told_as_it_is(path, connection):
    """The driver's own error says what became of the user's transaction."""
    rival = sqlite3.connect(path, isolation_level=None, timeout=0)
    try:
        with Idempotency(f"sqlite:///{path}", caller="shop") as idem:
            connection.execute("BEGIN IMMEDIATE")
            rival.execute("BEGIN")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                idem.stage(rival, "t", 1)
    finally:
        rival.close()


# What has no outbox.


def test_faces_refuse_what_they_cannot_stage_in(connection):
    idem = Idempotency(MemoryStore(), caller="shop")
    with pytest.raises(InvalidInput, match="no transactions to join"):
        idem.stage(connection, "t", 1)

    class Plain(MemoryStore):
        @property
        def capabilities(self):
            from dataclasses import replace

            return replace(super().capabilities, has_outbox=False)

    with Idempotency(Plain(), caller="shop") as plain:
        with pytest.raises(InvalidInput, match="Plain has no outbox"):
            plain.stage(connection, "t", 1)
        with pytest.raises(InvalidInput, match="no outbox"):
            plain.run("k", lambda: current_attempt().outbox.stage("t", 1), name="n", request=None)


def test_an_event_loop_needs_a_connection_for_any_thread(path, connection):
    """The message says how to open it instead."""
    import asyncio

    async def main():
        async with AsyncIdempotency(f"sqlite:///{path}", caller="shop") as idem:
            await idem.stage(connection, "t", 1)

    with pytest.raises(InvalidInput, match="check_same_thread=False"):
        asyncio.run(main())

"""A faulty store joins transactions as the store that it wraps, and fails in them on demand."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    InvalidInput,
    OperationInFlight,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition, MemoryStore, SqliteStore
from retrysafe.testing import FaultyStore, Moment

SECRET = "0123456789abcdef"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (name TEXT)")
    return path


@pytest.fixture
def faulty(path):
    made = FaultyStore(SqliteStore(path))
    yield made
    made.heal()
    run_sync(made.close())


@pytest.fixture
def idem(faulty):
    with Idempotency(faulty, caller="shop", secret=SECRET, cache=False) as made:
        yield made


@pytest.fixture
def connection(path):
    with closing(sqlite3.connect(path, check_same_thread=False)) as made:
        yield made


def place(idem, connection, key="order-1"):
    with connection, idem.atomic(connection, key, request="pen") as run:
        if not run.replayed:
            connection.execute("INSERT INTO orders VALUES ('pen')")
            run.complete("placed")
    return run.replayed


def orders(connection):
    return connection.execute("SELECT count(*) FROM orders").fetchone()[0]


def test_without_faults_a_block_runs_once_and_is_logged(idem, connection, faulty):
    assert place(idem, connection) is False
    assert place(idem, connection) is True
    assert orders(connection) == 1
    assert [call.method for call in faulty.calls] == [
        *("transaction.begin", "transaction.lock", "transaction.claim"),
        *("transaction.settle", "transaction.keep"),
        *("transaction.begin", "transaction.lock", "transaction.claim", "transaction.undo"),
    ]


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("method", ["begin", "lock", "claim", "settle", "keep"])
def test_a_fault_in_a_block_leaves_neither_write_nor_claim(
    idem, connection, faulty, method, moment
):
    """Whatever fails and whenever it does: the user's rollback takes everything along."""
    faulty.fail(moment, method=f"transaction.{method}")
    with pytest.raises(StoreUnavailable, match=rf"transaction\.{method}"):
        place(idem, connection)
    assert orders(connection) == 0
    assert idem.read("order-1") is None
    assert place(idem, connection) is False
    assert orders(connection) == 1


def test_a_fault_by_the_drivers_own_error(idem, connection, faulty):
    """As a user would see it from a database."""
    faulty.fail(
        Moment.BEFORE,
        method="transaction.claim",
        error=lambda call: sqlite3.OperationalError("disk I/O error"),
    )
    with pytest.raises(sqlite3.OperationalError, match="disk"):
        place(idem, connection)
    assert orders(connection) == 0


def test_an_outcome_whose_fate_cannot_be_asked_for_is_not_written_twice(idem, connection, faulty):
    """complete_in committed, and then the store does not answer: the ending is confirmed."""
    faulty.fail(Moment.BEFORE, method="transaction.fate")

    def operation():
        with connection:
            connection.execute("INSERT INTO orders VALUES ('pen')")
            current_attempt().complete_in(connection, "placed")

    assert idem.run("order-1", operation, request=None) is None
    stored = idem.read("order-1")
    assert (stored.condition, len(stored.outcomes)) == (Condition.SUCCEEDED, 1)
    assert orders(connection) == 1
    assert {"transaction.settle", "transaction.fate"} <= {call.method for call in faulty.calls}


def test_staging_and_steps_fail_too(idem, connection, faulty):
    """A step that could not be recorded in the transaction rolls its work back with it."""
    faulty.fail(Moment.BEFORE, method="transaction.record_step")

    def operation():
        def write(used):
            used.execute("INSERT INTO orders VALUES ('pen')")

        with connection:
            current_attempt().step("write", write, connection, in_transaction=connection)

    with pytest.raises(StoreUnavailable):
        idem.run("order-1", operation, request=None)
    assert orders(connection) == 0
    faulty.fail(Moment.AFTER, method="transaction.stage")
    with pytest.raises(StoreUnavailable), connection:
        idem.stage(connection, "orders.placed", {"order": 1})
    assert connection.execute("SELECT count(*) FROM retrysafe_outbox").fetchone()[0] == 0


def test_a_rivals_block_is_in_flight_as_on_the_wrapped_store(idem, connection, path):
    """A wrapped store refuses a rival as the bare one does."""
    with (
        closing(sqlite3.connect(path, timeout=0)) as rival,
        connection,
        idem.atomic(connection, "order-1") as run,
    ):
        with pytest.raises(OperationInFlight), idem.atomic(rival, "order-1"):
            raise AssertionError("not reached")
        run.complete(1)


def test_in_an_event_loop_too(faulty, connection):
    """The transaction of a blocking store is used in a thread there."""
    faulty.fail(Moment.BEFORE, method="transaction.settle")

    async def scenario():
        async with AsyncIdempotency(faulty, caller="shop") as idem:
            for is_healed in (False, True):
                try:
                    with connection:
                        async with idem.atomic(connection, "order-1") as run:
                            await run.complete(1)
                except StoreUnavailable:
                    assert not is_healed
            return run.value

    assert asyncio.run(scenario()) == 1


def test_a_store_without_transactions_has_none_with_faults_either(connection):
    with (
        Idempotency(FaultyStore(MemoryStore()), caller="shop") as idem,
        pytest.raises(InvalidInput, match="no transactions to join"),
    ):
        idem.atomic(connection, "order-1")

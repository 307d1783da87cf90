"""Atomic mode on every driver: claim, business write and outcome are one transaction."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from retrysafe import InFlight, KeyReused, OperationInFlight, Policy
from retrysafe.errors import OutcomeMissing, TransactionMissing
from retrysafe.transactions import is_conflict, retry_serialization
from tests.atomic.drivers import Rollback

PATIENCE_SECONDS = 30


def test_the_first_run_writes_and_the_second_replays(driver, shop):
    """The business write happens once, and both callers get the outcome of the first."""
    assert driver.place("order-1", "pen") == ({"order": "pen"}, False)
    assert driver.place("order-1", "pen") == ({"order": "pen"}, True)
    assert shop.orders() == ["pen"]
    assert shop.states() == [2]
    assert shop.locks() == 0


@pytest.mark.parametrize("value", [{}, 0, "", False, b"\x00\xff"])
def test_falsy_and_binary_outcomes_are_outcomes(driver, value):
    """What was completed is what is replayed, whatever its truth value."""
    driver.place("order-1", "pen", value=value)
    assert driver.place("order-1", "pen", value="other") == (value, True)


def test_a_rollback_frees_the_key_at_once(driver, shop):
    """Neither the write nor the claim outlives the transaction; the next caller runs."""

    def fail():
        raise Rollback

    with pytest.raises(Rollback):
        driver.place("order-1", "pen", then=fail)
    assert shop.orders() == []
    assert shop.states() == []
    assert driver.place("order-1", "pen") == ({"order": "pen"}, False)


def test_another_request_under_the_key_is_refused(driver, shop):
    """The stored outcome is not shown to a different request, and nothing is written."""
    driver.place("order-1", "pen")
    with pytest.raises(KeyReused):
        driver.place("order-1", "ink")
    assert shop.orders() == ["pen"]


def test_a_rival_transaction_is_in_flight_and_then_replayed(driver, shop, rival):
    """While the first transaction is open the second is refused at once, never by a database error;
    after the commit it gets the outcome."""
    refused = []

    def compete():
        with pytest.raises(OperationInFlight) as caught:
            rival.place("order-1", "pen")
        refused.append(caught.value)

    driver.place("order-1", "pen", then=lambda: in_thread(compete))
    assert refused[0].retryable
    assert refused[0].retry_after > timedelta(0)
    assert rival.place("order-1", "pen") == ({"order": "pen"}, True)
    assert shop.orders() == ["pen"]


def in_thread(function):
    """Runs a rival in a thread of its own, as drivers with a loop need."""
    failures = []

    def body():
        try:
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_a_waiting_rival_gets_the_outcome(driver, shop, rival):
    """With the policy WAIT the rival wakes when the first transaction commits, and replays."""
    policy = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=PATIENCE_SECONDS))
    answers = []

    def compete():
        answers.append(rival.place("order-1", "pen", policy=policy))

    thread = threading.Thread(target=compete)

    def let_the_rival_wait():
        thread.start()
        wait_until_waiting(shop)

    driver.place("order-1", "pen", then=let_the_rival_wait)
    thread.join(PATIENCE_SECONDS)
    assert answers == [({"order": "pen"}, True)]
    assert shop.orders() == ["pen"]


def wait_until_waiting(shop):
    """Returns when the server says that somebody waits for an advisory lock."""
    sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    pause = threading.Event()
    for _ in range(1500):
        if shop.connection.execute(sql).fetchone()[0]:
            return
        pause.wait(0.02)
    raise AssertionError("nobody waits")


def test_a_wait_that_runs_out_leaves_the_transaction_usable(driver, shop, rival):
    """The rival is told that the operation is in flight; its transaction still takes writes, and
    its own lock timeout is what it was."""
    policy = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(milliseconds=20))

    def compete():
        with rival.connected() as connection, rival.transaction(connection):
            with pytest.raises(OperationInFlight):
                enter(rival, connection, "order-1", request="pen", policy=policy)
            rival.write(connection, "kept")

    driver.place("order-1", "pen", then=lambda: in_thread(compete))
    assert sorted(shop.orders()) == ["kept", "pen"]


def enter(driver, connection, key, **options):
    """Enters and leaves a block that does nothing."""
    context = driver.idem.atomic(connection, key, **options)
    if hasattr(driver, "runner"):

        async def flow():
            async with context as run:
                return run

        return driver.run(flow())
    with context as run:
        return run


def test_a_block_without_an_outcome_is_undone_alone(driver, shop):
    """Leaving without complete() raises; a user who goes on has neither claim nor lock left."""
    with driver.connected() as connection, driver.transaction(connection):
        with pytest.raises(OutcomeMissing):
            enter(driver, connection, "order-1")
        driver.write(connection, "kept")
        assert shop.locks() == 0
    assert shop.orders() == ["kept"]
    assert shop.states() == []


def test_a_nested_transaction_that_rolls_back_takes_the_claim_with_it(driver, shop):
    """The outer transaction commits; the key of the inner one is free, and runs again."""
    with driver.connected() as connection:
        with driver.transaction(connection):
            driver.write(connection, "outer")
            with pytest.raises(Rollback), driver.nested(connection):
                placed(driver, connection, "order-1", "inner")
                raise Rollback
            assert shop.locks() == 0
        assert shop.orders() == ["outer"]
    assert driver.place("order-1", "inner") == ({"order": "inner"}, False)
    assert sorted(shop.orders()) == ["inner", "outer"]


def placed(driver, connection, key, name, then=None):
    """Permits an order in the transaction that is open."""
    context = driver.idem.atomic(connection, key, request=name)
    if hasattr(driver, "runner"):

        async def flow():
            async with context as run:
                if not run.replayed:
                    await driver.write_async(connection, name)
                    await run.complete({"order": name})
            return run.value, run.replayed

        return driver.run(flow())
    with context as run:
        if not run.replayed:
            driver.write(connection, name)
            run.complete({"order": name})
    return run.value, run.replayed


def test_two_blocks_in_one_transaction(driver, shop):
    """Several keys share a transaction; the same key a second time is a replay."""
    with driver.connected() as connection, driver.transaction(connection):
        assert placed(driver, connection, "order-1", "pen") == ({"order": "pen"}, False)
        assert placed(driver, connection, "order-2", "ink") == ({"order": "ink"}, False)
        assert placed(driver, connection, "order-1", "pen") == ({"order": "pen"}, True)
    assert shop.orders() == ["pen", "ink"]


def test_a_database_error_in_the_block_leaves_the_outer_transaction_usable(driver, shop):
    """The block is a savepoint: a violated constraint in it is undone with it."""
    shop.connection.execute(driver.insert("pen"))
    with driver.connected() as connection, driver.transaction(connection):
        with pytest.raises(Exception, match="orders_name_key"):
            placed(driver, connection, "order-1", "pen")
        driver.write(connection, "kept")
    assert shop.orders() == ["pen", "kept"]
    assert shop.states() == []


def test_without_a_transaction_nothing_is_written(driver, shop):
    """Autocommit is refused before anything happens, because nothing could commit together."""
    with driver.connected(autocommit=True) as connection, pytest.raises(TransactionMissing):
        enter(driver, connection, "order-1")
    assert shop.states() == []
    assert shop.locks() == 0


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_every_isolation_level_runs_once(driver, shop, isolation):
    """Runs, replays and refuses alike."""
    assert driver.place("order-1", "pen", isolation=isolation) == ({"order": "pen"}, False)
    assert driver.place("order-1", "pen", isolation=isolation) == ({"order": "pen"}, True)
    assert shop.orders() == ["pen"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_rival_that_commits_first_shows_as_a_conflict(driver, shop, isolation, rival):
    """A snapshot from before the rival's commit must neither run again nor fail for good: the
    driver's serialization failure asks for a retry, and the retry replays."""
    tries = []

    def place():
        tries.append(len(tries))
        with (
            driver.connected(isolation=isolation) as connection,
            driver.transaction(connection),
        ):
            driver.write(connection, f"snapshot {len(tries)}")
            if len(tries) == 1:
                in_thread(lambda: rival.place("order-1", "pen", isolation=isolation))
            return placed(driver, connection, "order-1", "pen")

    with pytest.raises(Exception, match="could not serialize") as caught:
        place()
    assert is_conflict(caught.value)
    assert shop.orders() == ["pen"]
    tries.clear()
    assert retry_serialization(place) == ({"order": "pen"}, True)


def test_a_leased_operation_that_runs_counts_as_in_flight(driver, shop, idem):
    """The two modes share the key: what one runs the other does not."""
    refused = []

    def operation():
        with pytest.raises(OperationInFlight) as caught:
            driver.place("order-1", "pen")
        refused.append(caught.value)
        return "leased"

    assert idem.run("order-1", operation, request="pen", name="") == "leased"
    assert refused[0].retry_after == timedelta(seconds=1)
    assert driver.place("order-1", "pen") == ("leased", True)
    assert shop.orders() == []

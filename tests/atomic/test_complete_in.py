"""A leased operation that settles in the user's transaction, on real connections."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from datetime import timedelta

import psycopg
import pytest

from retrysafe import (
    ClaimLost,
    Idempotency,
    InFlight,
    InvalidInput,
    KeyReused,
    OperationInFlight,
    Policy,
    current_attempt,
)
from retrysafe.transactions import is_conflict
from tests.atomic.drivers import Psycopg, Rollback
from tests.atomic.test_drivers import enter, in_thread

FAILING = Policy()
IMPATIENT = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(milliseconds=20))


def leased(driver, key, body, **options):
    """Runs a body as a leased operation: `body(connection, attempt)` inside a transaction."""
    if hasattr(driver, "runner"):

        async def operation():
            connection = await driver.open_async()
            try:
                async with driver.transaction_async(connection):
                    return await body.on_loop(connection)
            finally:
                await driver.close_async(connection)

        return driver.run(driver.idem.run(key, operation, name="place", request=None, **options))

    def operation():
        with driver.connected() as connection, driver.transaction(connection):
            return body.in_thread(connection)

    return driver.idem.run(key, operation, name="place", request=None, **options)


class Placing:
    """Writes an order and completes the attempt with it; what comes between and after is told."""

    def __init__(self, driver, name, *, before=None, after=None, returns=None):
        self.driver, self.name, self.returns = driver, name, returns
        self.before, self.after = before, after

    def in_thread(self, connection):
        self.driver.write(connection, self.name)
        if self.before is not None:
            self.before()
        current_attempt().complete_in(connection, {"order": self.name})
        if self.after is not None:
            self.after()
        return self.returns

    async def on_loop(self, connection):
        await self.driver.write_async(connection, self.name)
        if self.before is not None:
            self.before()
        await current_attempt().complete_in(connection, {"order": self.name})
        if self.after is not None:
            self.after()
        return self.returns


def test_write_and_outcome_commit_together(driver, shop, idem):
    """The outcome is the value of complete_in, whatever the operation returns, and it is written
    once."""
    placing = Placing(driver, "pen", returns="something else")
    assert leased(driver, "order-1", placing) == {"order": "pen"}
    assert leased(driver, "order-1", placing) == {"order": "pen"}
    assert shop.orders() == ["pen"]
    stored = idem.read("order-1")
    assert [outcome.payload.body for outcome in stored.outcomes] == [b'{"order":"pen"}']


def test_a_zombie_loses_its_business_write(driver, shop, idem):
    """Somebody took over while it was slow: its transaction is refused, and the successor's outcome
    does not change."""

    def take_over():
        idem.release("order-1", force=True)
        assert idem.run("order-1", lambda: "successor", name="place", request=None) == "successor"

    with pytest.raises(ClaimLost):
        leased(driver, "order-1", Placing(driver, "pen", before=lambda: in_thread(take_over)))
    assert shop.orders() == []
    assert idem.run("order-1", lambda: "third", name="place", request=None) == "successor"


def test_a_rollback_after_completing_leaves_the_usual_path(driver, shop):
    """The key is freed by the judged exception, and the next run writes."""

    def fail():
        raise Rollback

    with pytest.raises(Rollback):
        leased(driver, "order-1", Placing(driver, "pen", after=fail))
    assert shop.orders() == []
    assert shop.states() == [4]
    assert leased(driver, "order-1", Placing(driver, "pen")) == {"order": "pen"}
    assert shop.orders() == ["pen"]


def is_renewed_after(ends):
    """Whether the running attempt's lease ends later than at first; notes its end."""
    ends.append(current_attempt().deadline)
    return ends[-1] > ends[0]


def test_an_attempt_that_goes_on_after_a_rollback_keeps_its_lease(driver, shop):
    """A transaction that is tried again may take long; nobody else may start meanwhile."""
    ends = []
    options = {"name": "place", "request": None, "policy": Policy(lease=timedelta(seconds=1))}
    placing = Placing(driver, "pen", after=lambda: is_renewed_after(ends))
    if hasattr(driver, "runner"):

        async def operation():
            connection = await driver.open_async()
            try:
                with suppress(Rollback):
                    async with driver.transaction_async(connection):
                        await placing.on_loop(connection)
                        raise Rollback
            finally:
                await driver.close_async(connection)
            for _ in range(200):
                if is_renewed_after(ends):
                    return "in time"
                await asyncio.sleep(0.05)
            return "never"

        value = driver.run(driver.idem.run("order-1", operation, **options))
    else:

        def operation():
            with (
                suppress(Rollback),
                driver.connected() as connection,
                driver.transaction(connection),
            ):
                placing.in_thread(connection)
                raise Rollback
            for _ in range(200):
                if is_renewed_after(ends):
                    return "in time"
                time.sleep(0.05)
            return "never"

        value = driver.idem.run("order-1", operation, **options)
    assert value == "in time"
    assert shop.orders() == []


def outlive(shop):
    """Ends the lease of every record, as a long pause of its owner would."""
    shop.connection.execute(f"UPDATE {shop.schema}.keys SET lease_ends_at_ms = 0")


def refuses(rival, policy, isolation=None):
    """A rival's transaction in which a block is refused, and the rest goes on."""

    def compete():
        with rival.connected(isolation=isolation) as connection, rival.transaction(connection):
            with pytest.raises(OperationInFlight) as caught:
                enter(rival, connection, "order-1", name="place", request=None, policy=policy)
            assert caught.value.retry_after >= timedelta(seconds=1)
            with pytest.raises(KeyReused):
                enter(rival, connection, "order-1", name="place", request="other", policy=FAILING)
            rival.write(connection, "kept")

    return lambda: in_thread(compete)


@pytest.mark.parametrize("is_over", [False, True], ids=["leased", "lease over"])
@pytest.mark.parametrize("policy", [FAILING, IMPATIENT], ids=["fail", "wait"])
def test_an_atomic_rival_of_a_completing_attempt_is_refused(driver, shop, rival, policy, is_over):
    """At once, or after its wait, and never by waiting for a transaction that is not its own; its
    own transaction goes on."""
    placing = Placing(
        driver,
        "pen",
        before=lambda: outlive(shop) if is_over else None,
        after=refuses(rival, policy),
    )
    assert leased(driver, "order-1", placing) == {"order": "pen"}
    with rival.connected() as connection, rival.transaction(connection):
        run = enter(rival, connection, "order-1", name="place", request=None)
        assert (run.replayed, run.value) == (True, {"order": "pen"})
    assert sorted(shop.orders()) == ["kept", "pen"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("is_over", [False, True], ids=["leased", "lease over"])
@pytest.mark.parametrize("driver", [Psycopg], indirect=True)
def test_a_completing_attempt_is_in_flight_at_every_isolation_level(
    driver, shop, rival, isolation, is_over
):
    """Its rivals work on a snapshot, and are told all the same."""
    placing = Placing(
        driver,
        "pen",
        before=lambda: outlive(shop) if is_over else None,
        after=refuses(rival, FAILING, isolation),
    )
    assert leased(driver, "order-1", placing) == {"order": "pen"}
    assert sorted(shop.orders()) == ["kept", "pen"]


@pytest.mark.parametrize("isolation", ["REPEATABLE_READ", "SERIALIZABLE"])
@pytest.mark.parametrize("is_over", [False, True], ids=["leased", "lease over"])
def test_an_attempt_that_completed_after_the_snapshot_is_a_conflict(shop, idem, isolation, is_over):
    """The snapshot shows it running; its outcome is there, so a new transaction replays it."""
    with psycopg_connection(shop) as connection:
        connection.isolation_level = psycopg.IsolationLevel[isolation]

        def operation():
            if is_over:
                outlive(shop)
            assert connection.execute(f"SELECT state FROM {shop.schema}.keys").fetchone() == (1,)
            return "leased"

        assert idem.run("order-1", operation, name="place", request=None) == "leased"
        with Idempotency(shop.store_url, caller="shop") as other:

            def replayed():
                with other.atomic(connection, "order-1", name="place", request=None) as run:
                    return run.value

            with pytest.raises(psycopg.errors.SerializationFailure) as caught:
                replayed()
            assert is_conflict(caught.value)
            connection.rollback()
            assert replayed() == "leased"


def psycopg_connection(shop):
    return psycopg.connect(shop.server_url)


def insert(shop, connection, name):
    connection.execute(f"INSERT INTO {shop.schema}.orders (name) VALUES ('{name}')")


def test_a_rollback_that_the_operation_survives(shop, idem):
    """The operation goes another way, and what it returns is settled by the engine."""

    def operation():
        with psycopg_connection(shop) as connection:
            insert(shop, connection, "pen")
            current_attempt().complete_in(connection, "in the transaction")
            connection.rollback()
        return "another way"

    assert idem.run("order-1", operation, request=None) == "another way"
    assert idem.answer("order-1", operation, request=None).replayed
    assert shop.orders() == []
    assert shop.states() == [2]


def test_a_savepoint_that_is_rolled_back_takes_the_outcome_with_it(shop, idem):
    """The transaction commits, the outcome in its savepoint does not: the engine settles."""

    def operation():
        with psycopg_connection(shop) as connection:
            insert(shop, connection, "pen")
            with pytest.raises(Rollback), connection.transaction():
                current_attempt().complete_in(connection, "in the savepoint")
                raise Rollback
        return "by the engine"

    assert idem.run("order-1", operation, request=None) == "by the engine"
    assert idem.run("order-1", operation, request=None) == "by the engine"
    assert shop.orders() == ["pen"]


def test_a_second_try_in_a_new_transaction(shop, idem):
    """After a rollback, as after a serialization failure, the same attempt completes again."""

    def operation():
        for name in ("first", "second"):
            with psycopg_connection(shop) as connection:
                insert(shop, connection, name)
                current_attempt().complete_in(connection, name)
                if name == "first":
                    connection.rollback()

    assert idem.run("order-1", operation, request=None) == "second"
    assert idem.run("order-1", operation, request=None) == "second"
    assert shop.orders() == ["second"]


def test_completing_again_after_the_commit_is_refused(shop, idem):
    """One attempt has one outcome; the second transaction does not commit."""

    def operation():
        for name in ("first", "second"):
            with psycopg_connection(shop) as connection:
                insert(shop, connection, name)
                current_attempt().complete_in(connection, name)

    with pytest.raises(InvalidInput, match="already"):
        idem.run("order-1", operation, request=None)
    assert idem.run("order-1", operation, request=None) == "first"
    assert shop.orders() == ["first"]


def test_an_exception_after_the_commit_does_not_run_the_operation_again(shop, idem):
    """The caller hears of the exception, the next one gets the outcome."""

    def operation():
        with psycopg_connection(shop) as connection:
            insert(shop, connection, "pen")
            current_attempt().complete_in(connection, "done")
        raise Rollback

    with pytest.raises(Rollback):
        idem.run("order-1", operation, request=None)
    assert idem.run("order-1", operation, request=None) == "done"
    assert shop.orders() == ["pen"]


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_transaction_around_the_run_decides_without_a_deadlock(shop, idem, is_committed):
    """The run ends while the transaction is open; settling would wait for ourselves for ever."""
    policy = Policy(lease=policy_lease())
    with psycopg_connection(shop) as connection:

        def operation():
            insert(shop, connection, "pen")
            current_attempt().complete_in(connection, "done")

        assert idem.run("order-1", operation, policy=policy, request=None) == "done"
        if is_committed:
            connection.commit()
        else:
            connection.rollback()
    if is_committed:
        assert idem.run("order-1", operation, policy=policy, request=None) == "done"
        assert shop.orders() == ["pen"]
    else:
        with pytest.raises(OperationInFlight):
            idem.run("order-1", operation, policy=policy, request=None)
        assert shop.orders() == []


def policy_lease():
    from datetime import timedelta

    return timedelta(minutes=5)


def test_without_a_transaction_nothing_is_completed(shop, idem):
    """An outcome that commits by itself would not commit together with anything."""

    def operation():
        with psycopg_connection(shop) as connection:
            connection.autocommit = True
            current_attempt().complete_in(connection, "alone")

    with pytest.raises(InvalidInput, match="no open transaction"):
        idem.run("order-1", operation, request=None)
    assert shop.states() == [4]

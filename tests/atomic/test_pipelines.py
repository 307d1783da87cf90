"""Atomic mode in psycopg's pipeline mode, where statements are answered at the next sync."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import psycopg
import pytest

from retrysafe import (
    AsyncIdempotency,
    InFlight,
    KeyReused,
    OperationInFlight,
    Policy,
    current_attempt,
)
from retrysafe.errors import TransactionMissing

# What setting a savepoint without a transaction is told with.
RAISE_NO_TRANSACTION = "DO $$ BEGIN RAISE EXCEPTION 'mine' USING ERRCODE = '25P01'; END $$"


@pytest.fixture
def insert(shop):
    return f"INSERT INTO {shop.schema}.orders (name) VALUES (%s)"


def test_a_block_runs_once_in_a_pipeline(shop, idem, insert):
    """Claim, write and outcome commit together; the retry replays and can go on in its pipeline."""
    for is_replay in (False, True):
        with psycopg.connect(shop.server_url) as connection, connection.pipeline():
            connection.execute(insert, (f"before {is_replay}",))
            with idem.atomic(connection, "order-1", request="pen") as run:
                assert run.replayed is is_replay
                if not run.replayed:
                    connection.execute(insert, ("pen",))
                    run.complete({"order": "pen"})
        assert run.value == {"order": "pen"}
    assert shop.orders() == ["before False", "pen", "before True"]
    assert shop.locks() == 0


def test_refusals_leave_the_pipeline_usable(shop, idem, insert):
    """Another request, a rival and a wait that runs out are told as everywhere."""
    waiting = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(milliseconds=20))
    with psycopg.connect(shop.server_url) as connection:
        with idem.atomic(connection, "order-1", request="pen") as run:
            run.complete(1)
        connection.commit()
        with (
            idem.atomic(connection, "order-2") as run,
            psycopg.connect(shop.server_url) as other,
            other.pipeline(),
        ):
            with pytest.raises(KeyReused), idem.atomic(other, "order-1", request="ink"):
                raise AssertionError("not reached")
            with pytest.raises(OperationInFlight), idem.atomic(other, "order-2"):
                raise AssertionError("not reached")
            with pytest.raises(OperationInFlight), idem.atomic(other, "order-2", policy=waiting):
                raise AssertionError("not reached")
            other.execute(insert, ("kept",))
            run.complete(2)
    assert shop.orders() == ["kept"]


def test_without_a_transaction_a_pipeline_is_refused(shop, idem):
    with (
        psycopg.connect(shop.server_url, autocommit=True) as connection,
        connection.pipeline(),
        pytest.raises(TransactionMissing),
        idem.atomic(connection, "order-1"),
    ):
        raise AssertionError("not reached")
    assert shop.states() == []


def test_what_the_user_queued_fails_as_the_drivers_error(shop, idem, insert):
    """A statement of the user that fails at our sync takes the block with it."""
    with psycopg.connect(shop.server_url) as connection:
        with (
            pytest.raises(psycopg.errors.UndefinedTable),
            connection.pipeline(),
            idem.atomic(connection, "order-1") as run,
        ):
            connection.execute("INSERT INTO nowhere VALUES (1)")
            run.complete(1)
        connection.rollback()
        with connection.pipeline(), idem.atomic(connection, "order-1") as run:
            run.complete(2)
    assert run.value == 2


def test_what_the_user_queued_before_and_after_is_told_too(shop, idem, insert):
    """Also where our own statement has an error of the same code: at the claim, and at the end."""
    for key, at in enumerate(("before", "after")):
        with psycopg.connect(shop.server_url) as connection:
            with pytest.raises(psycopg.errors.NoActiveSqlTransaction), connection.pipeline():
                if at == "before":
                    connection.execute(RAISE_NO_TRANSACTION)
                with idem.atomic(connection, f"order-{key}") as run:
                    run.complete(1)
                    if at == "after":
                        connection.execute(RAISE_NO_TRANSACTION)
            connection.rollback()
    assert shop.states() == []


def test_a_leased_operation_completes_in_a_pipeline(shop, idem, insert):
    """It still holds its claim, and is told so."""

    def operation():
        with psycopg.connect(shop.server_url) as connection, connection.pipeline():
            connection.execute(insert, ("pen",))
            current_attempt().complete_in(connection, "placed")

    assert idem.run("order-1", operation, request=None) == "placed"
    assert idem.run("order-1", operation, request=None) == "placed"
    assert shop.orders() == ["pen"]


def test_tasks_in_a_pipeline(shop, insert):
    """The same on async connections."""

    async def scenario():
        async with AsyncIdempotency(shop.store_url, caller="shop") as idem:
            for is_replay in (False, True):
                connection = await psycopg.AsyncConnection.connect(shop.server_url)
                async with (
                    connection,
                    connection.pipeline(),
                    idem.atomic(connection, "order-1") as run,
                ):
                    assert run.replayed is is_replay
                    if not run.replayed:
                        await connection.execute(insert, ("pen",))
                        await run.complete("placed")

            async def operation():
                connection = await psycopg.AsyncConnection.connect(shop.server_url)
                async with connection, connection.pipeline():
                    await connection.execute(insert, ("ink",))
                    await current_attempt().complete_in(connection, "placed")

            assert await idem.run("order-2", operation, request=None) == "placed"

    asyncio.run(scenario())
    assert shop.orders() == ["pen", "ink"]

"""Atomic mode behind PgBouncer in transaction mode: the transactions of many share few sessions."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import asyncpg
import psycopg
import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    InFlight,
    OperationInFlight,
    Policy,
    current_attempt,
)
from tests.atomic.test_drivers import in_thread, wait_until_waiting

WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=30))


@pytest.fixture
def pooled_url(shop, pgbouncer):
    return pgbouncer.url()


@pytest.fixture
def pooled(shop, pooled_url):
    """A face whose store is behind PgBouncer too."""
    url = f"{pooled_url}?schema={shop.schema}&prepared=off"
    with Idempotency(url, caller="shop") as made:
        yield made


def place(shop, idem, url, key, then=None, **options):
    """Permits an order on a connection of its own, as PgBouncer's users are told to make them."""
    with (
        psycopg.connect(url, prepare_threshold=None) as connection,
        idem.atomic(connection, key, request=key, **options) as run,
    ):
        if not run.replayed:
            connection.execute(f"INSERT INTO {shop.schema}.orders (name) VALUES (%s)", (key,))
            if then is not None:
                then()
            run.complete(f"placed {key}")
    return run.value, run.replayed


def test_a_block_runs_once(shop, pooled, pooled_url):
    """Write and outcome commit together, the retry replays, and no lock is left in a session."""
    assert place(shop, pooled, pooled_url, "pen") == ("placed pen", False)
    assert place(shop, pooled, pooled_url, "pen") == ("placed pen", True)
    assert shop.orders() == ["pen"]
    assert shop.locks() == 0


def test_rivals_meet_though_they_share_sessions(shop, pooled, pooled_url):
    """One is refused while the first is open, one waits for it; the lock is the transaction's."""
    answers = []
    waiter = threading.Thread(
        target=lambda: answers.append(place(shop, pooled, pooled_url, "pen", policy=WAITING))
    )

    def compete():
        with pytest.raises(OperationInFlight):
            place(shop, pooled, pooled_url, "pen")

    def let_them_come():
        in_thread(compete)
        waiter.start()
        wait_until_waiting(shop)

    place(shop, pooled, pooled_url, "pen", then=let_them_come)
    waiter.join(30)
    assert answers == [("placed pen", True)]
    assert shop.orders() == ["pen"]
    assert shop.locks() == 0


def test_the_bound_of_a_wait_stays_in_its_transaction(shop, pooled, pooled_url):
    """The next user of the session has the lock timeout of the server, not ours."""
    place(shop, pooled, pooled_url, "pen", policy=WAITING)

    def compete():
        briefly = WAITING.with_changes(wait_limit=timedelta(milliseconds=20))
        with pytest.raises(OperationInFlight):
            place(shop, pooled, pooled_url, "ink", policy=briefly)

    place(shop, pooled, pooled_url, "ink", then=lambda: in_thread(compete))
    connections = [psycopg.connect(pooled_url) for _ in range(4)]
    try:
        # All sessions at once, each in a transaction of its own.
        shown = {item.execute("SHOW lock_timeout").fetchone()[0] for item in connections}
    finally:
        for item in connections:
            item.close()
    assert shown == {"0"}


def test_a_leased_operation_completes_in_the_transaction(shop, pooled, pooled_url):
    """Its claim may have come by another session than its outcome."""

    def operation():
        with psycopg.connect(pooled_url, prepare_threshold=None) as connection:
            connection.execute(f"INSERT INTO {shop.schema}.orders (name) VALUES ('pen')")
            current_attempt().complete_in(connection, "placed")

    assert pooled.run("pen", operation, request=None) == "placed"
    assert pooled.run("pen", operation, request=None) == "placed"
    assert shop.orders() == ["pen"]


def test_tasks_on_asyncpg(shop, pooled_url):
    """The same in an event loop, with asyncpg's cache of statements off."""

    async def order(idem, key):
        connection = await asyncpg.connect(pooled_url, statement_cache_size=0)
        try:
            async with connection.transaction():
                async with idem.atomic(connection, key, policy=WAITING) as run:
                    if not run.replayed:
                        await connection.execute(
                            f"INSERT INTO {shop.schema}.orders (name) VALUES ('{key}')"
                        )
                        await run.complete(key)
                return run.value
        finally:
            await connection.close()

    async def scenario():
        url = f"{pooled_url}?schema={shop.schema}&prepared=off"
        async with AsyncIdempotency(url, caller="shop") as idem:
            keys = ["pen", "ink", "cup"]
            # Three transactions for each key on four sessions.
            return await asyncio.gather(*(order(idem, key) for key in keys * 3))

    assert sorted(asyncio.run(scenario())) == sorted(["pen", "ink", "cup"] * 3)
    assert sorted(shop.orders()) == ["cup", "ink", "pen"]
    assert shop.locks() == 0

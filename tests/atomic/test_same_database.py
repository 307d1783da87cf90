"""Atomic mode works in the store's own database only: elsewhere nobody would see the claim."""

from __future__ import annotations

import asyncio
import gc
import time
import uuid

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from retrysafe import AsyncIdempotency, Idempotency, InvalidInput, StoreUnavailable, current_attempt
from retrysafe.runtime.calls import calls_of
from retrysafe.stores import Condition
from retrysafe.stores.postgres.drivers.port import Conflict
from retrysafe.stores.postgres.drivers.servers import Servers
from retrysafe.stores.postgres.same_database import SameDatabase
from tests.atomic.drivers import DRIVERS
from tests.atomic.test_drivers import enter
from tests.servers.fixtures import migrated
from tests.servers.pgbouncer import PgBouncer
from tests.servers.process import free_port

REFUSED = "must be in one database"


@pytest.fixture(scope="module")
def elsewhere(postgres_server, migrated_url):
    """Another database of the same server, with the same schema and the same table."""
    name = f"elsewhere_{uuid.uuid4().hex[:12]}"
    url, _, schema = migrated_url.partition("?schema=")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            other = postgres_server.url(name)
            migrated(f"{other}?schema={schema}")
            with psycopg.connect(other, autocommit=True) as there:
                there.execute(
                    f"CREATE TABLE {schema}.orders (id serial PRIMARY KEY, name text UNIQUE)"
                )
            yield other
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.__name__)
def astray(request, shop, elsewhere):
    """Connections to the other database, used with the shop's store."""
    made = request.param(elsewhere, shop.schema)
    made.idem = type(made.idem)(shop.store_url, caller="shop")
    yield made
    made.end()


@pytest.fixture
def asked(monkeypatch):
    """What was asked of connections, in order."""
    answers = []
    ask = SameDatabase._identity_of

    async def noting(self, fetch):
        answers.append(await ask(self, fetch))
        return answers[-1]

    monkeypatch.setattr(SameDatabase, "_identity_of", noting)
    return answers


def test_a_block_in_another_database_is_refused(astray, shop, elsewhere):
    """The claim would land where nobody looks for it, every time; the transaction stays usable."""
    with astray.connected() as connection, astray.transaction(connection):
        for _ in range(2):
            with pytest.raises(InvalidInput, match=REFUSED):
                enter(astray, connection, "order-1")
            with pytest.raises(InvalidInput, match=REFUSED):
                astray.stage(connection, "pen")
        astray.write(connection, "mine")
    with psycopg.connect(elsewhere) as there:
        for table in ("keys", "outcomes", "outbox"):
            assert there.execute(f"SELECT * FROM {shop.schema}.{table}").fetchall() == []
        deleted = there.execute(f"DELETE FROM {shop.schema}.orders RETURNING name").fetchall()
    assert deleted == [("mine",)]


def test_every_connection_is_asked_once(driver, shop, asked):
    """Later transactions on a connection cost nothing more, and it is not kept alive for that."""
    has_pool = hasattr(driver, "engine")
    if has_pool:
        # SQLAlchemy's default: sessions come and go, the driver's connection stays.
        is_async = hasattr(driver, "runner")
        driver.engine = (create_async_engine if is_async else create_engine)(driver.engine.url)
    for visit in range(2):
        with driver.connected() as connection:
            for number in range(2):
                key = f"order {visit}.{number}"
                driver.place(key, key, connection=connection)
    # The store's own connection, and one or two of the user's.
    assert len(asked) == (2 if has_pool else 3)
    assert len(set(asked)) == 1
    del connection
    gc.collect()
    assert len(calls_of(driver.idem).store._statements.same_database._known) <= 1


def test_a_connection_out_of_a_pool_is_asked_once(shop, asked):
    """asyncpg lends it in a new wrapper each time, to which there is no weak reference."""

    async def scenario():
        async with (
            AsyncIdempotency(shop.store_url, caller="shop") as idem,
            asyncpg.create_pool(shop.server_url, min_size=1, max_size=1) as pool,
        ):
            for number in range(3):
                async with (
                    pool.acquire() as connection,
                    connection.transaction(),
                    idem.atomic(connection, f"order-{number}") as run,
                ):
                    await run.complete(number)

    asyncio.run(scenario())
    assert len(asked) == 2


def test_completing_in_another_database_is_refused_and_the_claim_stays(shop, idem, elsewhere):
    """It is no lost claim: the attempt is the owner still, and ends as it says."""

    def operation():
        with psycopg.connect(elsewhere) as connection:
            current_attempt().complete_in(connection, "not stored")

    with pytest.raises(InvalidInput, match=REFUSED):
        idem.run("order-1", operation, request=None)
    assert idem.read("order-1").condition is Condition.RELEASED

    def mended():
        with pytest.raises(InvalidInput, match=REFUSED):
            operation()
        return "stored"

    assert idem.run("order-2", mended, request=None) == "stored"


def test_a_thread_of_an_event_loop_compares_with_what_the_store_was(shop, elsewhere):
    """A blocking connection cannot wait for the async store: it was asked at the claim."""

    def astray():
        with psycopg.connect(elsewhere) as connection:
            current_attempt().complete_in(connection, 1)

    def right():
        with psycopg.connect(shop.server_url) as connection:
            current_attempt().complete_in(connection, 2)

    async def scenario():
        async with AsyncIdempotency(shop.store_url, caller="shop") as idem:
            with pytest.raises(InvalidInput, match=REFUSED):
                await idem.run("order-1", lambda: asyncio.to_thread(astray), request=1)
            assert await idem.run("order-2", lambda: asyncio.to_thread(right), request=2) == 2
            # As if the store's address led to another server by now: the next use finds it out.
            calls_of(idem).store._statements.same_database._identity = ("before", 1)
            with pytest.raises(InvalidInput, match=REFUSED):
                await idem.run("order-3", lambda: asyncio.to_thread(right), request=3)
            assert await idem.run("order-3", lambda: asyncio.to_thread(right), request=3) == 2

    asyncio.run(scenario())


def test_a_store_whose_server_was_replaced_is_asked_again(shop, idem):
    """Its address may lead to another server since it was asked: that refuses nobody."""
    with psycopg.connect(shop.server_url) as connection:
        with idem.atomic(connection, "order-1") as run:
            run.complete(1)
        connection.commit()
        calls_of(idem).store._statements.same_database._identity = ("postgres", 1)
    with psycopg.connect(shop.server_url) as connection, idem.atomic(connection, "order-2") as run:
        run.complete(2)
    assert run.value == 2


@pytest.mark.parametrize("error", [Conflict("cancelled"), StoreUnavailable("cancelled")])
def test_a_store_that_cannot_be_asked_again_is_out_of_reach(shop, idem, error):
    """A standby cancels a statement as in a conflict; callers are told what they can act on."""
    with psycopg.connect(shop.server_url) as connection:
        enter_block(idem, connection)
    same = calls_of(idem).store._statements.same_database
    same._identity = ("postgres", 1)

    async def refuse(seconds, sql):
        raise error

    usual, calls_of(idem).store._connector.fetch_within = (
        calls_of(idem).store._connector.fetch_within,
        refuse,
    )
    with (
        psycopg.connect(shop.server_url) as connection,
        pytest.raises(StoreUnavailable, match="cancelled"),
    ):
        enter_block(idem, connection)
    calls_of(idem).store._connector.fetch_within = usual
    # Its next use finds out where it is.
    assert idem.read("order-2") is not None
    assert same._identity != ("postgres", 1)


def test_a_connection_to_where_the_store_was_is_trusted_no_more(shop, idem, elsewhere):
    """A known connection to the old server would run again what has run on the new one."""
    there = Idempotency(f"{elsewhere}?schema={shop.schema}", caller="shop")
    with (
        there,
        psycopg.connect(shop.server_url) as old,
        psycopg.connect(elsewhere) as new,
    ):
        with idem.atomic(old, "order-1") as run:
            run.complete(1)
        old.commit()
        # What a name server or a proxy does: from now on the address leads elsewhere.
        calls_of(idem).store._connector.fetch_within = calls_of(there).store._connector.fetch_within
        with idem.atomic(new, "order-2") as run:
            run.complete(2)
        new.rollback()
        with pytest.raises(InvalidInput, match=REFUSED):
            enter_block(idem, old)


def enter_block(idem, connection):
    with idem.atomic(connection, "order-2") as run:
        run.complete("again")


def test_a_thread_that_compared_with_the_old_server_makes_nothing_known(shop, idem):
    """It was right when it looked; the connection is asked again all the same."""
    same = calls_of(idem).store._statements.same_database
    with psycopg.connect(shop.server_url) as connection:
        with idem.atomic(connection, "order-1") as run:
            run.complete(1)
        before = same._known
        same._remember(same._identity)
        assert same._known is before
        same._remember(("elsewhere", 1))
        before.add(connection)
        assert connection not in same._known


def test_a_store_that_did_not_answer_is_asked_again_after_a_pause(shop, elsewhere):
    """One failed question must not switch the comparison off for as long as the process lives."""
    own_port = f":{shop.connection.info.port}/"
    now = [1000.0]
    with Idempotency(shop.store_url, caller="shop") as idem:
        calls_of(idem).store._statements.same_database._monotonic = lambda: now[0]
        connector = calls_of(idem).store._connector
        right = connector._servers
        nowhere = shop.server_url.replace(own_port, f":{free_port()}/")
        connector._servers = Servers(nowhere)
        with psycopg.connect(shop.server_url) as connection:
            enter_block(idem, connection)
        connector._servers = right
        with psycopg.connect(elsewhere) as connection:
            now[0] += 29
            enter_block(idem, connection)
            connection.rollback()
            now[0] += 2
            with pytest.raises(InvalidInput, match=REFUSED):
                enter_block(idem, connection)


@pytest.fixture
def full_pooler(shop, pgbouncer):
    """The shop through a PgBouncer with one session: a user's transaction holds it."""
    own = PgBouncer(pgbouncer.binary, pgbouncer.server, pool_size=1)
    try:
        yield own.start().url()
    finally:
        own.remove()


# The store's own limits are 5 s for a statement, and as much for a connection or to give it back.
SOON_SECONDS = 4
POOLED = pytest.mark.parametrize("options", ["&prepared=off", ""], ids=["unprepared", "prepared"])


@POOLED
def test_a_block_behind_a_full_pooler_does_not_wait_for_itself(shop, full_pooler, options):
    """The store's question waits for the session that the block's own transaction holds."""
    store_url = f"{full_pooler}?schema={shop.schema}{options}"
    with Idempotency(store_url, caller="shop") as idem:
        began_at = time.monotonic()
        with psycopg.connect(full_pooler, prepare_threshold=None) as connection:
            enter_block(idem, connection)
        assert time.monotonic() - began_at < SOON_SECONDS
        assert idem.read("order-1") is None
        calls_of(idem).store._statements.same_database._identity = ("before", 1)
        began_at = time.monotonic()
        with (
            psycopg.connect(full_pooler, prepare_threshold=None) as connection,
            pytest.raises(StoreUnavailable),
        ):
            enter_block(idem, connection)
        assert time.monotonic() - began_at < SOON_SECONDS
        # Its next use finds out where it is.
        assert idem.read("order-2").condition is Condition.SUCCEEDED
        with psycopg.connect(full_pooler, prepare_threshold=None) as connection:
            with idem.atomic(connection, "order-3") as run:
                run.complete(3)
            assert connection in calls_of(idem).store._statements.same_database._known
        connector = calls_of(idem).store._connector
        assert {made.statement_seconds for made in connector._pool._idle} == {5}


@POOLED
def test_a_task_behind_a_full_pooler_does_not_wait_for_itself(shop, full_pooler, options):
    """The same in an event loop."""
    store_url = f"{full_pooler}?schema={shop.schema}{options}"

    async def block(idem, key):
        connection = await asyncpg.connect(full_pooler, statement_cache_size=0)
        try:
            async with connection.transaction(), idem.atomic(connection, key) as run:
                await run.complete(1)
        finally:
            await connection.close()

    async def scenario():
        async with AsyncIdempotency(store_url, caller="shop") as idem:
            async with asyncio.timeout(SOON_SECONDS):
                await block(idem, "order-1")
            assert await idem.read("order-2") is None
            calls_of(idem).store._statements.same_database._identity = ("before", 1)
            async with asyncio.timeout(SOON_SECONDS):
                with pytest.raises(StoreUnavailable):
                    await block(idem, "order-2")
            # Its next use finds out where it is.
            assert (await idem.read("order-1")).condition is Condition.SUCCEEDED
            await block(idem, "order-2")

    asyncio.run(scenario())


def test_a_store_that_does_not_answer_refuses_nobody(shop, asked):
    """A block needs the user's connection only; the store is asked in passing, and once."""
    nowhere = shop.store_url.replace(f":{shop.connection.info.port}/", f":{free_port()}/")
    with Idempotency(nowhere, caller="shop") as idem:
        for number in range(2):
            with (
                psycopg.connect(shop.server_url) as connection,
                idem.atomic(connection, f"order-{number}") as run,
            ):
                run.complete(number)
    assert shop.states() == [2, 2]
    assert asked == []


def test_a_database_of_the_same_name_on_another_server_is_refused(shop, idem, postgres_15):
    """Names repeat from server to server, the identifiers of servers do not."""
    with (
        psycopg.connect(postgres_15.url()) as connection,
        pytest.raises(InvalidInput, match="'postgres' of another server"),
        idem.atomic(connection, "order-1"),
    ):
        raise AssertionError("not reached")


def test_without_the_right_to_ask_for_the_server_the_name_decides(shop, idem, elsewhere):
    """A role from which the right was taken works as before, and goes astray no more."""
    asking = "EXECUTE ON FUNCTION pg_catalog.pg_control_system()"
    role = f"plain_{uuid.uuid4().hex[:8]}"
    shop.connection.execute(f"CREATE ROLE {role} LOGIN")
    try:
        shop.connection.execute(f"REVOKE {asking} FROM PUBLIC")
        shop.connection.execute(f"GRANT USAGE ON SCHEMA {shop.schema} TO {role}")
        shop.connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {shop.schema} TO {role}")
        own_url = shop.server_url.replace("retrysafe@", f"{role}@")
        with psycopg.connect(own_url) as connection, idem.atomic(connection, "order-1") as run:
            run.complete(1)
        assert idem.read("order-1").condition is Condition.SUCCEEDED
        with (
            psycopg.connect(elsewhere.replace("retrysafe@", f"{role}@")) as connection,
            pytest.raises(InvalidInput, match=REFUSED),
            idem.atomic(connection, "order-2"),
        ):
            raise AssertionError("not reached")
    finally:
        shop.connection.execute(f"GRANT {asking} TO PUBLIC")
        shop.connection.execute(f"DROP OWNED BY {role}")
        shop.connection.execute(f"DROP ROLE {role}")

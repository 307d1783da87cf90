"""Failover seen from one connection: which server it leads to, and what happens when that changes.

Attacked with standbys, silent and closed hosts, read-only sessions, and a pooler that tells old
news of its server. What must hold: only a server that takes writes is used, one failure is enough
to give up all connections to a server without, and users are told what to do with theirs.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time

import asyncpg
import psycopg
import pytest

from retrysafe import AsyncIdempotency, Idempotency, StoreUnavailable, current_attempt
from retrysafe.core.model import Decision, SettleKind, Settlement
from retrysafe.core.ports import Fate
from retrysafe.demo.ledger import PostgresLedger
from retrysafe.errors import StoreNotWritable, StoreUrlInvalid
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from retrysafe.stores.postgres.drivers import psycopg as psycopg_connector
from retrysafe.stores.postgres.urls import postgres_url
from retrysafe.testing.suite.probe import KEY, RESULT, request
from tests.attacks.conftest import beside
from tests.attacks.failover_load import CALLER
from tests.servers.replication import MovingAddress

TOKEN = b"a token of a try"
DRIVERS = pytest.mark.parametrize("is_async", [False, True], ids=["psycopg", "asyncpg"])


@DRIVERS
def test_a_connection_to_a_standby_is_refused_when_it_is_opened(standby, driven, is_async):
    """Before anything is asked of it: what a standby would answer to a read may be old."""
    found = driven(standby.url(), is_async=is_async)
    with pytest.raises(StoreNotWritable, match="takes no writes"):
        found(found.connector.fetch("SELECT 1"))


@DRIVERS
@pytest.mark.parametrize("prepared", ["on", "off"])
def test_connections_that_became_read_only_are_discarded_together(
    primary, driven, is_async, prepared
):
    """One failure is enough for all that lead to the same server; those opened since are kept."""
    found = driven(f"{primary.url()}?prepared={prepared}", is_async=is_async)
    connector = found.connector

    async def in_three(work):
        """What it gives for three connections; each is open while the next one is made."""

        async def opened(session, *others):
            if len(others) == 2:
                return [await work(item) for item in (session, *others)]
            more = connector.transact(lambda following: opened(following, session, *others))
            return await beside(connector, more)

        return await connector.transact(opened)

    async def demote(session):
        await session.script("SET default_transaction_read_only = on")

    look = "SELECT current_setting('transaction_read_only'), pg_backend_pid()"
    found(in_three(demote))
    with pytest.raises(StoreNotWritable):
        found(connector.fetch("CREATE TABLE never (id int)"))

    async def state(session):
        return (await session.fetch(look))[0]

    ((is_read_only, kept_pid),) = found(connector.fetch(look))
    assert is_read_only == "off"
    states, pids = zip(*found(in_three(state)), strict=True)
    assert set(states) == {"off"}
    assert kept_pid in pids


@DRIVERS
def test_a_write_that_was_refused_is_done_on_a_new_connection(schema_url, driven, is_async):
    """Nothing had happened, so it is done at once, without anybody hearing of it."""
    found = driven(schema_url, is_async=is_async)

    read_only = "SET default_transaction_read_only = on"
    found(found.connector.transact(lambda session: session.script(read_only)))
    ((answer,), _) = found(found.store.commit([request()], []))
    assert answer.decision is Decision.ADMIT


@DRIVERS
@pytest.mark.parametrize("wanted", ["read-write", "primary", "any"])
def test_the_urls_own_wish_for_a_server_is_kept(standby, driven, is_async, wanted):
    """With any of them a standby is refused as such, and not as a server that does not answer."""
    found = driven(f"{standby.url()}?target_session_attrs={wanted}", is_async=is_async)
    with pytest.raises(StoreNotWritable, match="takes no writes"):
        found(found.connector.fetch("SELECT 1"))


@pytest.mark.parametrize("wanted", ["read-only", "standby", "prefer-standby", "replica"])
def test_a_url_that_wants_a_server_without_writes_is_refused(wanted):
    """At once and in words, instead of with every claim."""
    with pytest.raises(StoreUrlInvalid, match="target_session_attrs"):
        open_store(f"postgresql://app@db/payments?target_session_attrs={wanted}")


@DRIVERS
def test_several_hosts_are_tried_until_one_takes_writes(
    primary, standby, silent_port, driven, is_async
):
    """A silent host, a refused connection and a standby cost their share of the time once; an IPv6
    address may stand anywhere in the list."""
    with MovingAddress(primary.port, "::1") as behind_ipv6, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hosts = (
            f"127.0.0.1:{silent_port},127.0.0.1:{closed.getsockname()[1]},"
            f"127.0.0.1:{standby.port},[::1]:{behind_ipv6.port}"
        )
        url = f"postgresql://retrysafe@{hosts}/postgres?connect_timeout=8"
        found = driven(url, is_async=is_async)
        ask = "SELECT current_setting('port')::int"
        started = time.monotonic()
        assert found(found.connector.fetch(ask))[0][0] == primary.port
        first_seconds = time.monotonic() - started
        found(found.connector.close())
        started = time.monotonic()
        assert found(found.connector.fetch(ask))[0][0] == primary.port
        # A quarter of the limit was given to the silent host, and none of it the second time.
        assert time.monotonic() - started < 1.5 < first_seconds < 6


@DRIVERS
def test_hosts_without_a_primary_are_told_as_such(standby, silent_port, driven, is_async):
    """A standby among them says more than the silence of the others, which lasts until the end of
    the time that a caller waits."""
    hosts = f"127.0.0.1:{standby.port},127.0.0.1:{silent_port}"
    url = f"postgresql://retrysafe@{hosts}/postgres?connect_timeout=1"
    found = driven(url, is_async=is_async)
    with pytest.raises(StoreNotWritable, match="takes no writes"):
        found(found.connector.fetch("SELECT 1"))


@DRIVERS
def test_a_pooler_that_tells_old_news_is_not_believed(
    pgbouncer_on, url, primary, standby, address, driven, is_async
):
    """PgBouncer goes on announcing that its first server was a standby; and under connections that
    stay, its servers change. The server itself is asked, each time that it matters."""
    standby.wait_until_caught_up()
    address.move(standby.port, cut=True)
    pooled = url.replace(f":{address.port}/", f":{pgbouncer_on(address.port).port}/")
    found = driven(f"{pooled}&prepared=off", is_async=is_async)
    for _ in range(2):
        with pytest.raises(StoreNotWritable):
            found(found.connector.fetch("SELECT 1"))
        address.move(primary.port, cut=True)
        ask_until_answered(found)
        address.move(standby.port, cut=True)
        with pytest.raises(StoreUnavailable):
            found(found.store.commit([request()], []))
    address.move(primary.port, cut=True)
    ask_until_answered(found)


def ask_until_answered(found):
    """As the engine does: the pooler may have to find out first that its connections ended."""
    for tries_left in range(9, -1, -1):
        try:
            ((answer,), _) = found(found.store.commit([request(token=TOKEN)], []))
            break
        except StoreUnavailable:
            if not tries_left:
                raise
            time.sleep(0.05)
    assert answer.decision in (Decision.ADMIT, Decision.CONFIRM)


def test_a_users_connection_to_a_standby_is_told_what_it_is(schema_url, standby, primary):
    """In atomic mode the pool is the user's, so the words say what to do with the connection; the
    operation does not run."""
    standby.wait_until_caught_up()
    words = "close this connection instead of giving it back to its pool"
    with (
        Idempotency(schema_url, caller=CALLER) as idem,
        psycopg.connect(standby.url()) as connection,
        pytest.raises(StoreNotWritable, match=words),
        idem.atomic(connection, "k", request=None),
    ):
        pytest.fail("the block was entered")

    async def in_loop():
        async with AsyncIdempotency(schema_url, caller=CALLER) as idem:
            connection = await asyncpg.connect(standby.url())
            try:
                async with connection.transaction():
                    with pytest.raises(StoreNotWritable, match=words):
                        async with idem.atomic(connection, "k", request=None):
                            pytest.fail("the block was entered")
            finally:
                await connection.close()

    asyncio.run(in_loop())


def test_an_outcome_joined_on_a_standby_is_told_what_it_is(schema_url, standby):
    """The leased operation is released with that error, and runs when it is called again."""
    standby.wait_until_caught_up()
    ran = []

    def operation(attempt, target):
        ran.append(attempt.number)
        with psycopg.connect(target) as connection:
            attempt.complete_in(connection, "done")

    with Idempotency(schema_url, caller=CALLER) as idem:
        asked = {"request": None, "name": "joined"}
        with pytest.raises(StoreNotWritable, match="takes no writes"):
            idem.run("k", lambda: operation(current_attempt(), standby.url()), **asked)
        plain = schema_url.partition("?")[0]
        idem.run("k", lambda: operation(current_attempt(), plain), **asked)
    assert ran == [1, 2]


def test_a_standby_is_not_asked_what_became_of_a_transaction(
    schema_url, standby, driven, monkeypatch
):
    """Behind a pooler the store's own connection may lead to one by then, and it does not know yet:
    taken for its word, an outcome that stands would be told as undone."""
    monkeypatch.setattr(psycopg_connector, "require_writable", lambda status, location: None)
    standby.wait_until_caught_up()
    owner = driven(schema_url, is_async=False)
    asked = driven(
        schema_url.replace(f":{standby.primary.port}/", f":{standby.port}/"), is_async=False
    )
    owner(owner.store.commit([request(token=TOKEN)], []))
    settlement = Settlement(SettleKind.COMPLETE, KEY, TOKEN, RESULT, 1000, 1000)
    with (
        psycopg.connect(standby.url(), autocommit=True) as behind,
        psycopg.connect(standby.primary.url()) as connection,
    ):
        behind.execute("SELECT pg_wal_replay_pause()")
        try:
            joined = asked.store.join(connection)
            assert run_sync(joined.settle(settlement)) is Decision.APPLY
            connection.commit()
            with pytest.raises(StoreNotWritable):
                run_sync(joined.fate(settlement))
        finally:
            behind.execute("SELECT pg_wal_replay_resume()")
        standby.wait_until_caught_up()
        assert run_sync(joined.fate(settlement)) is Fate.STANDS


@DRIVERS
def test_doctor_tells_a_standby_and_a_failover_that_would_forget(
    schema_url, standby, driven, is_async
):
    """Before anybody fails over: what the URL leads to, and whether a standby knows all claims."""
    for options in ("?prepared=on", "?prepared=off"):
        (found,) = diagnosed(driven, f"{standby.url()}{options}", is_async=is_async)
        assert found.is_problem
        assert "takes no writes" in found.text
        assert "let the URL lead to the primary" in found.text
    assert told_of_replication(diagnosed(driven, schema_url, is_async=is_async)) == [
        "synchronous_standby_names is empty"
    ]
    local = f"{schema_url}&options=-c%20synchronous_commit%3Dlocal"
    with psycopg.connect(standby.primary.url(), autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standby.name}'")
        try:
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SHOW synchronous_standby_names").fetchone() == ("",):
                time.sleep(0.01)
            assert told_of_replication(diagnosed(driven, schema_url, is_async=is_async)) == []
            assert told_of_replication(diagnosed(driven, local, is_async=is_async)) == [
                "synchronous_commit is local"
            ]
        finally:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")


def diagnosed(driven, url, *, is_async):
    found = driven(url, is_async=is_async)
    return found(found.store.diagnose())


def told_of_replication(findings):
    texts = [item.text for item in findings if "A standby follows" in item.text]
    return [re.findall(r"\(([^)]*)\)", text)[0] for text in texts]


@DRIVERS
def test_renewals_use_no_connection_to_a_server_without_writes(primary, driven, is_async):
    """Their own way to the store gives up a connection at the first refusal."""
    found = driven(primary.url(), is_async=is_async)
    renew = found.connector.fetch_renewal
    found(renew(5.0, "SELECT set_config('default_transaction_read_only', 'on', false)"))
    with pytest.raises(StoreNotWritable):
        found(renew(5.0, "CREATE TABLE never (id int)"))
    assert found(renew(5.0, "SHOW transaction_read_only"))[0][0] == "off"


@DRIVERS
def test_renewals_open_no_connection_to_a_standby(standby, driven, is_async):
    """A renewal that a standby seems to answer would let the lease run out."""
    found = driven(standby.url(), is_async=is_async)
    with pytest.raises(StoreNotWritable):
        found(found.connector.fetch_renewal(5.0, "SELECT 1"))


def test_the_demos_own_pool_outlives_a_failover(url, primary, standby, address):
    """It does what users are told to do with theirs."""
    standby.wait_until_caught_up()

    async def write(ledger):
        async with ledger.transaction() as connection:
            await connection.execute("CREATE TABLE never (id int)")
            raise LookupError

    async def main():
        ledger = PostgresLedger(postgres_url(url))
        async with ledger.opened():
            # The connection that created the table is cut below; this is about a new one.
            await ledger._pool.expire_connections()
            address.move(standby.port, cut=True)
            with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
                await write(ledger)
            address.move(primary.port, cut=False)
            with pytest.raises(LookupError):
                await write(ledger)

    asyncio.run(main())

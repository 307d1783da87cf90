"""Failover: the address of the store leads to a server that takes no writes, and back, or on.

Attacked with a primary and a streaming standby behind an address that moves: connections that end
and connections that stay, servers that are demoted in place, servers that are gone, poolers that
tell old news. What must hold: no process has to be started anew, no connection to a server without
writes is kept, no operation runs twice, and no outcome is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from datetime import timedelta

import psycopg
import pytest

from retrysafe import AsyncIdempotency, Idempotency, Policy, StoreUnavailable
from retrysafe.core.model import Decision, SettleKind, Settlement
from retrysafe.testing.suite.probe import RESULT, key_of, request
from tests.attacks.failover_load import CALLER, LIMIT_SECONDS, Load
from tests.servers.fixtures import migrated
from tests.servers.postgres import PostgresServer
from tests.servers.replication import MovingAddress, StandbyServer

DRIVERS = pytest.mark.parametrize("is_async", [False, True], ids=["psycopg", "asyncpg"])
# So long was the attack by which outcomes were lost.
READ_ONLY_SECONDS = 0.6


def test_a_switch_to_a_standby_and_back_needs_no_restart(
    url, schema_url, standby, primary, address
):
    """Under load with both drivers, nobody hears of a switch that is over in 0.6 s; the
    connections to the standby stay open, and are not used."""
    with Load(url) as load:
        load.wait_for(20)
        address.move(standby.port, cut=True)
        time.sleep(READ_ONLY_SECONDS)
        address.move(primary.port, cut=False)
        load.wait_for(50)
    assert standby.port in address.connections
    assert load.errors == []
    assert not load.has_replayed_wrongly
    assert set(load.runs_per_key.values()) == {1}
    assert load.lost(schema_url) == []


@DRIVERS
def test_a_server_that_is_demoted_in_place_is_waited_for(primary, schema_url, is_async):
    """Its connections stay open: claims wait a little, settlements as long as they must."""
    started, demoted = threading.Event(), threading.Event()
    ran = []

    def operation():
        ran.append(1)
        started.set()
        assert demoted.wait(LIMIT_SECONDS)
        return "done"

    async def awaited():
        return await asyncio.to_thread(operation)

    async def loop():
        async with AsyncIdempotency(schema_url, caller=CALLER, cache=False) as idem:
            first = asyncio.create_task(idem.run("first", awaited, request=None))
            await asyncio.to_thread(demoted.wait)
            second = await idem.run("second", lambda: asyncio.sleep(0, 2), request=None)
            return await first, second

    def threads():
        with Idempotency(schema_url, caller=CALLER, cache=False) as idem:
            answers = []
            first = threading.Thread(
                target=lambda: answers.append(idem.run("first", operation, request=None))
            )
            first.start()
            demoted.wait()
            second = idem.run("second", lambda: 2, request=None)
            first.join()
            return answers[0], second

    found = []
    user = threading.Thread(
        target=lambda: found.append(asyncio.run(loop()) if is_async else threads())
    )
    user.start()
    assert started.wait(LIMIT_SECONDS)
    with psycopg.connect(primary.url(), autocommit=True) as connection:
        try:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SHOW default_transaction_read_only").fetchone() != ("on",):
                time.sleep(0.01)
            demoted.set()
            time.sleep(READ_ONLY_SECONDS)
        finally:
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")
    user.join(LIMIT_SECONDS)
    assert found == [("done", 2)]
    assert ran == [1]


def test_a_healthy_owner_keeps_its_lease_over_a_switch(url, standby, primary, address):
    """Renewals look for a server that takes writes just as claims do, with both drivers."""
    policy = Policy(lease=timedelta(seconds=2))
    started = [threading.Event(), threading.Event()]
    over = threading.Event()
    ran = []

    def operation(number):
        ran.append(number)
        started[number].set()
        assert over.wait(LIMIT_SECONDS)
        return number

    async def in_loop():
        async with AsyncIdempotency(url, caller=CALLER, policy=policy) as idem:
            return await idem.run("loop", lambda: asyncio.to_thread(operation, 1), request=None)

    def in_thread():
        with Idempotency(url, caller=CALLER, policy=policy) as idem:
            return idem.run("thread", operation, 0, request=None)

    found = []
    users = [
        threading.Thread(target=lambda: found.append(in_thread())),
        threading.Thread(target=lambda: found.append(asyncio.run(in_loop()))),
    ]
    for user in users:
        user.start()
    for event in started:
        assert event.wait(LIMIT_SECONDS)
    address.move(standby.port, cut=True)
    time.sleep(1.0)
    address.move(primary.port, cut=False)
    time.sleep(1.5)
    over.set()
    for user in users:
        user.join(LIMIT_SECONDS)
    assert sorted(found) == sorted(ran) == [0, 1]


def test_nothing_is_lost_when_the_standby_takes_over_for_good():
    """The primary is killed under load and its synchronous standby promoted: every outcome that
    was answered is there, and no operation ran twice."""
    settings = {"fsync": "off", "synchronous_commit": "on"}
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(PostgresServer(settings=settings))
        new = stack.enter_context(StandbyServer(old, settings))
        new.wait_until_streaming()
        with psycopg.connect(old.url(), autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{new.name}'")
            connection.execute("SELECT pg_reload_conf()")
        address = stack.enter_context(MovingAddress(old.port))
        url = migrated(old.url(port=address.port))
        with Load(url) as load:
            load.wait_for(30)
            old.kill()
            new.promote()
            address.move(new.port, cut=True)
            load.wait_for(50)
        for key, error in load.errors:
            # Those whose claim came in the gap: nothing ran for them.
            assert isinstance(error, StoreUnavailable), error
            assert load.runs_per_key[key] <= 1
        assert not load.has_replayed_wrongly
        assert set(load.runs_per_key.values()) == {1}
        assert load.lost(new.url()) == []


@pytest.mark.long
def test_many_switches_under_load_run_nothing_twice(url, schema_url, standby, primary, address):
    """Cut and uncut, short and long, to the standby and back: the figures of a whole run."""
    gaps = []
    with Load(url) as load:
        for number in range(20):
            load.wait_for(50)
            address.move(standby.port, cut=number % 2 == 0)
            time.sleep(READ_ONLY_SECONDS if number % 5 else 1.5)
            address.move(primary.port, cut=number % 3 == 0)
            gaps.append(load.wait_for(50))
    print(f"{len(load.answered)} answered, longest gap after a switch {max(gaps):.2f} s")
    assert load.errors == []
    assert not load.has_replayed_wrongly
    assert set(load.runs_per_key.values()) == {1}
    assert load.lost(schema_url) == []


@pytest.mark.parametrize(("is_async", "together"), [(False, 1), (True, 3)])
def test_a_commit_that_gave_up_on_its_standby_is_not_taken_for_granted(
    primary, schema_url, driven, is_async, together
):
    """No synchronous standby answers, so a commit waits; a cancelled statement or a restart ends
    the wait and leaves the row on this server alone. Neither its claim nor its outcome may be
    believed before a standby has it: a failover would forget it, and it would run again."""
    found = driven(schema_url, is_async=is_async, commit_timeout=timedelta(seconds=0.3))
    keys = [key_of(f"k{number}") for number in range(together)]
    claims = [request(key, f"token {number:>10}".encode()) for number, key in enumerate(keys)]
    endings = [
        Settlement(SettleKind.COMPLETE, item.key, item.token, RESULT, 60_000, 60_000)
        for item in claims
    ]
    with psycopg.connect(primary.url(), autocommit=True) as connection:
        for batch in ((claims, []), ([], endings)):
            try:
                set_standby_names(connection, "nobody")
                with pytest.raises(StoreUnavailable):
                    found(found.store.commit(*batch))
                end_waiting_commits(connection)
                with pytest.raises(StoreUnavailable):
                    found(found.store.commit(*batch))
                end_waiting_commits(connection)
            finally:
                set_standby_names(connection, "")
            answers = found(found.store.commit(*batch))
            assert {item.decision for item in [*answers[0], *answers[1]]} == {Decision.CONFIRM}


def set_standby_names(connection, names):
    """Has commits wait for a standby, or for none; returns when the server does so."""
    connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    connection.execute("SELECT pg_reload_conf()")
    until = time.monotonic() + LIMIT_SECONDS
    # The server's checkpointer makes it known to the others, at some time after the reload.
    while does_commit_wait(connection) != bool(names):
        assert time.monotonic() < until


def does_commit_wait(connection):
    """Whether a commit waits for a standby now."""

    def write():
        with (
            contextlib.suppress(psycopg.OperationalError),
            psycopg.connect(dsn, autocommit=True, application_name="probe") as other,
        ):
            other.execute("SELECT pg_logical_emit_message(true, 'probe', '')")

    dsn = connection.info.dsn
    writer = threading.Thread(target=write)
    writer.start()
    find = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE application_name = 'probe' AND wait_event = 'SyncRep'"
    )
    does_wait = False
    while writer.is_alive() and not does_wait:
        does_wait = connection.execute(find).fetchone() is not None
        writer.join(0.01)
    writer.join(LIMIT_SECONDS)
    return does_wait


def end_waiting_commits(connection):
    """As a restart does: the transactions stand, and nobody knows whether a standby has them."""
    sql = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE application_name = 'retrysafe' AND wait_event = 'SyncRep'"
    )
    connection.execute(sql)

"""`diagnose` and `retrysafe doctor` against servers that are really set wrong."""

from __future__ import annotations

import asyncio
import contextlib
import re

import psycopg
import pytest
from typer.testing import CliRunner

from retrysafe.cli.app import app
from retrysafe.cli.problems import ExitCode
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.errors import StoreError
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import diagnosis
from retrysafe.stores.postgres import schema as postgres_schema
from tests.servers.fixtures import migrated
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer

# What `doctor` advises: a server as it comes never gives up a host that died.
SOUND = {
    "idle_in_transaction_session_timeout": "1min",
    "client_connection_check_interval": "10s",
}


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    """Without one, there would be a note about that, too."""
    monkeypatch.setenv("RETRYSAFE_SECRET", "at least sixteen bytes")


@pytest.fixture(scope="module")
def sound_server():
    """A server as it comes, where everything that durability needs is on, with these settings."""
    server = PostgresServer(settings=SOUND)
    try:
        yield server.start()
    finally:
        server.remove()


@pytest.fixture
def sound_url(sound_server):
    url = migrated(f"{sound_server.url()}?schema=doctor")
    yield url
    with psycopg.connect(sound_server.url(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA doctor CASCADE")


def diagnosed(url: str, *, is_async: bool = False) -> list[str]:
    store = postgres_store(url, is_async=is_async)

    async def look():
        try:
            return await store.diagnose()
        finally:
            await store.close()

    found = asyncio.run(look()) if is_async else run_sync(look())
    return [item.text for item in found]


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
        connection.execute(statement)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_sound_server_has_no_findings(sound_url, is_async):
    assert diagnosed(sound_url, is_async=is_async) == []


def test_a_server_without_fsync_is_found(postgres_url):
    """The server of the other tests is set so, for speed."""
    found, *_ = diagnosed(migrated(postgres_url))
    assert found.startswith("fsync is off")


def test_asynchronous_commits_are_found(sound_url):
    """The setting is often made for one user or database; it is looked up where it counts."""
    execute(sound_url, "ALTER DATABASE postgres SET synchronous_commit = off")
    try:
        (found,) = diagnosed(sound_url)
    finally:
        execute(sound_url, "ALTER DATABASE postgres RESET synchronous_commit")
    assert found.startswith("synchronous_commit is off")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [("full_page_writes", "full_page_writes is off"), ("autovacuum", "autovacuum is off:")],
)
def test_settings_of_the_whole_server_are_found(sound_url, setting, sentence):
    execute(sound_url, f"ALTER SYSTEM SET {setting} = off")
    execute(sound_url, "SELECT pg_reload_conf()")
    try:
        found = _eventually(sound_url, sentence)
    finally:
        execute(sound_url, f"ALTER SYSTEM RESET {setting}")
        execute(sound_url, "SELECT pg_reload_conf()")
    assert len(found) == 1


def _eventually(url: str, sentence: str) -> list[str]:
    """The server takes a changed setting over a moment after it was told."""
    for _ in range(500):
        found = diagnosed(url)
        if any(text.startswith(sentence) for text in found):
            return found
    raise AssertionError(f"never found: {sentence}")


def test_an_unlogged_table_is_found(sound_url):
    execute(sound_url, "ALTER TABLE doctor.keys SET UNLOGGED")
    (found,) = diagnosed(sound_url)
    assert found.startswith("The table doctor.keys is unlogged")


def test_a_table_that_is_never_vacuumed_is_found(sound_url):
    execute(sound_url, "ALTER TABLE doctor.keys SET (autovacuum_enabled = off)")
    (found,) = diagnosed(sound_url)
    assert found.startswith("autovacuum is off for the table doctor.keys")


def test_no_migration_keeps_writers_out_of_a_large_table(sound_server):
    """Leases that cannot be renewed for that long run out; doctor says how to go on."""
    url, name = sound_server.url(), "grown"
    text = "repeat('x', 1500)"
    with psycopg.connect(url, autocommit=True) as connection:
        for version in range(1, 8):
            connection.execute(postgres_schema.migration_script(version, name))
        connection.execute(
            f"INSERT INTO {name}.keys SELECT decode(md5(n::text), 'hex'), '', n::text, '', 1, '',"
            f" 2, '', 1, n, n, n, n, n, n, {text} FROM generate_series(1, 18000) AS n"
        )
        connection.execute(
            f"INSERT INTO {name}.outbox (entry_key, topic, content_type, body, due_at_ms,"
            f" staged_at_ms, last_error) SELECT '', '', '', '', 1, 1, {text}"
            " FROM generate_series(1, 48000) AS n"
        )
        migrated(f"{url}?schema={name}")
        store = postgres_store(f"{url}?schema={name}", is_async=False)
        found = [item for item in run_sync(store.diagnose()) if "is missing" in item.text]
        run_sync(store.close())
        assert sorted(item.text.split()[2] for item in found) == ["keys_claimed", "outbox_dead"]
        for item in found:
            for statement in item.mend.split("; "):
                connection.execute(statement)
        connection.execute("DROP SCHEMA IF EXISTS fresh CASCADE")
        migrated(f"{url}?schema=fresh")
        same = "SELECT replace(indexdef, schemaname, '') FROM pg_indexes WHERE schemaname = %s"
        built = [sorted(connection.execute(same, (each,)).fetchall()) for each in (name, "fresh")]
        assert built[0] == built[1]
        for each in (name, "fresh"):
            connection.execute(f"DROP SCHEMA {each} CASCADE")


def test_a_missing_schema_is_found(sound_server):
    (found,) = diagnosed(f"{sound_server.url()}?schema=nowhere")
    assert found == "The schema nowhere is missing or not up to date. Run retrysafe migrate."


def test_missing_partitions_are_found(sound_url):
    """Nobody has swept for a month: the days ahead are missing."""
    store = postgres_store(sound_url, is_async=False)
    names = [row[0] for row in run_sync(store._statements.fetch("list_partitions"))]
    run_sync(store.close())
    for name in names[-20:]:
        execute(sound_url, f"DROP TABLE doctor.{name}")
    (found,) = diagnosed(sound_url)
    assert f"the first is {names[-20]}" in found


def test_a_skewed_host_is_a_note(sound_url, monkeypatch):
    """Nothing is decided by the host's clock, so it is no problem."""
    monkeypatch.setattr(
        "retrysafe.stores.postgres.store.wall_clock_ms", lambda: wall_clock_ms() + 90_400
    )
    (found,) = diagnosed(sound_url)
    assert re.search(r"This host's clock is 90\.\d s ahead of the server's", found)
    outcome = CliRunner().invoke(app, ["doctor", "--store", sound_url])
    assert (outcome.exit_code, outcome.stdout.startswith("note: ")) == (0, True)


@pytest.mark.parametrize("is_async", [False, True])
def test_prepared_statements_behind_pgbouncer_are_found(
    pgbouncer, postgres_server, postgres_url, is_async
):
    """Found by the process id that the pooler made up, before any statement has failed."""
    migrated(postgres_url)
    url = postgres_url.replace(f":{postgres_server.port}/", f":{pgbouncer.port}/")
    assert diagnosed(url, is_async=is_async) == [diagnosis.POOLER.text]
    found, *_ = diagnosed(f"{url}&prepared=off", is_async=is_async)
    assert found.startswith("fsync is off")


def test_an_old_server_is_found():
    """Judged by the number that the server gives; the tests run from 15 up."""
    (found,) = diagnosis.settings_findings((140_022, "on", "on", "on", "on"))
    assert found.text.startswith("PostgreSQL 14 is too old")
    assert diagnosis.settings_findings((150_000, "on", "on", "on", "on")) == []


def test_what_ends_the_transaction_of_a_dead_host_is_a_note(sound_url):
    """Judged as a session has it; nothing is wrong with a server as it comes, but keys that such a
    transaction holds wait for hours, and the note says what to set."""
    names = [*SOUND, "tcp_user_timeout"]
    for name in names:
        execute(sound_url, f"ALTER DATABASE postgres SET {name} = 0")
    try:
        outcome = CliRunner().invoke(app, ["doctor", "--store", sound_url])
    finally:
        for name in names:
            execute(sound_url, f"ALTER DATABASE postgres RESET {name}")
    assert outcome.exit_code == 0
    dead, gone = outcome.stdout.replace("\n", " ").split("note: ")[1:]
    minutes = re.search(r"gives the connection up: after (\d+) minutes", dead)
    assert minutes is not None
    assert int(minutes[1]) >= 2
    assert "Set idle_in_transaction_session_timeout = '1min'" in dead
    assert gone.startswith("client_connection_check_interval is 0")


@pytest.mark.parametrize(
    ("idle_ms", "keepalives", "user_timeout_ms", "told"),
    [
        (0, (7200, 75, 9), 0, "after 131 minutes"),
        (0, (0, 0, 0), 0, "never"),
        (300_000, (7200, 75, 9), 0, "after 5 minutes"),
        (0, (60, 30, 9), 600_000, "after 10 minutes"),
        (60_000, (7200, 75, 9), 0, None),
        # An answer that is not acknowledged is sent again for a quarter of an hour.
        (0, (30, 10, 3), 0, "after 15 minutes"),
        (0, (30, 10, 9), 60_000, None),
        # Without keepalives nobody writes to a silent host, and nothing is to be acknowledged.
        (0, (0, 0, 0), 60_000, "never"),
    ],
)
def test_the_first_limit_that_ends_it_counts(idle_ms, keepalives, user_timeout_ms, told):
    """Keepalives alone do not help while an answer is on its way; a user timeout does."""
    idle, interval, count = keepalives
    found = diagnosis.dead_host_findings(
        {
            "idle_in_transaction_session_timeout": idle_ms,
            "tcp_keepalives_idle": idle,
            "tcp_keepalives_interval": interval,
            "tcp_keepalives_count": count,
            "tcp_user_timeout": user_timeout_ms,
            "client_connection_check_interval": 10_000,
        }
    )
    assert [f"gives the connection up: {told}." in item.text for item in found] == [True] * bool(
        told
    )


def test_doctor_exits_with_the_verdict(sound_url, sound_server):
    """A deployment reads the exit code, a person the sentences, a program the JSON."""

    def doctor(*args: str):
        return CliRunner().invoke(app, ["doctor", *args])

    fine = doctor("--store", sound_url)
    said = fine.stdout.splitlines()
    assert (fine.exit_code, said[0]) == (0, "nothing to complain about")
    assert said[1].startswith("checked: pooler mode, version and durability, ")
    ill = doctor("--store", f"{sound_server.url()}?schema=nowhere")
    assert ill.exit_code == ExitCode.REFUSED
    assert ill.stdout.startswith("problem: The schema nowhere is missing")
    as_json = doctor("--json", "--store", f"{sound_server.url()}?schema=nowhere")
    assert as_json.exit_code == ExitCode.REFUSED
    assert '"notes": []' in as_json.stdout
    nothing = doctor("--store", "memory://")
    assert nothing.exit_code == ExitCode.USAGE
    assert "lives in one process" in nothing.stderr


def used(url: str, *, is_async: bool) -> None:
    store = postgres_store(url, is_async=is_async)

    async def use() -> None:
        try:
            await store.read(Key("k", caller=GLOBAL))
        finally:
            await store.close()

    if is_async:
        asyncio.run(use())
    else:
        run_sync(use())


@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_use_warns_of_forgetful_settings(sound_url, caplog, is_async):
    """Whoever never runs doctor still hears that claims can be forgotten, once per store."""
    execute(sound_url, "ALTER DATABASE postgres SET synchronous_commit = off")
    try:
        used(sound_url, is_async=is_async)
    finally:
        execute(sound_url, "ALTER DATABASE postgres RESET synchronous_commit")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "synchronous_commit is off" in record.getMessage()


@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_use_of_a_sound_server_says_nothing(sound_url, caplog, is_async):
    used(sound_url, is_async=is_async)
    assert caplog.records == []


@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_use_behind_pgbouncer_warns_of_prepared_statements(
    pgbouncer, postgres_server, postgres_url, caplog, is_async
):
    """The statement that fails for it later does not say why."""
    migrated(postgres_url)
    # One of its own: what is prepared here stays prepared on its connections to the server.
    own = PgBouncer(pgbouncer.binary, postgres_server)
    try:
        url = postgres_url.replace(f":{postgres_server.port}/", f":{own.start().port}/")
        with contextlib.suppress(StoreError):
            used(url, is_async=is_async)
    finally:
        own.remove()
    assert any("prepared=off" in record.getMessage() for record in caplog.records)

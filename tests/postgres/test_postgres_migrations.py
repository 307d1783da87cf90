"""Migrations on PostgreSQL: once, in order, all or nothing, and the same by every way."""

from __future__ import annotations

import re
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from retrysafe import Idempotency, InvalidInput
from retrysafe.core.model import Decision, Step, StepWrite
from retrysafe.errors import SchemaChanged, SchemaMissing, SchemaTooNew
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import schema
from retrysafe.testing.suite.probe import KEY, RESULT, request
from tests.docs.documents import ROOT, blocks
from tests.postgres.conftest import wait_for_a_waiter
from tests.servers.postgres import beyond_fsync

STARTERS = 10
LIMIT_SECONDS = 60
NEXT = len(schema.MIGRATIONS) + 1

# Started, it says so and waits for a line: all of them then go for the fresh schema together.
STARTER = """
import sys
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(len(run_sync(store.migrate())))
run_sync(store.close())
"""

# Stops between the last statement and the commit, and waits there to be killed.
HALF_WAY = """
import asyncio, sys
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from retrysafe.stores.postgres import schema
locked = schema._migrate_locked
async def half_way(session, name):
    missing = await locked(session, name)
    print("half way", len(missing), flush=True)
    sys.stdin.readline()
schema._migrate_locked = half_way
run_sync(open_store(sys.argv[1]).migrate())
"""


def name_in(url):
    return parse_qs(urlsplit(url).query)["schema"][0]


def start(code, url):
    return subprocess.Popen(
        [sys.executable, "-c", code, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def store(postgres_url):
    made = postgres_store(postgres_url, is_async=False)
    yield made
    run_sync(made.close())


@pytest.fixture
def noted(connection, postgres_url):
    """What the schema remembers."""

    def read():
        return connection.execute(
            "SELECT version, name, checksum, oldest_schema "
            f"FROM {name_in(postgres_url)}.schema_versions ORDER BY version"
        ).fetchall()

    return read


@pytest.fixture
def dump(postgres_server):
    """The schema as pg_dump writes it, with its name left out."""

    def run(url):
        name = name_in(url)
        done = subprocess.run(
            [
                postgres_server.binaries / "pg_dump",
                *("--schema-only", "--schema", name, "--dbname", postgres_server.url()),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        text = re.sub(r"^\\(un)?restrict .*\n", "", done.stdout, flags=re.MULTILINE)
        assert "CREATE TABLE" in text
        return text.replace(name, "the_schema")

    return run


def known():
    return [(m.version, m.name, m.checksum, m.oldest_schema) for m in schema.MIGRATIONS]


def claimed(store):
    ((answer,), _) = run_sync(store.commit([request()], []))
    return answer.decision


# Once.


def test_migrating_twice_changes_nothing(store, noted):
    """The first run applies all in order, the second nothing."""
    assert [m.version for m in run_sync(store.pending_migrations())] == list(range(1, NEXT))
    assert [m.version for m in run_sync(store.migrate())] == list(range(1, NEXT))
    assert noted() == known()
    assert run_sync(store.migrate()) == []
    assert run_sync(store.pending_migrations()) == []


def test_ten_processes_that_start_at_once_migrate_once(postgres_url, noted):
    """Each migration is applied by one of them; the others wait and find nothing to do."""
    started = [start(STARTER, postgres_url) for _ in range(STARTERS)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=LIMIT_SECONDS) for process in started]
    assert [errors for _, errors in results if beyond_fsync(errors)] == []
    applied = sorted(int(text) for text, _ in results)
    assert applied == [0] * (STARTERS - 1) + [NEXT - 1]
    assert noted() == known()


def test_a_process_that_dies_half_way_leaves_nothing(postgres_url, store, connection):
    """Killed after its last statement: no schema is there, and the next one is not blocked."""
    process = start(HALF_WAY, postgres_url)
    assert process.stdout.readline() == f"half way {NEXT - 1}\n"
    process.kill()
    process.communicate(timeout=LIMIT_SECONDS)
    assert len(run_sync(store.migrate())) == NEXT - 1
    assert claimed(store) is Decision.ADMIT


def test_a_failing_migration_leaves_nothing(store, connection, postgres_url, monkeypatch):
    """A later statement that fails takes the earlier ones back."""
    name = name_in(postgres_url)
    plain = schema._migration_sql
    monkeypatch.setattr(
        schema, "_migration_sql", lambda *args: plain(*args) + ";\nSELECT no_such_function();"
    )
    with pytest.raises(Exception, match="no_such_function"):
        run_sync(store.migrate())
    found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,))
    assert found.fetchall() == []


def test_a_snapshot_taken_before_the_lock_is_not_believed(postgres_url, store, connection):
    """Also where the database's default isolation is stricter than READ COMMITTED."""
    strict = f"{postgres_url}&options=-c%20default_transaction_isolation%3Dserializable"
    with psycopg.connect(postgres_url.partition("?")[0]) as rival:
        rival.execute(schema.LOCK_SQL)
        process = start(STARTER, strict)
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        wait_for_a_waiter(connection)
        rival.execute(schema.migration_script(1, name_in(postgres_url)))
        rival.commit()
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert (out, beyond_fsync(errors)) == (f"{NEXT - 2}\n", "")


# The same by every way.


def test_the_printed_sql_gives_the_identical_schema(store, postgres_url, connection, dump):
    """Whoever runs the SQL by hand ends where `migrate` does, partitions included."""
    by_hand = f"{name_in(postgres_url)}_by_hand"
    printed = schema.script(by_hand)
    run_sync(store.migrate())
    try:
        connection.execute(printed)
        url = postgres_url.replace(name_in(postgres_url), by_hand)
        assert dump(url) == dump(postgres_url)
        assert run_sync(_checked(url)) == []
    finally:
        connection.execute(f"DROP SCHEMA IF EXISTS {by_hand} CASCADE")


def test_the_schema_is_the_sum_of_its_migrations(store, postgres_url, connection, dump):
    """Applied one by one in transactions of their own, they give what `migrate` gives."""
    one_by_one = f"{name_in(postgres_url)}_steps"
    run_sync(store.migrate())
    try:
        for version in range(1, NEXT):
            with connection.transaction():
                connection.execute(schema.migration_script(version, one_by_one))
        url = postgres_url.replace(name_in(postgres_url), one_by_one)
        assert dump(url) == dump(postgres_url)
    finally:
        connection.execute(f"DROP SCHEMA IF EXISTS {one_by_one} CASCADE")


async def _checked(url):
    made = postgres_store(url, is_async=False)
    try:
        return await made.pending_migrations()
    finally:
        await made.close()


def test_two_schemas_of_one_database_do_not_meet(store, postgres_url, connection):
    """Several applications share a database, each with keys of its own."""
    other = f"{name_in(postgres_url)}_other"
    try:
        run_sync(store.migrate())
        second = postgres_store(postgres_url.replace(name_in(postgres_url), other), is_async=False)
        run_sync(second.migrate())
        assert claimed(store) is Decision.ADMIT
        assert claimed(second) is Decision.ADMIT
        assert claimed(store) is Decision.IN_FLIGHT
        run_sync(second.close())
    finally:
        connection.execute(f"DROP SCHEMA IF EXISTS {other} CASCADE")


def test_a_schema_name_that_is_no_name_is_refused():
    """It becomes part of statements, so only plain names are taken."""
    for bad in ("Upper", "a-b", "a;b", "", "1a", "a" * 49, "a\n"):
        with pytest.raises(InvalidInput):
            schema.migration_script(1, bad)


@pytest.mark.parametrize("version", [0, NEXT, -1])
def test_a_migration_that_does_not_exist_is_refused(version):
    with pytest.raises(InvalidInput, match="no migration"):
        schema.migration_script(version, "retrysafe")


# Releases beside each other.


def note_next(connection, url, oldest_schema):
    connection.execute(
        f"INSERT INTO {name_in(url)}.schema_versions (version, name, checksum, oldest_schema) "
        "VALUES (%s, 'of_a_later_release', 'f00d', %s)",
        (NEXT, oldest_schema),
    )


def test_this_release_works_on_a_newer_schema_that_says_so(store, postgres_url, connection):
    """A rolling deploy: the new release has migrated, the old one goes on, also when restarted."""
    run_sync(store.migrate())
    note_next(connection, postgres_url, NEXT - 1)
    assert claimed(store) is Decision.ADMIT
    assert run_sync(store.pending_migrations()) == []
    assert run_sync(store.migrate()) == []


def test_this_release_stops_at_a_schema_that_is_too_new(store, postgres_url, connection):
    """It would misread what it finds, so it does not even claim."""
    run_sync(store.migrate())
    note_next(connection, postgres_url, NEXT)
    fresh = postgres_store(postgres_url, is_async=False)
    try:
        with pytest.raises(SchemaTooNew):
            claimed(fresh)
        with pytest.raises(SchemaTooNew):
            run_sync(fresh.migrate())
    finally:
        run_sync(fresh.close())


def test_a_changed_migration_is_noticed(store, postgres_url, connection):
    """The files are append-only; a database that was made by others is not touched."""
    run_sync(store.migrate())
    connection.execute(f"UPDATE {name_in(postgres_url)}.schema_versions SET checksum = 'other'")
    # Looked at once per object: a claim must not pay for it each time.
    assert claimed(store) is Decision.ADMIT
    fresh = postgres_store(postgres_url, is_async=False)
    try:
        for use in (claimed, lambda item: run_sync(item.migrate())):
            with pytest.raises(SchemaChanged):
                use(fresh)
    finally:
        run_sync(fresh.close())


def test_without_a_schema_nothing_runs_and_the_message_says_what_to_do(store, postgres_url):
    """No process makes a schema by accident; once it is there, the same object works."""
    with pytest.raises(SchemaMissing, match=r"lacks 0001 initial, .*: run 'retrysafe migrate "):
        claimed(store)
    other = postgres_store(postgres_url, is_async=False)
    run_sync(other.migrate())
    run_sync(other.close())
    assert claimed(store) is Decision.ADMIT


# Rights.


@pytest.fixture
def role(connection, postgres_url):
    name = f"{name_in(postgres_url)}_role"
    connection.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def documented_grants(schema_name, role):
    """The statements in the guide, for this schema and role."""
    (block,) = [
        item
        for item in blocks(ROOT / "docs" / "postgresql.md")
        if item.info == "sql" and "GRANT" in "\n".join(item.lines)
    ]
    text = "\n".join(block.lines)
    assert "app_role" in text
    return text.replace("app_role", role).replace("retrysafe", schema_name)


def test_the_documented_grants_are_enough_to_run_operations(store, postgres_url, connection, role):
    """Run, replay, take over, record steps, look and operate: all of it, and nothing more."""
    run_sync(store.migrate())
    name = name_in(postgres_url)
    connection.execute(documented_grants(name, role))
    url = postgres_url.replace("retrysafe@", f"{role}@")
    with Idempotency(url, caller="account-7", cache=False) as idem:
        assert [idem.run("order-1", lambda: {"paid": 5}, request=None) for _ in range(2)] == [
            {"paid": 5}
        ] * 2
        with pytest.raises(ZeroDivisionError):
            idem.run("order-2", lambda: 1 / 0, name="divide", request=None)
        assert idem.run("order-2", lambda: 7, name="divide", request=None) == 7
        idem.expire("order-1")
        assert idem.run("order-1", lambda: {"paid": 6}, request=None) == {"paid": 6}
        assert len(idem.read("order-1").outcomes) == 2
    worker = postgres_store(url, is_async=False)
    try:
        held = request()
        run_sync(worker.commit([held], []))
        step = Step("reserve", 1, RESULT)
        assert run_sync(worker.record_step(StepWrite(KEY, held.token, step))) is Decision.APPLY
        assert run_sync(worker.read(KEY)).steps == [step]
        assert run_sync(worker.list_abandoned(10)) == []
    finally:
        run_sync(worker.close())
    with psycopg.connect(url.partition("?")[0]) as plain:
        assert len(plain.execute(f"SELECT body_json FROM {name}.records").fetchall()) == 3
        assert len(plain.execute(f"SELECT body_json FROM {name}.audit").fetchall()) == 4
        for refused in (f"DROP TABLE {name}.keys", f"TRUNCATE {name}.outcomes"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                plain.execute(refused)
            plain.rollback()


def test_a_role_with_a_schema_of_its_own_needs_no_right_on_the_database(
    postgres_url, connection, role
):
    """An administrator makes the schema; the deploy's role migrates it and sweeps it."""
    name = name_in(postgres_url)
    connection.execute(f"CREATE SCHEMA {name} AUTHORIZATION {role}")
    owner = postgres_store(postgres_url.replace("retrysafe@", f"{role}@"), is_async=False)
    try:
        assert len(run_sync(owner.migrate())) == NEXT - 1
        assert run_sync(owner.sweep(10)).keys == 0
    finally:
        run_sync(owner.close())

"""The SQL that `retrysafe migrate --sql` prints, run by psql as an administrator runs it."""

from __future__ import annotations

import os
import subprocess
from urllib.parse import parse_qs, urlsplit

import pytest

from retrysafe.cli.app import app
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import schema
from tests.postgres.conftest import wait_for_a_waiter

LIMIT_SECONDS = 60
VERSIONS = [migration.version for migration in schema.MIGRATIONS]


@pytest.fixture
def name(postgres_url):
    return parse_qs(urlsplit(postgres_url).query)["schema"][0]


@pytest.fixture
def printed(postgres_url, capsys):
    """What the command prints for this schema."""
    capsys.readouterr()
    assert app(["migrate", "--sql", "--store", postgres_url], standalone_mode=False) == 0
    return capsys.readouterr().out


@pytest.fixture
def psql(postgres_server):
    """Starts psql, which stops at the first error; its input comes from the pipe."""

    def start(**environment):
        return subprocess.Popen(
            [
                postgres_server.binaries / "psql",
                *("-X", "-q", "-v", "ON_ERROR_STOP=1", postgres_server.url()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    return start


@pytest.fixture
def run(psql):
    """Runs a script; returns what psql said of it."""

    def to_the_end(script, *, code=0):
        process = psql()
        _, errors = process.communicate(script, timeout=LIMIT_SECONDS)
        assert process.returncode == code, errors
        return errors

    return to_the_end


@pytest.fixture
def noted(connection, name):
    def read():
        rows = connection.execute(f"SELECT version FROM {name}.schema_versions ORDER BY version")
        return [version for (version,) in rows]

    return read


def pending(url):
    store = postgres_store(url, is_async=False)
    try:
        return run_sync(store.pending_migrations())
    finally:
        run_sync(store.close())


def left_alone(errors):
    """Which migrations said that there was nothing to do."""
    return [
        int(line.partition("migration ")[2].partition(" ")[0])
        for line in errors.splitlines()
        if "is applied already: left alone" in line
    ]


def test_an_empty_database_gets_everything(printed, run, noted, postgres_url):
    """And `migrate --check` finds nothing to do after it."""
    assert left_alone(run(printed)) == []
    assert noted() == VERSIONS
    assert pending(postgres_url) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_database_of_an_earlier_release_gets_what_it_lacks(
    printed, run, noted, postgres_url, name, version
):
    """The same script is right for every database: nobody has to know what is there."""
    for earlier in range(1, version + 1):
        run(schema.migration_script(earlier, name))
    assert left_alone(run(printed)) == list(range(1, version + 1))
    assert noted() == VERSIONS
    assert pending(postgres_url) == []


def test_the_second_run_changes_nothing(printed, run, connection, name, noted):
    """What is stored by then stays, and so does the note of when it was applied."""
    run(printed)
    before = connection.execute(f"SELECT * FROM {name}.schema_versions ORDER BY 1").fetchall()
    assert left_alone(run(printed)) == VERSIONS
    after = connection.execute(f"SELECT * FROM {name}.schema_versions ORDER BY 1").fetchall()
    assert after == before


def test_a_database_made_by_the_command_is_left_alone(printed, run, postgres_url):
    """People may change from one way to the other."""
    store = postgres_store(postgres_url, is_async=False)
    run_sync(store.migrate())
    run_sync(store.close())
    assert left_alone(run(printed)) == VERSIONS


def test_a_migration_that_fails_leaves_nothing_of_itself(printed, run, noted, connection, name):
    """Each is a transaction of its own: those before it stand, and the script can go on there."""
    run(schema.migration_script(1, name))
    connection.execute(f"CREATE TABLE {name}.arguments (mine integer)")
    assert "already exists" in run(printed, code=3)
    assert noted() == [1, 2]
    connection.execute(f"DROP TABLE {name}.arguments")
    run(printed)
    assert noted() == VERSIONS


def test_a_migration_with_other_content_stops_the_script(printed, run, noted, connection, name):
    """The database went another way; what comes next could damage it."""
    run(schema.migration_script(1, name))
    connection.execute(f"UPDATE {name}.schema_versions SET checksum = 'other'")
    assert "applied with other content" in run(printed, code=3)
    assert noted() == [1]


def test_a_migration_alone_stops_where_an_earlier_one_is_missing(run, connection, name, noted):
    """Whoever picks one out of the script is told, on an empty database and on a later one."""
    assert "apply all before 2 first" in run(schema.migration_script(2, name), code=3)
    found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,))
    assert found.fetchall() == []
    run(schema.migration_script(1, name))
    assert "apply all before 3 first" in run(schema.migration_script(3, name), code=3)
    assert noted() == [1]


def test_a_schema_made_by_an_administrator_is_enough(printed, run, connection, name, noted):
    """Making it again would need a right on the database, which the owner need not have."""
    role = f"{name}_role"
    connection.execute(f"CREATE ROLE {role}; CREATE SCHEMA {name} AUTHORIZATION {role}")
    try:
        run(f"SET ROLE {role};\n{printed}")
        assert noted() == VERSIONS
    finally:
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_two_that_run_at_once_apply_it_once(printed, psql, postgres_url, connection, noted, name):
    """One waits for the other and then believes what it finds, also under strict isolation."""
    with connection.transaction():
        connection.execute(schema.migration_script(1, name))
        waiting = psql(PGOPTIONS="-c default_transaction_isolation=serializable")
        waiting.stdin.write(printed)
        waiting.stdin.close()
        waiting.stdin = None
        wait_for_a_waiter(connection)
    _, errors = waiting.communicate(timeout=LIMIT_SECONDS)
    assert waiting.returncode == 0, errors
    assert left_alone(errors) == [1]
    assert noted() == VERSIONS
    assert pending(postgres_url) == []

"""The schema of a SQLite file: made once, checked always, and never half there."""

import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from retrysafe.core.model import Decision
from retrysafe.errors import SchemaChanged, SchemaMissing, SchemaTooNew, StoreMissing
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.stores.migrations import Applied, Migration, load_migrations, pending
from retrysafe.stores.sql import load_blocks
from retrysafe.stores.sqlite import schema
from retrysafe.testing.suite.probe import KEY, request

STARTERS = 8
LIMIT_SECONDS = 60
# The version that a release after this one would add.
NEXT = len(schema.MIGRATIONS) + 1

SWEEP_INDEXES = ("retrysafe_keys_expiry", "retrysafe_outcomes_audit")
# As releases up to schema 3 have them.
SWEEP_OF_BEFORE = (
    "SELECT digest FROM retrysafe_keys WHERE expires_at_ms <= ? AND state <> 1 LIMIT ?",
    "DELETE FROM retrysafe_outcomes WHERE id IN ("
    "SELECT id FROM retrysafe_outcomes WHERE audit_ends_at_ms <= ? LIMIT ?)",
)

# Started, it says so and waits for a line: all of them then go for the fresh file together.
STARTER = """
import sys
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
store = SqliteStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(len(run_sync(store.migrate())))
"""


@pytest.fixture
def execute(path):
    """Runs one statement on the file as another program would."""

    def run(statement, *parameters):
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            return connection.execute(statement, parameters).fetchall()

    return run


@pytest.fixture
def migrated(path):
    """A file with the current schema and nothing in it."""
    assert len(run_sync(SqliteStore(path).migrate())) == len(schema.MIGRATIONS)
    return path


def claim(store):
    """One claim through the store, which is closed after it."""
    try:
        ((answer,), _) = run_sync(store.commit([request()], []))
        return answer.decision
    finally:
        run_sync(store.close())


def tables(execute):
    names = execute("SELECT name FROM sqlite_master WHERE name LIKE 'retrysafe%' ORDER BY name")
    return [name for (name,) in names]


# Made once.


def test_the_first_use_makes_the_schema(path, execute):
    """A fresh file needs no preparation."""
    assert claim(SqliteStore(path)) is Decision.ADMIT
    applied = execute("SELECT version, checksum, oldest_schema FROM retrysafe_schema")
    assert applied == [
        (item.version, item.checksum, item.oldest_schema) for item in schema.MIGRATIONS
    ]


def test_migrating_again_changes_nothing(migrated, execute):
    """The second run applies nothing and rewrites nothing."""
    before = execute("SELECT * FROM retrysafe_schema")
    store = SqliteStore(migrated)
    assert run_sync(store.pending_migrations()) == []
    assert run_sync(store.migrate()) == []
    assert execute("SELECT * FROM retrysafe_schema") == before


def test_what_is_pending_is_told_before_it_is_applied(path):
    """Looking applies nothing."""
    store = SqliteStore(path)
    names = [item.name for item in run_sync(store.pending_migrations())]
    assert names == [item.name for item in schema.MIGRATIONS]
    assert [item.name for item in run_sync(store.migrate())] == names


def test_threads_that_start_together_migrate_once(path, execute):
    """Eight objects race for a fresh file: each migration is applied by one of them."""
    barrier = threading.Barrier(STARTERS)

    def start(_):
        barrier.wait(LIMIT_SECONDS)
        return len(run_sync(SqliteStore(path).migrate()))

    with ThreadPoolExecutor(STARTERS) as pool:
        applied = list(pool.map(start, range(STARTERS)))
    assert sorted(applied) == [0] * (STARTERS - 1) + [len(schema.MIGRATIONS)]
    assert len(execute("SELECT * FROM retrysafe_schema")) == len(schema.MIGRATIONS)


def test_first_uses_that_start_together_all_work(path):
    """Eight first claims on a fresh file: all are answered, and one is admitted."""
    barrier = threading.Barrier(STARTERS)

    def start(_):
        store = SqliteStore(path)
        barrier.wait(LIMIT_SECONDS)
        return claim(store)

    with ThreadPoolExecutor(STARTERS) as pool:
        decisions = sorted(pool.map(start, range(STARTERS)))
    assert decisions == [Decision.ADMIT] + [Decision.IN_FLIGHT] * (STARTERS - 1)


def test_processes_that_start_together_migrate_once(path, execute):
    """The same for eight processes, which share nothing but the file."""
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(STARTERS)
    ]
    try:
        assert [starter.stdout.readline() for starter in starters] == ["ready\n"] * STARTERS
        for starter in starters:
            starter.stdin.write("go\n")
            starter.stdin.flush()
        answers = [starter.communicate(timeout=LIMIT_SECONDS) for starter in starters]
    finally:
        for starter in starters:
            starter.kill()
            starter.wait()
            for stream in (starter.stdin, starter.stdout, starter.stderr):
                stream.close()
    assert [errors for _, errors in answers] == [""] * STARTERS
    applied = sorted(int(output) for output, _ in answers)
    assert applied == [0] * (STARTERS - 1) + [len(schema.MIGRATIONS)]
    assert len(execute("SELECT * FROM retrysafe_schema")) == len(schema.MIGRATIONS)


def test_a_migration_that_fails_leaves_nothing(path, execute, monkeypatch):
    """All or nothing: a crash between two statements of a migration is as if it never began."""
    broken = Migration(NEXT, "broken", "CREATE TABLE retrysafe_half (x);\nSELECT nonsense;\n", 1)
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, broken])
    with pytest.raises(Exception, match="nonsense"):
        run_sync(SqliteStore(path).migrate())
    assert tables(execute) == []
    monkeypatch.undo()
    assert claim(SqliteStore(path)) is Decision.ADMIT


def test_an_old_file_is_brought_up_to_date(migrated, execute, monkeypatch):
    """Only what is missing is applied."""
    later = Migration(NEXT, "later", "CREATE TABLE retrysafe_later (x);\n", 1)
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, later])
    store = SqliteStore(migrated)
    assert run_sync(store.pending_migrations()) == [later]
    assert claim(store) is Decision.ADMIT
    assert "retrysafe_later" in tables(execute)
    assert execute("SELECT version, name FROM retrysafe_schema ORDER BY version")[-1] == (
        NEXT,
        "later",
    )


def test_a_file_with_indexes_for_the_sweep_loses_them(path, execute, monkeypatch):
    """A file of an earlier release keeps its records, and its operations stop paying for them."""
    with monkeypatch.context() as earlier:
        earlier.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:3])
        assert claim(SqliteStore(path)) is Decision.ADMIT
    assert set(SWEEP_INDEXES) <= set(tables(execute))
    assert claim(SqliteStore(path)) is Decision.IN_FLIGHT
    assert not set(SWEEP_INDEXES) & set(tables(execute))


@pytest.mark.parametrize("statement", SWEEP_OF_BEFORE)
def test_a_release_of_before_sweeps_without_its_indexes(migrated, execute, statement):
    """During a rolling deploy it meets a file that a newer one has migrated."""
    assert execute(statement, 0, 10) == []


# Checked always.


def test_without_migrate_a_file_without_schema_is_refused(path, execute):
    """The message says what is wrong and which command mends it; the file stays as it was."""
    execute("CREATE TABLE mine (x)")
    with pytest.raises(SchemaMissing) as refused:
        claim(SqliteStore(path, migrate=False))
    assert str(refused.value) == (
        f"sqlite:///{path} has no current retrysafe schema: run "
        f"'retrysafe migrate --store sqlite:///{path}'"
    )
    assert tables(execute) == []


def test_without_migrate_an_old_schema_is_refused(migrated, monkeypatch):
    """A release that needs more than the file has does not start on it."""
    later = Migration(NEXT, "later", "CREATE TABLE retrysafe_later (x);\n", 1)
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, later])
    with pytest.raises(SchemaMissing, match="retrysafe migrate"):
        claim(SqliteStore(migrated, migrate=False))


def test_without_migrate_a_current_schema_is_used(migrated):
    """Migrated by hand before, the store runs without the right to change a schema."""
    assert claim(SqliteStore(migrated, create=False, migrate=False)) is Decision.ADMIT


def test_migrating_a_missing_file_is_refused_when_it_may_not_be_made(path):
    """`create=False` holds for migrating as well."""
    with pytest.raises(StoreMissing, match="no database at"):
        run_sync(SqliteStore(path, create=False).migrate())
    assert not path.exists()


@pytest.mark.parametrize("migrate", [True, False])
def test_a_newer_compatible_schema_is_used(migrated, execute, migrate):
    """A migration that says that this release still works on it stops nobody."""
    execute("INSERT INTO retrysafe_schema VALUES (?, 'later', 'unknown', 1, 0)", NEXT)
    assert claim(SqliteStore(migrated, migrate=migrate)) is Decision.ADMIT


@pytest.mark.parametrize("migrate", [True, False])
def test_a_too_new_schema_is_refused(migrated, execute, migrate):
    """A migration that says that this release is too old is believed, and nothing is written."""
    execute("INSERT INTO retrysafe_schema VALUES (?, 'breaking', '', ?, 0)", NEXT, NEXT)
    store = SqliteStore(migrated, migrate=migrate)
    with pytest.raises(SchemaTooNew) as refused:
        claim(store)
    assert str(refused.value) == (
        f"the database has schema version {NEXT}, and this release knows up to {NEXT - 1}: "
        "upgrade retrysafe before using this database"
    )
    assert store._connections.writer is None
    assert execute("SELECT count(*) FROM retrysafe_keys") == [(0,)]
    for look in (store.migrate, store.pending_migrations):
        with pytest.raises(SchemaTooNew):
            run_sync(look())


@pytest.mark.parametrize("migrate", [True, False])
def test_a_changed_migration_is_refused(migrated, execute, migrate):
    """A file whose schema came from other statements is not touched."""
    execute("UPDATE retrysafe_schema SET checksum = 'tampered'")
    store = SqliteStore(migrated, migrate=migrate)
    with pytest.raises(SchemaChanged, match=r"migration 1 \(initial\) was applied with other"):
        claim(store)
    assert store._connections.writer is None
    assert execute("SELECT count(*) FROM retrysafe_keys") == [(0,)]


def test_a_refused_store_works_once_its_file_is_mended(migrated, execute):
    """Nothing is remembered of a refusal: the object need not be made anew."""
    execute("INSERT INTO retrysafe_schema VALUES (?, 'breaking', '', ?, 0)", NEXT, NEXT)
    store = SqliteStore(migrated)
    with pytest.raises(SchemaTooNew):
        run_sync(store.read(KEY))
    execute("DELETE FROM retrysafe_schema WHERE version = ?", NEXT)
    assert claim(store) is Decision.ADMIT


def test_other_tables_of_the_file_are_left_alone(path, execute):
    """The store may share a file with an application."""
    execute("CREATE TABLE mine (x)")
    execute("INSERT INTO mine VALUES (42)")
    claim(SqliteStore(path))
    assert execute("SELECT x FROM mine") == [(42,)]


# The files.


def write_package(folder, monkeypatch, **scripts):
    """A package of migration files; gives its name."""
    package = folder / "some_migrations"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in scripts.items():
        (package / f"{name.removeprefix('_')}.sql").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "some_migrations", raising=False)
    return "some_migrations"


FIRST_LINE = "-- oldest schema that still works: 1\n"


def test_migrations_are_loaded_in_order(tmp_path, monkeypatch):
    """By number, whatever the folder's order; other files are no migrations."""
    package = write_package(
        tmp_path,
        monkeypatch,
        _0002_second=FIRST_LINE + "SELECT 2;",
        _0001_first=FIRST_LINE,
        notes="",
    )
    loaded = load_migrations(package)
    assert [(item.version, item.name, item.oldest_schema) for item in loaded] == [
        (1, "first", 1),
        (2, "second", 1),
    ]


def test_a_gap_in_the_numbers_is_found(tmp_path, monkeypatch):
    """A migration that was forgotten in a release stops its tests, not its users."""
    package = write_package(tmp_path, monkeypatch, _0001_first=FIRST_LINE, _0003_third=FIRST_LINE)
    with pytest.raises(ValueError, match="not numbered 1, 2, 3"):
        load_migrations(package)


def test_a_migration_says_which_releases_still_work(tmp_path, monkeypatch):
    """Without that line nobody could tell whether an older release may go on."""
    package = write_package(tmp_path, monkeypatch, _0001_first="SELECT 1;\n")
    with pytest.raises(ValueError, match=r"0001_first\.sql does not say which releases"):
        load_migrations(package)


def test_a_checksum_covers_the_whole_file():
    """Any change of an applied file is noticed."""
    one = Migration(1, "initial", "SELECT 1;\n", 1)
    assert one.checksum != Migration(1, "initial", "SELECT 1; \n", 1).checksum
    with pytest.raises(SchemaChanged):
        pending([one], [Applied(1, "other", 1)])
    assert pending([one], [Applied(1, one.checksum, 1)]) == []


def test_a_block_name_is_used_once(tmp_path, monkeypatch):
    """Two statements of one name would hide each other."""
    package = write_package(
        tmp_path, monkeypatch, queries="-- name: a\nSELECT 1;\n-- name: a\nSELECT 2;\n"
    )
    with pytest.raises(ValueError, match="two blocks named a"):
        load_blocks(package, "queries.sql")


def test_statements_are_split_where_they_end():
    """A semicolon inside a text or a trigger ends no statement."""
    script = (
        "-- a comment; with a semicolon\n\nCREATE TABLE a (x TEXT DEFAULT ';');\n"
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN\n  DELETE FROM a;\n  SELECT 1;\nEND;\n"
    )
    statements = list(schema.split_statements(script))
    assert len(statements) == 2
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in statements:
            connection.execute(statement)


def test_every_shipped_migration_ends_its_statements():
    """Text after the last semicolon would be left out without a word."""
    assert schema.MIGRATIONS
    for migration in schema.MIGRATIONS:
        last = list(schema.split_statements(migration.sql))[-1]
        assert migration.sql.rstrip().endswith(last)

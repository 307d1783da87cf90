"""`diagnose` and `retrysafe doctor` on SQLite: what is wrong is said before it costs a claim."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrysafe.cli.app import app
from retrysafe.cli.problems import ExitCode
from retrysafe.errors import StoreError, StoreMissing
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.stores.sqlite import diagnosis

MOUNTS = [
    "overlay / overlay rw 0 0",
    "tmpfs /run tmpfs rw 0 0",
    "files:/export /srv/shared\\040files nfs4 rw 0 0",
    "/dev/sda1 /srv/shared\\040files/local ext4 rw 0 0",
    "tmpfs /dev/shm tmpfs rw 0 0",
    "/dev/sdb1 /dev/shm ext4 rw 0 0",
    "broken",
]


@pytest.fixture
def path(tmp_path):
    """A file with the current schema."""
    made = tmp_path / "keys.db"
    store = SqliteStore(made)
    run_sync(store.migrate())
    run_sync(store.close())
    return made


def problems(path):
    store = SqliteStore(path, create=False, migrate=False)
    try:
        return [item.text for item in run_sync(store.diagnose()) if item.is_problem]
    finally:
        run_sync(store.close())


def test_a_sound_file_has_no_problem(path):
    assert problems(path) == []


def test_a_missing_file_is_told_and_not_made(tmp_path):
    with pytest.raises(StoreMissing, match="there is no database"):
        problems(tmp_path / "keys.db")
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_the_schema_stays_as_it_is(tmp_path):
    """Somebody else's file is looked at, and not even its mode is changed."""
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    before = foreign.read_bytes()
    assert problems(foreign) == ["The schema is missing or not up to date. Run retrysafe migrate."]
    assert foreign.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["foreign.db"]


def test_a_schema_of_a_later_release_is_reported(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO retrysafe_schema VALUES (9999, 'later', 'x', 9999, 0)")
    (found,) = problems(path)
    assert "upgrade retrysafe" in found


def test_what_is_no_database_is_reported(tmp_path):
    wrong = tmp_path / "keys.db"
    wrong.write_bytes(b"no database " * 100)
    with pytest.raises(StoreError, match="cannot be used"):
        problems(wrong)


def test_a_file_that_others_may_read_is_worth_knowing(path):
    """Not a problem: a group may share it."""
    assert diagnosis.reader_findings(path) == []
    path.chmod(0o640)
    (found,) = diagnosis.reader_findings(path)
    assert "chmod 600" in found.text
    assert not found.is_problem


def test_another_journal_mode_is_worth_knowing(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        (found,) = diagnosis.mode_findings(connection)
    assert found.text.startswith("The file is in the journal mode delete")
    assert not found.is_problem


def test_what_may_not_be_written_is_a_problem(path, monkeypatch):
    """Asked of the system, which lets root write everything: so its answer is made up here."""
    closed = {path, path.parent}
    monkeypatch.setattr("os.access", lambda item, mode: item not in closed)
    found = problems(path)
    assert [text.split(" may not be written")[0] for text in found] == [
        str(path),
        f"The folder {path.parent}",
    ]
    closed.discard(path)
    assert len(problems(path)) == 1


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/keys.db", "overlay"),
        ("/run/keys.db", "tmpfs"),
        ("/running/keys.db", "overlay"),
        ("/srv/shared files/keys.db", "nfs4"),
        ("/srv/shared files/local/keys.db", "ext4"),
        ("/dev/shm/keys.db", "ext4"),
    ],
)
def test_the_innermost_and_latest_mount_tells_the_file_system(path, kind):
    assert diagnosis.file_system_of(Path(path), MOUNTS) == kind
    assert diagnosis.file_system_of(Path(path), []) is None


@pytest.mark.parametrize(
    ("kind", "is_problem"),
    [("nfs4", True), ("cifs", True), ("tmpfs", False), ("ext4", None), (None, None)],
)
def test_a_file_system_that_breaks_promises_is_reported(kind, is_problem):
    found = [item.is_problem for item in diagnosis.file_system_findings(kind)]
    assert found == ([] if is_problem is None else [is_problem])


def test_doctor_tells_and_exits_by_it(path, tmp_path):
    """0 for a sound file, 1 for a problem, 3 when there is none."""

    def doctor(target, *options):
        return CliRunner().invoke(app, ["doctor", "--store", f"sqlite:///{target}", *options])

    assert doctor(path).exit_code == 0
    assert '"problems": []' in doctor(path, "--json").stdout
    empty = tmp_path / "empty.db"
    empty.touch()
    told = doctor(empty)
    assert told.exit_code == ExitCode.REFUSED
    assert "problem: The schema is missing" in told.stdout
    assert "problem" not in doctor(path).stdout

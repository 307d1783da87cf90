"""Every expected problem is one helpful line, and its exit code says of which kind it is."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import closing

import pytest

from retrysafe.cli.problems import ExitCode, Problem, problem_of, report
from retrysafe.core.model import SettleKind
from retrysafe.errors import RetrysafeError, StoreError, StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore

# Every command that opens a store, with the least that it needs.
READERS = [
    ("keys", "list"),
    ("keys", "show", "k", "--caller", "c"),
    ("keys", "release", "k", "--caller", "c", "--yes", "--reason", "why"),
    ("keys", "expire", "k", "--caller", "c", "--yes", "--reason", "why"),
    ("sweep",),
    ("worker", "--once"),
]
OUTBOX = [
    ("outbox", "list"),
    ("outbox", "show", "1"),
    ("outbox", "retry", "1", "--yes"),
    ("outbox", "discard", "1", "--yes"),
    ("relay", "--target", "python:json:loads", "--drain"),
]
ALL = [*READERS, *OUTBOX, ("migrate",), ("migrate", "--check")]


def name_of(command):
    return " ".join(command)


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_no_store_is_a_usage_error(invoke, command):
    outcome = invoke(*command)
    assert outcome.code == ExitCode.USAGE
    assert outcome.line.startswith("retrysafe: which store? Pass --store")


@pytest.mark.parametrize("command", ALL, ids=name_of)
@pytest.mark.parametrize("url", ["app.db", "mysql://x", "sqlite://", "sqlite:///"])
def test_a_wrong_url_is_a_usage_error(invoke, command, url):
    outcome = invoke(*command, "--store", url)
    assert outcome.code == ExitCode.USAGE
    assert "use sqlite:///path/to/file.db" in outcome.line


MALFORMED = [
    ("postgresql://[bad", "cannot be read"),
    ("postgresql://h:notaport/x", "a port is a number from 1 to 65535"),
    ("postgresql://h:99999/x", "a port is a number from 1 to 65535"),
    ("postgresql://u:50%@h/x", "write a % in a name or password as %25"),
    ("postgresql://h/x?pool=²", "pool is a number from 1 up"),
    ("postgresql://h/x?connect_timeout=never", "connect_timeout is a number of seconds"),
    ("postgresql://h/x?sslmode=on", "sslmode is one of disable"),
    ("postgresql://h/x?ssl_mode=require", "check the names of its options (ssl_mode)"),
    ("postgresql://h/x?schema=order", "PostgreSQL reserves it: use another one"),
    ("sqlite:///app\x00.db", "has no NUL character"),
]


@pytest.mark.parametrize(("url", "words"), MALFORMED, ids=lambda item: ascii(item)[:40])
@pytest.mark.parametrize("command", [*READERS, ("migrate",), ("doctor",)], ids=name_of)
def test_a_malformed_url_is_a_usage_error_and_not_an_outage(invoke, command, url, words):
    """One line for people and one object for programs, which must not try again."""
    outcome = invoke(*command, "--store", url)
    assert outcome.code == ExitCode.USAGE
    assert words in outcome.line
    as_json = invoke(*command, "--store", url, "--json")
    assert as_json.code == ExitCode.USAGE
    problem = json.loads(as_json.line)
    assert problem["error"] == "StoreUrlInvalid"
    assert words in problem["message"]
    assert (problem["exit_code"], problem["retryable"]) == (2, False)


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_a_store_that_ends_with_the_process_is_refused(invoke, command):
    outcome = invoke(*command, "--store", "memory://")
    assert outcome.code == ExitCode.USAGE
    assert "lives in one process" in outcome.line


@pytest.mark.parametrize("command", [*READERS, *OUTBOX, ("migrate", "--check")], ids=name_of)
def test_a_missing_file_is_told_and_not_made(invoke, tmp_path, command):
    """Only `migrate` creates a database; looking at one never does."""
    path = tmp_path / "missing.db"
    outcome = invoke(*command, "--store", f"sqlite:///{path}")
    assert outcome.code == ExitCode.STORE
    assert f"there is no database at {path}" in outcome.line
    assert f"retrysafe migrate --store sqlite:///{path}" in outcome.line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_a_missing_folder_is_reported(invoke, tmp_path, command):
    """It is what is missing first; nobody is sent to `migrate`, which does not make it either."""
    outcome = invoke(*command, "--store", f"sqlite:///{tmp_path}/nowhere/app.db")
    assert outcome.code == ExitCode.STORE
    assert f"there is no folder {tmp_path}/nowhere" in outcome.line
    assert "retrysafe migrate" not in outcome.line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", READERS, ids=name_of)
def test_a_missing_schema_is_told_and_not_made(invoke, tmp_path, command):
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (id INTEGER)")
        connection.commit()
    before = path.read_bytes()
    outcome = invoke(*command, "--store", f"sqlite:///{path}")
    assert outcome.code == ExitCode.STORE
    assert f"run 'retrysafe migrate --store sqlite:///{path}'" in outcome.line
    assert path.read_bytes() == before


def change_schema(path, statement):
    run_sync(SqliteStore(path).migrate())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_a_schema_that_is_too_new_asks_for_an_upgrade(invoke, tmp_path, command):
    path = tmp_path / "new.db"
    change_schema(path, "INSERT INTO retrysafe_schema VALUES (99, 'later', 'c', 99, 0)")
    outcome = invoke(*command, "--store", f"sqlite:///{path}")
    assert outcome.code == ExitCode.STORE
    assert "schema version 99" in outcome.line
    assert "upgrade retrysafe" in outcome.line


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_a_schema_that_went_another_way_is_reported(invoke, tmp_path, command):
    path = tmp_path / "changed.db"
    change_schema(path, "UPDATE retrysafe_schema SET checksum = 'other'")
    outcome = invoke(*command, "--store", f"sqlite:///{path}")
    assert outcome.code == ExitCode.STORE
    assert "applied with other content" in outcome.line


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_a_file_that_is_no_database_is_told_and_kept(invoke, tmp_path, command):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 100)
    outcome = invoke(*command, "--store", f"sqlite:///{path}")
    assert outcome.code == ExitCode.STORE
    assert "file is not a database" in outcome.line
    assert path.read_text() == "dear diary, " * 100


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_a_folder_in_place_of_a_file_is_reported(invoke, tmp_path, command):
    outcome = invoke(*command, "--store", f"sqlite:///{tmp_path}")
    assert outcome.code == ExitCode.STORE
    assert "cannot be opened" in outcome.line


@pytest.mark.parametrize("command", ALL, ids=name_of)
def test_a_file_locked_for_everybody_is_reported(invoke, desk, command):
    """Another process that keeps the file for itself blocks readers as well."""
    desk.put("k", caller="c")
    with closing(sqlite3.connect(desk.path, isolation_level=None)) as rival:
        rival.execute("PRAGMA locking_mode = EXCLUSIVE")
        # The desk's own connection must not stand in the rival's way.
        desk.store._connections.writer.close()
        desk.store._connections.writer = None
        rival.execute("BEGIN EXCLUSIVE")
        outcome = invoke(*command, "--store", desk.url, "--busy-timeout", "0.05")
    assert outcome.code == ExitCode.STORE
    assert "is locked by another writer for too long" in outcome.line


@pytest.mark.parametrize("command", READERS[2:], ids=name_of)
def test_a_writer_that_never_ends_is_reported(invoke, desk, command):
    """A long transaction of somebody else blocks writes, and is named as the thing to look for."""
    desk.put("k", caller="c", kind=SettleKind.FAIL)
    if command[0] in ("sweep", "worker"):
        # A sweep looks for outlived rows as a reader does, and writes only when there are some.
        desk.now_ms += desk.ACTIVE_MS
    with closing(sqlite3.connect(desk.path, isolation_level=None)) as rival:
        rival.execute("BEGIN IMMEDIATE")
        outcome = invoke(*command, "--store", desk.url, "--busy-timeout", "0.05", "--json")
    assert outcome.code == ExitCode.STORE
    problem = json.loads(outcome.line)
    assert problem["error"] == "StoreUnavailable"
    assert problem["retryable"] is True
    assert "long transaction" in problem["message"]


def test_readers_do_not_mind_a_writer(invoke, desk):
    desk.put("k")
    with closing(sqlite3.connect(desk.path, isolation_level=None)) as rival:
        rival.execute("BEGIN IMMEDIATE")
        assert invoke("keys", "list", "--store", desk.url, "--busy-timeout", "0").code == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("keys", "shw"), "Did you mean 'show'?"),
        (("nonsense",), "No such command"),
        (("keys", "list", "--nonsense"), "--nonsense"),
        (("keys", "list", "--limit", "0"), "--limit takes a whole number from 1 to 100,000"),
        (("keys", "list", "--limit", "many"), "--limit takes a whole number"),
        (("keys", "list", "--limit", "100001"), "--limit takes a whole number"),
        (("keys", "list", "--condition", "absent"), "--condition takes one of running, abandoned"),
        (("keys", "list", "--caller", "a", "--global"), "exclude each other"),
        (("keys", "list", "--caller", ""), "use --global"),
        (("keys", "list", "--prefix", "\udcff"), "--prefix is not valid Unicode text"),
        (("keys", "list", "--caller", "\udcff"), "--caller is not valid Unicode text"),
        (("keys", "show"), "KEY"),
        (("keys", "show", "k"), "whose key is it?"),
        (("keys", "show", "k", "--caller", "a", "--global"), "exclude each other"),
        (("keys", "show", "k", "--caller", ""), "a caller must be text"),
        (("keys", "show", "", "--global"), "at least one character"),
        (("keys", "show", "k" * 256, "--global"), "at most 255 characters"),
        (("keys", "show", "\udcff", "--global"), "not valid Unicode"),
        (("sweep", "--rounds", "0"), "--rounds takes a whole number from 1 to 1,000,000"),
        (("sweep", "--pause-ms", "60001"), "milliseconds from 0 to 60,000"),
        (("sweep", "--busy-timeout", "-1"), "--busy-timeout takes a number of seconds, 0 or more"),
        (("migrate", "--check", "--sql"), "pass one of them"),
    ],
    ids=lambda item: None if isinstance(item, str) else ascii(" ".join(item))[:40],
)
def test_what_cannot_be_understood_is_a_usage_error(invoke, desk, args, words):
    """Wrong arguments are one line for people and one object for programs."""
    if args[0] != "nonsense":
        args = (*args, "--store", desk.url)
    outcome = invoke(*args)
    assert outcome.code == ExitCode.USAGE
    assert words in outcome.line
    as_json = invoke(*args, "--json")
    assert as_json.code == ExitCode.USAGE
    problem = json.loads(as_json.line)
    assert words in problem["message"]
    assert problem["exit_code"] == 2
    assert problem["retryable"] is False


@pytest.mark.parametrize(
    "args",
    [
        ("keys", "list", "--limit", "100000"),
        ("sweep", "--rounds", "1000000", "--pause-ms", "60000"),
        ("sweep", "--busy-timeout", "0"),
    ],
    ids=" ".join,
)
def test_the_limits_that_are_told_are_the_limits(invoke, desk, args):
    """What a message says that an option takes is taken."""
    assert invoke(*args, "--store", desk.url).code == 0


def test_a_pool_that_cannot_connect_is_one_line(invoke, capfd):
    """The driver logs every try; the command tells the problem once."""
    logger = logging.getLogger("psycopg.pool")
    invoke("keys", "list", "--store", "memory://")
    above = list(logging.getLogger().handlers)
    for item in above:
        logging.getLogger().removeHandler(item)
    try:
        logger.warning("error connecting")
    finally:
        for item in above:
            logging.getLogger().addHandler(item)
    assert capfd.readouterr() == ("", "")


def test_every_kind_of_error_has_its_code():
    """No error of the library can end in a traceback, and store problems are told from others."""

    def kinds(kind):
        yield kind
        for child in kind.__subclasses__():
            yield from kinds(child)

    # Other tests make kinds of their own.
    of_the_library = [
        kind for kind in kinds(RetrysafeError) if kind.__module__ == "retrysafe.errors"
    ]
    assert len(of_the_library) > 30
    for kind in of_the_library:
        error = kind.__new__(kind)
        error.args = ("words",)
        problem = problem_of(error)
        assert problem.kind == kind.__name__
        assert problem.message == "words"
        assert (problem.code is ExitCode.STORE) == issubclass(kind, StoreError)
        assert (problem.code is ExitCode.USAGE) == issubclass(kind, ValueError)


def test_a_fault_of_the_program_is_not_hidden():
    assert problem_of(ZeroDivisionError("x")) is None


def test_a_message_cannot_command_the_terminal(capsys):
    """Messages quote what clients sent; escape sequences in them are shown, not run."""
    report(Problem("Kind", "one\ntwo \x1b[31mred", ExitCode.REFUSED), as_json=False)
    assert capsys.readouterr().err == "retrysafe: one two \\x1b[31mred\n"


def test_the_error_object_has_a_fixed_shape(capsys):
    report(problem_of(StoreUnavailable("down")), as_json=True)
    assert json.loads(capsys.readouterr().err) == {
        "error": "StoreUnavailable",
        "message": "down",
        "exit_code": 3,
        "retryable": True,
    }


@pytest.mark.parametrize("url", ["nonsense", "sqlite:///", "redis://localhost"])
def test_no_command_is_sent_to_a_store_that_ends_with_it(invoke, url):
    """It would be empty, and refused."""
    outcome = invoke("keys", "list", "--store", url)
    assert outcome.code == ExitCode.USAGE
    assert "use sqlite:///path/to/file.db" in outcome.line
    assert "memory" not in outcome.line

"""`retrysafe migrate` and `retrysafe sweep`."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from retrysafe.cli.problems import ExitCode
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition, SqliteStore
from retrysafe.stores.migrations import Migratable
from retrysafe.stores.sqlite.schema import MIGRATIONS

KNOWN = [
    {"version": item.version, "name": item.name, "checksum": item.checksum} for item in MIGRATIONS
]


def schema_of(path):
    with closing(sqlite3.connect(path)) as connection:
        return sorted(
            connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        )


def test_migrate_makes_the_store_and_says_so_once(invoke, tmp_path):
    path = tmp_path / "new.db"
    first = invoke("migrate", "--store", f"sqlite:///{path}")
    assert (first.code, first.stdout.splitlines()[0]) == (0, "applied: 0001 initial")
    second = invoke("migrate", "--store", f"sqlite:///{path}")
    assert (second.code, second.stdout) == (0, "nothing to do: the schema is up to date\n")


def test_check_lists_what_is_pending_and_changes_nothing(invoke, tmp_path):
    """A deployment asks before it starts workers; the answer is an exit code and a list."""
    path = tmp_path / "empty.db"
    path.touch()
    url = f"sqlite:///{path}"
    pending = invoke("migrate", "--check", "--store", url)
    assert pending.code == ExitCode.REFUSED
    assert pending.stdout.splitlines()[0] == "pending: 0001 initial"
    as_json = invoke("migrate", "--check", "--store", url, "--json")
    assert as_json.code == ExitCode.REFUSED
    assert as_json.json == {"pending": KNOWN}
    assert path.stat().st_size == 0
    assert invoke("migrate", "--store", url, "--json").json == {"applied": KNOWN}
    done = invoke("migrate", "--check", "--store", url)
    assert (done.code, done.stdout) == (0, "the schema is up to date\n")
    assert invoke("migrate", "--check", "--store", url, "--json").json == {"pending": []}


def test_the_printed_sql_makes_the_same_schema(invoke, tmp_path):
    """Whoever runs the SQL by hand ends where `migrate` does, and nothing is pending after it."""
    printed = invoke("migrate", "--sql", "--store", f"sqlite:///{tmp_path / 'absent.db'}")
    assert printed.code == 0
    assert list(tmp_path.iterdir()) == []
    by_hand = tmp_path / "by_hand.db"
    with closing(sqlite3.connect(by_hand)) as connection:
        connection.executescript(printed.stdout)
    by_us = tmp_path / "by_us.db"
    run_sync(SqliteStore(by_us).migrate())
    assert schema_of(by_hand) == schema_of(by_us)
    assert invoke("migrate", "--check", "--store", f"sqlite:///{by_hand}").code == 0
    as_json = invoke("migrate", "--sql", "--json", "--store", "sqlite:///absent.db")
    assert as_json.json == {"sql": printed.stdout}


def test_the_sqlite_store_can_be_migrated():
    """The command line asks for this protocol, so that other stores can join."""
    assert isinstance(SqliteStore("unused.db"), Migratable)


def fill(desk, count):
    for number in range(count):
        desk.put(f"k{number}")
    desk.claim("running")
    desk.now_ms += desk.ACTIVE_MS


def test_sweep_removes_all_in_bounded_rounds(invoke, desk):
    fill(desk, 5)
    outcome = invoke("sweep", "--limit", "2", "--pause-ms", "0", "--store", desk.url, "--json")
    assert outcome.code == 0
    assert outcome.json == {
        "keys": 5,
        "outcomes": 0,
        "partitions": 0,
        "entries": 0,
        "rounds": 3,
        "has_more": False,
    }
    # Abandoned, but pending: only its lease frees it, never the sweep.
    assert desk.condition("running") is Condition.ABANDONED


def test_sweep_stops_after_its_rounds_and_says_that_more_is_left(invoke, desk):
    fill(desk, 5)
    outcome = invoke(
        "sweep", "--limit", "2", "--rounds", "2", "--pause-ms", "0", "--store", desk.url
    )
    assert outcome.code == 0
    assert outcome.stdout == "removed 4 keys and 0 outcomes in 2 rounds\n"
    assert "the walk over the store has not ended" in outcome.stderr
    rest = invoke("sweep", "--store", desk.url)
    assert (rest.stdout, rest.stderr) == ("removed 1 key and 0 outcomes in 1 round\n", "")


class Timed:
    """The module `time` as the sweep sees it: a look takes a while, a sleep is noted."""

    def __init__(self):
        self.now = 0.0
        self.pauses = []

    def monotonic(self):
        self.now += 0.3
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)


def test_sweep_rests_longer_than_it_works(invoke, desk, monkeypatch):
    """Where rounds take long others need the time, so the pauses follow; a given pause stands."""
    timed = Timed()
    monkeypatch.setattr("retrysafe.cli.sweep.time", timed)
    fill(desk, 5)
    assert invoke("sweep", "--limit", "2", "--store", desk.url).code == 0
    assert timed.pauses == pytest.approx([1.2, 1.2])
    fill(desk, 5)
    assert invoke("sweep", "--limit", "2", "--pause-ms", "7", "--store", desk.url).code == 0
    assert timed.pauses[2:] == [0.007, 0.007]


def test_sweep_ends_the_audit_as_well(invoke, desk):
    fill(desk, 3)
    desk.now_ms += desk.AUDIT_MS
    outcome = invoke("sweep", "--store", desk.url, "--json")
    assert (outcome.json["keys"], outcome.json["outcomes"]) == (3, 3)

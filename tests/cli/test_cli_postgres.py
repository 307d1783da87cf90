"""The commands on PostgreSQL: migrate for deploy pipelines, sweep once and for ever, keys."""

from __future__ import annotations

import signal
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from retrysafe import Idempotency
from retrysafe.cli.problems import ExitCode
from retrysafe.stores.postgres.schema import MIGRATIONS
from tests.servers.postgres import beyond_fsync

KNOWN = [
    {"version": item.version, "name": item.name, "checksum": item.checksum} for item in MIGRATIONS
]
LIMIT_SECONDS = 60


@pytest.fixture
def execute(postgres_url):
    """Runs a statement as another program would."""
    name = parse_qs(urlsplit(postgres_url).query)["schema"][0]

    def run(statement):
        with psycopg.connect(postgres_url.partition("?")[0], autocommit=True) as connection:
            cursor = connection.execute(statement.replace("{schema}", name))
            return cursor.fetchall() if cursor.description else []

    return run


@pytest.fixture
def migrated(invoke, postgres_url):
    assert invoke("migrate", "--store", postgres_url).code == 0
    return postgres_url


def fill(url, execute, count):
    """Keys whose active window is over."""
    with Idempotency(url, caller="acme", cache=False) as idem:
        for number in range(count):
            idem.run(f"k{number}", lambda: 1, request=None)
    execute("UPDATE {schema}.keys SET expires_at_ms = settled_at_ms")


def abandon(execute, text):
    execute(
        "INSERT INTO {schema}.keys VALUES (decode(md5('"
        + text
        + "'), 'hex'), 'acme', '"
        + text
        + "', 'charge', 1, '\\x00', 1, '\\x00', 1, 0, 0, 1, NULL, NULL, NULL, 'host:1')"
    )


def told(word):
    """What the command says about every migration."""
    return "".join(f"{word}: {item.version:04d} {item.name}\n" for item in MIGRATIONS)


def test_check_lists_what_is_pending_until_it_is_applied(invoke, postgres_url, execute):
    """A deploy pipeline asks first: exit 1 with the list, then migrate, then exit 0."""
    pending = invoke("migrate", "--check", "--store", postgres_url)
    assert (pending.code, pending.stdout) == (ExitCode.REFUSED, told("pending"))
    as_json = invoke("migrate", "--check", "--json", "--store", postgres_url)
    assert (as_json.code, as_json.json) == (ExitCode.REFUSED, {"pending": KNOWN})
    assert execute("SELECT to_regclass('{schema}.keys')") == [(None,)]
    assert invoke("migrate", "--json", "--store", postgres_url).json == {"applied": KNOWN}
    done = invoke("migrate", "--check", "--store", postgres_url)
    assert (done.code, done.stdout) == (0, "the schema is up to date\n")


def test_sql_is_printed_without_a_server(invoke):
    """It needs no connection, so it can run where the database cannot be reached."""
    printed = invoke(
        "migrate", "--sql", "--store", "postgresql://nobody@127.0.0.1:1/db?schema=mine"
    )
    assert printed.code == 0
    assert "CREATE TABLE mine.keys" in printed.stdout
    lines = printed.stdout.splitlines()
    assert sum(line.startswith("BEGIN ISOLATION LEVEL") for line in lines) == len(KNOWN)
    assert lines.count("COMMIT;") == len(KNOWN)
    assert "{" not in printed.stdout.replace("'{", "")


def test_a_command_in_its_own_process_ends_cleanly(spawn, postgres_url):
    """No warning about connections or threads that nobody closed."""
    first = spawn("migrate", "--store", postgres_url)
    assert (first.code, first.stdout) == (0, told("applied"))
    assert beyond_fsync(first.stderr) == ""
    check = spawn("migrate", "--check", "--store", postgres_url)
    assert (check.code, beyond_fsync(check.stderr)) == (0, "")


def test_an_unreachable_server_is_a_store_problem(invoke):
    """Exit 3 with one line, not a pending schema."""
    outcome = invoke("migrate", "--check", "--store", "postgresql://nobody@127.0.0.1:1/db")
    assert outcome.code == ExitCode.STORE
    assert "does not answer" in outcome.line


def test_sweep_removes_what_is_outlived(invoke, migrated, execute):
    """Keys go, their audit stays, pending records stay."""
    fill(migrated, execute, 5)
    abandon(execute, "lost")
    outcome = invoke("sweep", "--limit", "2", "--pause-ms", "0", "--json", "--store", migrated)
    assert outcome.code == 0
    assert (outcome.json["keys"], outcome.json["has_more"]) == (5, False)
    assert execute("SELECT key FROM {schema}.keys") == [("lost",)]
    assert execute("SELECT count(*) FROM {schema}.outcomes") == [(5,)]


def test_the_audit_of_a_key_that_a_sweep_removed_is_shown(invoke, migrated, execute):
    """People ask by the key; the rows that are left know only its digest."""
    fill(migrated, execute, 2)
    assert invoke("sweep", "--json", "--store", migrated).json["keys"] == 2
    shown = invoke("keys", "show", "k1", "--caller", "acme", "--json", "--store", migrated)
    assert (shown.code, shown.json["record"]) == (0, None)
    assert [(item["ending"], item["body"]) for item in shown.json["outcomes"]] == [("succeeded", 1)]
    digest = shown.json["digest"]
    found = "SELECT state, body_json FROM {schema}.audit WHERE encode(digest, 'hex') = "
    assert execute(f"{found}'{digest}'") == [("succeeded", 1)]


def test_sweep_says_which_days_it_dropped(invoke, migrated, execute):
    """A day whose audit is over goes as a whole."""
    execute(
        "CREATE TABLE {schema}.outcomes_20200101 PARTITION OF {schema}.outcomes "
        "FOR VALUES FROM (1577836800000) TO (1577923200000)"
    )
    outcome = invoke("sweep", "--store", migrated)
    assert outcome.stdout.endswith("in 1 round\ndropped 1 day of outcomes\n")
    assert execute("SELECT to_regclass('{schema}.outcomes_20200101')") == [(None,)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sweep_forever_goes_on_until_it_is_stopped(migrated, execute, number):
    """A service: it removes what expires, and ends in order with its sum when told to."""
    fill(migrated, execute, 30)
    process = subprocess.Popen(
        [sys.executable, "-m", "retrysafe", "sweep", "--forever", "--json", "--store", migrated],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(LIMIT_SECONDS * 20):
            (count,) = execute("SELECT count(*), pg_sleep(0.05) FROM {schema}.keys")
            if not count[0]:
                break
        assert process.poll() is None
        process.send_signal(number)
        out, errors = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert (process.returncode, beyond_fsync(errors)) == (0, "")
    assert '"keys": 30' in out


def test_abandoned_keys_are_listed_without_reading_the_whole_table(invoke, migrated, execute):
    """The list that an incident starts with is bounded by its limit; filters still work."""
    fill(migrated, execute, 2)
    for text in ("lost-1", "lost-2", "lost-3"):
        abandon(execute, text)
    some = invoke("keys", "list", "--condition", "abandoned", "--limit", "2", "--json",
                  "--store", migrated)  # fmt: skip
    assert (len(some.json["keys"]), some.json["has_more"]) == (2, True)
    found = invoke("keys", "list", "--condition", "abandoned", "--json", "--store", migrated)
    assert {item["key"] for item in found.json["keys"]} == {"lost-1", "lost-2", "lost-3"}
    assert {item["condition"] for item in found.json["keys"]} == {"abandoned"}
    one = invoke("keys", "list", "--condition", "abandoned", "--prefix", "lost-3", "--json",
                 "--store", migrated)  # fmt: skip
    assert [item["key"] for item in one.json["keys"]] == ["lost-3"]

"""`keys release` and `expire` on many keys, pages of `keys list`, and who did what and why."""

from __future__ import annotations

import getpass

import pytest

from retrysafe.cli.problems import ExitCode
from retrysafe.core.model import OperatorCommand, SettleKind
from retrysafe.stores import Condition


@pytest.fixture
def failures(desk):
    """Five failures of two operations, and a success."""
    for number in range(5):
        desk.put(f"k{number}", SettleKind.FAIL, operation="charge" if number < 3 else "refund")
        desk.now_ms += 1_000
    desk.put("fine")
    return desk


def release(failures, *more):
    return ("keys", "release", "--all", "--store", failures.url, *more)


def conditions(desk):
    return [desk.condition(f"k{number}").value for number in range(5)]


def test_a_list_goes_on_where_its_page_ended(invoke, failures):
    """Each page says how to get the next one, to people and to programs."""
    arguments = ("keys", "list", "--store", failures.url, "--condition", "failed", "--limit", "2")
    found, more = [], ()
    while True:
        page = invoke(*arguments, "--json", *more).json
        found += [item["key"] for item in page["keys"]]
        if page["after"] is None:
            break
        assert page["has_more"] is True
        more = ("--after", page["after"])
    assert found == ["k4", "k3", "k2", "k1", "k0"]
    assert "go on with --after 18" in invoke(*arguments).stderr
    wrong = invoke(*arguments, "--after", "yesterday")
    assert (wrong.code, "--after" in wrong.line) == (ExitCode.USAGE, True)


def test_filters_combine(invoke, failures):
    """Operation, age and condition, all at once; an age has a unit."""
    failures.now_ms += 60_000
    listed = invoke(
        *("keys", "list", "--store", failures.url, "--json", "--operation", "charge"),
        *("--older-than", "61s", "--newer-than", "64s", "--condition", "failed"),
    )
    assert [item["key"] for item in listed.json["keys"]] == ["k2", "k1"]
    wrong = invoke("keys", "list", "--store", failures.url, "--older-than", "5 minutes")
    assert (wrong.code, "--older-than takes" in wrong.line) == (ExitCode.USAGE, True)


def test_a_dry_run_changes_nothing(invoke, failures):
    """It needs no reason and no consent, and names some of the keys."""
    outcome = invoke(*release(failures, "--operation", "charge", "--dry-run"))
    assert (outcome.code, outcome.stdout) == (0, "3 keys would be released\n")
    assert "key 'k2'" in outcome.stderr
    assert conditions(failures) == ["failed"] * 5
    one = invoke("keys", "expire", "k0", "--caller", "acme", "--store", failures.url, "--dry-run")
    assert one.stdout.startswith("would be expired: key 'k0'")
    assert failures.condition("k0") is Condition.FAILED


def test_all_that_match_are_released_with_a_reason(invoke, failures):
    """Others stay as they are, and every change is told by show."""
    outcome = invoke(
        *release(failures, "--operation", "charge", "--yes", "--json"),
        *("--reason", "bank is back", "--operator", "kim"),
    )
    document = outcome.json
    assert (document["matched"], document["changed"], document["refused"]) == (3, 3, 0)
    assert conditions(failures) == ["released"] * 3 + ["failed"] * 2
    show = ("keys", "show", "k1", "--caller", "acme", "--store", failures.url)
    (action,) = invoke(*show, "--json").json["actions"]
    assert (action["command"], action["condition_before"]) == ("release", "failed")
    assert (action["operator"], action["reason"]) == ("kim", "bank is back")
    assert "by kim" in invoke(*show).stdout
    assert "bank is back" in invoke(*show).stdout


def test_a_key_that_changed_meanwhile_is_left(invoke, failures, monkeypatch):
    """Each is decided anew by the store: what no longer fits is counted and stays."""
    from retrysafe.stores.sqlite import SqliteStore

    operate = SqliteStore.operate
    rivals = iter(["k3"])

    async def late(self, key, command, note):
        for rival in rivals:
            failures.claim(rival)  # A retry was quicker; its key is running now.
        return await operate(self, key, command, note)

    monkeypatch.setattr(SqliteStore, "operate", late)
    failures.now_ms += failures.ACTIVE_MS
    for number in range(5):
        failures.claim(f"k{number}")
    failures.now_ms += failures.LEASE_MS
    outcome = invoke(*release(failures, "--prefix", "k", "--yes", "--json", "--reason", "x"))
    document = outcome.json
    assert (document["matched"], document["changed"], document["refused"]) == (5, 4, 1)
    assert document["refusals"] == ["key 'k3' of caller 'acme'"]


@pytest.mark.parametrize(
    ("rival", "method", "turn", "changed"), [("k1", "operate", 1, 2), ("new", "list_records", 2, 3)]
)
def test_a_success_since_the_look_is_never_expired(
    invoke, desk, monkeypatch, rival, method, turn, changed
):
    """Neither of a key that was free then, nor of one that nobody has seen: it would run twice."""
    from retrysafe.stores.sqlite import SqliteStore

    for number in range(3):
        desk.put(f"k{number}", SettleKind.RELEASE)
    plain, turns = getattr(SqliteStore, method), iter(range(1, 9))

    async def late(self, *arguments):
        if next(turns) == turn:
            desk.now_ms += 1
            desk.put(rival)
        return await plain(self, *arguments)

    monkeypatch.setattr(SqliteStore, method, late)
    command = ("keys", "expire", "--all", "--caller", "acme", "--yes", "--json", "--reason", "x")
    document = invoke(*command, "--store", desk.url).json
    assert (document["matched"], document["changed"]) == (3, changed)
    assert desk.condition(rival) == Condition.SUCCEEDED


def test_what_was_not_searched_is_told(invoke, failures, monkeypatch):
    """After an incident there may be more pending keys than one search gives."""
    from retrysafe.stores.sqlite import SqliteStore

    plain = SqliteStore.list_records

    async def partly(self, query):
        page = await plain(self, query)
        page.unsearched = "pending keys beyond the first 10,000"
        return page

    monkeypatch.setattr(SqliteStore, "list_records", partly)
    command = release(failures, "--condition", "failed", "--dry-run")
    assert "not searched: pending keys beyond" in invoke(*command).stderr
    assert invoke(*command, "--json").json["not_searched"] == "pending keys beyond the first 10,000"


def test_people_are_told_how_many_were_changed(invoke, failures):
    """One line at the end."""
    outcome = invoke(*release(failures, "--condition", "failed", "--yes", "--reason", "x"))
    assert outcome.stdout == "5 keys released, 0 had changed and were left\n"
    empty = invoke(*release(failures, "--condition", "failed", "--yes", "--reason", "x"))
    assert empty.stdout == "0 keys released, 0 had changed and were left\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("keys", "release", "--all", "--yes", "--reason", "x"), "--all without a filter"),
        (("keys", "release"), "which key?"),
        (("keys", "expire", "k", "--all", "--prefix", "k"), "either a key or --all"),
        (("keys", "expire", "k", "--caller", "c", "--operation", "x"), "add --all"),
        (("keys", "release", "--all", "--prefix", "k", "--yes"), "--reason"),
        (("keys", "release", "--all", "--prefix", "k", "--yes", "--reason", " "), "--reason"),
        (("keys", "release", "--all", "--prefix", "k", "--reason", "x"), "5 keys match"),
        (("keys", "release", "k0", "--caller", "acme", "--yes"), "--reason"),
        (
            *(("keys", "expire", "--all", "--condition", "running", "--reason", "x", "--yes"),),
            "expire takes keys that are",
        ),
        (
            *(("keys", "release", "--all", "--force", "--prefix", "k", "--reason", "x"),),
            "--force with --all needs --condition",
        ),
    ],
)
def test_nothing_is_changed_by_halves_of_a_command(invoke, failures, arguments, words):
    """Neither without a filter, a reason or consent, nor with filters that say nothing."""
    outcome = invoke(*arguments, "--store", failures.url)
    assert outcome.code == ExitCode.USAGE
    assert words in outcome.stderr
    assert conditions(failures) == ["failed"] * 5


def test_the_operator_is_the_login_unless_told(invoke, failures, monkeypatch):
    """From the environment too; a container may know its user by number alone."""
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr(getpass, "getuser", lambda: {}["no name"])
    arguments = ("--caller", "acme", "--yes", "--reason", "x", "--store", failures.url)
    invoke("keys", "release", "k0", *arguments)
    monkeypatch.setenv("RETRYSAFE_OPERATOR", "on-call")
    invoke("keys", "release", "k1", *arguments)
    told = [
        invoke("keys", "show", key, "--caller", "acme", "--store", failures.url, "--json").json
        for key in ("k0", "k1")
    ]
    names = [item["actions"][0]["operator"] for item in told]
    assert names[0].partition("@")[0].isdigit()
    assert names[1] == "on-call"


def test_a_command_takes_every_condition_that_it_applies_to(invoke, failures):
    """Without --condition, expire takes what is settled and release what is free to be tried."""
    failures.claim("gone")
    failures.now_ms += failures.LEASE_MS
    dry = {
        command.value: invoke(
            *("keys", command.value, "--all", "--caller", "acme", "--dry-run", "--json"),
            *("--store", failures.url),
        ).json["matched"]
        for command in (OperatorCommand.RELEASE, OperatorCommand.EXPIRE)
    }
    assert dry == {"release": 6, "expire": 6}


def test_never_more_than_somebody_agreed_to(invoke, failures, monkeypatch):
    """A key that matches only after the count was shown is left to another command."""
    from retrysafe.cli import key_actions

    change_all = key_actions._change_all

    def later(*args):
        failures.put("k9", SettleKind.FAIL, operation="refund")
        change_all(*args)

    monkeypatch.setattr(key_actions, "_change_all", later)
    arguments = ("--operation", "refund", "--yes", "--json", "--reason", "x")
    document = invoke(*release(failures, *arguments)).json
    assert (document["matched"], document["changed"]) == (2, 2)
    left = [desk for desk in ("k3", "k4", "k9") if failures.condition(desk) is Condition.FAILED]
    assert len(left) == 1


def test_a_long_audit_is_searched_within_its_time(invoke, failures, monkeypatch):
    """What stands is shown all the same, with a word about what was not searched."""
    monkeypatch.setattr("retrysafe.stores.sqlite.audit._OUTCOMES_PER_LOOK", 1)
    show = ("keys", "show", "k0", "--caller", "acme", "--store", failures.url)
    document = invoke(*show, "--within", "0.0000001", "--json").json
    assert [item["is_replayed"] for item in document["outcomes"]] == [True]
    assert document["not_searched"] == "the oldest outcomes, about 6 of them"
    assert "search longer with --within" in invoke(*show, "--within", "0.0000001").stderr
    assert invoke(*show, "--within", "0", "--json").json["not_searched"] is None

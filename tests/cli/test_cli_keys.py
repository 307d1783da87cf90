"""`retrysafe keys`: what is shown is what is stored, and changes need consent."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from retrysafe import GLOBAL, Key
from retrysafe.cli.key_filters import ListedCondition
from retrysafe.cli.key_output import BODY_LIMIT_CHARACTERS
from retrysafe.cli.problems import ExitCode
from retrysafe.core.model import OperatorCommand, Payload, SettleKind
from retrysafe.core.values.codec import withheld
from retrysafe.http.callers import Credential, bearer_token, caller_of_credential
from retrysafe.http.request import Request
from retrysafe.inspection import duration_text, status_text
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition


@pytest.fixture
def filled(desk):
    """One key in every condition; the newest claim is `running`."""
    desk.put("outlived")
    desk.claim("abandoned")
    desk.now_ms += desk.ACTIVE_MS
    desk.put("succeeded", caller=GLOBAL)
    desk.now_ms += 1_000
    desk.put("failed", SettleKind.FAIL, Payload("failure.1", b"m:Declined", b'{"message":"no"}'))
    desk.now_ms += 1_000
    desk.put("released", SettleKind.RELEASE)
    desk.now_ms += 1_000
    desk.claim("running", caller="other")
    desk.now_ms += 10_000
    return desk


def names(outcome):
    return [item["key"] for item in outcome.json["keys"]]


def test_every_condition_is_listed_newest_claim_first(invoke, filled):
    outcome = invoke("keys", "list", "--store", filled.url, "--json")
    assert outcome.code == 0
    assert names(outcome)[:4] == ["running", "released", "failed", "succeeded"]
    assert {item["key"]: item["condition"] for item in outcome.json["keys"]} == {
        name: name
        for name in ("running", "released", "failed", "succeeded", "abandoned", "outlived")
    }
    assert outcome.json["has_more"] is False


def test_the_conditions_are_all_but_absent():
    assert {item.value for item in ListedCondition} == {
        item.value for item in Condition if item is not Condition.ABSENT
    }


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (("--caller", "other"), {"running"}),
        (("--global",), {"succeeded"}),
        (("--prefix", "r"), {"running", "released"}),
        (("--prefix", "r", "--caller", "acme"), {"released"}),
        (("--condition", "failed"), {"failed"}),
        (("--condition", "running", "--condition", "abandoned"), {"running", "abandoned"}),
        (("--prefix", "%"), set()),
    ],
)
def test_filters_choose(invoke, filled, filters, expected):
    assert set(names(invoke("keys", "list", "--store", filled.url, "--json", *filters))) == expected


def test_a_limit_says_that_there_is_more(invoke, filled):
    cut = invoke("keys", "list", "--store", filled.url, "--limit", "5", "--json")
    assert len(names(cut)) == 5
    assert cut.json["has_more"] is True
    whole = invoke("keys", "list", "--store", filled.url, "--limit", "6", "--json")
    assert whole.json["has_more"] is False
    people = invoke("keys", "list", "--store", filled.url, "--limit", "5")
    assert "more than 5 keys match" in people.stderr


def test_the_json_of_a_list_is_a_promise(invoke, filled):
    """Scripts rely on these names and values."""
    outcome = invoke("keys", "list", "--store", filled.url, "--json", "--prefix", "running")
    assert outcome.json["keys"] == [
        {
            "caller": "other",
            "is_global": False,
            "key": "running",
            "operation": "charge",
            "condition": "running",
            "attempt": 1,
            "owner": "host:1",
            "first_claimed_at": "2027-01-15T09:00:03.000Z",
            "claimed_at": "2027-01-15T09:00:03.000Z",
            "settled_at": None,
            "lease_ends_at": "2027-01-15T09:00:33.000Z",
            "expires_at": None,
            "age_ms": 10_000,
            "lease_left_ms": 20_000,
            "expires_in_ms": None,
        }
    ]
    outcome = invoke("keys", "list", "--store", filled.url, "--json", "--global")
    (record,) = outcome.json["keys"]
    assert record["caller"] is None
    assert record["is_global"] is True
    assert record["lease_ends_at"] is None
    assert record["lease_left_ms"] is None
    assert record["expires_in_ms"] == filled.ACTIVE_MS - 13_000


def test_the_table_has_one_row_per_key(invoke, filled):
    """In a pipe no row is wrapped or cut, so that it can be searched by line."""
    long_key = "long-" + "x" * 250
    filled.put(long_key)
    lines = invoke("keys", "list", "--store", filled.url).stdout.splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert rows[0] == "caller key operation condition attempt age time left"
    assert f"acme {long_key} charge succeeded 1 0 ms expires in 1 h" in rows
    assert "other running charge running 1 10 s lease 20 s" in rows
    assert "GLOBAL succeeded charge succeeded 1 13 s expires in 59 min 47 s" in rows
    assert "acme abandoned charge abandoned 1 1 h lease ended 59 min 43 s ago" in rows
    assert "acme outlived charge outlived 1 1 h expired 13 s ago" in rows
    assert len(rows) == 8


@pytest.fixture
def screen(invoke, monkeypatch):
    """A command on a terminal of some width; its lines."""

    def lines(width, *args):
        # How Rich is told of terminals that it cannot see.
        for name, value in (("FORCE_COLOR", "1"), ("NO_COLOR", "1"), ("COLUMNS", str(width))):
            monkeypatch.setenv(name, value)
        shown = invoke(*args).stdout
        return re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()

    return lines


def test_a_narrow_screen_breaks_no_word(screen, desk):
    """Neither the key, which is copied into the next command, nor the condition."""
    key, caller = "8e03978e-40d5-43e8-bc93-6894a57f9324", "bearer:" + "2744ccd1" * 5
    desk.put(key, caller=caller, operation="POST /charges/{id}/refunds")
    narrow = screen(80, "keys", "list", "--store", desk.url)
    assert [line.rstrip() for line in narrow] == [
        key,
        "  succeeded, POST /charges/{id}/refunds, bearer:2744ccd1…, attempt 1, 0 ms old,",
        "  expires in 1 h",
    ]
    wide = screen(160, "keys", "list", "--store", desk.url)
    assert " ".join(wide[0].split()) == "caller key operation condition attempt age time left"
    assert wide[1].startswith(f"bearer:2744ccd1…  {key}  POST /charges/{{id}}/refunds  succeeded")


def test_a_pipe_gets_the_whole_caller(invoke, desk):
    """Scripts compare it."""
    caller = "bearer:" + "2744ccd1" * 5
    desk.put("k1", caller=caller)
    assert caller in invoke("keys", "list", "--store", desk.url).stdout


def test_a_key_without_its_caller_is_asked_for_in_every_way(invoke, desk):
    line = invoke("keys", "show", "k1", "--store", desk.url).line
    assert all(option in line for option in ("--caller", "--bearer", "--global"))


def test_no_match_is_not_an_error(invoke, desk):
    outcome = invoke("keys", "list", "--store", desk.url)
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "no key matches\n")
    assert invoke("keys", "list", "--store", desk.url, "--json").json["keys"] == []


def test_the_store_may_come_from_the_environment(invoke, filled, monkeypatch):
    monkeypatch.setenv("RETRYSAFE_STORE", filled.url)
    assert len(names(invoke("keys", "list", "--json"))) == 6


def test_a_key_cannot_command_the_terminal(invoke, desk):
    """Keys and bodies come from clients: control characters are spelled out, markup is text."""
    desk.put("\x1b[2J[red]k", payload=Payload("bytes.1", b"", b"\x1b]0;owned\x07 [bold]x"))
    listed = invoke("keys", "list", "--store", desk.url).stdout
    shown = invoke("keys", "show", "\x1b[2J[red]k", "--caller", "acme", "--store", desk.url).stdout
    for text in (listed, shown):
        assert "\x1b" not in text
        assert "\\x1b[2J[red]k" in text
    assert "\\x1b]0;owned\\x07 [bold]x" in shown


def test_show_tells_record_steps_and_audit(invoke, desk):
    """The first life of the key failed and was released by an operator; the second succeeded."""
    desk.put("k", SettleKind.FAIL, Payload("failure.1", b"shop:Declined", b'{"message":"no"}'))
    invoke(
        "keys", "release", "k", "--caller", "acme", "--yes", "--reason", "why", "--store", desk.url
    )
    desk.now_ms += 5_000
    token = desk.claim("k")
    desk.step("k", token, "reserve", 1, Payload("json.1", b"", b'{"shelf":7}'))
    desk.now_ms += 1_000
    desk.settle(SettleKind.COMPLETE, "k", token, Payload("json.1", b"", b'{"paid":[1,2]}'))
    shape = invoke("keys", "show", "k", "--caller", "acme", "--store", desk.url, "--json").json
    assert list(shape) == [
        *("digest", "record", "arguments", "steps", "outcomes", "actions", "not_searched")
    ]
    assert shape["digest"] == Key("k", caller="acme").digest.hex()
    assert shape["record"]["condition"] == "succeeded"
    assert shape["record"]["fingerprint"] == "66" * 16
    assert shape["record"]["fingerprint_rule"] == 1
    assert shape["steps"] == [
        {
            "name": "reserve",
            "position": 1,
            "form": "json.1",
            "head": "",
            "size_bytes": 11,
            "body": {"shelf": 7},
        }
    ]
    assert shape["outcomes"] == [
        {
            "attempt": 1,
            "ending": "failed",
            "is_replayed": False,
            "is_withheld": False,
            "settled_at": "2027-01-15T08:00:00.000Z",
            "audit_ends_at": "2027-01-16T08:00:00.000Z",
            "form": "failure.1",
            "head": "shop:Declined",
            "size_bytes": 29,
            "body": {"message": "no"},
        },
        {
            "attempt": 1,
            "ending": "succeeded",
            "is_replayed": True,
            "is_withheld": False,
            "settled_at": "2027-01-15T08:00:06.000Z",
            "audit_ends_at": "2027-01-16T08:00:06.000Z",
            "form": "json.1",
            "head": "",
            "size_bytes": 14,
            "body": {"paid": [1, 2]},
        },
    ]
    people = invoke("keys", "show", "k", "--caller", "acme", "--store", desk.url).stdout
    assert '      "shelf": 7' not in people  # Indented by the margin and one level only.
    assert '    "shelf": 7' in people
    assert "step 1: reserve" in people
    assert "outcome of attempt 1: failed at 2027-01-15T08:00:00.000Z" in people
    assert people.count("replayed to retries") == 1
    assert "shop:Declined" in people


def test_show_tells_of_releases_and_corrections(invoke, desk):
    """Why a key takes another request, and that it has taken one."""
    command = ("keys", "show", "k", "--caller", "acme", "--store", desk.url)
    names = ("attempt", "releases", "nothing_happened", "corrected_at")

    def shown():
        record = invoke(*command, "--json").json["record"]
        return [record[name] for name in names], invoke(*command).stdout

    declined = Payload("failure.1", b"shop:Declined", b'{"message":"no"}')
    token = desk.claim("k")
    desk.settle(SettleKind.RELEASE, "k", token, declined, nothing_happened=True)
    told, people = shown()
    assert told == [1, 0, True, None]
    assert "takes a corrected request" in people
    assert "releases" not in people
    desk.now_ms += 5_000
    desk.claim("k", mark=b"g" * 16)
    told, people = shown()
    assert told == [2, 1, False, "2027-01-15T08:00:05.000Z"]
    assert "1 of the attempts before this one" in people
    assert "corrected at" in people
    assert "nothing happened" not in people


def test_show_tells_when_a_worker_tries_a_key_again(invoke, desk):
    """A second attempt that was postponed rests for its lease and the back-off; then it is due."""
    arguments = Payload("json.1", b"", b"[7]")
    desk.claim("k", arguments=arguments)
    desk.now_ms += desk.LEASE_MS
    desk.claim("k", arguments=arguments)

    def shown():
        command = ("keys", "show", "k", "--caller", "acme", "--store", desk.url)
        lines = invoke(*command).stdout.splitlines()
        told = [line.split("next try")[1].strip() for line in lines if line.startswith("next try")]
        return told, invoke(*command, "--json").json["record"]["worker_tries_at"]

    at = "2027-01-15T08:01:30.000Z"
    worker = "by a worker in {} (with the default back-off), "
    assert shown() == ([worker.format("1 min") + "unless the lease is renewed"], at)
    desk.now_ms += desk.LEASE_MS
    assert shown() == ([worker.format("30 s") + "or by the next call at once"], at)
    desk.now_ms += 30_000
    assert shown() == (["due, by a worker or the next call"], at)


def test_show_promises_no_worker_where_none_comes(invoke, desk):
    """A claim without arguments waits for its next call, and an ended one for nothing."""
    desk.claim("claimed")
    token = desk.claim("ended", arguments=Payload("json.1", b"", b"[7]"))
    desk.settle(SettleKind.COMPLETE, "ended", token, Payload("json.1", b"", b"1"))
    desk.now_ms += desk.LEASE_MS
    for key in ("claimed", "ended"):
        command = ("keys", "show", key, "--caller", "acme", "--store", desk.url)
        assert "next try" not in invoke(*command).stdout
        assert invoke(*command, "--json").json["record"]["worker_tries_at"] is None


def test_no_token_is_ever_shown(invoke, desk):
    """Whoever holds a token can settle the key, so it stays in the store."""
    token = desk.claim("k")
    desk.settle(SettleKind.COMPLETE, "k", token, Payload("json.1", b"", b"1"))
    outcome = invoke("keys", "show", "k", "--caller", "acme", "--store", desk.url, "--json")
    assert token.hex() not in outcome.stdout


@pytest.mark.parametrize(
    ("payload", "name", "value"),
    [
        (Payload("json.1", b"", b"null"), "body", None),
        (Payload("http.1", b"201", b'{"a": 1}'), "body", {"a": 1}),
        (Payload("http.1", b"201", b"<p>"), "body_text", "<p>"),
        (Payload("bytes.1", b"", b"123"), "body_text", "123"),
        (Payload("bytes.1", b"", b"\xff\x00"), "body_base64", "/wA="),
    ],
)
def test_a_body_is_shown_as_what_it_is(invoke, desk, payload, name, value):
    desk.put("k", payload=payload)
    outcome = invoke("keys", "show", "k", "--caller", "acme", "--store", desk.url, "--json")
    (shape,) = outcome.json["outcomes"]
    assert shape[name] == value
    assert [item for item in shape if item.startswith("body")] == [name]


HEAD = b"201\ncontent-type\napplication/json\nlocation\n/charges/7"


def test_a_stored_response_is_shown_as_one(invoke, desk):
    """Status and headers in words for people, and decoded beside the raw head in JSON."""
    desk.put("k", payload=Payload("http.1", HEAD, b'{"a": 1}'))
    arguments = ("keys", "show", "k", "--caller", "acme", "--store", desk.url)
    (shape,) = invoke(*arguments, "--json").json["outcomes"]
    assert (shape["head"], shape["body"]) == (HEAD.decode(), {"a": 1})
    assert shape["response"]["status"] == 201
    assert ["location", "/charges/7"] in shape["response"]["headers"]
    lines = [line.strip() for line in invoke(*arguments).stdout.splitlines()]
    start = lines.index("201 Created")
    assert lines[start + 1 : start + 3] == [
        "content-type: application/json",
        "location: /charges/7",
    ]
    assert lines[lines.index("", start) :] == ["", "{", '"a": 1', "}"]


@pytest.mark.parametrize("head", [b"x", b"201\nlocation", b""])
def test_a_response_that_cannot_be_read_is_shown_as_it_is_stored(invoke, desk, head):
    desk.put("k", payload=Payload("http.1", head, b"{}"))
    arguments = ("keys", "show", "k", "--caller", "acme", "--store", desk.url)
    (shape,) = invoke(*arguments, "--json").json["outcomes"]
    assert "response" not in shape
    assert (shape["head"], shape["body"]) == (head.decode(), {})
    assert invoke(*arguments).code == 0


def test_a_status_without_a_phrase_is_a_number():
    assert [status_text(204), status_text(299)] == ["204 No Content", "299"]


# Callers that are stored as digests.

TOKEN = "s3cret-token"


@pytest.fixture
def bearer(desk):
    """A key of the client that holds the token, as the HTTP layer stores it, and of another."""
    request = Request("POST", "/", b"", [(b"authorization", f"Bearer {TOKEN}".encode())], b"", None)
    desk.put("k", SettleKind.FAIL, caller=caller_of_credential(bearer_token(request), None))
    desk.put("k", caller="acme")
    return ("--bearer", TOKEN, "--store", desk.url)


def test_a_key_is_found_by_the_token_of_its_client(invoke, bearer):
    """Every command on keys takes the token; nothing shows it."""
    found = invoke("keys", "list", "--json", *bearer)
    assert [item["condition"] for item in found.json["keys"]] == ["failed"]
    shown = invoke("keys", "show", "k", "--json", *bearer)
    assert shown.json["record"]["caller"].startswith("bearer:")
    assert TOKEN not in found.stdout + shown.stdout
    assert invoke("keys", "release", "k", "--yes", "--reason", "why", *bearer).code == 0
    assert invoke("keys", "show", "k", "--json", *bearer).json["record"]["condition"] == "released"
    assert invoke("keys", "expire", "k", "--yes", "--reason", "why", *bearer).code == 0
    assert invoke("keys", "show", "k", "--json", *bearer).json["record"]["condition"] == "outlived"


def test_a_key_is_found_by_every_secret_that_is_listed(invoke, desk, monkeypatch):
    """Also by the API key of its client; operators need not know which secret made it."""
    old, new = "the old secret of 16 or more", "the new secret of 16 or more"
    for secret, condition in ((old, "succeeded"), (new, "failed"), (None, "failed")):
        kind = SettleKind.COMPLETE if condition == "succeeded" else SettleKind.FAIL
        value = None if secret is None else secret.encode()
        caller = caller_of_credential(Credential("api-key", TOKEN), value)
        desk.put(f"k-{condition}", kind, caller=caller)
    by_key = ("--json", "--api-key", TOKEN, "--store", desk.url)
    monkeypatch.delenv("RETRYSAFE_SECRET", raising=False)
    assert len(invoke("keys", "list", *by_key).json["keys"]) == 1
    monkeypatch.setenv("RETRYSAFE_SECRET", f"{new}\n{old}")
    found = invoke("keys", "list", *by_key)
    assert len(found.json["keys"]) == 3
    assert TOKEN not in found.stdout
    shown = invoke("keys", "show", "k-succeeded", *by_key)
    assert shown.json["record"]["condition"] == "succeeded"
    released = invoke(
        "keys", "release", "k-failed", "--yes", "--reason", "why", "--api-key", TOKEN, *by_key[3:]
    )
    assert released.code == 0
    conditions = {item["condition"] for item in invoke("keys", "list", *by_key).json["keys"]}
    assert conditions == {"succeeded", "released"}
    assert invoke("keys", "list", "--api-key", "", "--store", desk.url).code == ExitCode.USAGE


@pytest.fixture
def two_forms(desk, monkeypatch):
    """A key of a client in the form of each of two secrets: their callers, and the options."""
    secrets = ["the new secret of 16 or more", "the old secret of 16 or more"]
    monkeypatch.setenv("RETRYSAFE_SECRET", "\n".join(secrets))
    credential = Credential("api-key", TOKEN)
    callers = [caller_of_credential(credential, item.encode()) for item in secrets]
    return callers, ("--json", "--api-key", TOKEN, "--store", desk.url)


@pytest.mark.parametrize("command", ["release", "expire"])
def test_a_command_on_two_forms_writes_one_document(invoke, desk, two_forms, command):
    """It tells of the form that had come furthest; both are changed."""
    callers, by_key = two_forms
    for caller, kind in zip(callers, (SettleKind.RELEASE, SettleKind.FAIL), strict=True):
        desk.put("k", kind, caller=caller)
    done = invoke("keys", command, "k", "--yes", "--reason", "why", *by_key)
    assert (done.code, done.json["condition_before"]) == (0, "failed")
    after = "released" if command == "release" else "outlived"
    assert [desk.condition("k", caller) for caller in callers] == [after, after]


@pytest.mark.parametrize("first", [0, 1])
def test_a_refused_form_does_not_keep_the_other(invoke, desk, two_forms, first):
    """The refusal is told of at the end."""
    callers, by_key = two_forms
    desk.put("k", caller=callers[first])
    desk.put("k", SettleKind.FAIL, caller=callers[1 - first])
    done = invoke("keys", "release", "k", "--yes", "--reason", "why", *by_key)
    assert (done.code, done.json["condition_before"]) == (ExitCode.REFUSED, "failed")
    assert "succeeded" in done.stderr
    assert desk.condition("k", callers[first]) == "succeeded"
    assert desk.condition("k", callers[1 - first]) == "released"


@pytest.mark.parametrize("first", [0, 1])
def test_a_form_that_gave_way_does_not_hide_the_other(invoke, desk, two_forms, first):
    """Outlived, it tells nothing; commands leave it alone as well."""
    callers, by_key = two_forms
    for caller in callers:
        desk.put("k", SettleKind.FAIL, caller=caller)
    run_sync(desk.store.operate(Key("k", caller=callers[first]), OperatorCommand.EXPIRE))
    assert invoke("keys", "show", "k", *by_key).json["record"]["condition"] == "failed"
    done = invoke("keys", "expire", "k", "--yes", "--reason", "why", *by_key)
    assert done.json["condition_before"] == "failed"
    # Where nothing else is left, it is shown.
    assert invoke("keys", "show", "k", *by_key).json["record"]["condition"] == "outlived"


@pytest.mark.parametrize("first", [0, 1])
def test_the_audit_of_either_form_is_shown(invoke, desk, two_forms, first):
    """Also after a sweep has removed its record."""
    callers, by_key = two_forms
    desk.put("k", payload=Payload("json.1", b"", b'{"paid":5}'), caller=callers[first])
    run_sync(desk.store.operate(Key("k", caller=callers[first]), OperatorCommand.EXPIRE))
    run_sync(desk.store.sweep(100))
    assert len(invoke("keys", "show", "k", *by_key).json["outcomes"]) == 1


def test_doctor_says_what_the_secrets_of_its_environment_mean(invoke, desk, monkeypatch):
    """Notes, and no problems: an application may have its secret from elsewhere."""
    monkeypatch.delenv("RETRYSAFE_SECRET", raising=False)
    told = invoke("doctor", "--json", "--store", desk.url)
    assert (told.code, told.json["problems"]) == (0, [])
    assert "plain hashes" in told.json["notes"][-1]
    for text, count in (("x" * 16, 0), ("x" * 16 + "\n" + "y" * 16, 1), ("x" * 16 + "\nnone", 1)):
        monkeypatch.setenv("RETRYSAFE_SECRET", text)
        notes = invoke("doctor", "--json", "--store", desk.url).json["notes"]
        assert len([note for note in notes if "RETRYSAFE_SECRET" in note]) == count


@pytest.mark.parametrize(
    "wrong",
    [
        ("--bearer", TOKEN, "--caller", "acme"),
        ("--bearer", TOKEN, "--api-key", TOKEN),
        ("--bearer", TOKEN, "--global"),
        ("--bearer", "Bearer x"),
        ("--bearer", ""),
        ("--bearer", "naïve"),
    ],
)
@pytest.mark.parametrize("command", [("list",), ("show", "k")])
def test_a_token_is_the_only_word_about_the_caller(invoke, desk, command, wrong):
    outcome = invoke("keys", *command, *wrong, "--store", desk.url)
    assert outcome.code == ExitCode.USAGE
    assert "--bearer" in outcome.line


@pytest.mark.parametrize("caller", ["acme", GLOBAL], ids=str)
def test_show_tells_the_audit_of_a_key_that_a_sweep_removed(invoke, desk, caller):
    """The record is gone; what its attempts ended with is not, until the audit window ends."""
    desk.put("k", SettleKind.RELEASE, caller=caller)
    desk.put("k", payload=Payload("json.1", b"", b'{"paid":5}'), caller=caller)
    desk.put("other", caller=caller)
    desk.now_ms += desk.ACTIVE_MS
    assert run_sync(desk.store.sweep(100)).keys == 2
    whose = ("--global",) if caller is GLOBAL else ("--caller", caller)
    arguments = ("keys", "show", "k", *whose, "--store", desk.url)
    outcome = invoke(*arguments, "--json")
    assert outcome.code == 0
    digest = Key("k", caller=caller).digest.hex()
    shape = outcome.json
    audit = shape.pop("outcomes")
    assert shape == {
        "digest": digest,
        "record": None,
        "arguments": None,
        "steps": [],
        "actions": [],
        "not_searched": None,
    }
    assert [(item["ending"], item["is_replayed"]) for item in audit] == [
        ("released", False),
        ("succeeded", False),
    ]
    assert audit[1]["body"] == {"paid": 5}
    people = invoke(*arguments).stdout
    assert re.search(rf"^caller +{caller} *$", people, re.MULTILINE)
    assert re.search(rf"^digest +{digest} *$", people, re.MULTILINE)
    assert "removed by a sweep" in people
    assert "outcome of attempt 2: succeeded at" in people
    assert "replayed to retries" not in people
    desk.now_ms += desk.AUDIT_MS
    run_sync(desk.store.sweep(100))
    gone = invoke(*arguments)
    assert gone.code == ExitCode.REFUSED
    assert "there is no record of key 'k'" in gone.line


def test_what_only_the_audit_knows_cannot_be_operated_on(invoke, desk):
    """There is nothing to free or to end: the next use of the key is a first one anyway."""
    desk.put("k")
    desk.now_ms += desk.ACTIVE_MS
    run_sync(desk.store.sweep(100))
    for command in ("release", "expire"):
        outcome = invoke(
            "keys",
            command,
            "k",
            "--caller",
            "acme",
            "--yes",
            "--reason",
            "why",
            "--store",
            desk.url,
        )
        assert outcome.code == ExitCode.REFUSED
        assert "there is no record of key 'k'" in outcome.line


def test_a_long_body_is_cut_for_people_only(invoke, desk):
    desk.put("k", payload=Payload("bytes.1", b"", b"x" * (BODY_LIMIT_CHARACTERS + 1_234)))
    arguments = ("keys", "show", "k", "--caller", "acme", "--store", desk.url)
    assert "… 1,234 more characters; --json shows all" in invoke(*arguments).stdout
    (shape,) = invoke(*arguments, "--json").json["outcomes"]
    assert len(shape["body_text"]) == BODY_LIMIT_CHARACTERS + 1_234


def test_callers_do_not_see_each_other(invoke, desk):
    """The same text is another key for another caller, and for nobody in particular."""
    desk.put("k", caller="acme")
    for whose in (("--caller", "other"), ("--global",)):
        for command in (
            ("show",),
            ("release", "--yes", "--reason", "why"),
            ("expire", "--yes", "--reason", "why"),
        ):
            outcome = invoke("keys", command[0], "k", *command[1:], *whose, "--store", desk.url)
            assert outcome.code == ExitCode.REFUSED
            assert "there is no record of key 'k'" in outcome.line
    assert desk.condition("k") is Condition.SUCCEEDED


def test_release_frees_a_failed_key(invoke, desk):
    desk.put("k", SettleKind.FAIL)
    outcome = invoke(
        "keys", "release", "k", "--caller", "acme", "--yes", "--reason", "why", "--store", desk.url
    )
    assert outcome.code == 0
    assert outcome.stdout == "released key 'k' of caller 'acme'; it was failed\n"
    assert desk.condition("k") is Condition.RELEASED


def test_release_of_a_running_key_needs_force(invoke, desk):
    """The owner may be at work: only an operator who knows better takes the claim away."""
    desk.claim("k")
    arguments = (
        "keys",
        "release",
        "k",
        "--caller",
        "acme",
        "--yes",
        "--reason",
        "why",
        "--store",
        desk.url,
    )
    refused = invoke(*arguments)
    assert refused.code == ExitCode.REFUSED
    assert "force the release" in refused.line
    assert desk.condition("k") is Condition.RUNNING
    forced = invoke(*arguments, "--force", "--json")
    assert forced.code == 0
    assert forced.json["command"] == "force release"
    assert forced.json["decision"] == "apply"
    assert forced.json["condition_before"] == "running"
    assert forced.json["record"]["condition"] == "released"
    assert desk.condition("k") is Condition.RELEASED


def test_release_never_forgets_a_success(invoke, desk):
    desk.put("k")
    for force in ((), ("--force",)):
        outcome = invoke(
            "keys",
            "release",
            "k",
            "--caller",
            "acme",
            "--yes",
            "--reason",
            "why",
            *force,
            "--store",
            desk.url,
        )
        assert outcome.code == ExitCode.REFUSED
        assert "expire the key" in outcome.line
    assert desk.condition("k") is Condition.SUCCEEDED


def test_expire_ends_the_active_window(invoke, desk):
    desk.put("k", caller=GLOBAL)
    arguments = ("keys", "expire", "k", "--global", "--yes", "--reason", "why", "--store", desk.url)
    assert invoke(*arguments).stdout == "expired key 'k' (global); it was succeeded\n"
    assert desk.condition("k", GLOBAL) is Condition.OUTLIVED
    again = invoke(*arguments)
    assert again.code == 0
    assert again.stdout == "nothing to do: key 'k' (global) has expired already\n"


def test_expire_never_takes_a_pending_key(invoke, desk):
    desk.claim("k")
    outcome = invoke(
        "keys",
        "expire",
        "k",
        "--caller",
        "acme",
        "--yes",
        "--reason",
        "why",
        "--store",
        desk.url,
        "--json",
    )
    assert outcome.code == ExitCode.REFUSED
    assert json.loads(outcome.line)["error"] == "OperatorRefused"
    assert desk.condition("k") is Condition.RUNNING


@pytest.mark.parametrize("command", ["release", "expire"])
def test_without_a_terminal_consent_must_be_given(invoke, desk, command):
    """A script that forgot --yes changes nothing, whatever is piped into it."""
    desk.put("k", SettleKind.FAIL)
    arguments = ("keys", command, "k", "--caller", "acme", "--store", desk.url)
    outcome = invoke(*arguments, "--reason", "why", piped="y\ny\n")
    assert outcome.code == ExitCode.USAGE
    assert "add --yes" in outcome.line
    assert desk.condition("k") is Condition.FAILED


@pytest.mark.parametrize(
    ("answer", "code", "condition"),
    [
        ("y\n", 0, Condition.RELEASED),
        ("n\n", ExitCode.REFUSED, Condition.FAILED),
        ("\n", ExitCode.REFUSED, Condition.FAILED),
        (None, ExitCode.INTERRUPTED, Condition.FAILED),
    ],
    ids=["yes", "no", "enter", "ctrl-c"],
)
def test_a_terminal_is_asked(desk, answer, code, condition):
    """On a real terminal the question tells what will happen, and only a yes makes it happen."""
    # The command runs on the host's clock, so the record must be fresh by that clock.
    desk.now_ms = time.time_ns() // 1_000_000
    desk.put("k", SettleKind.FAIL)
    ours, theirs = pty.openpty()
    arguments = ["keys", "release", "k", "--caller", "acme", "--store", desk.url, "--reason", "x"]
    with subprocess.Popen(
        [sys.executable, "-m", "retrysafe", *arguments],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(theirs)
        asked = ""
        while "[y/N]" not in asked:
            piece = os.read(process.stderr.fileno(), 1_000).decode()
            assert piece, f"ended without asking: {asked}"
            asked += piece
        assert "is failed (attempt 1, expires in" in asked
        assert "the next use of the key runs the operation again" in asked
        if answer is None:
            process.send_signal(signal.SIGINT)
        else:
            os.write(ours, answer.encode())
        try:
            assert process.wait(timeout=30) == code
        finally:
            process.kill()  # Else leaving the block would wait for an answer that nobody gives.
        assert "Traceback" not in process.stderr.read()
    os.close(ours)
    assert desk.condition("k") is condition


def test_nobody_is_asked_about_what_is_refused(invoke, desk):
    """The refusal comes first, so that a missing --yes does not hide it."""
    desk.put("k")
    outcome = invoke("keys", "release", "k", "--caller", "acme", "--store", desk.url)
    assert outcome.code == ExitCode.REFUSED
    assert "expire the key" in outcome.line


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (-5, "0 ms"),
        (999, "999 ms"),
        (1_000, "1 s"),
        (61_000, "1 min 1 s"),
        (3_600_000, "1 h"),
        (3_601_000, "1 h"),
        (7_500_000, "2 h 5 min"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_durations_read_well(duration_ms, text):
    assert duration_text(duration_ms) == text


def test_show_needs_no_outcome(invoke, desk):
    desk.claim("k")
    outcome = invoke("keys", "show", "k", "--caller", "acme", "--store", desk.url)
    assert outcome.code == 0
    assert "no outcome is stored" in outcome.stdout
    assert run_sync(desk.store.read(Key("k", caller="acme"), with_audit=True)).outcomes == []


def withhold(desk, text):
    desk.put(text, payload=withheld("the value is an object"))


def test_a_withheld_outcome_is_said_to_be_so(invoke, desk):
    """Who looks at the key learns what retries get, before a client complains."""
    withhold(desk, "k")
    arguments = ("keys", "show", "k", "--caller", "acme", "--store", desk.url)
    people = invoke(*arguments).stdout
    assert ", withheld: retries get OutcomeUnavailable" in people
    assert "replayed to retries" not in people
    (shape,) = invoke(*arguments, "--json").json["outcomes"]
    assert (shape["is_withheld"], shape["is_replayed"]) == (True, True)


def test_a_withheld_outcome_of_an_earlier_life_is_no_mark_of_this_one(invoke, desk):
    """Only the outcome that counts now says what retries get."""
    withhold(desk, "k")
    invoke(
        "keys", "expire", "k", "--caller", "acme", "--yes", "--reason", "why", "--store", desk.url
    )
    desk.now_ms += 1_000
    desk.put("k")
    people = invoke("keys", "show", "k", "--caller", "acme", "--store", desk.url).stdout
    assert people.count(", withheld\n") == 1
    assert "OutcomeUnavailable" not in people


def test_an_operation_without_a_name_is_said_to_have_none(invoke, desk):
    """An empty cell could be a fault of the table; JSON keeps the stored text."""
    desk.claim("k", operation="")
    listed = invoke("keys", "list", "--store", desk.url).stdout
    assert " ".join(listed.splitlines()[1].split()).startswith("acme k (unnamed) running")
    shown = invoke("keys", "show", "k", "--caller", "acme", "--store", desk.url).stdout
    assert "(unnamed)" in shown
    assert invoke("keys", "list", "--store", desk.url, "--json").json["keys"][0]["operation"] == ""

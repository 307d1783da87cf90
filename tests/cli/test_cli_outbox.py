"""`retrysafe outbox` and `retrysafe relay`: what is shown is stored, and what is sent arrives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from retrysafe import GLOBAL, Idempotency, current_attempt
from retrysafe.cli.outbox import BODY_LIMIT_CHARACTERS, ListedEntryCondition
from retrysafe.cli.problems import ExitCode, Problem
from retrysafe.cli.progress import shown_progress
from retrysafe.cli.targets import chosen_target
from retrysafe.core.keys.key import Key
from retrysafe.core.model import SettleKind, StagedEntry
from retrysafe.core.outbox.entries import EntryClaim, EntryCondition, EntryEnding, EntryState
from retrysafe.relay.signing import verify_webhook
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from retrysafe.testing.suite.probe import request, settlement
from tests.relay.test_webhooks import SECRET, Receiver

LIMIT_SECONDS = 60


def stage(store, *entries, caller="acme"):
    wish = request(Key(f"op-{os.urandom(4).hex()}", caller=caller))
    end = settlement(SettleKind.COMPLETE, wish.key, wish.token)
    end.entries = entries
    run_sync(store.commit([wish], []))
    run_sync(store.commit([], [end]))
    return wish.key


def entry(name, aggregate=None, body=b'{"n":1}', topic="orders.paid"):
    return StagedEntry(f"entry:{name}", topic, "application/json", body, aggregate)


@pytest.fixture
def filled(desk):
    """One entry in every state; numbers 1 to 5 in the order of the states."""
    store = desk.store
    for state in EntryCondition:
        stage(store, entry(state.value, "lane" if state is EntryCondition.WAITING else None))
    claim = EntryClaim(b"t" * 16, 10, 30_000)
    taken = {
        item.key.removeprefix("entry:"): item
        for item in run_sync(store.outbox.claim(claim)).entries
    }
    for name, state in (
        ("waiting", EntryState.WAITING),
        ("dead", EntryState.DEAD),
        ("delivered", EntryState.DELIVERED),
        ("discarded", EntryState.DEAD),
    ):
        ending = EntryEnding(taken[name].id, b"t" * 16, state, 5_000, 60_000, f"no {name}")
        run_sync(store.outbox.write([ending]))
    run_sync(store.outbox.operate(taken["discarded"].id, "discard"))
    desk.now_ms += 1_000
    desk.numbers = {name: item.id for name, item in taken.items()}
    return desk


def states(outcome):
    return {item["key"].removeprefix("entry:"): item["state"] for item in outcome.json["entries"]}


def test_every_state_is_listed_newest_first(invoke, filled):
    outcome = invoke("outbox", "list", "--store", filled.url, "--json")
    assert outcome.code == 0
    assert states(outcome) == {item.value: item.value for item in EntryCondition}
    numbers = [item["number"] for item in outcome.json["entries"]]
    assert numbers == sorted(numbers, reverse=True)
    assert outcome.json["has_more"] is False
    assert {item.value for item in ListedEntryCondition} == {item.value for item in EntryCondition}


def test_filters_narrow_the_list(invoke, filled):
    def listed(*options):
        return states(invoke("outbox", "list", "--store", filled.url, "--json", *options))

    assert listed("--state", "dead") == {"dead": "dead"}
    assert set(listed("--state", "dead", "--state", "claimed")) == {"dead", "claimed"}
    assert set(listed("--aggregate", "lane")) == {"waiting"}
    assert listed("--topic", "other") == {}
    few = invoke("outbox", "list", "--store", filled.url, "--json", "--limit", "2")
    assert (len(few.json["entries"]), few.json["has_more"]) == (2, True)


def test_the_table_says_what_is_next(invoke, filled):
    outcome = invoke("outbox", "list", "--store", filled.url)
    rows = {row.split()[0]: row for row in outcome.stdout.splitlines()[1:]}
    for name, words in (
        ("waiting", "due in 4 s"),
        ("claimed", "lease 29 s"),
        ("dead", "1 s ago"),
        ("delivered", "1 s ago"),
    ):
        row = rows[str(filled.numbers[name])]
        assert (name in row, words in row) == (True, True), row
    assert "no dead" in rows[str(filled.numbers["dead"])]


@pytest.fixture
def lane(desk):
    """Entries of two aggregates: a dead one with one before and one after it, and a free lane."""
    store = desk.store
    for name, aggregate in (("a", "lane"), ("b", "lane"), ("c", "lane"), ("d", "other")):
        stage(store, entry(name, aggregate))
    claim = EntryClaim(b"t" * 16, 1, 30_000)
    for state in (EntryState.DELIVERED, EntryState.DEAD):
        (taken,) = run_sync(store.outbox.claim(claim)).entries
        run_sync(store.outbox.write([EntryEnding(taken.id, b"t" * 16, state, 0, 60_000, "no")]))
    return desk


def test_an_entry_behind_a_dead_one_says_what_it_waits_for(invoke, lane):
    """It is due, and would never be delivered: whoever looks must know which one to decide on."""
    listed = invoke("outbox", "list", "--store", lane.url, "--json").json["entries"]
    assert {item["number"]: item["held_back_by"] for item in listed} == {
        1: None,
        2: None,
        3: 2,
        4: None,
    }
    rows = invoke("outbox", "list", "--store", lane.url).stdout.splitlines()
    assert ["held back by entry 2" in row for row in rows[1:]] == [False, True, False, False]
    shown = invoke("outbox", "show", 3, "--store", lane.url)
    assert "waiting (held back by entry 2)" in shown.stdout
    assert invoke("outbox", "show", 3, "--store", lane.url, "--json").json["held_back_by"] == 2
    only = invoke("outbox", "list", "--store", lane.url, "--aggregate", "other", "--json")
    assert [item["held_back_by"] for item in only.json["entries"]] == [None]
    freed = invoke("outbox", "retry", 2, "--yes", "--store", lane.url, "--json")
    assert freed.json["entry"]["held_back_by"] is None
    assert invoke("outbox", "show", 3, "--store", lane.url, "--json").json["held_back_by"] is None


def test_an_entry_before_a_dead_one_is_not_held_back(invoke, lane):
    """Only what is older holds back: a retry of the first goes ahead of a dead second."""
    store = lane.store
    stage(store, entry("e", "pair"), entry("f", "pair"))
    for _ in range(2):
        taken = run_sync(store.outbox.claim(EntryClaim(b"t" * 16, 9, 30_000, dead_blocks=False)))
        endings = [
            EntryEnding(item.id, b"t" * 16, EntryState.DEAD, 0, 60_000, "no")
            for item in taken.entries
            if item.aggregate == "pair"
        ]
        run_sync(store.outbox.write(endings))
    invoke("outbox", "retry", 5, "--yes", "--store", lane.url)
    listed = invoke("outbox", "list", "--aggregate", "pair", "--store", lane.url, "--json").json
    assert [(item["state"], item["held_back_by"]) for item in listed["entries"]] == [
        ("dead", None),
        ("waiting", None),
    ]


def test_a_narrow_screen_breaks_no_word(invoke, lane, monkeypatch):
    """A squeezed table would cut every cell in pieces."""
    monkeypatch.setenv("COLUMNS", "50")
    lines = invoke("outbox", "list", "--store", lane.url).stdout.splitlines()
    assert lines[0] == "4  orders.paid"
    assert lines[1].rstrip() == "  waiting, due, aggregate other, 0 tries, 0 ms old"
    assert lines[2] == "3  orders.paid"
    assert lines[3].rstrip() == "  waiting, held back by entry 2, aggregate lane, 0"
    assert lines[4].rstrip() == "  tries, 0 ms old"
    assert "last error: no" in " ".join(lines)


@pytest.mark.parametrize("command", ["show", "retry", "discard"])
@pytest.mark.parametrize("given", ["entry:dead", "0", "1.5"])
def test_entries_are_named_by_their_numbers(invoke, filled, command, given):
    """A log names both the number and the key."""
    outcome = invoke("outbox", command, given, "--store", filled.url)
    assert outcome.code == ExitCode.USAGE
    assert outcome.line.startswith("retrysafe: NUMBER takes an entry's number, not its key")


def test_an_empty_list_and_a_long_one_say_so(invoke, desk, filled):
    nothing = invoke("outbox", "list", "--store", filled.url, "--topic", "other")
    assert (nothing.code, nothing.stderr) == (0, "no entry matches\n")
    few = invoke("outbox", "list", "--store", filled.url, "--limit", "1")
    assert "more than 1 entries match" in few.stderr


def test_one_entry_is_shown_with_its_body_and_its_error(invoke, filled):
    number = filled.numbers["dead"]
    shown = invoke("outbox", "show", number, "--store", filled.url, "--json")
    assert shown.json["body"] == {"n": 1}
    assert (shown.json["last_error"], shown.json["caller"]) == ("no dead", "acme")
    assert shown.json["operation_key"].startswith("op-")
    assert "token" not in json.dumps(shown.json)
    text = invoke("outbox", "show", number, "--store", filled.url).stdout
    assert "no dead" in text
    assert '"n": 1' in text
    assert "of acme" in text


def test_any_body_can_be_shown(invoke, desk):
    """Bytes in base 64, long texts up to a limit, and no terminal command is ever passed on."""
    stage(
        desk.store,
        entry("bytes", body=b"\xff\x00"),
        entry("text", body=b"\x1b[2J" + b"x" * (BODY_LIMIT_CHARACTERS + 5)),
        caller=GLOBAL,
    )
    assert "in base 64" in invoke("outbox", "show", 1, "--store", desk.url).stdout
    assert invoke("outbox", "show", 1, "--store", desk.url, "--json").json["body_base64"] == "/wA="
    shown = invoke("outbox", "show", 2, "--store", desk.url).stdout
    assert "\x1b" not in shown
    assert "more characters" in shown
    assert "of GLOBAL" in shown
    assert invoke("outbox", "show", 2, "--store", desk.url, "--json").json["is_global"] is True


def test_an_unknown_entry_is_reported(invoke, desk):
    for command in (("show",), ("retry", "--yes"), ("discard", "--yes")):
        outcome = invoke("outbox", command[0], 77, *command[1:], "--store", desk.url)
        assert outcome.code == ExitCode.REFUSED
        assert "there is no outbox entry 77" in outcome.line


@pytest.mark.parametrize("name", ["waiting", "dead"])
@pytest.mark.parametrize(("command", "state"), [("retry", "waiting"), ("discard", "discarded")])
def test_an_operator_decides_about_what_waits_and_what_is_dead(
    invoke, filled, name, command, state
):
    number = filled.numbers[name]
    outcome = invoke("outbox", command, number, "--yes", "--json", "--store", filled.url)
    assert outcome.code == 0
    assert (outcome.json["state_before"], outcome.json["entry"]["state"]) == (name, state)
    again = invoke("outbox", "show", number, "--store", filled.url, "--json")
    assert again.json["state"] == state
    told = invoke("outbox", "retry", number, "--yes", "--store", filled.url)
    assert told.code == (0 if command == "retry" else ExitCode.REFUSED)


@pytest.mark.parametrize("name", ["claimed", "delivered", "discarded"])
@pytest.mark.parametrize("command", ["retry", "discard"])
def test_what_is_under_way_or_over_is_refused(invoke, filled, name, command):
    outcome = invoke("outbox", command, filled.numbers[name], "--yes", "--store", filled.url)
    assert outcome.code == ExitCode.REFUSED
    assert f"cannot {command} entry {filled.numbers[name]} while it is {name}" in outcome.line


def test_a_change_needs_consent(invoke, filled):
    number = filled.numbers["dead"]
    for command in ("retry", "discard"):
        outcome = invoke("outbox", command, number, "--store", filled.url)
        assert outcome.code == ExitCode.USAGE
        assert f"add --yes to {command} the entry" in outcome.line
    assert "due again" in invoke("outbox", "retry", number, "-y", "--store", filled.url).stdout


def test_a_sweep_removes_what_was_delivered(invoke, filled):
    filled.now_ms += 60_000
    assert invoke("sweep", "--store", filled.url).stdout.endswith("removed 1 outbox entry\n")
    filled.now_ms += 7 * 86_400_000
    assert invoke("sweep", "--store", filled.url, "--json").json["entries"] == 1
    found = states(invoke("outbox", "list", "--store", filled.url, "--json"))
    assert set(found) == {"waiting", "claimed", "dead"}


# The relay.


@pytest.fixture
def staged_url(tmp_path):
    """A store with three entries, one aggregate of two and one that is free."""
    url = f"sqlite:///{tmp_path / 'relay.db'}"

    def operation():
        outbox = current_attempt().outbox
        for name in ("a1", "a2"):
            outbox.stage("orders.paid", name, aggregate="a")
        outbox.stage("orders.paid", "free")

    with Idempotency(url, caller=GLOBAL) as idem:
        idem.run("key", operation)
    return url


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


def test_a_relay_drains_to_a_webhook(invoke, staged_url, receiver, monkeypatch):
    monkeypatch.setenv("RETRYSAFE_WEBHOOK_SECRET", SECRET)
    arguments = ("relay", "--store", staged_url, "--target", receiver.url, "--drain")
    outcome = invoke(*arguments, "--json")
    assert outcome.code == 0
    assert outcome.json == {"delivered": 3, "failed": 0, "dead": 0, "lost": 0, "returned": 0}
    bodies = [body for _, body in receiver.requests]
    assert sorted(bodies) == [b"a1", b"a2", b"free"]
    assert bodies.index(b"a1") < bodies.index(b"a2")
    again = invoke(*arguments)
    assert again.stdout == "delivered 0, failed 0, dead 0, lost 0, given back 0\n"


def test_a_relay_calls_a_function_of_the_working_folder(spawn, staged_url, tmp_path, monkeypatch):
    """As users run it, in a process of its own; one delivery at a time keeps the file in order."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop_messages.py").write_text(
        "def deliver(delivery):\n"
        "    if delivery.body == b'free':\n"
        "        raise ValueError('not today')\n"
        "    with open('delivered.txt', 'a') as file:\n"
        "        file.write(delivery.body.decode() + '\\n')\n"
    )
    target = "python:shop_messages:deliver"
    ended = spawn("relay", "--store", staged_url, "--target", target, "--drain", "--json",
                  "--concurrency", 1, "--attempts", 1)  # fmt: skip
    assert (ended.code, ended.json["delivered"], ended.json["dead"]) == (0, 2, 1)
    assert (tmp_path / "delivered.txt").read_text() == "a1\na2\n"
    # What went wrong is told while it runs, one line each.
    assert "is dead after 1 try: ValueError: not today" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_relay_ends_in_order_when_told_to(staged_url, receiver, number):
    """A service: it delivers what there is, waits for more, and exits 0 with its sum."""
    process = subprocess.Popen(
        [sys.executable, "-m", "retrysafe", "relay", "--json",
         "--store", staged_url, "--target", receiver.url, "--poll", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"RETRYSAFE_WEBHOOK_SECRET": SECRET},
    )  # fmt: skip
    store = open_store(staged_url)
    try:
        for _ in range(LIMIT_SECONDS * 20):
            if len(receiver.requests) == 3:
                break
            assert process.poll() is None, process.stderr.read()
            receiver.pause(0.05)
        stage(store, entry("later"))
        for _ in range(LIMIT_SECONDS * 20):
            if len(receiver.requests) == 4:
                break
            receiver.pause(0.05)
        process.send_signal(number)
        out, errors = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
        process.wait()
        run_sync(store.close())
    assert (process.returncode, errors) == (0, "")
    assert json.loads(out)["delivered"] == 4


def test_a_second_signal_ends_a_delivery_that_hangs(staged_url, tmp_path):
    """The first one waits for it; its entry is freed by the lease, as after a crash."""
    (tmp_path / "hanging.py").write_text(
        "import asyncio\n"
        "async def deliver(delivery):\n"
        "    print('hanging', flush=True)\n"
        "    await asyncio.Event().wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "retrysafe", "relay", "--json", "--concurrency", "1",
         "--store", staged_url, "--target", "python:hanging:deliver"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, "")
    assert json.loads(out)["delivered"] == 0


def test_several_secrets_sign_together(invoke, staged_url, receiver, monkeypatch):
    """One on each line; a receiver that knows only one of them accepts."""
    monkeypatch.setenv("RETRYSAFE_WEBHOOK_SECRET", f"the new one, of 16 bytes\n{SECRET}\n")
    outcome = invoke("relay", "--store", staged_url, "--target", receiver.url, "--drain", "--json")
    assert outcome.json["delivered"] == 3
    for headers, body in receiver.requests:
        for secret in (SECRET, "the new one, of 16 bytes"):
            assert verify_webhook(headers, body, secret, now_seconds=time.time())


@pytest.mark.parametrize(
    ("is_quiet", "is_draining", "told"),
    [
        (False, False, "relaying; stop with Ctrl-C or SIGTERM\n"),
        (False, True, ""),
        (True, False, ""),
    ],
)
def test_a_service_says_that_it_is_at_work(capsys, is_quiet, is_draining, told):
    """In a log there is no bar that moves."""
    with shown_progress("relaying", {}, is_quiet=is_quiet, is_service=not is_draining):
        assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--exchange", "e"), "--exchange is for amqp://… targets, and https: has none"),
        (("--prefix", "p."), "--prefix is for nats://… targets, and https: has none"),
    ],
)
def test_options_of_other_targets_are_refused(invoke, staged_url, options, words):
    """They would do nothing, and nobody would know."""
    outcome = invoke(
        "relay", "--store", staged_url, "--target", "https://example.com/", "--drain", *options
    )
    assert (outcome.code, outcome.line) == (ExitCode.USAGE, f"retrysafe: {words}")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("https://example.com/", "RETRYSAFE_WEBHOOK_SECRET"),
        ("ftp://example.com/", "names no target"),
        ("nonsense", "names no target"),
        ("kafka:///orders", "is written kafka://HOST:PORT"),
        ("kafka://localhost?group=g", "have no options, got ?group=g"),
        ("kafka://localhost/a/b", "a topic has letters"),
        ("sqs://orders", "is written sqs:///QUEUE"),
        ("sqs:///orders?visibility=3", "have the options endpoint, region, each once"),
        ("sqs:///orders.paid", "a queue's name"),
        ("sns:///orders", "named by its ARN"),
        ("python:json", "python:module:function"),
        ("python::loads", "python:module:function"),
        ("python:no_such_module_anywhere:f", "there is no module"),
        ("python:json:no_such_function", "has no function"),
        ("python:json:__name__", "has no function"),
    ],
)
def test_a_target_that_is_none_is_a_usage_error(invoke, staged_url, monkeypatch, target, words):
    monkeypatch.delenv("RETRYSAFE_WEBHOOK_SECRET", raising=False)
    outcome = invoke("relay", "--store", staged_url, "--target", target, "--drain")
    assert outcome.code == ExitCode.USAGE
    assert words in outcome.line


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("amqp://guest@localhost/", "RabbitMQ"),
        ("amqps://guest@localhost/", "RabbitMQ"),
        ("nats://localhost:4222", "NatsJetStream"),
        ("kafka://localhost:9092", "AsyncKafka"),
        ("kafka://localhost:9092,other:9092/orders", "AsyncKafka"),
        ("sqs:///orders.fifo?region=eu-central-1&endpoint=http://localhost:4566", "AsyncSqs"),
        ("sns:///arn:aws:sns:eu-central-1:123456789012:orders", "AsyncSns"),
        ("https://example.com/", "AsyncWebhook"),
    ],
)
def test_urls_name_their_targets(monkeypatch, url, kind):
    """Nothing is connected before the first delivery."""
    monkeypatch.setenv("RETRYSAFE_WEBHOOK_SECRET", SECRET)
    assert type(chosen_target(url)).__name__ == kind


@pytest.mark.parametrize(
    ("url", "missing"),
    [
        ("amqp://h/", "aio_pika"),
        ("nats://h", "nats"),
        ("http://h/", "httpx"),
        ("kafka://h", "confluent_kafka"),
        ("sqs:///q", "aiobotocore"),
    ],
)
def test_a_missing_library_says_which_extra_brings_it(monkeypatch, url, missing):
    monkeypatch.setenv("RETRYSAFE_WEBHOOK_SECRET", SECRET)
    for name in list(sys.modules):
        if name.startswith("retrysafe.relay.") or name.partition(".")[0] == missing:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(Problem, match="extra"):
        chosen_target(url)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--concurrency", "0"),
        ("--attempts", "0"),
        ("--lease", "0"),
        ("--timeout", "0"),
        ("--poll", "0"),
    ],
)
def test_limits_of_options_are_told_in_words(invoke, staged_url, option, value):
    outcome = invoke("relay", "--store", staged_url, "--target", "x", option, value)
    assert outcome.code == ExitCode.USAGE
    assert outcome.line.startswith(f"retrysafe: {option} takes a")


def test_settings_that_contradict_each_other_are_a_usage_error(invoke, staged_url):
    outcome = invoke(
        "relay", "--store", staged_url, "--target", "python:json:loads", "--timeout", "90"
    )
    assert outcome.code == ExitCode.USAGE
    assert "lease" in outcome.line


def test_the_group_without_a_command_shows_its_help(invoke):
    outcome = invoke("outbox")
    assert outcome.code == ExitCode.USAGE
    for name in ("list", "show", "retry", "discard"):
        assert name in outcome.stdout

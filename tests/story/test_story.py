"""The demonstration: it shows what it claims, it can fail, and it leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from retrysafe import Key, SqliteStore
from retrysafe.cli.app import app
from retrysafe.core.model import RecordQuery
from retrysafe.runtime.drive import run_sync
from retrysafe.story.ledger import CHARGED, Ledger
from retrysafe.story.processes import WorkerSilent
from retrysafe.story.show import Result, demonstrate
from retrysafe.story.story import Expectation, Story


def start(*args, **options):
    # Said, not inherited: readline, which pytest imports, sets the terminal's width behind Python's
    # back, and lines that are folded there cannot be found.
    environment = dict(options.pop("env", os.environ))
    environment.pop("COLUMNS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "retrysafe", "story", "--fast", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run for people and one for programs, side by side; each on a store of its own."""
    store = tmp_path_factory.mktemp("demo") / "kept.db"
    with start() as plain, start("--json", "--store", f"sqlite:///{store}") as with_json:
        plain_text = plain.communicate(timeout=120)
        json_text = with_json.communicate(timeout=120)
    return {
        "plain": (plain.returncode, *plain_text),
        "json": (with_json.returncode, *json_text),
        "store": store,
    }


def test_the_story_promises_no_more_than_the_library(runs):
    """Waiting is a policy, and a crash makes a second execution: both are said, and why."""
    story = " ".join(runs["plain"][1].split())
    assert "there is one run at a time and one outcome" in story
    assert "because their policy says so: InFlight.WAIT" in story
    assert "The first one died before its charge." in story
    assert "a child key, the same in each attempt" in story
    assert "runs once" not in story


def test_all_expectations_hold(runs):
    code, out, errors = runs["plain"]
    assert (code, errors) == (0, "")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in (
        "race executions in the ledger 1 1 ok",
        "race charges in the ledger 1 1 ok",
        "race callers that got a replay 31 31 ok",
        "race different receipts 1 1 ok",
        "crash a retry at once in flight in flight ok",
        "crash attempt that finished 2 2 ok",
        "crash charges in the ledger 1 1 ok",
        "zombie what the zombie heard ClaimLost ClaimLost ok",
        "zombie charges in the ledger 1 1 ok",
        "zombie the stored outcome is unchanged yes yes ok",
        "mismatch what the client heard KeyReused KeyReused ok",
        "mismatch parts of the outcome leaked 0 0 ok",
        "all acts charges in the ledger 3 3 ok",
    ):
        assert row in rows
    assert re.fullmatch(r"RESULT: all \d+ expectations hold", rows[-1])
    assert "FAILED" not in out


def test_it_reads_well_in_a_pipe(runs):
    """No colours, no cursor movements, no line wider than a page."""
    _, out, _ = runs["plain"]
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 96
    assert "ended by signal 9" in out
    assert re.search(r"the record is running; retry in \d\.\d s", out)


def test_the_temporary_folder_is_gone(runs):
    _, out, _ = runs["plain"]
    (folder,) = set(re.findall(r"sqlite:///(\S+)/demo\.db", out))
    assert Path(folder).parent == Path(tempfile.gettempdir())
    assert not Path(folder).exists()


def test_the_json_result_has_a_fixed_shape(runs):
    code, out, narration = runs["json"]
    result = json.loads(out)
    assert code == 0
    assert list(result) == ["is_ok", "store", "seconds", "ledger", "expectations"]
    assert result["is_ok"] is True
    # The crashed and the frozen worker had started too, and moved no money.
    assert result["ledger"] == {"executions": 5, "charges": 3}
    assert list(result["expectations"][0]) == ["act", "what", "expected", "actual", "is_met"]
    assert all(item["is_met"] for item in result["expectations"])
    assert "RESULT: all" in narration


def test_what_it_tells_is_what_the_store_has(runs):
    """The store that was used is there to be looked at, and agrees with the story."""
    _, _, narration = runs["json"]
    store = SqliteStore(runs["store"], create=False, migrate=False)
    records = [item.record for item in run_sync(store.list_records(RecordQuery()))]
    assert sorted(record.attempt for record in records) == [1, 2, 2]
    for record in records:
        stored = run_sync(store.read(Key(record.text, caller=record.caller)))
        (outcome,) = stored.outcomes
        assert json.loads(outcome.payload.body)["receipt"] in narration
    run_sync(store.close())


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, r"Process (\d+) has claimed"),
        (signal.SIGTERM, r"process (\d+) is frozen"),
    ],
    ids=["ctrl-c while a worker works", "terminated while a worker is frozen"],
)
def test_no_process_outlives_it(number, moment, tmp_path):
    """Whatever ends the demonstration, it ends its workers, also one that is stopped."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with start(env=environment) as process:
        for line in process.stdout:
            found = re.search(moment, line)
            if found:
                break
        else:
            raise AssertionError(process.stderr.read())
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(found.group(1)), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_double_charge_shows(monkeypatch):
    """The demonstration is able to fail: a ledger with a second charge is found out."""
    add = Ledger.add

    def add_twice(ledger, entry):
        add(ledger, entry)
        if entry.what == CHARGED:
            add(ledger, entry)

    # Only in this process, which makes the charges of the second attempts.
    monkeypatch.setattr(Ledger, "add", add_twice)
    console = Console(file=io.StringIO(), width=96)
    result = demonstrate(None, is_fast=True, console=console)
    assert not result.is_ok
    assert {(item.act, item.what) for item in result.expectations if not item.is_met} == {
        ("crash", "charges in the ledger"),
        ("zombie", "charges in the ledger"),
        ("all acts", "charges in the ledger"),
    }
    assert "RESULT: 3 of" in console.file.getvalue()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_failed_expectation_is_a_failed_command(monkeypatch, flags):
    result = Result("sqlite:///x.db", expectations=[Expectation("race", "charges", 1, 2)])
    monkeypatch.setattr("retrysafe.cli.telling.demonstrate", lambda *args, **rest: result)
    outcome = CliRunner().invoke(app, ["story", *flags])
    assert outcome.exit_code == 1
    if flags:
        assert json.loads(outcome.stdout)["is_ok"] is False


def test_a_silent_worker_is_told_in_one_line(monkeypatch):
    def silent(*args, **rest):
        raise WorkerSilent("process 7 ended early")

    monkeypatch.setattr("retrysafe.cli.telling.demonstrate", silent)
    outcome = CliRunner().invoke(app, ["story"])
    assert (outcome.exit_code, outcome.stderr) == (1, "retrysafe: process 7 ended early\n")


def test_the_summary_names_every_failure():
    console = Console(file=io.StringIO(), width=96)
    story = Story(console, 0.0)
    story.act("1  Race", "race")
    story.expect("charges", expected=1, actual=1)
    story.expect("receipts", expected=1, actual=2)
    story.expect("unchanged", expected=True, actual=False)
    story.summarise()
    rows = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "race charges 1 1 ok" in rows
    assert "race receipts 1 2 FAILED" in rows
    assert "race unchanged yes no FAILED" in rows
    assert rows[-1] == "RESULT: 2 of 3 expectations FAILED"


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("memory://", 2, "lives in one process"),
        ("nonsense", 2, "names no store"),
        ("sqlite:////nowhere/at/all.db", 3, "there is no folder"),
    ],
)
def test_a_store_that_cannot_serve_is_told(url, code, words):
    outcome = CliRunner().invoke(app, ["story", "--fast", "--store", url])
    assert outcome.exit_code == code
    assert words in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert outcome.stdout == ""


def test_the_environment_does_not_choose_the_store(monkeypatch):
    """A store that is set for operators must not get the keys of a demonstration."""
    seen = []
    monkeypatch.setenv("RETRYSAFE_STORE", "sqlite:///production.db")
    monkeypatch.setattr(
        "retrysafe.cli.telling.demonstrate",
        lambda url, **rest: seen.append(url) or Result("x"),
    )
    assert CliRunner().invoke(app, ["story"]).exit_code == 0
    assert seen == [None]


def test_the_ledger_keeps_what_many_processes_write(tmp_path):
    """Lines of processes that write at the same time never mix."""
    path = tmp_path / "ledger.jsonl"
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from retrysafe.story.ledger import Entry, Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "sys.stdin.readline()\n"
        "for n in range(50): ledger.add(Entry('charged', 'k', n, os.getpid(), 1))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.close()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    entries = Ledger(path).entries(CHARGED, "k")
    assert len({(entry.process, entry.attempt) for entry in entries}) == 150
    assert Ledger(path).entries(CHARGED, "other") == []

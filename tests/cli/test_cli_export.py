"""`retrysafe export`: the audit of a window as JSON lines, on both stores."""

from __future__ import annotations

import json

import pytest

from retrysafe.cli.problems import ExitCode
from retrysafe.core.model import OperatorCommand, OperatorNote, Payload, SettleKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from retrysafe.stores.postgres import audit as postgres_audit
from retrysafe.stores.sqlite import audit as sqlite_audit
from retrysafe.testing.suite.probe import Probe, key_of, request

BACKWARDS = ("--from", "2026-02-01", "--to", "2026-01-01")


def exported(outcome):
    assert outcome.code == 0, outcome.stderr
    *lines, end = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert end["kind"] == "end"
    kinds = [line["kind"] for line in lines]
    assert (kinds.count("outcome"), kinds.count("action")) == (end["outcomes"], end["actions"])
    return lines


def test_everything_in_the_window_is_exported_in_parts(invoke, desk, monkeypatch):
    """Outcomes with what is known of their keys, also of keys that are gone, and actions."""
    monkeypatch.setattr(sqlite_audit, "_OUTCOMES_PER_PART", 2)
    for number in range(5):
        desk.put(f"k{number}", operation="charge" if number % 2 else "refund")
        desk.now_ms += 1_000
    invoke(
        *("keys", "expire", "k0", "--caller", "acme", "--yes", "--reason", "why"),
        *("--operator", "kim", "--store", desk.url),
    )
    assert run_sync(desk.store.sweep(10)).keys == 1
    lines = exported(invoke("export", "--store", desk.url))
    assert [line["key"] for line in lines] == [None, "k1", "k2", "k3", "k4", "k0"]
    assert (lines[1]["body"], lines[1]["operation"]) == ({"n": 1}, "charge")
    last = lines[-1]
    assert (last["kind"], last["operator"], last["reason"]) == ("action", "kim", "why")
    # The clock of the desk began at 2027-01-15T08:00:00Z.
    window = ("--from", "2027-01-15T08:00:01Z", "--to", "2027-01-15T10:00:03+02:00")
    inside = exported(invoke("export", "--store", desk.url, *window, "--without-bodies"))
    assert [line["key"] for line in inside] == ["k1", "k2"]
    assert "body" not in inside[0]
    some = exported(invoke("export", "--store", desk.url, "--operation", "charge"))
    assert [line["key"] for line in some] == ["k1", "k3"]
    assert exported(invoke("export", "--store", desk.url, "--caller", "other")) == []


@pytest.mark.parametrize("wrong", [("--from", "yesterday"), ("--to", "soon"), BACKWARDS])
def test_a_window_that_is_none_is_refused(invoke, desk, wrong):
    """Before anything is read."""
    assert invoke("export", "--store", desk.url, *wrong).code == ExitCode.USAGE


def test_partitions_are_read_page_by_page(invoke, migrated_url, monkeypatch):
    """Each of them once, from the default one to the last day."""
    monkeypatch.setattr(postgres_audit, "PART_PAGES", 1)
    store = open_store(migrated_url)
    probe = Probe(store, lambda: 0, run_sync)
    body = Payload("bytes.1", b"", b"x" * 3_000)
    for number in range(9):
        key = key_of(f"k{number}")
        asked = request(key)
        probe.ask(asked)
        audit_ms = 1_000 * 86_400_000 if number % 3 == 0 else (number + 1) * 86_400_000
        probe.end(SettleKind.COMPLETE, asked.token, key, payload=body, audit_ms=audit_ms)
    run_sync(store.operate(key_of("k1"), OperatorCommand.EXPIRE, OperatorNote("kim", "why")))
    run_sync(store.close())
    lines = exported(invoke("export", "--store", migrated_url))
    assert sorted(line["key"] for line in lines[:-1]) == [f"k{number}" for number in range(9)]
    assert lines[-1]["kind"] == "action"

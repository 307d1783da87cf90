"""Who released or expired a key, and why: kept with the change on every store, for a year."""

from __future__ import annotations

import pytest

from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, OperatorCommand, OperatorNote, SettleKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.audit import ACTIONS_KEPT_MS
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.sqlite import SqliteStore
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import Probe, key_of

NOTE = OperatorNote("kim@host", "worker 7 is gone")


@pytest.fixture(params=["memory", "sqlite"])
def probe(request, tmp_path):
    clock = ManualClock()
    if request.param == "memory":
        store = MemoryStore(now_ms=clock)
    else:
        store = SqliteStore(tmp_path / "keys.db", now_ms=clock)
    yield Probe(store, clock, run_sync)
    run_sync(store.close())


def act(probe, command, key, note=NOTE):
    return run_sync(probe.store.operate(key, command, note))


def test_an_action_is_kept_with_its_change(probe):
    """What was applied is told, oldest first; what was refused has left no trace."""
    key = key_of("k")
    token = probe.hold(key)
    assert act(probe, OperatorCommand.RELEASE, key) is Decision.REFUSE
    assert run_sync(probe.store.read_actions(key)) == []
    assert act(probe, OperatorCommand.FORCE_RELEASE, key) is Decision.APPLY
    assert probe.end(SettleKind.COMPLETE, token, key) is Decision.LOST
    probe.advance(5)
    probe.end(SettleKind.COMPLETE, probe.hold(key), key)
    assert run_sync(probe.store.operate(key, OperatorCommand.EXPIRE)) is Decision.APPLY
    first, second = run_sync(probe.store.read_actions(key))
    assert (first.command, first.condition, first.attempt) == ("force release", "running", 1)
    assert (first.operator, first.reason) == ("kim@host", "worker 7 is gone")
    assert (second.command, second.operator, second.reason) == ("expire", "", "")
    assert second.acted_at_ms == first.acted_at_ms + 5
    assert run_sync(probe.store.read_actions(Key("k", caller="other"))) == []


def test_a_sweep_removes_actions_after_their_year(tmp_path):
    """Those that are older, however many sweeps come by before."""
    clock = ManualClock()
    store = SqliteStore(tmp_path / "keys.db", now_ms=clock)
    probe = Probe(store, clock, run_sync)
    for text in ("a", "b"):
        probe.hold(key_of(text))
        assert act(probe, OperatorCommand.FORCE_RELEASE, key_of(text)) is Decision.APPLY
        probe.advance(1_000)
    probe.advance(ACTIONS_KEPT_MS - 2_001)
    probe.sweep()
    assert run_sync(store.read_actions(key_of("a"))) != []
    probe.advance(1)
    probe.sweep()
    assert run_sync(store.read_actions(key_of("a"))) == []
    assert run_sync(store.read_actions(key_of("b"))) != []
    run_sync(store.close())

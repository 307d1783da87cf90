"""Attack: a signal whose handler raises, at every place where Python looks for signals.

What must hold: no lock and no open transaction survives it. The next call of the same thread works,
also in the handler of the exception, while everything that it went through is still alive; and so
does a write by another, real process. Whole calls, and handlers that call, are in
`test_signal_handlers.py`.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from retrysafe import Key
from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import (
    ClaimRequest,
    Decision,
    Extension,
    OperatorCommand,
    Payload,
    SettleKind,
    Settlement,
    StagedEntry,
    Step,
    StepWrite,
)
from retrysafe.core.outbox.entries import (
    EntryClaim,
    EntryCommand,
    EntryEnding,
    EntryQuery,
    EntryState,
)
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from tests.core.building import MARK
from tests.interrupting import at_every_place, no_hang, whole_tree
from tests.processes.children import Child

TOKEN = b"T" * 16
PAYLOAD = Payload("json.1", b"", b"1")


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with no_hang():
        yield


def _write_when_told(pipe: Connection, path: str) -> None:
    """Another process that writes to the file, and does not wait for whoever has it locked."""
    connection = sqlite3.connect(path, timeout=0.5, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("CREATE TABLE IF NOT EXISTS rival (number INTEGER)")
    pipe.send("ready")
    while pipe.recv():
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO rival VALUES (1)")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            pipe.send(str(error))
        else:
            pipe.send("written")
    connection.close()


class Rival:
    """Writes from another process."""

    def __init__(self, path: Path) -> None:
        self._child = Child(_write_when_told, (str(path),))
        assert self._child.receive() == "ready"

    def write(self) -> str:
        self._child.send(True)
        answer: str = self._child.receive()
        return answer

    def end(self) -> None:
        self._child.send(False)
        self._child.end()


class Scene:
    """A store in a file, and what its methods are called with: fresh for every call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_ms = 1_000_000
        self.store = SqliteStore(path, now_ms=lambda: self.now_ms)
        self.connection = sqlite3.connect(path)
        self._number = 0
        self.fresh()

    def key(self) -> Key:
        self._number += 1
        return Key(f"key-{self._number}", caller="tester")

    def request(self, **changes: Any) -> ClaimRequest:
        fields = {"operation": "pay", "owner": "host:1", "arguments": PAYLOAD}
        return ClaimRequest(self.key(), (MARK,), TOKEN, 10, **{**fields, **changes})

    def fresh(self) -> None:
        """Two keys that run, one whose lease is over, one that is done and outlived, an entry."""
        entries = (StagedEntry(f"entry-{self._number}", "mail", "text/plain", b"hello"),)
        requests = [self.request() for _ in range(2)]
        run_sync(self.store.commit(requests, []))
        self.abandoned, done = (request.key for request in requests)
        run_sync(self.store.commit([], [self.ending(done, entries=entries, active_ms=1)]))
        self.now_ms += 20
        requests = [self.request() for _ in range(2)]
        run_sync(self.store.commit(requests, []))
        self.running, self.other = (request.key for request in requests)
        claimed = run_sync(self.store.outbox.claim(EntryClaim(TOKEN, 1, 10_000)))
        self.entry = claimed.entries[0].id if claimed.entries else 0
        self.connection.close()
        self.connection = sqlite3.connect(self.path, timeout=7, isolation_level=None)
        self.connection.row_factory = sqlite3.Row
        writer = self.store._connections.writer
        assert writer is not None
        writer.execute("PRAGMA synchronous = OFF")  # Only here: thousands of commits follow.

    def ending(self, key: Key, **changes: Any) -> Settlement:
        fields = {"active_ms": 60_000, "audit_ms": 60_000}
        return Settlement(SettleKind.COMPLETE, key, TOKEN, PAYLOAD, **{**fields, **changes})

    def step(self) -> StepWrite:
        return StepWrite(self.running, TOKEN, Step("charge", 1, PAYLOAD))

    async def joined(self, *acts: Callable[[Any, ClaimRequest], Any]) -> None:
        """Some of what a block does in a user's transaction, which the user ends in any case."""
        try:
            self.connection.execute("BEGIN")
            transaction, request = self.store.join(self.connection), self.request()
            await transaction.begin()
            for act in acts:
                await act(transaction, request)
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    async def open(self) -> None:
        """The first use of a file: it is made, switched to WAL and migrated."""
        self.store = SqliteStore(self.path.with_name("new.db"), now_ms=lambda: self.now_ms)
        await self.store.commit([self.request()], [])

    def end(self) -> None:
        self.connection.close()
        run_sync(self.store.close())


def _entry_ending(scene: Scene) -> EntryEnding:
    return EntryEnding(scene.entry, TOKEN, EntryState.WAITING)


# Every method of the store and of its outbox; which of the port's methods it is, then how.
ACTS: dict[str, Callable[[Scene], Any]] = {
    "commit: claim": lambda s: s.store.commit([s.request()], []),
    "commit: claims": lambda s: s.store.commit([s.request() for _ in range(3)], []),
    "commit: takeover": lambda s: s.store.commit(
        [ClaimRequest(s.abandoned, (MARK,), b"U" * 16, 10, "pay")], []
    ),
    "commit: ending": lambda s: s.store.commit([], [s.ending(s.running)]),
    "commit: endings": lambda s: s.store.commit(
        [s.request()], [s.ending(s.running), s.ending(s.other)]
    ),
    "extend": lambda s: s.store.extend([Extension(s.running, TOKEN, 10)], 1.0),
    "record_step": lambda s: s.store.record_step(s.step()),
    "read": lambda s: s.store.read(s.running),
    "read: audit": lambda s: s.store.read(s.running, with_audit=True),
    "read_audit": lambda s: s.store.read_audit(s.running),
    "read_actions": lambda s: s.store.read_actions(s.running),
    "last_outcome": lambda s: s.store.last_outcome(s.running),
    "list_records": lambda s: s.store.list_records(RecordQuery(limit=5)),
    "list_abandoned": lambda s: s.store.list_abandoned(5),
    "list_resumable": lambda s: s.store.list_resumable(5, b"", ["pay"]),
    "take_over": lambda s: s.store.take_over(
        ClaimRequest(s.abandoned, (MARK,), b"U" * 16, 10, "pay"), TOKEN
    ),
    "operate": lambda s: s.store.operate(s.running, OperatorCommand.FORCE_RELEASE),
    "sweep": lambda s: s.store.sweep(5),
    "close": lambda s: s.store.close(),
    "migrate": lambda s: s.store.migrate(),
    "pending_migrations": lambda s: s.store.pending_migrations(),
    "audit_part": lambda s: s.store.audit_part(0, 2**60, (0, 0)),
    "actions_between": lambda s: s.store.actions_between(0, 2**60, 0, 5),
    "sample": lambda s: s.store.sample(5),
    "measure": lambda s: s.store.measure(),
    "check_up": lambda s: s.store.check_up(),
    "diagnose": lambda s: s.store.diagnose(),
    "join: lock": lambda s: s.joined(
        lambda t, r: t.lock(r.key, 1.0), lambda t, r: t.look(r), lambda t, _: t.undo()
    ),
    "join: claim": lambda s: s.joined(
        lambda t, r: t.claim(r), lambda t, r: t.settle(s.ending(r.key)), lambda t, _: t.keep()
    ),
    "join: fate": lambda s: s.joined(lambda t, r: t.fate(s.ending(r.key))),
    "join: step": lambda s: s.joined(
        lambda t, _: t.record_step(s.step()), lambda t, _: t.step_fate(s.step())
    ),
    "join: stage": lambda s: s.joined(
        lambda t, _: t.stage([StagedEntry("staged", "mail", "text/plain", b"hello")])
    ),
    "opening": lambda s: s.open(),
    "outbox.claim": lambda s: s.store.outbox.claim(EntryClaim(TOKEN, 1, 10_000)),
    "outbox.write": lambda s: s.store.outbox.write([_entry_ending(s)]),
    "outbox.extend": lambda s: s.store.outbox.extend(TOKEN, [s.entry], 10_000),
    "outbox.read": lambda s: s.store.outbox.read(s.entry),
    "outbox.list_entries": lambda s: s.store.outbox.list_entries(EntryQuery(limit=5)),
    "outbox.operate": lambda s: s.store.outbox.operate(s.entry, EntryCommand.DISCARD),
}


def _drive(flow: Coroutine[Any, Any, object]) -> None:
    try:
        run_sync(flow)
    finally:
        flow.close()  # It was never begun when the driver is struck in its first line.


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "keys.db")
    yield made
    made.end()


@pytest.fixture
def rival(scene: Scene) -> Iterator[Rival]:
    made = Rival(scene.path)
    yield made
    made.end()


def test_every_method_of_the_store_is_struck():
    """A method that is new is struck as well, or this fails."""
    store = SqliteStore("nowhere.db")
    methods = {name for name, _ in inspect.getmembers(SqliteStore, inspect.iscoroutinefunction)}
    methods |= {
        f"outbox.{name}"
        for name, _ in inspect.getmembers(type(store.outbox), inspect.iscoroutinefunction)
    }
    assert {name.partition(":")[0] for name in ACTS} - {"opening"} == methods | {"join"}


@pytest.mark.parametrize("name", ACTS)
def test_nothing_stays_locked_or_open(scene: Scene, rival: Rival, name: str):
    """The next call works, in the handler too, and another process can write."""
    first, place = scene.store, 0
    for place in at_every_place(lambda: _drive(ACTS[name](scene)), *whole_tree()):
        assert rival.write() == "written", f"nobody else can write after a signal at {place}"
        request = scene.request()
        ((answer,), _) = run_sync(scene.store.commit([request], []))
        assert answer.decision is Decision.ADMIT, place
        assert run_sync(scene.store.read(request.key)) is not None, f"stale after {place}"
        if scene.store is not first:
            # Another file each time: what was made half-way is part of the next try.
            run_sync(scene.store.close())
            scene.store = first
        assert scene.connection.row_factory is sqlite3.Row, place
        limit_ms = tuple(scene.connection.execute("PRAGMA busy_timeout").fetchone())
        assert limit_ms == (7_000,), place
        scene.fresh()
    assert place > 5

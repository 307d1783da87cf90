"""Attack: a signal whose handler raises, at every place where Python looks for signals.

What must hold: no lock and no open transaction survives it. The next call of the same thread works,
also in the handler of the exception, while everything that it went through is still alive; and so
does a write by another, real process. A handler that calls retrysafe itself is refused or served,
and never waits for its own thread.
"""

from __future__ import annotations

import gc
import inspect
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from retrysafe import (
    Idempotency,
    Key,
    OperationInFlight,
    Policy,
    RetrysafeError,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.core.keys.canonical import TooDeep
from retrysafe.core.model import (
    ClaimRequest,
    Decision,
    Extension,
    OperatorCommand,
    Payload,
    RecordQuery,
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
from retrysafe.runtime.current import current
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit
from retrysafe.stores import SqliteStore
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import key_of, request
from tests.core.building import MARK
from tests.interrupting import (
    Alarmed,
    Interrupted,
    Overflowed,
    at_every_place,
    at_every_place_at_once,
    whole_tree,
)
from tests.processes.children import Child

# Nothing here takes a tenth of it; reaching it is a hang.
HANG_SECONDS = 30
TOKEN = b"T" * 16
PAYLOAD = Payload("json.1", b"", b"1")


class Hung(BaseException):
    """Something waits for ever."""


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """A lock that stays taken would hang the whole run; this ends the wait for it."""

    def bark(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, bark)
    # Again and again: what ends a wait may wait once more.
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS, 1.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


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


# The whole way of a call, and handlers that call themselves.


class Shop:
    """Calls with a step, each under a key of its own, and how often each was carried out."""

    def __init__(self, idem: Idempotency) -> None:
        self.idem = idem
        self.number = 0
        self.runs: Counter[str] = Counter()

    def call(self) -> int:
        self.number += 1
        return self.pay(f"key-{self.number}")

    def pay(self, key: str, *, has_step: bool = True) -> int:
        def charge() -> int:
            self.runs[key] += 1
            return 7

        def operation() -> int:
            return current_attempt().step("charge", charge) if has_step else charge()

        return self.idem.run(key, operation, name="pay", request="r")

    def require_empty(self, place: object) -> None:
        assert current.get() is None, f"an attempt is left after a signal at {place}"
        calls = self.idem._calls
        assert not calls._gate.inside, f"somebody is inside after a signal at {place}"
        assert not calls._engine.flights_count, f"a flight is left after a signal at {place}"


@pytest.fixture(params=["sqlite", "memory", "postgresql"])
def shop(request, tmp_path: Path, monkeypatch) -> Iterator[Shop]:
    monkeypatch.setattr("retrysafe.core.engine.CLAIM_TRIES", 1)
    url = f"{request.param}://"
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'keys.db'}"
    elif request.param == "postgresql":
        # With one connection, what an interruption keeps is missing at once. A handler needs one
        # beside that of the call that it came into.
        size = 2 if "handler" in request.node.originalname else 1
        url = f"{request.getfixturevalue('migrated_url')}&pool={size}"
    policy = Policy(settle_patience=timedelta(0))
    with Idempotency(url, caller="tester", policy=policy, cache=False) as idem:
        made = Shop(idem)
        made.pay("warm-up")
        if request.param == "sqlite":
            idem._calls.store._connections.writer.execute("PRAGMA synchronous = OFF")
        yield made
    # What was interrupted while a connection was being made is thrown away here, and not during a
    # later test, which would be blamed for a connection that was not closed.
    del made
    gc.collect()


# Of a flow that a signal kept from being begun; Python says so when it is thrown away.
never_begun = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@never_begun
@pytest.mark.parametrize("kind", [Interrupted, Overflowed])
@pytest.mark.parametrize("count", [1, 3])
def test_a_call_leaves_nothing_behind(shop: Shop, count: int, kind: type[Interrupted]):
    """Wherever it is interrupted, the next one works, and nobody is waited for.

    Also when several signals come at once, each of which raises; and where the stack ends.
    """

    def call() -> None:
        with suppress(RetrysafeError, TooDeep):  # What an overflow may be told as.
            shop.call()

    place = 0
    for place in at_every_place_at_once(count, call, *whole_tree(), kind=kind):
        assert shop.pay(f"next-{shop.number}") == 7, place
        shop.require_empty(place)
    assert place > 100
    assert max(shop.runs.values()) == 1


@never_begun
@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_an_exception_of_a_handler_is_no_failure_of_the_operation(
    shop: Shop, count: int, has_step: bool
):
    """What has run does not run again, wherever the handler raised; after one signal the outcome is
    stored, and the retry is told it."""

    def call() -> None:
        shop.number += 1
        with suppress(RetrysafeError):  # What a signal inside of the store may be told as.
            shop.pay(f"key-{shop.number}", has_step=has_step)

    place = 0
    blocked = 0
    for place in at_every_place_at_once(count, call, *whole_tree(), kind=Alarmed):
        key = f"key-{shop.number}"
        has_run = bool(shop.runs[key])
        try:
            assert shop.pay(key, has_step=has_step) == 7, place
        except OperationInFlight:
            blocked += has_run
            assert count > 1 or not has_run, place
        assert shop.runs[key] <= 1, place
        shop.require_empty(place)
    assert place > 100
    assert blocked < place


@never_begun
@pytest.mark.parametrize("is_same_key", [False, True])
def test_a_handler_may_call(shop: Shop, is_same_key: bool):
    """It is served or refused at once; the call that it came into goes on; nothing runs twice."""
    heard: Counter[str] = Counter()

    def handler() -> None:
        try:
            shop.pay(f"key-{shop.number}" if is_same_key else f"handler-{shop.number}")
        except (StoreUnavailable, OperationInFlight) as error:
            heard[type(error).__name__] += 1
        else:
            heard["served"] += 1

    place = 0
    for place in at_every_place(shop.call, *whole_tree(), handler=handler):
        assert shop.runs[f"key-{shop.number}"] == 1, place
        shop.require_empty(place)
    assert place > 100
    assert max(shop.runs.values()) == 1
    assert heard["served"]
    assert len(heard) > 1


@pytest.mark.timeout(60)
def test_a_handler_in_the_middle_of_a_steps_write_does_not_wait_for_its_own_thread(tmp_path):
    """Another thread carries its claim, and waits for the lock that this one holds."""
    answers = []

    def handler() -> None:
        carrier.start()
        while not writer._carriers:
            pass  # Until the other thread has the batch; it cannot end before this one goes on.
        with pytest.raises(StoreUnavailable, match="signal's handler"):
            run_sync(writer.claim(request(key_of("handler"))))

    def now_ms() -> int:
        if handlers:
            handlers.pop()()
        return clock()

    handlers: list[Callable[[], None]] = []
    clock = ManualClock()
    store = SqliteStore(tmp_path / "keys.db", now_ms=now_ms)
    writer = ThreadGroupCommit(store)
    carrier = threading.Thread(
        target=lambda: answers.append(run_sync(writer.claim(request(key_of("other")))))
    )
    held = request(key_of("k"))
    run_sync(writer.claim(held))
    handlers.append(handler)
    step = Step("charge", 0, Payload("json.1", b"", b"1"))
    assert run_sync(store.record_step(StepWrite(held.key, held.token, step))) is Decision.APPLY
    carrier.join(30)
    assert [answer.decision for answer in answers] == [Decision.ADMIT]
    run_sync(store.close())

"""Group commit: rows merge behind the commit under way, and no thread is left hanging."""

from __future__ import annotations

import asyncio
import gc
import linecache
import os
import signal
import sqlite3
import sys
import threading
import traceback
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from retrysafe import Idempotency, StoreUnavailable
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimRequest,
    Condition,
    Decision,
    Fingerprint,
    SettleKind,
    Settlement,
)
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.errors import StoreRejected
from retrysafe.runtime import group_commit
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit.direct import FEW_ROWS
from retrysafe.runtime.group_commit.tasks import REPLAYS_SHARE, SPLIT_ROWS, TaskGroupCommit
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit
from retrysafe.stores import SqliteStore
from tests.runtime.staged import (
    PATIENCE_SECONDS,
    Hold,
    StagedStore,
    TaskHold,
    Worker,
    drive,
    raised,
    turns,
    until,
)


def _request(name: str) -> ClaimRequest:
    return ClaimRequest(
        Key(name, caller="tester"), (Fingerprint(1, b"f" * 16),), os.urandom(16), 30_000
    )


class Stage:
    """A group commit whose first commit is held up until the test opens the hold."""

    def __init__(self, store: StagedStore | None = None, batch_limit: int = 64) -> None:
        self.store = store or StagedStore(batch_limit=batch_limit)
        self.group = ThreadGroupCommit(self.store)
        self.hold = Hold()
        self.then = None
        self._queued = 0
        self.store.before = self._before
        self.first = Worker(self.claim, "first")
        self.hold.reached()

    def _before(self, commit) -> None:
        if len(self.store.commits) == 1:
            self.hold()
        elif self.then is not None:
            self.then(commit)

    def claim(self, name: str):
        return run_sync(self.group.claim(_request(name)))

    def queue_up(self, count: int) -> list[Worker]:
        """Threads that wait behind the commit under way, in this order."""
        workers = []
        for _ in range(count):
            length = len(self.group._queue)
            workers.append(Worker(self.claim, f"queued {self._queued}"))
            self._queued += 1
            self.wait_for_queue(length + 1)
        return workers

    def wait_for_queue(self, length: int) -> None:
        until(lambda: len(self.group._queue) == length)

    def still_works(self) -> bool:
        """Whether the next row is carried as ever."""
        return Worker(self.claim, "later").result().decision is Decision.ADMIT


def test_rows_that_wait_leave_together():
    """Thirty rows that queued behind one commit leave in batches of the store's limit."""
    stage = Stage(batch_limit=16)
    workers = stage.queue_up(30)
    stage.hold.open()
    assert [worker.result().decision for worker in workers] == [Decision.ADMIT] * 30
    assert [len(commit.claims) for commit in stage.store.commits] == [1, 16, 14]
    assert stage.first.result().decision is Decision.ADMIT
    assert stage.still_works()


def test_idle_row_leaves_at_once():
    """Without a commit under way each row is a commit of its own, carried by its own thread."""
    store = StagedStore()
    group = ThreadGroupCommit(store)
    threads = []
    store.before = lambda commit: threads.append(threading.current_thread())
    for number in range(3):
        run_sync(group.claim(_request(str(number))))
    assert store.kinds == [["claim"]] * 3
    assert threads == [threading.current_thread()] * 3


def test_claims_and_settlements_are_answered_in_the_order_of_their_rows():
    """Mixed rows share a commit, and each thread gets the answer to its own."""
    store = StagedStore()
    with Idempotency(store, caller="tester") as idem:
        hold = Hold()
        group = idem._calls._engine._writer
        operations = Hold()
        runners = [
            Worker(idem.run, f"runner {number}", operations, request=None) for number in range(3)
        ]
        operations.reached(3)
        commits_before = len(store.commits)
        arrived = [0]

        def before(commit) -> None:
            if not arrived[0]:
                arrived[0] = 1
                hold()

        store.before = before
        first = Worker(idem.run, "first", lambda: "first", request=None)
        hold.reached()
        operations.open()
        until(lambda: len(group._queue) == 3)
        claimers = [Worker(idem.run, f"claimer {n}", lambda n=n: n, request=None) for n in range(3)]
        until(lambda: len(group._queue) == 6)
        hold.open()
        assert [worker.result() for worker in claimers] == [0, 1, 2]
        assert first.result() == "first"
        for runner in runners:
            runner.result()
        merged = store.commits[commits_before + 1].kinds
        assert sorted(merged) == ["claim"] * 3 + ["complete"] * 3


@contextmanager
def _poisoned_sqlite(path):
    """A SQLite store that refuses the row of one key, by a trigger of the database itself."""
    store = SqliteStore(path)
    run_sync(store.migrate())
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TRIGGER poison BEFORE INSERT ON retrysafe_keys WHEN NEW.key = 'queued 2' "
        "BEGIN SELECT RAISE(ABORT, 'poisoned'); END"
    )
    connection.commit()
    connection.close()
    try:
        yield store
    finally:
        run_sync(store.close())


def test_poisoned_row_fails_alone(tmp_path):
    """One row that the database refuses is told so; its neighbours in the batch stand."""
    with _poisoned_sqlite(tmp_path / "keys.db") as sqlite:
        stage = Stage(StagedStore(sqlite))
        workers = stage.queue_up(5)
        stage.hold.open()
        errors = [worker.ended() for worker in workers]
        assert [type(error) for error in errors] == [
            type(None),
            type(None),
            StoreRejected,
            type(None),
            type(None),
        ]
        assert [len(commit.claims) for commit in stage.store.commits] == [1, 5]
        for number in (0, 1, 3, 4):
            stored = run_sync(sqlite.read(Key(f"queued {number}", caller="tester")))
            assert stored is not None
            assert stored.condition is Condition.RUNNING
        assert stage.still_works()


class Odd(StoreUnavailable):
    """The error of somebody else's store, with a constructor of its own."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Gone(StoreUnavailable, ConnectionError):
    """One that is an error of the system too, whose making is written in C."""


class Twisted(StoreUnavailable):
    """One that cannot be copied at all."""

    args = property(lambda self: 1 / 0)


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("the disk is gone", key="k"),
        OSError("odd"),
        Odd(7),
        Gone("cut off"),
        Twisted("twisted"),
    ],
)
def test_failed_commit_is_told_to_every_row(error):
    """Everybody in the batch hears of it, each by an error of its own."""
    stage = Stage()
    workers = stage.queue_up(4)

    def fail(commit) -> None:
        if len(commit.claims) > 1:
            raise error

    stage.then = fail
    stage.hold.open()
    errors = [worker.ended() for worker in workers]
    # The thread that carried the batch may see what the store raised; the others never do.
    told = [item for item in errors if item is not error]
    assert all(isinstance(item, StoreUnavailable) for item in told)
    # A copy of the store's error stands in for it; only another kind of error is told as a cause.
    cause = None if isinstance(error, StoreUnavailable) else error
    assert all(item.__cause__ is cause for item in told)
    for item in told:
        where = "".join(traceback.format_exception(item))
        assert "in fail" in where
        assert where.count(str(error)) == (2 if cause is not None else 1)
    assert len({id(item) for item in errors}) == 4
    assert stage.first.ended() is None
    assert stage.still_works()


def test_interrupted_carrier_leaves_nobody_hanging():
    """Ctrl-C hits the thread that carries the batch: it is raised there, the others are told."""
    stage = Stage()
    workers = stage.queue_up(4)

    def interrupt(commit) -> None:
        if len(commit.claims) > 1:
            raise KeyboardInterrupt

    stage.then = interrupt
    stage.hold.open()
    errors = [worker.ended() for worker in workers]
    assert [type(error) for error in errors] == [KeyboardInterrupt] + [StoreUnavailable] * 3
    assert stage.still_works()


def test_a_few_rows_of_threads_do_not_wait_for_each_other():
    """While few rows are under way, the next leaves beside them; with many, they merge."""
    store = _two_at_a_time(batch_limit=64)
    hold = Hold()
    store.before = hold
    group = ThreadGroupCommit(store)
    workers = [Worker(lambda n=n: run_sync(group.claim(_request(n)))) for n in ("one", "two")]
    hold.reached(2)
    late = [Worker(lambda n=n: run_sync(group.claim(_request(str(n))))) for n in range(FEW_ROWS)]
    until(lambda: len(group._queue) == FEW_ROWS)
    hold.open()
    for worker in (*workers, *late):
        assert worker.result().decision is Decision.ADMIT
    assert [len(commit.claims) for commit in store.commits] == [1, 1, FEW_ROWS]


def test_threads_leave_beside_a_batch_only_when_theirs_is_full(monkeypatch):
    """Rows that would make half a batch wait for the one under way, and merge meanwhile."""
    monkeypatch.setattr(group_commit.threads, "HELD_UP_SECONDS", 3600)
    monkeypatch.setattr(group_commit.threads, "FEW_ROWS", 1)
    stage = Stage(_two_at_a_time(batch_limit=4))
    second = Hold()
    stage.then = lambda commit: second()
    workers = stage.queue_up(3)
    assert [len(commit.claims) for commit in stage.store.commits] == [1]
    workers.append(Worker(stage.claim, "the fourth"))
    second.reached()
    assert [len(commit.claims) for commit in stage.store.commits] == [1, 4]
    # One of two is done, and what waits by then is not full: it waits for the other one.
    workers += stage.queue_up(2)
    stage.hold.open()
    assert stage.first.result().decision is Decision.ADMIT
    until(lambda: len(stage.group._carriers) == 1)
    assert [len(commit.claims) for commit in stage.store.commits] == [1, 4]
    second.open()
    assert [worker.result().decision for worker in workers] == [Decision.ADMIT] * 6
    assert [len(commit.claims) for commit in stage.store.commits] == [1, 4, 2]
    assert stage.still_works()


def test_a_batch_that_is_held_up_does_not_hold_up_other_threads(monkeypatch):
    """One connection that hangs must not be what every other key waits for."""
    monkeypatch.setattr(group_commit.threads, "HELD_UP_SECONDS", 0.001)
    monkeypatch.setattr(group_commit.threads, "FEW_ROWS", 1)
    stage = Stage(_two_at_a_time(batch_limit=64))
    others = [Worker(stage.claim, f"other {number}") for number in range(4)]
    for worker in others:
        assert worker.result().decision is Decision.ADMIT
    assert stage.first.is_alive()
    stage.hold.open()
    assert stage.first.result().decision is Decision.ADMIT
    assert stage.still_works()


def test_a_batch_that_is_held_up_is_waited_for_once(monkeypatch):
    """What comes later does not wait for it again, be it hung for as long as it likes."""
    monkeypatch.setattr(group_commit.threads, "HELD_UP_SECONDS", 0.001)
    monkeypatch.setattr(group_commit.threads, "FEW_ROWS", 1)
    stage = Stage(_two_at_a_time(batch_limit=64))
    assert Worker(stage.claim, "the first to wait").result().decision is Decision.ADMIT
    monkeypatch.setattr(group_commit.threads, "HELD_UP_SECONDS", 3600)
    second = Hold()
    stage.then = lambda commit: second() if commit.claims[0].key.text == "second" else None
    later = [Worker(stage.claim, "second")]
    second.reached()
    # Handed over to beside the one that hangs, and not only met by one who just comes.
    later += stage.queue_up(3)
    second.open()
    for worker in later:
        assert worker.result().decision is Decision.ADMIT
    assert stage.first.is_alive()
    stage.hold.open()
    assert stage.first.result().decision is Decision.ADMIT
    assert stage.still_works()


def test_who_has_seen_a_batch_leave_goes_on_waiting():
    """What moves is not held up, however long one of many waits for its turn."""
    group = ThreadGroupCommit(_two_at_a_time(batch_limit=64))
    carrier, waiting = (
        group_commit.threads._QueuedRow(_request(name)) for name in ("carried", "waiting")
    )
    group._board(carrier)
    group._queue.append(waiting)

    class Gate:
        """Opens at the second try; by the first, another batch has left."""

        def __init__(self) -> None:
            self.tries = 0

        def acquire(self, timeout: float = -1) -> bool:
            self.tries += 1
            group._departures += 1
            return self.tries == 2

    gate = Gate()
    group._wait(waiting, gate)
    assert gate.tries == 2
    assert waiting.batch is None
    assert not carrier.is_held_up


def _two_at_a_time(batch_limit: int) -> StagedStore:
    store = StagedStore()
    store.capabilities = Capabilities(Waits.BLOCKING, batch_limit=batch_limit, batches_in_flight=2)
    return store


class _Interrupt(BaseException):
    """Raised by a signal, as KeyboardInterrupt is."""


@contextmanager
def _interruptible():
    """SIGUSR1 raises in the main thread."""

    def raise_it(*_: object) -> None:
        raise _Interrupt

    previous = signal.signal(signal.SIGUSR1, raise_it)
    try:
        yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_interrupted_follower_takes_its_row_back():
    """A thread that is interrupted while its row still waits leaves; the row is never sent."""
    stage = Stage()
    before = stage.queue_up(1)
    with _interruptible() as interrupt:

        def interrupt_when_queued() -> None:
            stage.wait_for_queue(2)
            interrupt()

        sender = Worker(interrupt_when_queued)
        with pytest.raises(_Interrupt):
            stage.claim("interrupted")
        sender.result()
    after = stage.queue_up(1)
    stage.hold.open()
    for worker in (*before, *after):
        assert worker.result().decision is Decision.ADMIT
    sent = [[request.key.text for request in commit.claims] for commit in stage.store.commits]
    assert sent == [["first"], ["queued 0", "queued 1"]]
    assert stage.still_works()


def test_follower_interrupted_while_its_row_travels_leaves_it_to_stand():
    """The row is in a commit already: the thread leaves, the row and its neighbours stand."""
    stage = Stage()
    carrier = stage.queue_up(1)
    travelling = Hold()

    def hold_second(commit) -> None:
        if len(commit.claims) > 1:
            travelling()

    stage.then = hold_second
    with _interruptible() as interrupt:

        def interrupt_when_travelling() -> None:
            stage.wait_for_queue(2)
            stage.hold.open()
            travelling.reached()
            interrupt()

        sender = Worker(interrupt_when_travelling)
        with pytest.raises(_Interrupt):
            stage.claim("interrupted")
        sender.result()
    travelling.open()
    assert carrier[0].result().decision is Decision.ADMIT
    stored = run_sync(stage.store.inner.read(Key("interrupted", caller="tester")))
    assert stored is not None
    assert stage.still_works()


class _InterruptedGate:
    """A lock whose second acquire is interrupted just as it succeeds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acquired = 0

    def acquire(self, timeout: float = -1) -> bool:
        is_acquired = self._lock.acquire(timeout=timeout)
        self._acquired += is_acquired
        if self._acquired == 2:
            raise KeyboardInterrupt
        return is_acquired

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()


def test_follower_interrupted_as_it_becomes_the_carrier_gives_the_turn_on(monkeypatch):
    """A batch was handed to a thread in the instant of its interrupt: its rows are told."""
    stage = Stage()
    with monkeypatch.context() as patched:
        locks = iter([threading.Lock(), _InterruptedGate()])  # That it is here, and its gate.
        parts = SimpleNamespace(Lock=locks.__next__, get_ident=threading.get_ident)
        patched.setattr(group_commit.threads, "threading", parts)
        interrupted = Worker(stage.claim, "interrupted")
        stage.wait_for_queue(1)
    workers = stage.queue_up(2)
    stage.hold.open()
    assert isinstance(interrupted.ended(), KeyboardInterrupt)
    assert [type(worker.ended()) for worker in workers] == [StoreUnavailable] * 2
    assert [len(commit.claims) for commit in stage.store.commits] == [1]
    assert stage.still_works()


class _InterruptAtLine:
    """Raises KeyboardInterrupt at the n-th line of a thread in group_commit/threads.py."""

    def __init__(self, fatal: int) -> None:
        self._fatal = fatal
        self._lines = 0
        self._entered: set[tuple[object, int]] = set()
        self.struck: int | None = None

    def __call__(self, frame, event: str, arg: object):
        if frame.f_code.co_filename != group_commit.threads.__file__:
            return None
        if event == "line" and not self._is_lock_release(frame):
            self._lines += 1
            if self._lines == self._fatal:
                self.struck = frame.f_lineno
                raise KeyboardInterrupt
        return self

    def _is_lock_release(self, frame) -> bool:
        """The second visit of a `with` line: a signal is not delivered before the release."""
        place = (frame, frame.f_lineno)
        is_with = linecache.getline(group_commit.threads.__file__, frame.f_lineno).strip() == (
            "with self._lock:"
        )
        is_second = place in self._entered
        self._entered.add(place)
        return is_with and is_second


@pytest.mark.parametrize("role", ["carrier", "follower", "second carrier", "lookout"])
def test_interrupt_at_any_line_leaves_nobody_hanging(role, monkeypatch):
    """Interrupted at the n-th line for n = 1, 2, 3 … until none is left: others always go on."""
    seconds = 0.001 if role == "lookout" else 3600
    monkeypatch.setattr(group_commit.threads, "HELD_UP_SECONDS", seconds)
    # One row under way is no longer few, so that the next ones wait behind it.
    monkeypatch.setattr(group_commit.threads, "FEW_ROWS", 1)
    for fatal in range(1, 200):
        if not _strike(role, fatal):
            break
    else:
        pytest.fail("there is no end of lines")
    # Both roles pass through more lines than this; fewer would mean that hardly any was struck.
    assert fatal > 20


_BESIDE = ("second carrier", "lookout")


def _struck(stage: Stage, strike: _InterruptAtLine) -> Worker:
    """A thread whose claim is interrupted."""

    def claim():
        sys.settrace(strike)
        try:
            return stage.claim("interrupted")
        finally:
            sys.settrace(None)

    return Worker(claim)


def _strike(role: str, fatal: int) -> bool:
    """Whether there was such a line; checks that everybody else went on."""
    stage = Stage(_two_at_a_time(batch_limit=3) if role in _BESIDE else None)
    queued = []
    if role == "carrier":
        stage.hold.open()
        stage.first.result()
    elif role in _BESIDE:
        queued = stage.queue_up(2) if role == "second carrier" else []
    strike = _InterruptAtLine(fatal)

    interrupted = _struck(stage, strike)
    if role == "follower":
        until(lambda: stage.group._queue or strike.struck or not interrupted.is_alive())
    if role in _BESIDE:
        interrupted.ended()  # It does not wait for the first one.
    others = [Worker(stage.claim, f"other {number}") for number in range(3)]
    stage.hold.open()
    error = interrupted.ended()
    told = {type(item.ended()) for item in (*queued, *others)}
    assert told <= {type(None), StoreUnavailable}
    assert stage.first.ended() is None
    assert stage.still_works()
    assert stage.group._carriers == set()
    assert stage.group._queue == []
    assert (strike.struck is None) == (error is None)
    assert error is None or isinstance(error, KeyboardInterrupt)
    sent = [request.key.text for commit in stage.store.commits for request in commit.claims]
    assert len(sent) == len(set(sent))
    return strike.struck is not None


class _InterruptLeaving(_InterruptAtLine):
    """Raises at the n-th line of what a thread does on its way out."""

    def __call__(self, frame, event: str, arg: object):
        if frame.f_code.co_name not in ("_leave", "_hand_over", "_wake"):
            return None
        return super().__call__(frame, event, arg)


def test_a_second_interrupt_on_the_way_out_leaves_nobody_hanging():
    """Whoever holds Ctrl-C down interrupts the clearing up as well."""
    for fatal in range(1, 200):
        stage = Stage()
        strike = _InterruptLeaving(fatal)
        interrupted, others = _interrupted_twice(stage, strike)
        assert isinstance(interrupted.ended(), KeyboardInterrupt)
        assert {type(item.ended()) for item in others} <= {type(None), StoreUnavailable}
        assert stage.still_works()
        if strike.struck is None:
            break
    else:
        pytest.fail("there is no end of lines")
    assert fatal > 10


def _interrupted_twice(stage: Stage, strike: _InterruptAtLine) -> tuple[Worker, list[Worker]]:
    """A carrier whose commit is interrupted, and which is struck again as it leaves."""

    def interrupt(commit) -> None:
        if commit.claims[0].key.text == "interrupted":
            hold()
            raise KeyboardInterrupt

    hold, stage.then = Hold(), interrupt
    stage.hold.open()
    stage.first.result()
    interrupted = _struck(stage, strike)
    hold.reached()
    others = stage.queue_up(3)
    hold.open()
    return interrupted, others


class _LetsInFirst:
    """A lock that lets somebody else come first, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.before_next = None

    def __enter__(self) -> None:
        before, self.before_next = self.before_next, None
        if before is not None:
            before()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_row_is_sent_once_though_its_carrier_to_be_was_not_told(monkeypatch):
    """A signal strikes as the queue is handed over, and a newcomer takes it along instead."""
    monkeypatch.setattr(group_commit.threads, "HELD_UP_SECONDS", 3600)
    monkeypatch.setattr(group_commit.threads, "FEW_ROWS", 1)
    for fatal in range(1, 200):
        stage = Stage(_two_at_a_time(batch_limit=3))
        stage.group._lock = _LetsInFirst()
        newcomers = []

        def join_in(stage=stage, newcomers=newcomers) -> None:
            commits = len(stage.store.commits)
            newcomers.append(Worker(stage.claim, "newcomer"))
            until(lambda: len(stage.store.commits) > commits or len(stage.group._queue) != 2)

        strike = _InterruptHandingOver(fatal, stage.group._lock, join_in)
        interrupted, others = _leaving_behind(stage, strike)
        interrupted.ended()
        for worker in (*others, *newcomers):
            worker.ended()
        sent = [request.key.text for commit in stage.store.commits for request in commit.claims]
        assert len(sent) == len(set(sent)), sent
        assert stage.still_works()
        if strike.struck is None:
            break
    assert fatal > 5


class _InterruptHandingOver(_InterruptAtLine):
    """Raises at the n-th line of the hand-over, and then has somebody come first."""

    def __init__(self, fatal: int, lock: _LetsInFirst, join_in) -> None:
        super().__init__(fatal)
        self._lock = lock
        self._join_in = join_in

    def __call__(self, frame, event: str, arg: object):
        if frame.f_code.co_name != "_hand_over" or self.struck is not None:
            return None
        try:
            return super().__call__(frame, event, arg)
        except KeyboardInterrupt:
            self._lock.before_next = self._join_in
            raise


def _leaving_behind(stage: Stage, strike: _InterruptAtLine) -> tuple[Worker, list[Worker]]:
    """A carrier that is struck as it hands over, with two rows that wait behind it."""
    hold = Hold()
    stage.then = lambda commit: hold() if commit.claims[0].key.text == "interrupted" else None
    stage.hold.open()
    stage.first.result()

    interrupted = _struck(stage, strike)
    hold.reached()
    others = stage.queue_up(2)
    hold.open()
    return interrupted, others


# The same among the tasks of an event loop.


class TaskStage:
    """A group commit of tasks whose first commit is held up."""

    def __init__(self, batch_limit: int = 64) -> None:
        self.store = StagedStore(waits=Waits.SUSPENDING, batch_limit=batch_limit)
        self.group = TaskGroupCommit(self.store, asyncio.get_running_loop())
        self.hold = TaskHold()
        self.then = None
        self.store.before = self._before

    async def begin(self) -> asyncio.Task:
        first = asyncio.create_task(self.claim("first"))
        await self.hold.reached()
        return first

    def _before(self, commit) -> object:
        if len(self.store.commits) == 1:
            return self.hold()
        return None if self.then is None else self.then(commit)

    async def claim(self, name: str):
        return await self.group.claim(_request(name))

    async def queue_up(self, count: int) -> list[asyncio.Task]:
        tasks = [asyncio.create_task(self.claim(f"queued {number}")) for number in range(count)]
        await turns()
        assert len(self.group._claims) == count
        return tasks


def test_tasks_that_are_ready_together_share_the_first_commit():
    """What other tasks add in the same turn of the loop comes along: no row waits for a timer."""

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        group = TaskGroupCommit(store, asyncio.get_running_loop())

        async def claim(name: str):
            return await group.claim(_request(name))

        answers = await asyncio.gather(*(claim(str(number)) for number in range(10)))
        assert [answer.decision for answer in answers] == [Decision.ADMIT] * 10
        assert [len(commit.claims) for commit in store.commits] == [10]
        await group.drain()

    drive(main())


class _Begun:
    """The rest of a coroutine that has run up to its first wait."""

    def __init__(self, flow, wanted) -> None:
        self._flow, self._wanted = flow, wanted

    def __await__(self):
        wanted = self._wanted
        try:
            while True:
                try:
                    value = yield wanted
                except BaseException as error:
                    wanted = self._flow.throw(error)
                else:
                    wanted = self._flow.send(value)
        except StopIteration as stop:
            return stop.value


def begin_at_once(loop, flow, **kwargs) -> asyncio.Task:
    """Makes a task as the eager factory of newer Pythons does: its first step is made here."""

    async def rest():
        return await _Begun(flow, wanted)

    async def ended():
        return result

    try:
        wanted = flow.send(None)
    except StopIteration as stop:
        result = stop.value
        return asyncio.Task(ended(), loop=loop, **kwargs)
    return asyncio.Task(rest(), loop=loop, **kwargs)


def test_a_loop_may_begin_its_tasks_at_once():
    """Rows are answered, and none is carried twice, when a batch leaves while it is begun."""

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        asyncio.get_running_loop().set_task_factory(begin_at_once)
        rows = [group.claim(_request(str(number))) for number in range(20)]
        answers = await asyncio.wait_for(asyncio.gather(*rows), 10)
        assert [answer.decision for answer in answers] == [Decision.ADMIT] * 20
        assert sum(len(commit.claims) for commit in store.commits) == 20
        await group.drain()
        assert (group._batches_count, group._rows_under_way) == (0, 0)

    drive(main())


def test_batches_of_a_store_that_answers_at_once_do_not_begin_within_each_other():
    """Where tasks begin at once, each batch would end in the one before it, down to no stack."""

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING, batch_limit=1)
        hold = TaskHold()
        store.before = lambda commit: hold() if len(store.commits) == 1 else None
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        asyncio.get_running_loop().set_task_factory(begin_at_once)
        count = sys.getrecursionlimit()
        rows = [group.claim(_request(str(number))) for number in range(count)]
        await turns()
        hold.open()
        answers = await asyncio.wait_for(asyncio.gather(*rows), PATIENCE_SECONDS)
        assert [answer.decision for answer in answers] == [Decision.ADMIT] * count
        await group.drain()

    drive(main())


def test_rows_stand_and_are_told_though_the_next_batch_cannot_leave(monkeypatch):
    """Nobody waits for ever for what the store has done; and the group goes on with the next."""

    async def main() -> None:
        stage = TaskStage()
        first = stage.group.claim(_request("first"))
        await stage.hold.reached()
        (behind,) = await stage.queue_up(1)
        with monkeypatch.context() as patched:

            def refuse(flow, **_: object) -> None:
                flow.close()
                raise MemoryError

            patched.setattr(group_commit.tasks.asyncio, "Task", refuse)
            stage.hold.open()
            answer = await asyncio.wait_for(first, PATIENCE_SECONDS)
        assert answer.decision is Decision.ADMIT
        later = stage.group.claim(_request("later"))
        answers = await asyncio.wait_for(asyncio.gather(behind, later), PATIENCE_SECONDS)
        assert [answer.decision for answer in answers] == [Decision.ADMIT] * 2
        await stage.group.drain()
        assert (stage.group._batches_count, stage.group._is_boarding) == (0, False)

    drive(main())


def test_rows_of_tasks_that_wait_leave_together():
    """Thirty rows behind one commit leave in batches of the store's limit."""

    async def main() -> None:
        stage = TaskStage(batch_limit=16)
        first = await stage.begin()
        tasks = await stage.queue_up(30)
        stage.hold.open()
        answers = await asyncio.gather(first, *tasks)
        assert [answer.decision for answer in answers] == [Decision.ADMIT] * 31
        assert [len(commit.claims) for commit in stage.store.commits] == [1, 16, 14]
        await stage.group.drain()

    drive(main())


@pytest.mark.parametrize(
    "error", [StoreUnavailable("down"), OSError("odd"), Odd(7), Gone("cut off"), Twisted("twisted")]
)
def test_failed_commit_is_told_to_every_task(error):
    """Each task gets its own StoreUnavailable, and the next commit works."""
    kind = type(error) if isinstance(error, Odd | Gone) else StoreUnavailable

    async def main() -> None:
        stage = TaskStage()
        first = await stage.begin()
        tasks = await stage.queue_up(4)

        def fail(commit) -> None:
            raise error

        stage.then = fail
        stage.hold.open()
        errors = [await raised(task) for task in tasks]
        assert [type(item) for item in errors] == [kind] * 4
        assert len({id(item) for item in errors}) == 4
        if isinstance(error, Odd):
            assert [(item.code, str(item)) for item in errors] == [(7, "code 7")] * 4
        assert (await first).decision is Decision.ADMIT
        stage.then = None
        assert (await stage.claim("later")).decision is Decision.ADMIT
        await stage.group.drain()

    drive(main())


def test_cancelled_task_does_not_disturb_its_batch():
    """One of the waiting tasks is cancelled: the others are answered as ever."""

    async def main() -> None:
        stage = TaskStage()
        first = await stage.begin()
        tasks = await stage.queue_up(3)
        tasks[1].cancel()
        stage.hold.open()
        assert isinstance(await raised(tasks[1]), asyncio.CancelledError)
        for task in (first, tasks[0], tasks[2]):
            assert (await task).decision is Decision.ADMIT
        await stage.group.drain()

    drive(main())


class Unwanted(TaskStage):
    """A held commit with a claim in it that is let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.request = _request("unwanted")

    async def leave(self) -> None:
        """Its caller goes while it is on its way."""
        waiting = self.group.claim(self.request)
        await self.hold.reached()
        self.group.let_go(self.request.key)
        waiting.cancel()

    @property
    def released(self) -> list[bytes]:
        return [
            item.token
            for commit in self.store.commits
            for item in commit.settlements
            if item.kind is SettleKind.RELEASE
        ]


def test_a_claim_that_was_let_go_is_given_back_before_the_next_one_leaves():
    """The key is as new to whoever waits for it; the others in its batch keep their claims."""

    async def main() -> None:
        stage = Unwanted()
        beside = stage.group.claim(_request("beside"))
        await stage.leave()
        # An equal key, and another call.
        again = stage.group.claim(_request("unwanted"))
        stage.hold.open()
        assert (await beside).decision is Decision.ADMIT
        answer = await again
        assert (answer.decision, answer.attempt) == (Decision.ADMIT, 1)
        assert stage.released == [stage.request.token]
        await stage.group.drain()

    drive(main())


def test_a_claim_of_an_equal_key_is_not_given_back_with_it():
    """Two calls of one key are on their way: the one that was granted is wanted."""

    async def main() -> None:
        stage = Unwanted()
        wanted = stage.group.claim(_request("unwanted"))
        await stage.leave()
        stage.hold.open()
        assert (await wanted).decision is Decision.ADMIT
        await stage.group.drain()
        assert stage.released == []

    drive(main())


def test_draining_waits_for_what_is_given_back():
    """A process that ends leaves no key behind that nobody runs."""

    async def main() -> None:
        stage = Unwanted()
        await stage.leave()
        stage.hold.open()
        await stage.group.drain()
        assert stage.released == [stage.request.token]

    drive(main())


def test_a_claim_is_given_back_that_was_granted_just_before():
    """Its caller is cancelled between the answer and its own next turn, and never sees it."""

    async def main() -> None:
        stage = Unwanted()
        waiting = stage.group.claim(stage.request)
        waiting.add_done_callback(lambda _: stage.group.let_go(stage.request.key))
        await stage.hold.reached()
        stage.hold.open()
        await stage.group.drain()
        assert waiting.result().decision is Decision.ADMIT
        assert stage.released == [stage.request.token]

    drive(main())


def test_nothing_is_given_back_that_was_not_newly_granted():
    """Neither somebody else's claim, nor one that goes on with earlier attempts: releasing those
    one after the other would use up the attempts."""

    async def main() -> None:
        for kind, condition in (
            (None, Condition.RUNNING),
            (SettleKind.RELEASE, Condition.RUNNING),
            (SettleKind.COMPLETE, Condition.SUCCEEDED),
        ):
            stage = Unwanted()
            earlier = _request("unwanted")
            await stage.store.inner.commit([earlier], [])
            if kind is not None:
                ending = Settlement(kind, earlier.key, earlier.token, active_ms=60_000)
                await stage.store.inner.commit([], [ending])
            await stage.leave()
            stage.hold.open()
            await stage.group.drain()
            assert stage.released == []
            assert (await stage.store.inner.read(earlier.key)).condition is condition

    drive(main())


@pytest.mark.parametrize("fails", ["claim", "release"])
def test_a_store_that_fails_leaves_an_unwanted_claim_to_its_lease(fails, caplog):
    """Nobody is asked twice, and nobody is told of an error that is nobody's."""

    async def main() -> None:
        stage = Unwanted()

        def fail(commit) -> None:
            raise StoreUnavailable("down")

        if fails == "claim":
            stage.store.after = fail
        stage.then = fail
        await stage.leave()
        stage.hold.open()
        await stage.group.drain()
        assert len(stage.store.commits) == (1 if fails == "claim" else 2)
        gc.collect()

    drive(main())
    assert caplog.records == []


def test_a_store_that_miscounts_holds_nobody_up(caplog):
    """Its answers are nobody's, also for a claim that was let go; the rows behind them go on."""

    async def main() -> None:
        stage = Unwanted()
        commit = stage.store.commit

        async def miscounting(claims, settlements):
            claimed, settled = await commit(claims, settlements)
            is_first = len(stage.store.commits) == 1
            return [*claimed, *claimed] if is_first else claimed, settled

        stage.store.commit = miscounting
        beside = stage.group.claim(_request("beside"))
        await stage.leave()
        behind = asyncio.create_task(stage.claim("behind"))
        await turns()
        stage.hold.open()
        with pytest.raises(StoreUnavailable, match="4 answers to 2 rows"):
            await beside
        assert (await asyncio.wait_for(behind, 10)).decision is Decision.ADMIT
        assert stage.released == []

    drive(main())
    assert caplog.records == []


def test_a_few_rows_do_not_wait_for_each_other():
    """While few rows are under way, each leaves at once; with many, they merge again."""

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(Waits.SUSPENDING, small_batches_in_flight=3)
        hold = TaskHold()
        store.before = hold
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        rows = []
        for name in ("first", "second", "third", "fourth", "fifth"):
            rows.append(group.claim(_request(name)))
            await turns()
        assert [len(commit.claims) for commit in store.commits] == [1, 1, 1]
        hold.open()
        await asyncio.gather(*rows)
        assert [len(commit.claims) for commit in store.commits] == [1, 1, 1, 2]
        await group.drain()

    drive(main())


def test_a_batch_that_is_held_up_does_not_hold_up_the_others(monkeypatch):
    """One connection that hangs must not be what every other key waits for."""
    monkeypatch.setattr(group_commit.tasks, "HELD_UP_SECONDS", 0)

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(Waits.SUSPENDING, batch_limit=8, batches_in_flight=2)
        hold = TaskHold()
        store.before = lambda commit: hold() if len(store.commits) == 1 else None
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        first = [group.claim(_request(f"first {number}")) for number in range(FEW_ROWS)]
        await hold.reached()
        others = [group.claim(_request(f"other {number}")) for number in range(4)]
        await asyncio.wait_for(asyncio.gather(*others), PATIENCE_SECONDS)
        assert [len(commit.claims) for commit in store.commits] == [FEW_ROWS, 4]
        assert not any(row.done() for row in first)
        hold.open()
        await asyncio.gather(*first)
        await group.drain()

    drive(main())


def test_a_batch_of_tasks_that_is_held_up_is_waited_for_once(monkeypatch):
    """What comes later leaves at once beside it, and waits only for what is not held up."""
    monkeypatch.setattr(group_commit.tasks, "HELD_UP_SECONDS", 0)

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(
            Waits.SUSPENDING, batch_limit=8, batches_in_flight=2, small_batches_in_flight=3
        )
        hung, second = TaskHold(), TaskHold()
        holds = {1: hung, 3: second}
        store.before = lambda commit: (
            holds[len(store.commits)]() if len(store.commits) in holds else None
        )
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        first = [group.claim(_request(f"first {number}")) for number in range(FEW_ROWS)]
        await hung.reached()
        await asyncio.wait_for(group.claim(_request("the first to wait")), PATIENCE_SECONDS)
        monkeypatch.setattr(group_commit.tasks, "HELD_UP_SECONDS", 3600)
        later = [group.claim(_request(f"second {number}")) for number in range(FEW_ROWS)]
        await second.reached()
        later += [group.claim(_request(f"third {number}")) for number in range(2)]
        await turns()
        assert [len(commit.claims) for commit in store.commits] == [FEW_ROWS, 1, FEW_ROWS]
        second.open()
        await asyncio.wait_for(asyncio.gather(*later), PATIENCE_SECONDS)
        assert [len(commit.claims) for commit in store.commits] == [FEW_ROWS, 1, FEW_ROWS, 2]
        hung.open()
        await asyncio.gather(*first)
        await group.drain()
        # Nothing is left of it in the counts: few rows do not wait, and many do.
        holds |= {5: TaskHold(), 6: TaskHold()}
        last = [group.claim(_request("fourth"))]
        await holds[5].reached()
        last += [group.claim(_request(f"fifth {number}")) for number in range(FEW_ROWS - 1)]
        await asyncio.wait_for(holds[6].reached(), PATIENCE_SECONDS)
        last.append(group.claim(_request("sixth")))
        await turns()
        assert len(store.commits) == 6
        holds[5].open()
        holds[6].open()
        await asyncio.gather(*last)
        await group.drain()
        assert (group._batches_count, group._held_up_count, group._rows_under_way) == (0, 0, 0)

    drive(main())


def test_a_second_batch_leaves_beside_the_first_only_when_it_is_full(monkeypatch):
    """Rows that would make half a batch wait for the one under way, and merge meanwhile."""
    monkeypatch.setattr(group_commit.tasks, "HELD_UP_SECONDS", 3600)

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(Waits.SUSPENDING, batch_limit=8, batches_in_flight=2)
        hold = TaskHold()
        store.before = hold
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        rows = [group.claim(_request("first"))]
        await turns()
        rows += [group.claim(_request(f"early {number}")) for number in range(7)]
        await turns()
        assert [len(commit.claims) for commit in store.commits] == [1]
        rows.append(group.claim(_request("the eighth")))
        await turns()
        assert [len(commit.claims) for commit in store.commits] == [1, 8]
        rows += [group.claim(_request(f"late {number}")) for number in range(8)]
        await turns()
        assert [len(commit.claims) for commit in store.commits] == [1, 8]
        hold.open()
        await asyncio.gather(*rows)
        assert [len(commit.claims) for commit in store.commits] == [1, 8, 8]
        await group.drain()

    drive(main())


def test_a_full_batch_keeps_the_others_waiting():
    """With many rows under way, the store's ordinary limit of batches holds."""

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(Waits.SUSPENDING, small_batches_in_flight=3)
        hold = TaskHold()
        store.before = hold
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        rows = [group.claim(_request(f"early {number}")) for number in range(FEW_ROWS)]
        await turns()
        rows.append(group.claim(_request("late")))
        await turns()
        assert [len(commit.claims) for commit in store.commits] == [FEW_ROWS]
        hold.open()
        await asyncio.gather(*rows)
        assert [len(commit.claims) for commit in store.commits] == [FEW_ROWS, 1]
        await group.drain()

    drive(main())


@pytest.mark.parametrize("is_at_once", [False, True], ids=["in a later turn", "at once"])
def test_replays_leave_in_two_batches_side_by_side(is_at_once):
    """What is only read gains nothing by leaving together: one half is served beside the other.

    Only many, and only where the store takes two batches; new keys share one flush again at once.
    A store that answers in the same turn is done with one half before the other leaves, which is
    parted once more.
    """

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(Waits.SUSPENDING, batch_limit=128, batches_in_flight=2)
        store.after = lambda commit: None if is_at_once else asyncio.sleep(0)
        group = TaskGroupCommit(store, asyncio.get_running_loop())

        async def run(name: str) -> None:
            request = _request(name)
            await group.claim(request)
            ending = Settlement(SettleKind.COMPLETE, request.key, request.token, active_ms=1000)
            await group.settle(ending)

        async def sizes(count: int, prefix: str = "") -> list[int]:
            store.commits.clear()
            claims = [group.claim(_request(f"{prefix}{number}")) for number in range(count)]
            answers = await asyncio.gather(*claims)
            assert {answer.decision for answer in answers} == {
                Decision.ADMIT if prefix else Decision.REPLAY
            }
            return [len(commit.claims) for commit in store.commits]

        many = 2 * REPLAYS_SHARE + 10
        await asyncio.gather(*(run(str(number)) for number in range(many)))
        assert await sizes(many) == [many]  # Nobody knows yet that they are replays.
        parts = [many // 2, REPLAYS_SHARE, 5] if is_at_once else [many // 2, many // 2]
        assert await sizes(many) == parts
        assert await sizes(REPLAYS_SHARE + 4) == [REPLAYS_SHARE, 4]
        assert await sizes(REPLAYS_SHARE) == [REPLAYS_SHARE]
        assert await sizes(many, "new ") == [many // 2, many // 2]
        assert await sizes(many, "newer ") == [many]
        await group.drain()

    drive(main())


# Who is told when, so that the tasks work while the store works.


def test_the_next_batch_leaves_before_those_of_the_last_one_go_on():
    """They have work to do, and what waits behind them need not wait for that as well.

    They are told in the turn after, because some loops write at the end of a turn only.
    """

    async def main() -> None:
        stage = TaskStage()
        first = stage.group.claim(_request("first"))
        await stage.hold.reached()
        tasks = await stage.queue_up(3)
        told: list[bool] = []
        stage.then = lambda commit: told.append(first.done())
        stage.hold.open()
        await asyncio.gather(first, *tasks)
        assert told == [False]
        await stage.group.drain()

    drive(main())


class Halves:
    """Tasks that claim together and then settle, over a store that holds their endings up."""

    def __init__(self, count: int, batches_in_flight: int = 2) -> None:
        self.store = StagedStore(waits=Waits.SUSPENDING)
        self.store.capabilities = Capabilities(
            Waits.SUSPENDING, batch_limit=128, batches_in_flight=batches_in_flight
        )
        self.group = TaskGroupCommit(self.store, asyncio.get_running_loop())
        self.hold = TaskHold()
        self.requests = [_request(str(number)) for number in range(count)]
        self.claims: list[asyncio.Future] = []
        # The claims that were answered, by the commit that came next.
        self.told: list[int] = []
        self.store.before = self._before

    def _before(self, commit) -> object:
        self.told.append(sum(claim.done() for claim in self.claims))
        return None if commit.claims else self.hold()

    async def _run(self, request: ClaimRequest, claim: asyncio.Future) -> None:
        await claim
        ending = Settlement(SettleKind.COMPLETE, request.key, request.token, active_ms=1000)
        await self.group.settle(ending)

    def begin(self) -> list[asyncio.Task]:
        self.claims = [self.group.claim(request) for request in self.requests]
        pairs = zip(self.requests, self.claims, strict=True)
        return [asyncio.create_task(self._run(request, claim)) for request, claim in pairs]

    @property
    def sizes(self) -> list[int]:
        return [len(commit.claims) + len(commit.settlements) for commit in self.store.commits]

    @property
    def counts(self) -> tuple[int, ...]:
        """What the group counts of its batches; nothing, once all have ended."""
        group = self.group
        return group._batches_count, group._held_up_count, group._rows_under_way


def test_those_of_a_large_batch_go_on_in_two_halves():
    """What the first half writes is on its way when the second half begins, which leaves beside."""

    async def main() -> None:
        halves = Halves(SPLIT_ROWS)
        tasks = halves.begin()
        await halves.hold.reached()
        await turns()
        assert halves.sizes == [SPLIT_ROWS, SPLIT_ROWS // 2, SPLIT_ROWS // 2]
        assert halves.told == [0, SPLIT_ROWS // 2, SPLIT_ROWS]
        halves.hold.open()
        await asyncio.gather(*tasks)
        await halves.group.drain()
        assert halves.counts == (0, 0, 0)

    drive(main())


def test_everybody_hears_its_own_answer_in_whichever_half():
    """Somebody's claim told to another would run an operation twice."""

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(Waits.SUSPENDING, batch_limit=128, batches_in_flight=2)
        commit = store.commit
        refusal = StoreRejected("too large")

        async def refusing(claims, settlements):
            claimed, settled = await commit(claims, settlements)
            return [*claimed[:-1], refusal], settled

        store.commit = refusing
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        held = [_request(f"held {number}") for number in range(SPLIT_ROWS)]
        taken = [_request(f"claim {number}") for number in range(0, SPLIT_ROWS, 3)]
        await store.inner.commit([*held, *taken], [])
        endings = [
            group.settle(
                Settlement(
                    SettleKind.COMPLETE,
                    request.key,
                    os.urandom(16) if number % 4 == 0 else request.token,
                    active_ms=1000,
                )
            )
            for number, request in enumerate(held)
        ]
        claims = [group.claim(_request(f"claim {number}")) for number in range(SPLIT_ROWS)]
        told = [raised(row) if row is claims[-1] else row for row in (*endings, *claims)]
        answers = await asyncio.gather(*told)
        assert len(store.commits) == 1
        assert [answer.decision for answer in answers[:SPLIT_ROWS]] == [
            Decision.LOST if number % 4 == 0 else Decision.APPLY for number in range(SPLIT_ROWS)
        ]
        assert [answer.decision for answer in answers[SPLIT_ROWS:-1]] == [
            Decision.IN_FLIGHT if number % 3 == 0 else Decision.ADMIT
            for number in range(SPLIT_ROWS - 1)
        ]
        assert answers[-1] is refusal
        await group.drain()

    drive(main())


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside another"])
def test_only_a_batch_that_is_alone_is_told_in_halves(monkeypatch, is_beside):
    """While another one is with the store, there is no rest to be avoided."""
    monkeypatch.setattr(group_commit.tasks, "HELD_UP_SECONDS", 3600)

    async def main() -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(Waits.SUSPENDING, batch_limit=128, batches_in_flight=2)
        holds = [TaskHold(), TaskHold()]
        store.before = lambda commit: holds[len(store.commits) - 1]()
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        rows = [group.claim(_request(f"first {number}")) for number in range(SPLIT_ROWS)]
        await holds[0].reached()
        others = []
        if is_beside:
            others = [group.claim(_request(f"second {number}")) for number in range(SPLIT_ROWS)]
            await holds[1].reached()
        told: list[int] = []
        rows[0].add_done_callback(lambda _: told.append(sum(row.done() for row in rows)))
        holds[0].open()
        await asyncio.gather(*rows)
        assert told == [SPLIT_ROWS if is_beside else SPLIT_ROWS // 2]
        holds[1].open()
        await asyncio.gather(*others)
        await group.drain()

    drive(main())


@pytest.mark.parametrize(
    ("count", "batches_in_flight"), [(SPLIT_ROWS - 1, 2), (SPLIT_ROWS, 1)], ids=["small", "alone"]
)
def test_what_would_gain_nothing_by_it_stays_one_batch(count, batches_in_flight):
    """A small batch costs by itself; and a store that takes one at a time takes one half only."""

    async def main() -> None:
        halves = Halves(count, batches_in_flight)
        tasks = halves.begin()
        halves.hold.open()
        await asyncio.gather(*tasks)
        assert halves.sizes == [count, count]
        await halves.group.drain()

    drive(main())


def test_a_batch_as_large_as_those_under_way_leaves_beside_them(monkeypatch):
    """One row less waits for them, and so does a small one whatever is under way."""
    monkeypatch.setattr(group_commit.tasks, "HELD_UP_SECONDS", 3600)

    async def main(under_way: int, needed: int) -> None:
        store = StagedStore(waits=Waits.SUSPENDING)
        store.capabilities = Capabilities(Waits.SUSPENDING, batch_limit=128, batches_in_flight=2)
        hold = TaskHold()
        store.before = hold
        group = TaskGroupCommit(store, asyncio.get_running_loop())
        rows = [group.claim(_request(f"first {number}")) for number in range(under_way)]
        await turns()
        rows += [group.claim(_request(f"second {number}")) for number in range(needed - 1)]
        await turns()
        assert [len(commit.claims) for commit in store.commits] == [under_way]
        rows.append(group.claim(_request("the last one")))
        await turns()
        assert [len(commit.claims) for commit in store.commits] == [under_way, needed]
        hold.open()
        await asyncio.gather(*rows)
        await group.drain()

    drive(main(SPLIT_ROWS, SPLIT_ROWS))
    drive(main(FEW_ROWS, SPLIT_ROWS // 2))


def test_a_batch_that_is_cancelled_between_the_halves_has_told_everybody():
    """What the store has said stands, whoever stops the task that was about to pass it on."""

    async def main() -> None:
        halves = Halves(SPLIT_ROWS)
        tasks = halves.begin()
        halves.claims[0].add_done_callback(lambda _: next(iter(halves.group._batches)).cancel())
        halves.hold.open()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
        assert {claim.result().decision for claim in halves.claims} == {Decision.ADMIT}
        await halves.group.drain()
        assert halves.counts == (0, 0, 0)

    drive(main())


def test_a_claim_that_is_let_go_between_the_halves_is_given_back():
    """It was granted, and its caller goes before it is told: nobody is going to run it."""

    async def main() -> None:
        halves = Halves(SPLIT_ROWS)
        last = halves.requests[-1]

        def let_go(_: object) -> None:
            halves.group.let_go(last.key)
            tasks[-1].cancel()

        tasks = halves.begin()
        halves.claims[0].add_done_callback(let_go)
        halves.hold.open()
        await asyncio.gather(*tasks[:-1])
        assert isinstance(await raised(tasks[-1]), asyncio.CancelledError)
        await halves.group.drain()
        released = [
            item.token
            for commit in halves.store.commits
            for item in commit.settlements
            if item.kind is SettleKind.RELEASE
        ]
        assert released == [last.token]
        again = _request(last.key.text)
        (answer,), _ = await halves.store.inner.commit([again], [])
        assert (answer.decision, answer.attempt) == (Decision.ADMIT, 1)

    drive(main())


def test_a_batch_that_is_over_is_not_taken_for_one_that_hangs():
    """Somebody may look out for one while its second half waits to be told."""

    async def main() -> None:
        halves = Halves(SPLIT_ROWS)

        def look_out(_: object) -> None:
            for batch in halves.group._batches.values():
                halves.group._pass_over(batch)

        tasks = halves.begin()
        halves.claims[0].add_done_callback(look_out)
        halves.hold.open()
        await asyncio.gather(*tasks)
        await halves.group.drain()
        assert halves.counts == (0, 0, 0)

    drive(main())

"""Fork: an object that was used before it works in the child, and the parent goes on.

Every scenario runs in a process of its own, because forking the test process itself would fork
its threads' locks along.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sqlite3
import threading
from datetime import timedelta

import pytest

from retrysafe import (
    AsyncIdempotency,
    ClaimLost,
    Idempotency,
    InFlight,
    InvalidInput,
    OperationInFlight,
    Policy,
    current_attempt,
    forks,
)
from retrysafe.errors import Closed
from retrysafe.stores import MemoryStore, SqliteStore
from tests.forking import exit_code, fork
from tests.processes.ledger import note, noted

POLICY = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=20))
SHORT = POLICY.with_changes(lease=timedelta(milliseconds=400))


def _use_after_fork(pipe, database: str, ledger: str, way: str) -> list[object]:
    idem = Idempotency(f"sqlite:///{database}", caller="owner", policy=POLICY)

    def operation(who: str) -> str:
        note(ledger, who, os.getpid())
        return who

    idem.run("before", operation, "parent", request="r")

    def work() -> None:
        assert idem.answer("before", operation, "child", request="r").value == "parent"
        assert idem.answer("in child", operation, "child", request="r").replayed is False
        assert idem.close()

    if way == "os.fork":
        code = exit_code(fork(work))
    else:
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(30)
        code = process.exitcode
    answers = [
        idem.answer("in child", operation, "parent", request="r").value,
        idem.answer("after", operation, "parent", request="r").replayed,
    ]
    assert idem.close()
    return [code, *answers]


@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
def test_object_used_before_fork_works_in_child_and_parent(start, database, ledger, way):
    """The child sees the parent's outcomes, over its own connection, and the parent the child's."""
    owner = start(_use_after_fork, database, ledger, way)
    assert owner.result() == [0, "child", False]
    executions = noted(ledger)
    assert [line[0] for line in executions] == ["parent", "child", "parent"]
    assert executions[0][1] == executions[2][1] != executions[1][1]


def _fork_while_locked(pipe, database: str, ledger: str, kind: str) -> int:
    """Forks while other threads hold every lock of the object and of its store."""
    store = MemoryStore() if kind == "memory" else None
    idem = Idempotency(store or f"sqlite:///{database}", caller="owner", policy=POLICY)
    idem.run("before", lambda: "done", request="r")
    (beat,) = idem._calls._heartbeat._beats.values()
    locks = [beat._lock, idem._calls._engine._lock]
    if kind == "sqlite":
        # A fork waits for the locks around a commit and a reading, so those are not held for long.
        locks.append(idem._calls._engine._writer._lock)
    else:
        locks.append(idem._calls.store._lock)
    held = [threading.Event() for _ in locks]
    let_go = threading.Event()

    def hold(lock, is_held: threading.Event) -> None:
        with lock:
            is_held.set()
            let_go.wait(60)

    threads = [threading.Thread(target=hold, args=pair) for pair in zip(locks, held, strict=True)]
    for thread in threads:
        thread.start()
    for event in held:
        assert event.wait(30)

    def work() -> None:
        assert idem.run("before", lambda: "again", request="r") == "done"
        assert idem.run("in child", lambda: note(ledger, "child"), request="r") is None
        assert idem.close()

    pid = fork(work)
    code = exit_code(pid)
    let_go.set()
    for thread in threads:
        thread.join()
    assert idem.run("after", lambda: note(ledger, "parent"), request="r") is None
    assert idem.close()
    return code


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_fork_while_other_threads_hold_every_lock(start, database, ledger, kind):
    """Locks that nobody in the child will ever release are replaced there."""
    assert start(_fork_while_locked, database, ledger, kind).result() == 0
    assert noted(ledger) == [["child"], ["parent"]]


def _fork_while_reading(pipe, database: str) -> int:
    """Forks while another thread reads, which ends as soon as the fork is about to happen."""
    store = SqliteStore(database)
    idem = Idempotency(store, caller="owner", policy=POLICY)
    idem.run("before", lambda: "done", request="r")
    is_reading, is_forking = threading.Event(), threading.Event()

    def read() -> None:
        def look(connection: sqlite3.Connection) -> None:
            connection.execute("SELECT count(*) FROM retrysafe_keys").fetchall()
            is_reading.set()
            assert is_forking.wait(30)

        store._read(look)

    def work() -> None:
        idem.run("in child", lambda: "done", request="r")
        cut_back = store._connections.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert cut_back == (0, 0, 0)

    # Asked before the store's own, which was there first.
    os.register_at_fork(before=is_forking.set)
    reader = threading.Thread(target=read)
    reader.start()
    assert is_reading.wait(30)
    pid = fork(work)
    code = exit_code(pid)
    reader.join()
    idem.run("after", lambda: "done", request="r")
    return code


def test_fork_while_another_thread_reads(start, database):
    """The child can cut the log back: its library knows of no reader that never ends."""
    assert start(_fork_while_reading, database).result() == 0


def _fork_inside_operation(pipe, database: str, ledger: str) -> list[object]:
    """Forks while the parent runs an operation; the child works on, the parent is killed."""
    idem = Idempotency(f"sqlite:///{database}", caller="owner", policy=SHORT)
    running = threading.Event()

    def operation() -> None:
        note(ledger, "executed", os.getpid())
        running.set()
        threading.Event().wait(60)

    threading.Thread(
        target=idem.run,
        args=("parent's", operation),
        kwargs={"name": "", "request": "r"},
        daemon=True,
    ).start()
    assert running.wait(30)

    def work() -> None:
        # The child's own heartbeat is at work, for a lease of its own, until the test ends it.
        assert idem._calls._engine.flights_count == 0
        with pytest.raises(OperationInFlight):
            fail = SHORT.with_changes(in_flight=InFlight.FAIL)
            idem.run("parent's", operation, name="", request="r", policy=fail)

        def wait_for_the_end() -> None:
            pipe.send(current_attempt().number)
            pipe.recv()

        idem.run("child's", wait_for_the_end, name="", request="r")
        os._exit(0)

    pid = fork(work)
    pipe.send(pid)
    # Renewed by the parent alone until it is killed.
    threading.Event().wait(60)
    return [exit_code(pid)]


def test_child_does_not_renew_what_the_parent_runs(start, database, ledger):
    """The parent dies, its child lives on with a heartbeat: the parent's key becomes free."""
    parent = start(_fork_inside_operation, database, ledger)
    child_pid = parent.receive()
    assert parent.receive() == 1
    parent.kill(signal.SIGKILL)
    try:
        with Idempotency(f"sqlite:///{database}", caller="owner", policy=SHORT) as idem:
            answer = idem.answer("parent's", lambda: "taken", request="r")
            assert (answer.value, answer.attempt) == ("taken", 2)
            # The child is alive and holds its own key all the while.
            with pytest.raises(OperationInFlight):
                fail = SHORT.with_changes(in_flight=InFlight.FAIL)
                idem.run("child's", lambda: None, request="r", policy=fail)
    finally:
        os.kill(child_pid, signal.SIGKILL)
    assert len(noted(ledger)) == 1


def _fork_between_loops(pipe, database: str, ledger: str) -> list[object]:
    idem = AsyncIdempotency(f"sqlite:///{database}", caller="owner", policy=POLICY)

    async def operation(who: str) -> str:
        note(ledger, who)
        return who

    async def use(key: str, who: str) -> str:
        return await idem.run(key, operation, who, request="r")

    async def use_and_close(key: str, who: str) -> str:
        async with idem:
            return await use(key, who)

    asyncio.run(use("before", "parent"))

    def work() -> None:
        assert asyncio.run(use("before", "child")) == "parent"
        assert asyncio.run(use_and_close("in child", "child")) == "child"

    code = exit_code(fork(work))
    return [code, asyncio.run(use_and_close("in child", "parent"))]


def test_async_object_used_before_fork_works_in_a_loop_of_the_child(start, database, ledger):
    """The worker threads of the parent's loop are gone in the child; it gets its own."""
    assert start(_fork_between_loops, database, ledger).result() == [0, "child"]
    assert noted(ledger) == [["parent"], ["child"]]


def _fork_inside_a_loop(pipe, database: str) -> int:
    """A child forked while the parent's loop is running an operation uses the object anew."""
    idem = AsyncIdempotency(f"sqlite:///{database}", caller="owner", policy=SHORT)

    async def in_child() -> None:
        async with idem:
            assert await idem.run("child's", _return, "child") == "child"

    def work() -> None:
        # The child inherits the mark of the parent's running loop; a fresh thread has none.
        failures: list[BaseException] = []

        def drive() -> None:
            try:
                asyncio.run(in_child())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=drive)
        thread.start()
        thread.join()
        assert not failures

    async def operation() -> int:
        return await asyncio.to_thread(exit_code, fork(work))

    async def in_parent() -> int:
        async with idem:
            return await idem.run("parent's", operation, request=None)

    return asyncio.run(in_parent())


async def _return(value: str) -> str:
    return value


def test_fork_inside_a_running_async_operation(start, database):
    """The parent's operation and the child's both end well."""
    assert start(_fork_inside_a_loop, database).result() == 0


def _fork_closed(pipe, database: str) -> int:
    idem = Idempotency(f"sqlite:///{database}", caller="owner")
    idem.run("before", lambda: 1, request=None)
    assert idem.close()

    def work() -> None:
        with pytest.raises(Closed):
            idem.run("in child", lambda: 1, request=None)

    return exit_code(fork(work))


def test_closed_object_stays_closed_in_the_child(start, database):
    """Fork does not open what was closed."""
    assert start(_fork_closed, database).result() == 0


class _Refusing:
    """Something registered that cannot be used in a child, and says so."""

    def after_fork_in_child(self) -> None:
        raise InvalidInput("not here")


def _use_beside_a_refusal(pipe, database: str) -> int:
    # Many: the order in which objects are refreshed is nobody's promise.
    refusing = [_Refusing() for _ in range(50)]
    for item in refusing:
        forks.register(item)
    idem = Idempotency(f"sqlite:///{database}", caller="owner", policy=POLICY)
    idem.run("before", lambda: 1, request=None)
    code = exit_code(fork(lambda: idem.run("in child", lambda: 2, request=None)))
    refusing.clear()
    return code


def test_an_object_that_refuses_the_child_hangs_no_other_one(start, database):
    """The locks that are held for a fork are let go in the child, whatever another object says."""
    assert start(_use_beside_a_refusal, database).result() == 0


def _fork_inside_an_operation(pipe, database: str, ending: str) -> list[object]:
    idem = Idempotency(f"sqlite:///{database}", caller="owner", policy=POLICY)
    rival = Idempotency(f"sqlite:///{database}", caller="owner")
    parent = os.getpid()
    seen = []

    def operation() -> str:
        child = os.fork()
        if child == 0:
            if ending == "raises":
                raise ValueError("in the child")
            return "child"
        seen.append(exit_code(child))
        with pytest.raises(OperationInFlight):
            rival.run("k", lambda: "rival", name="pay", request=None)
        return "parent"

    try:
        told = idem.run("k", operation, name="pay", request=None)
    except ClaimLost:
        assert os.getpid() != parent
        os._exit(7)
    assert os.getpid() == parent
    return [*seen, told, rival.run("k", lambda: "rival", name="pay", request=None)]


@pytest.mark.parametrize("ending", ["raises", "returns"])
def test_a_child_that_was_forked_inside_an_operation_does_not_end_it(start, database, ending):
    """Whatever goes up through `run` in the child: the parent keeps the key, and its end counts."""
    child = start(_fork_inside_an_operation, database, ending)
    assert child.result() == [7, "parent", "parent"]

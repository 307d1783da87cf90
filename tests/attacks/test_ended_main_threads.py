"""Event loops in a thread that outlives the main one, and processes that end amid their work.

Attacked: the time between the end of the main thread and the end of the process. Python has told
all executors by then to take no more work, while a loop in a thread that is no daemon goes on with
operations, transactions, requests and deliveries that it began before.
Must hold: what runs is stored, delivered and answered as before; the process ends when the loop has
ended, finishes the writes that are under way, and does not wait for what hangs.
"""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from retrysafe import Idempotency
from retrysafe.core.model import State
from retrysafe.runtime import thread_pool
from retrysafe.runtime.thread_pool import ThreadPool
from tests.forking import answer_of_child

ROOT = Path(__file__).resolve().parents[2]

# `flow` begins before the main thread ends, and goes on when all executors have been shut down.
OUTLIVING = """
import asyncio, concurrent.futures.thread, sqlite3, sys, threading
from retrysafe import AsyncIdempotency, current_attempt
from retrysafe.http import IdempotencyMiddleware, bearer_token
from retrysafe.http.large_bodies import LARGE_BODY_BYTES
from retrysafe.relay import AsyncRelay
from retrysafe.stores import open_store
from tests.http.driving import ask

path, flow = sys.argv[1], sys.argv[2]
url = f"sqlite:///{path}"
has_begun = threading.Event()
ran = []

async def until_the_main_thread_has_ended():
    has_begun.set()
    while not concurrent.futures.thread._shutdown:
        await asyncio.sleep(0.01)

async def reserve():
    return "reserved"

async def charge(number):
    ran.append(number)
    await until_the_main_thread_has_ended()
    await current_attempt().step("reserve", reserve)
    current_attempt().outbox.stage("charged", number)
    return number

async def operations(idem):
    print(await asyncio.gather(*(idem.run(f"k-{number}", charge, number) for number in range(5))))
    print(await idem.run("k-0", charge, 0), sorted(ran))

async def atomic(idem):
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("CREATE TABLE orders (item)")
    connection.execute("BEGIN IMMEDIATE")
    async with idem.atomic(connection, "order", request="pen") as run:
        await until_the_main_thread_has_ended()
        connection.execute("INSERT INTO orders VALUES ('pen')")
        await run.complete("placed")
    connection.execute("COMMIT")
    print((await idem.read("order")).record.state.name)
    connection.close()

async def requests(idem):
    async def app(scope, receive, send):
        ran.append(len((await receive())["body"]))
        await until_the_main_thread_has_ended()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})
    protected = IdempotencyMiddleware(app, idem, caller=bearer_token)
    for _ in range(2):
        print((await ask(protected, body=b" " * LARGE_BODY_BYTES)).status, len(ran))

async def relay(idem):
    def deliver(delivery):
        ran.append(delivery.topic)
        has_begun.set()
        while len(ran) == 1 and not concurrent.futures.thread._shutdown:
            pass
    async def stage():
        for number in range(3):
            current_attempt().outbox.stage(f"topic-{number}", number)
    await idem.run("k", stage)
    store = open_store(url, is_async=True)
    report = await AsyncRelay(store, deliver, concurrency=1).drain()
    print(report.delivered, report.failed, report.dead, sorted(ran))
    await store.close()

async def main():
    async with AsyncIdempotency(url, caller="shop") as idem:
        await idem.sweep()
        await globals()[flow](idem)

threading.Thread(target=asyncio.run, args=(main(),)).start()
assert has_begun.wait(30)
"""


def _run(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ended(process: subprocess.Popen[str], said: str = "") -> str:
    try:
        output, _ = process.communicate(said, timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    return output


@pytest.mark.parametrize(
    ("flow", "told"),
    [
        ("operations", "[0, 1, 2, 3, 4]\n0 [0, 1, 2, 3, 4]\n"),
        ("atomic", "SUCCEEDED\n"),
        ("requests", "201 1\n201 1\n"),
        ("relay", "3 0 0 ['topic-0', 'topic-1', 'topic-2']\n"),
    ],
)
def test_a_loop_goes_on_after_the_main_thread(flow, told, tmp_path):
    """Begun before and ended after: one execution and a stored outcome, deliveries without a failed
    try; and the process ends with the loop."""
    path = tmp_path / "shop.db"
    assert _ended(_run(OUTLIVING, path, flow)) == told
    if flow == "operations":
        with Idempotency(f"sqlite:///{path}", caller="shop") as reader:
            stored = [reader.read(f"k-{number}") for number in range(5)]
        assert {found.record.state for found in stored} == {State.SUCCEEDED}
        assert [step.name for found in stored for step in found.steps] == ["reserve"] * 5


# The work in a worker thread ends when the test says so; `seconds` are those of the exit.
ENDING = """
import asyncio, atexit, sys
from retrysafe.runtime import thread_pool

thread_pool.EXIT_SECONDS = float(sys.argv[1])
pool = thread_pool.ThreadPool(1, "slow")

def work():
    print("begun", flush=True)
    sys.stdin.readline()
    print("written", flush=True)

async def main():
    task = asyncio.ensure_future(pool.run(work))
    await asyncio.sleep(0)
    del globals()["pool"]

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""


def test_the_end_of_the_process_waits_for_writes_under_way():
    """Also for those of a pool that nobody holds any more, on a loop that has stopped."""
    process = _run(ENDING, 30)
    assert process.stdout.readline() == "begun\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    assert _ended(process, "go on\n") == "written\n"


def test_the_end_of_the_process_does_not_wait_for_what_hangs():
    """Within its limit, as nothing can end a thread."""
    process = _run(ENDING, 0.1)
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


FORKING = """
import os, sys
from retrysafe.runtime import thread_pool

thread_pool.EXIT_SECONDS = 600.0

def work():
    print("begun", flush=True)
    sys.stdin.readline()
    print("written", flush=True)

thread_pool.ThreadPool(1, "slow")._submit(thread_pool._Job(work, None))
child = os.fork()
if not child:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_forked_child_does_not_wait_for_the_work_of_its_parent():
    """At its end, also where the pool of that work is gone."""
    process = _run(FORKING)
    assert sorted(process.stdout.readline() for _ in range(2)) == ["7\n", "begun\n"]
    assert _ended(process, "go on\n") == "written\n"


# The pool itself.


def test_a_pool_has_no_more_threads_than_its_size_and_ends_them():
    """Work beyond it waits; `close` finishes what was submitted; a later use starts others."""
    names, barrier = set(), threading.Barrier(3)

    def meet():
        names.add(threading.current_thread().name)
        barrier.wait(30)

    async def main():
        for _ in range(2):
            await asyncio.gather(*(pool.run(meet) for _ in range(9)))

    pool = ThreadPool(3, "crowd")
    for _ in range(2):
        asyncio.run(main())
        assert names == {"crowd_0", "crowd_1", "crowd_2"}
        pool.close()
        assert not names & {thread.name for thread in threading.enumerate()}
    assert not thread_pool._under_way


def test_a_pool_does_with_the_threads_that_it_gets(monkeypatch):
    """A system that gives no more is no failure while others take the work; without any it is one,
    and nothing is left in the queue that would run later."""
    pool = ThreadPool(2, "scarce")
    ran = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _none_left)
        with pytest.raises(RuntimeError, match="new thread"):
            asyncio.run(asyncio.wait_for(pool.run(ran.append, 1), 30))
    asyncio.run(pool.run(ran.append, 2))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _none_left)
        asyncio.run(pool.run(ran.append, 3))
    pool.close()
    assert ran == [2, 3]


def _none_left(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_lost_pool_ends_its_threads():
    """As after a transaction that was never ended; the threads hold no pool."""
    pool = ThreadPool(1, "lost")
    found: list[threading.Thread] = []
    asyncio.run(pool.run(lambda: found.append(threading.current_thread())))
    del pool
    found[0].join(30)
    assert not found[0].is_alive()


def test_a_pool_raises_what_the_work_raises():
    """Also what no future takes: whoever awaited it would wait for ever."""

    def end():
        raise StopIteration(3)

    async def main():
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 / 0)
        with pytest.raises(RuntimeError) as raised:
            await asyncio.wait_for(pool.run(end), 30)
        assert isinstance(raised.value.__cause__, StopIteration)

    pool = ThreadPool(1, "raising")
    asyncio.run(main())
    pool.close()


def test_a_pool_starts_afresh_in_a_forked_child():
    """The threads stay in the parent; a child that waited for them would wait for ever, and so
    would its end for the parent's work."""
    pool, may_end = ThreadPool(1, "forked"), threading.Event()

    async def main():
        held = asyncio.ensure_future(pool.run(may_end.wait, 30))
        await asyncio.sleep(0)
        answer = answer_of_child(in_child)
        may_end.set()
        return answer, await held

    def in_child():
        assert os.getpid() not in thread_pool._under_way.values()
        done = queue.SimpleQueue()
        pool._submit(thread_pool._Job(lambda: done.put("fresh"), None))
        return done.get(timeout=30)

    assert asyncio.run(main()) == ("fresh", True)
    pool.close()

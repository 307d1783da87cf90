"""Completing attempts of an event loop on connections that block, from its worker threads.

That is where frameworks run endpoints that are plain functions.
"""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, Policy, current_attempt

PATIENCE_SECONDS = 30


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shop.db"


@pytest.fixture
def open_connection(path):
    """Opens connections that any thread may use, and closes them with the test."""
    made = []

    def connect(**options):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, **options)
        made.append(connection)
        return connection

    yield connect
    for connection in made:
        connection.close()


@pytest.fixture
def connection(path, open_connection):
    """A connection to a file that has the store's schema and an orders table."""
    with Idempotency(f"sqlite:///{path}", caller="shop") as idem:
        assert idem.read("nothing") is None
    made = open_connection(timeout=0)
    made.execute("CREATE TABLE orders (name TEXT)")
    return made


def orders(connection):
    return [row[0] for row in connection.execute("SELECT name FROM orders")]


@pytest.fixture
def on_loop(path, connection):
    """Runs a plain function in a worker thread, as an operation of the asyncio face."""
    with asyncio.Runner() as runner:
        made = AsyncIdempotency(f"sqlite:///{path}", caller="shop")

        def run(operation, key="order-1", policy=None):
            async def in_thread():
                return await asyncio.to_thread(operation)

            return runner.run(made.answer(key, in_thread, name="place", request=1, policy=policy))

        yield run
        runner.run(made.close())


def place(connection, name):
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO orders VALUES (?)", (name,))


def test_a_plain_function_completes_on_its_own_connection(on_loop, open_connection, connection):
    """It needs no await, and its outcome is replayed."""

    def operation():
        own = open_connection()
        place(own, "pen")
        current_attempt().complete_in(own, "in the transaction")
        own.execute("COMMIT")

    assert on_loop(operation).value == "in the transaction"
    assert on_loop(operation).replayed
    assert orders(connection) == ["pen"]


def test_awaiting_a_completion_that_is_done_is_harmless(path, connection):
    """Async code may use a connection that blocks, at its own risk, and awaits as ever."""

    async def operation():
        place(connection, "pen")
        assert await current_attempt().complete_in(connection, "done") is None
        connection.execute("COMMIT")

    async def run():
        async with AsyncIdempotency(f"sqlite:///{path}", caller="shop") as made:
            return await made.run("order-1", operation)

    assert asyncio.run(run()) == "done"


def test_a_transaction_that_another_thread_has_open_is_left_to_it(on_loop, path):
    """The thread's connection cannot be asked from the loop; waiting for its lock would be waiting
    for whoever waits for the answer."""
    own = []

    def operation():
        # The check stays on: only this thread may use the connection.
        made = sqlite3.connect(path, isolation_level=None)
        place(made, "pen")
        current_attempt().complete_in(made, "still open")
        own.append(made)

    with ThreadPoolExecutor(1) as thread:
        answer = on_loop(lambda: thread.submit(contextvars.copy_context().run, operation).result())
        assert (answer.value, answer.replayed) == ("still open", False)
        thread.submit(own[0].execute, "COMMIT").result()
        thread.submit(own[0].close).result()
    assert on_loop(operation).replayed


def test_a_connection_that_its_thread_has_closed_was_rolled_back(on_loop, path):
    def operation():
        own = sqlite3.connect(path, isolation_level=None)
        place(own, "pen")
        current_attempt().complete_in(own, "in the transaction")
        own.close()
        return "by the engine"

    assert on_loop(operation).value == "by the engine"


def test_renewal_goes_on_after_a_completion_in_a_thread_failed(
    on_loop, open_connection, connection
):
    """The write lock was not to be had; the operation outlives its first lease all the same."""
    policy = Policy(lease=timedelta(seconds=1))

    def operation():
        attempt = current_attempt()
        first_deadline = attempt.deadline
        place(connection, "rival")
        own = open_connection(timeout=0)
        own.execute("BEGIN")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            attempt.complete_in(own, "too early")
        own.execute("ROLLBACK")
        connection.execute("COMMIT")
        ends = time.monotonic() + PATIENCE_SECONDS
        while attempt.deadline == first_deadline and time.monotonic() < ends:
            time.sleep(0.01)
        place(own, "pen")
        attempt.complete_in(own, attempt.deadline > first_deadline)
        own.execute("COMMIT")

    assert on_loop(operation, policy=policy).value is True


def test_a_thread_that_its_run_left_behind_does_not_renew(path, connection, open_connection):
    """The run was cancelled while its thread went on: only the lease may free the key."""
    may_fail, has_failed = threading.Event(), threading.Event()
    attempts = []

    def in_thread():
        attempts.append(current_attempt())
        assert may_fail.wait(PATIENCE_SECONDS)
        own = open_connection(timeout=0)
        own.execute("BEGIN")
        with pytest.raises(sqlite3.OperationalError):
            attempts[0].complete_in(own, "too late")
        own.execute("ROLLBACK")
        has_failed.set()

    async def scenario():
        made = AsyncIdempotency(f"sqlite:///{path}", caller="shop")
        loop = asyncio.get_running_loop()
        started = asyncio.Event()

        async def operation():
            context = contextvars.copy_context()
            left = loop.run_in_executor(None, context.run, in_thread)
            started.set()
            await asyncio.shield(left)

        task = asyncio.create_task(made.run("order-1", operation))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        place(connection, "rival")
        may_fail.set()
        assert await asyncio.to_thread(has_failed.wait, PATIENCE_SECONDS)
        connection.execute("ROLLBACK")
        await asyncio.sleep(0)
        renewed = len(made._bound().heartbeat._leases)
        await made.close()
        return renewed

    assert asyncio.run(scenario()) == 0

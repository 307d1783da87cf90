"""Operations of an event loop that work in threads, on blocking connections, as web frameworks run
plain functions: they complete in their own transaction too."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest

from retrysafe import (
    AsyncIdempotency,
    ClaimLost,
    Idempotency,
    Policy,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.stores import SqliteStore


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (name TEXT)")
    return path


def orders(path):
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM orders")]


def on_loop(url, key, work, **options):
    """Runs the work in a thread, as an operation of an event loop, and gives its answer."""

    async def main():
        async with AsyncIdempotency(url, caller="shop", **options) as idem:

            async def operation():
                return await asyncio.to_thread(work)

            return await idem.answer(key, operation, name="place", request=None)

    return asyncio.run(main())


def placing(path, *, end="COMMIT", before=None):
    """Writes an order and completes with it on a connection that only its own thread may use."""

    def work():
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if before is not None:
                before()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO orders VALUES ('pen')")
            assert current_attempt().complete_in(connection, "in the transaction") is None
            connection.execute(end)
        return "by the engine"

    return work


def test_a_thread_completes_on_its_sqlite_connection(path):
    """The business write and the outcome stand together, and a retry replays it."""
    url = f"sqlite:///{path}"
    first = on_loop(url, "order-1", placing(path))
    second = on_loop(url, "order-1", placing(path))
    assert (first.value, first.replayed) == ("in the transaction", False)
    assert (second.value, second.replayed) == ("in the transaction", True)
    assert orders(path) == ["pen"]


def test_what_the_thread_rolled_back_never_happened(path):
    url = f"sqlite:///{path}"
    assert on_loop(url, "order-1", placing(path, end="ROLLBACK")).value == "by the engine"
    assert orders(path) == []


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_transaction_that_is_still_open_in_its_thread_decides(path, end):
    """The loop sees that the connection of another thread is not done, and writes nothing itself;
    after a rollback the key waits for its lease."""
    answered = threading.Event()
    placed: list[threading.Thread] = []

    def work():
        completed = threading.Event()
        attempt = current_attempt()

        def transact():
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO orders VALUES ('pen')")
                attempt.complete_in(connection, "in the transaction")
                completed.set()
                assert answered.wait(30)
                connection.execute(end)

        placed.append(threading.Thread(target=transact))
        placed[0].start()
        assert completed.wait(30)

    url = f"sqlite:///{path}"

    async def main():
        async with AsyncIdempotency(url, caller="shop", cache=False) as idem:

            async def operation():
                await asyncio.to_thread(work)

            try:
                return await idem.run("order-1", operation, name="place", request=None)
            finally:
                answered.set()
                await asyncio.to_thread(placed[0].join)

    assert asyncio.run(main()) == "in the transaction"
    with Idempotency(url, caller="shop") as idem:
        stored = idem.read("order-1")
    assert len(stored.outcomes) == (1 if end == "COMMIT" else 0)
    assert orders(path) == (["pen"] if end == "COMMIT" else [])


def test_a_zombie_in_a_thread_loses_its_business_write(path):
    """Another process took over: the transaction is refused before it can commit."""
    url = f"sqlite:///{path}"

    def take_over():
        with Idempotency(url, caller="shop") as other:
            other.release("order-1", force=True)
            other.run("order-1", lambda: "successor", name="place", request=None)

    with pytest.raises(ClaimLost):
        on_loop(url, "order-1", placing(path, before=take_over))
    assert orders(path) == []
    assert on_loop(url, "order-1", placing(path)).value == "successor"


def test_a_refused_connection_leaves_the_lease_in_renewal(path):
    """The store's file was locked when the thread wanted to complete: it goes on, and so does the
    renewal. Its timer has run out meanwhile, and only the loop may set a new one."""
    url = f"sqlite:///{path}"
    # Renewed after a third of the lease, and the thread waits for the file longer than that.
    policy = Policy(lease=timedelta(seconds=3), active_window=timedelta(hours=1))

    def work():
        attempt = current_attempt()
        with (
            closing(sqlite3.connect(path, isolation_level=None)) as rival,
            closing(sqlite3.connect(path, isolation_level=None, timeout=1.3)) as connection,
        ):
            rival.execute("BEGIN IMMEDIATE")
            connection.execute("BEGIN")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                attempt.complete_in(connection, "in the transaction")
            rival.execute("ROLLBACK")
            connection.execute("ROLLBACK")
        lease_end, renewed = attempt.deadline, threading.Event()
        for _ in range(200):
            if attempt.deadline > lease_end:
                renewed.set()
                break
            threading.Event().wait(0.05)
        return renewed.is_set()

    assert on_loop(url, "order-1", work, policy=policy).value is True


def test_a_thread_that_its_run_left_behind_does_not_renew(path):
    """The run was cancelled and its thread went on: only the lease may free the key, so a
    completion that fails in the thread must not put the lease back into renewal."""
    may_fail, has_failed = threading.Event(), threading.Event()

    def work():
        attempt = current_attempt()
        assert may_fail.wait(30)
        with (
            closing(sqlite3.connect(path, isolation_level=None)) as rival,
            closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection,
        ):
            rival.execute("BEGIN IMMEDIATE")
            connection.execute("BEGIN")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                attempt.complete_in(connection, "in the transaction")
        has_failed.set()

    async def main():
        async with AsyncIdempotency(f"sqlite:///{path}", caller="shop") as idem:
            has_started = asyncio.Event()

            async def operation():
                left = asyncio.ensure_future(asyncio.to_thread(work))
                has_started.set()
                await asyncio.shield(left)

            task = asyncio.create_task(idem.run("order-1", operation, request=None))
            await has_started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_fail.set()
            assert await asyncio.to_thread(has_failed.wait, 30)
            # What the thread has asked of the loop came before what woke this task.
            return len(idem._calls.bound().loop_ports.heartbeat.leases)

    assert asyncio.run(main()) == 0


def test_a_thread_completes_on_its_postgresql_connection(shop):
    """The store of the loop is asyncpg's, the connection of the thread psycopg's."""

    def work():
        with psycopg.connect(shop.server_url) as connection:
            connection.execute(f"INSERT INTO {shop.schema}.orders (name) VALUES ('pen')")
            current_attempt().complete_in(connection, "in the transaction")

    assert on_loop(shop.store_url, "order-1", work).value == "in the transaction"
    assert on_loop(shop.store_url, "order-1", work).replayed
    assert shop.orders() == ["pen"]


def test_the_loop_itself_is_never_blocked_by_the_question_of_fate(path):
    """What became of the transaction is read from the file in a worker thread."""
    asked = []

    class Noting(SqliteStore):
        def _has_outcome(self, settlement):
            asked.append(threading.current_thread().name)
            return super()._has_outcome(settlement)

    assert on_loop(Noting(path), "order-1", placing(path)).value == "in the transaction"
    assert [name.rpartition("_")[0] for name in asked] == ["retrysafe-store"]


def again_on_loop(url, work):
    """A first attempt that fails, and a second one that works in a thread."""

    async def main():
        async with AsyncIdempotency(url, caller="shop") as idem:

            async def operation():
                if current_attempt().is_first:
                    raise ConnectionError("the first attempt fails")
                return await asyncio.to_thread(work)

            with pytest.raises(ConnectionError):
                await idem.run("order-1", operation, name="place", request=None)
            return await idem.run("order-1", operation, name="place", request=None)

    return asyncio.run(main())


def test_a_later_attempt_completes_in_its_thread_too(path):
    """What earlier attempts recorded has been read by then: a thread cannot wait for the loop."""
    assert again_on_loop(f"sqlite:///{path}", placing(path)) == "in the transaction"
    assert orders(path) == ["pen"]


def test_a_later_attempt_completes_on_postgresql_too(shop):
    def work():
        with psycopg.connect(shop.server_url) as connection:
            current_attempt().complete_in(connection, "in the transaction")

    assert again_on_loop(shop.store_url, work) == "in the transaction"


def test_a_store_that_cannot_be_read_does_not_keep_a_later_attempt_from_running(path):
    """The steps are asked for early and once more at the end; only the second time counts."""

    class Away(SqliteStore):
        reads = 0

        async def read(self, key, *, with_audit=False):
            self.reads += 1
            if self.reads <= 3:
                raise StoreUnavailable("away")
            return await super().read(key, with_audit=with_audit)

    store = Away(path)
    assert again_on_loop(store, lambda: "by the engine") == "by the engine"
    assert store.reads == 4

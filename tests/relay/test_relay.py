"""Relays with real threads and real tasks, on every store: order, stops, hints and errors."""

from __future__ import annotations

import asyncio
import functools
import threading
from datetime import timedelta

import pytest

from retrysafe import GLOBAL, AsyncIdempotency, Idempotency, InvalidInput, current_attempt
from retrysafe.core.outbox.entries import BackOff, EntryQuery
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.errors import DeliveryFailed, SchemaMissing
from retrysafe.relay import AsyncRelay, Relay, RelayPolicy
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.stores.opening import postgres_store
from tests.relay.scripted import entry, stage

LIMIT_SECONDS = 60
# Nothing in these tests may depend on a poll: it would come long after the test's limit.
NEVER = RelayPolicy(poll=timedelta(hours=1))


def fill(store, lanes=5, each=6, free=10):
    for number in range(each):
        stage(store, *(entry(f"{lane} {number}", f"lane {lane}") for lane in range(lanes)))
    stage(store, *(entry(f"free {number}") for number in range(free)))
    return lanes * each + free


def states(store):
    found = run_sync(store.outbox.list_entries(EntryQuery(limit=1_000)))
    return {item.entry.body.decode(): item.condition.value for item in found}


def in_order(delivered):
    """Whether every aggregate came in its order, each entry once."""
    lanes = {}
    for delivery in delivered:
        lanes.setdefault(delivery.aggregate, []).append(delivery.body.decode())
    lanes.pop(None)
    return all(names == sorted(names) and len(set(names)) == len(names) for names in lanes.values())


class Received:
    """A target that writes down what it gets, from any thread."""

    def __init__(self):
        self.deliveries = []

    def __call__(self, delivery):
        self.deliveries.append(delivery)


def test_threads_drain_the_outbox_in_order(store):
    """Everything is delivered once, every aggregate in its order."""
    count = fill(store)
    received = Received()
    report = Relay(store, received, concurrency=4).drain()
    assert report.delivered == count == len(received.deliveries)
    assert in_order(received.deliveries)
    assert set(states(store).values()) == {"delivered"}


def test_tasks_drain_the_outbox_in_order(store):
    """The same engine in an event loop, over a blocking store."""
    count = fill(store)
    received = []

    async def deliver(delivery):
        await asyncio.sleep(0)
        received.append(delivery)

    report = asyncio.run(AsyncRelay(store, deliver, concurrency=4).drain())
    assert report.delivered == count == len(received)
    assert in_order(received)


def test_tasks_drain_over_asyncpg(migrated_url):
    """The whole way in one event loop: staged by an operation, delivered by a task."""
    url = migrated_url
    received = []

    async def deliver(delivery):
        received.append((delivery.topic, delivery.json(), delivery.attempt))

    async def operation(number):
        current_attempt().outbox.stage("orders.paid", {"order": number}, aggregate="orders")

    async def main():
        async with AsyncIdempotency(url, caller=GLOBAL) as idem:
            for number in range(5):
                await idem.run(f"order-{number}", operation, number)
        store = postgres_store(url, is_async=True)
        try:
            return await AsyncRelay(store, deliver).drain()
        finally:
            await store.close()

    assert asyncio.run(main()).delivered == 5
    assert received == [("orders.paid", {"order": number}, 1) for number in range(5)]


def test_aggregates_are_delivered_in_parallel(store):
    """Two deliveries meet, which they could not if one waited for the other."""
    stage(store, entry("a", "lane a"), entry("b", "lane b"))
    meeting = threading.Barrier(2)
    report = Relay(store, lambda delivery: meeting.wait(LIMIT_SECONDS), concurrency=2).drain()
    assert (report.delivered, report.failed) == (2, 0)


def test_a_hint_wakes_a_relay_of_the_same_process(store):
    """Without it the entry would wait for the next poll, which never comes here."""
    arrived = threading.Event()
    with (
        Idempotency(store, caller=GLOBAL) as idem,
        Relay(store, lambda delivery: arrived.set(), policy=NEVER),
    ):
        idem.run("key", lambda: current_attempt().outbox.stage("t", "x"), request=None)
        assert arrived.wait(LIMIT_SECONDS)


def test_a_hint_from_another_thread_wakes_a_relay_of_tasks(store):
    async def main():
        arrived = asyncio.Event()

        async def deliver(_):
            arrived.set()

        relay = AsyncRelay(store, deliver, policy=NEVER)
        work = asyncio.ensure_future(relay.run())
        await asyncio.to_thread(stage, store, entry("a"))
        await asyncio.wait_for(arrived.wait(), LIMIT_SECONDS)
        relay.stop()
        return await asyncio.wait_for(work, LIMIT_SECONDS)

    assert asyncio.run(main()).delivered == 1


def test_a_stop_waits_for_the_delivery_under_way(store):
    """And gives back what was only claimed, so that another relay has it at once."""
    stage(store, *(entry(f"n{number}") for number in range(4)))
    begun, may_end = threading.Event(), threading.Event()

    def deliver(delivery):
        begun.set()
        assert may_end.wait(LIMIT_SECONDS)

    relay = Relay(store, deliver, policy=NEVER, concurrency=1)
    thread = threading.Thread(target=relay.run)
    thread.start()
    assert begun.wait(LIMIT_SECONDS)
    relay.stop()
    may_end.set()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
    found = list(states(store).values())
    delivered = found.count("delivered")
    assert delivered >= 1
    assert found.count("waiting") == 4 - delivered
    received = Received()
    assert Relay(store, received).drain().delivered == 4 - delivered


def test_a_delivery_that_takes_too_long_is_a_failed_one(store):
    """In a loop it is cancelled; the message says so."""
    stage(store, entry("a"))

    async def hang(_):
        await asyncio.Event().wait()

    policy = RelayPolicy(timeout=timedelta(milliseconds=20))
    report = asyncio.run(AsyncRelay(store, hang, policy=policy).drain())
    assert (report.failed, report.delivered) == (1, 0)
    (found,) = run_sync(store.outbox.list_entries(EntryQuery()))
    assert found.entry.last_error == "DeliveryFailed: no answer within 0.02 s"


def test_a_timeout_of_the_target_itself_is_told_as_it_is(store):
    stage(store, entry("a"))

    async def slow(_):
        raise TimeoutError("the socket's own")

    asyncio.run(AsyncRelay(store, slow).drain())
    (found,) = run_sync(store.outbox.list_entries(EntryQuery()))
    assert found.entry.last_error == "TimeoutError: the socket's own"


def test_failures_are_tried_again_until_they_go_well(store):
    stage(store, entry("a1", "a"), entry("a2", "a"))
    received = []

    def deliver(delivery):
        received.append((delivery.body, delivery.attempt))
        if delivery.attempt < 3:
            raise DeliveryFailed("not yet")

    quick = BackOff(timedelta(milliseconds=1), timedelta(milliseconds=1))
    policy = RelayPolicy(back_off=quick, poll=timedelta(milliseconds=5))
    relay = Relay(store, deliver, policy=policy, on_report=lambda report: stop_at(report, 2))

    def stop_at(report, count):
        if report.delivered == count:
            relay.stop()

    assert relay.run().failed == 4
    assert received == [(name, attempt) for name in (b"a1", b"a2") for attempt in (1, 2, 3)]


def test_two_relays_share_the_work(store):
    """Nothing is delivered twice, and no order is broken between them."""
    count = fill(store, lanes=8, each=8, free=30)
    received = Received()
    relays = [Relay(store, received, concurrency=3) for _ in range(2)]
    threads = [threading.Thread(target=relay.drain) for relay in relays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    # Whoever was idle for a moment may have left before the last heads were free.
    Relay(store, received).drain()
    assert sorted(item.body for item in received.deliveries) == sorted(
        name.encode() for name in states(store)
    )
    assert len(received.deliveries) == count
    assert in_order(received.deliveries)


def test_a_relay_runs_again_after_a_drain(store):
    received = Received()
    relay = Relay(store, received)
    for number in range(2):
        stage(store, entry(f"n{number}"))
        relay.drain()
    assert [item.body for item in received.deliveries] == [b"n0", b"n1"]


def test_no_thread_is_left_behind(store):
    fill(store)
    before = set(threading.enumerate())
    with Relay(store, Received(), concurrency=8):
        pass
    asyncio.run(AsyncRelay(store, Received()).drain())
    left = {thread for thread in set(threading.enumerate()) - before if thread.is_alive()}
    assert {thread for thread in left if "retrysafe" in thread.name} == set()


# What is refused.


def test_what_ends_a_relay_early_is_logged_and_raised_where_it_is_waited_for(tmp_path, caplog):
    """The block may last as long as its process, so the log has it at once."""
    SqliteStore(tmp_path / "empty.db")
    (tmp_path / "empty.db").touch()
    store = SqliteStore(tmp_path / "empty.db", migrate=False)
    with pytest.raises(SchemaMissing), Relay(store, Received()) as relay:
        relay._thread.join(LIMIT_SECONDS)
        assert "the relay was ended by an error, and does nothing more" in caplog.text
    with pytest.raises(ZeroDivisionError), Relay(store, Received()) as relay:
        relay._thread.join(LIMIT_SECONDS)
        1 / 0  # noqa: B018 — the block's own error matters more.


def test_parts_that_do_not_fit_are_refused(store):
    class NeedsALoop:
        waits = Waits.SUSPENDING

    class Blocks:
        waits = Waits.BLOCKING

    async def deliver(_):
        """Async."""

    class SuspendingStore:
        capabilities = Capabilities(Waits.SUSPENDING, has_outbox=True)

    class PlainStore:
        capabilities = Capabilities(Waits.NEVER)

    for make, words in (
        (lambda: Relay(store, deliver), "AsyncRelay"),
        (lambda: Relay(store, NeedsALoop()), "use AsyncRelay with NeedsALoop"),
        (lambda: AsyncRelay(store, Blocks()), "use Relay with Blocks"),
        (lambda: Relay(store, 7), "function of a delivery"),
        (lambda: Relay(store, print, concurrency=0), "concurrency"),
        (lambda: AsyncRelay(store, print, concurrency=0), "concurrency"),
        (lambda: Relay(SuspendingStore(), print), "use AsyncRelay"),
        (lambda: Relay(PlainStore(), print), "PlainStore has no outbox"),
        (lambda: AsyncRelay(PlainStore(), print), "PlainStore has no outbox"),
    ):
        with pytest.raises(InvalidInput, match=words):
            make()


def test_an_async_function_in_disguise_is_not_taken_for_delivered(store):
    """A coroutine that nobody awaits has delivered nothing."""
    stage(store, entry("a"))
    received = []

    async def keeps(delivery):
        received.append(delivery.body)

    report = Relay(store, functools.partial(run_later, keeps)).drain()
    assert (report.delivered, report.failed, received) == (0, 1, [])


def run_later(function, delivery):
    """A plain function that gives back what it should have awaited."""
    return function(delivery)


@pytest.mark.parametrize("kind", ["async", "async call", "gives an awaitable", "plain"])
def test_any_callable_is_a_target_in_a_loop(store, kind):
    stage(store, entry("a"))
    received = []

    async def keeps(delivery):
        received.append(delivery.body)

    class Keeps:
        async def __call__(self, delivery):
            await keeps(delivery)

    target = {
        "async": keeps,
        "async call": Keeps(),
        "gives an awaitable": functools.partial(run_later, keeps),
        "plain": lambda delivery: received.append(delivery.body),
    }[kind]
    assert asyncio.run(AsyncRelay(store, target).drain()).delivered == 1
    assert received == [b"a"]


@pytest.mark.parametrize("kind", [Relay, AsyncRelay])
def test_a_relay_is_told_to_take_a_store_and_not_what_leads_to_one(kind):
    """A URL, an Idempotency and an unset variable; a password in a URL is not shown."""
    with Idempotency("memory://", caller=GLOBAL) as idem:
        for given in ("postgresql://shop:geheim@db/shop", idem, None):
            words = r"a relay takes a store object, such as open_store\(.*; got a value of type"
            with pytest.raises(InvalidInput, match=words) as caught:
                kind(given, print)
            assert "geheim" not in str(caught.value)

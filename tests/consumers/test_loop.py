"""The consumer's loop against a scripted broker: buffers, lanes, deadlines, outages, the stop."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, InvalidInput, current_attempt
from retrysafe.consumers import Action, BackOff, Consumer, Handler
from retrysafe.consumers.deadlines import Deadlines
from retrysafe.errors import CallerMissing, Closed, PolicyInvalid
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.consumers.scripted import ScriptedBroker, message

SOON = BackOff(timedelta(milliseconds=10), timedelta(milliseconds=20))
LATER = BackOff(timedelta(hours=1), timedelta(hours=1))


class Consuming:
    """A consumer at work in this loop, and its broker."""

    def __init__(self, broker, function, store=None, options=None, **settings):
        self.broker = broker
        self.idem = AsyncIdempotency(store or MemoryStore(), caller="unused", cache=False)
        handler = Handler(function, **{"back_off": SOON, **(options or {})})
        self.consumer = Consumer(self.idem, handler, broker, **settings)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.consumer.run_async())
        return self

    async def __aexit__(self, *_):
        self.consumer.stop()
        async with asyncio.timeout(10):
            self.ended_well = await self.task
        await self.idem.close()


def started_by(names):
    """A handler that says when it has begun and ends when it is let go, by identity."""
    begun = {name: asyncio.Event() for name in names}
    ends = {name: asyncio.Event() for name in names}

    async def handle(message):
        begun[message.identity].set()
        await ends[message.identity].wait()

    return handle, begun, ends


async def until(is_so):
    """Waits for what the loop does at its own pace."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 — counts have no event.
            await asyncio.sleep(0.005)


async def done(message):
    return None


def run(flow):
    with asyncio.Runner() as runner:
        runner.run(flow)


def test_every_message_is_handled_and_settled_together():
    """What has gathered leaves in one call of the broker; counts say what became of it."""

    async def scene():
        broker = ScriptedBroker(*(message(str(number)) for number in range(30)), message("0"))
        async with Consuming(broker, done, concurrency=5) as consuming:
            await broker.until(31)
        assert {action for _, action in broker.actions} == {"ack"}
        counts = consuming.consumer.counts
        assert (counts.received, counts.handled, counts.duplicates) == (31, 30, 1)
        assert consuming.ended_well
        assert not broker.is_open
        # Never more than are handled and as many again that wait.
        assert max(broker.limits) == 10

    run(scene())


def test_handlers_in_threads_run_at_the_same_time():
    """Plain functions need no loop of their own: two of them meet at a barrier."""
    barrier = threading.Barrier(2, timeout=10)
    names = set()

    def meet(message):
        names.add(threading.current_thread().name.rpartition("_")[0])
        assert current_attempt().number == 1
        barrier.wait()

    broker = None
    idem = Idempotency(MemoryStore(), caller="unused")

    async def scene():
        nonlocal broker
        broker = ScriptedBroker(message("1"), message("2"))
        consumer = Consumer(idem, meet, broker, concurrency=2)
        task = asyncio.create_task(consumer.run_async())
        await broker.until(2)
        consumer.stop()
        await task

    run(scene())
    idem.close()
    assert sorted(broker.actions) == [("1", "ack"), ("2", "ack")]
    assert names == {"retrysafe-consumer"}


# Order.


def test_a_lane_is_handled_in_order_and_a_failure_holds_back_only_its_lane():
    """The failed message and those behind it go back, in their order; another lane goes on."""

    async def scene():
        seen = []

        async def handle(message):
            seen.append(message.identity)
            if message.identity == "a1":
                raise LookupError("not yet")

        broker = ScriptedBroker(
            *(message(f"a{number}", lane="a") for number in (1, 2, 3)),
            *(message(f"b{number}", lane="b") for number in (1, 2, 3)),
        )
        async with Consuming(broker, handle, options={"back_off": LATER}, concurrency=3):
            await broker.until(6)
        assert seen == ["a1", "b1", "b2", "b3"]
        of_a = [each for each in broker.actions if each[0].startswith("a")]
        assert of_a == [("a1", "retry"), ("a2", "leave"), ("a3", "leave")]
        assert [each for each in broker.actions if each[0].startswith("b")] == [
            *(("b1", "ack"), ("b2", "ack"), ("b3", "ack")),
        ]

    run(scene())


def test_two_messages_of_a_lane_never_run_at_once():
    async def scene():
        handle, begun, ends = started_by(["1", "2", "x"])
        broker = ScriptedBroker(message("1", lane="a"), message("2", lane="a"), message("x"))
        async with Consuming(broker, handle, concurrency=3):
            await begun["1"].wait()
            await begun["x"].wait()
            assert not begun["2"].is_set()
            ends["1"].set()
            await begun["2"].wait()
            ends["2"].set()
            ends["x"].set()
            await broker.until(3)

    run(scene())


def test_a_log_is_retried_in_place_and_nothing_of_its_lane_overtakes():
    """Where a message cannot be given back alone, it is held here and tried again."""

    async def scene():
        seen = []

        async def handle(message):
            seen.append(message.identity)
            if seen.count("1") < 3 and message.identity == "1":
                raise LookupError("not yet")

        broker = ScriptedBroker(
            message("1", lane="a"), message("2", lane="a"), message("x"), gives_back=False
        )
        async with Consuming(broker, handle, concurrency=2):
            await broker.until(3)
        assert [each for each in seen if each != "x"] == ["1", "1", "1", "2"]
        assert {action for _, action in broker.actions} == {"ack"}

    run(scene())


# Outages.


def test_while_the_store_is_away_messages_are_held_and_none_is_taken():
    """A broker that counts deliveries would dead-letter good messages by itself."""

    async def scene():
        store = FaultyStore(MemoryStore())
        store.fail(Moment.BEFORE, method="commit", times=None)
        broker = ScriptedBroker(message("1"))
        async with Consuming(broker, done, store, {"tries": 1}, concurrency=1) as consuming:
            await until(lambda: consuming.consumer.counts.retried >= 3)
            await broker.inbox.put(message("2"))
            asked = len(broker.limits)
            retried = consuming.consumer.counts.retried
            await until(lambda: consuming.consumer.counts.retried >= retried + 3)
            assert len(broker.limits) <= asked + 1
            assert broker.settled == []
            store.heal()
            await broker.until(2)
        assert broker.actions == [("1", "ack"), ("2", "ack")]

    run(scene())


def test_a_broker_that_is_away_is_asked_again(monkeypatch):
    monkeypatch.setattr("retrysafe.consumers.loop._AWAY_SECONDS", 0.01)

    async def scene():
        broker = ScriptedBroker(message("1"))
        broker.is_away = True
        async with Consuming(broker, done):
            await asyncio.sleep(0.03)
            broker.is_away = False
            await broker.until(1)

    run(scene())


def test_a_verdict_that_the_broker_does_not_take_is_counted_and_the_next_delivery_finds_it():
    async def scene():
        broker = ScriptedBroker(message("1"))
        settle, broker.settle = broker.settle, None
        failed = asyncio.Event()

        async def refuse(settled):
            failed.set()
            raise ConnectionError("away")

        broker.settle = refuse
        async with Consuming(broker, done) as consuming:
            await failed.wait()
            broker.settle = settle
            await broker.inbox.put(message("1", deliveries=2))
            await broker.until(1)
        counts = consuming.consumer.counts
        assert (counts.unsettled, counts.handled, counts.duplicates) == (1, 0, 1)

    run(scene())


# Deadlines.


def test_deadlines_are_prolonged_for_what_runs_and_for_what_waits_in_the_buffer():
    """One place, three messages: the last one waits for several renewals."""

    async def scene():
        handle, begun, ends = started_by(["1", "2", "3"])
        broker = ScriptedBroker(*(message(name) for name in ("1", "2", "3")), renew_seconds=0.04)
        async with Consuming(broker, handle, concurrency=1) as consuming:
            await begun["1"].wait()
            await until(lambda: sum("2" in each for each in broker.extended) >= 6)
            for name in ("1", "2", "3"):
                ends[name].set()
            await broker.until(3)
        assert consuming.consumer.counts.lost == 0
        assert consuming.consumer.counts.handled == 3

    run(scene())


def test_what_was_lost_in_the_buffer_is_not_started():
    """Another consumer has it by now: it is neither run nor settled here."""

    async def scene():
        handle, begun, ends = started_by(["1", "2"])
        broker = ScriptedBroker(message("1"), message("2"), renew_seconds=0.04)
        broker.lost = {"2"}
        async with Consuming(broker, handle, concurrency=1) as consuming:
            await begun["1"].wait()
            await until(lambda: any("2" in each for each in broker.extended))
            ends["1"].set()
            await until(lambda: consuming.consumer.counts.lost)
        assert not begun["2"].is_set()
        assert broker.actions == [("1", "ack")]

    run(scene())


def test_what_was_lost_while_it_ran_is_not_acked():
    """Its outcome is stored all the same, and the next delivery finds it."""

    async def scene():
        handle, begun, ends = started_by(["1"])
        broker = ScriptedBroker(message("1"), renew_seconds=0.04)
        broker.lost = {"1"}
        async with Consuming(broker, handle) as consuming:
            await begun["1"].wait()
            await until(lambda: broker.extended)
            ends["1"].set()
            await until(lambda: consuming.consumer.counts.lost)
            assert broker.settled == []
            broker.lost = set()
            await broker.inbox.put(message("1", deliveries=2))
            await broker.until(1)
        assert broker.actions == [("1", "ack")]
        assert consuming.consumer.counts.duplicates == 1

    run(scene())


def test_a_broker_that_hangs_or_fails_is_asked_again_before_the_deadline():
    """A call without an answer costs one try; by the local clock the deadline still ends."""

    async def scene():
        now = [0.0]
        answers = ["hang", "fail", "lost"]
        asked = []

        async def extend(messages):
            asked.append(now[0])
            answer = answers.pop(0)
            if answer == "hang":
                await asyncio.Event().wait()
            if answer == "fail":
                raise ConnectionError("away")
            return messages

        deadlines = Deadlines(extend, 0.3, lambda: now[0])
        item = message("1")
        deadline = deadlines.add(item)
        now[0] = 0.1
        await deadlines.renew()
        await deadlines.renew()  # Put off: nothing is due.
        now[0] = 0.15
        await deadlines.renew()
        now[0] = 0.2
        assert not deadline.is_lost(now[0])
        await deadlines.renew()
        assert deadline.is_lost(now[0])
        assert deadline.seconds_left(now[0]) == 0
        assert asked == [0.1, 0.15, 0.2]
        now[0] = 5.0
        assert deadlines.due() == []
        other = deadlines.add(message("2"))
        now[0] = 5.1
        other.stops_renewing = lambda: True
        assert deadlines.due() == []
        now[0] = 5.3
        assert other.is_lost(now[0])

    run(scene())


def test_a_message_that_is_settled_while_it_is_prolonged_is_left_alone():
    async def scene():
        deadlines = Deadlines(None, 0.3, lambda: now[0])
        now = [0.0]
        item = message("1")
        deadline = deadlines.add(item)

        async def extend(messages):
            deadlines.remove(item)
            return messages

        deadlines._extend = extend
        now[0] = 0.2
        await deadlines.renew()
        assert not deadline.is_revoked

    run(scene())


# The stop.


def test_a_stop_lets_running_handlers_end_and_gives_the_rest_back_at_once():
    async def scene():
        handle, begun, ends = started_by(["1", "2"])
        broker = ScriptedBroker(message("1"), message("2"))
        async with Consuming(broker, handle, concurrency=1) as consuming:
            await begun["1"].wait()
            consuming.consumer.stop()
            await broker.until(1)
            assert broker.actions == [("2", "leave")]
            assert broker.settled[0][2].delay == timedelta(0)
            ends["1"].set()
            await broker.until(2)
        assert broker.actions == [("2", "leave"), ("1", "ack")]
        assert not begun["2"].is_set()
        assert consuming.ended_well

    run(scene())


def test_a_stop_does_not_wait_for_a_poll_with_what_others_could_have():
    """The poll is not cut short, and what it still brings goes back as well."""

    async def scene():
        handle, begun, ends = started_by(["1", "2", "3"])
        broker = ScriptedBroker(message("1", lane="a"), message("2", lane="a"))
        polls, brings = asyncio.Event(), asyncio.Event()
        receive = broker.receive

        async def poll(limit):
            if begun["1"].is_set():
                polls.set()
                await brings.wait()
                return [message("3")]
            return await receive(limit)

        broker.receive = poll
        async with Consuming(broker, handle, concurrency=2) as consuming:
            await polls.wait()
            consuming.consumer.stop()
            await broker.until(1)
            assert broker.actions == [("2", "leave")]
            brings.set()
            ends["1"].set()
        assert sorted(broker.actions) == [("1", "ack"), ("2", "leave"), ("3", "leave")]

    run(scene())


def test_a_handler_over_the_limit_of_the_stop_is_cut_and_its_message_waits_for_the_lease():
    async def scene():
        handle, begun, _ = started_by(["1"])
        broker = ScriptedBroker(message("1"))
        limit = timedelta(milliseconds=20)
        async with Consuming(broker, handle, stop_limit=limit) as consuming:
            await begun["1"].wait()
        assert not consuming.ended_well
        assert broker.actions == [("1", "leave")]
        assert broker.settled[0][2].delay == timedelta(seconds=30)

    run(scene())


def test_what_is_held_goes_back_at_the_stop():
    async def scene():
        store = FaultyStore(MemoryStore())
        store.fail(Moment.BEFORE, method="commit", times=None)
        broker = ScriptedBroker(message("1"))
        async with Consuming(broker, done, store, {"back_off": LATER}) as consuming:
            await until(lambda: consuming.consumer.counts.retried)
        assert broker.actions == [("1", "leave")]

    run(scene())


def test_a_consumer_that_is_stopped_before_it_runs_takes_nothing():
    async def scene():
        broker = ScriptedBroker(message("1"))
        consuming = Consuming(broker, done)
        consuming.consumer.stop()
        async with consuming:
            await consuming.task
        assert (broker.limits, broker.settled) == ([], [])

    run(scene())


def test_a_fault_of_our_own_settles_nothing_as_done(monkeypatch):
    """Whatever goes wrong in the loop itself, the message comes again."""

    async def scene():
        broker = ScriptedBroker(message("1"))
        consuming = Consuming(broker, done)

        async def handle(*_):
            raise SystemError("a bug")

        monkeypatch.setattr("retrysafe.consumers.judge.Judge.handle", handle)
        async with consuming:
            await broker.until(1)
        assert broker.actions == [("1", "retry")]

    run(scene())


def test_an_object_that_was_closed_does_not_spin():
    async def scene():
        broker = ScriptedBroker()
        async with Consuming(broker, done, options={"back_off": LATER}) as consuming:
            await consuming.idem.close()
            await broker.inbox.put(message("1"))
            await broker.until(1)
        _, action, verdict = broker.settled[0]
        assert (action, verdict.delay) == (Action.LEAVE, LATER.first)
        assert Closed.__name__ in verdict.reason

    run(scene())


# Refused before any message is taken.


def test_set_up_is_checked_before_the_first_message():
    """A consumer that cannot work takes no message, and marks none as done."""

    async def scene():
        for options, error in (
            ({"policy": Idempotency(MemoryStore()).policy}, PolicyInvalid),
            ({"aliases": ["x" * 256]}, CallerMissing),
        ):
            broker = ScriptedBroker(message("1"))
            consuming = Consuming(broker, done, options=options)
            with pytest.raises(error):
                await consuming.consumer.run_async()
            assert (broker.limits, broker.settled, broker.is_open) == ([], [], False)

    run(scene())


def test_handlers_and_objects_must_be_of_one_kind():
    def plain(message):
        return None

    with pytest.raises(InvalidInput, match="AsyncIdempotency"):
        Consumer(Idempotency(MemoryStore()), done, None)
    with pytest.raises(InvalidInput, match="block the event loop"):
        Consumer(AsyncIdempotency(MemoryStore()), plain, None)
    with pytest.raises(InvalidInput, match="takes an Idempotency"):
        Consumer(MemoryStore(), plain, None)
    with pytest.raises(InvalidInput, match="concurrency"):
        Consumer(Idempotency(MemoryStore()), plain, None, concurrency=0)

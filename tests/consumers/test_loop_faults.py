"""The consumer's loop when something fails that is not the handler: logs, callbacks, settling."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta

import pytest

from retrysafe.consumers import Action
from retrysafe.consumers.deadlines import Deadlines
from retrysafe.consumers.loop import ConsumerLoop
from retrysafe.consumers.verdict import Outage, Verdict
from tests.consumers.scripted import ScriptedBroker, message
from tests.consumers.test_loop import LATER, Consuming, run, started_by, until

ACK = Verdict(Action.ACK, "done", has_run=True)
LEASE = timedelta(seconds=7)


class Looping:
    """A loop at work, without an engine: the verdicts are the test's."""

    def __init__(self, broker, handle, **options):
        self.loop = ConsumerLoop(
            broker,
            handle,
            **{
                "concurrency": 2,
                "stop_limit": timedelta(seconds=1),
                "cut_delay": LEASE,
                **options,
            },
        )

    async def __aenter__(self):
        self.task = asyncio.create_task(self.loop.run())
        return self.loop

    async def __aexit__(self, *_):
        self.loop.stop()
        async with asyncio.timeout(10):
            await self.task


def ack_all(seen):
    async def handle(message, deadline, tries):
        seen.append(message.identity)
        return ACK

    return handle


# Logs.


def test_a_failing_key_of_a_log_leaves_the_others_their_room():
    """What waits behind it is in nobody's way, up to a limit; and none of it overtakes."""

    async def scene():
        seen = []
        broker = ScriptedBroker(
            *(message(f"a{number}", lane="a") for number in range(60)),
            *(message(f"b{number}", lane="b") for number in range(3)),
            gives_back=False,
        )

        async def handle(message, deadline, tries):
            seen.append(message.identity)
            is_bad = message.lane == "a"
            return Verdict(Action.RETRY, "bad", timedelta(hours=1)) if is_bad else ACK

        async with Looping(broker, handle):
            await broker.until(3)
        assert seen == ["a0", "b0", "b1", "b2"]

    run(scene())


def test_what_waits_behind_a_failing_key_has_a_limit(monkeypatch):
    monkeypatch.setattr("retrysafe.consumers.loop._BEHIND_PER_PLACE", 2)

    async def scene():
        handle, begun, ends = started_by([str(number) for number in range(30)])
        broker = ScriptedBroker(
            *(message(str(number), lane="a") for number in range(30)), gives_back=False
        )
        async with Consuming(broker, handle, concurrency=2) as consuming:
            await begun["0"].wait()
            # Four of room, one of which runs; and four more behind it.
            await until(lambda: consuming.consumer.counts.received == 8)
            for _ in range(10):
                await asyncio.sleep(0)
            assert consuming.consumer.counts.received == 8
            for each in ends.values():
                each.set()
            await broker.until(30)
        assert [name for name, _ in broker.actions] == [str(number) for number in range(30)]

    run(scene())


def test_what_a_log_lost_takes_nothing_with_it():
    """Nothing is given back to a log: it would not come again, and its offset never move."""

    async def scene():
        handle, begun, ends = started_by(["old", "new"])
        broker = ScriptedBroker(message("old", lane="a"), gives_back=False, renew_seconds=0.06)
        broker.lost = {"old"}
        async with Consuming(broker, handle) as consuming:
            await begun["old"].wait()
            await until(lambda: broker.extended)
            await broker.inbox.put(message("new", lane="a"))
            await until(lambda: consuming.consumer.counts.received == 2)
            ends["old"].set()
            ends["new"].set()
            await broker.until(1)
        assert broker.actions == [("new", "ack")]
        assert consuming.consumer.counts.lost == 1

    run(scene())


def test_a_verdict_that_a_log_did_not_take_is_told_again_and_takes_up_room(monkeypatch):
    """A log does not deliver the message again: nobody else would ever tell it."""
    monkeypatch.setattr("retrysafe.consumers.loop._AWAY_SECONDS", 0.01)

    async def scene():
        broker = ScriptedBroker(*(message(str(number)) for number in range(9)), gives_back=False)
        settle, refusals = broker.settle, []

        async def refuse(settled):
            refusals.append(len(settled))
            if len(refusals) % 2:
                raise ConnectionError("away")
            return [each for each, _ in settled]

        broker.settle = refuse
        seen = []
        async with Looping(broker, ack_all(seen)) as loop:
            await until(lambda: len(refusals) >= 20)
            # Of nine, no more than there is room for.
            assert loop.counts.received == 4
            broker.settle = settle
            await broker.until(9)
        assert sorted(broker.actions) == [(str(number), "ack") for number in range(9)]
        assert len(seen) == 9

    run(scene())


def test_what_a_log_did_not_take_is_withdrawn_or_told_once_more_at_the_stop(monkeypatch):
    monkeypatch.setattr("retrysafe.consumers.loop._AWAY_SECONDS", 3600)

    async def scene():
        broker = ScriptedBroker(message("1"), message("2"), gives_back=False)
        settle = broker.settle
        refused = asyncio.Event()

        async def refuse(settled):
            refused.set()
            return [each for each, _ in settled]

        broker.settle = refuse
        async with Looping(broker, ack_all([])) as loop:
            await until(lambda: loop.counts.unsettled == 2)
            broker.settle = settle
            broker.buffer.withdraw(lambda each: each.identity == "1")
            await broker.until(1)
        assert broker.actions == [("1", "leave"), ("2", "ack")]

    run(scene())


def test_a_held_message_keeps_its_consumer_in_the_group():
    """Its attempt has ended, and is lost by that: the message is this consumer's all the same."""

    async def scene():
        broker = ScriptedBroker(message("1"), gives_back=False, renew_seconds=0.03)

        async def fail(message):
            raise LookupError("not yet")

        async with Consuming(broker, fail, options={"back_off": LATER}) as consuming:
            await until(lambda: consuming.consumer.counts.retried)
            asked = len(broker.extended)
            await until(lambda: len(broker.extended) >= asked + 3)

    run(scene())


def test_where_only_the_connection_counts_the_broker_always_hears_of_its_consumer():
    """Every claim may be lost, and every handler go on: the membership must not end by that."""

    async def scene():
        heard = []

        async def extend(messages):
            heard.append(len(messages))
            return []

        for seconds, expected in ((math.inf, [1]), (30.0, [])):
            heard.clear()
            now = 0.0
            deadlines = Deadlines(extend, seconds, lambda: now, renew_seconds=1.0)  # noqa: B023
            deadlines.add(message("1")).stops_renewing = lambda: True
            now = 2.0
            await deadlines.renew()
            assert heard == expected

    run(scene())


# Handlers that are cancelled.


@pytest.mark.parametrize("gives_back", [True, False])
def test_a_handler_that_met_a_cancellation_leaves_its_message_until_the_lease_ends(gives_back):
    async def scene():
        broker = ScriptedBroker(message("1", lane="a"), gives_back=gives_back)

        async def handle(message, deadline, tries):
            task = asyncio.create_task(asyncio.sleep(9))
            task.cancel()
            await task

        async with Looping(broker, handle) as loop:
            await until(lambda: loop.counts.left == 1)
            # Held, where it cannot be given back.
            assert len(broker.actions) == gives_back
        action, verdict = broker.settled[0][1:]
        assert action is Action.LEAVE
        if gives_back:
            assert verdict.delay == LEASE

    run(scene())


def test_a_handler_that_ends_well_though_it_was_cut_is_settled_by_its_end():
    async def scene():
        begun = asyncio.Event()
        broker = ScriptedBroker(message("1"))

        async def handle(message, deadline, tries):
            begun.set()
            try:
                await asyncio.sleep(99)
            except asyncio.CancelledError:
                return ACK

        async with Looping(broker, handle, stop_limit=timedelta(0)):
            await begun.wait()
        assert broker.actions == [("1", "ack")]

    run(scene())


def test_an_outage_that_ends_with_a_fault_opens_the_room_again():
    async def scene():
        broker = ScriptedBroker(message("1"))
        ours = Verdict(Action.RETRY, "store", timedelta(0), Outage.OURS)
        steps = iter([ours, SystemError("a bug"), ACK])

        async def handle(message, deadline, tries):
            step = next(steps)
            if isinstance(step, Exception):
                raise step
            return step

        async with Looping(broker, handle):
            await broker.until(1)
            await broker.inbox.put(message("2"))
            await broker.until(2)
        assert broker.actions == [("1", "retry"), ("2", "ack")]

    run(scene())


# Callbacks and settling.


def test_a_callback_that_raises_does_not_end_the_settling():
    async def scene():
        broker = ScriptedBroker(message("1"))

        def raise_always(counts):
            raise BrokenPipeError

        async with Looping(broker, ack_all([]), on_change=raise_always):
            await broker.until(1)
            await broker.inbox.put(message("2"))
            await broker.until(2)

    run(scene())


def test_a_broker_that_hangs_while_it_settles_costs_one_batch(monkeypatch):
    monkeypatch.setattr("retrysafe.consumers.loop._SETTLE_SECONDS", 0.05)

    async def scene():
        broker = ScriptedBroker(message("1"))
        settle, hung = broker.settle, asyncio.Event()

        async def hang(settled):
            hung.set()
            await asyncio.Event().wait()

        broker.settle = hang
        async with Looping(broker, ack_all([])) as loop:
            await hung.wait()
            broker.settle = settle
            await broker.inbox.put(message("2"))
            await broker.until(1)
            assert (broker.actions, loop.counts.unsettled) == ([("2", "ack")], 1)
            broker.settle = hang
            await broker.inbox.put(message("3"))
            await until(lambda: loop.counts.received == 3)

    run(scene())


def test_verdicts_that_the_broker_is_not_told_yet_take_up_room():
    async def scene():
        broker = ScriptedBroker(*(message(str(number)) for number in range(9)))
        settle, goes_on = broker.settle, asyncio.Event()

        async def wait(settled):
            await goes_on.wait()
            return await settle(settled)

        broker.settle = wait
        seen = []
        async with Looping(broker, ack_all(seen)):
            await until(lambda: len(seen) == 4)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(seen) == 4
            goes_on.set()
            await broker.until(9)

    run(scene())


def test_a_settler_that_dies_stops_the_consumer_and_is_heard():
    async def scene():
        broker = ScriptedBroker(message("1"))

        async def die(settled):
            raise GeneratorExit

        broker.settle = die
        looping = Looping(broker, ack_all([]))
        with pytest.raises(GeneratorExit):
            async with asyncio.timeout(10):
                await looping.loop.run()

    run(scene())

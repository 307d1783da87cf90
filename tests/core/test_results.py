"""Every protected call ends in exactly one result, whatever it met on its way."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.events import (
    UNFOLLOWED,
    Event,
    EventKind,
    MessageFacts,
    Progress,
    Reporter,
    Result,
)
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.core.model import ClaimAnswer, Condition, Decision, Ending
from retrysafe.core.policy import InFlight, Policy
from retrysafe.errors import ClaimLost, StoreRejected, StoreUnavailable
from tests.core.building import KEY, OTHER_MARK, call
from tests.core.driving import Fault, World, drive
from tests.core.sample_types import Declined

DOWN = StoreUnavailable("down")
WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=10))


def ended(world: World, made, invoke=None) -> Result:
    """The result of one more call, whatever it raises."""
    before = len(world.heard.results)
    try:
        world.first.answer(made, invoke)
    except Exception:
        pass
    (result,) = world.heard.results[before:]
    return result


def test_each_ending_is_a_result():
    """Executed, failed, released, and their replays."""
    world = World()
    first = world.first
    refused = Policy(terminal=Declined)
    assert ended(world, call(key=Key("a", caller="t"))) is Result.EXECUTED
    assert ended(world, call(key=Key("a", caller="t"))) is Result.REPLAYED
    fails = first.raising(Declined("no"))
    assert ended(world, call(key=Key("b", caller="t"), policy=refused), fails) is Result.FAILED
    assert ended(world, call(key=Key("b", caller="t"), policy=refused), fails) is Result.REPLAYED
    released = first.raising(ConnectionError("again"))
    assert ended(world, call(key=Key("c", caller="t")), released) is Result.RELEASED
    judged = call(key=Key("d", caller="t"), judge=lambda value: Ending.FAILED)
    assert ended(world, judged) is Result.FAILED


def test_each_refusal_is_a_result():
    world = World()
    other = world.process()
    running = other.start(call(), other.pausing(7))
    assert ended(world, call()) is Result.IN_FLIGHT
    assert ended(world, call(OTHER_MARK)) is Result.MISMATCHED
    waiter = world.first.start(call(policy=WAITING))
    while not waiter.is_done:
        world.clock.advance(1)
        waiter.step()
    assert world.heard.results[-1] is Result.WAIT_TIMED_OUT
    running.step()
    assert world.heard.results[-1] is Result.EXECUTED


def test_an_outcome_that_cannot_be_stored_is_withheld():
    """Also where the store refuses it, and is down for a while on top of that."""
    world = World()
    assert ended(world, call(), world.first.returning(object())) is Result.WITHHELD
    world.first.writer.settle_faults.extend([Fault(StoreRejected("no")), Fault(DOWN)])
    flow = world.first.start(call(key=Key("b", caller="t")))
    while not flow.is_done:
        world.clock.advance(1)
        flow.step()
    assert world.heard.results[-1] is Result.WITHHELD


def test_used_up_attempts_are_exhausted():
    world = World()
    policy = Policy(attempt_limit=1)
    other = world.process()
    other.start(call(policy=policy), other.pausing(None)).throw(GeneratorExit())
    assert world.heard.results == [Result.LOST]
    world.clock.advance(31)
    assert ended(world, call(policy=policy)) is Result.EXHAUSTED


def test_an_outage_is_told_once_and_one_that_passes_is_none():
    world = World()
    world.first.writer.claim_faults.extend([Fault(DOWN)] * 3)
    flow = world.first.start(call())
    while not flow.is_done:
        world.clock.advance(1)
        flow.step()
    assert world.heard.results == [Result.STORE_UNAVAILABLE]
    world.first.writer.claim_faults.append(Fault(DOWN))
    flow = world.first.start(call(), world.first.pausing(7))
    while world.kinds[-1] != EventKind.CLAIMED:
        world.clock.advance(1)
        flow.step()
    flow.throw(GeneratorExit())
    # The outage had passed; then it was cut off.
    assert world.heard.results[1:] == [Result.LOST]


def test_a_lost_claim_is_lost():
    world = World()
    first = world.first
    flow = first.start(call(), first.pausing(7))
    world.clock.advance(31)
    other = world.process()
    other.answer(call(), other.returning(8))
    flow.step()
    assert isinstance(flow.error, ClaimLost)
    assert world.heard.results == [Result.EXECUTED, Result.LOST]


def test_a_call_that_may_run_unprotected_stays_open_while_the_store_is_down():
    """Whoever runs it, or refuses it, ends it; any other result is told at once."""
    world = World()
    first = world.first
    report, made = first.ports.report, call(fails_open=True)
    first.writer.claim_faults.extend([Fault(DOWN)] * 3)
    flow = first.start(made)
    while not flow.is_done:
        world.clock.advance(1)
        flow.step()
    assert world.heard.results == []
    assert not report.begins(made, first.clock.monotonic)
    report(EventKind.UNPROTECTED, made)
    report.end(made)
    report.end(made)
    assert world.heard.results == [Result.UNPROTECTED]
    assert ended(world, call(fails_open=True)) is Result.EXECUTED


def test_times_are_those_of_the_parts_of_a_call():
    """The claim, the wait, the operation and the ending; none for what there was not."""
    world = World()
    events: list[Event] = []
    world.first.ports.report._emit = events.append
    other = world.process()
    running = other.start(call(), other.pausing(7))
    world.first.clock.meanwhile.append(lambda: world.clock.advance(2) or running.step())
    world.first.answer(call(policy=WAITING))
    (replayed,) = [event.call for event in events if event.kind is EventKind.ANSWERED]
    assert replayed.result is Result.REPLAYED
    assert replayed.wait_seconds == replayed.seconds == pytest.approx(2, abs=0.1)
    assert (replayed.operation_seconds, replayed.settle_seconds) == (None, None)
    assert replayed.ending == ""
    world.first.answer(call(key=Key("own", caller="t")), advancing(world, 3))
    executed = events[-1].call
    assert (executed.operation_seconds, executed.claim_seconds) == (3, 0)
    assert (executed.settle_seconds, executed.wait_seconds) == (0, None)
    assert executed.ending == "succeeded"


def advancing(world: World, seconds: float):
    async def operation(attempt) -> int:
        world.clock.advance(seconds)
        return 7

    return operation


def test_a_caller_is_a_digest_unless_it_is_asked_for():
    own = Event(EventKind.CALLED, KEY)
    assert own.caller != KEY.caller
    assert len(own.caller) == 16
    assert Event(EventKind.CALLED, Key("k", caller=GLOBAL)).caller == ""


def test_a_key_that_no_rule_reads_is_a_call_of_its_own():
    heard: list[Event] = []
    Reporter(heard.append).passed_by(KEY, "(no rule)")
    assert [event.kind for event in heard] == [EventKind.UNMATCHED, EventKind.ANSWERED]
    assert heard[-1].result is Result.UNMATCHED


def test_where_nobody_listens_nothing_is_noted():
    made = call()
    assert not Reporter(None).begins(made, float)
    assert made.progress is UNFOLLOWED
    Reporter(None).tell_begin(made)
    made.progress.begin_wait()
    made.progress.end_claim(1.0)
    made.progress.replays("trace")
    Reporter(None).end(made)
    assert (UNFOLLOWED.wait_began_monotonic, UNFOLLOWED.claim_seconds) == (None, None)
    assert UNFOLLOWED.first_trace == ""
    # One who hears of the first event only, and one who hears of the last only.
    for kind in (EventKind.CALLED, EventKind.ANSWERED):
        heard: list[Event] = []
        made, report = call(), Reporter(heard.append, frozenset({kind}))
        assert report.begins(made, float)
        report.tell_begin(made)
        report.end(made)
        assert [event.kind for event in heard] == [kind]


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, Result.EXECUTED),
        (DOWN, Result.STORE_UNAVAILABLE),
        (ClaimLost("gone"), Result.LOST),
        (KeyboardInterrupt(), Result.LOST),
        (ValueError("no"), Result.RELEASED),
    ],
)
def test_a_call_of_which_nothing_was_noted_is_told_by_its_error(error, result):
    progress = Progress(float)
    progress.end(error)
    assert progress.result is result
    assert progress.error == ("" if error is None else type(error).__name__)


def test_a_record_without_its_outcome_is_a_replay():
    world = World()
    gone = ClaimAnswer(Decision.REPLAY, Condition.SUCCEEDED, attempt=1, remaining_ms=1000)

    async def answered(request):
        return gone

    world.first.engine._writer.claim = answered
    assert ended(world, call()) is Result.REPLAYED


def test_a_call_brings_its_message():
    """For traces: where it came from, and what was sent with it."""
    facts = MessageFacts("nats:ORDERS", "7", {})
    made = call(message=facts)
    assert Reporter([].append).begins(made, float)
    assert made.progress.message is facts


def traced(world: World) -> list[Progress]:
    """Has every call bring a trace of its own; gives those that were answered."""
    answered: list[Progress] = []

    def hear(event: Event) -> None:
        if event.kind is EventKind.CALLED:
            event.call.trace = f"trace-{len(answered)}"
        elif event.kind is EventKind.ANSWERED:
            answered.append(event.call)

    world.first.ports.report._emit = hear
    return answered


@pytest.mark.parametrize("cache", [True, False])
def test_a_replay_hears_of_the_trace_of_its_first_run(cache):
    """From the store and from memory; it is stored with the owner of the claim."""
    world = World(cache=cache)
    answered = traced(world)
    for _ in range(3):
        world.first.answer(call())
    assert [item.first_trace for item in answered] == ["", "trace-0", "trace-0"]
    stored = drive(world.store.read(KEY))
    assert stored.record.owner == "host:1 trace-0"


def test_a_follower_hears_of_the_trace_of_its_leader():
    world = World()
    answered = traced(world)
    leader = world.first.start(call(), world.first.pausing(7))
    follower = world.first.start(call(policy=WAITING))
    leader.step()
    follower.step()
    assert follower.value.replayed
    assert answered[-1].first_trace == "trace-0"

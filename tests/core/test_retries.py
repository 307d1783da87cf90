"""Asking again before anything has run: a store that is down, and one that takes no writes."""

from __future__ import annotations

import pytest

from retrysafe.core.engine import CLAIM_TRIES
from retrysafe.core.retries import FAILOVER_SECONDS, Retries
from retrysafe.errors import StoreNotWritable, StoreUnavailable
from tests.core.building import call
from tests.core.driving import Fault, World

DOWN = StoreUnavailable("no answer")
READ_ONLY = StoreNotWritable("a standby")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_store_that_is_down_is_asked_so_many_times():
    """The limit is on tries, however long each of them takes."""
    clock = Clock()
    retries = Retries(3, clock)
    clock.now = 100.0
    assert [retries.pause_after(DOWN) for _ in range(3)] == [0.05, 0.1, None]


def test_a_handler_inside_of_the_store_is_not_asked_to_wait_for_itself():
    """Its own thread is what is in the way."""
    error = StoreUnavailable("inside")
    error.is_reentry = True
    assert Retries(3, Clock()).pause_after(error) is None


def test_a_server_without_writes_is_asked_for_a_while():
    """The limit is on the time, and the pauses grow up to a limit of their own."""
    clock = Clock()
    retries = Retries(3, clock)
    pauses = []
    while (pause := retries.pause_after(READ_ONLY)) is not None:
        pauses.append(pause)
        clock.now += pause
    assert pauses[:5] == [0.05, 0.1, 0.2, 0.4, 0.5]
    assert max(pauses) == 0.5
    assert FAILOVER_SECONDS - 0.5 < sum(pauses) <= FAILOVER_SECONDS


def test_waiting_for_a_primary_uses_up_no_try():
    """A failover cuts connections too, so both kinds of failure come mixed."""
    retries = Retries(3, Clock())
    errors = [DOWN, READ_ONLY, READ_ONLY, DOWN, READ_ONLY]
    assert None not in [retries.pause_after(error) for error in errors]
    assert retries.pause_after(DOWN) is None


def test_a_claim_waits_for_a_failover_that_is_over_soon():
    """It is granted to the first who asks when the server takes writes, with the first token."""
    world = World()
    process = world.first
    process.writer.claim_faults.extend([Fault(READ_ONLY)] * (CLAIM_TRIES + 1))
    assert process.answer(call()).attempt == 1
    assert sum(process.clock.slept) == 0.75
    assert len({request.token for request in process.writer.claims}) == 1
    assert world.ran == [1]


def test_a_claim_is_refused_when_the_failover_takes_long():
    """In bounded time, with nothing run and nothing left behind."""
    world = World()
    process = world.first
    process.writer.claim_faults.extend([Fault(READ_ONLY)] * 100)
    with pytest.raises(StoreNotWritable):
        process.answer(call())
    assert sum(process.clock.slept) <= FAILOVER_SECONDS
    assert world.ran == []
    assert process.engine.flights_count == 0

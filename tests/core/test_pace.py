"""The pace of a sweeper, on a simulated store: it keeps up, and it never runs flat out."""

from __future__ import annotations

import pytest

from retrysafe.core.events import Reporter
from retrysafe.core.model import SweepReport
from retrysafe.core.pace import Pace
from retrysafe.errors import StoreError, StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.workers.duties import SweepDuty
from retrysafe.workers.sweeper import Sweeper


class Simulated:
    """A store in which keys expire at a rate, a clock, and a signal that stops in the end."""

    def __init__(
        self, *, expire_per_second, row_seconds, rounds_per_walk=1, minutes=30, most_per_round=5_000
    ):
        self.now = 0.0
        self.busy = 0.0
        self.backlog = 0.0
        self.worst_backlog = 0.0
        self.rounds = 0
        self.limits = []
        self.rests = []
        self.failures = 0
        self._rate = expire_per_second
        self._row_seconds = row_seconds
        self._rounds_per_walk = rounds_per_walk
        self._most_per_round = most_per_round
        self._walked = 0
        self._ends_at = minutes * 60

    def monotonic(self):
        return self.now

    async def sweep(self, limit):
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("down")
        self.limits.append(limit)
        self.rounds += 1
        # A walk finds its share of the backlog in each of its rounds.
        here = int(self.backlog / (self._rounds_per_walk - self._walked))
        most = min(limit, self._most_per_round)
        removed = min(most, here)
        self.backlog -= removed
        self._pass(0.002 + removed * self._row_seconds)
        self.busy += 0.002 + removed * self._row_seconds
        if removed < most:
            self._walked += 1
        has_more = self._walked < self._rounds_per_walk
        if not has_more:
            self._walked = 0
        return SweepReport(removed, 0, has_more)

    async def sleep(self, seconds):
        await self.wait(seconds)

    async def wait(self, seconds):
        self.rests.append(seconds)
        self._pass(seconds)
        return self.now >= self._ends_at

    def _pass(self, seconds):
        self.now += seconds
        self.backlog += seconds * self._rate
        self.worst_backlog = max(self.worst_backlog, self.backlog)

    def swept(self, **options):
        run_sync(Sweeper(self, self, **options).run(self))
        return self


@pytest.mark.parametrize("rate", [10, 300, 5_000, 20_000])
@pytest.mark.parametrize("rounds_per_walk", [1, 40])
def test_it_keeps_up_with_the_expiry_and_leaves_most_of_the_time_to_others(rate, rounds_per_walk):
    """No backlog grows without end, and the store works for the sweeper a fifth of the time."""
    world = Simulated(
        expire_per_second=rate, row_seconds=5e-6, rounds_per_walk=rounds_per_walk
    ).swept()
    # A minute's worth is what may wait between two walks.
    assert world.worst_backlog <= rate * 70
    assert world.busy <= world.now * 0.21


def test_it_keeps_up_with_a_store_that_ends_its_rounds_early():
    """PostgreSQL removes a few hundred keys a round, so that nobody waits for what it writes.

    Rounds of three milliseconds, with their rests, are all the time that there is: a walk that
    removes much is not followed by a second rest for the same work.
    """
    world = Simulated(expire_per_second=20_000, row_seconds=2e-6, most_per_round=448).swept()
    # The first minute's worth: then there was nothing yet, and it rested.
    assert world.worst_backlog <= 20_000 * 70
    assert world.backlog <= 20_000 * 2
    assert world.busy <= world.now * 0.21


def test_a_large_store_with_little_to_remove_is_walked_over_at_half_the_pace():
    """Looking costs the server something too, and fewer walks save it."""
    world = Simulated(expire_per_second=100, row_seconds=5e-6, rounds_per_walk=4_000).swept()
    assert world.busy <= world.now * 0.12


@pytest.mark.parametrize("kind", ["keys", "outcomes", "entries"])
def test_whatever_is_removed_counts(kind):
    """A store whose sweeper only removes one kind is come back to soon, and in larger rounds."""
    pace = Pace()
    report = SweepReport(has_more=False, **{kind: 500})
    assert pace.rest_after(report, started_at=9.99, ended_at=10.0) == 1.0
    assert pace.limit == 750


def test_removing_is_not_rested_for_twice_after_a_dense_phase():
    """Rows that lie far apart end a round early, however large the limit has grown before."""
    pace = Pace()
    for _ in range(5):
        pace.rest_after(SweepReport(pace.limit, has_more=True), started_at=0.0, ended_at=0.01)
    assert pace.limit > 3_000
    for number in range(1_000):
        report = SweepReport(32, has_more=number < 999)
        rest = pace.rest_after(report, started_at=number * 0.05, ended_at=number * 0.05 + 0.01)
    # What about one round's worth takes to expire, and not four times the work once more.
    assert rest < 10.0


def test_a_round_that_finds_next_to_nothing_is_rested_for_twice():
    """Also after rounds that were slow, and made the limit small."""
    pace = Pace()
    for _ in range(5):
        pace.rest_after(SweepReport(50, has_more=True), started_at=0.0, ended_at=1.0)
    assert pace.limit == 50
    for number in range(1_000):
        report = SweepReport(15, has_more=number < 999)
        rest = pace.rest_after(report, started_at=number * 0.05, ended_at=number * 0.05 + 0.01)
    assert rest == pytest.approx(40.0)


def test_a_slow_last_round_is_rested_for():
    """Also where the walk ends with it and there was much to remove."""
    pace = Pace()
    rest = pace.rest_after(SweepReport(500, 0, False), started_at=0.0, ended_at=5.0)
    assert rest == 20.0


def test_a_quiet_store_is_hardly_touched():
    """Nothing expires: one look a minute."""
    world = Simulated(expire_per_second=0, row_seconds=5e-6).swept()
    assert world.rounds <= 31
    assert set(world.rests) == {60.0}


def test_the_more_expires_the_more_often_it_comes():
    """The pause between walks follows the rate of expiry."""
    slow = Simulated(expire_per_second=20, row_seconds=5e-6).swept()
    fast = Simulated(expire_per_second=200, row_seconds=5e-6).swept()
    assert 2 * slow.rounds < fast.rounds


def test_a_slow_store_gets_small_rounds():
    """A round that takes long is a sign that others wait; the next one takes less."""
    world = Simulated(expire_per_second=100, row_seconds=1e-3).swept()
    assert min(world.limits) < 100
    assert world.limits[-1] <= 100
    assert world.worst_backlog <= 100 * 120


def test_a_large_backlog_is_removed_in_growing_rounds_with_rests():
    """After a week without a sweep: large rounds, but a rest after each of them."""
    world = Simulated(expire_per_second=10, row_seconds=5e-6, minutes=10)
    world.backlog = 2_000_000
    world.swept()
    assert world.backlog < 1_000
    assert max(world.limits) > 2_000
    assert min(world.rests) >= 0.01
    assert world.busy <= world.now * 0.21


def test_a_sweep_that_is_to_end_rests_as_well():
    """Whoever drains a backlog beside a service leaves it most of the time too."""
    world = Simulated(expire_per_second=0, row_seconds=5e-6)
    world.backlog = 100_000
    duty = SweepDuty(world, world, Reporter(None))
    run_sync(duty.drain())
    assert duty.report.keys == 100_000
    assert len(world.rests) == world.rounds - 1
    assert world.busy <= world.now * 0.21


def test_limits_have_bounds():
    """Neither grows nor shrinks for ever."""
    pace = Pace()
    for _ in range(50):
        pace.rest_after(SweepReport(pace.limit, 0, True), started_at=0.0, ended_at=0.001)
    assert pace.limit == 5_000
    for _ in range(50):
        pace.rest_after(SweepReport(pace.limit, 0, True), started_at=0.0, ended_at=1.0)
    assert pace.limit == 50


def test_an_outage_is_waited_for_ever_longer_and_told():
    """The sweeper outlives the store's restart, without hammering it."""
    world = Simulated(expire_per_second=1, row_seconds=5e-6, minutes=10)
    world.failures = 8
    told = []
    world.swept(on_outage=told.append)
    assert world.rests[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(told) == 8
    assert world.rounds > 0


def test_another_error_ends_the_sweeper():
    """A missing right or a wrong schema does not heal by waiting."""

    class Refusing(Simulated):
        async def sweep(self, limit):
            raise StoreError("permission denied")

    with pytest.raises(StoreError, match="permission"):
        Refusing(expire_per_second=0, row_seconds=0).swept()


def test_a_clock_that_stands_still_divides_by_nothing():
    """Two walks within one tick of the clock give a rest, not an error."""
    pace = Pace()
    assert pace.rest_after(SweepReport(3, 0, False), started_at=5.0, ended_at=5.0) == 1.0
    assert pace.rest_after(SweepReport(0, 0, False), started_at=5.0, ended_at=5.0) == 60.0

"""When a duplicate is told to come back: by past runs, by this run's age, within its lease."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core.run_times import (
    COUNT_LIMIT,
    MAXIMUM_SECONDS,
    MINIMUM_SECONDS,
    OPERATIONS_LIMIT,
    RunTimes,
)

LEASE = 30.0


def known(*seconds: float) -> RunTimes:
    made = RunTimes()
    for each in seconds:
        made.add("pay", each)
    return made


@pytest.mark.parametrize(
    ("elapsed", "hint"), [(0, 1), (0.4, 1), (1.2, 1), (2.3, 2), (4.7, 5), (20, 20), (29, 29)]
)
def test_of_an_unknown_operation_it_grows_with_the_age_of_the_run(elapsed, hint):
    """A second at first, then as long again as the run has taken."""
    assert RunTimes().retry_after("pay", elapsed, LEASE) == hint


@pytest.mark.parametrize(("taken", "hint"), [(0.01, 0.1), (0.5, 0.6), (1.0, 2), (9.5, 10)])
def test_of_a_known_operation_it_is_what_is_left_of_its_usual_time(taken, hint):
    """Within the step of a fifth in which runs are counted, and in whole seconds past the first."""
    run_times = known(*[taken] * 20)
    assert run_times.retry_after("pay", 0.0, LEASE) == pytest.approx(hint, rel=0.2)
    assert run_times.retry_after("other", 0.0, LEASE) == 1.0


def test_only_runs_that_took_as_long_as_this_one_count():
    """Fast refusals beside slow payments do not have a payment's duplicate ask all the time."""
    run_times = known(*[0.01] * 60, *[10.0] * 5)
    assert run_times.retry_after("pay", 0.0, LEASE) == MINIMUM_SECONDS
    assert run_times.retry_after("pay", 1.0, LEASE) == pytest.approx(9.5, abs=1.0)


def test_a_run_that_takes_longer_than_all_before_is_asked_for_less_and_less():
    """From the usual time on, the pauses grow with the run."""
    run_times = known(*[0.02] * 20)
    hints = [run_times.retry_after("pay", elapsed, LEASE) for elapsed in (0.05, 0.4, 2.0, 12.0)]
    assert hints == [MINIMUM_SECONDS, 0.4, 2.0, 12.0]


def test_old_runs_fade():
    """An operation that became slow is soon known to be slow."""
    run_times = known(*[0.02] * 1_000)
    for _ in range(COUNT_LIMIT):
        run_times.add("pay", 5.0)
    assert run_times.retry_after("pay", 0.0, LEASE) == pytest.approx(5.5, abs=1.0)


def test_the_number_of_operations_is_bounded():
    """The oldest makes room, and the newest are known."""
    run_times = RunTimes()
    for number in range(OPERATIONS_LIMIT + 10):
        run_times.add(f"operation {number}", 5.0)
    assert len(run_times._sketches) == OPERATIONS_LIMIT
    assert run_times.retry_after("operation 0", 0.0, LEASE) == 1.0
    assert run_times.retry_after(f"operation {OPERATIONS_LIMIT}", 0.0, LEASE) > 5.0


def test_without_a_lease_it_has_a_limit_of_its_own():
    """A transaction that nobody can look into is asked for once a minute at least."""
    assert RunTimes().retry_after("pay", 0.0, None) == 1.0
    assert RunTimes().retry_after("pay", 7_200.0, None) == MAXIMUM_SECONDS
    assert known(*[86_400 * 9] * 3).retry_after("pay", 0.0, None) == MAXIMUM_SECONDS


@given(
    taken=st.lists(st.floats(0, 200_000), max_size=30),
    elapsed=st.floats(0, 200_000),
    left=st.floats(-5, 100_000),
)
def test_it_is_never_beyond_the_lease(taken, elapsed, left):
    """Rounded up to whole seconds, as HTTP has it, it is at most one second or what is left."""
    hint = known(*taken).retry_after("pay", elapsed, left)
    assert hint >= MINIMUM_SECONDS
    assert max(1, ceil(hint)) <= max(1.0, left)

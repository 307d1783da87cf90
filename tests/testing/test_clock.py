"""The manual clock moves when it is told to, and only then."""

import threading
from datetime import timedelta

import pytest

from retrysafe.testing import ManualClock


def test_it_stands_still():
    """Reading the clock does not move it."""
    clock = ManualClock(5)
    assert [clock(), clock()] == [5, 5]


def test_it_starts_at_an_ordinary_instant():
    """Leases and windows of either direction fit around it."""
    assert ManualClock()() == ManualClock()() == 1_700_000_000_000


def test_it_advances_exactly():
    """To the millisecond, also over durations that floats cannot hold."""
    clock = ManualClock(0)
    assert clock.advance(timedelta(milliseconds=1)) == 1
    assert clock.advance(timedelta(days=100_000, milliseconds=7)) == 8_640_000_000_008
    assert clock() == 8_640_000_000_008


def test_it_jumps_back():
    """As a wall clock does when somebody corrects it."""
    clock = ManualClock(10_000)
    assert clock.jump_back(timedelta(seconds=3)) == 7_000
    assert clock() == 7_000


@pytest.mark.parametrize("move", [ManualClock.advance, ManualClock.jump_back])
@pytest.mark.parametrize("by", [timedelta(microseconds=1_500), timedelta(milliseconds=-1)])
def test_it_refuses_what_it_cannot_do_exactly(move, by):
    """Rounding would move a boundary; a negative step would be the other method."""
    clock = ManualClock(5)
    with pytest.raises(ValueError, match="whole, non-negative milliseconds"):
        move(clock, by)
    assert clock() == 5


def test_it_loses_no_move_of_any_thread():
    """Two moves at once are both counted."""
    clock = ManualClock(0)
    barrier = threading.Barrier(4)

    def move():
        barrier.wait(30)
        for _ in range(2_000):
            clock.advance(timedelta(milliseconds=1))

    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert clock() == 8_000


def test_it_shows_its_instant():
    """A failing assertion that prints the clock is readable."""
    assert repr(ManualClock(5)) == "ManualClock(5)"

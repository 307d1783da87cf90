"""`StopIteration`, which Python lets no coroutine raise."""

from __future__ import annotations

import pytest

from retrysafe.core.model import Ending
from retrysafe.core.policy import Policy
from retrysafe.core.steps.history import StepRetry
from retrysafe.core.stop_iteration import own_error, raisable
from retrysafe.runtime.drive import run_sync


async def _stop():
    raise StopIteration(3)


def test_what_python_makes_of_it_is_seen_through():
    """By its cause and its words: somebody's own RuntimeError is what it is."""
    with pytest.raises(RuntimeError) as caught:
        run_sync(_stop())
    made = caught.value
    assert own_error(made) is made.__cause__
    assert own_error(raisable(made.__cause__)) is made.__cause__
    assert str(raisable(made.__cause__)) == str(made)
    own = RuntimeError("sold out")
    own.__cause__ = StopIteration()

    class Sold(RuntimeError):
        """With the same words."""

    twin = Sold(*made.args)
    twin.__cause__ = StopIteration()
    for error in (own, twin, RuntimeError(*made.args), ValueError()):
        assert own_error(error) is error
        assert raisable(error) is error


def test_a_list_of_what_left_no_effects_knows_it():
    policy = Policy(terminal=(StopIteration,), nothing_happened=(StopIteration,))
    assert policy.is_nothing_happened(raisable(StopIteration()))
    assert not policy.is_nothing_happened(RuntimeError())
    assert not policy.is_nothing_happened(None)


class _End(StopIteration):
    """Somebody's own."""


@pytest.mark.parametrize("kind", [_End, StopIteration, RuntimeError])
def test_a_list_may_name_what_was_raised_or_what_python_made_of_it(kind):
    """Everybody else sees a RuntimeError: a list that names it must not let the key run again."""
    error = raisable(_End())
    assert Policy(terminal=(kind,), retryable=(Exception,)).judge(error) is Ending.FAILED
    assert Policy(nothing_happened=(kind,), terminal=(kind,)).is_nothing_happened(error)
    assert StepRetry(tries=2, on=(kind,)).allows(error, 1)
    assert not StepRetry(tries=2, on=(KeyError,)).allows(error, 1)


def test_the_more_special_of_both_counts():
    policy = Policy(terminal=(StopIteration,), retryable=(RuntimeError,))
    assert policy.judge(raisable(StopIteration())) is Ending.FAILED
    assert policy.judge(RuntimeError()) is Ending.RELEASED

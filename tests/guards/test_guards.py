"""Every guard matters: without it, its named test fails, and the simulation finds the damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.guards.guards import GUARDS, Guard, render_page
from tests.guards.mutation import GuardMoved, InCode
from tests.simulation.world import run_seed

PAGE = Path(__file__).parents[2] / "docs" / "guards.md"
# Each guard's removal shows within a few hundred seeds; the limit only bounds a failing test.
SEEDS_LIMIT = 4_000
# What a broken mutation would raise; it must not pass for a property that failed.
NO_PROPERTY_FAILURE = (GuardMoved, SyntaxError, NameError, TypeError, AttributeError)

guarded = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.check.__name__[5:])
simulated = pytest.mark.parametrize(
    "guard",
    [guard for guard in GUARDS if guard.breaks],
    ids=lambda guard: guard.check.__name__[5:],
)


@contextmanager
def without(guard: Guard) -> Iterator[None]:
    """A context in which the guard is gone."""
    with ExitStack() as stack:
        for mutation in guard.mutations:
            stack.enter_context(mutation.removed())
        yield


@guarded
def test_the_named_test_fails_without_the_guard(guard: Guard):
    """The test passes on the code as it is, fails without the guard, and passes again."""
    guard.check()
    with without(guard), pytest.raises((Exception, pytest.fail.Exception)) as failure:
        guard.check()
    assert not isinstance(failure.value, NO_PROPERTY_FAILURE)
    guard.check()


@simulated
def test_the_simulation_finds_the_missing_guard(guard: Guard):
    """A seed breaks a promise that the guard stands for, and keeps it when the guard is back."""
    with without(guard):
        broken = next(
            (result for result in map(run_seed, range(SEEDS_LIMIT)) if result.violation), None
        )
    assert broken is not None, f"{SEEDS_LIMIT} seeds do not notice that the guard is gone"
    name = broken.violation.partition(":")[0]
    assert name in {invariant.name for invariant in guard.breaks}, broken
    assert run_seed(broken.seed).violation is None


def test_a_guard_that_moved_is_noticed():
    """A mutation whose text is gone fails, instead of proving nothing."""
    moved = InCode(run_seed, "a text that is not in it", "")
    with pytest.raises(GuardMoved), moved.removed():
        pass


def test_every_guard_has_a_test_of_its_own():
    """No two guards hide behind one test."""
    assert len({guard.check for guard in GUARDS}) == len(GUARDS)
    assert len({guard.name for guard in GUARDS}) == len(GUARDS)


def test_the_page_is_up_to_date():
    """`docs/guards.md` is what the list says; `make docs` writes it."""
    assert PAGE.read_text(encoding="utf-8") == render_page()

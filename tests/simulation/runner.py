"""Runs many seeds, and tells about the first one that breaks a promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from tests.simulation.world import Result, run_seed

# Enough to see what led to it; the whole trace comes with --trace.
TRACE_TAIL_LINES = 40


class SimulationFailed(AssertionError):
    """A seed that breaks a promise; the message says how to see it again."""


def describe(result: Result) -> str:
    """A failed seed for people: what broke, how it came to that, and how to replay it."""
    traced = run_seed(result.seed, is_traced=True)
    return "\n".join(
        (
            f"seed {result.seed} breaks {result.violation}",
            *traced.trace[-TRACE_TAIL_LINES:],
            f"replay it with: python -m tests.simulation --seed {result.seed} --trace",
        )
    )


def run_seeds(
    seeds: Iterable[int], *, goes_on: Callable[[int], bool] = lambda done: True
) -> tuple[int, Counter[str]]:
    """How many seeds ran, and what they showed; raises `SimulationFailed` at the first bad one."""
    seen: Counter[str] = Counter()
    done = 0
    for seed in seeds:
        result = run_seed(seed)
        seen.update(result.seen)
        done += 1
        if result.violation is not None:
            raise SimulationFailed(describe(result))
        if not goes_on(done):
            break
    return done, seen

"""`python -m tests.simulation`: replay one seed, or run many for as long as wanted."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.runner import SimulationFailed, run_seeds
from tests.simulation.world import run_seed

PROGRESS_SECONDS = 5.0


def main() -> int:
    """The exit code: 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every step")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this long")
    options = parser.parse_args()
    if options.seed is not None:
        return _replay(options.seed, options.trace)
    return _soak(options.first, options.seeds, options.minutes)


def _replay(seed: int, is_traced: bool) -> int:
    result = run_seed(seed, is_traced=is_traced)
    for line in result.trace:
        print(line)
    print(f"seed {seed}: {result.violation or 'every promise held'}")
    return 0 if result.violation is None else 1


def _soak(first: int, count: int, minutes: float) -> int:
    started = shown = time.monotonic()

    def goes_on(done: int) -> bool:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= PROGRESS_SECONDS:
            shown = now
            rate = done / (now - started)
            print(f"{done:>10,} of {count:,} seeds, {rate:,.0f} per second", flush=True)
        return now - started < minutes * 60

    try:
        done, seen = run_seeds(range(first, first + count), goes_on=goes_on)
    except SimulationFailed as failure:
        print(failure)
        return 1
    for what, times in sorted(seen.items()):
        print(f"{times:>12,}  {what}")
    seconds = time.monotonic() - started
    print(f"{done:,} seeds from {first} on, {seconds:.0f} s: every promise held")
    return 0


if __name__ == "__main__":
    sys.exit(main())

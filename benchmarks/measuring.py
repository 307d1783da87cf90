"""What all measurements share: rounds in turn, medians, progress, a table and JSON."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path("var/bench")


@dataclass
class Row:
    """One measured way, and what it must reach."""

    name: str
    per_second: float
    ratio: float
    target: float | None = None
    note: str = ""
    # For latencies and the like: the ratio must not be above the target.
    is_ceiling: bool = False
    # Whether it was measured as the target asks for it. If not, it shows nothing of the target.
    is_as_asked: bool = True

    @property
    def is_met(self) -> bool:
        if self.target is None:
            return True
        is_reached = self.ratio <= self.target if self.is_ceiling else self.ratio >= self.target
        return is_reached and self.is_as_asked

    @property
    def verdict(self) -> str:
        """What the measurement says of the target; nothing where there is none."""
        if self.target is None:
            return ""
        if not self.is_as_asked:
            return "NOT SHOWN"
        return "met" if self.is_met else "MISSED"


@dataclass
class Report:
    """The rows of one benchmark."""

    title: str
    baseline: str
    rows: list[Row] = field(default_factory=list)
    # Short rounds on small tables show that everything runs. They judge no target.
    is_quick: bool = False

    @property
    def is_met(self) -> bool:
        return self.is_quick or all(row.is_met for row in self.rows)

    def show(self) -> None:
        print(f"\n{self.title}  (ratios to: {self.baseline}, unless the name says otherwise)")
        if self.is_quick:
            print("  QUICK: short rounds on small tables. Verdicts in brackets judge nothing.")
        print(f"  {'way':<72}{'op/s':>10}{'ratio':>8}{'target':>9}")
        for row in self.rows:
            bound = "≤ " if row.is_ceiling else "≥ "
            target = "" if row.target is None else f"{bound}{row.target:.2f}"
            verdict = f"({row.verdict})" if self.is_quick and row.verdict else row.verdict
            print(
                f"  {row.name:<72}{row.per_second:>10,.0f}{row.ratio:>8.2f}{target:>9}"
                f"  {verdict}".rstrip()
            )
            if row.note:
                print(f"    {row.note}")

    def save(self, name: str) -> None:
        """As JSON; a quick run does not replace the results of a whole one."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        rows = [vars(row) | {"verdict": row.verdict} for row in self.rows]
        document = vars(self) | {"rows": rows}
        path = RESULTS / (f"{name}-quick.json" if self.is_quick else f"{name}.json")
        path.write_text(json.dumps(document, indent=2) + "\n")


def in_turn(ways: dict[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Operations per second of each way, measured in turn so that noise hits all alike.

    Every second round goes backwards, so that a machine that slows down is not held against the
    ways that come last.

    A way gets the round's number and returns its operations per second.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    total = rounds * len(ways)
    done = 0
    started = time.monotonic()
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            found[name].append(ways[name](number))
            done += 1
            elapsed = time.monotonic() - started
            print(
                f"\r  {done}/{total} {name:<60} {elapsed:5.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print("\r" + " " * 90 + "\r", end="", file=sys.stderr)
    return found


def machine() -> str:
    """What the figures were measured on, and what else it had to do."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"


def progress(text: str) -> None:
    """One line that says what is going on."""
    print(f"\r  {text:<70}", end="", file=sys.stderr, flush=True)


def discards_at_once(folder: Path, mounts: str) -> bool:
    """Whether the disk under a folder is told of every block that is freed, while commits wait.

    `mounts` is what the system says is mounted where, and how: Linux tells in /proc/mounts.
    """
    found, is_found_discarding = Path("/"), False
    for line in mounts.splitlines():
        _, place, _, options, *_ = line.split()
        # The last one counts where several are mounted at one place.
        if folder.is_relative_to(place) and Path(place).is_relative_to(found):
            found, is_found_discarding = Path(place), "discard" in options.split(",")
    return is_found_discarding


def compared(
    found: dict[str, list[float]], name: str, ours: str, base: str, target: float | None
) -> Row:
    """One way against another of the same rounds: the targets that no other noise decides."""
    note = (
        f"{statistics.median(found[ours]):,.0f}/s against {statistics.median(found[base]):,.0f}/s"
    )
    rate, ratio = statistics.median(found[ours]), median_ratio(found[ours], found[base])
    return Row(name, rate, ratio, target, note)


def median_ratio(ways: list[float], baseline: list[float]) -> float:
    """The median over the rounds of each round's own ratio."""
    return statistics.median(way / base for way, base in zip(ways, baseline, strict=True))


def chance(slow: list[float], others: list[float]) -> float:
    """How often as many values, picked at random from all, would be as large as the first ones.

    By their ranks, counted over every pick: Wilcoxon's test, one-sided. Below one in twenty, there
    is an effect that can be told from what the others differ by themselves.
    """
    values = [*slow, *others]
    # Half a rank for each of two that are alike.
    ranks = [sum((other < one) + (other == one) / 2 for other in values) for one in values]
    found = sum(ranks[: len(slow)])
    picks = [sum(pick) for pick in itertools.combinations(ranks, len(slow))]
    return sum(pick >= found for pick in picks) / len(picks)

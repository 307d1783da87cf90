"""What all measurements share: rounds in turn, medians, progress, a table and JSON."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plotting import bar_chart

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

    def show(self) -> None:
        print(f"\n{self.title}  (ratios to: {self.baseline})")
        print(f"  {'way':<72}{'op/s':>10}{'ratio':>8}{'target':>9}")
        for row in self.rows:
            bound = "≤ " if row.is_ceiling else "≥ "
            target = "" if row.target is None else f"{bound}{row.target:.2f}"
            print(
                f"  {row.name:<72}{row.per_second:>10,.0f}{row.ratio:>8.2f}{target:>9}"
                f"  {row.verdict}".rstrip()
            )
            if row.note:
                print(f"    {row.note}")

    def save(self, name: str) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        rows = [vars(row) | {"is_met": row.is_met} for row in self.rows]
        document: dict[str, Any] = {"title": self.title, "baseline": self.baseline, "rows": rows}
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
        (RESULTS / f"{name}.svg").write_text(bar_chart(self.title, document["rows"]))


def in_turn(ways: dict[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Operations per second of each way, measured in turn so that noise hits all alike.

    A way gets the round's number and returns its operations per second.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    total = rounds * len(ways)
    done = 0
    started = time.monotonic()
    for number in range(rounds):
        for name, way in ways.items():
            found[name].append(way(number))
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

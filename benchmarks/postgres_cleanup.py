"""Cleanup under load: what sweeping and dropping a day do to the claims of a busy service.

The machine itself slows claims down for seconds at a time, now more and now less. So quiet times
are taken in turn with the others, within one load: the sweeper works and rests in turn, and a day
is dropped in the middle of a load, several times. Each of these times has its p99, and their
medians are compared; the p99 of all claims of a kind together is told as well. Each load starts
after a checkpoint, so that the sweep meets pages that it has to write whole; the load's own such
pages are written while it warms up, which counts for nobody. What the server's own vacuum does
after the sweep's deletions falls on both kinds of times alike. A claim counts from the instant at
which it was due. A stall of less than fifty milliseconds does not show in the p99 of five seconds,
so the slowest claims are told beside it.

Freeing as much space as a day takes shows whoever does it, on a file system that discards freed
blocks at once (the mount option `discard`, which the rows tell of). So plain files of that size are
removed as well. Quiet times differ from each other by more than any ratio could stand for, so
whether a drop shows is told by ranks as well: how often as many times, picked at random from all,
are as slow.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.measuring import Row, chance, discards_at_once, progress
from benchmarks.postgres_filling import fill, fill_past_day, migrate, tidy
from benchmarks.postgres_load import Load, Overloaded, percentile
from retrysafe.core.model import SweepReport
from retrysafe.runtime.task_ports import TaskClock
from retrysafe.stores.opening import open_store
from retrysafe.workers.sweeper import Sweeper

SCHEMA = "cleanup"


@dataclass(frozen=True)
class Times:
    """How long the parts of a load last, in seconds."""

    # What counts for nobody at the start of a load.
    warm_up: float
    # How long the sweeper works, and then rests.
    turn: float
    # How long a load is quiet before a day is dropped, and for how long that counts.
    side: float


# Linux writes down what a server has appended after half a minute, at once, and commits wait for
# that. With turns of 5 s it would fall on the sweeper's work each time, or each time on its rest;
# with these it falls on both in turn.
WHOLE = Times(warm_up=8.0, turn=4.4, side=5.0)
QUICK = Times(warm_up=0.5, turn=0.5, side=1.0)
DAYS = 8
# Of the maximum load.
SHARE = 0.5
# A machine that was fast when its maximum was measured may be slow by now.
TRIES = 3
SLOWER = 0.75

Span = tuple[float, float]


@dataclass
class Found:
    """The claims that were asked for while something was going on, and in quiet times, in ms.

    A list for each such time, one after the other: stalls of the machine fall on some of them, what
    the cleanup does falls on all of its own.
    """

    busy: list[list[float]] = field(default_factory=list)
    quiet: list[list[float]] = field(default_factory=list)

    def add(self, load: dict[str, Any], busy: list[Span], quiet: list[Span]) -> None:
        """Takes in the claims of a load; those at other times are left out."""
        claims = sorted(zip(load["asked_at"], load["claims_ms"], strict=True))
        asked_at = [asked for asked, _ in claims]
        for spans, found in ((busy, self.busy), (quiet, self.quiet)):
            for since, until in spans:
                part = claims[bisect_left(asked_at, since) : bisect_left(asked_at, until)]
                found.append([milliseconds for _, milliseconds in part])

    @property
    def ratio(self) -> float:
        """The usual p99 while something was going on, to that in quiet times."""
        return _usual_p99(self.busy) / _usual_p99(self.quiet)

    @property
    def note(self) -> str:
        pooled = [
            percentile(list(itertools.chain.from_iterable(times)), 0.99)
            for times in (self.busy, self.quiet)
        ]
        return (
            f"{_told(self.busy)}; quiet {_told(self.quiet)}; "
            f"all claims together {pooled[0] / pooled[1]:.2f}"
        )


def _chance(slow: list[list[float]], others: list[list[float]]) -> float:
    """How often chance alone makes some of these times as slow, by their p99."""
    return chance(*([percentile(claims, 0.99) for claims in times] for times in (slow, others)))


def _usual_p99(times: list[list[float]]) -> float:
    return statistics.median(percentile(claims, 0.99) for claims in times)


def _told(times: list[list[float]]) -> str:
    claims = list(itertools.chain.from_iterable(times))
    each = " ".join(f"{percentile(part, 0.99):.0f}" for part in times)
    return (
        f"{_usual_p99(times):.1f} ms (each {each}; all {len(claims):,} together "
        f"{percentile(claims, 0.99):.1f}, slowest {max(claims):.0f})"
    )


class _Turns:
    """Tells the sweeper to go on; on the way it lets it work and rest in turn."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = time.monotonic()
        self._is_over = False
        self.busy: list[Span] = []
        self.quiet: list[Span] = []

    def set(self) -> None:
        self._is_over = True

    async def wait(self, seconds: float | None) -> bool:
        if not self._is_over:
            await asyncio.sleep(seconds or 0)
        now = time.monotonic()
        worked_seconds = now - self._since
        if self._is_over or worked_seconds >= self._seconds:
            # The last turn ends with the walk, and may be too short for a p99.
            if worked_seconds >= self._seconds / 2:
                self.busy.append((self._since, now))
            await asyncio.sleep(self._seconds)
            self._since = time.monotonic()
            # What has piled up meanwhile is worked off first. A p99 of five seconds is decided by
            # fifty milliseconds, so quiet times would be as slow as the others.
            self.quiet.append((now + self._seconds / 10, self._since))
        return self._is_over


async def _sweep(url: str, turns: _Turns) -> tuple[int, int]:
    """One walk of the sweeper that `retrysafe sweep --forever` and a worker run."""
    store = open_store(url, is_async=True)
    keys = rounds = 0

    def count(report: SweepReport) -> None:
        nonlocal keys, rounds
        keys += report.keys
        rounds += 1
        if not report.has_more:
            turns.set()

    try:
        await Sweeper(store, TaskClock(), on_round=count).run(turns)
    finally:
        await store.close()
    return keys, rounds


async def _drop(url: str) -> None:
    store = open_store(url, is_async=True)
    try:
        dropped = await store.tend_partitions()
    finally:
        await store.close()
    assert len(dropped) == 1, dropped


class Cleanup:
    """Loads of claims at one rate, with cleanup beside them now and then."""

    def __init__(self, url: str, rate: float, times: Times) -> None:
        self._url = url
        self._target = f"{url}?schema={SCHEMA}"
        self._rate = rate
        self._times = times

    def _loaded(self) -> Load:
        """A load that is under way, with no write of the part before left for it."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("CHECKPOINT")
        load = Load(
            "paced",
            url=self._target,
            rate=self._rate,
            warm_up=self._times.warm_up,
            until_told=True,
        )
        load.go()
        time.sleep(1.0)  # Until it is up to its rate.
        return load

    def swept(self) -> tuple[Found, int, str]:
        """The claims of a whole walk, how many keys it removed, and how it went."""
        load = self._loaded()
        turns = _Turns(self._times.turn)
        removed, rounds = asyncio.run(_sweep(self._target, turns))
        load.go()
        found = Found()
        found.add(load.result(), turns.busy, turns.quiet)
        seconds = sum(until - since for since, until in turns.busy)
        return found, removed, f"{rounds} rounds in {seconds:.1f} s of {len(turns.busy)} turns"

    def during(self, actions: list[tuple[Found, Callable[[], object]]]) -> None:
        """One load in which things are done, each after a quiet time; adds the claims of both."""
        load = self._loaded()
        spans: list[tuple[Found, Span, Span]] = []
        for found, action in actions:
            started = time.monotonic()
            time.sleep(self._times.side)
            done = time.monotonic()
            action()
            until = done + self._times.side
            time.sleep(max(0.0, until - time.monotonic()))
            spans.append((found, (done, until), (started, done)))
        load.go()
        result = load.result()
        for found, busy, quiet in spans:
            found.add(result, [busy], [quiet])

    def drop(self) -> None:
        asyncio.run(_drop(self._target))

    def fill_past_day(self, outcomes: int) -> tuple[Path, int]:
        """Makes the day to be dropped; where the server's files are, and how large the day is."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            day = fill_past_day(connection, SCHEMA, outcomes)
            tidy(connection, SCHEMA)
            row = connection.execute(
                "SELECT current_setting('data_directory'), pg_total_relation_size(%s::regclass)",
                (f"{SCHEMA}.{day}",),
            ).fetchone()
        assert row is not None
        return Path(row[0]).parent, row[1]


def _disk_note(folder: Path) -> str:
    mounts = Path("/proc/mounts")
    if mounts.exists() and discards_at_once(folder, mounts.read_text()):
        return "on a file system that is mounted with discard; "
    return ""


def _written(folder: Path, size: int) -> Path:
    """A plain file as large as the day, beside the server's."""
    path = folder / "as-large-as-a-day"
    with path.open("wb") as file:
        for _ in range(size // 2**20):
            file.write(b"x" * 2**20)
        # What has not reached the disk has no blocks there that could be freed.
        file.flush()
        os.fsync(file.fileno())
    return path


def run(url: str, maximum: float, *, is_quick: bool) -> list[Row]:
    """Sweeps a quarter of the keys, and drops days, under half of the maximum load.

    Under less where that is too much, which the rows then say: the cleanup may be the reason.
    """
    share = SHARE
    for _ in range(TRIES - 1):
        try:
            return _told_share(_measured(url, maximum * share, is_quick=is_quick), share)
        except Overloaded:
            share *= SLOWER
            progress(f"that is too much just now; again with {maximum * share:,.0f}/s")
    return _told_share(_measured(url, maximum * share, is_quick=is_quick), share)


def _told_share(rows: list[Row], share: float) -> list[Row]:
    if share < SHARE:
        for row in rows:
            row.note = f"at {share:.0%} of the maximum, as more piled up; {row.note}"
            row.is_as_asked = False
    return rows


def _measured(url: str, rate: float, *, is_quick: bool) -> list[Row]:
    keys = 100_000 if is_quick else 2_000_000
    expired = keys // 4
    cleanup = Cleanup(url, rate, QUICK if is_quick else WHOLE)
    progress(f"filling {keys:,} keys, {expired:,} of them expired")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE".encode())
        migrate(f"{url}?schema={SCHEMA}")
        fill(connection, SCHEMA, keys, expired="i % 4 = 0")
        tidy(connection, SCHEMA)
    progress("sweeping under load")
    swept, removed, how = cleanup.swept()
    assert removed == expired, (removed, expired)

    dropped, freed = Found(), Found()
    days = 1 if is_quick else DAYS
    for day in range(days):
        progress(f"dropping day {day + 1} of {days} under load")
        # Only now, because the sweep drops such days too.
        folder, size = cleanup.fill_past_day(expired)
        actions: list[tuple[Found, Callable[[], object]]] = [
            (dropped, cleanup.drop),
            (freed, _written(folder, size).unlink),
        ]
        # Each of them is the first in turn.
        cleanup.during(actions[::-1] if day % 2 else actions)
    disk = _disk_note(folder)
    quiet = dropped.quiet + freed.quiet
    return [
        Row(
            f"claim p99 while {expired:,} of {keys:,} are swept",
            rate,
            swept.ratio,
            1.5,
            f"{how}: {swept.note}",
            is_ceiling=True,
        ),
        Row(
            f"claim p99 while a day of {expired:,} outcomes is dropped",
            rate,
            dropped.ratio,
            # What quiet times differ by on a calm machine.
            1.25,
            disk + dropped.note,
            is_ceiling=True,
        ),
        # Where they differ by more, no effect can be told unless quiet times are seldom as slow.
        Row(
            "the drop against quiet times, p (0.05 or more: not significant)",
            rate,
            _chance(dropped.busy, quiet),
            0.05,
            f"{days} drops, {len(quiet)} quiet times",
            # A single drop cannot be told from two quiet times.
            is_as_asked=not is_quick,
        ),
        Row(
            f"claim p99 while a plain file of {size / 2**20:,.0f} MB is removed instead",
            rate,
            freed.ratio,
            note=disk + freed.note,
        ),
    ]

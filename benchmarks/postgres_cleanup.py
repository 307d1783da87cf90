"""Cleanup under load: what sweeping and dropping a day do to the claims of a busy service.

Every load of claims is compared with quiet ones from the same conditions: each starts after a
checkpoint, and the quiet ones are taken in turn with the others, after the same filling. The claims
of all quiet runs are pooled, stalls included. What happens once a day counts within the time of one
load; its slowest claim is told beside the percentile, which does not show a single short stall.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from benchmarks.measuring import Row, progress
from benchmarks.postgres_filling import fill, fill_past_day, migrate, tidy
from benchmarks.postgres_load import Load, measure, percentile
from retrysafe.core.model import SweepReport
from retrysafe.runtime.sweeping import Sweeper
from retrysafe.runtime.waiting import TaskWaiting
from retrysafe.wiring import open_store

SCHEMA = "cleanup"
# Long enough for a 99th percentile that a single stall of the machine does not decide.
SECONDS = 20.0
# The percentile of each part of this length is taken as well: stalls that come now and then, from
# the host or from a vacuum, decide that of the whole, and not the median of these.
PART_SECONDS = 2.0


async def _sweep(url: str) -> tuple[int, int]:
    """One walk of the sweeper that `retrysafe sweep --forever` and a worker run."""
    store = open_store(url, is_async=True)
    waiting = TaskWaiting()
    stopping = waiting.signal()
    keys = rounds = 0

    def count(report: SweepReport) -> None:
        nonlocal keys, rounds
        keys += report.keys
        rounds += 1
        if not report.has_more:
            stopping.set()

    try:
        await Sweeper(store, waiting, on_round=count).run(stopping)
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
    """Loads of claims at one rate, with and without cleanup beside them."""

    def __init__(self, url: str, rate: float, seconds: float) -> None:
        self._url = url
        self._target = f"{url}?schema={SCHEMA}"
        self._rate = rate
        self._seconds = seconds
        self.quiet_ms: list[float] = []
        self._quiet_p99s: list[float] = []

    def settle(self) -> None:
        """Leaves no write of the part before for the next one."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("CHECKPOINT")

    def quiet(self) -> None:
        """Nothing but the load."""
        self.settle()
        found = measure("paced", url=self._target, rate=self._rate, seconds=self._seconds)
        self.quiet_ms += found["claims_ms"]
        self._quiet_p99s.append(found["claim_p99_ms"])

    def swept(self) -> tuple[list[float], int, int, float]:
        """The claims during a whole walk; what it removed in how many rounds and seconds."""
        self.settle()
        load = Load("paced", url=self._target, rate=self._rate, until_told=True)
        load.go()
        started = time.monotonic()
        removed, rounds = asyncio.run(_sweep(self._target))
        elapsed = time.monotonic() - started
        load.go()
        return load.result()["claims_ms"], removed, rounds, elapsed

    def during(self, what: Callable[[], None]) -> list[float]:
        """The claims of a load in the middle of which something is done."""
        self.settle()
        load = Load("paced", url=self._target, rate=self._rate, seconds=self._seconds)
        load.go()
        time.sleep(self._seconds / 2)
        what()
        found: list[float] = load.result()["claims_ms"]
        return found

    def drop(self) -> None:
        asyncio.run(_drop(self._target))

    def fill_past_day(self, outcomes: int) -> tuple[Path, int]:
        """Makes the day to be dropped; where the server's files are, and how large the day is."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            fill_past_day(connection, SCHEMA, outcomes)
            tidy(connection, SCHEMA)
            row = connection.execute(
                "SELECT current_setting('data_directory'), pg_total_relation_size(inhrelid) "
                "FROM pg_inherits WHERE inhparent = %s::regclass ORDER BY 2 DESC LIMIT 1",
                (f"{SCHEMA}.outcomes",),
            ).fetchone()
        assert row is not None
        return Path(row[0]).parent, row[1]

    def note(self) -> str:
        """How calm the quiet runs were."""
        each = ", ".join(f"{p99:.1f}" for p99 in self._quiet_p99s)
        return (
            f"quiet p99 {percentile(self.quiet_ms, 0.99):.1f} ms (each run: {each}), "
            f"slowest {max(self.quiet_ms):.0f} ms; median p99 of {PART_SECONDS:g} s: "
            f"quiet {self.usual_p99(self.quiet_ms):.1f} ms"
        )

    def usual_p99(self, claims_ms: list[float]) -> float:
        """The median of the percentiles of short parts of a load."""
        count = int(self._rate * PART_SECONDS)
        parts = [claims_ms[start : start + count] for start in range(0, len(claims_ms), count)]
        return statistics.median(percentile(part, 0.99) for part in parts)


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
    """Sweeps a quarter of the keys, and drops days, under half of the maximum load."""
    keys = 100_000 if is_quick else 2_000_000
    expired = keys // 4
    rate = maximum / 2
    cleanup = Cleanup(url, rate, 2.0 if is_quick else SECONDS)
    migrate(f"{url}?schema={SCHEMA}")
    progress(f"filling {keys:,} keys, {expired:,} of them expired")
    with psycopg.connect(url, autocommit=True) as connection:
        fill(connection, SCHEMA, keys, expired="i % 4 = 0")
        tidy(connection, SCHEMA)
    cleanup.quiet()
    progress("sweeping under load")
    swept, removed, rounds, elapsed = cleanup.swept()
    assert removed == expired, (removed, expired)

    progress("dropping a day under load")
    # Only now, because the sweep drops such days too.
    folder, size = cleanup.fill_past_day(expired)
    cleanup.quiet()
    dropped = cleanup.during(cleanup.drop)
    # Freeing space costs a file system something whoever does it: most where freed blocks are
    # discarded at once (the mount option `discard`). This tells that from what the drop costs.
    freed = cleanup.during(_written(folder, size).unlink)

    calm = percentile(cleanup.quiet_ms, 0.99)
    swept_p99, dropped_p99, freed_p99 = (
        percentile(found, 0.99) for found in (swept, dropped, freed)
    )
    return [
        Row(
            f"claim p99 while {expired:,} of {keys:,} are swept",
            rate,
            swept_p99 / calm,
            1.5,
            f"p99 {swept_p99:.1f} ms; {rounds} rounds in {elapsed:.1f} s; {cleanup.note()}, "
            f"swept {cleanup.usual_p99(swept):.1f} ms",
            is_ceiling=True,
        ),
        Row(
            f"claim p99 while a day of {expired:,} outcomes is dropped",
            rate,
            dropped_p99 / calm,
            # What quiet runs differ by on a calm machine; the note says how calm this one was.
            1.25,
            f"p99 {dropped_p99:.1f} ms, slowest {max(dropped):.0f} ms; {cleanup.note()}, "
            f"dropped {cleanup.usual_p99(dropped):.1f} ms",
            is_ceiling=True,
        ),
        Row(
            f"the same while a plain file of {size / 2**20:,.0f} MB is removed instead",
            rate,
            freed_p99 / calm,
            note=f"p99 {freed_p99:.1f} ms, slowest {max(freed):.0f} ms",
        ),
    ]

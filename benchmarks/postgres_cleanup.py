"""Cleanup under load: what sweeping and dropping a day do to the claims of a busy service."""

from __future__ import annotations

import asyncio
import statistics
import time

import psycopg

from benchmarks.measuring import Row, progress
from benchmarks.postgres_filling import fill, fill_past_day, migrate, tidy
from benchmarks.postgres_load import Load, measure
from retrysafe.wiring import open_store

SCHEMA = "cleanup"
SWEEP_LIMIT = 1_000
# The pause of `retrysafe sweep` between two rounds.
PAUSE_SECONDS = 0.02
# Samples of claim times must be long enough for a 99th percentile.
QUIET_SECONDS = 6.0


async def _sweep(url: str) -> tuple[int, int]:
    store = open_store(url, is_async=True)
    keys = rounds = 0
    try:
        while True:
            report = await store.sweep(SWEEP_LIMIT)
            keys += report.keys
            rounds += 1
            if not report.has_more:
                return keys, rounds
            await asyncio.sleep(PAUSE_SECONDS)
    finally:
        await store.close()


async def _drop(url: str) -> int:
    store = open_store(url, is_async=True)
    try:
        return len(await store.tend_partitions())
    finally:
        await store.close()


def run(url: str, maximum: float, *, is_quick: bool) -> list[Row]:
    """Sweeps a quarter of the keys, and drops a day, under half of the maximum load."""
    keys = 100_000 if is_quick else 2_000_000
    expired = keys // 4
    target = f"{url}?schema={SCHEMA}"
    rate = maximum / 2
    migrate(target)
    progress(f"filling {keys:,} keys, {expired:,} of them expired")
    with psycopg.connect(url, autocommit=True) as connection:
        fill(connection, SCHEMA, keys, expired="i % 4 = 0")
        tidy(connection, SCHEMA)
    seconds = 2.0 if is_quick else QUIET_SECONDS
    quiet = [measure("paced", url=target, rate=rate, seconds=seconds) for _ in range(2)]

    progress("sweeping under load")
    load = Load("paced", url=target, rate=rate, until_told=True)
    load.go()
    started = time.monotonic()
    removed, rounds = asyncio.run(_sweep(target))
    elapsed = time.monotonic() - started
    load.go()
    swept = load.result()
    assert removed == expired, (removed, expired)

    progress("dropping a day under load")
    with psycopg.connect(url, autocommit=True) as connection:
        # Only now, because the sweep drops such days too.
        fill_past_day(connection, SCHEMA, expired)
        tidy(connection, SCHEMA)
    load = Load("paced", url=target, rate=rate, seconds=seconds)
    load.go()
    time.sleep(seconds / 2)
    dropped = asyncio.run(_drop(target))
    drop = load.result()
    assert dropped == 1, dropped

    quiet += [measure("paced", url=target, rate=rate, seconds=seconds) for _ in range(2)]
    calm = statistics.median(found["claim_p99_ms"] for found in quiet)
    spread = max(found["claim_p99_ms"] for found in quiet) / calm
    quiet_note = f"quiet claim p99 {calm:.1f} ms, the worst quiet run {spread:.2f} times that"
    return [
        Row(
            f"claim p99 while {expired:,} of {keys:,} are swept",
            rate,
            swept["claim_p99_ms"] / calm,
            1.5,
            f"p99 {swept['claim_p99_ms']:.1f} ms; {rounds} rounds in {elapsed:.1f} s; {quiet_note}",
            is_ceiling=True,
        ),
        Row(
            f"claim p99 while a day of {expired:,} outcomes is dropped",
            rate,
            drop["claim_p99_ms"] / calm,
            # What quiet runs differ by on a calm machine; the note says how calm this one was.
            1.25,
            f"p99 {drop['claim_p99_ms']:.1f} ms; {quiet_note}",
            is_ceiling=True,
        ),
    ]

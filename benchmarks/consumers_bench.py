"""Consumers with an inbox in PostgreSQL, durable, against the loop that people write by hand.

The loop takes one message after the other: a transaction inserts its id, does the work and commits,
then the message is acked. Beside both stands the same loop without any inbox: the broker's own
limit, and what a consumer that repeats work reaches.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import asyncpg
import uvloop

from benchmarks.consumers_brokers import BROKERS, PREFETCH
from benchmarks.measuring import Report, Row, in_turn, machine, median_ratio
from benchmarks.postgres_filling import migrate
from retrysafe import GLOBAL, AsyncIdempotency
from retrysafe.consumers import Consumer, Counts, Message
from retrysafe.consumers.urls import broker_of
from tests.servers.postgres import PostgresServer

ROUNDS = 3
MESSAGES = {"Kafka": 10_000, "NATS": 10_000, "RabbitMQ": 2_000, "SQS (Moto)": 200}
# The loop is slow; so many messages tell its rate.
LOOP_MESSAGES = 2_000
# More than a consumer takes at a time, or the first batch alone would be measured.
QUICK_MESSAGES = 1_000
TARGETS = {"Kafka": 3.0, "NATS": 3.0}


class Meter:
    """Counts messages, from the first one on: joining a group is no part of the rate.

    A message counts until it is settled at the broker.
    """

    def __init__(self) -> None:
        self.count = 0
        self._started = 0.0
        self._ended = 0.0

    def add(self) -> None:
        now = time.perf_counter()
        self.count += 1
        if self.count == 1:
            self._started = now
        self._ended = now

    def settled(self) -> None:
        """All that were counted are settled by now."""
        self._ended = time.perf_counter()

    @property
    def per_second(self) -> float:
        return (self.count - 1) / (self._ended - self._started)


async def plain(broker: Any, count: int) -> float:
    """The library's own loop; nothing is remembered."""
    meter = Meter()

    async def handle(_: str) -> None:
        meter.add()

    await broker.plain(await broker.fill(count), count, handle)
    return meter.per_second


async def by_hand(broker: Any, count: int, url: str) -> float:
    """An inbox of one row a transaction."""
    meter = Meter()
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE IF NOT EXISTS inbox (id text PRIMARY KEY)")
    queue = await broker.fill(count)

    async def handle(name: str) -> None:
        async with connection.transaction():
            is_new = await connection.fetchval(
                "INSERT INTO inbox VALUES ($1) ON CONFLICT DO NOTHING RETURNING true",
                f"{queue}:{name}",
            )
            assert is_new
        meter.add()

    await broker.plain(queue, count, handle)
    await connection.close()
    return meter.per_second


async def with_retrysafe(broker: Any, count: int, url: str) -> float:
    """A consumer; its claims and outcomes are committed in groups."""
    meter, is_done = Meter(), asyncio.Event()
    queue = await broker.fill(count)

    async def handle(_: Message) -> None:
        meter.add()

    def changed(counts: Counts) -> None:
        if counts.handled >= count and not is_done.is_set():
            meter.settled()
            is_done.set()

    async with AsyncIdempotency(url, caller=GLOBAL) as idem:
        consumer = Consumer(
            idem,
            handle,
            broker_of(broker.url(queue), is_async=True),
            concurrency=PREFETCH,
            on_change=changed,
        )
        work = asyncio.create_task(consumer.run_async())
        done = asyncio.create_task(is_done.wait())
        await asyncio.wait({work, done}, timeout=600, return_when=asyncio.FIRST_COMPLETED)
        consumer.stop()
        await work
    assert meter.count == consumer.counts.handled == count, consumer.counts
    return meter.per_second


def measured(report: Report, broker: Any, url: str, count: int, rounds: int) -> None:
    def way(run: Callable[..., Any], messages: int, *given: Any) -> Callable[[int], float]:
        return lambda _: uvloop.run(run(broker, messages, *given))

    found = in_turn(
        {
            f"{broker.name}, an inbox by hand": way(by_hand, min(count, LOOP_MESSAGES), url),
            f"{broker.name}, retrysafe": way(with_retrysafe, count, url),
            f"{broker.name}, no inbox": way(plain, count),
        },
        rounds,
    )
    base = found[f"{broker.name}, an inbox by hand"]
    for name, rates in found.items():
        target = TARGETS.get(broker.name) if name.endswith("retrysafe") else None
        note = f"{count:,} messages, {rounds} rounds" if target else ""
        report.rows.append(
            Row(name, statistics.median(rates), median_ratio(rates, base), target, note)
        )


def run(is_quick: bool = False) -> Report:
    report = Report(
        f"Consumers, messages handled by a function that only counts, {machine()}",
        "the inbox by hand",
    )
    with PostgresServer() as server:
        migrate(server.url())
        for make in BROKERS:
            broker = make()
            try:
                count = MESSAGES[broker.name]
                count = min(count, QUICK_MESSAGES) if is_quick else count
                measured(report, broker, server.url(), count, 1 if is_quick else ROUNDS)
            finally:
                broker.close()
    return report

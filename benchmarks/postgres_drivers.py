"""asyncpg against psycopg's async connections: the store's own statement, merged and one by one."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import asyncpg
import psycopg

from benchmarks.measuring import Report, Row, in_turn, median_ratio, progress
from benchmarks.postgres_filling import fill, migrate, tidy
from retrysafe.core.model import Payload, SettleKind, Settlement
from retrysafe.runtime.identity import mint_token
from retrysafe.stores.postgres import rows, schema
from retrysafe.stores.postgres.drivers.arrays import BytesArray, BytesArrayDumper, encoded
from retrysafe.stores.postgres.drivers.port import PLANNER_SETTINGS
from retrysafe.stores.postgres.statements import Fetch
from retrysafe.testing.suite.probe import key_of, request, settlement
from tests.servers.postgres import PostgresServer

# A busy store has two full batches in flight, an idle one sends single rows.
BUSY = (64, 2)
IDLE = (1, 1)
Shape = tuple[int, int]
BODY = Payload("json.1", b"", b"x" * 500)
TEXTS = schema.statements("retrysafe")
OPTIONS = " ".join(f"-c {name}={value}" for name, value in PLANNER_SETTINGS.items())


async def _lane(fetch: Fetch, batch: int, until: float) -> int:
    """Claims a batch and completes the one before, again and again."""
    count = 0
    endings: list[Settlement] = []
    while time.perf_counter() < until:
        claims = [request(key_of(mint_token().hex())) for _ in range(batch)]
        written = await rows.write(fetch, claims, endings)
        assert len(written.admissions) + len(written.ended) == len(claims) + len(endings)
        count += len(endings)
        endings = [
            settlement(SettleKind.COMPLETE, item.key, item.token, payload=BODY) for item in claims
        ]
    return count


async def _rate(lanes: list[Fetch], batch: int, seconds: float, costs: list[float]) -> float:
    started, cpu = time.perf_counter(), time.process_time()
    until = started + seconds
    count = sum(await asyncio.gather(*(_lane(fetch, batch, until) for fetch in lanes)))
    costs.append((time.process_time() - cpu) / count * 1e6)
    return count / (time.perf_counter() - started)


async def _asyncpg(url: str, shape: Shape, seconds: float, costs: list[float]) -> float:
    batch, lanes = shape
    connections = [
        await asyncpg.connect(url, server_settings=PLANNER_SETTINGS) for _ in range(lanes)
    ]

    def lane(connection: Any) -> Fetch:
        return lambda name, *params: connection.fetch(TEXTS[name], *params)

    try:
        return await _rate([lane(connection) for connection in connections], batch, seconds, costs)
    finally:
        for connection in connections:
            await connection.close()


async def _psycopg(url: str, shape: Shape, seconds: float, costs: list[float]) -> float:
    batch, lanes = shape
    connections = [
        await psycopg.AsyncConnection.connect(
            url,
            autocommit=True,
            prepare_threshold=0,
            cursor_factory=psycopg.AsyncRawCursor,
            options=OPTIONS,
        )
        for _ in range(lanes)
    ]

    def lane(connection: Any) -> Fetch:
        connection.adapters.register_dumper(BytesArray, BytesArrayDumper)

        async def fetch(name: str, *params: Any) -> Any:
            cursor = await connection.execute(TEXTS[name].encode(), encoded(params))
            return await cursor.fetchall()

        return fetch

    try:
        return await _rate([lane(connection) for connection in connections], batch, seconds, costs)
    finally:
        for connection in connections:
            await connection.close()


def run(is_quick: bool = False) -> Report:
    seconds = 1.0 if is_quick else 3.0
    costs: dict[str, list[float]] = {}
    with PostgresServer(settings={"shared_buffers": "1GB", "max_wal_size": "8GB"}) as server:
        url = server.url()
        migrate(url)
        progress("filling")
        with psycopg.connect(url, autocommit=True) as connection:
            fill(connection, "retrysafe", 20_000 if is_quick else 200_000)
            tidy(connection, "retrysafe")
        ways: dict[str, Callable[[int], float]] = {}
        for shape in (BUSY, IDLE):
            for driver, measured in (("psycopg", _psycopg), ("asyncpg", _asyncpg)):
                name = f"{driver}, {shape[1]} x {shape[0]} rows in flight"
                spent = costs[name] = []
                ways[name] = lambda _, measured=measured, shape=shape, spent=spent: asyncio.run(
                    measured(url, shape, seconds, spent)
                )
        found = in_turn(ways, 1 if is_quick else 5)
    report = Report("PostgreSQL drivers for event loops", "psycopg with the same rows in flight")
    names = list(found)
    for number, (name, rates) in enumerate(found.items()):
        note = f"{statistics.median(costs[name]):.0f} µs of Python CPU per operation"
        ratio = median_ratio(rates, found[names[number // 2 * 2]])
        report.rows.append(Row(name, statistics.median(rates), ratio, None, note))
    return report

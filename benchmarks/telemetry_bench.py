"""What observers cost a protected call: the same calls without and with them, in turn.

Each way has an object of its own on one store. The rounds come in changing order, and the figure is
the quickest of a way's many short rounds: what else the machine does only ever adds to one.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from benchmarks.measuring import Report, Row
from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.observe import EventLog
from retrysafe.observe.opentelemetry import OpenTelemetryTraces
from retrysafe.observe.prometheus import PrometheusMetrics
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from tests.servers.postgres import PostgresServer

ROUNDS = 20
CALLS = 40
TASKS = 64


class _Nowhere(SpanExporter):
    """Spans are made, batched and dropped: what sending costs is the application's choice."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def _nothing() -> list[Any]:
    return []


def _metrics() -> list[Any]:
    return [PrometheusMetrics(CollectorRegistry())]


def _traces() -> list[Any]:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Nowhere()))
    return [OpenTelemetryTraces(provider)]


# Each with the most that it may cost; what has no limit is shown as it is.
WAYS: dict[str, tuple[Callable[[], list[Any]], float | None]] = {
    "no observers": (_nothing, None),
    "Prometheus metrics": (_metrics, 1.05),
    "logs and metrics": (lambda: [EventLog(), *_metrics()], 1.08),
    "OpenTelemetry traces": (_traces, None),
}


def charge(number: int) -> dict[str, Any]:
    return {"charge": number}


async def charge_async(number: int) -> dict[str, Any]:
    return charge(number)


Run = Callable[[str, int], None]


def compare(runs: dict[str, Run], rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """Seconds of wall clock and of CPU for a call, by way: the least of its rounds."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started, cpu = time.perf_counter(), time.process_time()
            runs[name](f"{name}-{number}", calls)
            ended = (time.perf_counter() - started, time.process_time() - cpu)
            taken[name].append((ended[0] / calls, ended[1] / calls))
    return {
        name: (min(item[0] for item in all_), min(item[1] for item in all_))
        for name, all_ in taken.items()
    }


def in_thread(idem: Idempotency) -> Run:
    def run(prefix: str, calls: int) -> None:
        for number in range(calls):
            idem.run(f"{prefix}-{number}", charge, number)

    return run


def in_tasks(runner: asyncio.Runner, idem: AsyncIdempotency) -> Run:
    async def all_of(prefix: str, calls: int) -> None:
        async def some(first: int) -> None:
            for number in range(first, calls, TASKS):
                await idem.run(f"task-{prefix}-{number}", charge_async, number)

        await asyncio.gather(*(some(first) for first in range(TASKS)))

    return lambda prefix, calls: runner.run(all_of(prefix, calls))


def _rows(report: Report, place: str, found: dict[str, tuple[float, float]]) -> None:
    bare = found["no observers"]
    for name, (_, limit) in WAYS.items():
        wall, cpu = found[name]
        ratio = wall / bare[0]
        # At full speed a process is bound by its CPU in the end, whatever the rate shows today.
        note = f"CPU {cpu * 1e6:.0f} µs a call, {cpu / bare[1]:.2f} of that without"
        target = limit if name != "no observers" else None
        report.rows.append(Row(f"{place}: {name}", 1 / wall, ratio, target, note, is_ceiling=True))


def run(is_quick: bool = False) -> Report:
    report = Report("What observers cost", "the same calls without observers")
    rounds, calls = (4, 50) if is_quick else (ROUNDS, CALLS)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder) / 'bench.db'}")
        idems = {
            name: Idempotency(store, caller="bench", observers=make())
            for name, (make, _) in WAYS.items()
        }
        threads = {name: in_thread(idem) for name, idem in idems.items()}
        _rows(report, "SQLite, 1 caller", compare(threads, rounds, calls))
        for idem in idems.values():
            idem.close()
        run_sync(store.close())
    with PostgresServer() as server:
        blocking = open_store(server.url())
        run_sync(blocking.migrate())  # type: ignore[attr-defined]
        idems = {
            name: Idempotency(blocking, caller="bench", observers=make())
            for name, (make, _) in WAYS.items()
        }
        threads = {name: in_thread(idem) for name, idem in idems.items()}
        _rows(report, "PostgreSQL, 1 caller", compare(threads, rounds, calls))
        for idem in idems.values():
            idem.close()
        run_sync(blocking.close())
        with asyncio.Runner() as runner:
            _in_tasks(runner, server.url(), report, rounds * 2, calls * 10)
    return report


def _in_tasks(runner: asyncio.Runner, url: str, report: Report, rounds: int, calls: int) -> None:
    made = {
        name: AsyncIdempotency(url, caller="bench", observers=make())
        for name, (make, _) in WAYS.items()
    }
    runs = {name: in_tasks(runner, idem) for name, idem in made.items()}
    found = compare(runs, rounds, calls)
    _rows(report, f"PostgreSQL, {TASKS} tasks", found)

    async def close(idem: AsyncIdempotency) -> None:
        await idem.close()

    closing: list[Coroutine[Any, Any, None]] = [close(idem) for idem in made.values()]
    for flow in closing:
        runner.run(flow)

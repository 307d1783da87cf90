"""Metrics for Prometheus, by `prometheus-client`; servers of several processes included.

Owns the names and labels. Keys and callers are never labels, and the number of operations that are
told apart is bounded. Counters and histograms are the client's own, which several processes share
through the files of `PROMETHEUS_MULTIPROC_DIR`. Gauges are made while somebody scrapes: of the
counters, of the running set, and of the store's last size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from retrysafe.core.events import Event, EventKind, Result
from retrysafe.extras import missing_extra
from retrysafe.observe.gauges import StoreGauges, Watched
from retrysafe.observe.quantiles import QUANTILES, quantile
from retrysafe.observe.running import RunningSet
from retrysafe.observe.windows import DedupWindow

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise missing_extra("retrysafe.observe.prometheus", "prometheus", error) from error

__all__ = ["PrometheusMetrics"]

_FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
# Names come from code and routes, so there are few; past this they share one label.
OPERATIONS_LIMIT: Final = 500
_OTHER: Final = "(other)"
# From a replay in memory to operations of minutes.
_OPERATION_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300,
)  # fmt: skip
# From a flush of SQLite to a store that is about to be given up.
_STORE_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)


class PrometheusMetrics:
    """An observer that counts; pass it in `observers`, and serve its `registry`.

    One for each store: its gauges are of the object that it observes.
    """

    kinds = frozenset(
        {
            EventKind.ANSWERED,
            EventKind.CLAIMED,
            EventKind.TAKEN_OVER,
            EventKind.LOOKED,
            EventKind.SWEPT,
        }
    )

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Counters and histograms are registered in `registry`.

        Of several processes, as `PROMETHEUS_MULTIPROC_DIR` says, the attribute `registry` is
        another one, which adds them up.
        """
        folder = os.environ.get(_FOLDER_VARIABLE)
        self._running = RunningSet(folder)
        self._store: StoreGauges | None = None
        self._operations: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=tuple(buckets), registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry, multiprocess_mode="mostrecent")

        self._calls = counter(
            "retrysafe_calls", "Protected calls by what came of them.", "operation", "result"
        )
        self._takeovers = counter(
            "retrysafe_takeovers", "Claims that were taken over after their lease.", "operation"
        )
        self._operation_seconds = histogram(
            "retrysafe_operation_seconds",
            "How long operations ran, by how they ended.",
            _OPERATION_BUCKETS,
            "operation",
            "ending",
        )
        self._claim_seconds = histogram(
            "retrysafe_claim_seconds", "How long the store took for claims.", _STORE_BUCKETS
        )
        self._settle_seconds = histogram(
            "retrysafe_settle_seconds", "How long the store took for endings.", _STORE_BUCKETS
        )
        self._wait_seconds = histogram(
            "retrysafe_wait_seconds", "How long duplicates waited.", _OPERATION_BUCKETS
        )
        self._abandoned = gauge(
            "retrysafe_abandoned", "Keys whose lease has ended, at the worker's last look."
        )
        self._looked_at = gauge(
            "retrysafe_abandoned_timestamp_seconds", "When a worker looked last."
        )
        self._swept_at = gauge(
            "retrysafe_swept_timestamp_seconds", "When the sweep last had nothing left to remove."
        )
        # Looking a child up by its labels takes longer than to count.
        self._call_children: dict[tuple[str, Result | None], Callable[[], None]] = {}
        self._operation_children: dict[tuple[str, str], Callable[[float], None]] = {}
        derived = _Derived(self._calls, self._running, self._swept_at, lambda: self._store, folder)
        # What to serve: with `prometheus_client.make_asgi_app(metrics.registry)` for one.
        self.registry = registry if folder is None else CollectorRegistry()
        self.registry.register(derived)

    def watch(self, watched: Watched) -> None:
        """Takes the gauges of a store from the object that is observed; called by that object."""
        self._store = StoreGauges(watched)

    def __call__(self, event: Event) -> None:
        """Counts one event."""
        kind = event.kind
        if kind is EventKind.ANSWERED:
            self._answered(event)
        elif kind is EventKind.CLAIMED:
            self._running.add(event.call)
        elif kind is EventKind.TAKEN_OVER:
            self._running.add(event.call)
            self._takeovers.labels(self._named(event.operation)).inc()
        elif kind is EventKind.LOOKED:
            self._abandoned.set(event.count)
            self._looked_at.set(time.time())
        else:
            self._swept_at.set(time.time())

    def _answered(self, event: Event) -> None:
        call, operation = event.call, self._named(event.operation)
        self._running.remove(call)
        name = (operation, call.result)
        count = self._call_children.get(name)
        if count is None:
            count = self._call_children[name] = self._calls.labels(operation, call.result).inc
        count()
        if call.claim_seconds is not None:
            self._claim_seconds.observe(call.claim_seconds)
        if call.settle_seconds is not None:
            self._settle_seconds.observe(call.settle_seconds)
        if call.wait_seconds is not None:
            self._wait_seconds.observe(call.wait_seconds)
        if call.operation_seconds is not None and call.ending:
            ended = (operation, call.ending)
            observe = self._operation_children.get(ended)
            if observe is None:
                child = self._operation_seconds.labels(operation, call.ending)
                observe = self._operation_children[ended] = child.observe
            observe(call.operation_seconds)

    def _named(self, operation: str) -> str:
        """The operation as a label; those past the limit share one."""
        if operation not in self._operations:
            if len(self._operations) >= OPERATIONS_LIMIT:
                return _OTHER
            self._operations.add(operation)
        return operation


class _Derived(Collector):
    """What is worked out while somebody scrapes."""

    def __init__(
        self,
        calls: Counter,
        running: RunningSet,
        swept_at: Gauge,
        store: Callable[[], StoreGauges | None],
        folder: str | None,
    ) -> None:
        self._calls = calls
        self._running = running
        self._swept_at = swept_at
        self._store = store
        self._dedup = DedupWindow()
        # Registers nowhere: its metrics pass through here, because some gauges are made of them.
        self._processes: Any = None
        if folder is not None:
            self._processes = MultiProcessCollector(None, folder)  # type: ignore[no-untyped-call]

    def describe(self) -> Iterable[Metric]:
        """Nothing: asked when it is registered, and a store must not be asked then."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The gauges; of several processes also what their files add up to."""
        if self._processes is None:
            summed = [*self._calls.collect(), *self._swept_at.collect()]
        else:
            summed = list(self._processes.collect())
            yield from summed
        now = time.monotonic()
        yield _labelled(
            "retrysafe_dedup_ratio",
            "Replays and in-flight refusals among the calls of the last five minutes.",
            "operation",
            self._dedup.ratios(now, _counted(summed)),
        )
        yield from self._of_running()
        swept_at = _value(summed, "retrysafe_swept_timestamp_seconds")
        if swept_at:
            yield GaugeMetricFamily(
                "retrysafe_sweep_lag_seconds",
                "How long ago the sweep last had nothing left to remove.",
                max(0.0, time.time() - swept_at),
            )
        gauges = self._store()
        if gauges is not None:
            yield from _of_store(gauges)

    def _of_running(self) -> Iterator[Metric]:
        ages = self._running.ages_seconds()
        yield GaugeMetricFamily("retrysafe_pending", "Operations under way.", len(ages))
        yield _labelled(
            "retrysafe_pending_age_seconds",
            "For how long they have been under way.",
            "quantile",
            {f"{part:g}": quantile(ages, part) for part in QUANTILES},
        )


def _of_store(gauges: StoreGauges) -> Iterator[Metric]:
    size = gauges.size()
    if size is None:
        return
    tables = size.tables
    rows = {name: float(table.rows) for name, table in tables.items() if name != "file"}
    sizes = {
        name: float(table.size_bytes)
        for name, table in tables.items()
        if table.size_bytes is not None
    }
    yield _labelled("retrysafe_store_rows", "About how many rows there are.", "table", rows)
    yield _labelled("retrysafe_store_bytes", "How large it is, with indexes.", "table", sizes)
    yield _labelled(
        "retrysafe_store_rows_projected",
        "How many rows the present rate comes to within their window.",
        "table",
        gauges.rows_projected(),
    )
    for name, text, value in (
        ("waiting", "Entries that wait for delivery.", size.outbox_waiting),
        ("dead", "Entries that were given up.", size.outbox_dead),
        ("oldest_seconds", "How late the first entry is.", size.outbox_oldest_seconds),
    ):
        yield GaugeMetricFamily(f"retrysafe_outbox_{name}", text, value)


def _labelled(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for labelled, value in values.items():
        family.add_metric([labelled], value)
    return family


def _counted(metrics: Iterable[Metric]) -> dict[str, tuple[float, float]]:
    """Duplicates and all calls of each operation."""
    found: dict[str, tuple[float, float]] = {}
    for metric in metrics:
        if metric.name != "retrysafe_calls":
            continue
        for sample in metric.samples:
            if not sample.name.endswith("_total"):
                continue
            operation = sample.labels["operation"]
            duplicates, calls = found.get(operation, (0.0, 0.0))
            is_duplicate = sample.labels["result"] in (Result.REPLAYED, Result.IN_FLIGHT)
            found[operation] = duplicates + sample.value * is_duplicate, calls + sample.value
    return found


def _value(metrics: Iterable[Metric], name: str) -> float:
    return max(
        (sample.value for metric in metrics if metric.name == name for sample in metric.samples),
        default=0.0,
    )

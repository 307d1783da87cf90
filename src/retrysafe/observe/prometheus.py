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
from retrysafe.observe.labels import OperationNames
from retrysafe.observe.quantiles import QUANTILES, quantile
from retrysafe.observe.running import RunningSet
from retrysafe.observe.windows import DedupWindow

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector

    from retrysafe.observe.tallies import OwnTally, SharedTally
except ModuleNotFoundError as error:
    raise missing_extra("retrysafe.observe.prometheus", "prometheus", error) from error

__all__ = ["PrometheusMetrics"]

_FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


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
        self._names = OperationNames()
        self._tally: OwnTally | SharedTally = (
            OwnTally(self._names) if folder is None else SharedTally(self._names, registry)
        )

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry, multiprocess_mode="mostrecent")

        self._takeovers = Counter(
            "retrysafe_takeovers",
            "Claims that were taken over after their lease.",
            ["operation"],
            registry=registry,
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
        derived = _Derived(self._tally, self._running, self._swept_at, lambda: self._store, folder)
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
            self._running.remove(event.call)
            self._tally.add(event.operation, event.call)
        elif kind is EventKind.CLAIMED:
            self._running.add(event.call)
        elif kind is EventKind.TAKEN_OVER:
            self._running.add(event.call)
            self._takeovers.labels(self._names.label(event.operation)).inc()
        elif kind is EventKind.LOOKED:
            self._abandoned.set(event.count)
            self._looked_at.set(time.time())
        else:
            self._swept_at.set(time.time())


class _Derived(Collector):
    """What is worked out while somebody scrapes."""

    def __init__(
        self,
        tally: OwnTally | SharedTally,
        running: RunningSet,
        swept_at: Gauge,
        store: Callable[[], StoreGauges | None],
        folder: str | None,
    ) -> None:
        self._tally = tally
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
            summed = list(self._tally.collect())
            yield from summed
            summed += self._swept_at.collect()
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

"""What Prometheus is told of calls, counted in two ways: by this process alone, or by several.

Owns the counters and histograms of calls, with the same names in both. Alone, a call costs one
place in a queue, and a whole batch is counted at once: at full speed a lock for each number would
take longer than the rest of the layer. Several processes share the client's own files, which have a
number in place at any moment.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from retrysafe import forks
from retrysafe.core.events import Progress
from retrysafe.observe.labels import OperationNames

# How many calls wait until they are counted; a scrape counts what is there.
BATCH: Final = 256
# From a replay in memory to operations of minutes.
_LONG: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# From a flush of SQLite to a store that is about to be given up.
_SHORT: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)

_CALLS: Final = ("retrysafe_calls", "Protected calls by what came of them.")
_CALL_LABELS: Final = ("operation", "result")
_OPERATION_LABELS: Final = ("operation", "ending")
# Names, words, bounds and labels; in the order in which `_seconds_of` gives their values.
_HISTOGRAMS: Final[tuple[tuple[str, str, tuple[float, ...], tuple[str, ...]], ...]] = (
    (
        "retrysafe_operation_seconds",
        "How long operations ran, by how they ended.",
        _LONG,
        _OPERATION_LABELS,
    ),
    ("retrysafe_claim_seconds", "How long the store took for claims.", _SHORT, ()),
    ("retrysafe_settle_seconds", "How long the store took for endings.", _SHORT, ()),
    ("retrysafe_wait_seconds", "How long duplicates waited.", _LONG, ()),
)


class OwnTally:
    """The calls of this process."""

    def __init__(self, names: OperationNames) -> None:
        self._names = names
        self._waiting: deque[tuple[str, Progress]] = deque()
        self._calls: dict[tuple[str, str], int] = {}
        # By the place of the histogram and its labels: counts of the buckets, and the sum.
        self._seconds: dict[tuple[int, tuple[str, ...]], tuple[list[int], list[float]]] = {}
        self._lock = threading.Lock()
        for place, (_, _, bounds, labels) in enumerate(_HISTOGRAMS):
            if not labels:  # Shown from the start, as the client's own are.
                self._seconds[place, ()] = [0] * (len(bounds) + 1), [0.0]
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def add(self, operation: str, call: Progress) -> None:
        """One call has ended."""
        waiting = self._waiting
        waiting.append((operation, call))
        # Whoever finds it locked leaves it to the one who counts.
        if len(waiting) >= BATCH and self._lock.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._lock.release()

    def collect(self) -> Iterator[Metric]:
        """All that was counted."""
        with self._lock:
            self._count()
            calls = dict(self._calls)
            seconds = {key: (list(found[0]), found[1][0]) for key, found in self._seconds.items()}
        counter = CounterMetricFamily(*_CALLS, labels=_CALL_LABELS)
        for labels, count in calls.items():
            counter.add_metric(labels, count)
        yield counter
        for place, (name, text, bounds, names) in enumerate(_HISTOGRAMS):
            family = HistogramMetricFamily(name, text, labels=names)
            for (its_place, values), (counts, total) in seconds.items():
                if its_place == place:
                    family.add_metric(values, _cumulated(bounds, counts), total)
            yield family

    def _count(self) -> None:
        """Counts what waits. The lock is held."""
        waiting, calls = self._waiting, self._calls
        for _ in range(len(waiting)):
            operation, call = waiting.popleft()
            operation = self._names.label(operation)
            assert call.result is not None  # It has ended.
            name = (operation, call.result.value)
            calls[name] = calls.get(name, 0) + 1
            for place, value in enumerate(_seconds_of(call)):
                if value is None:
                    continue
                labels = () if place else (operation, call.ending)
                found = self._seconds.get((place, labels))
                bounds = _HISTOGRAMS[place][2]
                if found is None:
                    found = self._seconds[place, labels] = [0] * (len(bounds) + 1), [0.0]
                found[0][bisect_left(bounds, value)] += 1
                found[1][0] += value


def _seconds_of(call: Progress) -> tuple[float | None, ...]:
    return (
        call.operation_seconds if call.ending else None,
        call.claim_seconds,
        call.settle_seconds,
        call.wait_seconds,
    )


def _cumulated(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    found, total = [], 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        found.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
    return found


class SharedTally:
    """The calls of several processes, in the files of the client's own metrics."""

    def __init__(self, names: OperationNames, registry: CollectorRegistry) -> None:
        self._names = names
        self._counter = Counter(*_CALLS, _CALL_LABELS, registry=registry)
        self._histograms = [
            Histogram(name, text, labels, buckets=bounds, registry=registry)
            for name, text, bounds, labels in _HISTOGRAMS
        ]
        # Looking a child up by its labels takes longer than to count.
        self._count: dict[tuple[str, Any], Callable[[], None]] = {}
        self._observe: dict[tuple[int, tuple[str, ...]], Callable[[float], None]] = {}

    def add(self, operation: str, call: Progress) -> None:
        """One call has ended."""
        operation = self._names.label(operation)
        name = (operation, call.result)
        count = self._count.get(name)
        if count is None:
            count = self._count[name] = self._counter.labels(*name).inc
        count()
        for place, value in enumerate(_seconds_of(call)):
            if value is None:
                continue
            labels = () if place else (operation, call.ending)
            observe = self._observe.get((place, labels))
            if observe is None:
                histogram = self._histograms[place]
                child = histogram.labels(*labels) if labels else histogram
                observe = self._observe[place, labels] = child.observe
            observe(value)

    def collect(self) -> Iterable[Metric]:
        """Nothing: whoever adds the files up has them."""
        return ()

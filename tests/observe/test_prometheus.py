"""Prometheus: processes add up, gauges are cheap, and what clients choose is bounded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from retrysafe import AsyncIdempotency, Idempotency, Policy, current_attempt
from retrysafe.core.events import Event, EventKind, Progress
from retrysafe.core.keys.key import Key
from retrysafe.core.size import StoreSize, TableSize
from retrysafe.observe import gauges as gauges_module
from retrysafe.observe.gauges import CACHED_SECONDS, LOST_SECONDS, StoreGauges
from retrysafe.observe.labels import OPERATIONS_LIMIT, OperationNames
from retrysafe.observe.prometheus import PrometheusMetrics
from retrysafe.observe.quantiles import quantile
from retrysafe.observe.running import PLACES, RunningSet
from retrysafe.observe.tallies import BATCH, OwnTally, SharedTally
from retrysafe.observe.windows import WINDOW_SECONDS, DedupWindow, KeyRate
from retrysafe.stores import MemoryStore, open_store


def scraped(text: str) -> dict[str, float]:
    """The samples by their names and labels, without buckets and instants of creation."""
    return {
        sample.name + "".join(f",{name}={value}" for name, value in sorted(sample.labels.items())):
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }  # fmt: skip


def scrape(metrics: PrometheusMetrics) -> dict[str, float]:
    return scraped(generate_latest(metrics.registry).decode())


# Several processes.


@pytest.fixture
def server(tmp_path):
    """Four processes of one server; each has made calls, and holds one operation."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    with Idempotency(url, caller="c") as idem:
        idem.run("first", int)  # Makes the file.
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    command = [sys.executable, "-m", "tests.observe.worker_process", url]
    processes = [
        subprocess.Popen(
            [*command, f"w{number}", str(number + 1)],
            env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for number in range(4)
    ]  # fmt: skip
    for process in processes:
        for line in process.stdout:
            if line.startswith("# READY"):
                break
    yield processes
    for process in processes:
        process.communicate("go on\n" if process.poll() is None else None, timeout=20)


def asked(process: subprocess.Popen) -> dict[str, float]:
    process.stdin.write("scrape\n")
    process.stdin.flush()
    lines = []
    for line in process.stdout:
        if "# END" in line:
            break
        lines.append(line)
    return scraped("".join(lines))


def test_a_scrape_of_any_process_adds_all_of_them_up(server):
    """Counters, running operations and their ages; a process that was killed runs nothing."""
    for process in server:
        found = asked(process)
        assert found["retrysafe_calls_total,operation=pay,result=executed"] == 1 + 2 + 3 + 4
        assert found["retrysafe_calls_total,operation=pay,result=replayed"] == 4
        assert found["retrysafe_dedup_ratio,operation=pay"] == pytest.approx(4 / 14, abs=0.3)
        assert found["retrysafe_pending"] == 4
        assert found["retrysafe_pending_age_seconds,quantile=0.99"] > 0
        assert found["retrysafe_claim_seconds_count"] == 1 + 2 + 3 + 4
        assert found["retrysafe_store_rows,table=keys"] == 1 + 10 + 4
    server[0].kill()
    server[0].wait()
    found = asked(server[1])
    assert found["retrysafe_pending"] == 3
    # What it had counted by then stays counted.
    assert found["retrysafe_calls_total,operation=pay,result=executed"] == 10


def test_a_fork_shows_its_own_operations_only(tmp_path):
    """A preloaded application: the child's file is its own, and the parent's stays."""
    running = RunningSet(str(tmp_path))
    running.add("parent's")
    told, telling = os.pipe()
    child = os.fork()
    if not child:
        running.remove("parent's")
        running.add("child's")
        os.write(telling, b"%d" % len(running.ages_seconds()))
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(told, 1) == b"2"
        assert len(running.ages_seconds()) == 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(telling)
    assert len(running.ages_seconds()) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_places_are_bounded_and_used_again(tmp_path):
    running = RunningSet(str(tmp_path))
    items = list(range(PLACES + 2))
    for item in items:
        running.add(item)
    assert len(running.ages_seconds()) == PLACES + 2
    for item in items:
        running.remove(item)
        running.remove(item)
    assert running.ages_seconds() == []
    running.add("again")
    assert len(running._free) == PLACES - 1


# What is worked out at the scrape.


def test_duplicates_are_counted_over_the_last_minutes():
    window = DedupWindow()
    assert window.ratios(0.0, {"pay": (1, 100)}) == {"pay": 0.01}
    assert window.ratios(60.0, {"pay": (1, 100), "new": (0, 0)}) == {"pay": 0.0, "new": 0.0}
    assert window.ratios(120.0, {"pay": (51, 200)}) == {"pay": 0.5}
    later = 120.0 + WINDOW_SECONDS
    assert window.ratios(later, {"pay": (51, 300)}) == {"pay": 0.0}
    # Counters that begin anew, and scrapes in a row that share a sample.
    assert window.ratios(later + 1, {"pay": (1, 10)}) == {"pay": 0.1}
    for turn in range(1000):
        window.ratios(later + turn, {"pay": (1, 10)})
    assert len(window._samples._samples) <= WINDOW_SECONDS / 5 + 2


def test_the_rate_of_keys_needs_two_looks():
    rate = KeyRate()
    assert rate.per_second(0.0, 1000) is None
    assert rate.per_second(1.0, 1010) is None
    assert rate.per_second(10.0, 1100) == 10
    assert rate.per_second(20.0, 500) is None


def test_quantiles():
    assert quantile([], 0.99) == 0.0
    assert quantile([1.0], 0.5) == 1.0
    ages = [float(number) for number in range(1, 101)]
    assert [quantile(ages, part) for part in (0.5, 0.95, 0.99)] == [51.0, 96.0, 100.0]


class Watched:
    """A store whose answers come when the test says."""

    policy = Policy(active_window=timedelta(hours=1), audit_window=timedelta(days=1))

    def __init__(self) -> None:
        self.asked: list = []

    def measure(self, tell) -> None:
        self.asked.append(tell)


def test_a_store_is_asked_at_most_every_15_seconds(monkeypatch):
    """One that is down leaves the last figures, and one that never answers is asked again."""
    monkeypatch.setattr(gauges_module, "PATIENCE_SECONDS", 0.0)
    now = [0.0]
    watched = Watched()
    gauges = StoreGauges(watched, lambda: now[0])
    assert gauges.size() is gauges.size() is None
    assert len(watched.asked) == 1
    size = StoreSize({"keys": TableSize(10)}, keys_inserted=1000)
    watched.asked.pop()(size)
    assert gauges.size() is size
    assert watched.asked == []
    now[0] = CACHED_SECONDS
    assert gauges.size() is size
    watched.asked.pop()(StoreSize({"keys": TableSize(10)}, keys_inserted=1150))
    assert gauges.rows_projected() == {"keys": 10 * 3600, "outcomes": 10 * 86400}
    now[0] *= 2
    gauges.size()
    watched.asked.pop()(None)
    assert gauges.size() is not None
    now[0] *= 2
    gauges.size()
    now[0] += LOST_SECONDS - 1
    gauges.size()
    assert len(watched.asked) == 1
    now[0] += 1
    gauges.size()
    assert len(watched.asked) == 2
    gauges.after_fork_in_child()
    gauges.size()
    assert len(watched.asked) == 3


def test_operations_past_the_limit_share_a_label():
    """Nor is anything else kept of those beyond, however the calls are counted."""
    registry, names = CollectorRegistry(), OperationNames()
    own, shared = OwnTally(names), SharedTally(names, registry)
    for number in range(OPERATIONS_LIMIT + 5):
        progress = Progress(float)
        progress.note(EventKind.CLAIMED)
        progress.note(EventKind.COMPLETED)
        progress.end(None)
        for tally in (own, shared):
            tally.add(f"op-{number}", progress)
    for found in (own.collect(), registry.collect()):
        (others,) = [
            sample.value
            for metric in found
            for sample in metric.samples
            if sample.name == "retrysafe_calls_total" and sample.labels["operation"] == "(other)"
        ]
        assert others == 5
    histograms = [key for key in own._seconds if key[0] == 0]
    for kept in (own._calls, histograms, shared._count, shared._observe):
        assert len(kept) == OPERATIONS_LIMIT + 1
    assert shared.collect() == ()


def ended(seconds: float = 0.0) -> Progress:
    progress = Progress(float)
    progress.claim_seconds = seconds
    progress.end(None)
    return progress


def test_calls_are_counted_in_batches_and_none_is_missed():
    """By many threads at once; a bucket holds what is not above its bound."""
    names = OperationNames()
    tally = OwnTally(names)
    calls = BATCH + 10

    def add() -> None:
        for _ in range(calls):
            tally.add("pay", ended(0.001))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tally._waiting) < 4 * calls
    tally.add("pay", ended(0.0011))
    counter, *histograms = tally.collect()
    (sample,) = [item for item in counter.samples if item.name.endswith("_total")]
    assert sample.value == 4 * calls + 1
    buckets = {
        item.labels["le"]: item.value
        for histogram in histograms
        for item in histogram.samples
        if item.name == "retrysafe_claim_seconds_bucket"
    }
    assert (buckets["0.0005"], buckets["0.001"]) == (0, 4 * calls)
    assert buckets["0.0025"] == buckets["+Inf"] == 4 * calls + 1


def test_a_fork_in_the_middle_of_counting_does_not_end_it():
    """The lock may be held by a thread that the child does not have."""
    tally = OwnTally(OperationNames())
    tally._lock.acquire()
    for _ in range(BATCH + 1):
        tally.add("pay", ended())
    assert len(tally._waiting) == BATCH + 1
    tally.after_fork_in_child()
    tally.add("pay", ended())
    assert len(tally._waiting) == 0


def test_takeovers_and_passes_of_workers_are_shown(monkeypatch):
    metrics = PrometheusMetrics(CollectorRegistry())
    key = Key("k", caller="c")
    assert "retrysafe_sweep_lag_seconds" not in scrape(metrics)
    metrics(Event(EventKind.TAKEN_OVER, key, "pay", call=Progress(float)))
    metrics(Event(EventKind.LOOKED, key, count=3))
    metrics(Event(EventKind.SWEPT, key, count=7))
    found = scrape(metrics)
    assert found["retrysafe_takeovers_total,operation=pay"] == 1
    assert found["retrysafe_abandoned"] == 3
    assert found["retrysafe_abandoned_timestamp_seconds"] > 0
    assert found["retrysafe_sweep_lag_seconds"] < 60
    assert found["retrysafe_pending"] == 1


# The size of stores.


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request, tmp_path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("migrated_url")
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'keys.db'}"


def test_gauges_of_a_store(url):
    """Rows, bytes, and what waits in the outbox: dead entries, late ones, those of aggregates."""
    metrics = PrometheusMetrics(CollectorRegistry())

    def staging(attempt) -> None:
        for aggregate in (None, "a"):
            attempt.outbox.stage("topic", {}, aggregate=aggregate)

    with Idempotency(url, caller="c", secret="s" * 32, observers=[metrics]) as idem:
        idem.run("k", lambda: staging(current_attempt()), name="pay", request="r")
        found = scrape(metrics)
    assert found["retrysafe_outbox_waiting"] == 2
    assert found["retrysafe_outbox_dead"] == 0
    assert found["retrysafe_outbox_oldest_seconds"] >= 0
    assert {"retrysafe_store_rows,table=keys", "retrysafe_store_rows,table=outbox"} <= set(found)
    if not url.startswith("postgres"):
        assert found["retrysafe_store_rows,table=keys"] == 1
    else:
        assert found["retrysafe_store_bytes,table=outcomes"] > 0


def test_a_store_on_a_loop_is_shown_by_the_scrape_after_the_first(url):
    """The scrape may come from that very loop, and never waits for it."""

    async def main() -> None:
        metrics = PrometheusMetrics(CollectorRegistry())
        async with AsyncIdempotency(url, caller="c", observers=[metrics]) as idem:
            assert "retrysafe_pending" in scrape(metrics)

            async def pay() -> int:
                return 1

            await idem.run("k", pay)
            metrics._store.after_fork_in_child()  # As if 15 seconds had passed.
            told = asyncio.Event()
            loop = asyncio.get_running_loop()
            tell = metrics._store._tell
            metrics._store._tell = lambda size: (tell(size), loop.call_soon_threadsafe(told.set))
            scrape(metrics)
            await asyncio.wait_for(told.wait(), 10)
            assert "retrysafe_store_rows,table=keys" in scrape(metrics)

    asyncio.run(main())


def test_a_store_that_is_down_breaks_no_scrape(tmp_path):
    """Nor one that does not know its size, nor one whose loop has ended."""
    metrics = PrometheusMetrics(CollectorRegistry())
    store = open_store(f"sqlite:///{tmp_path}/missing/keys.db")
    with Idempotency(store, caller="c", observers=[metrics]):
        assert "retrysafe_store_rows,table=keys" not in scrape(metrics)
    unknown = PrometheusMetrics(CollectorRegistry())
    with Idempotency(Unmeasured(), caller="c", observers=[unknown]):
        assert "retrysafe_store_rows,table=keys" not in scrape(unknown)


class Unmeasured:
    """A store of somebody else's, which does not know its size."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    def __getattr__(self, name: str):
        if name == "measure":
            raise AttributeError(name)
        return getattr(self._store, name)


def test_a_loop_that_has_ended_is_no_obstacle(migrated_url):
    metrics = PrometheusMetrics(CollectorRegistry())

    async def main() -> None:
        async with AsyncIdempotency(migrated_url, caller="c", observers=[metrics]) as idem:

            async def pay() -> int:
                return 1

            await idem.run("k", pay)

    asyncio.run(main())
    metrics._store.after_fork_in_child()
    scrape(metrics)
    assert metrics._store._is_answered


def test_a_scrape_leaves_no_thread_behind(tmp_path):
    metrics = PrometheusMetrics(CollectorRegistry())
    with Idempotency(f"sqlite:///{tmp_path / 'k.db'}", caller="c", observers=[metrics]):
        scrape(metrics)
    for thread in threading.enumerate():
        if thread.name == "retrysafe-size":
            thread.join(10)
    assert "retrysafe-size" not in [thread.name for thread in threading.enumerate()]

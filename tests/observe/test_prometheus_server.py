"""A real Prometheus: it scrapes, the rules load, and the alerts fire at their thresholds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from retrysafe import Idempotency
from retrysafe.observe.prometheus import PrometheusMetrics
from tests.servers.prometheus import Prometheus

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
ALERTS = (MONITORING / "alerts.yml").read_text()
# Names of series in an expression, without the endings of histograms.
_NAMES = re.compile(r"\bretrysafe_\w+")
_ENDINGS = re.compile(r"_(bucket|count|sum)$")


def test_each_alert_fires_at_its_threshold_after_its_time(prometheus, tmp_path):
    """By promtool, which turns the clock: none fires below, none on executions alone."""
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    tested = subprocess.run(
        [prometheus.with_name("promtool"), "test", "rules", tmp_path / "alerts_test.yml"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr
    named = set(re.findall(r"alert: (\w+)", ALERTS))
    tests = Path(__file__).with_name("alerts_test.yml").read_text()
    assert all(name in tests for name in named)


def test_a_stuck_key_and_duplicates_are_seen(prometheus):
    """Scraped from a real process; only the times that an alert waits are shortened."""
    metrics = PrometheusMetrics(CollectorRegistry())
    httpd, thread = start_http_server(0, "127.0.0.1", registry=metrics.registry)
    rules = re.sub(r"\n        for: \w+", "", ALERTS)
    expected = {"RetrysafeStuckKey", "RetrysafeManyDuplicates"}
    try:
        with (
            Prometheus(prometheus, httpd.server_port, rules) as server,
            Idempotency("memory://", caller="c", observers=[metrics]) as idem,
        ):
            for number in range(50):
                idem.run(f"k-{number}", int, name="pay")
            idem.run("k-0", int, name="pay")

            def watch() -> None:
                until = time.monotonic() + 30
                while not expected <= server.firing():
                    assert time.monotonic() < until, server.log()
                    time.sleep(0.1)
                assert server.firing() == expected
                check_dashboard(server)

            # It began two minutes ago, by the clock of the running set.
            now = metrics._running.monotonic
            metrics._running.monotonic = lambda: now() - 120
            began = []

            def stuck() -> None:
                metrics._running.monotonic = now
                began.append(True)
                watch()

            idem.run("stuck", stuck, name="hold", request=None)
            assert began
            (sample,) = server.query('retrysafe_calls_total{operation="pay",result="executed"}')
            assert float(sample["value"][1]) == 50
            (loaded,) = server.ask("rules")["groups"]
            assert len(loaded["rules"]) == ALERTS.count("- alert:")
            assert {rule["health"] for rule in loaded["rules"]} == {"ok"}
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join(10)


def check_dashboard(server: Prometheus) -> None:
    """Every panel asks for something that this server understands, and most of it is there."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 15
    for expression in expressions:
        plain = expression.replace("$__rate_interval", "1m").replace("$operation", ".*")
        server.query(plain)
    scraped = set(server.ask("label/__name__/values"))
    # Shown when there is something to show: a worker, a second look at the size of a real store.
    later = {
        "retrysafe_sweep_lag_seconds",
        "retrysafe_store_rows_projected",
        "retrysafe_store_bytes",
        "retrysafe_takeovers_total",
    }
    for text in (*expressions, ALERTS):
        for name in _NAMES.findall(text):
            stem = _ENDINGS.sub("", name)
            known = {name, f"{stem}_bucket"} & scraped
            assert known or name in later, name


@pytest.mark.parametrize("name", ["dashboard.json"])
def test_panels_have_a_name_a_reason_and_a_place(name):
    """No two panels overlap."""
    panels = json.loads((MONITORING / name).read_text())["panels"]
    places: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]
        at = panel["gridPos"]
        covered = {
            (column, line)
            for column in range(at["x"], at["x"] + at["w"])
            for line in range(at["y"], at["y"] + at["h"])
        }
        assert not covered & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= covered
    assert len({panel["id"] for panel in panels}) == len(panels)

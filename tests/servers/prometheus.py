"""A real Prometheus from Debian's packages, with its tool for rules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from tests.servers.debian import from_debian
from tests.servers.process import ServerProcess


def prometheus_binary() -> Path | None:
    """Prometheus, installed from Debian's packages when this process may do that."""
    return from_debian("prometheus", _installed)


def _installed() -> Path | None:
    found = shutil.which("prometheus")
    return None if found is None else Path(found)


class Prometheus(ServerProcess):
    """One server that scrapes one target twice a second."""

    name = "Prometheus"

    def __init__(self, binary: Path, target_port: int, rules: str) -> None:
        super().__init__()
        self.binary = binary
        (self.folder / "rules.yml").write_text(rules)
        (self.folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms, evaluation_interval: 500ms}\n"
            "rule_files: [rules.yml]\n"
            "scrape_configs:\n"
            "  - job_name: shop\n"
            f"    static_configs: [{{targets: ['127.0.0.1:{target_port}']}}]\n"
        )

    def launch(self, log):
        return self.begin(
            log,
            (
                self.binary,
                f"--config.file={self.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ),
        )

    def answers(self) -> bool:
        return self.replies(b"GET /-/ready HTTP/1.0\r\n\r\n", b"HTTP/1.0 200")

    def ask(self, path: str) -> Any:
        """The data of an answer of its API."""
        with urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=10) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.ask(f"query?query={quote(expression)}")["result"]
        return found

    def firing(self) -> set[str]:
        alerts = self.ask("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

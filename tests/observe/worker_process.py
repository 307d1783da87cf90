"""One of several processes of a server: makes calls, then holds one operation until it is told."""

from __future__ import annotations

import sys

from prometheus_client import generate_latest

from retrysafe import Idempotency
from retrysafe.observe.prometheus import PrometheusMetrics


def main(url: str, name: str, calls: int) -> None:
    metrics = PrometheusMetrics()
    with Idempotency(url, caller="c", observers=[metrics]) as idem:
        for number in range(calls):
            idem.run(f"{name}-{number}", int, name="pay")
        idem.run(f"{name}-0", int, name="pay")

        def hold() -> None:
            print("# READY", flush=True)
            for line in iter(sys.stdin.readline, "go on\n"):
                if line == "scrape\n":
                    print(generate_latest(metrics.registry).decode(), "# END", flush=True)

        idem.run(f"{name}-held", hold, name="hold", request="r")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

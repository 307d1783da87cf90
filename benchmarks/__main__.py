"""Runs the measurements: python -m benchmarks [--quick] [name …]; fails when a target is missed.

`--quick` runs everything on small tables for a short time. It fails only when something breaks.
"""

from __future__ import annotations

import sys

from benchmarks import (
    consumers_bench,
    http_bench,
    operators_bench,
    outbox_bench,
    postgres_bench,
    sqlite_bench,
    telemetry_bench,
)

BENCHMARKS = {
    "sqlite": sqlite_bench.run,
    "postgres": postgres_bench.run,
    "cleanup": postgres_bench.run_cleanup,
    "http": http_bench.run,
    "operators": operators_bench.run,
    "outbox": outbox_bench.run,
    "consumers": consumers_bench.run,
    "telemetry": telemetry_bench.run,
}


def main(arguments: list[str]) -> int:
    is_quick = "--quick" in arguments
    names = [name for name in arguments if name != "--quick"]
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
        return 2
    is_met = True
    # The cleanup is part of the whole run on PostgreSQL.
    for name in names or [name for name in BENCHMARKS if name != "cleanup"]:
        report = BENCHMARKS[name](is_quick)
        report.is_quick = is_quick
        report.show()
        report.save(name)
        is_met &= report.is_met
    print("\nResults as JSON: var/bench/")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

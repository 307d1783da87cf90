"""Runs the measurements: python -m benchmarks [name …]; fails when a target is missed."""

from __future__ import annotations

import sys

from benchmarks import sqlite_bench

BENCHMARKS = {"sqlite": sqlite_bench.run}


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
        return 2
    is_met = True
    for name in names or BENCHMARKS:
        report = BENCHMARKS[name]()
        report.show()
        report.save(name)
        is_met &= all(row.is_met for row in report.rows)
    print("\nResults as JSON: var/bench/")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

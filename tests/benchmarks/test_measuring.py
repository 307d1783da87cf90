"""What the benchmarks make of their figures: the verdict on a target, and what chance may do."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path

import pytest

from benchmarks import measuring
from benchmarks.measuring import (
    Report,
    Row,
    chance,
    compared,
    discards_at_once,
    in_turn,
    median_ratio,
)


@pytest.mark.parametrize(
    ("ratio", "is_ceiling", "verdict"),
    [
        (1.99, False, "MISSED"),
        (2.0, False, "met"),
        (2.01, False, "met"),
        (1.99, True, "met"),
        (2.0, True, "met"),
        (2.01, True, "MISSED"),
    ],
)
def test_a_target_is_met_from_its_own_value_on(ratio, is_ceiling, verdict):
    row = Row("way", 100.0, ratio, 2.0, is_ceiling=is_ceiling)
    assert row.verdict == verdict
    assert row.is_met == (verdict == "met")


@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_what_was_not_measured_as_asked_meets_nothing(ratio):
    row = Row("way", 100.0, ratio, 2.0, is_as_asked=False)
    assert row.verdict == "NOT SHOWN"
    assert not row.is_met


def test_a_row_without_a_target_has_no_verdict():
    row = Row("way", 100.0, 0.1)
    assert row.verdict == ""
    assert row.is_met


def test_the_report_tells_every_verdict(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    report = Report(
        "throughput",
        "R",
        [
            Row("quick", 300.0, 3.0, 2.0),
            Row("slow", 100.0, 1.0, 2.0, note="it rained"),
            Row("under less", 100.0, 3.0, 2.0, is_as_asked=False),
            Row("R", 100.0, 1.0),
        ],
    )
    report.show()
    lines = capsys.readouterr().out.splitlines()
    ends = [line.split()[-1] for line in lines if "100" in line or "300" in line]
    assert ends == ["met", "MISSED", "SHOWN", "1.00"]
    assert "    it rained" in lines
    assert not report.is_met
    report.save("throughput")
    rows = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["met", "MISSED", "NOT SHOWN", ""]


def test_a_quick_run_judges_nothing_and_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    report = Report("throughput", "R", [Row("slow", 100.0, 1.0, 2.0)], is_quick=True)
    report.show()
    shown = capsys.readouterr().out
    assert "QUICK" in shown
    assert "(MISSED)" in shown
    assert report.is_met
    report.save("throughput")
    assert [path.name for path in tmp_path.iterdir()] == ["throughput-quick.json"]


def test_the_ways_take_turns_and_then_in_reverse():
    order = []

    def way(name):
        return lambda number: order.append((number, name)) or 1.0

    in_turn({name: way(name) for name in "abc"}, 2)
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a")]


def test_a_target_is_judged_within_the_rounds():
    found = {"ours": [10.0, 20.0, 90.0], "by hand": [20.0, 20.0, 100.0]}
    row = compared(found, "ours to by hand", "ours", "by hand", 0.9)
    assert (row.ratio, row.per_second, row.verdict) == (0.9, 20.0, "met")


def test_the_ratio_is_the_median_of_the_rounds_own():
    """A round in which the whole machine was slow says as much as any other."""
    assert median_ratio([10.0, 20.0, 90.0], [5.0, 10.0, 30.0]) == 2.0


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_slowest_of_all_are_so_by_chance_in_one_pick_only(count):
    slow, others = [100.0 + number for number in range(count)], [float(n) for n in range(count)]
    assert chance(slow, others) == pytest.approx(1 / comb(2 * count, count))


def test_the_fastest_of_all_are_as_slow_as_any_pick():
    assert chance([1.0, 2.0], [3.0, 4.0, 5.0]) == 1.0


def test_values_that_are_alike_tell_nothing():
    assert chance([7.0, 7.0, 7.0], [7.0, 7.0]) == 1.0


def test_a_tie_counts_for_both_sides():
    """Of the three picks of one from 1, 2, 2, two are as large as the 2 that was found."""
    assert chance([2.0], [1.0, 2.0]) == pytest.approx(2 / 3)


def test_the_unit_of_the_values_does_not_matter():
    slow, others = [3.0, 9.0, 4.0], [1.0, 8.0, 2.0, 2.5]
    scaled = chance([value * 1000 for value in slow], [value * 1000 for value in others])
    assert chance(slow, others) == scaled


MOUNTS = """\
/dev/vda / ext4 rw,relatime,discard 0 0
/dev/vdb /data ext4 rw,nodiscard 0 0
/dev/vdc /data/pg/old ext4 rw,discard,relatime 0 0
proc /proc proc rw,nosuid 0 0
"""


@pytest.mark.parametrize(
    ("folder", "does_discard"),
    [
        ("/tmp/server", True),
        ("/data", False),
        ("/data/pg/new", False),
        ("/data/pg/old/base", True),
        ("/database", True),
    ],
)
def test_how_a_folder_is_mounted(folder, does_discard):
    """The mount nearest to it counts, by whole names, in whatever order they are told."""
    lines = MOUNTS.splitlines()
    for mounts in (lines, lines[::-1]):
        assert discards_at_once(Path(folder), "\n".join(mounts)) is does_discard


def test_nothing_is_known_of_what_is_not_mounted():
    assert not discards_at_once(Path("/tmp/server"), "")

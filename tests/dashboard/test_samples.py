"""The overview's plot counts what this process saw, and nothing that is long ago."""

from __future__ import annotations

from collections import Counter

import pytest

from retrysafe import Idempotency, KeyReused
from retrysafe.core.keys.key import Key
from retrysafe.dashboard.samples import BAR_SECONDS, BARS, KEY_LIMIT, Samples


class Monotonic:
    seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


def fail() -> None:
    raise RuntimeError("as asked")


def echo(value: str) -> str:
    return value


def test_calls_are_counted_by_result_until_they_are_ten_minutes_old():
    clock = Monotonic()
    samples = Samples(clock)
    assert samples.plot() is None
    idem = Idempotency("memory://", caller="me", observers=[samples])
    for _ in range(3):
        idem.run("a", echo, "x")
    with pytest.raises(KeyReused):
        idem.run("a", echo, "y")
    with pytest.raises(RuntimeError):
        idem.run("b", fail)
    plot = samples.plot()
    assert dict(plot["totals"]) == {"executed": 1, "replayed": 2, "turned away": 1, "failed": 1}
    assert plot["dedup_percent"] == "66.7"
    assert Counter(bar["name"] for bar in plot["bars"]) == Counter(dict(plot["totals"]).keys())
    assert sum(float(bar["height"]) for bar in plot["bars"]) == pytest.approx(100, abs=0.2)
    assert samples.replays_of(Key("a", caller="me")) == 2
    clock.seconds += BARS * BAR_SECONDS
    assert dict(samples.plot()["totals"])["executed"] == 0


def test_memory_is_bounded():
    clock = Monotonic()
    samples = Samples(clock)
    idem = Idempotency("memory://", caller="me", observers=[samples])
    for number in range(KEY_LIMIT + 10):
        clock.seconds += BAR_SECONDS
        for _ in range(2):
            idem.run(f"key {number}", echo, "x")
    assert len(samples._bars) == BARS
    assert len(samples._replays) == KEY_LIMIT
    assert samples.replays_of(Key("key 0", caller="me")) == 0

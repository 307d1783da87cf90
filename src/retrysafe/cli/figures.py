"""Figures of a store from its sizes, a sample and its newest keys; nothing here reads a store.

What is estimated says so. Replays leave no trace in a store, so the share of duplicates is known to
the processes that answered them, by their metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from retrysafe.core.listing import RecordPage
from retrysafe.core.model import Condition, StoredKey
from retrysafe.core.policy import FOREVER
from retrysafe.core.size import StoreSize

# The newest keys are those of this time.
RECENT_MS: Final = 300_000
_FOREVER_MS: Final = FOREVER.total_seconds() * 500
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of the values does not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def stats_json(
    size: StoreSize, sample: Sequence[StoredKey], recent: RecordPage, pending: RecordPage
) -> dict[str, Any]:
    """All figures as JSON."""
    keys = size.tables["keys"].rows
    window_ms = _window_ms(sample)
    rate = _rate(recent)
    projected = None if rate is None or window_ms is None else int(rate * window_ms / 1000)
    late_ms = [
        item.now_ms - item.record.expires_at_ms
        for item in sample
        if item.condition is Condition.OUTLIVED and item.record.expires_at_ms is not None
    ]
    return {
        "tables": {
            name: {"rows": table.rows, "bytes": table.size_bytes}
            for name, table in sorted(size.tables.items())
        },
        "rows_are_estimates": True,
        "keys_per_second": None if rate is None else round(rate, 3),
        "active_window_seconds": None if window_ms is None else window_ms / 1000,
        "keys_projected": projected,
        "keys_to_projection": None if not projected else round(keys / projected, 3),
        "conditions": _conditions(sample),
        "sampled_keys": len(sample),
        "pending": _pending(pending),
        "attempts": _attempts(recent),
        # Known to the processes alone.
        "dedup_ratio": None,
        "sweep_lag_seconds": round(max(late_ms, default=0) / 1000, 1),
        "outbox": {
            "waiting": size.outbox_waiting,
            "dead": size.outbox_dead,
            "oldest_seconds": round(size.outbox_oldest_seconds, 1),
        },
    }


def _window_ms(sample: Sequence[StoredKey]) -> float | None:
    windows = [
        item.record.expires_at_ms - item.record.settled_at_ms
        for item in sample
        if item.record.expires_at_ms is not None and item.record.settled_at_ms is not None
    ]
    found = quantile(windows, 0.5)
    return None if found is None or found > _FOREVER_MS else found


def _rate(recent: RecordPage) -> float | None:
    """Keys per second, over the time that the newest of them span when there are too many."""
    if not recent.keys:
        return 0.0 if not recent.unsearched else None
    if recent.after is None:
        return len(recent.keys) / (RECENT_MS / 1000)
    first, last = recent.keys[0], recent.keys[-1]
    span_ms = first.now_ms - last.record.claimed_at_ms
    return len(recent.keys) / max(span_ms, 1) * 1000


def _conditions(sample: Sequence[StoredKey]) -> dict[str, float]:
    counted = Counter(item.condition.value for item in sample)
    return {name: round(count / len(sample), 4) for name, count in sorted(counted.items())}


def _pending(pending: RecordPage) -> dict[str, Any]:
    ages = [
        (item.now_ms - item.record.first_claimed_at_ms) / 1000
        for item in pending.keys
        if item.condition is Condition.RUNNING
    ]
    abandoned = [
        (item.now_ms - item.record.lease_ends_at_ms) / 1000
        for item in pending.keys
        if item.condition is Condition.ABANDONED
    ]
    return {
        "running": len(ages),
        "running_age_seconds": {name: quantile(ages, at) for name, at in QUANTILES.items()},
        "abandoned": len(abandoned),
        "longest_abandoned_seconds": max(abandoned, default=None),
        "is_part": pending.after is not None or bool(pending.unsearched),
        "not_searched": pending.unsearched or None,
    }


def _attempts(recent: RecordPage) -> dict[str, Any]:
    """How the keys of the last minutes went."""
    counted = Counter(item.condition for item in recent.keys)
    again = sum(item.record.attempt > 1 for item in recent.keys)
    return {
        "keys": len(recent.keys),
        "with_several_attempts": again,
        "failed": counted[Condition.FAILED],
        "released": counted[Condition.RELEASED],
    }

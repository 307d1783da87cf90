"""Figures of a store from its sizes, a sample and its newest keys: in a second, without a scan.

What is estimated says so. Replays leave no trace in a store, so the share of duplicates is known to
the processes that answered them, by their metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from retrysafe.core.listing import RecordPage, RecordQuery
from retrysafe.core.model import Condition, StoredKey
from retrysafe.core.policy import FOREVER
from retrysafe.core.ports import Store
from retrysafe.core.size import Measurable, StoreSize
from retrysafe.inspection import duration_text
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.sampling import Sampled

# The newest keys are those of this time.
RECENT_MS: Final = 300_000
SAMPLE: Final = 2_000
_PENDING: Final = frozenset({Condition.RUNNING, Condition.ABANDONED})
_PENDING_LIMIT: Final = 10_000
_FOREVER_MS: Final = FOREVER.total_seconds() * 500
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of the values does not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def stats_of(store: Store) -> dict[str, Any] | None:
    """All figures as JSON; None of a store that does not know its size."""
    if not isinstance(store, Measurable) or not isinstance(store, Sampled):
        return None
    newest = RecordQuery(newer_than_ms=RECENT_MS, limit=SAMPLE, seconds=0.1)
    query = RecordQuery(conditions=_PENDING, limit=_PENDING_LIMIT, seconds=0.2)
    return stats_json(
        run_sync(store.measure()),
        run_sync(store.sample(SAMPLE)),
        run_sync(store.list_records(newest)),
        run_sync(store.list_records(query)),
    )


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


def stats_lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures in words, each with its name."""
    lines = []
    for name, table in document["tables"].items():
        size = "" if table["bytes"] is None else f", {_bytes_text(table['bytes'])}"
        lines.append((name, f"about {table['rows']:,} rows{size}"))
    rate, projected = document["keys_per_second"], document["keys_projected"]
    if rate is not None:
        lines.append(("new keys", f"{rate:,.1f} a second, over the last minutes"))
    if projected:
        window = duration_text(int(document["active_window_seconds"] * 1000))
        ratio = document["keys_to_projection"]
        lines.append(
            (
                "projection",
                f"{projected:,} keys by rate and window ({window}); there are {ratio:g} times "
                "as many",
            )
        )
    shares = ", ".join(f"{share:.1%} {name}" for name, share in document["conditions"].items())
    lines.append(("conditions", f"{shares or 'no keys'} (of {document['sampled_keys']:,} sampled)"))
    pending = document["pending"]
    ages = pending["running_age_seconds"]
    text = f"{pending['running']:,}"
    if pending["running"]:
        p95, oldest = (duration_text(int(ages[name] * 1000)) for name in ("p95", "max"))
        text += f", 95 % younger than {p95}, the oldest {oldest}"
    lines.append(("running", text))
    text = f"{pending['abandoned']:,}"
    if pending["abandoned"]:
        text += f", for up to {duration_text(int(pending['longest_abandoned_seconds'] * 1000))}"
    lines.append(("abandoned", text))
    if pending["is_part"]:
        lines.append(("not searched", pending["not_searched"] or "more pending keys than these"))
    attempts = document["attempts"]
    lines.append(
        (
            "last minutes",
            f"{attempts['keys']:,} keys seen: {attempts['with_several_attempts']:,} with several "
            f"attempts, {attempts['failed']:,} failed, {attempts['released']:,} released",
        )
    )
    lag = duration_text(int(document["sweep_lag_seconds"] * 1000))
    lines.append(("sweep lag", f"{lag} in the sample"))
    outbox = document["outbox"]
    oldest = duration_text(int(outbox["oldest_seconds"] * 1000))
    lines.append(
        (
            "outbox",
            f"{outbox['waiting']:,} wait, the oldest for {oldest}; {outbox['dead']:,} are dead",
        )
    )
    lines.append(("duplicates", "not in the store: see retrysafe_dedup_ratio of your processes"))
    return lines


def _bytes_text(count: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

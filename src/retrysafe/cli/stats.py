"""`retrysafe stats`: how a store is doing, in a second and without a scan."""

from __future__ import annotations

from typing import Any, Final

import typer

from retrysafe.cli import figures, options, output
from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import Condition
from retrysafe.core.size import Measurable
from retrysafe.inspection import duration_text
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.sampling import Sampled

SAMPLE: Final = 2_000
_PENDING: Final = frozenset({Condition.RUNNING, Condition.ABANDONED})
_PENDING_LIMIT: Final = 10_000


@options.examples(
    "retrysafe stats --store sqlite:///app.db", "retrysafe stats --json | jq .pending"
)
def stats(
    context: typer.Context,
    store: options.StoreUrl = None,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Show how a store is doing: sizes against the projection, pending keys, sweep and outbox.

    Rows are the database's own estimates, and shares come from a sample. Replays leave no trace in
    a store: the share of duplicates is a metric of your processes.
    """
    with options.opened_store(store, busy_timeout) as opened:
        assert isinstance(opened, Measurable)  # As all are that outlive their process.
        assert isinstance(opened, Sampled)
        size = run_sync(opened.measure())
        sample = run_sync(opened.sample(SAMPLE))
        newest = RecordQuery(newer_than_ms=figures.RECENT_MS, limit=SAMPLE, seconds=0.1)
        recent = run_sync(opened.list_records(newest))
        query = RecordQuery(conditions=_PENDING, limit=_PENDING_LIMIT, seconds=0.2)
        pending = run_sync(opened.list_records(query))
    document = figures.stats_json(size, sample, recent, pending)
    if options.is_json(context, as_json):
        output.write_json(document)
        return
    for name, text in _lines(document):
        output.line(f"{name:<16} {text}")


def _lines(document: dict[str, Any]) -> list[tuple[str, str]]:
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

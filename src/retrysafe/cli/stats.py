"""`retrysafe stats`: how a store is doing, in a second and without a scan."""

from __future__ import annotations

import typer

from retrysafe import figures
from retrysafe.cli import options, output


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
        document = figures.stats_of(opened)
    assert document is not None  # All stores that outlive their process know their size.
    if options.is_json(context, as_json):
        output.write_json(document)
        return
    for name, text in figures.stats_lines(document):
        output.line(f"{name:<16} {text}")

"""`retrysafe sweep`: cleanup in bounded rounds, so that workers get their turn in between."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from retrysafe.cli import options, output
from retrysafe.core.model import SweepReport
from retrysafe.core.ports import Store
from retrysafe.runtime.drive import run_sync


@options.examples(
    "retrysafe sweep --store sqlite:///app.db",
    "retrysafe sweep --store sqlite:///app.db --limit 500 --rounds 10 --json",
)
def sweep(
    context: typer.Context,
    store: options.StoreUrl = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=100_000, help="Keys and outcomes per round.")
    ] = 1_000,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=1_000_000, help="Rounds at most.")
    ] = 1_000,
    pause_ms: Annotated[
        int,
        typer.Option("--pause-ms", min=0, max=60_000, help="Time for others between two rounds."),
    ] = 20,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Remove keys past their active window and outcomes past their audit window.

    Every round is one short transaction. A running operation is never swept away. The
    sweep may be interrupted and started again at any time.
    """
    is_json = options.is_json(context, as_json)
    with options.opened_store(store, busy_timeout) as opened:
        total, rounds_done = _swept(opened, limit, rounds, pause_ms / 1000, is_quiet=is_json)
    if is_json:
        output.write_json(
            {
                "keys": total.keys,
                "outcomes": total.outcomes,
                "rounds": rounds_done,
                "has_more": total.has_more,
            }
        )
        return
    sys.stdout.write(
        f"removed {_count(total.keys, 'key')} and {_count(total.outcomes, 'outcome')} in "
        f"{_count(rounds_done, 'round')}\n"
    )
    if total.has_more:
        output.note("more is past its window: sweep again, or raise --rounds")


def _swept(
    store: Store, limit: int, rounds: int, pause_seconds: float, *, is_quiet: bool
) -> tuple[SweepReport, int]:
    """Sweeps until nothing is left or the rounds are used up; the sum, and how many it took."""
    total = SweepReport()
    screen = output.console(stderr=True)
    progress = Progress(
        TextColumn("sweeping"),
        BarColumn(),
        TextColumn("{task.fields[keys]} keys, {task.fields[outcomes]} outcomes"),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=is_quiet or not screen.is_terminal,
    )
    rounds_done = 0
    with progress:
        # How much there is to sweep would need a scan; the bar only shows that it moves.
        task = progress.add_task("", total=None, keys=0, outcomes=0)
        while True:
            report = run_sync(store.sweep(limit))
            rounds_done += 1
            total.keys += report.keys
            total.outcomes += report.outcomes
            total.has_more = report.has_more
            progress.update(task, keys=total.keys, outcomes=total.outcomes)
            if not report.has_more or rounds_done == rounds:
                return total, rounds_done
            time.sleep(pause_seconds)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

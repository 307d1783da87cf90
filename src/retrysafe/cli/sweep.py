"""`retrysafe sweep`: cleanup in bounded rounds, so that workers get their turn in between."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated

import typer

from retrysafe.cli import options, output
from retrysafe.cli.progress import shown_progress
from retrysafe.core.model import SweepReport
from retrysafe.core.pace import rest_of_command
from retrysafe.core.ports import Store
from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.thread_ports import ThreadClock, ThreadSignal
from retrysafe.workers.sweeper import Sweeper


@options.examples(
    "retrysafe sweep --store sqlite:///app.db",
    "retrysafe sweep --store sqlite:///app.db --limit 500 --rounds 10 --json",
    "retrysafe sweep --store postgresql://app@db/app --forever",
)
def sweep(
    context: typer.Context,
    store: options.StoreUrl = None,
    limit: Annotated[
        int,
        typer.Option("--limit", min=1, max=100_000, help="Keys and outcomes per round at most."),
    ] = 1_000,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=1_000_000, help="Rounds at most.")
    ] = 100_000,
    pause_ms: Annotated[
        int | None,
        typer.Option(
            "--pause-ms",
            min=0,
            max=60_000,
            help="Time for others between two rounds; if not given, four times the round's "
            "own, and none after a round that found nothing.",
        ),
    ] = None,
    forever: Annotated[
        bool,
        typer.Option(
            "--forever",
            help="Go on until stopped, at the pace of expiry; chooses limit, rounds and pauses.",
        ),
    ] = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Remove keys past their active window and outcomes past their audit window.

    Every round is short. A running operation is never swept away. The sweep may be
    interrupted and started again at any time, and several may run at once.
    """
    is_json = options.is_json(context, as_json)
    with options.opened_store(store, busy_timeout) as opened:
        if forever:
            total, rounds_done = _swept_forever(opened, is_quiet=is_json)
        else:
            total, rounds_done = _swept(opened, limit, rounds, pause_ms, is_quiet=is_json)
    if is_json:
        output.write_json(
            {
                "keys": total.keys,
                "outcomes": total.outcomes,
                "partitions": total.partitions,
                "entries": total.entries,
                "rounds": rounds_done,
                "has_more": total.has_more,
            }
        )
        return
    sys.stdout.write(
        f"removed {_count(total.keys, 'key')} and {_count(total.outcomes, 'outcome')} in "
        f"{_count(rounds_done, 'round')}\n"
    )
    if total.entries:
        noun = "entry" if total.entries == 1 else "entries"
        sys.stdout.write(f"removed {total.entries:,} outbox {noun}\n")
    if total.partitions:
        sys.stdout.write(f"dropped {_count(total.partitions, 'day')} of outcomes\n")
    if total.has_more and not forever:
        output.note("the walk over the store has not ended: sweep again, or raise --rounds")


def _swept(
    store: Store, limit: int, rounds: int, pause_ms: int | None, *, is_quiet: bool
) -> tuple[SweepReport, int]:
    """Sweeps until nothing is left or the rounds are used up; the sum, and how many it took."""
    total = SweepReport()
    rounds_done = 0
    with _shown(is_quiet) as show:
        while True:
            started_at = time.monotonic()
            report = run_sync(store.sweep(limit))
            took_seconds = time.monotonic() - started_at
            rounds_done += 1
            _add(total, report)
            show(total)
            if not report.has_more or rounds_done == rounds:
                return total, rounds_done
            # A fixed pause is short just when the store is busy and rounds take long.
            rest = rest_of_command(report, took_seconds) if pause_ms is None else pause_ms / 1000
            time.sleep(rest)


def _swept_forever(store: Store, *, is_quiet: bool) -> tuple[SweepReport, int]:
    """Sweeps until a signal says stop; the sum, and how many rounds it took."""
    total = SweepReport()
    rounds_done = 0
    stopping = ThreadSignal()
    with _shown(is_quiet) as show, _stopped_by_signals(stopping):

        def count(report: SweepReport) -> None:
            nonlocal rounds_done
            rounds_done += 1
            _add(total, report)
            show(total)

        def report_outage(error: StoreUnavailable) -> None:
            output.note(f"{error}; trying again")

        sweeper = Sweeper(store, ThreadClock(), on_round=count, on_outage=report_outage)
        run_sync(sweeper.run(stopping))
    return total, rounds_done


@contextmanager
def _stopped_by_signals(stopping: ThreadSignal) -> Iterator[None]:
    """Lets the round that is under way end; a service that is stopped has not failed."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stopping.set()) for number in numbers]
    try:
        yield
    finally:
        for number, action in zip(numbers, before, strict=True):
            signal.signal(number, action)


def _shown(is_quiet: bool) -> AbstractContextManager[Callable[[SweepReport], None]]:
    counted = {"keys": "keys", "outcomes": "outcomes"}
    return shown_progress("sweeping", counted, is_quiet=is_quiet)


def _add(total: SweepReport, report: SweepReport) -> None:
    total.keys += report.keys
    total.outcomes += report.outcomes
    total.partitions += report.partitions
    total.entries += report.entries
    total.has_more = report.has_more


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

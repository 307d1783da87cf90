"""`retrysafe story`: the demonstration, with its result as an exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from retrysafe.cli import options, output
from retrysafe.cli.problems import ExitCode, Problem
from retrysafe.story.processes import WorkerSilent
from retrysafe.story.show import demonstrate


@options.examples(
    "retrysafe story",
    "retrysafe story --fast --json",
)
def story(
    context: typer.Context,
    # Not from the environment: the demonstration must not leave its keys in a store of others.
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Use this store. Default: a SQLite file in a temporary folder.",
            show_default=False,
        ),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Short leases and no pauses.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Watch a race, a crash, a zombie and a mismatch, with real threads and real processes.

    It takes about half a minute, and everything shown is read from the store or from a ledger
    that every execution writes to. Exits 1 if anything came otherwise than it should.
    """
    is_json = options.is_json(context, as_json)
    try:
        result = demonstrate(store, is_fast=fast, console=output.console(stderr=is_json))
    except WorkerSilent as error:
        raise Problem("WorkerSilent", str(error), ExitCode.REFUSED) from error
    if is_json:
        output.write_json(result.shape())
    if not result.is_ok:
        raise typer.Exit(ExitCode.REFUSED)

"""`retrysafe migrate`: the schema of a store, applied, checked or printed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from retrysafe.cli import options, output
from retrysafe.cli.problems import ExitCode, usage
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.migrations import Migratable, Migration


@options.examples(
    "retrysafe migrate --store sqlite:///app.db",
    "retrysafe migrate --store sqlite:///app.db --check",
    "retrysafe migrate --store sqlite:///app.db --sql > schema.sql",
)
def migrate(
    context: typer.Context,
    store: options.StoreUrl = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 when something is pending.")
    ] = False,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL and do not touch the database.")
    ] = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Bring a store's schema up to date, and create the store if it is not there.

    Safe to run from many machines at once, and while workers are running.
    """
    if check and sql:
        raise usage("--check looks at the database and --sql does not: pass one of them")
    # Checking must not make the file that it is asked about.
    chosen = options.chosen_store(store, busy_timeout, create=not check)
    if not isinstance(chosen, Migratable):
        raise usage(f"{store} has no schema: there is nothing to migrate")
    is_json = options.is_json(context, as_json)
    if sql:
        if is_json:
            output.write_json({"sql": chosen.migration_script()})
        else:
            sys.stdout.write(chosen.migration_script())
        return
    try:
        if check:
            pending = run_sync(chosen.pending_migrations())
        else:
            applied = run_sync(chosen.migrate())
    finally:
        run_sync(chosen.close())
    if not check:
        _show(applied, "applied", "nothing to do: the schema is up to date", is_json)
        return
    _show(pending, "pending", "the schema is up to date", is_json)
    if pending:
        raise typer.Exit(ExitCode.REFUSED)


def _show(migrations: list[Migration], word: str, nothing: str, is_json: bool) -> None:
    if is_json:
        output.write_json(
            {
                word: [
                    {"version": item.version, "name": item.name, "checksum": item.checksum}
                    for item in migrations
                ]
            }
        )
        return
    lines = [f"{word}: {item.version:04d} {item.name}" for item in migrations] or [nothing]
    sys.stdout.write("\n".join(lines) + "\n")

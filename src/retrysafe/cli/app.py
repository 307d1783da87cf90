"""The command tree, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from retrysafe import __version__
from retrysafe.cli import (
    completion,
    consume,
    dashboard,
    demo,
    doctor,
    export,
    key_actions,
    keys,
    migrate,
    natural_keys,
    options,
    outbox,
    output,
    relay,
    stats,
    sweep,
    worker,
)
from retrysafe.cli.problems import ExitCode, Problem, problem_of, report

# The pool of PostgreSQL connections logs every try to connect; the error tells it once.
_SILENCE: Final = logging.NullHandler()
_OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG})


class OneLineErrors(TyperGroup):
    """A command tree that tells every expected error in one line on stderr."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command; exits with its code, or returns it when not standalone."""
        arguments = list(sys.argv[1:] if args is None else args)
        # Looked up in the raw arguments: errors in the others must be JSON as well.
        as_json = "--json" in arguments
        logging.getLogger("psycopg").addHandler(_SILENCE)
        _show_flags_alone(self)
        try:
            result = super().main(
                args=arguments,
                prog_name=prog_name or "retrysafe",
                complete_var=complete_var or completion.VARIABLE,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            code = result if isinstance(result, int) else ExitCode.OK
            sys.stdout.flush()
        except (typer.Abort, KeyboardInterrupt):
            code = ExitCode.INTERRUPTED
        except BrokenPipeError:
            # The reader has seen enough, as `head` does; the flush at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = ExitCode.REFUSED
        except Exception as error:
            problem = problem_of(error) or _output_problem(error)
            if problem is None:
                raise
            with suppress(OSError):  # Nobody can be told where stderr is full, too.
                report(problem, as_json=as_json)
            code = problem.code
        if standalone_mode:
            sys.exit(int(code))
        return int(code)


def _output_problem(error: Exception) -> Problem | None:
    """An output that takes no more: a full disk, or a device that is gone."""
    if not isinstance(error, OSError) or error.errno not in _OUTPUT_ERRORS:
        return None
    # What is buffered would fail again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    text = f"the output cannot be written: {os.strerror(error.errno)}"
    return Problem("OutputFailed", text, ExitCode.REFUSED)


def _show_flags_alone(command: Any) -> None:
    """Flags without a value in every help: recent releases of Typer show `<bool>` behind them."""
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for child in getattr(command, "commands", {}).values():
        _show_flags_alone(child)


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("migrate")(migrate.migrate)
app.command("doctor")(doctor.doctor)
app.command("stats")(stats.stats)
app.add_typer(keys.app, name="keys", invoke_without_command=True)
app.add_typer(outbox.app, name="outbox", invoke_without_command=True)
app.command("worker")(worker.worker)
app.command("relay")(relay.relay)
app.command("consume")(consume.consume)
app.command("sweep")(sweep.sweep)
app.command("export")(export.export)
app.command("dashboard")(dashboard.dashboard)
app.command("demo")(demo.demo)
app.command("completion")(completion.completion)


@app.callback(invoke_without_command=True)
@options.examples(
    "retrysafe migrate --store sqlite:///app.db",
    "retrysafe keys list --store sqlite:///app.db --condition abandoned",
    "retrysafe demo",
)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Look after the keys of retrysafe: operations that run once, however often they are retried.

    Every command takes --json. Those that need a store take --store URL; all but demo read
    RETRYSAFE_STORE too.

    Exit codes: 0 done; 1 refused, pending or not found; 2 usage; 3 a problem with the store.
    """
    if version:
        if as_json:
            output.write_json({"version": __version__})
        else:
            sys.stdout.write(f"retrysafe {__version__}\n")
        raise typer.Exit
    _help_without_command(context)


keys.app.command("natural")(natural_keys.natural)
keys.app.command("release")(key_actions.release_key)
keys.app.command("expire")(key_actions.expire_key)


@keys.app.callback(invoke_without_command=True)
def keys_root(context: typer.Context) -> None:
    """Look at keys, and release or expire them."""
    _help_without_command(context)


@outbox.app.callback(invoke_without_command=True)
def outbox_root(context: typer.Context) -> None:
    """Look at outbox entries, and retry or discard one."""
    _help_without_command(context)


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)


def run() -> int:
    """Runs the command of this process's arguments; returns its exit code."""
    if completion.VARIABLE in os.environ:
        completion.begin()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A terminal that cannot show a character gets its code, never a traceback.
            reconfigure(errors="backslashreplace")
    return int(app(standalone_mode=False))

"""`retrysafe demo`: the HTTP demo, as a server in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from retrysafe.cli import options, output
from retrysafe.cli.problems import ExitCode, Problem, usage
from retrysafe.stores.postgres.urls import without_password

DEFAULT_STORE: Final = "sqlite:///var/demo.db"
# What the extra brings; anything else that is missing is a fault that must show.
_EXTRA: Final = frozenset({"fastapi", "starlette", "pydantic", "uvicorn", "jinja2"})


@options.examples(
    "retrysafe demo",
    "retrysafe demo --port 8123 --store postgresql://app@db/app",
)
def demo(
    context: typer.Context,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, help="Where to listen; 0 picks a free port.")
    ] = 8000,
    # Not from the environment: the demo must not leave its keys in a store of others.
    store: Annotated[
        str,
        typer.Option("--store", metavar="URL", help="Use this store; its schema is made for you."),
    ] = DEFAULT_STORE,
    dashboard_token: Annotated[
        str | None,
        typer.Option(
            "--dashboard-token",
            metavar="TOKEN",
            help="Who signs in to the dashboard with this token may release and expire keys.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Serve a small API over HTTP whose every POST may be sent twice.

    It listens on the loopback interface, in one process, until Ctrl-C. Start it again on the same
    store, and it goes on where it ended, also after a crash.
    """
    try:
        from retrysafe.cli.demo_server import serve  # noqa: PLC0415 — needs the extra.
        from retrysafe.cli.loopback_server import PortTaken  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise usage(
            f"the demo needs {error.name}: install retrysafe with its extra demo, from a clone "
            "with pip install '/path/to/clone[demo]'"
        ) from error
    if store == DEFAULT_STORE:
        _make_folder()
    is_json = options.is_json(context, as_json)
    try:
        # Only to a terminal: a pipe that nobody reads would hold the server up when it is full.
        log = output.line if not is_json and sys.stdout.isatty() else None
        serve(store, port, lambda url: _greet(url, store, as_json=is_json), log, dashboard_token)
    except PortTaken as error:
        raise Problem("PortTaken", str(error), ExitCode.REFUSED) from error


def _make_folder() -> None:
    try:
        Path("var").mkdir(exist_ok=True)
    except OSError as error:
        raise usage(
            f"the folder var cannot be made here ({error.strerror}): choose another place with "
            "--store sqlite:///path/to/file.db"
        ) from error


def _greet(url: str, store: str, *, as_json: bool) -> None:
    from retrysafe.demo.playground import curl_lines  # noqa: PLC0415 — needs the extra.

    shown = without_password(store)
    if as_json:
        output.write_json({"url": url, "store": shown})
        return
    lines = "\n".join(f"  {line}" for _, line in curl_lines(url)[:3])
    output.line(
        f"retrysafe demo: {url} on {shown}; Ctrl-C ends it.\n\n"
        f"First call, replay, mismatch:\n\n{lines}\n\n"
        f"What was executed: {url}/effects   Policy: {url}/idempotency-policy   All calls: {url}/\n"
        f"Dashboard: {url}/retrysafe/   In a browser, begin at {url}/\n"
    )

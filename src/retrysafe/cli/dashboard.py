"""`retrysafe dashboard`: the dashboard of a store, as a server in this process."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from retrysafe.cli import options, output
from retrysafe.cli.problems import ExitCode, Problem, usage
from retrysafe.stores.postgres.urls import without_password

# What the extra brings; anything else that is missing is a fault that must show.
_EXTRA: Final = frozenset({"jinja2", "uvicorn"})


@options.examples(
    "retrysafe dashboard --store sqlite:///app.db",
    "retrysafe dashboard --store postgresql://app@db/app --port 9000",
    'retrysafe dashboard --token "$TOKEN" --show-bodies --redact card_number',
)
def dashboard(
    context: typer.Context,
    store: options.StoreUrl = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, help="Where to listen; 0 picks a free port.")
    ] = 8080,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="RETRYSAFE_DASHBOARD_TOKEN",
            metavar="TOKEN",
            help="Who signs in with this token may release and expire keys. Without one, everything"
            " is read only. Better in the variable: everybody sees the arguments of processes.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    show_bodies: Annotated[
        bool, typer.Option("--show-bodies", help="Show stored results and responses.")
    ] = False,
    redact: Annotated[
        list[str] | None,
        typer.Option(
            "--redact",
            metavar="FIELD",
            help="Never show the values of this JSON field; may be repeated.",
        ),
    ] = None,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Look at a store in a browser: what runs, what is stuck, what failed.

    It listens on the loopback interface until Ctrl-C, and everybody on this machine may read. From
    another machine, use a tunnel: ssh -L 8080:localhost:8080 HOST.
    """
    try:
        from retrysafe.cli.loopback_server import (  # noqa: PLC0415 — needs the extra.
            PortTaken,
            listening,
            serve_on,
        )
        from retrysafe.dashboard import Dashboard  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise usage(
            f"the dashboard needs {error.name}: install retrysafe with its extra dashboard, from a "
            "clone with pip install '/path/to/clone[dashboard]'"
        ) from error
    shown = without_password(options.required_url(store))
    is_json = options.is_json(context, as_json)

    def greet(url: str) -> None:
        if is_json:
            output.write_json({"url": f"{url}/", "store": shown})
        else:
            output.line(f"retrysafe dashboard: {url}/ on {shown}; Ctrl-C ends it.\n")

    with options.opened_store(store, busy_timeout) as opened:
        pages = Dashboard(
            opened,
            token=token,
            show_bodies=show_bodies,
            redact=redact or (),
            is_open_on_loopback=True,
        )
        try:
            with listening(port) as listener:
                serve_on(listener, pages.asgi, greet)
        except PortTaken as error:
            raise Problem("PortTaken", str(error), ExitCode.REFUSED) from error

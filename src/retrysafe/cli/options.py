"""The options that commands share, and what they mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Annotated, Final, TypeVar

import typer

from retrysafe.cli.problems import usage
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.core.keys.secret import Secrets
from retrysafe.core.ports import Store, Waits
from retrysafe.core.settings import environment_secret, secrets_of
from retrysafe.errors import StoreUrlInvalid
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import open_store

# People at a terminal and scripts with a deadline want to hear of a lock soon.
BUSY_SECONDS: Final = 5.0
# With the start of the program, an answer within a second.
SEARCH_SECONDS: Final = 0.4

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="RETRYSAFE_STORE",
        metavar="URL",
        help="The store, such as sqlite:///app.db (four slashes for an absolute path).",
        show_default=False,
    ),
]
BusyTimeout = Annotated[
    float,
    typer.Option(
        "--busy-timeout", min=0, metavar="SECONDS", help="How long to wait for a locked database."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write JSON to stdout, and errors as JSON to stderr.")
]
Caller = Annotated[
    str | None,
    typer.Option("--caller", metavar="CALLER", help="Whose key it is.", show_default=False),
]
Bearer = Annotated[
    str | None,
    typer.Option(
        "--bearer",
        metavar="TOKEN",
        help="The key of an HTTP client with this bearer token, where callers are bearer_token's; "
        "by any secret in RETRYSAFE_SECRET.",
        show_default=False,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="APIKEY",
        help="The key of an HTTP client with this API key, where callers are api_key's.",
        show_default=False,
    ),
]
IsGlobal = Annotated[
    bool, typer.Option("--global", help="The key is in the namespace shared by all callers.")
]
KeyText = Annotated[str, typer.Argument(metavar="KEY", help="The key.", show_default=False)]
Within = Annotated[
    float,
    typer.Option(
        "--within",
        min=0,
        max=3_600,
        metavar="SECONDS",
        help="How long to search where no index leads; 0 searches everything.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


Command = TypeVar("Command", bound=Callable[..., None])


def examples(*lines: str) -> Callable[[Command], Command]:
    """Adds examples to a command's help, one command line each."""

    def add(command: Command) -> Command:
        paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
        # Typer would keep the line breaks of the source; the terminal's width decides instead.
        unwrapped = [" ".join(paragraph.split()) for paragraph in paragraphs]
        # The backspace tells Click to leave the line breaks of this paragraph alone.
        block = "".join(f"\n  {line}" for line in lines)
        command.__doc__ = "\n\n".join([*unwrapped, f"\b\nFor example:{block}"])
        return command

    return add


def is_json(context: typer.Context, as_json: bool) -> bool:
    """Whether JSON was asked for, by the command or before its name."""
    return as_json or bool(context.find_root().params.get("as_json"))


def required_url(url: str | None) -> str:
    """The URL; raises a usage problem when nobody named a store."""
    if not url:
        raise usage(
            "which store? Pass --store sqlite:///path/to/file.db, or set RETRYSAFE_STORE to it"
        )
    return url


def chosen_store(url: str | None, busy_seconds: float, *, create: bool) -> Store:
    """The store, not opened yet; raises a usage problem for one that ends with this process."""
    try:
        store = open_store(
            required_url(url),
            create=create,
            migrate=False,
            busy_timeout=timedelta(seconds=busy_seconds),
            is_async=_has_asyncpg_alone(),
        )
    except StoreUrlInvalid as error:
        # A store that ends with the process is no advice for a command.
        raise StoreUrlInvalid(str(error).partition(", or memory://")[0]) from None
    if store.capabilities.waits is Waits.SUSPENDING:
        from retrysafe.cli.loop_store import blocking  # noqa: PLC0415 — seldom needed.

        return blocking(store)
    if store.capabilities.waits is Waits.NEVER:
        raise usage(
            f"{url} lives in one process and is empty in this one: name a store that is shared, "
            "such as sqlite:///path/to/file.db"
        )
    return store


def _has_asyncpg_alone() -> bool:
    return find_spec("psycopg") is None and find_spec("asyncpg") is not None


@contextmanager
def opened_store(url: str | None, busy_seconds: float) -> Iterator[Store]:
    """The store for looking and operating: it makes no file and no schema."""
    store = chosen_store(url, busy_seconds, create=False)
    try:
        yield store
    finally:
        run_sync(store.close())


def chosen_keys(
    text: str, caller: str | None, bearer: str | None, api_key: str | None, is_global: bool
) -> list[Key]:
    """The key that is meant; the shared namespace must be asked for, as everywhere.

    Of a client's credential there are several: one for every secret in `RETRYSAFE_SECRET`.
    """
    callers = chosen_callers(caller, bearer, api_key, is_global)
    if is_global:
        return [Key(text, caller=GLOBAL)]
    if not callers:
        raise usage(
            "whose key is it? Pass --caller CALLER, --bearer TOKEN or --api-key APIKEY for an "
            "HTTP client's, or --global for the shared namespace"
        )
    return [Key(text, caller=each) for each in callers]


def chosen_callers(
    caller: str | None, bearer: str | None, api_key: str | None, is_global: bool
) -> list[str]:
    """The caller as it is stored; empty for the shared namespace, and when nobody was named.

    A credential is stored as a digest, by any of the secrets that are listed or by none.
    """
    if is_global and caller is not None:
        raise usage("--caller and --global exclude each other: a key has one owner")
    if bearer is None and api_key is None:
        return [] if caller is None else [caller]
    if is_global or caller is not None or (bearer is not None and api_key is not None):
        raise usage("--bearer and --api-key name the caller: leave the other ones out")
    # Imported here: most commands need nothing of HTTP.
    from retrysafe.http.callers import Credential, callers_of_credential  # noqa: PLC0415

    if api_key is not None:
        if not api_key:
            raise usage("--api-key takes the API key as clients send it")
        return callers_of_credential(Credential("api-key", api_key), _secrets(), with_plain=True)
    assert bearer is not None  # Else there is an API key.
    if not bearer.isascii() or not bearer.isprintable() or not bearer or " " in bearer:
        raise usage("--bearer takes the token as clients send it, without the word Bearer")
    return callers_of_credential(Credential("bearer", bearer), _secrets(), with_plain=True)


def _secrets() -> Secrets:
    return secrets_of(environment_secret())


def checked_text(option: str, text: str) -> str:
    """The text itself; raises a usage problem for bytes that are not text on this system."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise usage(f"{option} is not valid Unicode text") from None
    return text

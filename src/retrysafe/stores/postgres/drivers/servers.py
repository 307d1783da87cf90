"""Which server a new connection leads to: one that the URL lists and that takes writes.

Owns the order in which servers are tried, and what a new connection is asked before it is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from retrysafe.errors import StoreNotWritable
from retrysafe.stores.postgres.drivers.port import PLANNER_SETTINGS
from retrysafe.stores.postgres.urls import one_per_server

# Finds a row if the server takes writes. The server is asked, and not what it announced when the
# connection was made (`in_hot_standby`, which the drivers' own `target_session_attrs` goes by):
# PgBouncer goes on announcing what its first server said, whatever leads where since.
_IS_WRITABLE: Final = "SELECT 1 WHERE current_setting('transaction_read_only') = 'off'"


def opening_script(server_pid: int, *, has_prepared_statements: bool) -> str:
    """What a new connection runs first, in one round trip; its last answer is for `is_writable`.

    Makes the planner's settings if the connection leads to the server itself. A pooler makes up the
    process id that it tells. Its connections are shared with others, who must not inherit them.
    """
    if not has_prepared_statements:
        return _IS_WRITABLE
    settings = ", ".join(
        f"set_config('{name}', '{value}', false)" for name, value in PLANNER_SETTINGS.items()
    )
    return f"SELECT {settings} WHERE pg_backend_pid() = {server_pid:d}; {_IS_WRITABLE}"


def require_writable(status: str | None, location: str) -> None:
    """Raises `StoreNotWritable` by what the server called the last answer to `opening_script`.

    A connection to a standby must not be kept: it would go on to fail when the address that it was
    made by leads to a primary again.
    """
    if status != "SELECT 1":
        raise StoreNotWritable(
            f"{location} leads to a server that takes no writes: a standby, or one that was "
            "demoted (transaction_read_only is on)"
        )


class Servers:
    """The servers that a URL lists, in the order in which they are tried.

    One that failed is tried last from then on. Else a dead host would cost every new connection
    the time that it takes to give up on it.
    """

    def __init__(self, url: str) -> None:
        self._urls = one_per_server(url)

    def in_turn(self, seconds: float) -> Iterator[tuple[str, float]]:
        """Each with its share of the time that is left."""
        until = time.monotonic() + seconds
        urls = list(self._urls)
        for left, url in zip(range(len(urls), 0, -1), urls, strict=True):
            yield url, max(0.0, until - time.monotonic()) / left

    def put_last(self, url: str) -> None:
        """Remembers that a server failed; one assignment, because threads share the list."""
        self._urls = [*(item for item in self._urls if item != url), url]


def most_informative(errors: Sequence[Exception]) -> Exception:
    """Which failure to raise when no server would do: one without writes, or else the last."""
    for error in errors:
        if isinstance(error, StoreNotWritable):
            return error
    return errors[-1]

"""Exact repetitions: a retry that is the first request byte for byte needs no second look.

Owns what such a request came to a moment ago: its call and the messages of its replay. It decides
nothing about the record. Whether the outcome still stands is the engine's to say, each time, and a
request that differs in any byte goes the usual way. Only for callers that are told by headers
alone: anything else of a connection may change who is calling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any, Final

from retrysafe.core.cache import CachedOutcome
from retrysafe.core.call import Call
from retrysafe.http.responses import Header, Response

# A thousand keys that are retried at the same time, with bodies and headers as people send them:
# 17 MB at most.
ENTRIES_LIMIT: Final = 1_024
ENTRY_LIMIT_BYTES: Final = 16 * 1024

# Method, path, query, mounts and headers.
Head = tuple[Any, ...]


class Repetition:
    """A request that was replayed, and what its replay looks like."""

    __slots__ = ("body", "call", "headers", "limit_bytes", "outcome", "response_body", "status")

    def __init__(
        self,
        body: bytes,
        limit_bytes: int,
        call: Call,
        outcome: CachedOutcome,
        response: Response,
    ) -> None:
        self.body = body
        # How much of a body is read on this route.
        self.limit_bytes = limit_bytes
        self.call = call
        self.outcome = outcome
        self.status = response.status
        # A copy per answer is made from it: outer middlewares add to the list that they are given.
        self.headers: tuple[Header, ...] = tuple(response.headers)
        self.response_body = response.body

    @property
    def size_bytes(self) -> int:
        """How much of it is the client's and the application's to choose."""
        return len(self.body) + len(self.response_body) + _size_of(self.headers)

    def start(self) -> dict[str, Any]:
        """The first message of the replay, with a list of headers of its own."""
        return {
            "type": "http.response.start",
            "status": self.status,
            "headers": list(self.headers),
        }


def head_of(scope: MutableMapping[str, Any]) -> Head:
    """Everything that can tell two requests apart before their bodies, as the server gave it."""
    return (
        scope["method"],
        scope["path"],
        # Two paths that are no UTF-8 may be one in the line above.
        scope.get("raw_path"),
        scope.get("query_string"),
        scope.get("root_path"),
        scope.get("app_root_path"),
        tuple(scope["headers"]),
    )


def _size_of(part: Any) -> int:
    """The bytes of a head; what is neither text nor a tuple of such counts nothing."""
    if isinstance(part, tuple):
        return sum(map(_size_of, part))
    return len(part) if isinstance(part, str | bytes) else 0


class Recent:
    """The last requests that were replayed, oldest out first; for the tasks of one loop."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: OrderedDict[Head, Repetition] = OrderedDict()

    def find(self, head: Head) -> Repetition | None:
        """What such a request came to; None when it is not known."""
        try:
            return self.entries.get(head)
        except TypeError:
            return None  # Some servers give headers as lists, which cannot be looked up.

    def keep(self, head: Head, repetition: Repetition) -> None:
        """Remembers a request that was replayed the usual way."""
        if _size_of(head) + repetition.size_bytes > ENTRY_LIMIT_BYTES:
            return
        try:
            self.entries[head] = repetition
        except TypeError:
            return
        if len(self.entries) > ENTRIES_LIMIT:
            self.entries.popitem(last=False)

"""Exact repetitions: a retry that is the first request byte for byte needs no second look.

Owns what such a request came to a moment ago: its call and the messages of its replay. It decides
nothing about the record. Whether the outcome still stands is the engine's to say, each time, and a
request that differs in any byte goes the usual way. Only for callers that are told by headers
alone: anything else of a connection may change who is calling.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from retrysafe.core.cache import CachedOutcome
from retrysafe.core.call import Call
from retrysafe.http.request import Request
from retrysafe.http.responses import Header, Response

# A thousand keys that are retried at the same time, with bodies as people send them: 17 MB at most.
ENTRIES_LIMIT: Final = 1_024
BODY_LIMIT_BYTES: Final = 16 * 1024

# Method, path, query, mount and headers, as the server gave them.
Head = tuple[Any, ...]


class Repetition:
    """A request that was replayed, and what its replay looks like."""

    __slots__ = ("body", "call", "headers", "outcome", "response_body", "status")

    def __init__(self, body: bytes, call: Call, outcome: CachedOutcome, response: Response) -> None:
        self.body = body
        self.call = call
        self.outcome = outcome
        self.status = response.status
        # A copy per answer is made from it: outer middlewares add to the list that they are given.
        self.headers: tuple[Header, ...] = tuple(response.headers)
        self.response_body = response.body

    def response(self) -> Response:
        """The replay, with a list of headers of its own."""
        return Response(self.status, list(self.headers), self.response_body)


def head_of(request: Request, prefix: str) -> Head | None:
    """Everything that can tell two requests apart before their bodies; None when it cannot be kept.

    Some servers give headers as lists, which cannot be looked up.
    """
    head = (request.method, request.path, request.query, prefix, tuple(request.headers))
    try:
        hash(head)
    except TypeError:
        return None
    return head


class Recent:
    """The last requests that were replayed, oldest out first; for the tasks of one loop."""

    __slots__ = ("_entries", "find")

    def __init__(self) -> None:
        self._entries: OrderedDict[Head, Repetition] = OrderedDict()
        self.find = self._entries.get

    def keep(self, head: Head, repetition: Repetition) -> None:
        """Remembers a request that was replayed the usual way."""
        if len(repetition.body) + len(repetition.response_body) > BODY_LIMIT_BYTES:
            return
        self._entries[head] = repetition
        if len(self._entries) > ENTRIES_LIMIT:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)

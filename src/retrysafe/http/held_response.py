"""A response that is held back until it is stored, and how long it can be.

Owns the limits, which hold while a response is collected: an endless one would take all memory.
Past them its outcome is withheld (remembered as done, without a body), and from then on it is
passed on as it comes. What passes, and when, is the same for every server and framework.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Final

from retrysafe.http.plan import Plan
from retrysafe.http.responses import Header, is_event_stream
from retrysafe.http.rules import Streaming

# Looked up once: members of an enum are dear to look up on every call.
_PASS: Final = Streaming.PASS


def passes_at_once(plan: Plan, headers: Iterable[Header]) -> bool:
    """Whether nothing of this response is held back: by its rule, or as server-sent events.

    Never in atomic mode, where a client would see what may still be rolled back.
    """
    rule = plan.route.rule
    return rule.transaction is None and (rule.streaming is _PASS or is_event_stream(headers))


class Held:
    """The body of a response so far."""

    __slots__ = (
        "_ends",
        "_is_atomic",
        "_is_past",
        "_limit_bytes",
        "_size",
        "body",
        "limit_seconds",
    )

    def __init__(self, plan: Plan) -> None:
        self._is_atomic = plan.route.rule.transaction is not None
        self._is_past = False
        self._limit_bytes = plan.policy.outcome_limit_bytes
        limit = plan.route.rule.hold_limit
        self._ends = None if limit is None else monotonic() + limit.total_seconds()
        # After which it passes even if nothing more comes. Not in atomic mode: nothing can be sent
        # before the commit, and who is silent cannot be told to end.
        self.limit_seconds = None if limit is None or self._is_atomic else limit.total_seconds()
        # Not a list of pieces: thousands of small ones take many times their own size.
        self.body = bytearray()
        self._size = 0

    def take(self, piece: bytes) -> bool:
        """Adds a piece; False when the response is past a limit and must be passed on.

        In atomic mode nothing can be sent before the commit, and to commit now would leave out what
        the rest of the response still writes. So the piece after the limit raises `RuntimeError`.
        """
        if self._is_past:
            raise RuntimeError(
                "a response in atomic mode is held back until it ends, up to "
                f"{self._limit_bytes:,} bytes and up to the rule's hold_limit; this one goes on. "
                "Its transaction was rolled back: raise outcome_limit_bytes or hold_limit, or "
                "answer in one piece"
            )
        self.body += piece
        # An empty piece counts as well, or an application could send them for ever.
        self._size += len(piece) or 1
        if self._size <= self._limit_bytes and (self._ends is None or monotonic() < self._ends):
            return True
        self._is_past = self._is_atomic
        return self._is_atomic


def is_from_stream(error: BaseException) -> bool:
    """Whether an exception came out of what a response is made of, and so before its end.

    Starlette's `BaseHTTPMiddleware` ends the response of an application that has raised in the
    middle of it, and raises afterwards.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "stream_response" and frame.f_globals.get("__name__") == (
            "starlette.responses"
        ):
            return True
        trace = trace.tb_next
    return False

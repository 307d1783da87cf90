"""Acts: what the reference application is told to do with one request.

An act travels in a header. Headers do not count in a fingerprint, so that a retry of the very same
request can be told to end in another way.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

ACT_HEADER = "x-act"
# Which play of which case a request belongs to.
PLAY_HEADER = "x-play"

# What belongs to one client, one connection or one trace: the first client gets it, no other does.
FIRST_ONLY = (
    ("Set-Cookie", "session=secret"),
    ("X-Request-Id", "request-1"),
    ("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("Server-Timing", "db;dur=53"),
)


@dataclass(frozen=True)
class Act:
    """How the application answers a request that it runs."""

    status: int = 201
    # None: JSON that tells the run's number, the attempt's number and a digest of what arrived.
    body: bytes | None = None
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    # In how many pieces the body is sent.
    chunks: int = 1
    # Points where the application reports to the stage, and goes on when it is told to: before it
    # answers, and after the first piece of its body.
    hold: str = ""
    pause: str = ""
    # It raises "before" it answers, or "midway", after the first piece of its body.
    fails: str = ""
    # Whether it sends its body through the `write` of WSGI.
    writes: bool = False

    def header(self) -> str:
        """The act as the text of a header: what differs from the plain act."""
        plain = asdict(Act())
        told: dict[str, Any] = {
            name: value for name, value in asdict(self).items() if value != plain[name]
        }
        if self.body is not None:
            told["body"] = base64.b64encode(self.body).decode()
        return json.dumps(told)

    @property
    def is_streamed(self) -> bool:
        """Whether the body is more than one piece, sent one by one."""
        return self.chunks > 1 or bool(self.pause) or self.fails == "midway"

    def held_at(self, point: str) -> Act:
        """The same act, which waits at that point before it answers."""
        return replace(self, hold=point)


def act_of(header: str | None) -> Act:
    """The act that a header tells."""
    if not header:
        return Act()
    told = json.loads(header)
    if "body" in told:
        told["body"] = base64.b64decode(told["body"])
    told["headers"] = tuple((name, value) for name, value in told.get("headers", ()))
    return Act(**told)


def digest_of(body: bytes) -> str:
    """How the application tells what arrived."""
    return hashlib.sha256(body).hexdigest()[:16]


@dataclass(frozen=True)
class Reply:
    """What the application answers."""

    status: int
    headers: list[tuple[str, str]]
    chunks: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


def reply_to(act: Act, *, method: str, run: int, attempt: int, received: bytes) -> Reply:
    """The application's answer; the same in every protocol and framework."""
    body = act.body
    if body is None:
        told = {"run": run, "attempt": attempt, "received": digest_of(received)}
        body = json.dumps(told).encode()
    headers = [("Location", f"/made/{run}"), ("X-Total", "1000"), *FIRST_ONLY, *act.headers]
    is_bare = method == "HEAD" or act.status in (204, 304)
    if not is_bare:
        headers.insert(0, ("Content-Type", act.content_type))
    return Reply(act.status, headers, [] if is_bare else _pieces(body, act.chunks))


def _pieces(body: bytes, count: int) -> list[bytes]:
    size = max(1, -(-len(body) // count))
    return [body[start : start + size] for start in range(0, len(body), size)] or [b""]

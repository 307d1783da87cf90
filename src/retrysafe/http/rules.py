"""Rules: which requests are protected, and how; checked once, when they are made.

Owns the words in which people configure routes. It must not know requests, nor any framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from typing import Any, Final

from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.model import Ending
from retrysafe.core.policy import InFlight, Policy
from retrysafe.errors import PolicyInvalid
from retrysafe.http.key_sources import FieldsKey, HeaderKey, KeySource, require_intent
from retrysafe.http.stored_request import Resumable

# The methods that change state. GET, HEAD and OPTIONS are safe by definition.
STATE_CHANGING: Final = ("POST", "PUT", "PATCH", "DELETE")
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
# What a rule can name: the methods that are registered for HTTP, and PURGE, which caches know.
# fmt: off
_KNOWN: Final = SAFE_METHODS.union(STATE_CHANGING, (
    "ACL", "BASELINE-CONTROL", "BIND", "CHECKIN", "CHECKOUT", "COPY", "LABEL", "LINK", "LOCK",
    "MERGE", "MKACTIVITY", "MKCALENDAR", "MKCOL", "MKREDIRECTREF", "MKWORKSPACE", "MOVE",
    "ORDERPATCH", "PROPFIND", "PROPPATCH", "PURGE", "QUERY", "REBIND", "REPORT", "SEARCH", "UNBIND",
    "UNCHECKOUT", "UNLINK", "UNLOCK", "UPDATE", "UPDATEREDIRECTREF", "VERSION-CONTROL",
))
# fmt: on
# How long a response that has begun is held back: what most proxies wait for a next byte.
HOLD_LIMIT: Final = timedelta(seconds=60)
# Enough for any JSON document; a larger body is held in memory once for every request in flight.
REQUEST_LIMIT_BYTES: Final = 1024 * 1024
# Answers that say "not now" or "send the same request there": nothing was done, and whoever follows
# must not find the key taken, least of all by the answer that sends it round in a circle.
_FREED: Final = frozenset({307, 308, 408, 425, 429})
# What a framework answers to a path that differs from that of its route in slashes only.
_NOT_SERVED: Final = frozenset({301, 404, 405})


Transaction = (
    Callable[[], AbstractAsyncContextManager[Any]] | Callable[[], AbstractContextManager[Any]]
)


class Streaming(Enum):
    """What happens to the response of a protected request."""

    # It is held back until it is stored; the first caller and every retry get the same bytes.
    BUFFER = "buffer"
    # It is sent as it comes, and remembered as done without its body.
    PASS = "pass"


class Accept(Enum):
    """The type of `ACCEPT`."""

    ACCEPT = "accept"

    def __repr__(self) -> str:
        return "ACCEPT"


# What a duplicate of a running request gets, beside what `InFlight` names: 202 with the URL of its
# status. Only HTTP has such an answer, so a `Policy` does not take it.
ACCEPT: Final = Accept.ACCEPT


class StatusRule:
    """Which responses are kept and replayed; all others free the key.

    The default keeps everything below 500 except 307, 308, 408, 425 and 429, which ask for the same
    request elsewhere or later. `kept` and `freed` name statuses that differ from it. Raises
    `PolicyInvalid` for impossible ones.
    """

    __slots__ = ("_endings", "freed", "kept")

    def __init__(self, *, kept: Iterable[int] = (), freed: Iterable[int] = ()) -> None:
        self.kept = frozenset(kept)
        self.freed = frozenset(freed)
        for status in self.kept | self.freed:
            if type(status) is not int or not 200 <= status <= 599:
                raise PolicyInvalid(f"a status is a whole number from 200 to 599, got {status!r}")
        both = self.kept & self.freed
        if both:
            raise PolicyInvalid(f"the statuses {sorted(both)} cannot be both kept and freed")
        # A table, because every first run asks it.
        self._endings = {status: self._judged(status) for status in range(200, 600)}

    def _judged(self, status: int) -> Ending:
        is_kept = status in self.kept or (
            status < 500 and status not in _FREED and status not in self.freed
        )
        if not is_kept:
            return Ending.RELEASED
        return Ending.SUCCEEDED if status < 400 else Ending.FAILED

    def ending(self, status: int) -> Ending:
        """How an attempt with this response ended; what is no final status frees the key."""
        return self._endings.get(status, Ending.RELEASED)

    def ending_of(self, response: Any) -> Ending:
        """The same for a response."""
        return self._endings.get(response.status, Ending.RELEASED)

    def ending_beside(self, response: Any) -> Ending:
        """The same for a path that is not spelled like the rule's.

        Most frameworks do not serve it: the key must be free for the path that they do serve. Where
        an endpoint was found all the same, this is what it came to.
        """
        status = response.status
        if response.is_unserved and status in _NOT_SERVED and status not in self.kept:
            return Ending.RELEASED
        return self.ending(status)

    @property
    def freed_statuses(self) -> tuple[int, ...]:
        """Every status that frees the key, for the policy page."""
        return tuple(
            status for status, ending in self._endings.items() if ending is Ending.RELEASED
        )


KEPT_BELOW_500: Final = StatusRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the requests of some routes are protected; raises `PolicyInvalid` when it cannot be.

    `path` is a path such as `/charges`, a pattern such as `/charges/{id}` (one segment) or
    `/v1/*` (everything below), or None for all paths. `/charges/` and `//charges` are `/charges`,
    because frameworks serve them so or send clients there; `exact_path` keeps them apart.
    """

    path: str | None = None
    methods: tuple[str, ...] = STATE_CHANGING
    # Whether a request must bring a key where its client is the one to choose it. Otherwise a
    # request without a key runs unprotected.
    required: bool = True
    # False: requests pass untouched; for exceptions from a later, wider rule.
    protected: bool = True
    # Where the key comes from.
    key: KeySource = field(default_factory=HeaderKey)
    # None: those of the Idempotency object.
    policy: Policy | None = None
    fingerprint: FingerprintRule | None = None
    # What a duplicate of a running request gets: InFlight.FAIL, InFlight.WAIT or ACCEPT. None: what
    # the policy says.
    in_flight: InFlight | Accept | None = None
    # Whether `Prefer: wait` is followed. None: on an event loop; in threads, where each that waits
    # is a thread that serves nobody, only if the rule or the policy waits by itself.
    wait: bool | None = None
    # Whether `Prefer: respond-async` is followed.
    respond_async: bool = True
    stored: StatusRule = KEPT_BELOW_500
    # Responses after which nothing has happened, such as 402: a key of `FieldsKey` then takes a
    # corrected request. Whether the response is kept or frees the key, `stored` says.
    nothing_happened: tuple[int, ...] = ()
    # Headers that are stored beside the usual ones, such as "X-Total-Count".
    headers: tuple[str, ...] = ()
    # Whether slashes at the end and double ones make another path, and another request.
    exact_path: bool = False
    # Whether the key must be a quoted string, as the draft has it; else bare tokens are taken too.
    strict: bool = False
    request_limit_bytes: int = REQUEST_LIMIT_BYTES
    streaming: Streaming = Streaming.BUFFER
    # How long a response that has begun may be held back. One that goes on after that, or past the
    # policy's outcome_limit_bytes, is remembered as done and sent as it comes. None: no such time.
    hold_limit: timedelta | None = HOLD_LIMIT
    # What records are listed under; the method and the path when it is empty.
    name: str = ""
    # Atomic mode: opens a transaction on the store's database and gives its connection, commits at
    # the end and rolls back on any exception. Async for ASGI, plain for WSGI.
    transaction: Transaction | None = None
    # Whether a worker finishes what a crash has cut off, without the client: the request is stored
    # with its claim. `Resumable(…)` says more about it than True.
    resumable: bool | Resumable = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", _checked_methods(self.methods))
        if self.path is not None and not (isinstance(self.path, str) and self.path[:1] == "/"):
            raise PolicyInvalid(f"a rule's path starts with a slash, got {self.path!r}")
        for name, kind in (
            ("required", bool),
            ("protected", bool),
            ("streaming", Streaming),
            ("stored", StatusRule),
            ("strict", bool),
            ("exact_path", bool),
            ("wait", bool | None),
            ("respond_async", bool),
            ("resumable", bool | Resumable),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise PolicyInvalid(
                    f"a rule's {name} is a {getattr(kind, '__name__', kind)}, got {value!r}"
                )
        if not isinstance(self.key, HeaderKey | FieldsKey | BodyKey):
            raise PolicyInvalid(
                "a rule's key says where it comes from: HeaderKey(), FieldsKey(…) or BodyKey(…), "
                f"got {self.key!r}. Requests may come without a key under required=False, and "
                "pass untouched under protected=False"
            )
        require_intent(self.key)
        if type(self.request_limit_bytes) is not int or self.request_limit_bytes < 0:
            raise PolicyInvalid(
                f"request_limit_bytes is a whole number of bytes, got {self.request_limit_bytes!r}"
            )
        if self.hold_limit is not None and not (
            isinstance(self.hold_limit, timedelta) and self.hold_limit >= timedelta(0)
        ):
            raise PolicyInvalid(
                f"hold_limit is a timedelta, or None for no limit, got {self.hold_limit!r}"
            )
        if not isinstance(self.in_flight, InFlight | Accept | None):
            raise PolicyInvalid(
                f"a rule's in_flight is InFlight.FAIL, InFlight.WAIT or ACCEPT, "
                f"got {self.in_flight!r}"
            )
        self._check_nothing_happened()
        self._check_transaction()
        if self.in_flight is ACCEPT and not has_status(self):
            raise PolicyInvalid(
                "in_flight=ACCEPT promises a status URL, where nobody could read a transaction "
                "before its end or the bytes of a stream: use InFlight.WAIT or InFlight.FAIL"
            )
        if self.resumable and not (self.protected and has_status(self)):
            raise PolicyInvalid(
                "resumable=True is for requests that run under a claim: a transaction is rolled "
                "back by a crash and leaves nothing to resume, a stream has lost its reader, and "
                "protected=False makes no claim"
            )

    def _check_nothing_happened(self) -> None:
        given: object = self.nothing_happened
        listed: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
        for status in listed:
            if type(status) is not int or not 400 <= status <= 499 or status == 408:
                raise PolicyInvalid(
                    "nothing_happened takes statuses from 400 to 499 except 408, because after "
                    f"others something may have happened, got {status!r}"
                )
        if listed and not isinstance(self.key, FieldsKey):
            raise PolicyInvalid(
                "nothing_happened is for FieldsKey, whose keys several requests may have: one in "
                "the Idempotency-Key header belongs to one request, and of BodyKey a corrected "
                "request has another key anyway"
            )
        object.__setattr__(self, "nothing_happened", listed)

    def _check_transaction(self) -> None:
        if self.transaction is None:
            return
        if not callable(self.transaction):
            raise PolicyInvalid(
                "a rule's transaction is a function that opens one and gives its connection, such "
                f"as a function with @asynccontextmanager, got {self.transaction!r}"
            )
        if not (self.required and self.protected):
            # A request that runs unprotected would find no connection.
            raise PolicyInvalid(
                "a rule with a transaction requires a key: leave out required=False and "
                "protected=False"
            )
        if self.streaming is not Streaming.BUFFER:
            # A client must not see what may still be rolled back.
            raise PolicyInvalid("a rule with a transaction sends nothing before it has committed")


def has_status(rule: Rule) -> bool:
    """Whether the status of a request of these routes can be read before it has ended.

    Nobody could read it before a transaction has ended, and a stream is read as it comes.
    """
    return rule.transaction is None and rule.streaming is Streaming.BUFFER


def responds_async(rule: Rule) -> bool:
    """Whether a request of these routes may prefer to be answered with 202 before it has ended."""
    return rule.respond_async and has_status(rule)


def checked_rules(rules: Iterable[Rule] | None) -> tuple[Rule, ...] | None:
    """The rules of an application; raises `PolicyInvalid` for an empty list.

    Leaving them out protects everything, and an empty list would protect nothing.
    """
    if rules is None or isinstance(rules, Rule):
        return rules  # type: ignore[return-value]
    given: object = rules
    listed: tuple[Any, ...] = (given,) if isinstance(given, str) else tuple(rules)
    require_rules(listed)
    if not listed:
        raise PolicyInvalid(
            "an empty list of rules would protect nothing: leave rules out to protect every POST, "
            "PUT, PATCH and DELETE"
        )
    return listed


def require_rules(listed: tuple[Any, ...]) -> None:
    """Raises `PolicyInvalid` for a list with anything else in it."""
    for item in listed:
        if not isinstance(item, Rule):
            raise PolicyInvalid(f"a rule is a Rule, such as Rule(path='/charges'), got {item!r}")


def _checked_methods(methods: Iterable[str]) -> tuple[str, ...]:
    if isinstance(methods, str):
        methods = (methods,)
    listed = tuple(methods)
    checked = tuple(method.upper() if isinstance(method, str) else "" for method in listed)
    if not checked:
        raise PolicyInvalid("a rule needs at least one method")
    for method, given in zip(checked, listed, strict=True):
        if method not in _KNOWN:
            near = get_close_matches(method, sorted(_KNOWN), n=1)
            hint = f"did you mean {near[0]}?" if near else "write POST, for example"
            # No request would ever match it, and the route would run unprotected.
            raise PolicyInvalid(f"{given!r} is no method of HTTP: {hint}")
    safe = sorted(SAFE_METHODS.intersection(checked))
    if safe:
        raise PolicyInvalid(
            f"{', '.join(safe)} is safe to repeat by definition and is never protected"
        )
    return checked

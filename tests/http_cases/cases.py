"""The words in which cases are written: requests, what is expected of them, and stage directions.

A case is a list of steps. A request is followed by what is expected of its answer; everything else
is a direction. The steps are plain data: `playing` plays them, `rendering` shows them to people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.http_cases.acts import Act

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
BODY = b'{"amount":1000,"currency":"eur"}'

# Traits of a server, for cases that have no meaning there.
ASGI, WSGI = "asgi", "wsgi"
HTTP_1, HTTP_2 = "http/1.1", "http/2"
ONE_PROCESS, PROCESSES = "one process", "several processes"
RAW_APPLICATION, FRAMEWORK = "raw application", "framework"
# Django behind WSGI, and behind either protocol.
DJANGO_WSGI = ("django", "django-rules", "drf")
DJANGO = (*DJANGO_WSGI, "django-async")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request. `{play}` in its path, key and headers is the name of this one play.

    `{next}` is another number each time that it is sent.
    """

    method: str = "POST"
    path: str = "/charges"
    # Several keys are several header lines.
    key: str | bytes | tuple[str, ...] | None = '"k"'
    # The bearer token, made unique for each play; None sends no credentials.
    caller: str | None = "alice"
    body: bytes = BODY
    content_type: str | None = JSON
    headers: tuple[tuple[str, str], ...] = ()
    act: Act = field(default_factory=Act)
    # Whether the body is sent without its length, in so many pieces.
    pieces: int = 0

    def but(self, **changes: Any) -> Ask:
        """The same request with some things changed."""
        return replace(self, **changes)


def post(path: str = "/charges", **more: Any) -> Ask:
    return Ask(path=path, **more)


def send(method: str, path: str = "/charges", **more: Any) -> Ask:
    return Ask(method=method, path=path, **more)


def get(path: str, **more: Any) -> Ask:
    """A request without key and body."""
    return Ask(
        **{"method": "GET", "key": None, "body": b"", "content_type": None, **more}, path=path
    )


# What is expected. A header's value is the text itself, `ANY`, or None for a header that must not
# be there.
ANY = "*"
Headers = Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The application ran, and this is its answer with every header that it gave."""

    status: int = 201
    attempt: int = 1
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Untouched:
    """The application ran without protection: no attempt, no mark, no refusal."""

    status: int = 201
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Nothing ran; the answer is that of an earlier run, byte for byte, and says so.

    Runs count from 1; -1 is the last one.
    """

    run: int = 1
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Nothing ran; the answer is a problem of this kind, with all that a problem has."""

    problem: str
    # In the problem's detail.
    says: str = ""
    key: str | None = None
    headers: Headers = field(default_factory=dict)
    # For the one problem that is told after a run.
    has_run: bool = False
    retryable: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Nothing ran; the middleware answered by itself, and not with a problem."""

    status: int
    headers: Headers = field(default_factory=dict)
    # Texts that the body holds, and members of its JSON.
    holds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    json: Mapping[str, Any] = field(default_factory=dict)
    is_empty: bool = False


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The application ran and raised: the server's own 500, without a byte of the response.

    `attempt` is that of the run. Some servers close the connection instead of answering.
    """

    attempt: int = 1


Expectation = Ran | Untouched | Replay | Refused | Answered | Broken

# Each problem of the contract: its status, and whether the same request may be sent again.
PROBLEMS: Mapping[str, tuple[int, bool]] = {
    "key-missing": (400, False),
    "key-invalid": (400, False),
    "key-unexpected": (400, False),
    "caller-unknown": (401, False),
    "key-unknown": (404, False),
    "in-flight": (409, True),
    "outcome-unavailable": (409, False),
    "body-incomplete": (400, True),
    "body-too-large": (413, False),
    "body-too-complex": (400, False),
    "header-too-long": (400, False),
    "key-reused": (422, False),
    "operation-failed": (500, False),
    "attempts-exhausted": (500, False),
    "outcome-not-stored": (500, False),
    "store-unavailable": (503, True),
}


# Directions.


@dataclass(frozen=True)
class Begin:
    """Sends a request on a connection of its own; goes on when its run is held by the stage."""

    name: str
    ask: Ask


@dataclass(frozen=True)
class Start:
    """Sends a request on a connection of its own, and goes on at once."""

    name: str
    ask: Ask


@dataclass(frozen=True)
class Release:
    """Lets the run go on that is held at this point."""

    point: str


@dataclass(frozen=True)
class Reached:
    """Waits until a run is held at this point."""

    point: str


@dataclass(frozen=True)
class Finish:
    """Waits for the answer to a request that was begun; followed by what is expected of it."""

    name: str


@dataclass(frozen=True)
class Receives:
    """Waits until these bytes of the answer have arrived, while the run goes on."""

    name: str
    data: bytes


@dataclass(frozen=True)
class HangUp:
    """The client of a request that was begun goes away."""

    name: str


@dataclass(frozen=True)
class CutOff:
    """Sends a request and hangs up in the middle of its body."""

    ask: Ask


@dataclass(frozen=True)
class Continue:
    """Sends the head of a request with `Expect: 100-continue`, and the body when told to."""

    ask: Ask


@dataclass(frozen=True)
class Upgrade:
    """Opens a websocket and reads the greeting."""

    path: str


@dataclass(frozen=True)
class Crowd:
    """Sends one request many times at once; the run of the first is held until all others ended.

    Exactly one runs. Every other one is expected to be answered as said; those that wait are
    answered after the release.
    """

    count: int
    ask: Ask
    others: Expectation
    waits: bool = False


@dataclass(frozen=True)
class Flood:
    """Sends one request many times, so many at once, each answered as said.

    The store of the mount is asked at most so often meanwhile.
    """

    count: int
    ask: Ask
    each: Expectation
    store_calls_at_most: int


@dataclass(frozen=True)
class Until:
    """Repeats a request until it is no longer answered by this problem; then comes what follows.

    `unprotected` stands for answers that were given without protection.
    """

    problem: str
    ask: Ask


@dataclass(frozen=True)
class Break:
    """Breaks the store of the case's mount in one way."""

    fault: str
    point: str = ""


@dataclass(frozen=True)
class Heal:
    """The store works again."""


@dataclass(frozen=True)
class Quiet:
    """The next request must not reach the store."""

    ask: Ask
    expectation: Expectation


@dataclass(frozen=True)
class Operate:
    """An operator releases, force-releases or expires the key, in a process of its own."""

    command: str
    key: str = "k"
    caller: str = "alice"


@dataclass(frozen=True)
class ClaimElsewhere:
    """Another process claims the key for this request, and does not end."""

    ask: Ask
    key: str = "k"
    caller: str = "alice"


Step = (
    Ask
    | Expectation
    | Begin
    | Start
    | Release
    | Reached
    | Finish
    | Receives
    | HangUp
    | CutOff
    | Continue
    | Upgrade
    | Crowd
    | Flood
    | Until
    | Break
    | Heal
    | Quiet
    | Operate
    | ClaimElsewhere
)
# Steps that give an answer, so that the next step is what is expected of it.
ANSWERED_STEPS = (Ask, Finish, Continue, Until)
EXPECTATIONS = (Ran, Untouched, Replay, Refused, Answered, Broken)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    promise: str
    steps: tuple[Step, ...]
    # Traits of servers where the case has no meaning, each with the reason.
    without: Mapping[str, str]
    # Where it belongs to: the draft, the contract of the documentation, or abuse.
    group: str = ""

    @property
    def asks(self) -> tuple[Ask, ...]:
        """Every request of the case."""
        return tuple(
            step if isinstance(step, Ask) else step.ask
            for step in self.steps
            if isinstance(step, Ask) or hasattr(step, "ask")
        )

    def reason_without(self, traits: frozenset[str]) -> str | None:
        """Why the case has no meaning for a server with these traits; None when it has one."""
        return next((reason for trait, reason in self.without.items() if trait in traits), None)


def case(name: str, promise: str, *steps: Step, without: Mapping[str, str] | None = None) -> Case:
    """A case; raises `ValueError` when a request is not followed by what is expected of it."""
    needs_expectation = False
    for step in steps:
        if isinstance(step, EXPECTATIONS) != needs_expectation:
            raise ValueError(f"{name}: {step} is out of place")
        needs_expectation = isinstance(step, ANSWERED_STEPS)
    if needs_expectation or not steps:
        raise ValueError(f"{name}: the last request has no expectation")
    return Case(name, promise, steps, dict(without or {}))

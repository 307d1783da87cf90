"""Which cases a server plays in every run, and which in a long one alone.

Two servers, one of each protocol, play the whole table in every run. On all others the same
protection answers, so that they play what can differ there: how a request arrives, how a response
leaves, who hangs up when; and one case at least for every path, every refusal and every kind of
answer, because each framework passes rules, options and answers on in its own way. A long run plays
everything everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tests.http_cases import cases
from tests.http_cases.acts import Act
from tests.http_cases.cases import BODY, Ask, Case
from tests.http_cases.configuration import RULES, mount_of
from tests.http_cases.serving import ServerKind

# The servers that play the whole table in every run.
WHOLE = ("uvicorn", "gunicorn")
_OF_THE_SERVER = (
    *(cases.Broken, cases.Continue, cases.CutOff, cases.HangUp),
    *(cases.Receives, cases.Upgrade, cases.Crowd),
)
# Longer bodies come in several pieces.
_ONE_PIECE_BYTES = 100_000
_PLAIN_KEY = re.compile(r"[ -~]+")
_PLAIN_PATH = re.compile(r"(/[\w-]+)+")


def played_in_every_run(kind: ServerKind, table: Iterable[Case]) -> frozenset[str]:
    """The names of the cases that the server plays in every run."""
    playable = [case for case in table if kind.reason_without(case) is None]
    if kind.name in WHOLE:
        return frozenset(case.name for case in playable)
    # How often a store is asked is the protection's doing, and thousands of requests take long.
    playable = [case for case in playable if not _floods(case)]
    chosen = [case for case in playable if depends_on_server(case)]
    met = {trait for case in chosen for trait in traits(case)}
    # Those that wait for a breaker come last: only if nothing else meets what they meet.
    for case in sorted(playable, key=_waits):
        new = set(traits(case)) - met
        if new:
            chosen.append(case)
            met |= new
    return frozenset(case.name for case in chosen)


def depends_on_server(case: Case) -> bool:
    """Whether the case is about what servers and frameworks do by themselves."""
    return any(isinstance(step, _OF_THE_SERVER) for step in case.steps) or any(
        _arrives_oddly(ask) or _leaves_oddly(ask.act) for ask in case.asks
    )


def _arrives_oddly(ask: Ask) -> bool:
    return (
        ask.method != "POST"
        or ask.pieces > 0
        or ask.content_type is None
        or not 0 < len(ask.body) <= _ONE_PIECE_BYTES
        or not _PLAIN_PATH.fullmatch(ask.path.replace("{play}", "play"))
        or not (ask.key is None or (isinstance(ask.key, str) and _PLAIN_KEY.fullmatch(ask.key)))
        or any(name != "Prefer" for name, _ in ask.headers)
        or (ask.body != BODY and not ask.body.isascii())
    )


def _leaves_oddly(act: Act) -> bool:
    return bool(
        act.chunks > 1
        or act.headers
        or act.pause
        or act.fails
        or act.writes
        or act.status in (204, 304)
        or (act.body is not None and not act.body.isascii())
    )


def _floods(case: Case) -> bool:
    return any(isinstance(step, cases.Flood) for step in case.steps)


def _waits(case: Case) -> bool:
    return any(isinstance(step, cases.Until) for step in case.steps)


def traits(case: Case) -> Iterator[str]:
    """What one case at least must meet on every server."""
    for ask in case.asks:
        mount = mount_of(ask.path)
        yield f"mount {mount.name}"
        path = ask.path.removeprefix(mount.prefix).partition("?")[0]
        yield from (
            f"rule {rule.path}"
            for rule in RULES
            if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", rule.path.replace("*", ".*")), path)
        )
        yield from (f"header {name}" for name, _ in ask.headers)
    for step in case.steps:
        yield f"step {type(step).__name__}"
        if isinstance(step, cases.Refused):
            yield f"problem {step.problem}"
        if isinstance(step, cases.Break):
            yield f"fault {step.fault}"

"""The table as a page: every case with its promise, its requests and their answers, in words."""

from __future__ import annotations

import re
from typing import Any

from tests.http_cases import cases
from tests.http_cases.acts import Act
from tests.http_cases.cases import BODY, JSON, Ask, Case
from tests.http_cases.selecting import WHOLE
from tests.http_cases.serving import KINDS
from tests.http_cases.table import CASES, GROUPS

# Longer values are told by their size.
_SHOWN_CHARACTERS = 60
_FAULTS = {
    "down": "the store is down",
    "settlements": "the store takes no outcomes",
    "next answer": "the store's next answer is lost",
    "held": "the store's next call is held",
}


def render_page(notice: str) -> str:
    """docs/http-cases.md"""
    sections = "\n".join(_section(group) for group in GROUPS)
    servers = "".join(_row(f"`{kind.name}`", kind.title) for kind in KINDS)
    whole = " and ".join(f"`{name}`" for name in WHOLE)
    plays = sum(kind.reason_without(case) is None for kind in KINDS for case in CASES)
    return f"""# HTTP cases

{notice}
What a protected API does, as {len(CASES)} cases. The tests send every request of a case over a
socket to every server below, and compare each answer to the last header: {plays:,} plays in all,
with the same results everywhere (`make test-all`). `make test` plays the whole table on {whole},
and on the others what a server or a framework can change. A case is left out only where it has no
meaning; the [last table](#left-out) says where, and why.

Requests are `POST` with the key `"k"`, a bearer token and a small JSON body, unless something else
is said. *Runs* means that the application ran, and that this is its answer; *replay* that it did
not, and that the answer is the first one's byte for byte, without cookies and trace headers and
with `Idempotent-Replayed: true`; *passes* that nothing is protected. Refusals are named by their
anchor on the policy page: each is `application/problem+json` with all its members, a link to the
policy and, when a retry helps, `Retry-After`.

| name | application and server |
| --- | --- |
{servers}
{sections}
## Left out

| case | where | why |
| --- | --- | --- |
{_left_out()}"""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _section(group: str) -> str:
    rows = "".join(
        _row(f"`{case.name}`", case.promise, _steps(case)) for case in CASES if case.group == group
    )
    return f"## {group}\n\n| case | promise | requests and answers |\n| --- | --- | --- |\n{rows}"


def _left_out() -> str:
    rows = []
    for case in CASES:
        reasons: dict[str, list[str]] = {}
        for kind in KINDS:
            reason = case.reason_without(kind.traits)
            if reason is not None:
                reasons.setdefault(reason, []).append(kind.name)
        rows += [
            _row(f"`{case.name}`", ", ".join(names), reason) for reason, names in reasons.items()
        ]
    unmounted = [kind.name for kind in KINDS if len(kind.mounts) == 1]
    rows.append(
        _row(
            "all below a mount's prefix",
            ", ".join(unmounted),
            "one project has one setting, and other settings are played with django",
        )
    )
    return "".join(rows)


# Steps.


def _steps(case: Case) -> str:
    told: list[str] = []
    for step in case.steps:
        if isinstance(step, cases.EXPECTATIONS):
            told[-1] += f" → {_expectation(step)}"
        else:
            told.append(_step(step))
    return "; ".join(told)


def _step(step: Any) -> str:
    match step:
        case Ask():
            return _ask(step)
        case cases.Begin(name, ask):
            return f"{name}: {_ask(ask)}, held while it runs"
        case cases.Start(name, ask):
            return f"{name}: {_ask(ask)}"
        case cases.Release(point):
            return f"*{point}* goes on"
        case cases.Reached(point):
            return f"*{point}* is reached"
        case cases.Finish(name):
            return name
        case cases.Receives(name, data):
            return f"{name} has received {_code(data)}"
        case cases.HangUp(name):
            return f"{name} hangs up"
        case cases.CutOff(ask):
            return f"{_ask(ask)}, which hangs up in its body"
        case cases.Continue(ask):
            return f"{_ask(ask)}, which waits for 100"
        case cases.Upgrade(path):
            return f"a websocket to {_code(path)} gets its greeting"
        case cases.Crowd(count, ask, others):
            return f"{count} times at once {_ask(ask)} → one runs, others: {_expectation(others)}"
        case cases.Flood(count, ask, each, calls):
            return (
                f"{count:,} times {_ask(ask)} → each: {_expectation(each)}, "
                f"at most {calls} calls of the store"
            )
        case cases.Until(problem, ask):
            return f"{_ask(ask)} until it is not {problem}"
        case cases.Break(fault):
            return _FAULTS[fault]
        case cases.Heal():
            return "the store is back"
        case cases.Quiet(ask, expectation):
            return f"{_ask(ask)} → {_expectation(expectation)}, without a call of the store"
        case cases.Operate(command):
            return f"an operator gives the command to {command}"
        case cases.ClaimElsewhere(ask):
            return f"another process claims the key for {_ask(ask)}"
    raise ValueError(f"there are no words for {step}")


def _ask(ask: Ask) -> str:
    told = [_code(f"{ask.method} {_short(ask.path)}")]
    if ask.key is None:
        told += ["without a key"] if ask.method != "GET" else []
    elif isinstance(ask.key, tuple):
        told.append("with the keys " + " and ".join(map(_code, ask.key)))
    elif ask.key != '"k"':
        told.append(f"with the key {_code(ask.key)}")
    if ask.caller is None:
        told.append("without credentials")
    elif ask.caller != "alice":
        told.append(f"by {ask.caller}")
    told += [f"with {_code(f'{name}: {value}')}" for name, value in ask.headers]
    told += _body(ask)
    return ", ".join(told) + _act(ask.act)


def _body(ask: Ask) -> list[str]:
    told = []
    if ask.body != BODY and (ask.body or ask.method != "GET"):
        told.append(f"body {_code(ask.body)}" if ask.body else "no body")
    if ask.content_type not in (JSON, None):
        told.append(f"as {_code(ask.content_type or '')}")
    if ask.pieces:
        told.append("chunked")
    return told


def _act(act: Act) -> str:
    told = []
    if act.status != 201:
        told.append(f"{act.status}")
    if act.body is not None:
        told.append(f"{_code(act.body)}" if act.body else "nothing")
    if act.chunks > 1:
        told.append(f"in {act.chunks} pieces")
    if act.content_type != "application/json":
        told.append(f"as {_code(act.content_type)}")
    told += [f"with {_code(f'{name}: {value}')}" for name, value in act.headers]
    if act.pause:
        told.append(f"held at *{act.pause}* after the first piece")
    if act.fails:
        told.append("raises" if act.fails == "before" else "raises after the first piece")
    if act.writes:
        told.append("by `write`")
    return f" (answered: {', '.join(told)})" if told else ""


def _expectation(expectation: Any) -> str:
    match expectation:
        case cases.Ran(status=status, attempt=attempt):
            told = f"runs: {status}" + (f", attempt {attempt}" if attempt > 1 else "")
        case cases.Untouched(status=status):
            told = f"passes: {status}"
        case cases.Replay(run=run):
            told = "replay" + (f" of run {run}" if run > 1 else "")
        case cases.Refused(problem=problem):
            told = f"{cases.PROBLEMS[problem][0]} {problem}"
        case cases.Answered(status=status):
            told = f"{status}"
        case _:
            told = "the server's own 500"
    named = [
        f"no {_code(name)}"
        if value is None
        else _code(name if value == "*" else f"{name}: {value}")
        for name, value in getattr(expectation, "headers", {}).items()
    ]
    return f"**{told}**" + (f" with {', '.join(named)}" if named else "")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:20]}… ({len(text):,} characters)"


def _code(value: str | bytes) -> str:
    """A value as code in a cell of a table; long ones and bytes that are no text by their size."""
    if isinstance(value, bytes):
        is_text = re.fullmatch(rb"[\n\r -~]*", value) is not None
        if not is_text or len(value) > _SHOWN_CHARACTERS:
            return f"{len(value):,} bytes"
        value = value.decode("ascii")
    shown = _short(value).replace("\r", "\\r").replace("\n", "\\n").replace("|", "\\|")
    # An empty span is no code, and blanks at its ends are cut off.
    return f"`{shown}`" if shown.strip() == shown and shown else f"`` {shown or ' '} ``"

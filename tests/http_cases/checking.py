"""Whether an answer is the expected one, to the last header.

What every answer of a kind has is checked here once for all, so that the table only says what is
special about a case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes

from tests.http.codes import CODES
from tests.http_cases import cases
from tests.http_cases.acts import FIRST_ONLY, digest_of
from tests.http_cases.cases import ANY, PROBLEMS, Ask, Headers
from tests.http_cases.configuration import LEASE_SECONDS, mount_of

if TYPE_CHECKING:
    from tests.http_cases.playing import Play
    from tests.http_cases.wire import Answer

PROBLEM_TYPE = "application/problem+json"
MARK = "idempotent-replayed"
# What a replay owes beside status and body.
KEPT = (
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "etag",
    "last-modified",
    "link",
    "location",
)
# What tells callers apart, where it is not the bearer token.
VARIES = {"/everybody": set(), "/accounts": {"X-Account"}}


def check(expectation: Any, play: Play, ask: Ask, answer: Answer | None) -> None:
    """Raises AssertionError when the answer is not what is expected."""
    if isinstance(expectation, cases.Broken):
        _check_broken(expectation, play, answer)
        return
    assert answer is not None, "the server closed the connection"
    match expectation:
        case cases.Ran(status=status, attempt=attempt):
            _check_run(play, ask, answer, status, attempt)
        case cases.Untouched(status=status):
            _check_run(play, ask, answer, status, 0)
        case cases.Replay(run=run):
            first = play.answers[run - 1 if run > 0 else run]
            assert first is not None
            _check_replay(first, ask, answer)
        case cases.Refused():
            _check_refused(expectation, ask, answer)
        case cases.Answered():
            _check_answered(expectation, answer)
    _check_headers(expectation.headers, answer, play)


def is_problem(answer: Answer, slug: str) -> bool:
    """Whether the answer is a problem of this kind."""
    return (
        answer.header("content-type") == PROBLEM_TYPE
        and answer.json["type"].partition("#")[2] == slug
    )


def _check_headers(headers: Headers, answer: Answer, play: Play) -> None:
    for name, value in headers.items():
        found = answer.header(name.lower())
        if value is None:
            assert found is None, f"{name} is {found!r} and must not be there"
        elif value == ANY:
            assert found is not None, f"{name} is missing"
        else:
            assert found == value.replace("{play}", play.name), f"{name} is {found!r}"


def _check_run(play: Play, ask: Ask, answer: Answer, status: int, attempt: int) -> None:
    assert answer.status == status
    assert answer.header(MARK) is None
    told = play.stage.runs[play.name][-1]
    assert told["attempt"] == attempt
    # The first client gets every header, also those that no other ever gets.
    for name, value in FIRST_ONLY:
        assert (name.lower(), value) in answer.header_lines
    for name, value in ask.act.headers:
        assert (name.lower(), value) in answer.header_lines
    assert answer.header("location") is not None
    if ask.method == "HEAD" or status in (204, 304):
        assert answer.body == b""
    elif ask.act.body is not None:
        assert answer.body == ask.act.body
    else:
        content = answer.json
        assert content["attempt"] == attempt
        assert content["received"] == digest_of(ask.body)


def _check_replay(first: Answer, ask: Ask, answer: Answer) -> None:
    assert answer.header(MARK) == "true"
    assert answer.status == first.status
    assert answer.body == first.body
    for name in KEPT:
        expected = [value for line, value in first.header_lines if line == name]
        assert [value for line, value in answer.header_lines if line == name] == expected
    # Whoever shares a cache with the caller must not get it.
    assert answer.header("cache-control") == "no-store"
    told = answer.header("vary")
    wanted = {value for line, value in first.header_lines if line == "vary"}
    wanted |= VARIES.get(mount_of(ask.path).prefix, {"Authorization"})
    assert wanted <= set((told or "").split(", "))
    for name, _ in FIRST_ONLY:
        assert answer.header(name.lower()) is None, f"{name} was replayed"
    if answer.status not in (204, 304):
        assert answer.header("content-length") == str(len(first.body))


def _check_refused(expectation: cases.Refused, ask: Ask, answer: Answer) -> None:
    status, retryable = PROBLEMS[expectation.problem]
    if expectation.retryable is not None:
        retryable = expectation.retryable
    assert answer.header("content-type") == PROBLEM_TYPE, answer
    content = answer.json
    policy_url = f"{mount_of(ask.path).prefix}/idempotency-policy"
    assert content["type"] == f"{policy_url}#{expectation.problem}"
    assert answer.status == content["status"] == status
    assert content["code"] == CODES[expectation.problem]
    assert content["title"]
    assert expectation.says in content["detail"]
    assert content["instance"] == quote(unquote_to_bytes(ask.path.partition("?")[0]))
    assert content["retryable"] is retryable
    if expectation.key is not None:
        assert content["key"] == expectation.key
    assert answer.header("link") == f'<{policy_url}>; rel="describedby"'
    assert answer.header("cache-control") == "no-store"
    assert answer.header("content-length") == str(len(answer.body))
    assert answer.header(MARK) is None
    # Nothing of any stored response.
    assert "location" not in dict(answer.header_lines)
    assert "received" not in content
    retry_after = answer.header("retry-after")
    if retryable:
        assert retry_after is not None
        assert 1 <= int(retry_after) <= LEASE_SECONDS
    else:
        assert retry_after is None


def _check_answered(expectation: cases.Answered, answer: Answer) -> None:
    assert answer.status == expectation.status
    text = answer.body.decode()
    for wanted in expectation.holds:
        assert wanted in text
    for unwanted in expectation.lacks:
        assert unwanted not in text
    if expectation.json:
        content = answer.json
        for name, value in expectation.json.items():
            assert content[name] == value
    if expectation.is_empty:
        assert answer.body == b""


def _check_broken(expectation: cases.Broken, play: Play, answer: Answer | None) -> None:
    told = play.stage.runs[play.name][-1]
    assert told["attempt"] == expectation.attempt
    if answer is None:
        return  # The server hung up, as some do.
    assert answer.status == 500
    assert answer.header("content-type") != PROBLEM_TYPE
    assert b"received" not in answer.body
    assert answer.header("location") is None
    assert answer.header(MARK) is None

"""The small parts: what an answer says, what a policy may be, what is imported, what is pickled."""

from __future__ import annotations

import asyncio
import pickle
import ssl
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

import retrysafe
import retrysafe.client
from retrysafe.client import RetryBudget, RetryPolicy, tries_of, was_replayed
from retrysafe.client.faults import is_certificate_refused
from retrysafe.client.httpx import AsyncRetryTransport, RetryTransport
from retrysafe.client.replies import problem_retryable, retry_after_seconds
from retrysafe.client.requests import RetryAdapter
from retrysafe.errors import PolicyInvalid
from tests.client.server import Answer, Drop

NOW = 1_700_000_000.0
NOW_TEXT = "Tue, 14 Nov 2023 22:13:20 GMT"
LATER_TEXT = "Tue, 14 Nov 2023 22:13:50 GMT"

PUBLIC_NAMES = [
    "RetryBudget",
    "RetryPolicy",
    "Stopped",
    "Timing",
    "Tries",
    "for_attempt",
    "header_value",
    "intent_key",
    "one_intent",
    "tries_of",
    "was_replayed",
]


def test_public_names_are_frozen():
    """A name is added or removed on purpose, here and in the changelog, never by accident."""
    assert retrysafe.client.__all__ == PUBLIC_NAMES
    assert all(getattr(retrysafe.client, name).__doc__ for name in PUBLIC_NAMES)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"retry-after": "0"}, 0),
        ({"retry-after": " 120 "}, 120),
        ({"retry-after": "9" * 5_000}, float("inf")),
        ({"retry-after": LATER_TEXT}, 30),
        ({"retry-after": LATER_TEXT.replace("GMT", "-0000")}, 30),
        ({"retry-after": LATER_TEXT, "date": NOW_TEXT.replace("13:20", "13:45")}, 5),
        ({"retry-after": LATER_TEXT, "date": "nonsense"}, 30),
        ({"retry-after": NOW_TEXT, "date": LATER_TEXT}, 0),
        ({"retry-after": "-5"}, 0),
        ({"retry-after": "1.5"}, 0),
        ({"retry-after": "٣"}, 0),
        ({"retry-after": "soon"}, 0),
        ({"retry-after": "Tue, 99 Nov 2023 22:13:50 GMT"}, 0),
        # Years that no calendar has, and an instant before the first year.
        ({"retry-after": "Tue, 14 Nov 99999999999999999999 22:13:50 GMT"}, 0),
        ({"retry-after": "Mon, 01 Jan 0001 00:00:00 +2359"}, 0),
        ({"retry-after": LATER_TEXT, "date": "Tue, 14 Nov 99999999999999999999 22:13:50 GMT"}, 30),
        ({"retry-after": LATER_TEXT + " " * 100_000 + "x"}, 0),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_nothing_else(headers, seconds):
    """What is not a time asks for no wait; the back-off is waited for in any case."""
    assert retry_after_seconds(headers_of(headers), NOW) == seconds


def test_a_date_without_a_zone_is_gmt_wherever_the_client_is(monkeypatch):
    """RFC 9110: HTTP dates are in GMT, whatever the host's own zone."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        headers = headers_of({"retry-after": LATER_TEXT.replace("GMT", "-0000")})
        assert retry_after_seconds(headers, NOW) == 30
    finally:
        monkeypatch.undo()
        time.tzset()


def headers_of(headers):
    """Headers that are looked up without regard to case, as in both libraries."""
    lowered = {name.lower(): value for name, value in headers.items()}

    class Lookup:
        def get(self, name):
            return lowered.get(name.lower())

    return Lookup()


@given(st.text())
def test_no_retry_after_breaks_a_client(text):
    """A server may write what it likes."""
    assert retry_after_seconds(headers_of({"retry-after": text}), NOW) >= 0


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        ("application/problem+json", b'{"retryable": true}', True),
        ("Application/Problem+JSON; charset=utf-8", b'{"retryable": false}', False),
        ("application/json", b'{"retryable": true}', True),
        ("text/plain", b'{"retryable": true}', None),
        ("application/problem+json", b'{"retryable": "true"}', None),
        ("application/problem+json", b'{"retryable": 1}', None),
        ("application/problem+json", b'["retryable"]', None),
        ("application/problem+json", b"{", None),
        ("application/problem+json", b"\xff", None),
        ("application/problem+json", b"[" * 100_000, None),
        ("application/problem+json", b"", None),
        ("application/problem+json", None, None),
        (None, b'{"retryable": true}', None),
    ],
)
def test_a_problem_says_whether_it_is_retryable(kind, body, told):
    """Only a JSON boolean in a JSON object counts; everything else is silence."""
    headers = {} if kind is None else {"content-type": kind}
    assert problem_retryable(headers_of(headers), body) is told


@pytest.mark.parametrize(
    ("mark", "is_replay"),
    [("true", True), ("True", True), ("?1", True), ("false", False), ("?0", False), ("", False)],
)
def test_the_replay_mark_is_read_from_both_libraries(mark, is_replay):
    response = requests.Response()
    response.headers["Idempotent-Replayed"] = mark
    assert was_replayed(response) is is_replay
    assert was_replayed(httpx.Response(200, headers=response.headers)) is is_replay
    assert not was_replayed(httpx.Response(200))
    assert tries_of(response) is None
    assert tries_of(httpx.Response(200)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tries_limit": 0},
        {"tries_limit": True},
        {"tries_limit": 2.0},
        {"time_limit": timedelta(seconds=-1)},
        {"time_limit": timedelta(days=2)},
        {"time_limit": 60},
        {"backoff": timedelta(seconds=-1)},
        {"backoff": timedelta(minutes=1)},
        {"wait": timedelta(seconds=-1)},
        {"wait": timedelta(seconds=1, milliseconds=500)},
        {"wait": 10},
        {"methods": "POST"},
        {"methods": {1}},
        {"methods": {"POST", "get"}},
        {"statuses": {422}},
        {"statuses": {503, 404}},
        {"statuses": {409}},
        {"statuses": {200}},
        {"statuses": {600}},
        {"statuses": 503},
        {"retries_silent_conflicts": None},
        {"retries_safe_methods": 1},
        {"request_buffer_bytes": -1},
        {"response_buffer_bytes": None},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(changes):
    """Above all, no setting makes a client retry an answer that says that the request is wrong."""
    with pytest.raises(PolicyInvalid):
        RetryPolicy(**changes)


def test_statuses_can_be_chosen():
    assert RetryPolicy(statuses=[503, 507]).statuses == {503, 507}


@pytest.mark.parametrize("name", ["capacity", "per_request", "per_second"])
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_a_budget_that_makes_no_sense_is_refused(name, value):
    with pytest.raises(PolicyInvalid):
        RetryBudget(**{name: value})


def test_a_refused_certificate_is_found_however_it_is_wrapped():
    """httpx chains its causes, requests and urllib3 keep them in arguments and reasons."""
    refused = ssl.SSLCertVerificationError(1, "self-signed")
    chained = httpx.ConnectError("refused")
    chained.__cause__ = OSError(refused)
    wrapped = Exception("max retries")
    wrapped.reason = OSError(refused)
    assert is_certificate_refused(chained)
    assert is_certificate_refused(requests.exceptions.SSLError(wrapped))
    assert not is_certificate_refused(requests.exceptions.SSLError(ssl.SSLEOFError(8, "EOF")))
    circle = OSError()
    circle.__cause__ = OSError(circle)
    assert not is_certificate_refused(circle)


def test_a_refused_certificate_is_not_tried_again():
    """Trying again does not make it a good one."""
    tries = []

    class Refusing(httpx.BaseTransport):
        def handle_request(self, request):
            tries.append(request)
            raise httpx.ConnectError("refused") from ssl.SSLCertVerificationError(1, "self-signed")

    with pytest.raises(httpx.ConnectError):
        RetryTransport(Refusing()).handle_request(httpx.Request("POST", "https://server.test"))
    assert len(tries) == 1


def test_the_systems_own_clocks_and_sleep_work(server, make_client):
    """Without injected parts a client really waits, here for no time at all."""
    client = make_client(timing=None, random=lambda: 0.0)
    server.script(Drop(after_effect=True), Answer(503))
    answer = client.send("POST", "/charges")
    assert answer.replayed
    assert (answer.tries.count, answer.tries.waited_seconds) == (3, 0.0)


def test_entering_and_closing_reach_the_wrapped_transport():
    """A client that is closed leaves no connection open."""
    calls = []

    class Inner(httpx.BaseTransport):
        def __enter__(self):
            calls.append("enter")
            return self

        def __exit__(self, *_):
            calls.append("exit")

        def close(self):
            calls.append("close")

    with RetryTransport(Inner()) as transport:
        assert isinstance(transport, RetryTransport)
    RetryTransport(Inner()).close()
    assert calls == ["enter", "exit", "close"]


def test_entering_and_closing_reach_the_wrapped_async_transport():
    calls = []

    class Inner(httpx.AsyncBaseTransport):
        async def __aenter__(self):
            calls.append("enter")
            return self

        async def __aexit__(self, *_):
            calls.append("exit")

        async def aclose(self):
            calls.append("close")

    async def scenario():
        async with AsyncRetryTransport(Inner()) as transport:
            assert isinstance(transport, AsyncRetryTransport)
        await AsyncRetryTransport(Inner()).aclose()

    asyncio.run(scenario())
    assert calls == ["enter", "exit", "close"]


def test_a_pickled_session_still_retries(server):
    """A session that is sent to a worker process keeps its policy; its budget starts full."""
    session = requests.Session()
    session.mount(
        "http://",
        RetryAdapter(policy=RetryPolicy(backoff=timedelta(0), backoff_limit=timedelta(0))),
    )
    with pickle.loads(pickle.dumps(session)) as twin:
        twin.trust_env = False
        server.script(Drop(after_effect=True))
        assert was_replayed(twin.post(f"{server.url}/charges", timeout=10))
    assert len(server.effects) == 1
    session.close()


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code with the standard library and retrysafe alone."""
    source = str(Path(retrysafe.__file__).parent.parent)
    return subprocess.run(
        # -S -E: neither installed packages nor the environment's variables are seen.
        [sys.executable, "-S", "-E", "-c", f"import sys; sys.path.insert(0, {source!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_client_package_needs_no_library():
    ended = python("import retrysafe.client; print(retrysafe.client.RetryPolicy().tries_limit)")
    assert (ended.returncode, ended.stdout) == (0, "6\n"), ended.stderr


@pytest.mark.parametrize(
    ("module", "extra"), [("httpx", "client"), ("requests", "requests")], ids=str
)
def test_a_missing_library_says_which_extra_has_it(module, extra):
    ended = python(f"import retrysafe.client.{module}")
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ModuleNotFoundError: retrysafe.client.{module} needs {module}: install"
    )
    assert f"its extra {extra}," in last

"""What each client does with a real server that fails in every way a server can."""

from __future__ import annotations

import re
import socket
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
import requests
import urllib3

from retrysafe.client import RetryBudget, RetryPolicy, Stopped
from retrysafe.client.requests import _read_raw
from tests.client.clients import CONNECTION_ERRORS, EPOCH
from tests.client.server import Answer, CutBody, Drop, Stall, problem

UUID_STRING = re.compile(r'"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"')


def date_text(epoch_seconds: float) -> str:
    return format_datetime(datetime.fromtimestamp(epoch_seconds, UTC), usegmt=True)


def test_a_request_gets_a_key_and_the_next_one_another(server, client):
    """One key per logical operation: a random UUID, as the string that the draft asks for."""
    client.send("POST", "/charges")
    client.send("PATCH", "/charges/1")
    assert all(UUID_STRING.fullmatch(key) for key in server.keys)
    assert len(set(server.keys)) == 2


@pytest.mark.parametrize(
    "cue",
    [Drop(after_effect=True), CutBody(), Drop(after_effect=False)],
    ids=["dropped after the effect", "cut in its middle", "dropped before the effect"],
)
def test_a_broken_connection_is_retried_with_the_same_key(server, client, cue):
    """However the first connection ends, there is one effect and its answer arrives."""
    server.script(cue)
    answer = client.send("POST", "/charges", b'{"amount": 5}')
    assert (answer.status, answer.body) == (201, b'{"number": 1}')
    assert server.effects == [("/charges", b'{"amount": 5}')]
    assert len(server.seen) == 2
    assert server.keys[0] == server.keys[1] == answer.tries.key
    assert answer.tries.count == 2
    assert answer.tries.stopped is Stopped.ANSWERED
    ran_before = not (isinstance(cue, Drop) and not cue.after_effect)
    assert answer.replayed == ran_before


def test_a_request_that_timed_out_is_retried_with_the_same_key(server, client):
    """The server may have done it: only the same key can find out without doing it again."""
    server.script(Stall())
    answer = client.send("POST", "/charges", timeout=0.05)
    assert answer.replayed
    assert len(server.effects) == 1
    assert len(set(server.keys)) == 1


def test_a_server_that_is_not_there_is_tried_to_the_limit(make_client):
    """The last error is raised as the library raises it, with a note of what was tried."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    client = make_client(url=f"http://127.0.0.1:{port}", policy=RetryPolicy(tries_limit=3))
    with pytest.raises(CONNECTION_ERRORS) as caught:
        client.send("POST", "/charges")
    assert len(client.timing.slept) == 2
    (note,) = caught.value.__notes__
    assert re.fullmatch(
        r'retrysafe gave up after 3 tries with the key "[-0-9a-f]{36}": the tries are used up', note
    )


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_answers_that_time_may_change_are_retried(server, client, status):
    """The same request, later, is what these answers ask for."""
    server.script(Answer(status), Answer(status))
    answer = client.send("POST", "/charges")
    assert (answer.status, answer.tries.count) == (201, 3)
    assert len(set(server.keys)) == 1
    # With the random part at its most, the waits are the bounds: each is twice the one before.
    assert client.timing.slept == pytest.approx([0.2, 0.4])


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 410, 413, 422, 501])
def test_answers_that_time_does_not_change_are_final(server, client, status):
    """Not even a server that says so gets the same wrong request twice."""
    server.script(problem(status, retryable=True, Retry_After="1"))
    answer = client.send("POST", "/charges")
    assert (answer.status, len(server.seen)) == (status, 1)
    assert client.timing.slept == []


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize(
    ("cue", "is_retried"),
    [
        (Answer(409, {"Retry-After": "3"}), True),
        (Answer(409), True),
        (Answer(409, {"Content-Type": "text/plain"}, b"try again"), True),
        ("true", True),
        ("false", False),
        ("silent", True),
        ("true, no time", True),
        ("silent, no time", True),
    ],
    ids=str,
)
def test_a_conflict_is_judged_by_what_it_says(server, client, cue, is_retried, is_compressed):
    """`retryable` in the problem decides; the draft's own 409 says nothing, and is retried."""
    if isinstance(cue, str):
        told = {"true": True, "false": False, "silent": None}[cue.partition(",")[0]]
        headers = {} if "no time" in cue else {"Retry_After": "3"}
        cue = problem(409, retryable=told, compressed=is_compressed, **headers)
    server.script(cue)
    answer = client.send("POST", "/charges")
    assert answer.status == (201 if is_retried else 409)
    assert len(server.seen) == 1 + is_retried
    if not is_retried and cue.body:
        # The body was read to be judged, and the caller still gets it whole.
        assert answer.response.json()["status"] == 409


@pytest.mark.parametrize(
    ("cue", "is_retried"),
    [
        (Answer(409), False),
        (problem(409, retryable=None), False),
        (problem(409, retryable=True), True),
        (Answer(409, {"Retry-After": "3"}), True),
    ],
    ids=["bare", "silent", "retryable", "time"],
)
def test_a_silent_conflict_can_be_final(server, make_client, cue, is_retried):
    """For applications that mean a conflict which stays; one that says more still counts."""
    client = make_client(policy=RetryPolicy(retries_silent_conflicts=False))
    server.script(cue)
    assert client.send("POST", "/charges").status == (201 if is_retried else 409)


def test_a_silent_conflict_waits_for_the_first_request_within_the_limits(server, make_client):
    """The same key each time, with back-off in between, and no more often than any other answer."""
    client = make_client(policy=RetryPolicy(tries_limit=4))
    server.always = problem(409, retryable=None)
    answer = client.send("POST", "/charges")
    assert (answer.status, answer.tries.stopped) == (409, Stopped.TRIES)
    assert (len(server.keys), len(set(server.keys))) == (4, 1)
    assert client.timing.slept == pytest.approx([0.2, 0.4, 0.8])


def test_a_conflict_in_chunks_is_judged_too_and_given_whole(server, make_client):
    """Beyond the limit a body is not judged; it reaches the caller all the same."""
    client = make_client(policy=RetryPolicy(response_buffer_bytes=1_000))
    small = problem(409, retryable=True)
    server.script(Answer(409, small.headers, small.body, is_chunked=True))
    assert client.send("POST", "/charges").status == 201
    big = small.body + b" " * 300_000
    server.script(Answer(409, small.headers, big, is_chunked=True))
    answer = client.send("POST", "/charges")
    assert (answer.status, answer.body) == (409, big)


@pytest.mark.parametrize("status", [500, 503, 409])
def test_a_replayed_answer_is_final(server, client, status):
    """A stored outcome stays what it is, however it looks."""
    server.script(Answer(status, {"Idempotent-Replayed": "true", "Retry-After": "1"}))
    answer = client.send("POST", "/charges")
    assert (answer.status, len(server.seen)) == (status, 1)
    assert answer.replayed


@pytest.mark.parametrize("told", [True, False])
def test_an_outage_that_the_server_calls_final_is_final(server, client, told):
    """`retryable: false` counts for every status, `true` only for those that can be retried."""
    server.script(problem(503, retryable=told))
    assert client.send("POST", "/charges").status == (201 if told else 503)


def test_retry_after_is_waited_for(server, client):
    """Never sooner than the server asks, and a random part on top keeps the clients apart."""
    server.script(Answer(503, {"Retry-After": "7"}), Answer(429, {"Retry-After": "2"}))
    answer = client.send("POST", "/charges")
    assert client.timing.slept == pytest.approx([7.2, 2.4])
    assert answer.tries.waited_seconds == pytest.approx(9.6)


def test_retry_after_as_a_date_is_measured_on_the_servers_clock(server, client):
    """A client whose clock is wrong by an hour waits as long as any other."""
    server_now = EPOCH + 3600

    def refuse(exchange):
        exchange.send_response_only(503)
        exchange.send_header("Date", date_text(server_now))
        exchange.send_header("Retry-After", date_text(server_now + 9))
        exchange.send_header("Content-Length", "0")
        exchange.end_headers()

    server.script(refuse)
    assert client.send("POST", "/charges").status == 201
    assert client.timing.slept == pytest.approx([9.2])


def test_a_longer_wait_than_the_time_left_is_not_begun(server, make_client):
    """The answer is given back at once, with its `Retry-After`, instead of after a useless wait."""
    client = make_client(policy=RetryPolicy(time_limit=timedelta(seconds=10)))
    server.script(Answer(503, {"Retry-After": "4"}), Answer(503, {"Retry-After": "6"}))
    answer = client.send("POST", "/charges")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "6")
    assert answer.tries.stopped is Stopped.TIME
    assert len(client.timing.slept) == 1


def test_the_last_answer_is_given_back_when_the_tries_are_used_up(server, make_client):
    client = make_client(policy=RetryPolicy(tries_limit=2))
    server.always = Answer(503, {}, b"still down")
    answer = client.send("POST", "/charges")
    assert (answer.status, answer.body) == (503, b"still down")
    assert (answer.tries.count, answer.tries.stopped) == (2, Stopped.TRIES)
    assert len(server.seen) == 2


def test_an_outage_does_not_multiply_the_load(server, make_client):
    """All clients of one budget together add a burst and one retry per ten requests, no more."""
    budget = RetryBudget(capacity=5, per_request=0.1, per_second=0)
    clients = [make_client(budget=budget) for _ in range(2)]
    server.always = Answer(503)
    answers = [clients[number % 2].send("POST", "/charges") for number in range(40)]
    # The full bucket had no room for what the first two requests earned.
    assert 40 + 5 + 3 <= len(server.seen) <= 40 + 5 + 4
    assert answers[-1].tries.stopped is Stopped.BUDGET
    assert len(set(server.keys)) == 40


def test_a_safe_method_is_retried_without_a_key(server, client):
    """Reading twice harms nobody, and a key on it would mean nothing."""
    server.script(Answer(503))
    answer = client.send("GET", "/charges", None)
    assert (answer.status, answer.tries.count, answer.tries.key) == (201, 2, None)
    assert server.keys == [None, None]
    server.script(Answer(409, {"Retry-After": "1"}))
    assert client.send("GET", "/charges", None).status == 409


def test_safe_methods_are_left_alone_when_the_policy_says_so(server, make_client):
    client = make_client(policy=RetryPolicy(retries_safe_methods=False))
    server.script(Answer(503))
    answer = client.send("GET", "/charges", None)
    assert (answer.status, answer.tries, len(server.seen)) == (503, None, 1)


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_other_methods_are_sent_once_unless_they_are_configured(server, make_client, method):
    """Without a key nothing that changes state is sent twice."""
    server.script(Answer(503))
    answer = make_client().send(method, "/charges/1")
    assert (answer.status, answer.tries, server.keys) == (503, None, [None])
    server.script(Answer(503))
    client = make_client(policy=RetryPolicy(methods=frozenset({"post", method})))
    assert client.send(method, "/charges/1").status == 201
    assert server.keys[1] == server.keys[2]
    assert UUID_STRING.fullmatch(server.keys[1])


def test_a_streamed_answer_is_not_held_back(server, client):
    """The first line arrives while the server has not yet sent the second."""

    def stream(exchange):
        exchange.send_response(200)
        exchange.send_header("Content-Type", "text/event-stream")
        exchange.send_header("Transfer-Encoding", "chunked")
        exchange.end_headers()
        exchange.chunk(b"one\n")
        assert arrived.wait(10)
        exchange.chunk(b"two\n")
        exchange.chunk(b"")

    arrived = threading.Event()
    server.script(stream)
    assert client.first_line("/events", arrived.set) == b"one\ntwo\n"


def test_a_streamed_request_reads_small_answers_at_once(server, client):
    """A body of known, small length is safe before the caller sees the response."""
    server.script(CutBody())
    assert client.first_line("/charges", lambda: None).startswith(b'{"number": 1}')
    assert len(server.effects) == 1


def test_an_answer_that_is_not_kept_gives_its_connection_back(server, make_client):
    """With room for one connection, a second try can only be sent when the first let go."""
    client = make_client(one_connection=True)
    server.script(*[Answer(503, {}, b"x" * 300_000, is_chunked=True)] * 3)
    assert client.first_line("/charges", lambda: None).startswith(b'{"number": 1}')
    assert len(server.seen) == 4


@pytest.mark.parametrize("make_client", ["requests"], indirect=True)
def test_an_answer_that_is_kept_and_closed_early_gives_its_connection_back(server, make_client):
    """One that was begun to be judged and is longer than that: its caller leaves it half read.

    With room for one connection, the next request would wait for it for ever.
    """
    client = make_client(one_connection=True, policy=RetryPolicy(response_buffer_bytes=1_000))
    headers = {"Content-Type": "application/problem+json"}
    server.script(Answer(409, headers, b"x" * 300_000, is_chunked=True))
    response = client.client.post(f"{server.url}/charges", data=b"{}", stream=True, timeout=30)
    assert (response.status_code, response.raw.read(10)) == (409, b"x" * 10)
    response.close()
    sent = []
    thread = threading.Thread(
        target=lambda: sent.append(client.send("POST", "/charges").status), daemon=True
    )
    thread.start()
    thread.join(20)
    assert sent == [201]
    # Kept alive until here, so that it is not the garbage collector that frees the connection.
    assert response.raw.closed


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (urllib3.exceptions.SSLError("bad record"), requests.exceptions.SSLError),
        (
            urllib3.exceptions.ReadTimeoutError(None, None, "silent"),
            requests.exceptions.ConnectionError,
        ),
        (urllib3.exceptions.ProtocolError("cut"), requests.exceptions.ChunkedEncodingError),
    ],
)
def test_what_breaks_a_body_is_told_in_the_words_of_requests(raised, told):
    """Callers catch those, and what may be tried again is judged by them."""

    class Breaking:
        def read1(self, *args, **options):
            raise raised

    response = requests.Response()
    response.raw = Breaking()
    with pytest.raises(told) as caught:
        _read_raw(response, 1_000, lambda: False)
    assert type(caught.value) is told
    assert caught.value.__cause__ is raised


def test_an_answer_that_breaks_gives_its_connection_back(server, make_client):
    client = make_client(one_connection=True)
    server.script(CutBody(), CutBody())
    assert client.send("POST", "/charges").replayed
    assert len(server.seen) == 3


def test_an_answer_that_cannot_be_decoded_is_not_retried(server, make_client):
    """The server answered; it would answer the same. The connection is free for the next one."""
    client = make_client(one_connection=True)
    server.script(Answer(201, {"Content-Encoding": "gzip"}, b"no gzip" * 50_000))
    with pytest.raises((httpx.DecodingError, requests.exceptions.ContentDecodingError)) as caught:
        client.send("POST", "/charges")
    assert len(server.seen) == 1
    assert client.send("POST", "/charges").status == 201
    # Kept alive until here, so that it is not the garbage collector that frees the connection.
    assert caught.value is not None


@pytest.mark.parametrize("make_client", ["requests"], indirect=True)
def test_requests_retries_an_answer_of_unknown_length_that_breaks(server, client):
    """Unless the caller streams it, the answer is read in full before it counts as received."""

    def cut(exchange):
        exchange.send_response(201)
        exchange.send_header("Transfer-Encoding", "chunked")
        exchange.end_headers()
        exchange.chunk(b"half")
        exchange.close_connection = True

    server.script(cut)
    assert client.send("POST", "/charges").body == b'{"number": 1}'
    assert len(set(server.keys)) == 1


def test_an_error_of_the_request_itself_is_not_retried(server, client):
    """A header that cannot be sent never becomes sendable."""
    with pytest.raises((httpx.LocalProtocolError, ValueError)):
        client.send("POST", "/charges", headers={"X-Broken": "a\nb"})
    assert client.timing.slept == []
    assert server.seen == []

"""A server, or a webhook's receiver, that answers with a bomb, or with one byte now and then.

What must hold: a small refusal costs little memory however much it unpacks to, a delivery ends with
its time-out however its bytes are spread, and an absurd date loses no answer.
"""

from __future__ import annotations

import gzip
import socket
import threading
import time
import tracemalloc
from datetime import timedelta
from functools import partial

import httpx
import pytest

from retrysafe.client import RetryPolicy, Stopped
from tests.client.clients import CLIENTS
from tests.client.server import Answer, ScriptedServer, problem
from tests.relay.test_webhooks import both, send

MEBIBYTE = 1024 * 1024


@pytest.fixture
def server():
    made = ScriptedServer()
    yield made
    made.close()


@pytest.fixture(params=CLIENTS)
def client(request, server):
    made = CLIENTS[request.param](server.url, policy=RetryPolicy())
    yield made
    made.close()


def test_a_packed_refusal_is_not_unpacked_beyond_the_size_of_a_problem(server, client):
    """64 KB stand for 64 MB; the judgement of a retried refusal unpacks 64 KB of them."""
    bomb = gzip.compress(b'{"retryable": true, "title": "' + b"a" * (64 * MEBIBYTE) + b'"}')
    headers = {"Content-Type": "application/problem+json", "Content-Encoding": "gzip"}
    server.script(Answer(503, headers, bomb))
    client.send("POST", "/charges")  # Whatever is made once is made before it is measured.
    server.script(Answer(503, headers, bomb))
    tracemalloc.start()
    try:
        answer = client.send("POST", "/charges")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (answer.status, answer.tries.count) == (201, 2)
    assert peak_bytes < 8 * MEBIBYTE


def dripped(answer, exchange):
    """The answer in pieces, each in a packet of its own."""
    exchange.send_response(answer.status)
    for name, value in answer.headers.items():
        exchange.send_header(name, value)
    exchange.send_header("Transfer-Encoding", "chunked")
    exchange.end_headers()
    for start in range(0, len(answer.body), 8):
        exchange.chunk(answer.body[start : start + 8])
        exchange.wfile.flush()
        time.sleep(0.02)  # Else the packets are merged, which is no drip.
    exchange.chunk(b"")


def test_a_body_that_outlasts_the_time_is_left_to_the_caller(server, request):
    """What came of it is not lost: the answer is given whole, and nothing was waited for."""
    for kind in CLIENTS.values():
        client = kind(server.url, policy=RetryPolicy(time_limit=timedelta(0)))
        request.addfinalizer(client.close)
        refusal = problem(409, retryable=True)
        server.script(partial(dripped, refusal))
        answer = client.send("POST", "/charges")
        assert (answer.status, answer.body) == (409, refusal.body)
        # It was not judged: a problem that came too late may have said anything.
        assert answer.tries.stopped is Stopped.ANSWERED


def test_an_early_hint_is_not_taken_for_the_answer(server, client):
    """The answer that follows it must not become that of the connection's next request either."""

    def hint(exchange):
        exchange.wfile.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n")
        exchange.answer(503, {}, b"")

    server.script(hint)
    assert client.send("POST", "/charges").status == 201
    assert client.send("GET", "/charges").status == 201


def test_an_absurd_date_loses_no_answer(server, client):
    date = "Tue, 14 Nov 99999999999999999999 22:13:50 GMT"
    server.script(Answer(503, {"Retry-After": date}))
    assert client.send("POST", "/charges").status == 201


class Dripping:
    """A receiver that sends its answer byte by byte, five a second, until the other side leaves."""

    def __init__(self, at_once: bytes, dripped: bytes) -> None:
        self._answer = (at_once, dripped)
        self.was_left = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(30)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listening.accept()
        at_once, dripped = self._answer
        with connection:
            connection.recv(65_536)
            connection.sendall(at_once)
            connection.settimeout(0.2)
            for byte in dripped:
                try:
                    connection.sendall(bytes([byte]))
                    # Nothing comes but the end of the connection.
                    if connection.recv(65_536) == b"":
                        self.was_left.set()
                        return
                except TimeoutError:
                    continue
                except OSError:
                    self.was_left.set()
                    return

    def close(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listening.close()


@both
def test_a_head_that_drips_ends_with_the_time_out(kind):
    """Each byte comes in time, and the answer would be a success after ten seconds."""
    receiver = Dripping(b"HTTP/1.1 204 No Content\r\n", b"x-dripping: " + b"a" * 34 + b"\r\n\r\n")
    try:
        with pytest.raises((httpx.TimeoutException, TimeoutError)):
            send(kind, receiver.url, timeout=timedelta(milliseconds=600))
        assert receiver.was_left.wait(10)
    finally:
        receiver.close()


@both
def test_a_body_that_drips_is_left(kind):
    """The head has said that the receiver has it."""
    receiver = Dripping(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n", b"a" * 50)
    try:
        send(kind, receiver.url, timeout=timedelta(milliseconds=600))
        assert receiver.was_left.wait(10)
    finally:
        receiver.close()


@both
def test_a_body_without_end_is_left(kind):
    """More than a relay reads of an answer that says nothing to it."""
    receiver = Dripping(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"10000\r\n" + b"a" * 65_536,
        b"\r\n1\r\na" * 10,
    )
    try:
        send(kind, receiver.url)
        assert receiver.was_left.wait(10)
    finally:
        receiver.close()

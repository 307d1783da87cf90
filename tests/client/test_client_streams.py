"""What becomes of a response's stream: read or left alone, and always closed by somebody."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from retrysafe.client import RetryPolicy
from retrysafe.client.httpx import AsyncRetryTransport, RetryTransport
from tests.client.clients import ManualTiming


class Recorded(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Bytes of which is known whether they were read, and whether the stream was closed."""

    def __init__(self, *chunks: bytes | Exception) -> None:
        self.chunks = list(chunks)
        self.read = 0
        self.closed = False

    def __iter__(self):
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            self.read += 1
            yield chunk

    async def __aiter__(self):
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


class Answering(httpx.BaseTransport, httpx.AsyncBaseTransport):
    def __init__(self, *responses: httpx.Response) -> None:
        self.responses = list(responses)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self.responses.pop(0)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.responses.pop(0)


class Blocking:
    def __init__(self, *responses: httpx.Response) -> None:
        self.transport = RetryTransport(
            Answering(*responses),
            policy=RetryPolicy(response_buffer_bytes=10),
            timing=ManualTiming(),
        )

    def send(self) -> httpx.Response:
        return self.transport.handle_request(httpx.Request("POST", "https://server.test"))

    def read(self, response: httpx.Response) -> bytes:
        return response.read()

    def close(self, response: httpx.Response) -> None:
        response.close()


class Async:
    # One loop for all calls of a test: its end would end the streams that are half read.
    runner: asyncio.Runner

    def __init__(self, *responses: httpx.Response) -> None:
        self.transport = AsyncRetryTransport(
            Answering(*responses),
            policy=RetryPolicy(response_buffer_bytes=10),
            timing=ManualTiming(),
        )

    def send(self) -> httpx.Response:
        request = httpx.Request("POST", "https://server.test")
        return self.runner.run(self.transport.handle_async_request(request))

    def read(self, response: httpx.Response) -> bytes:
        return self.runner.run(response.aread())

    def close(self, response: httpx.Response) -> None:
        self.runner.run(response.aclose())


@pytest.fixture(params=[Blocking, Async])
def sending(request):
    """Sends through one kind of transport, whose wrapped one gives these responses."""
    with asyncio.Runner() as runner:
        Async.runner = runner
        yield request.param


def sized(stream: Recorded, size: int) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Length": str(size)}, stream=stream)


def test_a_short_answer_is_read_and_its_connection_free_before_it_is_returned(sending):
    stream = Recorded(b"12345", b"67890")
    client = sending(sized(stream, 10))
    response = client.send()
    assert (stream.read, stream.closed) == (2, True)
    assert client.read(response) == b"1234567890"


def test_a_long_answer_is_left_to_the_caller(sending):
    """What is longer than the limit is not read into memory behind the caller's back."""
    stream = Recorded(b"12345", b"678901")
    client = sending(sized(stream, 11))
    response = client.send()
    assert (stream.read, stream.closed) == (0, False)
    assert client.read(response) == b"12345678901"


def test_an_answer_that_breaks_is_closed_before_the_next_try(sending):
    broken = Recorded(b"123", httpx.ReadError("cut"))
    whole = Recorded(b"1234567890")
    client = sending(sized(broken, 10), sized(whole, 10))
    assert client.read(client.send()) == b"1234567890"
    assert broken.closed


def test_an_answer_that_is_not_kept_is_closed(sending):
    """Also when nothing of it was read."""
    refused = Recorded(b"a long text")
    client = sending(httpx.Response(503, stream=refused), sized(Recorded(b"1"), 1))
    assert client.read(client.send()) == b"1"
    assert (refused.read, refused.closed) == (0, True)


def test_closing_an_answer_that_was_read_in_part_closes_its_stream(sending):
    """A conflict longer than the limit is read as far as that, and goes on from its beginning."""
    headers = {"Content-Type": "application/problem+json"}
    chunks = (b'{"title": ', b'"conflict"', b"}")
    for is_read in (True, False):
        stream = Recorded(*chunks)
        client = sending(httpx.Response(409, headers=headers, stream=stream))
        response = client.send()
        assert (stream.read, stream.closed) == (2, False)
        if is_read:
            assert client.read(response) == b"".join(chunks)
        else:
            client.close(response)
        assert stream.closed

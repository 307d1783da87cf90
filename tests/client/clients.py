"""The three clients, to be used in the same plain way, and a time that passes when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import httpx
import requests

from retrysafe.client import Tries, tries_of, was_replayed
from retrysafe.client.httpx import AsyncRetryTransport, RetryTransport
from retrysafe.client.requests import RetryAdapter

START = 1_000.0
EPOCH = 1_700_000_000.0


class ManualTiming:
    """A sleep takes no time and moves both clocks; `slept` lists the waits."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return START + self.passed

    def now(self) -> float:
        return EPOCH + self.passed

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.passed += seconds


@dataclass(frozen=True)
class Got:
    """A response, whichever library it is from."""

    status: int
    headers: Any
    body: bytes
    tries: Tries | None
    replayed: bool
    response: Any


def got(response: Any) -> Got:
    return Got(
        response.status_code,
        response.headers,
        response.content,
        tries_of(response),
        was_replayed(response),
        response,
    )


# What each library raises when the connection fails in any way.
CONNECTION_ERRORS = (httpx.TransportError, requests.exceptions.RequestException)


_ONE = httpx.Limits(max_connections=1)
# Enough for this machine's own answers; a connection that is never given back ends a test soon.
_TIMEOUT_SECONDS = 10


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Waits are as long as they can be, and pass at once."""
    options.setdefault("timing", ManualTiming())
    options.setdefault("random", lambda: 1.0)
    return options


class HttpxClient:
    """`httpx.Client`."""

    def __init__(self, url: str, **options: Any) -> None:
        options = _defaults(options)
        self.timing = options["timing"]
        self._url = url
        inner = httpx.HTTPTransport(limits=_ONE) if options.pop("one_connection", False) else None
        self.client = httpx.Client(
            transport=RetryTransport(inner, **options), timeout=_TIMEOUT_SECONDS, trust_env=False
        )

    def send(self, method: str, path: str, body: Any = b"{}", **options: Any) -> Got:
        if "redirects" in options:
            options["follow_redirects"] = options.pop("redirects")
        return got(self.client.request(method, self._url + path, content=body, **options))

    def send_files(self, path: str, files: Any) -> Got:
        return got(self.client.post(self._url + path, files=files))

    def first_line(self, path: str, arrived) -> bytes:
        """Streams a response; `arrived` is called when the first line is there."""
        with self.client.stream("POST", self._url + path, content=b"{}") as response:
            lines = response.iter_raw()
            first = next(lines)
            arrived()
            return first + b"".join(lines)

    def one_shot(self, *chunks: bytes) -> Iterator[bytes]:
        return iter(list(chunks))

    def close(self) -> None:
        self.client.close()


class AsyncHttpxClient:
    """`httpx.AsyncClient` on a loop of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        options = _defaults(options)
        self.timing = options["timing"]
        self._url = url
        self.runner = asyncio.Runner()
        is_one = options.pop("one_connection", False)
        inner = httpx.AsyncHTTPTransport(limits=_ONE) if is_one else None
        self.client = httpx.AsyncClient(
            transport=AsyncRetryTransport(inner, **options),
            timeout=_TIMEOUT_SECONDS,
            trust_env=False,
        )

    def send(self, method: str, path: str, body: Any = b"{}", **options: Any) -> Got:
        if "redirects" in options:
            options["follow_redirects"] = options.pop("redirects")
        return got(
            self.runner.run(
                self.client.request(method, self._url + path, content=body, **options),
                # A runner has a context of its own; the test's intents are in the test's.
                context=copy_context(),
            )
        )

    def send_files(self, path: str, files: Any) -> Got:
        return got(self.runner.run(self.client.post(self._url + path, files=files)))

    def first_line(self, path: str, arrived) -> bytes:
        async def stream() -> bytes:
            async with self.client.stream("POST", self._url + path, content=b"{}") as response:
                lines = response.aiter_raw()
                first = await anext(lines)
                arrived()
                return first + b"".join([line async for line in lines])

        return self.runner.run(stream())

    async def one_shot(self, *chunks: bytes):
        for chunk in chunks:
            yield chunk

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()


class RequestsClient:
    """`requests.Session`."""

    def __init__(self, url: str, **options: Any) -> None:
        options = _defaults(options)
        self.timing = options["timing"]
        self._url = url
        self.client = requests.Session()
        self.client.trust_env = False
        if options.pop("one_connection", False):
            options |= {"pool_maxsize": 1, "pool_block": True}
        self.client.mount("http://", RetryAdapter(**options))

    def send(self, method: str, path: str, body: Any = b"{}", **options: Any) -> Got:
        options.setdefault("timeout", _TIMEOUT_SECONDS)
        options["allow_redirects"] = options.pop("redirects", False)
        return got(self.client.request(method, self._url + path, data=body, **options))

    def send_files(self, path: str, files: Any) -> Got:
        return got(self.client.post(self._url + path, files=files, timeout=_TIMEOUT_SECONDS))

    def first_line(self, path: str, arrived) -> bytes:
        with self.client.post(
            self._url + path, data=b"{}", stream=True, timeout=_TIMEOUT_SECONDS
        ) as response:
            lines = response.iter_lines(chunk_size=1)
            first = next(lines) + b"\n"
            arrived()
            return first + b"".join(line + b"\n" for line in lines)

    def one_shot(self, *chunks: bytes) -> Iterator[bytes]:
        return iter(list(chunks))

    def close(self) -> None:
        self.client.close()


CLIENTS = {"httpx": HttpxClient, "httpx-async": AsyncHttpxClient, "requests": RequestsClient}

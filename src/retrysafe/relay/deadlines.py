"""A limit on a whole request of httpx, for threads.

httpx limits each read. A receiver that sends one byte a second stays within every one of them, and
would hold the relay's thread, and the entry's lease, for as long as it likes. Tasks need nothing of
this: asyncio ends them from outside.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Final

import httpcore
import httpx

# When the request that this thread is at work on must have ended, by the monotonic clock.
deadline: Final[ContextVar[float | None]] = ContextVar("retrysafe_deadline", default=None)


def _within(timeout: float | None, over: type[Exception]) -> float | None:
    """The time-out of one read or write; raises `over` when the whole request's time is over."""
    ends_at = deadline.get()
    if ends_at is None:
        return timeout
    left = ends_at - time.monotonic()
    if left <= 0:
        raise over("the whole request took too long")
    return left if timeout is None else min(timeout, left)


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _within(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _within(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        limit = _within(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, limit))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    def __init__(self) -> None:
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        limit = _within(timeout, httpcore.ConnectTimeout)
        return _Stream(self._backend.connect_tcp(host, port, limit, local_address, socket_options))


def limited(client: httpx.Client) -> httpx.Client:
    """The client, whose requests end at `deadline`, through proxies too."""
    for transport in (client._transport, *client._mounts.values()):  # noqa: SLF001
        if isinstance(transport, httpx.HTTPTransport):
            # httpx has no parameter for it; httpcore, which it stands on, has.
            transport._pool._network_backend = _Backend()  # noqa: SLF001
    return client

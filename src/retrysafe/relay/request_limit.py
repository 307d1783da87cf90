"""A limit on a whole request of httpx, for threads.

httpx limits each read. A receiver that sends one byte a second stays within every one of them, and
would hold the relay's thread, and the entry's lease, for as long as it likes. So would a resolver
that is silent, and a host with many addresses that are. Tasks need nothing of this: asyncio ends
them from outside.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Final

import httpcore
import httpx

from retrysafe import forks

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
        """Connects to the first address of the host that answers, all within the one limit."""
        options = None if socket_options is None else list(socket_options)
        addresses = _addresses(host, port, _within(timeout, httpcore.ConnectTimeout))
        error: httpcore.NetworkError | httpcore.ConnectTimeout | None = None
        for number, address in enumerate(addresses):
            limit = _within(timeout, httpcore.ConnectTimeout)
            if limit is not None:
                # One that is silent leaves time for those behind it.
                limit /= len(addresses) - number
            try:
                return _Stream(
                    self._backend.connect_tcp(address, port, limit, local_address, options)
                )
            except (httpcore.NetworkError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore.ConnectError(f"{host} has no address")


# A resolver that is silent for half a minute holds a thread for as long, and Python cannot end it.
_LOOKUPS_LIMIT: Final = 16


class _Lookups:
    """Looks hosts up in threads of their own, so that whoever asks can stop waiting."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(_LOOKUPS_LIMIT)
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """The threads that would give their slots back stayed in the parent."""
        self._slots = threading.BoundedSemaphore(_LOOKUPS_LIMIT)

    def find(self, host: str, port: int, timeout: float) -> list[str]:
        """The addresses of a host; raises `ConnectTimeout`, and `ConnectError` for an unknown one.

        Also when all slots are taken by lookups that nobody waits for any more.
        """
        ends_at = time.monotonic() + timeout
        slots = self._slots
        if not slots.acquire(timeout=timeout):
            raise httpcore.ConnectTimeout(f"{_LOOKUPS_LIMIT} hosts are being looked up")
        found: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

        def look_up() -> None:
            try:
                found.put(_resolved(host, port))
            except (OSError, UnicodeError) as error:
                found.put(error if isinstance(error, OSError) else OSError(str(error)))
            finally:
                slots.release()

        try:
            # A daemon, because a process that ends does not wait for an answer either.
            threading.Thread(target=look_up, name="retrysafe-lookup", daemon=True).start()
        except BaseException:
            slots.release()
            raise
        try:
            answer = found.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            raise httpcore.ConnectTimeout(f"{host} was not found in time") from None
        if isinstance(answer, OSError):
            raise httpcore.ConnectError(str(answer)) from answer
        return answer


_LOOKUPS: Final = _Lookups()


def _resolved(host: str, port: int, flags: int = 0) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _addresses(host: str, port: int, timeout: float | None) -> list[str]:
    if timeout is None:
        return [host]
    try:
        return _resolved(host, port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return _LOOKUPS.find(host, port, timeout)


def limited(client: httpx.Client) -> httpx.Client:
    """The client, whose requests end at `deadline`, through proxies too."""
    for transport in (client._transport, *client._mounts.values()):  # noqa: SLF001
        if isinstance(transport, httpx.HTTPTransport):
            # httpx has no parameter for it; httpcore, which it stands on, has.
            transport._pool._network_backend = _Backend()  # noqa: SLF001
    return client

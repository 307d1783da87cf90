"""How a test's client sends: one request, or many at once.

Owns the differences between clients. A client is known by what it has, so nothing is imported that
the test has not imported already.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from retrysafe.errors import OperationInFlight

_KEY_HEADER: Final = "Idempotency-Key"
# Nobody waits longer for the others to be ready.
_START_SECONDS: Final = 30.0


@dataclass(slots=True)
class Reply:
    """What one try came to."""

    value: Any = None
    error: BaseException | None = None
    # None for calls of functions, and where there was no response.
    status: int | None = None
    # Whether the response says that it is a replay; None where nothing could say so.
    replayed: bool | None = None
    # Whether another try runs at the moment.
    in_flight: bool = False

    def __str__(self) -> str:
        if self.error is not None:
            return repr(self.error)
        return repr(self.value) if self.status is None else f"{self.status} {self.value!r}"


class Sender(Protocol):
    """Sends the tries of one logical request; each phase is another request."""

    async def send(self, phase: int) -> Reply:
        """One try."""

    async def send_at_once(self, phase: int, count: int) -> list[Reply]:
        """Several tries that begin together."""


class CallSender:
    """Calls a function; threads of their own call a plain one, tasks an async one."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self._call = call

    async def send(self, phase: int) -> Reply:
        """One call."""
        try:
            value = self._call(phase)
            return Reply(await value if inspect.isawaitable(value) else value)
        except OperationInFlight as error:
            return Reply(error=error, in_flight=True)
        except Exception as error:
            return Reply(error=error)

    async def send_at_once(self, phase: int, count: int) -> list[Reply]:
        """Several that begin together."""
        if inspect.iscoroutinefunction(self._call):
            return list(await asyncio.gather(*(self.send(phase) for _ in range(count))))
        return in_threads(lambda: _driven(self.send(phase)), count)


class RequestSender:
    """Sends a request by a client of a web framework, or of httpx."""

    def __init__(
        self,
        client: Any,
        method: str,
        url: str,
        options: dict[str, Any],
        varied: Callable[[int], Mapping[str, Any]] | None,
    ) -> None:
        self._client = client
        self._method = method.lower()
        self._url = url
        self._options = options
        self._varied = varied
        self._names = [f"test-{uuid.uuid4()}"]
        self.is_async = inspect.iscoroutinefunction(getattr(client, self._method))
        if getattr(client, "portal", self) is None:
            raise ValueError(
                "start the application first: write 'with TestClient(app) as client:'. Without it "
                "every request has an event loop of its own"
            )

    async def send(self, phase: int) -> Reply:
        """One request."""
        return await self._sent(self._client, phase)

    async def send_at_once(self, phase: int, count: int) -> list[Reply]:
        """Several that begin together."""
        if self.is_async:
            return list(await asyncio.gather(*(self.send(phase) for _ in range(count))))
        return in_threads(lambda: _driven(self._sent(_own_client(self._client), phase)), count)

    async def _sent(self, client: Any, phase: int) -> Reply:
        options = dict(self._options)
        if self._varied is None:
            headers = dict(options.get("headers") or {})
            known = {name for name in headers if name.lower() == _KEY_HEADER.lower()}
            key = headers.pop(*known).strip('"') if known else self._names[0]
            options["headers"] = {**headers, _KEY_HEADER: f'"{key}-{phase}"'}
        else:
            options.update(self._varied(phase))
        try:
            response = getattr(client, self._method)(self._url, **options)
            if inspect.isawaitable(response):
                response = await response
        except Exception as error:
            return Reply(error=error)
        finally:
            if _is_djangos(client):
                _close_connections()
        return reply_of(response)


def reply_of(response: Any) -> Reply:
    """What a response says, of whatever framework."""
    body = getattr(response, "content", None)  # httpx, TestClient, Django.
    if body is None:
        body = response.data  # Flask.
    status: int = response.status_code
    is_problem = "problem" in (response.headers.get("Content-Type") or "")
    return Reply(
        value=body,
        status=status,
        replayed=is_replay(response),
        # A 202 with a place to look at, or the refusal of a duplicate.
        in_flight=(status == 409 and is_problem) or (status == 202 and b'"status_url"' in body),
    )


def is_replay(response: Any) -> bool:
    """Whether a response is marked as an earlier one, sent again."""
    return bool(response.headers.get("Idempotent-Replayed") == "true")


def in_threads(call: Callable[[], Reply], count: int) -> list[Reply]:
    """Calls in as many threads, which begin together."""
    barrier = threading.Barrier(count)
    replies: list[Reply] = [Reply(error=RuntimeError("this thread did not run"))] * count

    def run(number: int) -> None:
        try:
            barrier.wait(_START_SECONDS)
            replies[number] = call()
        except BaseException as error:
            replies[number] = Reply(error=error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def _driven(flow: Any) -> Reply:
    """The end of a flow whose client blocks; one that suspends belongs to a loop."""
    try:
        flow.send(None)
    except StopIteration as ended:
        reply: Reply = ended.value
        return reply
    flow.close()
    raise TypeError("a plain function returned something to await: pass an async function")


def _own_client(client: Any) -> Any:
    """The client for one thread: those of Flask and Django keep what belongs to one request."""
    application = getattr(client, "application", None)
    if application is not None and hasattr(client, "environ_base"):
        made = application.test_client()
        made.environ_base = client.environ_base
        # The same cookies, so the same login.
        made._cookies = getattr(client, "_cookies", None)  # noqa: SLF001
        return made
    return copy.copy(client) if _is_djangos(client) else client


def _is_djangos(client: Any) -> bool:
    return any(kind.__module__.startswith("django.") for kind in type(client).__mro__)


def _close_connections() -> None:
    """Django opens connections for each thread, which nobody else closes."""
    if threading.current_thread() is not threading.main_thread():
        sys.modules["django.db"].connections.close_all()

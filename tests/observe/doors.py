"""Three doors to one store: functions, HTTP and messages, each with metrics of its own."""

from __future__ import annotations

import asyncio
import io
from datetime import timedelta
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from retrysafe import AsyncIdempotency, Idempotency, InFlight, Policy
from retrysafe.core.events import Event, EventKind
from retrysafe.core.keys.key import Key
from retrysafe.core.model import OperatorCommand
from retrysafe.http import IdempotencyMiddleware, Rule, WSGIIdempotencyMiddleware, bearer_token
from retrysafe.observe.prometheus import PrometheusMetrics
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from retrysafe.testing import FaultyStore, Moment
from tests.consumers.scripted import Threads, message


class Declined(Exception):
    """Ends an operation for good."""


# Lenient where nothing is tested: one policy drives all results.
POLICY = Policy(
    terminal=Declined,
    release_limit=1,
    outcome_limit_bytes=20_000,
    settle_patience=timedelta(seconds=1),
)
WAITING = POLICY.with_changes(in_flight=InFlight.WAIT, wait_limit=timedelta(milliseconds=30))


class Refused:
    """What an operation is told to come to, in the words of its door: failed or released."""

    def __init__(self, *, for_good: bool) -> None:
        self.error = Declined("no") if for_good else ConnectionError("again")
        self.status = 402 if for_good else 503


class Door:
    """Asks for operations under one key, whatever they come to."""

    waits_for_loop = False

    def __init__(self, url: str) -> None:
        self.store = FaultyStore(open_store(url, is_async=self.waits_for_loop))
        self.metrics = PrometheusMetrics(CollectorRegistry())
        self.keys: list[Key] = []
        # What the next operation does.
        self.behave: Any = None

    @property
    def observers(self) -> list[Any]:
        return [self.metrics, self._note]

    def _note(self, event: Event) -> None:
        if event.kind is EventKind.CLAIMED:
            self.keys.append(event.key)

    def ask(self, key: str, behave: Any = None, *, body: str = "a", waits: bool = False) -> None:
        """One call; its result is for the metrics to tell."""
        self.behave = behave or (lambda: None)
        try:
            self._ask(key, body, waits=waits)
        except Exception:
            return

    def _operate(self) -> Any:
        behave, self.behave = self.behave, None
        return behave()

    def take_away(self) -> None:
        """An operator frees the key while its operation runs."""
        self._run(self.store.operate(self.keys[-1], OperatorCommand.FORCE_RELEASE))

    def break_down(self) -> None:
        self.store.fail(Moment.BEFORE, method="commit", times=None)

    def _run(self, flow: Any) -> Any:
        return run_sync(flow)


class Functions(Door):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.idem = Idempotency(self.store, caller="c", policy=POLICY, observers=self.observers)

    def _ask(self, key: str, body: str, *, waits: bool) -> None:
        def operation(body: str) -> Any:
            made = self._operate()
            if isinstance(made, Refused):
                raise made.error
            return made

        policy = WAITING if waits else POLICY
        self.idem.run(key, operation, body, policy=policy, name="pay")

    def close(self) -> None:
        self.idem.close()
        run_sync(self.store.close())


class Messages(Door):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._way = Threads(self.store, caller="c", observers=self.observers)
        self._judges = {
            waits: self._way.judge(self._handle, policy=WAITING if waits else POLICY)
            for waits in (False, True)
        }

    def _handle(self, message: Any) -> Any:
        made = self._operate()
        if isinstance(made, Refused):
            raise made.error
        return made

    def _ask(self, key: str, body: str, *, waits: bool) -> None:
        self._way.run(self._judges[waits].handle(message(key, body.encode())))

    def close(self) -> None:
        self._way.close()
        run_sync(self.store.close())


RULES = [
    Rule(path="/pay", policy=POLICY),
    Rule(path="/wait", policy=WAITING),
]


class Wsgi(Door):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.idem = Idempotency(self.store, secret="s" * 32, observers=self.observers)
        self.app = WSGIIdempotencyMiddleware(self._app, self.idem, caller=bearer_token, rules=RULES)
        self.open_app = WSGIIdempotencyMiddleware(
            self._app, self.idem, caller=bearer_token, rules=RULES, fail_open=True
        )

    def _app(self, environ: Any, start_response: Any) -> Any:
        made = self._operate()
        status, content = (made.status, b"") if isinstance(made, Refused) else (201, made or b"")
        if not isinstance(content, bytes):
            content = b"x" * 30_000  # More than is stored.
        start_response(f"{status} OK", [("Content-Type", "text/plain")])
        return [content]

    def _ask(self, key: str, body: str, *, waits: bool) -> None:
        self.send("/wait" if waits else "/pay", key, body)

    def send(self, path: str, key: str, body: str = "a", *, opens: bool = False) -> None:
        self.behave = self.behave or (lambda: None)
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": path,
            "SCRIPT_NAME": "",
            "QUERY_STRING": "",
            "SERVER_NAME": "shop",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(body.encode()),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_IDEMPOTENCY_KEY": f'"{key}"',
            "HTTP_AUTHORIZATION": "Bearer c",
        }
        app = self.open_app if opens else self.app
        response = app(environ, lambda status, headers, info=None: print)
        try:
            b"".join(response)
        finally:
            if hasattr(response, "close"):
                response.close()

    def close(self) -> None:
        self.idem.close()
        run_sync(self.store.close())


class Asgi(Door):
    waits_for_loop = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._runner = asyncio.Runner()
        self.loop = self._runner.get_loop()
        self.idem = AsyncIdempotency(self.store, secret="s" * 32, observers=self.observers)
        options: dict[str, Any] = {"caller": bearer_token, "rules": RULES}
        self.app = IdempotencyMiddleware(self._app, self.idem, **options)
        self.open_app = IdempotencyMiddleware(self._app, self.idem, **options, fail_open=True)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        # In a thread: it may ask this very loop again.
        made = await asyncio.to_thread(self._operate)
        status, content = (made.status, b"") if isinstance(made, Refused) else (201, made or b"")
        if not isinstance(content, bytes):
            content = b"x" * 30_000
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})

    def _ask(self, key: str, body: str, *, waits: bool) -> None:
        self.send("/wait" if waits else "/pay", key, body)

    def send(self, path: str, key: str, body: str = "a", *, opens: bool = False) -> None:
        self.behave = self.behave or (lambda: None)
        self._run(self._send(path, key, body, opens=opens))

    async def _send(self, path: str, key: str, body: str, *, opens: bool) -> None:
        transport = httpx.ASGITransport(self.open_app if opens else self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            headers = {"Idempotency-Key": f'"{key}"', "Authorization": "Bearer c"}
            await client.post(path, content=body, headers=headers)

    def _run(self, flow: Any) -> Any:
        if self.loop.is_running():
            return asyncio.run_coroutine_threadsafe(flow, self.loop).result(10)
        return self._runner.run(flow)

    def close(self) -> None:
        self._runner.run(self.idem.close())
        self._runner.run(self.store.close())
        self._runner.close()

"""Replays from the process's own cache: every request is looked at anew."""

from __future__ import annotations

import asyncio
import time

from retrysafe import AsyncIdempotency
from retrysafe.http import IdempotencyMiddleware, bearer_token
from retrysafe.http.callers import caller_of_credential
from retrysafe.http.request import Request
from retrysafe.stores import MemoryStore
from tests.http.driving import BODY, Connection, headers_of, http_scope


class Shop:
    """A protected application, and how often it ran."""

    def __init__(self, caller=bearer_token):
        self.runs = 0
        self.idem = AsyncIdempotency(MemoryStore())
        self.app = IdempotencyMiddleware(self.serve, self.idem, caller=caller)

    async def serve(self, scope, receive, send):
        self.runs += 1
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"1")]})
        await send({"type": "http.response.body", "body": b"charged"})

    async def ask(self, body=BODY):
        connection = Connection()
        connection.messages = [{"type": "http.request", "body": body, "more_body": False}]
        scope = http_scope("POST", "/charges", headers_of('"k-1"'))
        await self.app(scope, connection.receive, connection.send)
        return connection


def test_what_an_outer_layer_adds_stays_with_its_answer():
    """Middlewares around us change the list of headers that they are given."""

    async def scenario():
        shop = Shop()
        for _ in range(3):
            connection = await shop.ask()
            connection.sent[0]["headers"].append((b"set-cookie", b"secret"))
        assert "set-cookie" not in (await shop.ask()).reply.headers

    asyncio.run(scenario())


def test_an_operator_is_heard_at_once():
    """A key that was expired runs again, although the same bytes were replayed before."""

    async def scenario():
        shop = Shop()
        for _ in range(3):
            await shop.ask()
        token = bearer_token(Request("POST", "/", b"", headers_of(None)))
        caller = caller_of_credential(token, None)
        await shop.idem.expire("k-1", caller=caller)
        assert not (await shop.ask()).reply.is_replay
        assert shop.runs == 2

    asyncio.run(scenario())


def test_the_caller_is_asked_every_time():
    """What it looks at besides the headers is not known: a session may have changed hands."""
    users = iter(["alice", "alice", "alice", "bob"])

    async def scenario():
        shop = Shop(caller=lambda request: next(users))
        for _ in range(3):
            await shop.ask()
        assert not (await shop.ask()).reply.is_replay
        assert shop.runs == 2

    asyncio.run(scenario())


def test_a_replay_from_the_process_says_nothing_about_the_store():
    """Else the breaker would let requests through to a store that is still down."""

    async def scenario():
        shop = Shop()
        await shop.ask()
        breaker = shop.app.protection.breaker
        for _ in range(5):
            breaker.failed(time.monotonic())
        for _ in range(2):
            assert (await shop.ask()).reply.is_replay
        assert (await shop.ask(body=b'{"amount":1}')).reply.status == 422
        assert breaker.is_open

    asyncio.run(scenario())


def test_a_path_that_the_server_has_mended_is_no_repetition_of_another_one():
    """Servers replace bytes that are no UTF-8, and two paths look like one; the raw ones differ."""

    async def scenario():
        shop = Shop()
        asked = []

        async def ask(raw_path):
            connection = Connection()
            scope = http_scope("POST", "/caf\ufffd", headers_of('"k-1"'), raw_path=raw_path)
            await shop.app(scope, connection.receive, connection.send)
            asked.append(connection.reply.status)

        for raw_path in (b"/caf%E9", b"/caf%E9", b"/caf%E9", b"/caf%E8", b"/caf%EF%BF%BD"):
            await ask(raw_path)
        assert (asked, shop.runs) == ([201, 201, 201, 422, 422], 1)
        await shop.idem.close()

    asyncio.run(scenario())

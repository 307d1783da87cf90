"""Visits of the Django shop: its settings for one test, and clients of both worlds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sqlite3

from asgiref.sync import sync_to_async
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, connections
from django.test import AsyncClient, Client, override_settings

from retrysafe.contrib.django.callers import authenticated_user
from retrysafe.contrib.django.configuration import current
from retrysafe.stores import MemoryStore
from tests.contrib import django_shop

MIDDLEWARE = "retrysafe.contrib.django.middleware.RetrysafeMiddleware"
CSRF = "django.middleware.csrf.CsrfViewMiddleware"


class Shop:
    """A running shop; each request has a client of its own."""

    def __init__(self, world, options, check_csrf=False):
        self.world = world
        self.options = options
        self.check_csrf = check_csrf
        self.runner = asyncio.Runner() if world == "asgi" else None

    @property
    def till(self):
        return django_shop.till

    @property
    def idem(self):
        return current().idempotency

    def ask(self, method, path, key="k-1", caller="alice", **options):
        """One request; `scope` and `cookies` are the client's, `environ` the request's own.

        With `pieces`, so many of a stream's are read, and then the client leaves.
        """
        pieces = options.pop("pieces", None)
        headers = dict(options.pop("headers", {}))
        if key is not None:
            headers["Idempotency-Key"] = key
        if caller is not None:
            headers["Authorization"] = f"Bearer {caller}"
        sent = {
            "data": options.pop("data", b""),
            "content_type": options.pop("kind", "application/octet-stream"),
            "headers": headers,
            **options.pop("environ", {}),
        }
        if "json" in options:
            sent |= {"data": json.dumps(options.pop("json")), "content_type": "application/json"}
        kind = Client if self.runner is None else AsyncClient
        client = kind(
            raise_request_exception=False,
            enforce_csrf_checks=self.check_csrf,
            **options.pop("scope", {}),
        )
        client.cookies.load(options.pop("cookies", {}))
        assert options == {}
        if pieces is not None:
            return self._begin(client, method, path, pieces, sent)
        if self.runner is None:
            reply = client.generic(method, path, **sent)
            reply.whole = b"".join(reply.streaming_content) if reply.streaming else reply.content
            return reply

        async def visit():
            reply = await client.generic(method, path, **sent)
            chunks = [chunk async for chunk in reply] if reply.streaming else [reply.content]
            reply.whole = b"".join(chunks)
            return reply

        return self.runner.run(visit())

    def _begin(self, client, method, path, pieces, sent):
        if self.runner is None:
            reply = client.generic(method, path, **sent)
            flow = iter(reply)
            reply.read = [next(flow) for _ in range(pieces)]
            reply.close()
            return reply

        async def visit():
            reply = await client.generic(method, path, **sent)
            async with contextlib.aclosing(aiter(reply)) as flow:
                reply.read = [await anext(flow) for _ in range(pieces)]
            await sync_to_async(reply.close)()
            return reply

        return self.runner.run(visit())

    def settle(self):
        """Django leaves it to Python to close async streams, and Python to the loop."""
        gc.collect()
        if self.runner is not None:
            for _ in range(3):
                self.runner.run(asyncio.sleep(0))

    def post(self, path="/charges", **options):
        if not options.keys() & {"data", "json"}:
            options["json"] = {"amount": 7}
        return self.ask("POST", path, **options)

    def close(self):
        if self.runner is not None:
            made = current()
            if made._on_loop is not None:
                self.runner.run(made.on_loop.idempotency.close())
            self.runner.close()


@contextlib.contextmanager
def open_shop(world="wsgi", *, middleware=None, check_csrf=False, settings=None, **options):
    """A shop with these options of RETRYSAFE; everything is as before when it closes."""
    options = {"STORE": MemoryStore(), "CALLER": authenticated_user, **options}
    django_shop.till.__init__()
    changed = django_shop.SETTINGS | (settings or {}) | {"RETRYSAFE": options}
    if middleware is not None:
        changed["MIDDLEWARE"] = middleware
    # The clients of Django do not close connections; nothing else may do it between requests.
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    with override_settings(**changed):
        shop = Shop(world, options, check_csrf)
        try:
            yield shop
        finally:
            shop.close()
            for signal in (request_started, request_finished):
                signal.connect(close_old_connections)


@contextlib.contextmanager
def database(path, *, atomic_requests=False):
    """Django's connection "shop" to a file with a table of orders."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (name TEXT)")
    options = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    connections.settings["shop"] = connections.configure_settings(
        {"default": {}, "shop": options | {"ATOMIC_REQUESTS": atomic_requests}}
    )["shop"]
    try:
        yield f"sqlite:///{path}"
    finally:
        _drop_connection()
        # Views that block have their own thread behind ASGI, and it outlives the test.
        asyncio.run(sync_to_async(_drop_connection)())
        del connections.settings["shop"]


def _drop_connection():
    connections["shop"].close()
    del connections["shop"]


def is_replay(reply):
    return reply.headers.get("Idempotent-Replayed") == "true"


def problem(reply):
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.json()["status"] == reply.status_code
    return reply.json()["type"].partition("#")[2]

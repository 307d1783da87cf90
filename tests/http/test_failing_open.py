"""Failing open while a request waits for one that runs in another process."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from retrysafe import AsyncIdempotency, Idempotency, Key
from retrysafe.core.flights import Phase
from retrysafe.http import (
    Breaker,
    IdempotencyMiddleware,
    Rule,
    WSGIIdempotencyMiddleware,
    bearer_token,
)
from retrysafe.http.callers import Credential, caller_of_credential
from retrysafe.stores import MemoryStore
from tests.http.driving import Shop, ask, ask_wsgi
from tests.runtime.staged import until

DIGEST = Key("k-1", caller=caller_of_credential(Credential("bearer", b"alice"), None)).digest


def is_awaited(engine):
    return engine._flights.phase(DIGEST) is Phase.AWAITING


def options():
    return {
        "caller": bearer_token,
        "fail_open": True,
        "breaker": Breaker(failures_limit=1, open_seconds=1000),
    }


def test_what_a_task_waits_for_is_not_run_beside_it():
    """The key is known to run elsewhere: a duplicate is refused while the store is left alone."""

    async def scenario():
        store, shop = MemoryStore(), Shop()
        started, go_on = asyncio.Event(), asyncio.Event()

        async def slow(scope, receive, send):
            started.set()
            await go_on.wait()
            await shop.asgi(scope, receive, send)

        async with AsyncIdempotency(store) as other, AsyncIdempotency(store) as idem:
            elsewhere = IdempotencyMiddleware(slow, other, caller=bearer_token)
            here = IdempotencyMiddleware(shop.asgi, idem, **options())
            first = asyncio.create_task(ask(elsewhere))
            await started.wait()
            waiting = asyncio.create_task(ask(here, prefer="wait=30"))
            for _ in range(100):
                if is_awaited(idem._calls.bound().engine):
                    break
                await asyncio.sleep(0)  # The store never waits, so a few turns of the loop do.
            here.protection.breaker.failed(time.monotonic())
            try:
                # Of another key nothing is known, and the service has asked for it.
                other_key = await ask(here, key='"k-2"')
                assert other_key.headers["idempotency-protected"] == "false"
                assert (await ask(here)).problem == "in-flight"
            finally:
                go_on.set()
            assert (await waiting).is_replay
            assert (await first).status == 201
        assert len(shop.runs) == 2

    asyncio.run(scenario())


def test_what_a_thread_waits_for_is_not_run_beside_it():
    """The same in threads."""
    store, shop = MemoryStore(), Shop()
    started, go_on = Event(), Event()

    def slow(environ, start_response):
        started.set()
        assert go_on.wait(30)
        return shop.wsgi(environ, start_response)

    with (
        Idempotency(store) as other,
        Idempotency(store) as idem,
        ThreadPoolExecutor(2) as pool,
    ):
        elsewhere = WSGIIdempotencyMiddleware(slow, other, caller=bearer_token)
        here = WSGIIdempotencyMiddleware(shop.wsgi, idem, rules=[Rule(wait=True)], **options())
        first = pool.submit(ask_wsgi, elsewhere)
        assert started.wait(30)
        waiting = pool.submit(ask_wsgi, here, prefer="wait=30")
        until(lambda: is_awaited(idem._calls._engine))
        here.protection.breaker.failed(time.monotonic())
        try:
            other_key = ask_wsgi(here, key='"k-2"')
            assert other_key.headers["idempotency-protected"] == "false"
            assert ask_wsgi(here).problem == "in-flight"
        finally:
            go_on.set()
        assert waiting.result().is_replay
        assert first.result().status == 201
    assert len(shop.runs) == 2

"""Equal requests, some of which are one intent and some of which are not.

Attacked: routes that old and new clients share. The same order comes many times at once: without a
key, with two keys, and with two intents that a header tells; and a document is changed under two
versions of it by otherwise equal requests.

What must hold: one run for each intent, on every store, and none for two intents together. A header
that counts tells requests apart while the first one still runs, and after it.
"""

from __future__ import annotations

import asyncio

from retrysafe import AsyncIdempotency, BodyKey, FingerprintRule
from retrysafe.http import HeaderKey, IdempotencyMiddleware, Rule, bearer_token
from tests.http.driving import ask

SECRET = "a secret of these attacks"
# Each is sent so often at the same time.
TIMES = 6
INTENTS = [
    {"key": None},
    {"key": '"a"'},
    {"key": '"b"'},
    {"key": None, "x_intent": "1"},
    {"key": None, "x_intent": "2"},
]


class Held:
    """An application whose runs wait until they are let go."""

    def __init__(self) -> None:
        self.runs = 0
        self.started = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.runs += 1
        self.started.release()
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


def test_every_intent_runs_once(database_url):
    """All duplicates of a running intent are sent away, and replayed once it has ended."""

    async def whole():
        app = Held()
        source = HeaderKey(otherwise=BodyKey(intent="X-Intent"))
        async with asyncio.timeout(60), AsyncIdempotency(database_url, secret=SECRET) as idem:
            shop = IdempotencyMiddleware(app, idem, caller=bearer_token, rule=Rule(key=source))
            asked = [asyncio.create_task(ask(shop, **intent)) for intent in INTENTS * TIMES]
            left = set(asked)
            while len(left) > len(INTENTS):
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                assert {task.result().problem for task in done} == {"in-flight"}
            app.go_on.set()
            replies = [await task for task in left]
            assert [reply.status for reply in replies] == [201] * len(INTENTS)
            again = [await ask(shop, **intent) for intent in INTENTS]
            assert all(reply.is_replay for reply in again)
            assert app.runs == len(INTENTS)

    asyncio.run(whole())


def test_a_header_that_counts_tells_requests_apart(database_url):
    """Another version of the document under the same key is another request, from the start."""

    async def whole():
        app = Held()
        rule = Rule(fingerprint=FingerprintRule(headers=("If-Match",), exclude_query=("ts",)))
        async with asyncio.timeout(60), AsyncIdempotency(database_url, secret=SECRET) as idem:
            shop = IdempotencyMiddleware(app, idem, caller=bearer_token, rule=rule)
            first = asyncio.create_task(ask(shop, path="/d?ts=1", if_match='"1"'))
            await app.started.acquire()
            assert (await ask(shop, path="/d?ts=2", if_match='"2"')).problem == "key-reused"
            assert (await ask(shop, path="/d?ts=2", if_match='"1"')).problem == "in-flight"
            app.go_on.set()
            assert (await first).status == 201
            assert (await ask(shop, path="/d?ts=3", if_match='"1"')).is_replay
            assert (await ask(shop, path="/d?ts=1")).problem == "key-reused"
            assert app.runs == 1

    asyncio.run(whole())

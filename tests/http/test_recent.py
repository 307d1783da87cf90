"""Exact repetitions: the same bytes again are replayed fast, and anything else as ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from retrysafe import GLOBAL, AsyncIdempotency
from retrysafe.http import IdempotencyMiddleware, bearer_token, gateway_header
from retrysafe.http.callers import basic_user, caller_of_credential, is_known_by_headers
from retrysafe.http.recent import ENTRIES_LIMIT, ENTRY_LIMIT_BYTES, Recent, Repetition, head_of
from retrysafe.http.request import Request
from retrysafe.http.responses import Response
from retrysafe.observe import EventKind
from retrysafe.stores import MemoryStore
from tests.http.driving import BODY, Connection, headers_of, http_scope


class Shop:
    """A protected application, what its faces report, and how often the usual way was gone."""

    def __init__(self, caller=bearer_token):
        self.runs = 0
        self.events = []
        self.planned = 0
        self.idem = AsyncIdempotency(MemoryStore(), observers=[self.events.append])
        self.app = IdempotencyMiddleware(self.serve, self.idem, caller=caller)
        begin = self.app.protection.begin

        def counted(*args):
            self.planned += 1
            return begin(*args)

        self.app.protection.begin = counted

    async def serve(self, scope, receive, send):
        self.runs += 1
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"1")]})
        await send({"type": "http.response.body", "body": b"charged"})

    async def ask(self, key='"k-1"', body=BODY, headers=None, messages=None):
        connection = Connection()
        connection.messages = (
            [{"type": "http.request", "body": body, "more_body": False}]
            if messages is None
            else messages
        )
        scope = http_scope("POST", "/charges", headers or headers_of(key))
        await self.app(scope, connection.receive, connection.send)
        return connection


def shown(connection):
    return connection.reply.status, connection.reply.header_lines, connection.reply.body


def test_the_third_request_goes_the_short_way():
    """It is answered as the second was, without being looked at again, and counts as a replay."""

    async def scenario():
        shop = Shop()
        await shop.ask()
        second = await shop.ask()
        third = await shop.ask()
        assert (shop.runs, shop.planned) == (1, 2)
        assert shown(second) == shown(third)
        assert third.reply.is_replay
        replays = [event for event in shop.events if event.kind is EventKind.REPLAYED]
        assert [event.source for event in replays] == ["process"] * 2

    asyncio.run(scenario())


def test_what_an_outer_layer_adds_stays_with_its_answer():
    """Middlewares around us change the list of headers that they are given."""

    async def scenario():
        shop = Shop()
        for _ in range(3):
            connection = await shop.ask()
            connection.sent[0]["headers"].append((b"set-cookie", b"secret"))
        assert "set-cookie" not in (await shop.ask()).reply.headers

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["body", "key", "caller", "header"])
def test_any_difference_goes_the_usual_way(change):
    """Another body is refused, another key or caller runs, another header is still a replay."""

    async def scenario():
        shop = Shop()
        for _ in range(3):
            await shop.ask()
        planned = shop.planned
        if change == "body":
            reply = (await shop.ask(body=b'{"amount":1}')).reply
            assert (reply.status, reply.problem) == (422, "key-reused")
        elif change == "key":
            assert not (await shop.ask('"k-2"')).reply.is_replay
        elif change == "caller":
            reply = (await shop.ask(headers=headers_of('"k-1"', "mallory"))).reply
            assert (reply.status, reply.is_replay) == (201, False)
        else:
            assert (await shop.ask(headers=headers_of('"k-1"', x_trace="7"))).reply.is_replay
        assert shop.planned == planned + 1

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


def test_half_a_repetition_is_no_repetition():
    """A client that leaves before its body has arrived gets nothing, and nothing breaks."""

    async def scenario():
        shop = Shop()
        for _ in range(3):
            await shop.ask()
        left = await shop.ask(
            messages=[
                {"type": "http.request", "body": b"{", "more_body": True},
                {"type": "http.disconnect"},
            ]
        )
        assert left.sent == []
        in_parts = await shop.ask(
            messages=[
                {"type": "http.request", "body": BODY[:5], "more_body": True},
                {"type": "http.request", "body": BODY[5:], "more_body": False},
            ]
        )
        assert in_parts.reply.is_replay
        large = await shop.ask(body=b"x" * (5 * 1024 * 1024))
        assert large.reply.status == 413

    asyncio.run(scenario())


def test_a_caller_of_unknown_making_is_asked_every_time():
    """What it looks at besides the headers nobody knows: a session may have changed hands."""
    users = iter(["alice", "alice", "alice", "bob"])

    async def scenario():
        shop = Shop(caller=lambda request: next(users))
        for _ in range(3):
            await shop.ask()
        assert not (await shop.ask()).reply.is_replay
        assert (shop.runs, shop.planned) == (2, 4)

    asyncio.run(scenario())


def test_shipped_callers_are_told_by_headers():
    for caller in (bearer_token, basic_user, gateway_header("X-Account"), GLOBAL):
        assert is_known_by_headers(caller)
    assert not is_known_by_headers(lambda request: "alice")


def test_what_is_kept_is_bounded():
    """The oldest goes first."""
    recent = Recent()
    small = Repetition(b"", 1, None, None, Response(200, [], b""))
    for number in range(ENTRIES_LIMIT + 1):
        recent.keep((number,), small)
    assert len(recent.entries) == ENTRIES_LIMIT
    assert recent.find((0,)) is None
    assert recent.find((1,)) is small


@pytest.mark.parametrize("size", [0, 1])
def test_what_is_large_is_not_kept(size):
    """Whatever is large of it: a body, the headers of either side, the path."""
    half = ENTRY_LIMIT_BYTES // 2
    text = "x" * (half + size)
    header = ((b"n" * 8, b"v" * (half - 8 + size)),)
    filled = Repetition(b"", 1, None, None, Response(200, [], b"y" * half))
    for head, repetition in (
        ((text,), filled),
        ((header,), filled),
        ((b"x" * half,), Repetition(b"", 1, None, None, Response(200, list(header), b""))),
        ((b"x" * half, None), Repetition(text.encode(), 1, None, None, Response(200, [], b""))),
    ):
        recent = Recent()
        recent.keep(head, repetition)
        assert (recent.find(head) is repetition) is (size == 0)


def test_headers_that_cannot_be_looked_up_are_not_kept():
    recent, repetition = Recent(), Repetition(b"", 1, None, None, Response(200, [], b""))
    for headers in ([[b"a", b"b"]], [(b"a", b"b")]):
        recent.keep(head_of(http_scope("POST", "/", headers)), repetition)
    assert recent.find(head_of(http_scope("POST", "/", [(b"a", b"b")]))) is repetition
    assert recent.find(head_of(http_scope("POST", "/", [[b"a", b"b"]]))) is None
    assert len(recent.entries) == 1


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

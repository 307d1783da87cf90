"""Clients that ask the server for more than it has to give, by `Prefer`.

Attacked: the threads of a WSGI server, which `Prefer: wait` would hold for as long as a client
likes, and the limit of requests of an ASGI server, which runs behind a 202 would escape.

What must hold: a wait holds a thread only where the rule says so, and only so many at once; what
runs behind a 202 is bounded per process, and what is beyond that runs within the server's own
limit. Nobody who is turned away runs anything.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, InFlight, Policy
from retrysafe.errors import PolicyInvalid
from retrysafe.http import (
    IdempotencyMiddleware,
    Limits,
    Rule,
    WSGIIdempotencyMiddleware,
    bearer_token,
)
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore, SqliteStore
from tests.http.driving import SlowWSGI, ask, ask_wsgi
from tests.runtime.staged import until

WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=30))


class Server:
    """A WSGI server with few threads, one of which is busy with a slow run."""

    def __init__(self, threads: int, **options) -> None:
        self.slow = SlowWSGI()
        self.idem = Idempotency(MemoryStore())
        self.app = WSGIIdempotencyMiddleware(
            self.slow, self.idem, **{"caller": bearer_token, **options}
        )
        self.pool = ThreadPoolExecutor(threads)
        self.first = self.pool.submit(ask_wsgi, self.app)
        assert self.slow.began.wait(30)

    def close(self) -> None:
        self.slow.may_end.set()
        self.pool.shutdown()
        self.idem.close()


@pytest.fixture
def serve():
    made: list[Server] = []

    def make(threads: int, **options) -> Server:
        made.append(Server(threads, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize("rule", [Rule(), Rule(wait=False)], ids=["default", "off"])
def test_a_client_cannot_hold_a_thread(serve, rule):
    """One slow run and three who would like to wait: they are refused at once, and leave."""
    server = serve(4, rules=[rule])
    waiting = [server.pool.submit(ask_wsgi, server.app, prefer="wait=30") for _ in range(3)]
    replies = [future.result(10) for future in waiting]
    assert {reply.problem for reply in replies} == {"in-flight"}
    assert "preference-applied" not in replies[0].headers
    assert (server.slow.runs, server.first.done()) == (1, False)


@pytest.mark.parametrize(
    "rule", [Rule(wait=True), Rule(in_flight=InFlight.WAIT), Rule(policy=WAITING)], ids=str
)
def test_where_the_rule_waits_only_so_many_do(serve, rule):
    """Two places: of five who come, two get the response, and three are refused at once."""
    server = serve(6, rules=[rule], limits=Limits(waiters=2))
    waiting = [server.pool.submit(ask_wsgi, server.app, prefer="wait=10") for _ in range(2)]
    until(lambda: len(server.app.protection._thread_waiters) == 2)
    refused = [ask_wsgi(server.app, prefer="wait=10") for _ in range(3)]
    assert {reply.problem for reply in refused} == {"in-flight"}
    assert not any("preference-applied" in reply.headers for reply in refused)
    server.slow.may_end.set()
    assert {future.result(10).body for future in waiting} == {b"{}"}
    assert len(server.app.protection._thread_waiters) == 0
    assert server.slow.runs == 1


def test_a_client_may_always_decline_to_wait(serve):
    """`wait=0` on a route that waits: refused at once, without a place."""
    server = serve(2, rules=[Rule(policy=WAITING)], limits=Limits(waiters=0))
    assert ask_wsgi(server.app, prefer="wait=0").problem == "in-flight"


def test_those_who_wait_for_another_process_have_places_too(serve):
    """The leader of a local flight polls for a foreign owner, and holds its thread as well."""
    server = serve(2)
    with Idempotency(server.app.calls.store) as here:
        app = WSGIIdempotencyMiddleware(
            server.slow,
            here,
            caller=bearer_token,
            rules=[Rule(wait=True)],
            limits=Limits(waiters=0),
        )
        assert ask_wsgi(app, prefer="wait=30").problem == "in-flight"
    assert server.slow.runs == 1


def test_a_rule_with_a_transaction_has_places_too(tmp_path):
    """Who waits for the lock of a rival's transaction holds a thread and a connection."""
    path = tmp_path / "shop.db"
    run_sync(SqliteStore(path).migrate())
    import sqlite3
    from contextlib import closing, contextmanager

    @contextmanager
    def transaction():
        opened = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
        with closing(opened) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    slow = SlowWSGI()
    with Idempotency(f"sqlite:///{path}") as idem, ThreadPoolExecutor(1) as pool:
        app = WSGIIdempotencyMiddleware(
            slow,
            idem,
            caller=bearer_token,
            rules=[Rule(transaction=transaction, in_flight=InFlight.WAIT)],
            limits=Limits(waiters=0),
        )
        first = pool.submit(ask_wsgi, app)
        assert slow.began.wait(30)
        assert ask_wsgi(app).problem == "in-flight"
        slow.may_end.set()
        assert first.result(10).body == b"{}"
    assert slow.runs == 1


# On an event loop.


class Crowded:
    """An application that counts who runs at the same time, until it is told to end."""

    def __init__(self) -> None:
        self.now = self.most = self.runs = 0
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.runs += 1
        self.began.set()
        self.now += 1
        self.most = max(self.most, self.now)
        await self.may_end.wait()
        self.now -= 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def test_what_runs_behind_a_202_is_bounded():
    """200 who prefer not to wait, behind a server that serves five: five and the limit run at once.

    All are answered in the end, and each ran once.
    """

    async def play() -> None:
        app, server_limit = Crowded(), asyncio.Semaphore(5)
        async with AsyncIdempotency(MemoryStore()) as idem:
            protected = IdempotencyMiddleware(
                app, idem, caller=bearer_token, limits=Limits(background_runs=7)
            )

            async def served(number: int):
                async with server_limit:
                    return await ask(protected, key=f"k-{number}", prefer="respond-async")

            asked = [asyncio.create_task(served(number)) for number in range(200)]
            for _ in range(3_000):
                await asyncio.sleep(0)
            assert (app.now, app.most) == (12, 12)
            assert [task.result().status for task in asked if task.done()] == [202] * 7
            app.may_end.set()
            replies = await asyncio.gather(*asked)
        assert {reply.status for reply in replies} == {201, 202}
        assert (app.runs, app.now) == (200, 0)
        assert len(protected.protection.background) == 0

    asyncio.run(play())


def test_a_rule_can_refuse_to_run_in_the_background():
    """`respond_async=False`: a first request is answered at its end, a duplicate with 409."""

    async def play() -> None:
        app = Crowded()
        async with AsyncIdempotency(MemoryStore()) as idem:
            protected = IdempotencyMiddleware(
                app, idem, caller=bearer_token, rules=[Rule(respond_async=False)]
            )
            first = asyncio.create_task(ask(protected, prefer="respond-async"))
            await app.began.wait()
            duplicate = await ask(protected, prefer="respond-async")
            assert (duplicate.problem, first.done()) == ("in-flight", False)
            app.may_end.set()
            assert (await first).status == 201

    asyncio.run(play())


def test_tasks_that_wait_are_bounded():
    """Past the limit a duplicate is refused at once, however long it would have waited."""

    async def play() -> None:
        app = Crowded()
        async with AsyncIdempotency(MemoryStore()) as idem:
            protected = IdempotencyMiddleware(
                app, idem, caller=bearer_token, limits=Limits(waiters=3)
            )
            first = asyncio.create_task(ask(protected))
            await app.began.wait()
            waiting = [asyncio.create_task(ask(protected, prefer="wait=30")) for _ in range(10)]
            for _ in range(200):
                await asyncio.sleep(0)
            refused = [task.result() for task in waiting if task.done()]
            assert [reply.problem for reply in refused] == ["in-flight"] * 7
            app.may_end.set()
            assert (await first).status == 201
            replies = await asyncio.gather(*waiting)
        assert sum(reply.is_replay for reply in replies) == 3
        assert app.runs == 1

    asyncio.run(play())


@pytest.mark.parametrize(
    "options", [{"waiters": -1}, {"waiters": 1.5}, {"background_runs": None}], ids=str
)
def test_impossible_limits_are_refused(options):
    """Where they are made, and not with the first request."""
    with pytest.raises(PolicyInvalid):
        Limits(**options)
    with pytest.raises(PolicyInvalid), Idempotency(MemoryStore()) as idem:
        WSGIIdempotencyMiddleware(SlowWSGI(), idem, caller=bearer_token, limits=3)

"""Rules with a transaction: what a request wrote and its response are one commit."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from contextlib import asynccontextmanager, closing, contextmanager

import pytest

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.errors import PolicyInvalid
from retrysafe.http import (
    IdempotencyMiddleware,
    Rule,
    Streaming,
    WSGIIdempotencyMiddleware,
    bearer_token,
)
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from tests.http.driving import BODY, ask, ask_wsgi

PATIENCE_SECONDS = 30


class Orders:
    """An application that writes an order on the connection that it is given, in either world."""

    def __init__(self, path):
        self.path = path
        self.status = 201
        self.error: Exception | None = None
        self.commit_error: Exception | None = None
        self.open_error: Exception | None = None
        self.body = b"placed"
        self.attempts = []
        self.opened = 0

    def write(self, attempt, body):
        self.attempts.append(attempt)
        attempt.connection.execute("INSERT INTO orders VALUES (?)", (body.decode(),))
        if self.error is not None:
            raise self.error
        return self.body + b" %d" % len(self.attempts)

    @contextmanager
    def plain_transaction(self):
        self.opened += 1
        if self.open_error is not None:
            raise self.open_error
        connection = sqlite3.connect(
            self.path, isolation_level=None, timeout=PATIENCE_SECONDS, check_same_thread=False
        )
        with closing(connection):
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            if self.commit_error is not None:
                raise self.commit_error
            connection.execute("COMMIT")

    @asynccontextmanager
    async def async_transaction(self):
        with self.plain_transaction() as connection:
            yield connection

    async def asgi(self, scope, receive, send):
        message = await receive()
        body = self.write(scope["state"]["idempotency"], message["body"])
        await self.pause()
        headers = [(b"content-type", b"text/plain"), (b"location", b"/orders/1")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def pause(self):
        """Where a test may hold a run in the middle."""

    def wsgi(self, environ, start_response):
        body = self.write(environ["retrysafe.attempt"], environ["wsgi.input"].read())
        self.pause_thread()
        headers = [("Content-Type", "text/plain"), ("Location", "/orders/1")]
        start_response(f"{self.status} Made", headers)
        return [body]

    def pause_thread(self):
        """Where a test may hold a run in the middle."""

    @property
    def committed(self):
        with closing(sqlite3.connect(self.path)) as connection:
            return [text for (text,) in connection.execute("SELECT * FROM orders")]


class AsgiOrders(Orders):
    def __init__(self, path, runner, **options):
        super().__init__(path)
        self._runner = runner
        self.idem = AsyncIdempotency(
            f"sqlite:///{path}",
            cache=options.pop("cache", True),
            secret=options.pop("secret", None),
        )
        rule = Rule(path="/orders", transaction=self.async_transaction)
        self.app = IdempotencyMiddleware(
            self.asgi, self.idem, caller=bearer_token, rules=[rule], **options
        )

    def ask(self, *args, **options):
        return self._runner.run(ask(self.app, "POST", "/orders", *args, **options))

    def close(self):
        self._runner.run(self.idem.close())


class WsgiOrders(Orders):
    def __init__(self, path, **options):
        super().__init__(path)
        self.idem = Idempotency(
            f"sqlite:///{path}",
            cache=options.pop("cache", True),
            secret=options.pop("secret", None),
        )
        rule = Rule(path="/orders", transaction=self.plain_transaction)
        self.app = WSGIIdempotencyMiddleware(
            self.wsgi, self.idem, caller=bearer_token, rules=[rule], **options
        )

    def ask(self, *args, **options):
        return ask_wsgi(self.app, "POST", "/orders", *args, **options)

    def close(self):
        self.idem.close()


@pytest.fixture
def path(tmp_path):
    """A file with the store's tables and one of the application's."""
    path = tmp_path / "shop.db"
    store = SqliteStore(path)
    run_sync(store.migrate())
    run_sync(store.close())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (body TEXT)")
    return path


@pytest.fixture(params=["asgi", "wsgi"])
def make_orders(request, path):
    made = []
    with asyncio.Runner() as runner:

        def make(**options):
            orders = (
                AsgiOrders(path, runner, **options)
                if request.param == "asgi"
                else WsgiOrders(path, **options)
            )
            made.append(orders)
            return orders

        yield make
        for orders in made:
            orders.close()


@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("turn", [1, -1])
def test_an_order_is_placed_once_while_secrets_are_replaced(make_orders, turn, has_failed):
    """All forms of the caller's key are claimed and settled in the application's transaction."""
    old, new = "the old secret, 16 or more", "the new secret, 16 or more"
    for number, pair in enumerate([([old], [new, old]), ([new, old], [new])]):
        key = f'"k-{number}"'
        one, other = (make_orders(secret=listed, cache=False) for listed in pair[::turn])
        if has_failed:
            one.error = LookupError("rolled back")
            with pytest.raises(LookupError):
                one.ask(key=key)
            one.error = None
        assert not one.ask(key=key).is_replay
        assert other.ask(key=key).is_replay
        assert one.ask(key=key).is_replay
        is_known = pair[::turn][0][0] in pair[::turn][1]
        assert other.ask(key=key, body=b"{}").status == (422 if is_known else 201)
        assert len(one.committed) == number + 1


@pytest.mark.parametrize("cache", [True, False])
def test_a_retry_is_replayed_and_writes_nothing(make_orders, cache):
    """The response comes back as it was, marked as a replay, from the process or the store."""
    orders = make_orders(cache=cache)
    first, second = orders.ask(), orders.ask()
    assert (first.status, first.body, first.is_replay) == (201, b"placed 1", False)
    assert (second.status, second.body, second.is_replay) == (201, b"placed 1", True)
    assert second.headers["location"] == "/orders/1"
    assert orders.committed == [BODY.decode()]
    assert orders.opened == (1 if cache else 2)


def test_the_attempt_tells_its_key_and_number(make_orders):
    """The application is given the connection and what belongs to it."""
    orders = make_orders()
    orders.ask()
    (attempt,) = orders.attempts
    assert (attempt.key.text, attempt.number, attempt.operation) == ("k-1", 1, "POST /orders")


def test_another_request_is_refused_and_writes_nothing(make_orders):
    """422, as for leased routes."""
    orders = make_orders(cache=False)
    orders.ask()
    reply = orders.ask(body=b'{"amount":2}')
    assert (reply.status, reply.problem) == (422, "key-reused")
    assert orders.committed == [BODY.decode()]


def test_a_refusal_by_the_application_is_kept_with_what_it_wrote(make_orders):
    """A 4xx is an answer: committed, and replayed."""
    orders = make_orders(cache=False)
    orders.status = 402
    orders.ask()
    orders.status = 201
    reply = orders.ask()
    assert (reply.status, reply.is_replay) == (402, True)
    assert orders.committed == [BODY.decode()]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_response_that_frees_the_key_is_rolled_back(make_orders, status):
    """The client gets it, the write is undone, and a retry runs."""
    orders = make_orders()
    orders.status = status
    reply = orders.ask()
    assert (reply.status, reply.body) == (status, b"placed 1")
    assert orders.committed == []
    orders.status = 201
    assert orders.ask().body == b"placed 2"
    assert orders.committed == [BODY.decode()]


def test_an_exception_is_rolled_back_and_reaches_the_server(make_orders):
    """The server deals with it as ever, and the key is free."""
    orders = make_orders()
    orders.error = ValueError("no stock")
    with pytest.raises(ValueError, match="no stock"):
        orders.ask()
    assert orders.committed == []
    orders.error = None
    assert orders.ask().status == 201


def test_nothing_is_answered_before_the_commit(make_orders):
    """A commit that fails is 503, not the response that was made: nothing of it happened."""
    orders = make_orders()
    orders.commit_error = sqlite3.OperationalError("disk I/O error")
    orders.commit_error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    reply = orders.ask()
    assert (reply.status, reply.problem) == (503, "store-unavailable")
    assert reply.headers["retry-after"] == "1"
    assert b"disk" not in reply.body
    assert orders.committed == []
    orders.commit_error = None
    assert orders.ask().status == 201


def test_a_database_out_of_reach_is_503_and_the_breaker_hears_of_it(make_orders):
    """A transaction that cannot be opened counts as a failure of the store."""
    orders = make_orders(fail_open=True)
    orders.open_error = ConnectionRefusedError("no route")
    replies = [orders.ask(key=f'"k-{number}"') for number in range(20)]
    # Never open: the application would have no connection to work on.
    assert {reply.problem for reply in replies} == {"store-unavailable"}
    assert orders.opened < 20
    assert orders.attempts == []


def test_a_fault_in_the_transaction_function_is_not_hidden(make_orders):
    """A bug is a bug: it reaches the server's log instead of asking clients to retry."""
    orders = make_orders()
    orders.open_error = TypeError("missing argument")
    with pytest.raises(TypeError):
        orders.ask()


def test_a_response_over_the_limit_is_remembered_as_done(make_orders):
    """The write is committed; a retry is told so and does not run."""
    orders = make_orders()
    orders.body = b"x" * 2_000_000
    assert orders.ask().status == 201
    reply = orders.ask()
    assert (reply.status, reply.problem) == (409, "outcome-unavailable")
    assert orders.committed == [BODY.decode()]


@pytest.mark.parametrize("kind", ["text/plain", "text/event-stream"])
def test_a_response_that_goes_on_past_the_limit_is_rolled_back(make_orders, kind):
    """Nothing can be sent before the commit, and to commit in its middle would leave out what the
    rest still writes. So it fails, with a word on what to do; the key is free, also for events."""
    orders = make_orders()
    pieces = [b"x" * 2_000_000, b"y"]

    async def asgi(scope, receive, send):
        orders.write(scope["state"]["idempotency"], (await receive())["body"])
        headers = [(b"content-type", kind.encode())]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            # Silence lets nothing through either.
            assert "_end_silence" not in repr(asyncio.get_running_loop()._scheduled)
        await send({"type": "http.response.body", "body": b""})

    def wsgi(environ, start_response):
        orders.write(environ["retrysafe.attempt"], environ["wsgi.input"].read())
        start_response("201 Made", [("Content-Type", kind)])
        yield from pieces

    orders.app.app = wsgi if isinstance(orders.app, WSGIIdempotencyMiddleware) else asgi
    with pytest.raises(RuntimeError, match="outcome_limit_bytes or hold_limit"):
        orders.ask()
    assert orders.committed == []
    pieces.pop()
    # A last piece past the limit is still an end.
    assert len(orders.ask().body) == 2_000_000
    assert orders.ask().problem == "outcome-unavailable"
    assert orders.committed == [BODY.decode()]


def test_respond_async_is_not_promised(make_orders):
    """Nobody could read a status before the commit, so the answer itself is sent."""
    assert make_orders().ask(prefer="respond-async").status == 201


def test_the_policy_page_says_what_a_crash_means(make_orders):
    """No lease is spoken of where there is none."""
    orders = make_orders()
    protection = orders.app.protection
    from retrysafe.http.policy_page import policy_response

    urls = {"policy_url": "/p", "status_url": "/s/", "has_callers": True}
    page = policy_response(protection.table.routes, b"", **urls)
    assert b"the key is free at once" in page.body
    page = policy_response(protection.table.routes, b"application/json", **urls)
    (route,) = json.loads(page.body)["routes"]
    assert (route["is_atomic"], route["lease_seconds"]) == (True, None)


# Rivals in one process.


async def entered(orders):
    """A request that is in the application, and what lets it go on."""
    inside, leave = asyncio.Event(), asyncio.Event()

    async def pause():
        inside.set()
        await leave.wait()

    orders.pause = pause
    first = asyncio.create_task(ask(orders.app, "POST", "/orders"))
    await inside.wait()
    return first, leave


def test_duplicates_of_a_running_request_wait_or_are_refused(path):
    """In one loop: 409 at once, 422 for another request, the response itself for those who wait."""

    async def scenario(orders):
        first, leave = await entered(orders)
        refused = await ask(orders.app, "POST", "/orders")
        other = await ask(orders.app, "POST", "/orders", body=b"{}")
        waiting = [
            asyncio.create_task(ask(orders.app, "POST", "/orders", prefer="wait=30"))
            for _ in range(50)
        ]
        await asyncio.sleep(0)
        leave.set()
        return await first, refused, other, await asyncio.gather(*waiting)

    with asyncio.Runner() as runner:
        orders = AsgiOrders(path, runner)
        first, refused, other, waited = runner.run(scenario(orders))
        orders.close()
    assert first.status == 201
    assert (refused.status, refused.problem) == (409, "in-flight")
    assert refused.headers["retry-after"] == "1"
    assert (other.status, other.problem) == (422, "key-reused")
    assert {(reply.status, reply.body, reply.is_replay) for reply in waited} == {
        (201, b"placed 1", True)
    }
    assert orders.opened == 1
    assert orders.committed == [BODY.decode()]


def test_a_thread_whose_key_runs_in_another_is_refused(path):
    """The same among threads, without a second transaction."""
    orders = WsgiOrders(path)
    entered, leave = threading.Event(), threading.Event()

    def pause():
        entered.set()
        assert leave.wait(PATIENCE_SECONDS)

    orders.pause_thread = pause
    replies = []
    thread = threading.Thread(target=lambda: replies.append(orders.ask()))
    thread.start()
    assert entered.wait(PATIENCE_SECONDS)
    refused = orders.ask()
    leave.set()
    thread.join(PATIENCE_SECONDS)
    orders.close()
    assert refused.problem == "in-flight"
    assert [reply.status for reply in replies] == [201]
    assert orders.opened == 1


def test_a_client_that_leaves_does_not_undo_its_request(path):
    """A run whose connection is cut goes on to its commit; the retry gets its response."""

    async def scenario(orders):
        first, leave = await entered(orders)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        retry = asyncio.create_task(ask(orders.app, "POST", "/orders", prefer="wait=30"))
        leave.set()
        return await retry

    with asyncio.Runner() as runner:
        orders = AsgiOrders(path, runner)
        retry = runner.run(scenario(orders))
        orders.close()
    assert (retry.status, retry.body) == (201, b"placed 1")
    assert orders.committed == [BODY.decode()]


# Rules.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transaction": "orders"}, "opens one"),
        ({"transaction": contextmanager(lambda: iter(())), "required": False}, "requires"),
        ({"transaction": contextmanager(lambda: iter(())), "protected": False}, "requires"),
        (
            {"transaction": contextmanager(lambda: iter(())), "streaming": Streaming.PASS},
            "committed",
        ),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(options, words):
    """A transaction needs a key, and nothing may be sent before its end."""
    with pytest.raises(PolicyInvalid, match=words):
        Rule(**options)

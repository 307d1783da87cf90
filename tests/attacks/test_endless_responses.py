"""Responses without an end: does one take all memory, outlive its client, or count as whole?

Attacked are ASGI, WSGI and Flask here (Django in `tests/contrib`, all of them over sockets in
`tests/http_cases`) with streams that never end, drip, fall silent, or raise in the middle. What is
collected stays within its limit; past it the operation is remembered as done before its first byte
is sent; a client that leaves ends it; and a response that was cut short is never replayed as if it
were whole.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from flask import Flask
from flask import Response as FlaskResponse
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from retrysafe import AsyncIdempotency, Idempotency, Policy
from retrysafe.contrib.flask import Retrysafe
from retrysafe.core.ports import Waits
from retrysafe.errors import PolicyInvalid
from retrysafe.http import (
    IdempotencyMiddleware,
    Rule,
    WSGIIdempotencyMiddleware,
    bearer_token,
    held_response,
)
from retrysafe.http.asgi_run import AppRun
from retrysafe.stores import MemoryStore
from tests.http.driving import Connection, ask, ask_wsgi, headers_of, http_scope

LIMIT_BYTES = 1_000
RULE = Rule(policy=Policy(outcome_limit_bytes=LIMIT_BYTES))


def protected(app, rule=RULE, store=None):
    idempotency = AsyncIdempotency(store or MemoryStore())
    return IdempotencyMiddleware(app, idempotency, caller=bearer_token, rule=rule)


def exchange(app, connection):
    scope = http_scope("POST", "/charges", headers_of('"k-1"'))
    return asyncio.create_task(app(scope, connection.receive, connection.send))


class Endless:
    """An ASGI application that sends for ever, and never rests by itself.

    It knows how much it has sent, and how it ended; with `go_on` it waits after its first piece.
    """

    def __init__(self, piece=b"x" * 100, go_on=None):
        self.piece = piece
        self.sent = 0
        self.runs = 0
        self.go_on = go_on
        self.error = None
        self.ended = asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.runs += 1
        try:
            await send({"type": "http.response.start", "status": 201, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": self.piece, "more_body": True})
                self.sent += 1
                # Without a limit, or deaf to its client, this would take all memory or all time.
                assert self.sent < 10_000
                if self.go_on is not None:
                    await self.go_on.wait()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()


class SlowStore(MemoryStore):
    """Takes its time for endings: they are not durable before a few turns of the loop."""

    def __init__(self):
        super().__init__()
        self.settled = 0

    @property
    def capabilities(self):
        return replace(super().capabilities, waits=Waits.SUSPENDING)

    async def commit(self, claims, settlements):
        for _ in range(20):
            await asyncio.sleep(0)
        answers = await super().commit(claims, settlements)
        self.settled += len(settlements)
        return answers


async def until(is_so):
    """Lets the loop turn until it is so."""
    give_up = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < give_up
        await asyncio.sleep(0)


def _arrived(connection):
    return b"".join(message.get("body", b"") for message in connection.sent)


@pytest.mark.parametrize("way", ["disconnect", "send fails", "cancelled"])
def test_an_endless_response_ends_with_its_client(way):
    """At most a piece more than the limit is collected; then it passes, is known as done from its
    first byte on, and ends with its client, in whatever way the server tells of it."""

    async def run():
        endless, connection, store = Endless(), Connection(), SlowStore()
        app = protected(endless, store=store)
        sending = connection.send
        collected = []

        async def send(message):
            if not collected:
                # Before the first byte: what is done is durable, and a retry knows already.
                assert store.settled == 1
                assert (await ask(app)).problem == "outcome-unavailable"
            collected.append(endless.sent)
            await sending(message)

        connection.send = send
        task = exchange(app, connection)
        await until(lambda: len(_arrived(connection)) >= 10 * LIMIT_BYTES)
        # Nothing was sent before the limit was reached, and nothing is collected after it.
        assert collected[0] == LIMIT_BYTES // len(endless.piece)
        assert len(connection.sent[1]["body"]) == LIMIT_BYTES + len(endless.piece)
        assert {len(message["body"]) for message in connection.sent[2:]} == {len(endless.piece)}
        if way == "cancelled":
            task.cancel()
        elif way == "disconnect":
            connection.hang_up.set()
        else:
            connection.send_error = OSError("gone")
            connection.send = sending
        await asyncio.wait((task,), timeout=10)
        assert task.done()
        await asyncio.wait_for(endless.ended.wait(), 10)
        assert isinstance(endless.error, OSError | asyncio.CancelledError)
        assert (await ask(app)).problem == "outcome-unavailable"
        assert endless.runs == 1
        await app.idempotency.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_an_endless_response_without_a_client_ends_at_the_limit():
    """Whether its client left while it was held back, or was told 202: nobody reads on."""

    async def run():
        for prefer in (None, "respond-async"):
            go_on = asyncio.Event()
            endless, connection = Endless(go_on=go_on), Connection()
            app = protected(endless)
            scope = http_scope(
                "POST", "/charges", headers_of('"k-1"', **({"prefer": prefer} if prefer else {}))
            )
            task = asyncio.create_task(app(scope, connection.receive, connection.send))
            await until(lambda endless=endless: endless.sent)
            if prefer is None:
                task.cancel()
            await asyncio.wait((task,))
            go_on.set()
            await asyncio.wait_for(endless.ended.wait(), 10)
            assert endless.sent == LIMIT_BYTES // len(endless.piece)
            assert (await ask(app, prefer="wait=5")).problem == "outcome-unavailable"
            await app.idempotency.close()

    asyncio.run(run())


def test_pieces_without_a_byte_count_as_well():
    """An application that sends nothing for ever is let through at the limit, and ends."""

    async def run():
        endless, connection = Endless(piece=b""), Connection()
        connection.hang_up.set()
        app = protected(endless)
        await exchange(app, connection)
        assert isinstance(endless.error, OSError)
        assert LIMIT_BYTES <= endless.sent < 2 * LIMIT_BYTES
        await app.idempotency.close()

    asyncio.run(run())


def test_a_response_that_drips_passes_after_its_time(monkeypatch):
    """Held back within the time and the size; the next piece after the time lets it through."""
    now = [0.0]
    monkeypatch.setattr(held_response, "monotonic", lambda: now[0])

    async def run():
        connection, seen = Connection(), []

        async def dripping(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for number in range(4):
                await send(
                    {"type": "http.response.body", "body": b"%d" % number, "more_body": True}
                )
                seen.append(len(connection.sent))
                now[0] += 25.0
            await send({"type": "http.response.body", "body": b""})

        app = protected(dripping, Rule())
        await exchange(app, connection)
        # The start, and all that was held back; then each piece as it comes.
        assert seen == [0, 0, 0, 2]
        assert connection.reply.body == b"0123"
        assert (await ask(app)).problem == "outcome-unavailable"
        now[0] = 0.0
        kept = protected(dripping, Rule(hold_limit=None))
        seen.clear()
        connection = Connection()
        await exchange(kept, connection)
        assert seen == [0, 0, 0, 0]
        assert (await ask(kept)).is_replay

    asyncio.run(run())
    for wrong in (60, timedelta(seconds=-1)):
        with pytest.raises(PolicyInvalid, match="hold_limit"):
            Rule(hold_limit=wrong)


SILENT = Rule(hold_limit=timedelta(milliseconds=20))


class Silent:
    """An ASGI application that sends one piece and then nothing until it may go on."""

    def __init__(self, error=None, *, has_more=True):
        self.go_on = asyncio.Event()
        self.error = error
        self.has_more = has_more
        self.runs = 0

    async def __call__(self, scope, receive, send):
        self.runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        if self.has_more:
            await send({"type": "http.response.body", "body": b"last"})


def test_a_response_that_falls_silent_passes_after_its_time():
    """Without another piece: done before its first byte, then what was held back, then the rest in
    its order, however slowly the server takes the beginning."""

    async def run():
        silent, connection, store = Silent(), Connection(), SlowStore()
        app = protected(silent, SILENT, store)
        sending = connection.send

        async def send(message):
            assert store.settled == 1
            # The rest is there before the beginning is sent, and waits for its turn.
            silent.go_on.set()
            for _ in range(20):
                await asyncio.sleep(0)
            await sending(message)

        connection.send = send
        await asyncio.wait_for(exchange(app, connection), 30)
        bodies = [message["body"] for message in connection.sent[1:]]
        assert (connection.sent[0]["type"], bodies) == ("http.response.start", [b"first ", b"last"])
        assert (await ask(app)).problem == "outcome-unavailable"
        assert silent.runs == 1
        await app.idempotency.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@pytest.mark.parametrize("way", ["left", "disconnect", "send fails", "raises", "raises amid"])
def test_a_silent_response_ends_with_its_client_or_its_error(way):
    """Nothing is left running, nothing is told to the loop, and the operation is done."""

    async def run():
        told, stuck, begun = [], asyncio.Event(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
        is_raising = way.startswith("raises")
        silent = Silent(LookupError("cursor") if is_raising else None, has_more=False)
        connection, store = Connection(), SlowStore()
        app = protected(silent, SILENT, store)
        sending = connection.send

        async def send(message):
            begun.append(message)
            if way == "send fails":
                raise OSError("gone")
            if way == "raises amid":
                await stuck.wait()
            await sending(message)

        connection.send = send
        task = exchange(app, connection)
        if way == "left":
            await until(lambda: silent.runs)
            task.cancel()
        else:
            await until(lambda: len(begun) == (1 if way in ("send fails", "raises amid") else 2))
            connection.hang_up.set()
        await until(lambda: store.settled)
        # The listener hears of it in its turn.
        for _ in range(20):
            await asyncio.sleep(0)
        silent.go_on.set()
        await asyncio.wait_for(asyncio.wait((task,)), 30)
        assert (await ask(app)).problem == "outcome-unavailable"
        assert silent.runs == 1
        await app.idempotency.close()
        del task
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
        assert not told

    asyncio.run(run())


def test_an_application_that_fails_at_the_time_limit_frees_its_key(monkeypatch):
    """The failure comes between the timer and the task that would let its response through."""

    async def run():
        silent = Silent(LookupError("cursor"))
        end_silence = AppRun._end_silence

        def fail_first(app_run):
            silent.go_on.set()
            end_silence(app_run)

        monkeypatch.setattr(AppRun, "_end_silence", fail_first)
        app = protected(silent, SILENT)
        with pytest.raises(LookupError, match="cursor"):
            await asyncio.wait_for(exchange(app, Connection()), 30)
        await app.idempotency.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_response_that_has_ended_leaves_no_timer(monkeypatch):
    """It would keep the request and its response in memory for as long as the limit."""
    waiting = AppRun._wait_for_the_end

    def go_off(app_run, turns):
        app_run._end_silence()
        waiting(app_run, turns)

    monkeypatch.setattr(AppRun, "_wait_for_the_end", go_off)

    async def run():
        silent = Silent()
        silent.go_on.set()

        async def lingering(*exchanged):
            await silent(*exchanged)
            for _ in range(200):
                await asyncio.sleep(0)

        app = protected(lingering, Rule())
        assert (await ask(app)).body == b"first last"
        # Nor does one that goes off right after its last piece let it pass.
        assert (await ask(app)).is_replay
        timers = asyncio.get_running_loop()._scheduled
        assert not [timer for timer in timers if "_end_silence" in repr(timer)]
        await app.idempotency.close()

    asyncio.run(run())


# In threads.


class Pieces:
    """An endless iterable that counts what was asked of it, and knows whether it was closed."""

    def __init__(self):
        self.asked = 0
        self.closed = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        # Without a limit this would take all memory.
        assert self.asked < 10_000
        return b"x" * 100

    def close(self):
        self.closed += 1


@contextmanager
def _wsgi(pieces):
    def app(environ, start_response):
        start_response("201 Created", [])
        return pieces

    with Idempotency(MemoryStore()) as idempotency:
        yield WSGIIdempotencyMiddleware(app, idempotency, caller=bearer_token, rule=RULE)


@contextmanager
def _flask(pieces):
    app = Flask("endless")
    with Idempotency(MemoryStore()) as idempotency:
        retrysafe = Retrysafe(app, idempotency, caller=bearer_token)

        @app.post("/charges")
        @retrysafe.idempotent(policy=RULE.policy)
        def view():
            return FlaskResponse(pieces, 201)

        yield app


@pytest.mark.parametrize("making", [_wsgi, _flask])
def test_an_endless_response_in_a_thread_ends_with_its_client(making):
    """The same for WSGI and Flask: servers ask for pieces, and close what they no longer send."""
    pieces = Pieces()
    with making(pieces) as app:

        def reading(environ, start_response):
            result = app(environ, start_response)
            asked = pieces.asked
            assert asked == LIMIT_BYTES // 100 + 1
            assert ask_wsgi(app).problem == "outcome-unavailable"
            flow = iter(result)
            read = [next(flow) for _ in range(50)]
            assert len(read[0]) == LIMIT_BYTES + 100
            # One by one, as they are asked for.
            assert pieces.asked == asked + 49
            assert pieces.closed == 0
            result.close()
            assert pieces.closed == 1
            return read

        assert ask_wsgi(reading).status == 201
        assert ask_wsgi(app).problem == "outcome-unavailable"


# Responses that are cut short.


class _Passing(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        return await call_next(request)


def _starlette(endpoint, depth):
    return protected(
        Starlette(
            routes=[Route("/charges", endpoint, methods=["POST"])],
            middleware=[Middleware(_Passing)] * depth,
        ),
        Rule(),
    )


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_a_stream_that_raises_midway_is_never_stored_as_whole(depth, spec_version):
    """BaseHTTPMiddleware ends such a response as if it were whole, and raises afterwards. It is an
    exception of the operation like any other: the key is free, and the server reports it."""

    async def run():
        runs = []

        async def rows():
            yield b"id,amount\n"
            await asyncio.sleep(0)
            if len(runs) == 1:
                raise LookupError("cursor")
            yield b"1,100\n"

        async def export(request):
            runs.append(1)
            return StreamingResponse(rows(), media_type="text/csv")

        app = _starlette(export, depth)
        connection = Connection()
        scope = http_scope("POST", "/charges", headers_of('"k-1"'))
        scope["asgi"]["spec_version"] = spec_version
        with pytest.raises(LookupError, match="cursor"):
            await app(scope, connection.receive, connection.send)
        # No more than Starlette's own 500, which is sent before it raises.
        assert b"id,amount" not in _arrived(connection)
        second = await ask(app)
        assert (second.body, second.is_replay) == (b"id,amount\n1,100\n", False)
        third = await ask(app)
        assert (third.body, third.is_replay, len(runs)) == (second.body, True, 2)

    asyncio.run(run())


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_raises_after_a_response_never_runs_it_again(depth, is_late):
    """A background task that fails is no failure of the operation. Under BaseHTTPMiddleware one
    that fails at once cannot be told from a response that was cut short: done, and withheld."""

    async def run():
        runs, go_on = [], asyncio.Event()

        async def background():
            if is_late:
                await go_on.wait()
            raise LookupError("mail")

        async def charge(request):
            runs.append(1)
            return JSONResponse({"id": 1}, background=BackgroundTask(background))

        app = _starlette(charge, depth)
        connection = Connection()
        task = exchange(app, connection)
        await asyncio.wait_for(connection.answered.wait(), 10)
        go_on.set()
        with pytest.raises(LookupError, match="mail"):
            await task
        assert connection.reply.body == b'{"id":1}'
        again = await ask(app)
        if depth == 0 or is_late:
            assert (again.is_replay, again.body) == (True, b'{"id":1}')
        else:
            assert again.problem == "outcome-unavailable"
        assert runs == [1]

    asyncio.run(run())


# Real servers.


SERVERS = {
    "uvicorn": (
        "asgi",
        "uvicorn",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--log-level",
        "warning",
    ),
    "hypercorn": ("asgi", "hypercorn", "--bind", "127.0.0.1:{port}", "--graceful-timeout", "3"),
    "granian": (
        "asgi",
        "granian",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--interface",
        "asgi",
    ),
    "gunicorn": ("wsgi", "gunicorn", "--bind", "127.0.0.1:{port}", "--threads", "4"),
    "flask": ("flask", "gunicorn", "--bind", "127.0.0.1:{port}", "--threads", "4"),
}
ROOT = Path(__file__).resolve().parents[2]
REQUEST = (
    b"POST /endless HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nIdempotency-Key: k\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


@contextmanager
def _served(name, store):
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app, module, *options = SERVERS[name]
    command = [part.format(port=port) for part in options]
    process = subprocess.Popen(
        [sys.executable, "-m", module, "tests.attacks.endless_app:application", *command],
        cwd=ROOT,
        env={
            "ENDLESS_APP": app,
            "ENDLESS_STORE": str(store),
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "PATH": "/usr/bin:/bin",
        },
    )
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def _connected(process, port):
    give_up = time.monotonic() + 60
    while True:
        assert process.poll() is None
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=30)
        except OSError:
            assert time.monotonic() < give_up
            time.sleep(0.05)


def _peak_bytes(pid):
    """The most memory that a process and its children have had."""
    found = [
        pid,
        *(
            int(child)
            for path in Path(f"/proc/{pid}/task").glob("*/children")
            for child in path.read_text().split()
        ),
    ]
    lines = [
        line for each in found for line in Path(f"/proc/{each}/status").read_text().splitlines()
    ]
    return max(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_survives_an_endless_response(name, tmp_path):
    """The client gets far more than the limit, then leaves; the server's memory stays small, a
    retry is told that it is done, and SIGTERM finds nothing left to wait for."""
    with _served(name, tmp_path / "store.db") as (process, port):
        with closing(_connected(process, port)) as first:
            first.sendall(REQUEST)
            begun, size = first.recv(65_536), 0
            assert begun.startswith(b"HTTP/1.1 20")
            before = _peak_bytes(process.pid)
            while size < 64 * 1024 * 1024:
                size += len(first.recv(1024 * 1024))
        with closing(_connected(process, port)) as second:
            second.sendall(REQUEST)
            answer = b"".join(iter(lambda: second.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.1 409 ")
        assert b"idempotency_outcome_unavailable" in answer
        # Nothing like the 64 MB that have passed: a few pieces, and what a server buffers.
        assert _peak_bytes(process.pid) - before < 32 * 1024 * 1024
        process.terminate()
        assert process.wait(20) is not None

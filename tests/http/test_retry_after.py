"""A duplicate is told when to come back, and the client that we ship has the answer soon.

The run belongs to another process, as far as the one that answers can know: it has its own
`Idempotency` on the same store, whose clock is moved by the client's waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta

import httpx
import pytest

from retrysafe import AsyncIdempotency, Idempotency, Policy
from retrysafe.client import tries_of
from retrysafe.client.httpx import AsyncRetryTransport, RetryTransport
from retrysafe.http import IdempotencyMiddleware, WSGIIdempotencyMiddleware, bearer_token
from retrysafe.runtime.calls import calls_of
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock
from tests.http.driving import (
    BODY,
    Connection,
    SlowWSGI,
    ask,
    ask_wsgi,
    headers_of,
    http_scope,
)

HEADERS = {"authorization": "Bearer alice", "content-type": "application/json"}


class Elsewhere:
    """An operation of so many seconds in one process, and the client's time in another."""

    def __init__(self, seconds: float, **options) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(now_ms=self.clock)
        self.slow = SlowWSGI()
        self._seconds = seconds
        self.waited_seconds = 0.0
        owner = WSGIIdempotencyMiddleware(self.slow, Idempotency(self.store), caller=bearer_token)
        self._idem = Idempotency(self.store)
        self.app = WSGIIdempotencyMiddleware(
            self.slow, self._idem, **{"caller": bearer_token, **options}
        )
        self._running = threading.Thread(target=ask_wsgi, args=(owner,), kwargs={"key": "k-1"})
        self._running.start()
        assert self.slow.began.wait(30)

    # The client's clocks.

    def monotonic(self) -> float:
        return self.waited_seconds

    def now(self) -> float:
        return self.waited_seconds

    async def sleep(self, seconds: float) -> None:
        """Moves the store's clock, renews nothing, and ends the run when its time has come."""
        self.waited_seconds += seconds
        self.clock.advance(timedelta(milliseconds=round(seconds * 1000)))
        if self.waited_seconds >= self._seconds:
            self.end()

    def end(self) -> None:
        self.slow.may_end.set()
        self._running.join(30)


@pytest.fixture
def make_elsewhere():
    made: list[Elsewhere] = []

    def make(seconds: float, **options) -> Elsewhere:
        made.append(Elsewhere(seconds, **options))
        return made[-1]

    yield make
    for elsewhere in made:
        elsewhere.end()


@pytest.mark.parametrize("luck", [0.0, 0.3, 0.999])
@pytest.mark.parametrize(
    ("seconds", "within", "tries"), [(0.01, 1.5, 2), (1.0, 2.5, 3), (10.0, 20.0, 6)]
)
def test_the_default_client_has_the_answer_soon(make_elsewhere, seconds, within, tries, luck):
    """Whatever its random pauses are: 1 s within 2.5 s, 10 s with at most six tries."""
    elsewhere = make_elsewhere(seconds)
    transport = RetryTransport(
        httpx.WSGITransport(elsewhere.app), timing=elsewhere, random=lambda: luck
    )
    with httpx.Client(transport=transport, base_url="http://shop", headers=HEADERS) as client:
        response = client.post("/charges", content=BODY, headers={"idempotency-key": "k-1"})
    assert (response.status_code, elsewhere.slow.runs) == (201, 1)
    assert seconds <= elsewhere.waited_seconds <= within
    told = tries_of(response)
    assert told is not None
    assert told.count <= tries


def test_all_answers_tell_the_same(make_elsewhere):
    """409, 202 and the status page have one hint: by the record's claim and the store's clock."""
    elsewhere = make_elsewhere(60)
    for step, hint in ((0, "1"), (4, "4"), (9, "13")):
        elsewhere.clock.advance(timedelta(seconds=step))
        accepted = ask_wsgi(elsewhere.app, key="k-1", prefer="respond-async")
        conflict = ask_wsgi(elsewhere.app, key="k-1")
        status = ask_wsgi(elsewhere.app, "GET", "/idempotency-status/k-1", key=None)
        assert (accepted.status, conflict.status, status.status) == (202, 409, 200)
        told = [reply.headers["retry-after"] for reply in (accepted, conflict, status)]
        assert told == [hint] * 3
        # What is running now has ended a moment later, so no cache may keep any of it.
        for reply in (accepted, conflict, status):
            assert reply.headers["cache-control"] == "no-store"
    assert elsewhere.slow.runs == 1


def test_a_process_that_knows_the_operation_tells_what_is_left_of_it(make_elsewhere):
    """Runs of this process tell about a run of another one, also at the status page."""
    elsewhere = make_elsewhere(60)
    for _ in range(20):
        elsewhere.app.calls.run_times.add("POST *", 8.0)
    elsewhere.clock.advance(timedelta(seconds=5))
    conflict = ask_wsgi(elsewhere.app, key="k-1")
    status = ask_wsgi(elsewhere.app, "GET", "/idempotency-status/k-1", key=None)
    assert conflict.headers["retry-after"] == status.headers["retry-after"] == "4"


def test_it_ends_with_the_lease(make_elsewhere):
    """Nobody is sent away for longer than the owner's lease lasts; the rest is rounded down."""
    elsewhere = make_elsewhere(60)
    elsewhere.clock.advance(timedelta(seconds=26.5))
    assert ask_wsgi(elsewhere.app, key="k-1").headers["retry-after"] == "3"
    elsewhere.clock.advance(timedelta(seconds=3.4))
    assert ask_wsgi(elsewhere.app, key="k-1").headers["retry-after"] == "1"


def test_a_first_request_that_prefers_not_to_wait_is_told_the_usual_time():
    """202 at the start of a run: as long as such runs take."""

    async def play() -> None:
        idem = AsyncIdempotency(MemoryStore(), policy=Policy())
        may_end = asyncio.Event()

        async def app(scope, receive, send):
            await may_end.wait()
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        protected = IdempotencyMiddleware(app, idem, caller=bearer_token)
        first = await ask(protected, prefer="respond-async")
        for _ in range(20):
            calls_of(idem).run_times.add("POST *", 6.0)
        second = await ask(protected, key="other", prefer="respond-async")
        may_end.set()
        await idem.close()
        assert (first.status, first.headers["retry-after"]) == (202, "1")
        assert (second.status, second.headers["retry-after"]) == (202, "7")

    asyncio.run(play())


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "within", "tries"), [(1.0, 2.5, 3), (10.0, 20.0, 6)])
def test_with_real_clocks(seconds, within, tries):
    """The same in one process and with time as it passes: the leader's flight knows its start."""

    async def app(scope, receive, send):
        await asyncio.sleep(seconds)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def play() -> None:
        async with AsyncIdempotency(MemoryStore()) as idem:
            protected = IdempotencyMiddleware(app, idem, caller=bearer_token)
            scope = http_scope("POST", "/charges", headers_of("k-1"))
            owner = Connection()
            running = asyncio.create_task(protected(scope, owner.receive, owner.send))
            await asyncio.sleep(0.01)
            transport = AsyncRetryTransport(httpx.ASGITransport(protected))
            began = time.monotonic()
            async with httpx.AsyncClient(
                transport=transport, base_url="http://shop", headers=HEADERS
            ) as client:
                response = await client.post(
                    "/charges", content=BODY, headers={"idempotency-key": "k-1"}
                )
            taken = time.monotonic() - began
            await running
        assert (response.status_code, response.headers["idempotent-replayed"]) == (201, "true")
        assert taken <= within
        told = tries_of(response)
        assert told is not None
        assert told.count <= tries

    asyncio.run(play())

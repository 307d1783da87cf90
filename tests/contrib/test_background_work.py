"""Work that frameworks do after the response: on a first call, a replay, a crash and a resumption.

What `docs/background-work.md` says, with real applications. Death is a cancellation that nobody
asked for: the run ends there, and nothing of it is settled.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections, transaction
from django.http import JsonResponse
from django.urls import path
from fastapi import BackgroundTasks, FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse
from starlette.routing import Route

from retrysafe import GLOBAL, AsyncIdempotency, Attempt, Policy, RetrysafeError
from retrysafe.contrib import fastapi as for_fastapi
from retrysafe.contrib import starlette as for_starlette
from retrysafe.contrib.django.decorators import idempotent
from retrysafe.core.outbox.entries import EntryQuery
from retrysafe.observe import EventKind
from retrysafe.stores import Condition, MemoryStore
from retrysafe.testing import ManualClock
from retrysafe.workers import WorkerPolicy
from tests.contrib.django_visits import database, is_replay, open_shop
from tests.http.driving import ask

LEASE = timedelta(seconds=30)
POLICY = Policy(lease=LEASE)
WORKER = WorkerPolicy(back_off=timedelta(0))
SECRET = "0123456789abcdef"


class Died(asyncio.CancelledError):
    """The end of the process."""


class Shop:
    """One application of either framework, with a background task; a process each time."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self.clock = ManualClock()
        self.store = MemoryStore(now_ms=self.clock)
        self.runs: list[int] = []
        self.mails: list[int] = []
        # What the endpoint and the mail of the next attempt raise.
        self.endpoint_errors: list[BaseException] = []
        self.mail_errors: list[BaseException] = []
        self.is_stored = asyncio.Event()

    def observe(self, event) -> None:
        if event.kind is EventKind.COMPLETED:
            self.is_stored.set()

    def charge(self, attempt) -> None:
        self.attempt = attempt
        self.runs.append(attempt.number)
        attempt.outbox.stage("receipts", "Thank you")
        if self.endpoint_errors:
            raise self.endpoint_errors.pop()

    async def mail(self, number: int) -> None:
        await self.is_stored.wait()
        if self.mail_errors:
            raise self.mail_errors.pop()
        self.mails.append(number)

    def process(self):
        idem = AsyncIdempotency(
            self.store, policy=POLICY, secret=SECRET, cache=False, observers=[self.observe]
        )
        self.is_stored.clear()
        if self._framework == "starlette":
            retrysafe = for_starlette.Retrysafe(idem, caller=GLOBAL)

            @for_starlette.idempotent(resumable=True)
            async def charge(request):
                attempt = request.state.idempotency
                self.charge(attempt)
                background = BackgroundTask(self.mail, attempt.number)
                return JSONResponse({"run": attempt.number}, 201, background=background)

            app = Starlette(routes=[Route("/charges", charge, methods=["POST"])])
            retrysafe.install(app)
        else:
            retrysafe = for_fastapi.Retrysafe(idem, caller=GLOBAL)
            app = FastAPI()
            retrysafe.install(app)

            @app.post("/charges", status_code=201)
            async def charge(
                background: BackgroundTasks,
                attempt: Annotated[Attempt, for_fastapi.idempotent(resumable=True)],
            ) -> dict[str, int]:
                self.charge(attempt)
                background.add_task(self.mail, attempt.number)
                return {"run": attempt.number}

        retrysafe.refresh()
        return app, idem

    async def entries(self) -> int:
        """How many receipts are staged."""
        return len(await self.store.outbox.list_entries(EntryQuery()))


def in_both(scenario):
    """A test in an event loop of its own, with each framework."""

    @pytest.mark.parametrize("framework", ["starlette", "fastapi"])
    @functools.wraps(scenario)
    def run(framework):
        async def main():
            await scenario(Shop(framework))

        asyncio.run(main())

    del run.__wrapped__
    return run


@in_both
async def test_a_background_task_runs_with_the_first_response_and_not_with_its_replays(shop):
    """Once, after the response was complete."""
    app, _ = shop.process()
    first, second = await ask(app), await ask(app)
    assert (first.status, second.is_replay) == (201, True)
    assert (shop.runs, shop.mails) == ([1], [1])


@in_both
async def test_a_background_task_has_no_claim(shop):
    """The attempt has ended: neither a step nor an entry of its would ever be settled."""
    refused: list[str] = []

    async def mail(number):
        await shop.is_stored.wait()
        for use in (lambda: shop.attempt.step("mail", len, ""), shop.stage):
            try:
                await use()
            except RetrysafeError as error:
                refused.append(str(error))

    async def stage():
        shop.attempt.outbox.stage("receipts", "late")

    shop.mail, shop.stage = mail, stage
    app, _ = shop.process()
    assert (await ask(app)).status == 201
    assert [text.rpartition(":")[2] for text in refused] == [
        " nothing more can be done in it",
        " stage before that",
    ]
    assert await shop.entries() == 1


@in_both
async def test_a_background_task_that_fails_changes_nothing_of_the_outcome(shop):
    """The server hears of it; a retry gets the response, and the task does not run again."""
    app, _ = shop.process()
    shop.mail_errors.append(ConnectionError("the mail server is down"))
    with pytest.raises(ConnectionError):
        await ask(app)
    assert (await ask(app)).is_replay
    assert (shop.runs, shop.mails) == ([1], [])


@in_both
async def test_a_background_task_is_lost_in_a_crash_and_an_outbox_entry_is_not(shop):
    """The outcome stands, so neither a retry nor a worker runs anything again."""
    app, _ = shop.process()
    shop.mail_errors.append(Died())
    assert (await ask(app)).status == 201
    shop.clock.advance(LEASE)
    app, idem = shop.process()
    assert (await idem.worker(WORKER, app=app).run_once())["recovery"].resumed == 0
    assert (await ask(app)).is_replay
    assert (shop.runs, shop.mails) == ([1], [])
    assert await shop.entries() == 1


@in_both
async def test_a_background_task_of_a_resumed_request_runs_in_the_worker(shop):
    """Of the attempt that ends it; the worker waits for it before it says that it is done."""
    app, _ = shop.process()
    shop.endpoint_errors.append(Died())
    with pytest.raises(asyncio.CancelledError):
        await ask(app)
    assert shop.mails == []
    shop.clock.advance(LEASE)
    app, idem = shop.process()
    report = (await idem.worker(WORKER, app=app).run_once())["recovery"]
    assert (report.resumed, report.failed) == (1, 0)
    assert (shop.runs, shop.mails) == ([1, 2], [2])
    assert await shop.entries() == 1


# Django.


@dataclass
class Till:
    """What the views of Django did, and what their hook raises."""

    mails: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)


till = Till()


def mail() -> None:
    if till.errors:
        raise till.errors.pop()
    till.mails.append("sent")


def insert() -> None:
    with connections["shop"].cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES ('pen')")


def order(request):
    """Writes in a transaction of its own, and mails when that has committed."""
    attempt = request.idempotency
    till.runs.append(attempt.number)
    with transaction.atomic(using="shop"):
        insert()
        transaction.on_commit(mail, using="shop")
    return JsonResponse({"run": attempt.number}, status=201)


@contextmanager
def in_transaction():
    with transaction.atomic(using="shop"):
        yield connections["shop"]


@idempotent(transaction=in_transaction)
def atomic_order(request):
    """Writes in the transaction of its outcome, and mails when that has committed."""
    insert()
    request.idempotency.outbox.stage("receipts", "Thank you")
    transaction.on_commit(mail, using="shop")
    return JsonResponse({"run": 1}, status=201)


urlpatterns = [
    path("orders", idempotent(resumable=True)(order)),
    path("atomic-orders", atomic_order),
]


@pytest.fixture
def project(tmp_path):
    """A project on one file, with its keys and its orders."""
    till.__init__()
    # The file has the real clock; nothing here may wait for long.
    policy = Policy(lease=timedelta(milliseconds=100))
    with (
        database(tmp_path / "shop.db") as url,
        open_shop(
            "wsgi",
            settings={"ROOT_URLCONF": __name__},
            STORE=url,
            POLICY=policy,
            SECRET=SECRET,
            CACHE=False,
        ) as shop,
    ):
        shop.file = tmp_path / "shop.db"
        assert shop.idem.read("k-1", caller="user:alice") is None  # The tables are there now.
        yield shop


def rows(shop, table: str) -> int:
    with closing(sqlite3.connect(shop.file)) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


@pytest.mark.parametrize("url", ["/orders", "/atomic-orders"])
def test_a_commit_hook_runs_with_the_first_response_and_not_with_its_replays(project, url):
    """Once, when the transaction has committed."""
    first, second = project.post(url), project.post(url)
    assert (first.status_code, is_replay(second)) == (201, True)
    assert till.mails == ["sent"]
    assert rows(project, "orders") == 1


def test_a_commit_hook_of_the_outcomes_transaction_is_lost_in_a_crash(project):
    """Rows, outcome and outbox entry stand; the hook does not run again."""
    till.errors.append(Died())
    with pytest.raises(asyncio.CancelledError):
        project.post("/atomic-orders")
    assert is_replay(project.post("/atomic-orders"))
    assert till.mails == []
    assert rows(project, "orders") == rows(project, "retrysafe_outbox") == 1


def test_a_commit_hook_of_the_outcomes_transaction_that_fails_changes_nothing_of_it(project):
    """Nobody can tell whether the commit itself failed: 503, and a retry gets the response."""
    till.errors.append(ConnectionError("the mail server is down"))
    assert project.post("/atomic-orders").status_code == 503
    replay = project.post("/atomic-orders")
    assert (replay.status_code, is_replay(replay)) == (201, True)
    assert (till.mails, rows(project, "orders")) == ([], 1)


def test_a_crash_in_a_commit_hook_of_another_transaction_runs_the_view_again(project):
    """By a worker, too: the row is there twice, which a unique constraint or a step prevents."""
    till.errors.append(Died())
    with pytest.raises(asyncio.CancelledError):
        project.post("/orders")
    until = time.monotonic() + 30
    while project.idem.read("k-1", caller="user:alice").condition is not Condition.ABANDONED:
        assert time.monotonic() < until
        time.sleep(0.01)
    report = project.idem.worker(WORKER, app=WSGIHandler()).run_once()["recovery"]
    assert report.resumed == 1
    assert (till.runs, till.mails) == ([1, 2], ["sent"])
    assert rows(project, "orders") == 2

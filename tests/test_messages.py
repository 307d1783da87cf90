"""Typical mistakes of the first hour: every message names what to do.

One row for each; a message that leaves its reader alone is a defect like any other.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sqlite3
import subprocess
import sys
from datetime import timedelta
from typing import Annotated

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from retrysafe import (
    GLOBAL,
    AsyncIdempotency,
    Attempt,
    Idempotency,
    InFlight,
    Policy,
    StepRetry,
    current_attempt,
)
from retrysafe.contrib.fastapi import Retrysafe, idempotent
from retrysafe.http import FieldsKey, IdempotencyMiddleware, Rule, bearer_token
from retrysafe.stores import MemoryStore
from tests.forking import exit_code, fork


def idem(store="memory://", **options):
    return Idempotency(store, **{"caller": "shop", **options})


def charge(amount: int) -> int:
    return amount


async def charge_async(amount: int) -> int:
    return amount


def inside_itself(**options):
    made = idem()
    asked = {"name": "pay", "request": 1, **options}
    made.run("k", lambda: made.run("k", lambda: 1, **asked), **asked)


def app_with(endpoint) -> TestClient:
    app = FastAPI()
    retrysafe = Retrysafe(AsyncIdempotency(MemoryStore()), caller=GLOBAL)
    retrysafe.install(app)
    app.router.lifespan_context = retrysafe.lifespan
    app.post("/")(endpoint)
    return TestClient(app)


def step_in_plain_endpoint():
    def endpoint(attempt: Annotated[Attempt, idempotent()]) -> list[int]:
        return list(attempt.step("charge", charge, 1))

    with app_with(endpoint) as client:
        client.post("/", headers={"Idempotency-Key": "k"})


def in_memory_atomic():
    with idem().atomic(sqlite3.connect(":memory:"), "k"):
        pass


WAITS = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=20))

MISTAKES = {
    "no caller": (lambda: Idempotency("memory://").run("k", charge, 1), "caller=GLOBAL"),
    "a number as the caller": (lambda: idem(caller=7), "str(…)"),
    "an unset variable as the store": (lambda: idem(None), "a URL such as 'sqlite:///app.db'"),
    "a URL of another database": (lambda: idem("mysql://h/x"), "use sqlite:///path/to/file.db"),
    "SQLite without a file": (lambda: idem("sqlite:///:memory:"), "memory://"),
    "two slashes": (lambda: idem("sqlite://app.db"), "four slashes for an absolute path"),
    "an unknown driver in the URL": (lambda: idem("postgresql+pg8000://h/x"), "leave it out"),
    "a hidden password": (lambda: idem("postgresql://u:***@h/x"), "hide_password=False"),
    "a folder that is not there": (
        lambda: idem("sqlite:////nowhere/shop.db").run("k", charge, 1),
        "make the folder",
    ),
    "terminal as a text": (lambda: Policy(terminal="ValueError"), "terminal=(ValueError,)"),
    "a step's terminal as a text": (
        lambda: idem().run(
            "k", lambda: current_attempt().step("s", charge, 1, terminal="E"), request=None
        ),
        "terminal=(ValueError,)",
    ),
    "StepRetry on a text": (lambda: StepRetry(on="ValueError"), "classes of exceptions"),
    "a policy as a dict": (lambda: idem(policy={"lease": 5}), "policy takes a Policy"),
    "the lease as a number": (lambda: Policy(lease=30), "timedelta"),
    "a lambda without its inputs": (lambda: idem().run("k", lambda: charge(1)), "request="),
    "a call instead of a function": (lambda: idem().run("k", charge(1)), "function"),
    "an async operation in Idempotency": (
        lambda: idem().run("k", charge_async, 1),
        "AsyncIdempotency",
    ),
    "an empty key": (lambda: idem().run("", charge, 1), "key"),
    "a nested call with the same key": (inside_itself, "this call is inside of it"),
    "the same, and it would wait": (lambda: inside_itself(policy=WAITS), "a key of its own"),
    "a step in a plain endpoint": (step_in_plain_endpoint, "'async def'"),
    "atomic mode in memory": (in_memory_atomic, "In tests use sqlite:///"),
    "a short secret": (lambda: idem(secret="short"), "16"),
    "a natural key without a window": (lambda: FieldsKey("/order"), "window=FOREVER"),
    "idempotent as a decorator": (lambda: idempotent(charge), "dependencies=[idempotent()]"),
    "the blocking object in ASGI": (
        lambda: IdempotencyMiddleware(lambda: None, idem(), caller=bearer_token),
        "AsyncIdempotency",
    ),
    "a rule's path without its slash": (lambda: Rule(path="orders"), "slash"),
    "a current attempt outside": (lambda: current_attempt().child_key("x"), "attempt"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_what_to_do(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(Exception) as told:
        make()
    assert words in str(told.value), str(told.value)


def test_a_database_that_is_not_there_is_no_outage(postgres_server):
    """It is told once, with both drivers, and trying again is no advice."""
    url = postgres_server.url("nowhere")

    async def ask():
        async with AsyncIdempotency(url, caller="shop") as made:
            await made.check()

    for check in (lambda: idem(url).check(), lambda: asyncio.run(ask())):
        with pytest.raises(Exception, match=r"there is no such database.*createdb") as told:
            check()
        assert told.value.retryable is False


def test_an_application_without_its_tables_does_not_start(postgres_server):
    """The command that makes them stands in the message, with the user's own store."""
    url = postgres_server.url()
    retrysafe = Retrysafe(AsyncIdempotency(f"{url}?schema=nowhere"), caller=GLOBAL)
    app = FastAPI(lifespan=retrysafe.lifespan)
    with pytest.raises(Exception) as told, TestClient(app):
        pass
    assert f'retrysafe migrate --store "{url}?schema=nowhere"' in str(told.value)
    gc.collect()  # A connection that was left open is warned of here.


def test_an_application_starts_while_its_store_is_away(caplog):
    url = "postgresql://shop@127.0.0.1:1/shop?connect_timeout=1"
    retrysafe = Retrysafe(AsyncIdempotency(url), caller=GLOBAL)
    with TestClient(FastAPI(lifespan=retrysafe.lifespan)):
        assert "does not answer at the start" in caplog.text


def test_the_blocking_object_in_a_running_loop_is_told_once(tmp_path, caplog):
    async def ask(made):
        return [made.run(f"k-{number}", charge, 1) for number in range(2)]

    with idem(f"sqlite:///{tmp_path / 'a.db'}") as made, caplog.at_level(logging.WARNING):
        asyncio.run(ask(made))
    assert caplog.text.count("use AsyncIdempotency, and await it") == 1


def test_memory_in_forked_workers_is_told():
    made = idem()

    def child():
        with caught() as lines:
            made.run("k", charge, 1)
        assert any("Use sqlite:/// or postgresql://" in line for line in lines), lines

    assert exit_code(fork(child)) == 0


class caught(logging.Handler):  # noqa: N801
    """What is logged inside, in a process that pytest does not look after."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("retrysafe").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("retrysafe").removeHandler(self)


def test_django_without_django_names_the_extra(tmp_path):
    program = (
        "import sys; sys.modules['django'] = None\n"
        "try:\n    import retrysafe.contrib.django.decorators\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "its extra django" in ended.stdout

"""Metrics count what happened: every result once, over every door, on every store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest

from retrysafe.core.events import Result
from tests.observe.doors import Asgi, Door, Functions, Messages, Refused, Wsgi

# What HTTP has alone: a service that fails open, and paths without a rule.
OF_HTTP = {Result.UNPROTECTED, Result.UNMATCHED}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request, tmp_path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("migrated_url")
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'keys.db'}"


@pytest.fixture(params=[Functions, Wsgi, Asgi, Messages])
def door(request, url) -> Iterator[Door]:
    made = request.param(url)
    yield made
    made.close()


def results(door: Door) -> dict[str, float]:
    """What the scrape says, over all operations."""
    found: dict[str, float] = {}
    for metric in door.metrics.registry.collect():
        for sample in metric.samples:
            if sample.name == "retrysafe_calls_total":
                result = sample.labels["result"]
                found[result] = found.get(result, 0) + sample.value
    return found


def in_a_thread(act, *args, **options) -> None:
    """Acts as nobody who is at work already."""
    thread = threading.Thread(target=act, args=args, kwargs=options)
    thread.start()
    thread.join()


def test_each_result_is_counted_once(door):
    """Each call under exactly one: what was driven is what is counted."""
    driven: dict[str, float] = {}

    def ask(*expected: Result, key: str, **options) -> None:
        door.ask(key, **options)
        for result in expected:
            driven[result] = driven.get(result, 0) + 1
        assert results(door) == driven, expected

    ask(Result.EXECUTED, key="a")
    ask(Result.REPLAYED, key="a")
    ask(Result.MISMATCHED, key="a", body="b")
    ask(Result.FAILED, key="b", behave=lambda: Refused(for_good=True))
    ask(Result.RELEASED, key="c", behave=lambda: Refused(for_good=False))
    ask(Result.EXHAUSTED, key="c")
    ask(Result.WITHHELD, key="d", behave=object)
    ask(Result.LOST, key="e", behave=door.take_away)
    ask(Result.IN_FLIGHT, Result.EXECUTED, key="f", behave=lambda: door.ask("f"))
    ask(
        Result.WAIT_TIMED_OUT,
        Result.EXECUTED,
        key="g",
        # As somebody else: who is inside of the call itself is told so at once.
        behave=lambda: in_a_thread(door.ask, "g", waits=True),
        waits=True,
    )
    if isinstance(door, Wsgi | Asgi):
        door.send("/unknown", "h")
        driven[Result.UNMATCHED] = 1
    door.break_down()
    ask(Result.STORE_UNAVAILABLE, key="i")
    if isinstance(door, Wsgi | Asgi):
        door.send("/pay", "j", opens=True)
        driven[Result.UNPROTECTED] = 1
    assert results(door) == driven
    missing = set(Result) - set(driven)
    assert missing == (set() if isinstance(door, Wsgi | Asgi) else OF_HTTP)
    text = generate_latest(door.metrics.registry).decode()
    assert "retrysafe_pending 0.0" in text

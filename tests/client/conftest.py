from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client.clients import CLIENTS
from tests.client.server import ScriptedServer


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    """After each test the server's threads have ended."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def server(_no_threads_left) -> Iterator[ScriptedServer]:
    """A server on a free port of this machine."""
    made = ScriptedServer()
    yield made
    made.close()


@pytest.fixture(params=CLIENTS)
def make_client(request, server) -> Iterator[Callable[..., Any]]:
    """Makes clients of one library for the server; closes them with the test."""
    made = []

    def make(*, url: str | None = None, **options: Any) -> Any:
        made.append(CLIENTS[request.param](url or server.url, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.fixture
def client(make_client) -> Any:
    """A client with the default policy, whose waits pass at once."""
    return make_client()

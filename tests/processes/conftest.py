from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.processes import downstream
from tests.processes.children import Child
from tests.servers.postgres import PostgresServer


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts children, and ends all of them with the test."""
    children: list[Child] = []

    def start_child(function: Callable[..., Any], *args: Any) -> Child:
        child = Child(function, args)
        children.append(child)
        return child

    yield start_child
    for child in children:
        child.end()


@pytest.fixture
def ports(start) -> Iterator[dict[str, int]]:
    """The services of a checkout, each a process of its own, by their ports."""
    services = {name: start(downstream.serve, name) for name in downstream.SERVICES}
    yield {name: service.receive() for name, service in services.items()}
    for service in services.values():
        service.send("stop")
        service.result()


@pytest.fixture
def database(tmp_path) -> str:
    """A path for a SQLite file."""
    return str(tmp_path / "keys.db")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request) -> str:
    """A store that processes share: each kind in its turn."""
    if request.param == "sqlite":
        return f"sqlite:///{request.getfixturevalue('database')}"
    return request.getfixturevalue("migrated_url")


@pytest.fixture
def ledger(tmp_path) -> str:
    """A path for the ledger."""
    return str(tmp_path / "ledger")


@pytest.fixture(scope="module")
def mortal_server():
    """A server with full durability that a test may kill.

    Nothing but a commit makes it write its log down, so that a crash forgets what is uncommitted.
    """
    with PostgresServer(settings={"wal_writer_delay": "10s"}) as server:
        yield server

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator

import pytest

from retrysafe.stores import MemoryStore
from retrysafe.stores.sqlite import file
from tests.runtime.objects import AsyncSubject, BlockingSubject, Subject


@pytest.fixture
def own_threads() -> Callable[[], list[str]]:
    """The threads of retrysafe that run since this test began, by their names.

    Others are not the test's: the one for large bodies stays with the process, and an attack on
    loops that end without `close` leaves workers for a while.
    """
    before = set(threading.enumerate())

    def started() -> list[str]:
        threads = set(threading.enumerate()) - before
        return [item.name for item in threads if item.name.startswith("retrysafe")]

    return started


@pytest.fixture(autouse=True)
def _no_leaks(monkeypatch, own_threads) -> Iterator[None]:
    """After each test no thread of retrysafe runs and no connection is open."""
    connections: list[sqlite3.Connection] = []
    connect = file.connect

    def connect_and_note(*args, **kwargs) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        connections.append(connection)
        return connection

    monkeypatch.setattr(file, "connect", connect_and_note)
    yield
    assert not own_threads(), f"threads left behind: {own_threads()}"
    assert not [item for item in connections if _is_open(item)], "connections left behind"


def _is_open(connection: sqlite3.Connection) -> bool:
    try:
        connection.total_changes  # noqa: B018 — reading it is how a closed connection tells.
    except sqlite3.ProgrammingError:
        return False
    return True


@pytest.fixture
def url(tmp_path) -> str:
    """The URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'keys.db'}"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def shared(request, url) -> MemoryStore | str:
    """A store that several objects share; ask for it before them, see `database_url`."""
    if request.param == "memory":
        return MemoryStore()
    return url if request.param == "sqlite" else request.getfixturevalue("migrated_url")


@pytest.fixture(params=["blocking", "async"])
def subject(request) -> Iterator[Callable[..., Subject]]:
    """Makes objects of one kind, to be used in the same plain way; closes them with the test."""
    made: list[Subject] = []
    with asyncio.Runner() as runner:

        def make(store, **options) -> Subject:
            if request.param == "blocking":
                made.append(BlockingSubject(store, **options))
            else:
                made.append(AsyncSubject(runner, store, **options))
            return made[-1]

        yield make
        for item in made:
            assert item.close() is True

"""A SQLite file, and what opens it: stores with an injected clock, and another program."""

import sqlite3
from contextlib import closing

import pytest

from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import Probe


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A class of the suite may leave some of its cases to the long run."""
    for item in items:
        is_in_every_run = getattr(getattr(item, "cls", None), "is_in_every_run", None)
        if is_in_every_run is not None and not is_in_every_run(item):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def path(tmp_path):
    """A file that does not exist yet."""
    return tmp_path / "records.db"


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def open_probe(path, clock):
    """Makes probes over stores on the same file, and closes the stores."""
    stores = []

    def open_one(**options):
        store = SqliteStore(path, **{"now_ms": clock, **options})
        stores.append(store)
        return Probe(store, clock, run_sync)

    yield open_one
    for store in stores:
        run_sync(store.close())


@pytest.fixture
def probe(open_probe):
    return open_probe()


@pytest.fixture
def rival(path, probe):
    """Another program's connection to the same file, which never waits."""
    probe.find()
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
        yield connection

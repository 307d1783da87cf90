from __future__ import annotations

import pytest

from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore, SqliteStore
from retrysafe.stores.opening import postgres_store


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request, tmp_path):
    """A store for threads: each kind in its turn."""
    if request.param == "memory":
        made = MemoryStore()
    elif request.param == "sqlite":
        made = SqliteStore(tmp_path / "relay.db")
    else:
        made = postgres_store(request.getfixturevalue("migrated_url"), is_async=False)
    yield made
    run_sync(made.close())

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest

from retrysafe import open_store
from retrysafe.runtime.drive import run_sync
from tests.servers.postgres import PostgresServer


@pytest.fixture
def documents_database(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a database as a reader has it who has run `retrysafe migrate`."""
    name = f"docs_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        store = open_store(postgres_server.url(name))
        run_sync(store.migrate())
        run_sync(store.close())
        yield postgres_server.url(name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")

"""The servers of a test run: started once when the first test asks, stopped with the run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.servers.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """PostgreSQL 18. Without fsync: these tests kill processes, never the machine."""
    server = PostgresServer(settings={"fsync": "off", "max_connections": "200"})
    try:
        yield server.start()
    finally:
        server.remove()


@contextmanager
def schema_on(url: str) -> Iterator[str]:
    """The URL with the name of a schema that nobody else uses; dropped at the end."""
    schema = f"test_{uuid.uuid4().hex[:12]}"
    try:
        yield f"{url}?schema={schema}"
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A URL with a schema of its own; the schema is not migrated yet."""
    with schema_on(postgres_server.url()) as url:
        yield url

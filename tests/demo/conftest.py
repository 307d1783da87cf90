"""Demos on both databases; each is a process, and none outlives its test."""

from __future__ import annotations

import psycopg
import pytest

from tests.demo.server import DemoServer
from tests.servers.fixtures import schema_on

STORES = ["sqlite", "postgresql"]
# For tests that wait for the demo's lease of ten seconds: on one store in every run.
MOSTLY_SQLITE = pytest.mark.parametrize(
    "store_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True
)


def _store_url(kind, request, tmp_path_factory):
    """A store of its own, and the ledger that the demo keeps beside it."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('demo') / 'demo.db'}"
        return
    plain = request.getfixturevalue("postgres_server").url()
    with schema_on(plain) as url:
        yield url
        with psycopg.connect(plain, autocommit=True) as connection:
            schema = url.rpartition("=")[2]
            connection.execute(f"DROP SCHEMA IF EXISTS {schema}_demo CASCADE")


@pytest.fixture(params=STORES)
def store_url(request, tmp_path_factory):
    yield from _store_url(request.param, request, tmp_path_factory)


@pytest.fixture(scope="module", params=STORES)
def demo(request, tmp_path_factory):
    """One demo for the tests of a module that leave it as it was."""
    for url in _store_url(request.param, request, tmp_path_factory):
        server = DemoServer(url)
        try:
            yield server
            code, errors = server.stop()
            assert (code, errors) == (0, "")
        finally:
            server.end()


@pytest.fixture
def start_demo():
    """Starts demos that the test may kill."""
    made = []

    def start(store, port=0):
        server = DemoServer(store, port)
        made.append(server)
        return server

    yield start
    for server in made:
        server.end()

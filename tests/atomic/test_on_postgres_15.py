"""Atomic mode and complete_in on the oldest server: the same tests, with two of the drivers."""

from __future__ import annotations

import pytest

from tests.atomic import drivers, test_complete_in, test_drivers
from tests.atomic.conftest import migrated_on
from tests.servers.fixtures import again

# The races of the store suite meet this server in every run.
pytestmark = pytest.mark.long

globals().update(again(test_drivers, test_complete_in))


@pytest.fixture(scope="module")
def migrated_url(postgres_15):
    with migrated_on(postgres_15) as url:
        yield url


@pytest.fixture(params=[drivers.Psycopg, drivers.Asyncpg], ids=lambda driver: driver.__name__)
def driver(request, shop):
    """The two drivers that all others are built on."""
    made = request.param(shop.server_url, shop.schema)
    yield made
    made.end()


def test_this_is_the_oldest_server(shop):
    """What is above would say nothing if it ran on the newest."""
    ((version,),) = shop.connection.execute("SHOW server_version_num").fetchall()
    assert 150_000 <= int(version) < 160_000

"""Migrations, partitions, lists and the view on the oldest server: the same tests once more.

The rest of this folder tests the library's own decisions, and the store suite runs on both servers.
"""

from __future__ import annotations

import pytest

from tests.postgres import (
    test_postgres_listing,
    test_postgres_migrations,
    test_postgres_partitions,
    test_postgres_view,
)
from tests.servers.fixtures import again

# The races of the store suite meet this server in every run.
pytestmark = pytest.mark.long

globals().update(
    again(
        test_postgres_listing,
        test_postgres_migrations,
        test_postgres_partitions,
        test_postgres_view,
        without=[
            # Slow, and nothing in them depends on the server's version: ten interpreters that
            # start, and bytes that the store suite replays as well.
            "test_ten_processes_that_start_at_once_migrate_once",
            "test_replay_gives_the_bytes_that_were_stored",
        ],
    )
)


@pytest.fixture(scope="module")
def postgres_server(postgres_15):
    return postgres_15


def test_this_is_the_oldest_server(connection):
    """What is above would say nothing if it ran on the newest."""
    ((version,),) = connection.execute("SHOW server_version_num").fetchall()
    assert 150_000 <= int(version) < 160_000

"""What `diagnose` reads from the oldest server: the same tests as on the newest.

Those that judge the pooler, the host's clock or the command are not repeated.
"""

from __future__ import annotations

import pytest

from tests.servers.fixtures import again, postgres_15_binaries
from tests.servers.postgres import PostgresServer
from tests.stores import test_postgres_diagnosis

# The races of the store suite meet this server in every run.
pytestmark = pytest.mark.long

globals().update(
    again(
        test_postgres_diagnosis,
        without=[
            "test_a_server_without_fsync_is_found",
            "test_a_skewed_host_is_a_note",
            "test_an_old_server_is_found",
            "test_doctor_exits_with_the_verdict",
            "test_prepared_statements_behind_pgbouncer_are_found",
            "test_the_first_limit_that_ends_it_counts",
            "test_the_first_use_behind_pgbouncer_warns_of_prepared_statements",
            "test_the_first_use_of_a_sound_server_says_nothing",
            "test_the_first_use_warns_of_forgetful_settings",
        ],
    )
)


@pytest.fixture(scope="module")
def sound_server():
    """PostgreSQL 15 as it comes: the one of the other tests runs without fsync."""
    server = PostgresServer(
        postgres_15_binaries(), settings={**test_postgres_diagnosis.SOUND, "jit": "off"}
    )
    try:
        yield server.start()
    finally:
        server.remove()


def test_this_is_the_oldest_server(sound_server):
    """What is above would say nothing if it ran on the newest."""
    assert sound_server.binaries == postgres_15_binaries()

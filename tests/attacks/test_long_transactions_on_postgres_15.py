"""Long transactions on the oldest server: the interleavings once more.

What is attacked and what must hold is said in `test_long_transactions`.
"""

from __future__ import annotations

import pytest

from tests.attacks import test_long_transactions
from tests.servers.fixtures import again, pgbouncer_of

# The races of the store suite meet this server in every run.
pytestmark = pytest.mark.long

globals().update(
    again(
        test_long_transactions,
        without=[
            # Slow, and made of what the others look at one by one.
            "test_operations_in_long_transactions_run_once",
            "test_a_long_transaction_on_a_snapshot_commits_when_it_is_tried_again",
            "test_a_step_on_sqlite_commits_with_a_lease_that_holds",
        ],
    )
)


@pytest.fixture(scope="module")
def postgres_server(postgres_15):
    return postgres_15


@pytest.fixture(scope="module")
def pgbouncer(postgres_server):
    with pgbouncer_of(postgres_server) as bouncer:
        yield bouncer


def test_this_is_the_oldest_server(scene):
    """What is above would say nothing if it ran on the newest."""
    ((version,),) = scene.sql("SHOW server_version_num")
    assert 150_000 <= int(version) < 160_000

"""The soak in small: what `make soak` does with hundreds of requests, in some seconds."""

from __future__ import annotations

import pytest

from tests.processes.resumed_soak import soaked


@pytest.mark.long
@pytest.mark.parametrize("kind", ["app", "threads"])
def test_accepted_requests_survive_servers_and_workers_that_are_killed(kind):
    """Each order is there once, and every client reads its response."""
    done = soaked(kind, 60, seed=1, minutes=2)
    assert done.kills

"""A server starts when the first of its cases is asked for; its cases then play side by side."""

from __future__ import annotations

import pytest

from tests.http_cases.playing import played_on
from tests.http_cases.serving import KINDS_BY_NAME


@pytest.fixture(scope="session")
def results(request):
    """What became of every selected case on a server: None, or what was wrong."""
    selected = {}
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "server_name" in parameters:
            selected.setdefault(parameters["server_name"], []).append(parameters["case"])
    played = {}

    def results_of(server_name):
        if server_name not in played:
            played[server_name] = played_on(KINDS_BY_NAME[server_name], selected[server_name])
        return played[server_name]

    return results_of

"""Servers start when a case needs them, all at once; the cases of a server play side by side."""

from __future__ import annotations

import asyncio

import pytest

from tests.http_cases.playing import Play, Server
from tests.http_cases.serving import KINDS_BY_NAME, start
from tests.http_cases.stage import Stage

# Enough to hide the pauses of single cases, few enough for two cores.
PLAYS_AT_ONCE = 8


@pytest.fixture(scope="session")
def fleet(request):
    """The servers that the selected cases need, by name."""
    names = dict.fromkeys(
        item.callspec.params["server_name"]
        for item in request.session.items
        if "server_name" in getattr(getattr(item, "callspec", None), "params", ())
    )
    running = {name: start(KINDS_BY_NAME[name]) for name in names}
    try:
        for server in running.values():
            server.wait_until_ready()
        yield running
    finally:
        for server in running.values():
            server.stop()


@pytest.fixture(scope="session")
def results(request, fleet):
    """What became of every selected case on a server: None, or what was wrong."""
    played = {}

    def results_of(server_name):
        if server_name not in played:
            selected = [
                item.callspec.params["case"]
                for item in request.session.items
                if getattr(item, "callspec", None) is not None
                and item.callspec.params.get("server_name") == server_name
            ]
            played[server_name] = asyncio.run(_play_all(fleet[server_name], selected))
        return played[server_name]

    return results_of


async def _play_all(running, selected):
    stage = Stage()
    listener = await stage.open(running.directory)
    server = Server(running.urls, running.directory, running.kind.traits, stage)
    turns = asyncio.Semaphore(PLAYS_AT_ONCE)

    async def played(case):
        # Its mount first: a case that waits for it must not keep others from playing.
        async with server.turn(case), turns:
            try:
                await Play(case, server).perform()
            except Exception as error:
                return error
        return None

    try:
        outcomes = await asyncio.gather(*(played(case) for case in selected))
    finally:
        listener.close()
    return {case.name: outcome for case, outcome in zip(selected, outcomes, strict=True)}

"""Django: requests that a worker finishes without their client."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from django.core.handlers.wsgi import WSGIHandler

from retrysafe import Policy
from retrysafe.http import Rule, resumed_caller
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock
from retrysafe.workers import WorkerPolicy
from tests.contrib import django_shop
from tests.contrib.django_visits import MIDDLEWARE, is_replay, open_shop

LEASE = timedelta(seconds=30)
WORKER = WorkerPolicy(back_off=timedelta(0))
callers: list[object] = []


def noting(get_response):
    """A middleware inside the protection, where authentication would ask who called."""

    def note(request):
        callers.append(resumed_caller(request))
        return get_response(request)

    return note


@pytest.mark.parametrize("path", ["/plain", "/async-plain"])
@pytest.mark.parametrize("world", ["wsgi", "asgi"])
def test_a_request_is_finished_by_the_wsgi_application_whatever_served_it_first(world, path):
    """Also one that an event loop has served: what is stored says nothing of its server."""
    clock = ManualClock()
    middleware = [*django_shop.SETTINGS["MIDDLEWARE"], MIDDLEWARE, f"{__name__}.noting"]
    with open_shop(
        world,
        middleware=middleware,
        STORE=MemoryStore(now_ms=clock),
        POLICY=Policy(lease=LEASE),
        RULES=[Rule(path=path, resumable=True)],
        CACHE=False,
    ) as shop:
        callers.clear()
        shop.till.error = asyncio.CancelledError()
        with pytest.raises(asyncio.CancelledError):
            shop.post(path)
        clock.advance(LEASE)
        shop.till.error = None
        report = shop.idem.worker(WORKER, app=WSGIHandler()).run_once()["recovery"]
        assert (report.resumed, report.failed) == (1, 0)
        assert callers == [None, "user:alice"]
        replay = shop.post(path)
        assert (replay.json(), is_replay(replay)) == ({"run": 2}, True)

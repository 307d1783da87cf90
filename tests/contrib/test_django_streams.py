"""Django: streams that are not sent are closed, and those without a byte end the hold."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from retrysafe.errors import StoreError
from retrysafe.http import held_response
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.contrib import django_shop
from tests.contrib.django_visits import open_shop, problem

ENDLESS = pytest.mark.parametrize("path", ["/endless", "/async-endless"])


@pytest.fixture(params=["wsgi", "asgi"])
def world(request):
    return request.param


@pytest.fixture(autouse=True)
def _streams_are_kept(monkeypatch):
    """Python closes what nobody holds; here only what is closed by somebody is closed."""
    for name in ("endless_pieces", "async_endless_pieces"):
        made = getattr(django_shop, name)

        def kept(last=None, made=made):
            django_shop.till.stream = made(last)
            return django_shop.till.stream

        monkeypatch.setattr(django_shop, name, kept)
    yield
    django_shop.till.stream = None


def without_endings() -> FaultyStore:
    """A store that grants claims and takes no endings."""
    store = FaultyStore(MemoryStore())
    store.fail(
        Moment.BEFORE,
        method="commit",
        times=None,
        when=lambda call: bool(call.arguments[1]),
        error=lambda call: StoreError("no room"),
    )
    return store


@ENDLESS
def test_the_stream_of_an_outcome_that_could_not_be_stored_is_closed(world, path):
    """The client gets a problem in its place, and nobody would ever ask for its rest."""
    with open_shop(world, STORE=without_endings()) as shop:
        assert problem(shop.post(path)) == "outcome-not-stored"
        assert (shop.till.pieces, shop.till.closed) == (11, 1)


def test_the_file_of_an_outcome_that_could_not_be_stored_is_closed(world):
    """Also where the whole of it was held."""
    with open_shop(world, STORE=without_endings()) as shop:
        assert problem(shop.post("/files")) == "outcome-not-stored"
        assert shop.till.opened.closed


@ENDLESS
def test_a_stream_that_could_not_be_held_is_closed(world, path, monkeypatch):
    """As in atomic mode past a limit, where the piece after it is refused."""

    def refused(self, piece):
        raise RuntimeError("too long")

    monkeypatch.setattr(held_response.Held, "take", refused)
    with open_shop(world) as shop:
        assert shop.post(path).status_code == 500
        assert (shop.till.pieces, shop.till.closed) == (1, 1)


@ENDLESS
def test_a_stream_of_nothing_is_let_through_at_the_limit(world, path):
    """Pieces without a byte count, or an endless stream of them would be held for ever."""
    with open_shop(world) as shop:
        shop.till.piece = b""
        shop.post(path, pieces=3)
        assert shop.till.pieces == 1_000 + 1 + 2
        assert problem(shop.post(path)) == "outcome-unavailable"


@ENDLESS
def test_a_stream_of_nothing_is_let_through_after_its_time(world, path, monkeypatch):
    """The time of the rule's `hold_limit` is looked at with every piece."""
    now = [0.0]

    def later():
        now[0] += 10.0
        return now[0]

    monkeypatch.setattr(held_response, "monotonic", later)
    with open_shop(world) as shop:
        shop.till.piece = b""
        shop.post(path, pieces=1)
        assert shop.till.pieces == 6


def test_the_stream_of_a_client_that_has_gone_is_closed(monkeypatch):
    """Django cancels the request while the view answers: the run goes on, and its stream ends."""
    requests = []
    take = held_response.Held.take

    def taken(self, piece):
        requests.pop().cancel() if requests else None
        return take(self, piece)

    monkeypatch.setattr(held_response.Held, "take", taken)

    async def leave(client_request):
        requests.append(asyncio.current_task())
        with suppress(asyncio.CancelledError):
            await client_request
        for _ in range(1_000):
            if django_shop.till.closed:
                break
            await asyncio.sleep(0.01)

    with open_shop("asgi") as shop:
        run = shop.runner.run
        shop.runner.run = lambda request: run(leave(request))
        shop.post("/async-endless", pieces=1)
        shop.runner.run = run
        assert not requests
        assert shop.till.closed == 1

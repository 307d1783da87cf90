"""Responses in threads that are made and never sent, and such as never have a byte.

Attacked: WSGI and Flask (Django in `tests/contrib/test_django_streams.py`) with streams whose
outcome the store refuses, and with endless streams of empty pieces.

What must hold: what a view has opened is closed when another response is sent in its place, and
empty pieces end the hold as all others do.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from flask import Flask
from flask import Response as FlaskResponse

from retrysafe import Idempotency, Policy
from retrysafe.contrib.flask import Retrysafe
from retrysafe.errors import StoreError
from retrysafe.http import Rule, WSGIIdempotencyMiddleware, bearer_token, held_response
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.http.driving import ask_wsgi

LIMIT_BYTES = 1_000
RULE = Rule(policy=Policy(outcome_limit_bytes=LIMIT_BYTES))


class Pieces:
    """A stream that counts what was asked of it, and knows whether it was closed."""

    def __init__(self, piece: bytes = b"x" * 100, last: int | None = None) -> None:
        self.piece = piece
        self.last = last
        self.asked = 0
        self.closed = 0

    def __iter__(self):
        return self

    def __next__(self) -> bytes:
        if self.asked == self.last:
            raise StopIteration
        self.asked += 1
        assert self.asked < 10_000  # Without a limit it would go on for ever.
        return self.piece

    def close(self) -> None:
        self.closed += 1


@contextmanager
def wsgi(pieces, store=None):
    def app(environ, start_response):
        start_response("201 Created", [])
        return pieces

    with Idempotency(store or MemoryStore()) as idempotency:
        yield WSGIIdempotencyMiddleware(app, idempotency, caller=bearer_token, rule=RULE)


@contextmanager
def flask(pieces, store=None):
    app = Flask("shop")
    with Idempotency(store or MemoryStore()) as idempotency:
        retrysafe = Retrysafe(app, idempotency, caller=bearer_token)

        @app.post("/charges")
        @retrysafe.idempotent(policy=RULE.policy)
        def view():
            return FlaskResponse(pieces, 201)

        yield app


MAKING = pytest.mark.parametrize("making", [wsgi, flask])


@MAKING
@pytest.mark.parametrize("last", [3, None], ids=["whole", "endless"])
def test_the_stream_of_an_outcome_that_could_not_be_stored_is_closed(making, last):
    """The client gets a problem in its place, and nobody would ever ask for its rest."""
    store, pieces = FaultyStore(MemoryStore()), Pieces(last=last)
    store.fail(
        Moment.BEFORE,
        method="commit",
        times=None,
        when=lambda call: bool(call.arguments[1]),
        error=lambda call: StoreError("no room"),
    )
    with making(pieces, store) as app:
        assert ask_wsgi(app).problem == "outcome-not-stored"
    assert pieces.closed == 1


@MAKING
def test_the_stream_that_could_not_be_held_is_closed(making, monkeypatch):
    """As in atomic mode past a limit, where the piece after it is refused."""

    def refused(self, piece):
        raise RuntimeError("too long")

    monkeypatch.setattr(held_response.Held, "take", refused)
    pieces = Pieces()
    with making(pieces) as app:
        if making is wsgi:
            with pytest.raises(RuntimeError, match="too long"):
                ask_wsgi(app)
        else:
            assert ask_wsgi(app).status == 500
    assert pieces.closed == 1


@MAKING
def test_a_stream_of_nothing_is_let_through_at_the_limit(making):
    """Pieces without a byte count, or an endless stream of them would be held for ever."""
    pieces = Pieces(b"")
    with making(pieces) as app:

        def reading(environ, start_response):
            result = app(environ, start_response)
            assert pieces.asked == LIMIT_BYTES + 1
            assert ask_wsgi(app).problem == "outcome-unavailable"
            result.close()
            return ()

        ask_wsgi(reading)
    assert pieces.closed == 1


@MAKING
def test_a_stream_of_nothing_is_let_through_after_its_time(making, monkeypatch):
    """The time of the rule's `hold_limit` is looked at with every piece."""
    now = [0.0]

    def later() -> float:
        now[0] += 10.0
        return now[0]

    monkeypatch.setattr(held_response, "monotonic", later)
    pieces = Pieces(b"")
    with making(pieces) as app:

        def reading(environ, start_response):
            result = app(environ, start_response)
            assert pieces.asked == 6
            result.close()
            return ()

        ask_wsgi(reading)


def test_a_stream_of_nothing_without_a_response_is_an_error():
    """An application may send empty pieces before its head; one that does so for ever is broken."""
    pieces = Pieces(b"")
    with Idempotency(MemoryStore()) as idempotency:
        app = WSGIIdempotencyMiddleware(
            lambda environ, start_response: pieces, idempotency, caller=bearer_token, rule=RULE
        )
        with pytest.raises(RuntimeError, match="and no response"):
            ask_wsgi(app)
    assert pieces.closed == 1


def test_a_response_may_begin_after_pieces_without_a_byte():
    """As generators do whose head depends on what they compute first."""

    def app(environ, start_response):
        yield b""
        start_response("201 Created", [])
        yield b"done"

    with Idempotency(MemoryStore()) as idempotency:
        protected = WSGIIdempotencyMiddleware(app, idempotency, caller=bearer_token, rule=RULE)
        replies = [ask_wsgi(protected) for _ in range(2)]
    assert [(reply.status, reply.body) for reply in replies] == [(201, b"done")] * 2
    assert replies[1].is_replay

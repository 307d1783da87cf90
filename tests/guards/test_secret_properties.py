"""Properties of secrets that hold because of single lines; `test_guards` takes each line out."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe import BodyKey, Idempotency, Key, OperationInFlight, child_key, current_attempt
from retrysafe.errors import SecretMissing
from retrysafe.http import WSGIIdempotencyMiddleware, bearer_token
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock
from tests.http.driving import ask_wsgi

OLD, NEW = "the old secret, 16 or more", "the new secret, 16 or more"


def _object(store, secret):
    return Idempotency(store, caller="acme", secret=secret, cache=False)


def test_a_stored_fingerprint_cannot_be_compared_with_guesses():
    """The guess is what the same request leaves in a store that has no secret."""
    stored = []
    for secret in (None, OLD):
        with _object(MemoryStore(), secret or [None]) as idem:
            idem.run("k", str, 7)
            stored.append(idem.read("k").record.fingerprint)
    assert stored[0] != stored[1]


def test_a_new_secret_refuses_no_retry():
    """Neither from a process that knows only the old one, nor from one that knows only the new."""
    for first, second in ((OLD, NEW), (NEW, [OLD, "a third secret of 16 bytes"])):
        store = MemoryStore()
        with _object(store, first) as idem:
            idem.run("k", str, 7)
        with _object(store, second) as idem:
            assert idem.answer("k", str, 7).replayed


def test_a_new_secret_runs_nothing_again():
    """Body keys are made with it; both directions, as in a deploy."""
    pairs = [(OLD, [NEW, OLD]), ([OLD, NEW], [NEW, OLD]), ([NEW, OLD], NEW)]
    for pair in pairs + [pair[::-1] for pair in pairs]:
        store, runs = MemoryStore(), []

        def pay(number, runs=runs):
            runs.append(number)

        for secret in pair:
            with _object(store, secret) as idem:
                idem.once(key=BodyKey(), name="pay", ignore=["runs"])(pay)(7)
        assert runs == [7]


def test_a_refused_request_is_refused_again():
    store, statuses = MemoryStore(), []

    def app(environ, start_response):
        start_response("201 Made", [])
        return [b"of another request"]

    for secret, body in ((NEW, b"1"), ([NEW, OLD], b"2"), ([NEW, OLD], b"2")):
        with _object(store, secret) as idem:
            made = WSGIIdempotencyMiddleware(app, idem, caller=bearer_token)
            statuses.append(ask_wsgi(made, body=body).status)
    for secret, body in ((OLD, b"3"), ([NEW, OLD], b"4"), ([NEW, OLD], b"4")):
        with _object(store, secret) as idem:
            made = WSGIIdempotencyMiddleware(app, idem, caller=bearer_token)
            statuses.append(ask_wsgi(made, key='"k-2"', body=body).status)
    # One of the two forms is the inner one.
    assert statuses == [201, 422, 422] * 2


def test_a_new_secret_runs_no_step_again():
    """An attempt that dies after its step is followed by one that knows one form of the key."""
    for last in (OLD, NEW):
        clock, steps = ManualClock(), []
        store = MemoryStore(now_ms=clock)

        def pay(number, steps=steps):
            attempt = current_attempt()
            attempt.step("charge", steps.append, number)
            if attempt.is_first:
                raise SystemExit

        both = [last, OLD if last is NEW else NEW]
        with _object(store, both) as idem, pytest.raises(SystemExit):
            idem.once(key=BodyKey(), name="pay", ignore=["steps"])(pay)(7)
        clock.advance(timedelta(hours=1))
        with _object(store, last) as idem:
            idem.once(key=BodyKey(), name="pay", ignore=["steps"])(pay)(7)
        assert steps == [7]


def test_a_refused_duplicate_wipes_out_no_step():
    """It has taken one form of the key over from an attempt that died, and the other one runs."""
    clock, runs, steps, refusals = ManualClock(), [], [], []

    def call(store, secret, operation, first):
        with _object(store, secret) as idem:
            idem.once(key=BodyKey(), name="pay")(operation)(first)

    def pay(first):
        runs.append(first)
        current_attempt().step("charge", steps.append, first)
        if runs.count(first) == 1:
            raise SystemExit

    for first, second in ((OLD, NEW), (NEW, OLD)):
        store = MemoryStore(now_ms=clock)

        def busy(first, store=store):
            with pytest.raises(OperationInFlight):
                call(store, [OLD, NEW], pay, first)
            refusals.append(first)

        with pytest.raises(SystemExit):
            call(store, first, pay, first)
        clock.advance(timedelta(hours=1))
        with _object(store, second) as idem:
            idem.once(key=BodyKey(), name="pay", ignore=["store"])(busy)(first)
        call(store, first, pay, first)
    # One of the two forms is the outer one.
    assert steps == refusals == [OLD, NEW]


def test_a_new_secret_does_not_change_child_keys():
    store, seen = MemoryStore(), []

    def operation():
        seen.append(current_attempt().child_key("charge"))
        raise ConnectionError

    for secret in (OLD, [NEW, OLD]):
        with _object(store, secret) as idem, pytest.raises(ConnectionError):
            idem.run("k", operation, request=None)
    assert seen[0] == seen[1]


def test_no_secret_is_guessed_for_child_keys():
    """A record from before fingerprints were keyed does not say which secret it began with."""
    store, seen = MemoryStore(), []

    def operation():
        seen.append(current_attempt().child_key("charge"))

    # Its fingerprint is plain, as that of every record was then.
    with _object(store, [None]) as idem, pytest.raises(SecretMissing):
        idem.run("k", operation, name="pay", request=None)
    for secret in ([OLD, NEW], [NEW, OLD]):
        with _object(store, secret) as idem, pytest.raises(SecretMissing):
            idem.run("k", operation, name="pay", request=None)
    assert seen == []
    with _object(store, OLD) as idem:
        idem.run("k", operation, name="pay", request=None)
    assert seen == [child_key(OLD.encode(), Key("k", caller="acme"), "charge")]

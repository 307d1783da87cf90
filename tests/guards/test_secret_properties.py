"""Properties of secrets that hold because of single lines; `test_guards` takes each line out."""

from __future__ import annotations

import pytest

from retrysafe import Idempotency, MemoryStore, current_attempt

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


def test_a_new_secret_does_not_change_child_keys():
    store, seen = MemoryStore(), []

    def operation():
        seen.append(current_attempt().child_key("charge"))
        raise ConnectionError

    for secret in (OLD, [NEW, OLD]):
        with _object(store, secret) as idem, pytest.raises(ConnectionError):
            idem.run("k", operation)
    assert seen[0] == seen[1]

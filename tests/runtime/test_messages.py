"""Messages name what their reader wrote, and say what to do."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe import (
    BodyKey,
    Event,
    EventKind,
    FingerprintImpossible,
    Idempotency,
    PolicyInvalid,
)

SECRET = "sixteen bytes or more"


def test_a_short_window_is_refused_by_the_name_that_the_user_gave_it():
    """Who writes BodyKey(window=…) is told about that window, not about a derived setting."""
    with Idempotency("memory://", caller="c", secret=SECRET) as idem:
        with pytest.raises(PolicyInvalid, match=r"the window of a BodyKey .* the lease"):
            idem.once(key=BodyKey(window=timedelta(seconds=5)))(lambda text: text)
        idem.once(key=BodyKey(window=idem.policy.lease))(lambda text: text)


def test_a_withheld_outcome_is_reported_by_its_reason():
    """Observers and the log get a sentence, not the stored JSON around it."""
    heard: list[Event] = []
    with Idempotency("memory://", caller="c", observers=[heard.append]) as idem:
        idem.run("k", object)
    (withheld,) = [event for event in heard if event.kind is EventKind.WITHHELD]
    assert withheld.detail.startswith("the value is a builtins:object, which has no stored form")


def test_a_request_without_a_stable_form_is_not_told_to_return_something():
    """The advice fits a request as well as a result."""
    with (
        Idempotency("memory://", caller="c") as idem,
        pytest.raises(FingerprintImpossible, match=r"the request.0. is a builtins:object.*: use"),
    ):
        idem.run("k", lambda value: value, object())

"""Body keys as they are written: their window, their intent, the secret that they need."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.policy import Policy
from retrysafe.errors import PolicyInvalid, SecretMissing

SECRET = b"0123456789abcdef"


def test_the_window_of_a_body_key_becomes_the_policys():
    policy = BodyKey(timedelta(days=60)).checked(Policy(), SECRET)
    assert policy.active_window == policy.audit_window == timedelta(days=60)
    policy = BodyKey().checked(Policy(), SECRET)
    assert policy.active_window == timedelta(minutes=5)
    assert policy.audit_window == Policy().audit_window


@pytest.mark.parametrize("window", [timedelta(seconds=29), 300, None])
def test_a_window_shorter_than_the_lease_is_refused(window):
    with pytest.raises(PolicyInvalid, match="window of a BodyKey"):
        BodyKey(window).checked(Policy(lease=timedelta(seconds=30)), SECRET)


@pytest.mark.parametrize("secret", [None, b"", b"short"])
def test_a_body_key_needs_a_secret_from_the_start(secret):
    with pytest.raises(SecretMissing):
        BodyKey().checked(Policy(), secret)


@pytest.mark.parametrize("intent", ["", 5, ("order",)])
def test_an_intent_is_a_name(intent):
    """What names nothing would leave two intents one, and nobody would be told."""
    with pytest.raises(PolicyInvalid, match="the intent of BodyKey is the name of a parameter"):
        BodyKey(intent=intent)

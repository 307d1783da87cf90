"""The settings of an object: what they refuse, whose a key is, and what a request is known by."""

from __future__ import annotations

import pytest

from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import GLOBAL, Key, natural_key
from retrysafe.core.policy import Policy
from retrysafe.core.settings import Settings, environment_secret, secrets_of
from retrysafe.errors import (
    CallerMissing,
    FingerprintImpossible,
    InvalidInput,
    KeyInvalid,
    PolicyInvalid,
    SecretMissing,
)

SECRET, OTHER = "0123456789abcdef", "fedcba9876543210"


def checked(**changes):
    given = {"caller": None, "policy": None, "fingerprint": None, "secret": None, "cache": True}
    return Settings.checked(**{**given, **changes})


async def unusable():
    return "tenant"


def test_settings_that_nobody_gave_are_the_defaults():
    made = checked()
    assert (made.caller, made.policy, made.fingerprint) == (None, Policy(), FingerprintRule())
    assert (made.secrets.listed, made.has_cache) == ((), True)


def test_settings_that_somebody_gave_are_kept():
    policy, rule = Policy(terminal=ValueError), FingerprintRule(exclude=["/0"])
    made = checked(caller="t", policy=policy, fingerprint=rule, secret=SECRET, cache=False)
    assert (made.caller, made.policy, made.fingerprint) == ("t", policy, rule)
    assert (made.secrets.value, made.has_cache) == (SECRET.encode(), False)


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"caller": 7}, InvalidInput),
        ({"caller": unusable}, InvalidInput),
        ({"policy": {"lease": 5}}, PolicyInvalid),
        ({"fingerprint": ["/0"]}, PolicyInvalid),
        ({"secret": 7}, InvalidInput),
        ({"secret": [7]}, InvalidInput),
        ({"secret": "short"}, SecretMissing),
        ({"secret": f"{SECRET}\n{OTHER}"}, InvalidInput),
        ({"secret": f"{SECRET}\n{OTHER}".encode()}, InvalidInput),
    ],
    ids=str,
)
def test_what_cannot_be_a_setting_is_refused_at_once(wrong, refusal):
    """Not by the first call, and never with a secret in the message."""
    with pytest.raises(refusal) as caught:
        checked(**wrong)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (None, []),
        (f"{SECRET}\n", [SECRET.encode()]),
        (SECRET.encode(), [SECRET.encode()]),
        # Of random bytes any one may be a line break.
        (b"\x00\n" * 8, [b"\x00\n" * 8]),
        (b"\xff\n" * 8, [b"\xff\n" * 8]),
        ([SECRET, OTHER.encode(), None], [SECRET.encode(), OTHER.encode()]),
    ],
    ids=str,
)
def test_secrets_are_taken_in_every_form(given, values):
    assert [secret.value for secret in secrets_of(given).listed] == values


@pytest.mark.parametrize("source", ["tenant", lambda: "tenant"], ids=["text", "function"])
def test_a_key_is_its_callers(source):
    """The call's own caller counts before that of the settings."""
    expected = Key("k", caller="tenant")
    assert checked(caller=source).key("k", None) == expected
    assert checked(caller="other").key("k", source) == expected
    assert checked().key(expected, None) is expected


def test_a_key_may_be_everybodys():
    assert checked(caller=GLOBAL).key("k", None) == Key("k", caller=GLOBAL)


def test_a_key_without_one_caller_is_refused():
    with pytest.raises(CallerMissing):
        checked().key("k", None)
    with pytest.raises(InvalidInput, match="not both"):
        checked().key(Key("k", caller="a"), "b")
    with pytest.raises(InvalidInput, match="caller is a text"):
        checked().key("k", 7)


def test_a_copy_of_a_derived_key_is_no_key_to_run_under():
    """Whoever chooses keys could take a derived one in advance; reading one is harmless."""
    derived = natural_key("pay", order="o-1")
    made = checked(caller="t")
    copied = "".join([derived[:4], derived[4:]])
    assert made.call_key(derived, None).text == made.key(copied, None).text
    with pytest.raises(KeyInvalid):
        made.call_key(copied, None)


@pytest.mark.parametrize(
    ("value", "secrets"),
    [
        ("", None),
        (SECRET, [SECRET]),
        (f"{SECRET}\n\nnone\n", [SECRET, None]),
    ],
)
def test_the_environment_has_a_secret_on_each_line(monkeypatch, value, secrets):
    monkeypatch.setenv("RETRYSAFE_SECRET", value)
    assert environment_secret() == secrets


@pytest.mark.parametrize("value", [f"{SECRET},{OTHER}", f"{SECRET}\\n{OTHER}", "-----BEGIN KEY"])
def test_what_may_be_several_secrets_in_one_is_refused(monkeypatch, value):
    """Taken as one, it would be another secret than all of them."""
    monkeypatch.setenv("RETRYSAFE_SECRET", value)
    with pytest.raises(InvalidInput, match="RETRYSAFE_SECRET"):
        environment_secret()


def test_a_request_is_known_by_the_rule_of_its_call_or_of_the_settings():
    loose = FingerprintRule(exclude=["/0"])
    made, plain = checked(fingerprint=loose), checked()
    assert made.fingerprints(None, "pay", ["a", 1]) == made.fingerprints(None, "pay", ["b", 1])
    assert plain.fingerprints(loose, "pay", ["a", 1]) == made.fingerprints(None, "pay", ["a", 1])
    assert plain.fingerprints(None, "pay", ["a", 1]) != plain.fingerprints(None, "pay", ["b", 1])


def test_a_request_without_a_stable_form_is_refused():
    circle = []
    circle.append(circle)
    for request, told in [(object(), "stable form"), (circle, "stable"), (10**9_999, "canonical")]:
        with pytest.raises(FingerprintImpossible, match=told):
            checked().fingerprints(None, "pay", request)

"""Secrets: which one makes, which ones are recognised, and what the store learns of them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core.flights import is_same_request
from retrysafe.core.keys.key import Key
from retrysafe.core.keys.secret import NO_SECRETS, Secret, Secrets
from retrysafe.core.machine import is_mismatch
from retrysafe.core.model import TAG_BYTES, Fingerprint
from retrysafe.core.transitions import claim
from retrysafe.errors import InvalidInput, SecretMissing
from tests.core.building import NOW, TOKEN, request

OLD, NEW = b"the old secret, 16 or more", b"the new secret, 16 or more"
PLAIN = Fingerprint(1, hashlib.blake2b(b"request", digest_size=16).digest())
OTHER = Fingerprint(1, hashlib.blake2b(b"another", digest_size=16).digest())
LISTS = {
    "none": NO_SECRETS,
    "old": Secrets(OLD),
    "old then new": Secrets(OLD, NEW),
    "new then old": Secrets(NEW, OLD),
    "new": Secrets(NEW),
    "new then none": Secrets(NEW, None),
}


def record_of(secrets, plain=PLAIN):
    """The record that a process with these secrets makes for a request."""
    asked = request(TOKEN, *secrets.fingerprints((plain,)))
    made, _ = claim(None, asked, NOW)
    return made


def test_fingerprints_are_frozen():
    """They are stored: a release that changes them turns honest retries into refusals."""
    made = Secret(OLD).fingerprint(PLAIN)
    assert (made.rule, made.digest.hex()) == (-1, "6cf76b69206c6d5775ae705632bdaab6")
    assert len(made.digest) == 16


def test_without_a_secret_they_are_what_they_were():
    plain = (PLAIN, OTHER)
    assert NO_SECRETS.fingerprints(plain) is plain


@pytest.mark.parametrize("first", LISTS)
@pytest.mark.parametrize("second", LISTS)
def test_an_honest_retry_is_never_refused(first, second):
    """Whatever the two processes know: a rotation and a deploy pass without a 422."""
    record = record_of(LISTS[first])
    again = LISTS[second].fingerprints((PLAIN,))
    assert not is_mismatch(record, again, "shop.pay")


@pytest.mark.parametrize("first", LISTS)
@pytest.mark.parametrize("second", LISTS)
def test_another_request_is_refused_where_its_secret_is_known(first, second):
    """Records from before there was a secret are compared as well; another operation always."""
    made, read = LISTS[first], LISTS[second]
    record = record_of(made)
    is_known = not made.listed or made.listed[0].tag in {item.tag for item in read.listed}
    assert is_mismatch(record, read.fingerprints((OTHER,)), "shop.pay") is is_known
    # Of a request that is the same as far as this process knows, the operation is compared.
    assert is_mismatch(record, read.fingerprints((PLAIN,)), "refund") is not is_known


def test_earlier_rules_are_compared_under_every_secret():
    secrets = Secrets(NEW, OLD)
    second = Fingerprint(2, PLAIN.digest)
    made = secrets.fingerprints((second, PLAIN))
    assert [item.rule for item in made] == [-2, -1, -2, -1, 2, 1]
    assert made[0] == secrets.listed[0].fingerprint(second)
    record = record_of(Secrets(OLD))
    assert not is_mismatch(record, made, "shop.pay")
    assert is_mismatch(record, secrets.fingerprints((second, OTHER)), "shop.pay")


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_two_digests_of_one_secret_are_told_apart(first, second):
    made = [Secret(OLD).fingerprint(Fingerprint(1, digest)) for digest in (first, second)]
    assert (made[0] == made[1]) == (first == second)
    assert all(item.digest[:TAG_BYTES] == Secret(OLD).tag for item in made)


def test_local_duplicates_are_compared_under_one_secret():
    class Asked:
        def __init__(self, secrets, plain=PLAIN):
            self.fingerprints = secrets.fingerprints((plain,))[:1]
            self.operation = "shop.pay"

    assert is_same_request(Asked(Secrets(OLD)), Asked(Secrets(OLD)))
    assert not is_same_request(Asked(Secrets(OLD)), Asked(Secrets(OLD), OTHER))
    assert is_same_request(Asked(Secrets(OLD)), Asked(Secrets(NEW), OTHER))


def test_child_keys_keep_the_secret_that_the_operation_began_with():
    """The first of the list for what begins here, the record's own for what goes on."""
    rotating = Secrets(NEW, OLD)
    assert rotating.began_with(None).value == NEW
    for value in (NEW, OLD):
        assert rotating.began_with(Secret(value).fingerprint(PLAIN)).value == value
    # Before fingerprints were keyed, none said which secret it was made with.
    assert Secrets(OLD).began_with(PLAIN).value == OLD
    assert Secrets(OLD, None).began_with(PLAIN).value == OLD
    for several in (rotating, Secrets(OLD, NEW)):
        with pytest.raises(SecretMissing, match="several are listed"):
            several.began_with(PLAIN)
    with pytest.raises(SecretMissing, match="not listed"):
        Secrets(NEW).began_with(Secret(OLD).fingerprint(PLAIN))
    assert NO_SECRETS.began_with(Secret(OLD).fingerprint(PLAIN)) is None
    assert NO_SECRETS.began_with(None) is None


def test_a_list_has_each_secret_once_and_the_past_last():
    assert Secrets(NEW, None).has_plain
    assert Secrets(None).listed == ()
    assert not Secrets(NEW, OLD).has_plain
    with pytest.raises(InvalidInput, match="twice"):
        Secrets(NEW, OLD, NEW)
    with pytest.raises(InvalidInput, match="last"):
        Secrets(None, OLD)
    with pytest.raises(SecretMissing):
        Secrets(NEW, b"short")


def test_a_secret_is_never_shown():
    shown = repr(Secrets(NEW, OLD)) + repr(Secret(NEW))
    assert "secret," not in shown
    assert Secret(NEW).tag.hex() in shown


def test_several_forms_of_a_key():
    """Of one secret, and of none, there is one."""
    assert not any(item.is_several for item in (Secrets(NEW), NO_SECRETS, Secrets(None)))
    assert Secrets(NEW, OLD).is_several
    assert Secrets(NEW, None).is_several


def test_child_keys_are_made_of_the_key_by_the_same_secret():
    """Another form of the key would be another parent."""
    rotating, key = Secrets(NEW, OLD), Key("k", caller="by none")
    keys = {secret.tag: Key("k", caller=repr(secret)) for secret in rotating.listed}
    began = Secret(OLD).fingerprint(PLAIN)
    assert rotating.parent(key, keys, began) == (OLD, keys[Secret(OLD).tag])
    assert rotating.parent(key, keys, None) == (NEW, keys[Secret(NEW).tag])
    assert rotating.parent(key, None, began) == (OLD, key)
    assert rotating.parent(key, {}, began) == (OLD, key)
    assert NO_SECRETS.parent(key, keys, began) == (None, key)
    assert rotating.key_by(keys, began, key) == keys[Secret(OLD).tag]
    assert Secrets(NEW).key_by(keys, began, key) == key
    assert (rotating.value, NO_SECRETS.value) == (NEW, None)

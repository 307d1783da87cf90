"""Keys: whose they are, what they may hold, and values that no later release may change."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from retrysafe.core.keys.canonical import digest as digest_of
from retrysafe.core.keys.canonical import frame
from retrysafe.core.keys.key import (
    CALLER_LIMIT_CHARACTERS,
    GLOBAL,
    KEY_LIMIT_CHARACTERS,
    GlobalCaller,
    Key,
    body_key,
    checked_secret,
    child_key,
    looks_derived,
    natural_key,
)
from retrysafe.errors import CallerMissing, FingerprintImpossible, KeyInvalid, SecretMissing

SECRET = b"0123456789abcdef"
PARENT = Key("order-1", caller="tenant-1")
TEXTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1)
PART_LISTS = st.lists(st.one_of(st.text(), st.integers(), st.binary(), st.none()), max_size=3)


@pytest.mark.parametrize("text", ["", None, 5, b"bytes", ["k"]])
def test_a_key_is_text_of_at_least_one_character(text):
    with pytest.raises(KeyInvalid, match="at least one character"):
        Key(text, caller="c")


def test_key_length_is_bounded_and_the_bound_is_allowed():
    assert Key("k" * KEY_LIMIT_CHARACTERS, caller="c").text == "k" * 255
    with pytest.raises(KeyInvalid, match="at most 255 characters, got 256") as caught:
        Key("k" * 256, caller="c")
    assert caught.value.key == "k" * 255  # What the error carries is bounded, too.


def test_key_length_counts_characters_not_bytes():
    assert Key("€" * KEY_LIMIT_CHARACTERS, caller="c").text == "€" * 255


@pytest.mark.parametrize("caller", ["", None, 5, b"bytes", False])
def test_a_caller_must_be_named(caller):
    """Nothing falls back to a shared namespace: that one is asked for as GLOBAL."""
    with pytest.raises(CallerMissing, match="GLOBAL"):
        Key("k", caller=caller)


def test_caller_length_is_bounded():
    assert Key("k", caller="c" * CALLER_LIMIT_CHARACTERS).caller == "c" * 255
    with pytest.raises(CallerMissing, match="at most 255 characters, got 256"):
        Key("k", caller="c" * 256)


@pytest.mark.parametrize(("text", "caller"), [("a\x00b", "c"), ("k", "a\x00b"), ("\x00", "c")])
def test_nul_is_refused(text, caller):
    with pytest.raises(KeyInvalid, match="NUL"):
        Key(text, caller=caller)


@pytest.mark.parametrize(("text", "caller"), [("\ud800", "c"), ("k", "\udfff")])
def test_text_that_is_not_unicode_is_refused(text, caller):
    with pytest.raises(KeyInvalid, match="not valid Unicode"):
        Key(text, caller=caller)


@given(TEXTS, TEXTS, TEXTS)
def test_one_text_under_two_callers_is_two_keys(text, one, other):
    """Nobody reaches another caller's record by guessing its key."""
    assume(one != other and max(len(text), len(one), len(other)) <= 255)
    assert Key(text, caller=one) != Key(text, caller=other)
    assert Key(text, caller=one).digest != Key(text, caller=other).digest


@given(TEXTS, TEXTS)
@example("k", "GLOBAL")
@example("k", " ")
def test_global_is_no_callers_namespace(text, caller):
    """No text that a caller can have leads into the shared namespace."""
    assume(max(len(text), len(caller)) <= 255)
    shared, own = Key(text, caller=GLOBAL), Key(text, caller=caller)
    assert shared != own
    assert shared.digest != own.digest
    assert shared.is_global
    assert not own.is_global


def test_caller_and_text_cannot_be_shifted_into_each_other():
    assert Key("bc", caller="a").digest != Key("c", caller="ab").digest


@given(TEXTS, TEXTS)
def test_equal_caller_and_text_are_one_key(text, caller):
    assume(max(len(text), len(caller)) <= 255)
    one, same = Key(text, caller=caller), Key(text, caller=caller)
    assert one == same
    assert one.digest == same.digest
    assert len({one, same}) == 1


def test_a_key_is_never_equal_to_its_text():
    assert Key("k", caller="c") != "k"
    assert "k" not in {Key("k", caller="c")}


def test_keys_read_well_in_logs():
    assert repr(Key("k", caller="c")) == "Key('k', caller='c')"
    assert repr(Key("k", caller=GLOBAL)) == "Key('k', caller=GLOBAL)"
    assert repr(GLOBAL) == "GLOBAL"


@given(TEXTS.map(lambda text: text[:KEY_LIMIT_CHARACTERS]), st.none() | TEXTS)
@example("\U0001f600" * KEY_LIMIT_CHARACTERS, "\U0001f600" * CALLER_LIMIT_CHARACTERS)
@example("\U0001f600" * KEY_LIMIT_CHARACTERS, None)
def test_a_digest_is_that_of_the_framed_caller_and_text(text, caller):
    """However it is put together: the rows of earlier releases are found by it."""
    caller = None if caller is None else caller[:CALLER_LIMIT_CHARACTERS]
    framed = frame((caller or "").encode(), text.encode())
    key = Key(text, caller=GLOBAL if caller is None else caller)
    assert key.digest == digest_of(framed)


@pytest.mark.parametrize(
    ("key", "digest"),
    [
        (Key("order-1", caller="tenant-1"), "bfe6625678c4abea6ffc89a28cff763a"),
        (Key("order-1", caller=GLOBAL), "110a9cb6003ec5a305b1faee88d714e2"),
        (Key("клюC-€", caller="tënant"), "79cea4dcf5cd06b7b87af72102a35133"),
    ],
)
def test_digests_are_frozen(key, digest):
    """Stored rows are found by these; a release that changes them forgets every key."""
    assert key.digest.hex() == digest


@pytest.mark.parametrize(
    ("made", "frozen"),
    [
        (natural_key("pay"), "natural:pay:71R5M7fXjS8LlbequqvfvkLQ0wk"),
        (natural_key("pay", 42), "natural:pay:Cfg99Pi9AnvSSsEW2lERJcI201w"),
        (natural_key("pay", "42"), "natural:pay:KQdxuXeybWSQjLLKHBmHeiUYtjA"),
        (natural_key("pay", invoice=42, tenant="a"), "natural:pay:eN8Nxt0jI31ephNX_-LHNelhsgo"),
        (
            natural_key(
                "all",
                *("a", b"a", 1, True, None, Decimal("1.50"), UUID(int=7), date(2024, 2, 29)),
                datetime(2024, 2, 29, 1, 2, 3, tzinfo=UTC),
                timedelta(days=1, microseconds=5),
            ),
            "natural:all:yWvFdZyTGk4mlXqfb7vapDouTH4",
        ),
        (body_key(SECRET, "pay", b'{"a":1}'), "body:iA7ppxugVqvagcohwU0bWs-xtiOUH2CAtthcB4iNVtE"),
        (body_key(SECRET, "pay", b""), "body:E6uPUCIP6k4ehKyWz6qhz4hfx_MkDyE7Ue7xNxVLr9o"),
        (child_key(SECRET, PARENT, "stripe"), "child:9nfGmSkUz1M-M2spRiJnCBq3UDWrBQbr1ykxqdY9BFU"),
        (
            child_key(SECRET, PARENT, "a:b", "c"),
            "child:yhFbEqDRE3TXH9BintNfSN3lpBb3XG9TcPmMrLLoZac",
        ),
        (
            child_key(SECRET, PARENT, "a", "b:c"),
            "child:rZUN3hqztIm9ooelWeImhyyAnbel8f-XQPpyFui9Cno",
        ),
        (
            child_key(SECRET, Key("order-1", caller=GLOBAL), "stripe", 1),
            "child:sOqAkflEzegDwNATxYQ9TTH3Ui4yad_Ro5asS6NVM8U",
        ),
    ],
)
def test_made_keys_are_frozen(made, frozen):
    """A retry after an upgrade must make the same key, or the operation runs twice."""
    assert made == frozen


@given(TEXTS, PART_LISTS, TEXTS, PART_LISTS)
@example("pay", ["a:b", "c"], "pay", ["a", "b:c"])
@example("pay", [], "pay", [""])
@example("pay:a", [], "pay", ["a"])
def test_natural_keys_are_equal_only_for_equal_parts(operation, parts, other, other_parts):
    same = (operation, parts) == (other, other_parts)
    assert (natural_key(operation, *parts) == natural_key(other, *other_parts)) == same


def test_natural_keys_do_not_depend_on_the_order_of_fields():
    assert natural_key("pay", a=1, b=2) == natural_key("pay", b=2, a=1)


def test_fields_and_positions_are_different_things():
    """A named part is not the same as its name and value passed in order."""
    assert natural_key("pay", "a", 1) != natural_key("pay", a=1)
    assert natural_key("pay", "x", a=1) != natural_key("pay", "x", "a", 1)


@given(TEXTS, PART_LISTS)
def test_natural_keys_always_fit(operation, parts):
    """Whatever the operation is called, its natural key is a valid key that shows the name."""
    made = natural_key(operation * 30, *parts)
    assert Key(made, caller="c").text == made
    assert made.startswith(f"natural:{(operation * 30)[:150]}:")
    # What was made here is told from a copy of its text.
    assert (looks_derived(made), looks_derived(str(made))) == (False, True)


def test_long_operations_that_differ_at_the_end_have_different_keys():
    assert natural_key("x" * 200 + "a") != natural_key("x" * 200 + "b")


def test_natural_keys_refuse_floats():
    with pytest.raises(FingerprintImpossible, match="float"):
        natural_key("pay", amount=1.5)


@pytest.mark.parametrize("operation", [5, None, b"pay", ("pay",)])
def test_natural_keys_refuse_operations_that_are_no_text(operation):
    """A forgotten name is told as such."""
    with pytest.raises(KeyInvalid, match=r"the name of its operation, a text, got .*natural_key\("):
        natural_key(operation, 1)


def test_body_keys_depend_on_secret_operation_and_body():
    made = {
        body_key(SECRET, "pay", b"x"),
        body_key(SECRET, "pay", b"y"),
        body_key(SECRET, "refund", b"x"),
        body_key(SECRET, "payx", b""),
        body_key(b"another secret!!", "pay", b"x"),
    }
    assert len(made) == 5
    assert all(Key(key, caller="c") for key in made)


@given(PART_LISTS, PART_LISTS)
@example(["a:b", "c"], ["a", "b:c"])
@example(["1"], [1])
def test_child_keys_are_equal_only_for_equal_parts(parts, other):
    assume(parts and other)
    assert (child_key(SECRET, PARENT, *parts) == child_key(SECRET, PARENT, *other)) == (
        parts == other
    )


def test_child_keys_depend_on_parent_caller_and_secret():
    """Fan-out from one parent never meets the fan-out from another, nor another caller's."""
    made = {
        child_key(SECRET, PARENT, "s"),
        child_key(SECRET, Key("order-2", caller="tenant-1"), "s"),
        child_key(SECRET, Key("order-1", caller="tenant-2"), "s"),
        child_key(SECRET, Key("order-1", caller=GLOBAL), "s"),
        child_key(b"another secret!!", PARENT, "s"),
    }
    assert len(made) == 5


def test_a_child_needs_a_name():
    with pytest.raises(KeyInvalid, match="at least one part") as caught:
        child_key(SECRET, PARENT)
    assert caught.value.key == "order-1"


@pytest.mark.parametrize("secret", [None, b""])
@pytest.mark.parametrize(
    "make",
    [
        checked_secret,
        lambda secret: body_key(secret, "pay", b""),
        lambda secret: child_key(secret, PARENT, "s"),
    ],
)
def test_keyed_hashes_need_a_secret(make, secret):
    """There is no built-in secret: keys made without one could be guessed."""
    with pytest.raises(SecretMissing, match="RETRYSAFE_SECRET"):
        make(secret)


def test_short_secrets_are_refused():
    with pytest.raises(SecretMissing, match="at least 16 bytes"):
        checked_secret(b"fifteen bytes!!")
    assert checked_secret(SECRET) is SECRET


def test_a_key_is_told_in_plain_words():
    assert str(Key("k1", caller="acme")) == "key 'k1' of caller 'acme'"
    assert str(Key("k1", caller=GLOBAL)) == "key 'k1' (global)"


def test_every_global_caller_is_the_same_namespace():
    """A GLOBAL that was pickled or imported twice names the namespace that all share."""
    assert Key("k", caller=GlobalCaller()) == Key("k", caller=GLOBAL)


@pytest.mark.parametrize("number", [10**1_000, Decimal(10) ** 1_000], ids=["int", "Decimal"])
def test_a_number_longer_than_the_process_reads_is_refused_by_name(number):
    """As another kind of value it would be a second key, where the limit is another one."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        with pytest.raises(FingerprintImpossible, match="so many digits"):
            natural_key("op", number)
    finally:
        sys.set_int_max_str_digits(before)

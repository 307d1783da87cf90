"""Fingerprints: when two requests are the same request, and under which rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core.flights import Flight, is_same_request
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.errors import PolicyInvalid


def _is_same(first, second):
    """Whether two requests of one operation are the same by their fingerprints."""
    return is_same_request(Flight(first, "pay"), Flight(second, "pay"))


RULE = FingerprintRule()
BODY = b'{"b":[1,2.50,null],"a":"\\u00e9"}'


def mark(body: bytes, rule: FingerprintRule = RULE, *parts: bytes) -> bytes:
    (fingerprint, *_) = rule.fingerprints(*parts, body=body)
    assert fingerprint.rule == rule.version
    assert len(fingerprint.digest) == 16
    return fingerprint.digest


@pytest.mark.parametrize(
    ("rule", "body", "frozen"),
    [
        (RULE, BODY, "0461a0c9090f3866fff451405027ea45"),
        (RULE, b"not json", "92e6e935675258f60f766ffcee42dc81"),
        (RULE, b"", "2f9c90e1a835fca62391dd460dad376e"),
        (
            FingerprintRule(version=2, include=("/a",)),
            BODY,
            "56cf93cfb27cbb3c11ff5f5f978916ea",
        ),
        (
            FingerprintRule(version=3, exclude=("/b",)),
            BODY,
            "e5a1167041cf0b525f1bdb1b16f3a572",
        ),
    ],
)
def test_fingerprints_of_bodies_are_frozen(rule, body, frozen):
    """They are stored: a release that changes them turns honest retries into refusals."""
    assert mark(body, rule, b"POST", b"/charges").hex() == frozen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"headers": "If-Match"}, "headers takes a list of names"),
        ({"headers": (5,)}, "headers takes a list of names"),
        ({"headers": ("If Match",)}, "no header has the name"),
        ({"headers": ("",)}, "no header has the name"),
        ({"headers": ("Content-Type",)}, "media_type_parameters=True"),
        ({"headers": ("idempotency-key",)}, "it is the key"),
        ({"exclude_query": "ts"}, "exclude_query takes a list of names"),
        ({"exclude_query": (None,)}, "exclude_query takes a list of names"),
        ({"media_type_parameters": 1}, "media_type_parameters is True or False"),
    ],
)
def test_options_about_the_head_that_cannot_be_are_refused(options, words):
    with pytest.raises(PolicyInvalid, match=words):
        FingerprintRule(**options)


def test_a_rule_knows_whether_it_reads_the_head():
    """The usual one does not, and costs nothing for it."""
    assert not RULE.reads_head
    assert FingerprintRule(exclude_query=("ts",)).reads_head
    assert FingerprintRule(media_type_parameters=True).reads_head
    rule = FingerprintRule(headers=["X-Tenant", "If-Match", "x-tenant"])
    assert (rule.reads_head, rule.header_names) == (True, (b"if-match", b"x-tenant"))


@pytest.mark.parametrize(
    ("rule", "frozen"),
    [
        (RULE, "87203622688761a3e14d4837ef1c2511"),
        (FingerprintRule(exclude=("/0",)), "3b95bee92a7105ef2c639fac7ac60600"),
    ],
)
def test_fingerprints_of_values_are_frozen(rule, frozen):
    made = rule.fingerprints_of_value("shop.pay", [1, {"b": 2, "a": None}])
    assert [item.digest.hex() for item in made] == [frozen]


def test_order_space_escapes_and_spelling_do_not_count():
    assert mark(BODY) == mark(b' { "a" : "\xc3\xa9", "b" : [ 1.0, 25e-1, null ] } ')


def test_last_digits_count():
    assert mark(b'{"id":9007199254740993}') != mark(b'{"id":9007199254740992}')
    assert mark(b"1" * 6000) != mark(b"1" * 5999 + b"2")


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":1}',
        b'{"a":NaN}',
        b'{"a":"\xff"}',
        b'\xef\xbb\xbf{"a":1}',
        b"[" * 300 + b"]" * 300,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":1',
        b"a=1&b=2",
    ],
)
def test_bodies_without_a_single_meaning_count_byte_by_byte(body):
    """Such a body equals itself and nothing else, not even itself with another space."""
    assert mark(body) == mark(bytes(body))
    assert mark(body) != mark(body + b" ")
    assert mark(body) != mark(b'{"a":1}')


@given(st.binary())
def test_raw_bytes_never_meet_a_reading_as_json(body):
    """No body can be made whose raw bytes look like the canonical form of another."""
    for raw in (b"j" + body, b"r" + body, b"i" + body):
        assert mark(raw) != mark(b'"text"')
    assert mark(b"\xff" + body) != mark(body)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("depth", [150, 200, 201, 300, 450])
def test_a_fingerprint_does_not_depend_on_the_callers_stack(opening, closing, depth):
    """A retry that comes in by a deeper path of the application is still the same request."""
    text = opening * depth + b"1" + closing * depth

    def deeper(left: int) -> bytes:
        return mark(text) if left == 0 else deeper(left - 1)

    assert deeper(600) == mark(text)


def test_parts_are_framed():
    """Method, path and body cannot be shifted into each other."""
    assert mark(b"c", RULE, b"a", b"b") != mark(b"c", RULE, b"ab")
    assert mark(b"c", RULE, b"a", b"b") != mark(b"bc", RULE, b"a")
    assert mark(b"c", RULE, b"a", b"") != mark(b"c", RULE, b"a")


def test_excluded_fields_do_not_count_sent_or_not():
    rule = FingerprintRule(exclude=("/sent_at", "/meta/request~1id", "/items/0/seq"))
    first = b'{"n":1,"sent_at":1,"meta":{"request/id":"x","k":1},"items":[{"seq":1,"q":2}]}'
    again = b'{"n":1,"meta":{"k":1,"request/id":null},"items":[{"q":2}]}'
    other = b'{"n":1,"meta":{"k":2},"items":[{"q":2}]}'
    assert mark(first, rule) == mark(again, rule)
    assert mark(first, rule) != mark(other, rule)
    assert mark(first, rule) != mark(first.replace(b'"n":1', b'"n":2'), rule)


def test_excluding_a_list_item_leaves_its_neighbours_in_place():
    rule = FingerprintRule(exclude=("/0", "/0/x"))
    assert mark(b"[1,2]", rule) == mark(b"[9,2]", rule)
    assert mark(b"[1,2]", rule) != mark(b"[2]", rule)
    assert mark(b"[1,2]", rule) != mark(b"[2,1]", rule)


def test_only_included_fields_count():
    rule = FingerprintRule(include=("/amount", "/to/~0iban"))
    first = b'{"amount":1,"to":{"~iban":"x"},"note":"a"}'
    assert mark(first, rule) == mark(b'{"to":{"~iban":"x","b":1},"amount":1.0}', rule)
    assert mark(first, rule) != mark(first.replace(b"1", b"2"), rule)


def test_an_included_field_may_be_absent_null_or_there():
    """A field that was left out is not the same as one that was sent as null."""
    rule = FingerprintRule(include=("/a",))
    assert len({mark(body, rule) for body in (b"{}", b'{"a":null}', b'{"a":""}', b"[]")}) == 3
    assert mark(b"{}", rule) == mark(b"[]", rule)


def test_included_fields_keep_their_names_apart():
    rule = FingerprintRule(include=("/a", "/b"))
    assert mark(b'{"a":1}', rule) != mark(b'{"b":1}', rule)


def test_the_order_of_pointers_does_not_count():
    """Sorting a rule's pointers in the source is not a change of the rule."""
    first, second = FingerprintRule(include=("/a", "/b")), FingerprintRule(include=["/b", "/a"])
    assert mark(BODY, first) == mark(BODY, second)


def test_exclude_works_inside_what_is_included():
    rule = FingerprintRule(include=("/a",), exclude=("/a/t",))
    assert mark(b'{"a":{"n":1,"t":1}}', rule) == mark(b'{"a":{"n":1,"t":2}}', rule)
    assert mark(b'{"a":{"n":1,"t":1}}', rule) != mark(b'{"a":{"n":2,"t":1}}', rule)


def test_excluding_everything_makes_all_json_equal_and_nothing_else():
    rule = FingerprintRule(exclude=("",))
    assert mark(b"1", rule) == mark(b"{}", rule)
    assert mark(b"1", rule) != mark(b"not json", rule)


def test_a_new_rule_stays_comparable_to_the_records_of_the_old_one():
    """Across a change of rule, an honest retry matches and another request does not."""
    old = FingerprintRule(version=1)
    new = FingerprintRule(version=2, exclude=("/sent_at",), previous=(old,))
    first, other = b'{"n":1,"sent_at":1}', b'{"n":2,"sent_at":1}'
    assert [item.rule for item in new.fingerprints(body=first)] == [2, 1]
    assert _is_same(new.fingerprints(body=first), old.fingerprints(body=first))
    assert not _is_same(new.fingerprints(body=other), old.fingerprints(body=first))
    assert _is_same(new.fingerprints(body=b'{"n":1,"sent_at":2}'), new.fingerprints(body=first))


def test_a_new_rule_for_values_stays_comparable_to_the_old_one():
    old = FingerprintRule(version=1)
    new = FingerprintRule(version=2, exclude=("/0",), previous=(old,))
    first = old.fingerprints_of_value("f", [1, 2])
    assert new.fingerprints_of_value("f", [1, 2])[1:] == first
    assert not _is_same(new.fingerprints_of_value("f", [9, 2]), first)


def test_values_are_told_apart_by_name_and_content():
    def made(name: str, tree: object) -> bytes:
        return RULE.fingerprints_of_value(name, tree)[0].digest

    marks = {made("f", [1]), made("g", [1]), made("f", ["1"]), made("f", [True]), made("f", 1)}
    assert len(marks) == 5
    assert made("f", {"a": 1, "b": 2}) == made("f", {"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"version": 0}, "from 1 to 32,767, got 0"),
        ({"version": 32_768}, "got 32768"),
        ({"version": "2"}, "got '2'"),
        ({"version": True}, "got True"),
        ({"include": "/a"}, "include takes a list"),
        ({"exclude": "/a"}, "exclude takes a list"),
        ({"include": ("a",)}, "include takes a list of JSON Pointers: .*starts with '/'"),
        ({"exclude": ("/~2",)}, "exclude .*~0"),
        ({"exclude": (5,)}, "exclude takes a list"),
        ({"exclude": None}, "exclude takes a list"),
        ({"previous": (FingerprintRule(),)}, r"own version, got \[1, 1\]"),
        ({"version": 2, "previous": FingerprintRule()}, "previous takes a list of rules"),
        ({"version": 2, "previous": (1,)}, "previous takes a list of rules"),
    ],
)
def test_broken_rules_are_refused_when_they_are_made(settings, words):
    with pytest.raises(PolicyInvalid, match=words):
        FingerprintRule(**settings)


def test_the_largest_version_is_allowed():
    assert FingerprintRule(version=32_767).fingerprints(body=b"")[0].rule == 32_767

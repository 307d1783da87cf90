"""Key sources: natural keys from fields, keyed hashes of whole requests."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest

from retrysafe import FOREVER, BodyKey, Policy, natural_key
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.errors import KeyInvalid, PolicyInvalid, SecretMissing
from retrysafe.http.key_sources import FieldsKey, HeaderKey, described, made_key, require_own_key
from retrysafe.http.request import Request
from retrysafe.http.rules import Rule
from tests.http.building import FORM, field, multipart, request

SECRET = b"0123456789abcdef"
RULE = FingerprintRule()


def key(source: FieldsKey | BodyKey, made: Request, **changes: object) -> str:
    terms = {"operation": "charge", "rule": RULE, "secret": SECRET, **changes}
    return made_key(source, made, **terms)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('"c1"', "c1"),
        ("42", 42),
        ("-42", -42),
        ("42.0", 42),
        ("4.2e1", 42),
        ("0", 0),
        ("-0.0", 0),
        ("0e9999999", 0),
        ("4.25", Decimal("4.25")),
        ("true", 1),
        ("false", 0),
        ("1e22", 10**22),
        ("1" + "0" * 39, 10**39),
        ("-1" + "0" * 39, -(10**39)),
        ("1" + "0" * 40, Decimal(10**40)),
        ("-1" + "0" * 40, Decimal(-(10**40))),
        ("7" * 4000, Decimal("7" * 4000)),
        ("9007199254740993", 2**53 + 1),
        # A whole number is exact, however long another one beside it is.
        ('9007199254740993,"b":' + "7" * 5000, 2**53 + 1),
    ],
)
def test_a_natural_key_is_the_one_that_the_application_makes(text, part):
    """The same values give the same key here, in the code and on the command line."""
    made = request(b'{"a":%b}' % text.encode())
    assert key(FieldsKey("/a", window=FOREVER), made) == natural_key("charge", part)


@pytest.mark.parametrize(
    "number",
    ["7.00000000000000000001", "6.99999999999999999999", "9007199254740993.0", "1e39",
     "1234567890123456800.0", "1234567890123456768.0", "9.50000000000000000001", "1e-400", "1e400",
     "-1e999999999", "1e1" + "0" * 20, "1." + "0" * 99 + "1"],
)  # fmt: skip
@pytest.mark.parametrize("field", ["/a", "/a:int", "/a:decimal"])
def test_a_number_that_a_float_rounds_makes_no_key(field, number):
    """An application that reads a float takes it for another number, whose order ran already."""
    with pytest.raises(KeyInvalid, match="no more digits than a floating-point number keeps"):
        key(FieldsKey(field, window=FOREVER), request(b'{"a":%b}' % number.encode()))


def test_fields_come_from_all_kinds_of_bodies_and_from_the_path():
    source = FieldsKey("/customer", "{id}", window=FOREVER)
    expected = natural_key("charge", "c1", 7)
    for made in (
        request(b'{"customer":"c1","sent_at":1}'),
        request(b"customer=c1&sent_at=1", FORM),
        multipart([field("customer", b"c1")]),
    ):
        made.parameters = {"id": "7"}
        assert key(source, made) == expected


def test_an_endpoint_that_is_served_with_a_slash_too_has_one_key():
    """Two routes lead to it under two names; one request by both runs once."""
    for source in (FieldsKey("{id}", window=FOREVER), BodyKey()):
        made = [
            key(
                source,
                request(parameters={"id": "7"}),
                operation=f"POST /orders/{{id}}/cancel{end}",
            )
            for end in ("", "/")
        ]
        assert made[0] == made[1]
    assert key(
        FieldsKey("{id}", window=FOREVER), request(parameters={"id": "7"}), operation="POST /"
    ) == (natural_key("POST /", 7))


def test_path_parameters_need_no_body():
    assert key(
        FieldsKey("{id}", window=FOREVER), request(b"", None, parameters={"id": "7"})
    ) == natural_key("charge", 7)


def test_the_order_of_fields_and_the_operation_count():
    made = request(b'{"a":"1","b":"2","c":{"d":1}}')
    keys = {
        key(FieldsKey("/a", "/b", window=FOREVER), made),
        key(FieldsKey("/b", "/a", window=FOREVER), made),
        key(FieldsKey("/a", window=FOREVER), made),
        key(FieldsKey("/a", "/b", window=FOREVER), made, operation="refund"),
    }
    assert len(keys) == 4
    assert key(FieldsKey("/c/d", window=FOREVER), made) == key(
        FieldsKey("/a", window=FOREVER), made
    )


@pytest.mark.parametrize(
    "made",
    [
        request(b"{}"),
        request(b'{"a":null}'),
        request(b'{"a":""}'),
        request(b'{"a":[]}'),
        request(b'{"a":["x"]}'),
        request(b'{"a":{}}'),
        request(b'{"a":1e99999999999999999999}'),
        request(b'{"a":1'),
        request(b'{"a":1}', "text/plain"),
        request(b"a=", FORM),
        request(b"a=1&a=2", FORM),
        request(b"", None),
    ],
)
def test_without_a_plain_value_there_is_no_key(made):
    """Nothing falls back to a key that many requests would share."""
    with pytest.raises(KeyInvalid, match="the key is made from /a"):
        key(FieldsKey("/a", window=FOREVER), made)


def test_a_parameter_that_the_path_lacks_makes_no_key():
    with pytest.raises(KeyInvalid, match=r"made from \{id\}"):
        key(FieldsKey("{id}", window=FOREVER), request())


@pytest.mark.parametrize("fields", [(), ("a",), ("",), ("/~2",), ("{}",), ("{a",), (5,), (None,)])
def test_fields_that_mean_nothing_are_refused_when_they_are_configured(fields):
    with pytest.raises(PolicyInvalid, match="FieldsKey"):
        FieldsKey(*fields, window=FOREVER)


def test_sources_are_equal_by_what_they_take():
    assert (
        FieldsKey("/a", window=FOREVER)
        == FieldsKey("/a", window=FOREVER)
        != FieldsKey("/b", window=FOREVER)
    )
    assert repr(FieldsKey("/a", "{id}", window=FOREVER)) == (
        "FieldsKey(fields=('/a', '{id}'), window=datetime.timedelta(days=36500))"
    )
    assert HeaderKey() == HeaderKey()


def test_equal_requests_have_equal_body_keys():
    """A key per request, caller apart: what a retry may change does not count."""
    first = key(BodyKey(), request(b'{"a":1,"b":2}'))
    assert first == key(BodyKey(), request(b'{"b":2, "a":1.0}'))
    others = [
        key(BodyKey(), request(b'{"a":1,"b":3}')),
        key(BodyKey(), request(b'{"a":1,"b":2}', method="PUT")),
        key(BodyKey(), request(b'{"a":1,"b":2}', path="/x")),
        key(BodyKey(), request(b'{"a":1,"b":2}', query=b"x=1")),
        key(BodyKey(), request(b'{"a":1,"b":2}'), operation="refund"),
        key(BodyKey(), request(b'{"a":1,"b":2}'), secret=SECRET[::-1]),
    ]
    assert len({first, *others}) == 7


def test_what_the_rule_leaves_out_is_not_part_of_a_body_key():
    rule = FingerprintRule(exclude=("/sent_at",))
    keys = {key(BodyKey(), request(b'{"sent_at":%d}' % n), rule=rule) for n in (1, 2)}
    assert len(keys) == 1


def test_an_intent_tells_equal_requests_apart():
    """By a field or by a header; a request without one keeps the key that it has anyway."""
    plain = key(BodyKey(), request(b'{"a":1}'))
    by_header = BodyKey(intent="X-Intent")
    keys = [
        key(by_header, request(b'{"a":1}', headers=tuple((b"x-intent", line) for line in lines)))
        for lines in ([], [b""], [b"1"], [b"2"], [b"1", b"2"], [b"12"])
    ]
    assert keys[0] == plain
    assert len(set(keys)) == len(keys)
    assert keys[2] == key(by_header, request(b'{"a":1}', headers=((b"x-intent", b" 1\t"),)))
    # A proxy may join the lines of a name on one try, and not on the next.
    assert keys[4] == key(by_header, request(b'{"a":1}', headers=((b"x-intent", b"1, 2"),)))
    rule = FingerprintRule(include=("/a",))
    by_field = BodyKey(intent="/deep/intent")
    bodies = [b'{"a":1}', b'{"a":1,"deep":{"intent":"x"}}', b'{"a":1,"deep":{"intent":true}}']
    keys = [key(by_field, request(body), rule=rule) for body in bodies]
    assert keys[0] == key(BodyKey(), request(b'{"a":1}'), rule=rule)
    assert len(set(keys)) == 3
    # As with None for functions, null says nothing.
    assert key(by_field, request(b'{"a":1,"deep":{"intent":null}}'), rule=rule) == keys[0]
    with pytest.raises(KeyInvalid, match="/deep/intent"):
        key(by_field, request(b'{"a":1,"deep":{"intent":""}}'), rule=rule)


def test_an_intent_may_have_a_type():
    """What the refusal of an ambiguous value advises: two intents stay two orders."""
    rule = FingerprintRule(exclude=("/intent",))
    bodies = [b'{"intent":"%s"}' % text for text in (b"007", b"7", b"008")]
    with pytest.raises(KeyInvalid, match="/intent:text"):
        key(BodyKey(intent="/intent"), request(bodies[0]), rule=rule)
    for kind, count in (("text", 3), ("int", 2)):
        source = BodyKey(intent=f"/intent:{kind}")
        assert len({key(source, request(body), rule=rule) for body in bodies}) == count
        assert described(source).endswith(f"and by /intent ({kind})")
    with pytest.raises(PolicyInvalid, match="no type 'txt'"):
        Rule(key=BodyKey(intent="/intent:txt"))


@pytest.mark.parametrize("intent", ["a b", "/~2", "Idempotency-Key", "\u00e9", "{id:int}"])
def test_an_intent_that_nothing_could_tell_is_refused_when_it_is_configured(intent):
    with pytest.raises(PolicyInvalid, match="intent of BodyKey"):
        Rule(key=BodyKey(intent=intent))
    with pytest.raises(PolicyInvalid, match="intent of BodyKey"):
        HeaderKey(otherwise=BodyKey(intent=intent))


@pytest.mark.parametrize("otherwise", [FieldsKey("/a", window=FOREVER), HeaderKey(), "body", 5])
def test_only_a_body_key_takes_the_place_of_a_missing_header(otherwise):
    """A natural key that another key could get round would be none."""
    with pytest.raises(PolicyInvalid, match="use FieldsKey alone"):
        HeaderKey(otherwise=otherwise)


@pytest.mark.parametrize("source", [BodyKey(), FieldsKey("{id}", window=FOREVER)])
def test_a_clients_key_never_looks_like_one_that_is_made_from_its_request(source):
    made = str(key(source, request(parameters={"id": "7"})))
    with pytest.raises(KeyInvalid, match="by the server alone"):
        require_own_key(made)
    for text in ("body", "body:1", made[:-1], made + "x", "x" + made):
        require_own_key(text)


@pytest.mark.parametrize("secret", [None, b"", b"short"])
def test_a_body_key_needs_a_secret(secret):
    with pytest.raises(SecretMissing):
        key(BodyKey(), request(), secret=secret)


def test_the_header_leaves_the_policy_as_it_is():
    policy = Policy()
    assert HeaderKey().checked(policy, None) is policy


def test_a_natural_key_says_how_long_it_is_remembered():
    """A day by default would pay invoice 42 again on day two; both choices are in the message."""
    with pytest.raises(PolicyInvalid, match=r"window=FOREVER.*window=timedelta\(days=30\)"):
        FieldsKey("/invoice")
    policy = FieldsKey("/invoice", window=FOREVER).checked(Policy(), None)
    # The outcome goes with the audit, the key stays.
    assert (policy.active_window, policy.audit_window) == (FOREVER, Policy().audit_window)
    policy = FieldsKey("/invoice", window=timedelta(days=60)).checked(Policy(), None)
    assert policy.active_window == policy.audit_window == timedelta(days=60)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (HeaderKey(), "the Idempotency-Key header"),
        (FieldsKey("/customer", "{id}", window=FOREVER), "these fields: /customer, {id}"),
        (BodyKey(window=timedelta(minutes=5)), "all that they ask for, within 5 minutes"),
        (
            HeaderKey(otherwise=BodyKey(intent="X-Intent")),
            "the Idempotency-Key header, or else by all that they ask for, within 5 minutes, and "
            "by X-Intent",
        ),
        (BodyKey(window=timedelta(days=1)), "all that they ask for, within 1 day"),
        (BodyKey(window=timedelta(seconds=1.5)), "all that they ask for, within 1.5 seconds"),
    ],
)
def test_sources_are_told_in_words(source, text):
    """The policy page and the API's description say them to people who know no Python."""
    assert described(source) == text

"""Fingerprints of requests: what a retry may change, and what makes another request."""

from __future__ import annotations

import json
import random
from urllib.parse import quote, urlencode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrysafe.core.flights import Flight, is_same_request
from retrysafe.core.keys.canonical import DEPTH_LIMIT
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.errors import FingerprintImpossible
from retrysafe.http import fingerprints
from retrysafe.http.bodies import FIELD_LIMIT
from retrysafe.http.fingerprints import request_fingerprints
from retrysafe.http.request import Request
from tests.http.building import FORM, JSON, field, multipart, request


def _is_same(first, second):
    """Whether two requests of one operation are the same by their fingerprints."""
    return is_same_request(Flight(first, "pay"), Flight(second, "pay"))


RULE = FingerprintRule()
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
DOCUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=4,
)
PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
PAIRS = st.lists(st.tuples(PLAIN, PLAIN), max_size=5)
NAMES = st.text(st.characters(min_codepoint=0x61, max_codepoint=0x7A), min_size=1, max_size=4)
# Without CR and LF, no content can look like a boundary.
CONTENTS = st.binary(max_size=12).filter(lambda data: not set(data) & {10, 13})
FORMS = st.lists(st.tuples(NAMES, CONTENTS), max_size=4)
BOUNDARIES = st.text("abcXYZ019'()+_,-./:=?", min_size=1, max_size=70)


def mark(made: Request, rule: FingerprintRule = RULE) -> bytes:
    (fingerprint, *_) = request_fingerprints(made, rule)
    assert fingerprint.rule == rule.version
    assert len(fingerprint.digest) == 16
    return fingerprint.digest


def written(value: object, **options: object) -> Request:
    return request(json.dumps(value, **options).encode())


def shuffled(value: object, seed: int) -> object:
    """The same document with the names of every object in another order."""
    if isinstance(value, list):
        return [shuffled(item, seed) for item in value]
    if not isinstance(value, dict):
        return value
    names = list(value)
    random.Random(seed).shuffle(names)
    return {name: shuffled(value[name], seed) for name in names}


def by_name(pairs: list[tuple[object, object]]) -> dict[object, list[object]]:
    """What a form says: every name with its values in order."""
    fields: dict[object, list[object]] = {}
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return fields


@pytest.mark.parametrize(
    ("made", "rule", "frozen"),
    [
        (
            request(b'{"b":[1,2.50],"a":"\\u00e9"}', query=b"b=1&a=%20"),
            RULE,
            "bef5591f9776e8aa61c664f9e0707e38",
        ),
        (
            request(b'{"b":1,"a":2}'),
            FingerprintRule(version=2, exclude=("/b",)),
            "8e7bc19ffd5ed549778895af7b1b24a3",
        ),
        (
            request(b'{"b":1,"a":2}'),
            FingerprintRule(version=3, include=("/b",)),
            "2a905cd17f979c86cf527f6698efa9f7",
        ),
        (request(b"a=1&b=%20", FORM), RULE, "314bf446f465b47a01a03743bc45c0f2"),
        (
            multipart([field("a", b"1"), field("b", b"2", ("Content-Type", "x"))]),
            RULE,
            "50b6a661b320752c4bd1eaabe8a24dc4",
        ),
        (
            request(b"plain", "text/plain; charset=latin-1", path="/é"),
            RULE,
            "74a321f865db46ab35d843743fcfd50f",
        ),
        (
            request(b"", None, method="DELETE", path="/charges/7"),
            RULE,
            "80a4fc78a7e9a31fd20c3178c4eda13f",
        ),
    ],
)
def test_fingerprints_of_requests_are_frozen(made, rule, frozen):
    """They are stored: a release that changes them turns honest retries into refusals."""
    assert mark(made, rule).hex() == frozen


@given(DOCUMENTS, st.integers(), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_the_way_json_is_written_does_not_count(document, seed, is_escaped, indent):
    """Order of names, white space and escapes may differ between a request and its retry."""
    again = written(shuffled(document, seed), ensure_ascii=is_escaped, indent=indent)
    again.raw_headers = ((b"content-type", b"application/json; charset=utf-8"),)
    assert mark(again) == mark(written(document))


@given(DOCUMENTS, DOCUMENTS)
@example({"a": 1}, {"a": True})
@example({"a": 1}, {"a": "1"})
@example({"a": None}, {})
def test_requests_are_equal_exactly_when_their_documents_are(first, second):
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (mark(written(first)) == mark(written(second))) == same


@given(PAIRS, PAIRS)
@example([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")])
@example([("a", "1"), ("a", "2")], [("a", "2"), ("a", "1")])
@example([("a", "b"), ("", "")], [("a", "b")])
def test_forms_and_queries_are_equal_exactly_when_their_fields_are(first, second):
    """The order counts within a name, and not between names; escapes do not count."""

    def as_form(pairs: object) -> Request:
        return request(urlencode(pairs).encode(), FORM)

    def as_query(pairs: object) -> Request:
        return request(query=urlencode(pairs, quote_via=quote).encode())

    same = by_name(first) == by_name(second)
    assert (mark(as_form(first)) == mark(as_form(second))) == same
    assert (mark(as_query(first)) == mark(as_query(second))) == same


@given(PAIRS)
def test_the_way_a_form_is_escaped_does_not_count(pairs):
    plus, percent = urlencode(pairs), urlencode(pairs, quote_via=quote)
    everything = "&".join(
        "=".join("".join(f"%{byte:02x}" for byte in text.encode()) for text in pair)
        for pair in pairs
    )
    marks = {mark(request(text.encode(), FORM)) for text in (plus, percent, everything)}
    assert len(marks) == 1


@given(FORMS, BOUNDARIES, BOUNDARIES)
def test_a_retry_may_choose_a_new_boundary(parts, first, second):
    made = [field(name, content, ("Content-Type", "text/plain")) for name, content in parts]
    other = [
        ([("content-type", "text/plain"), ("Content-Length", "1"), *head[:1]], content)
        for head, content in made
    ]
    assert mark(multipart(made, first)) == mark(multipart(other, second, end=b""))


@given(FORMS, FORMS, st.sampled_from(["form-data", "mixed"]))
@example([("a", b"1"), ("b", b"2")], [("b", b"2"), ("a", b"1")], "form-data")
@example([("a", b"1"), ("b", b"2")], [("b", b"2"), ("a", b"1")], "mixed")
def test_multipart_bodies_are_equal_exactly_when_their_parts_are(first, second, subtype):
    def made(parts: list[tuple[str, bytes]], boundary: str) -> Request:
        fields = [field(name, content) for name, content in parts]
        return multipart(fields, boundary, subtype=subtype)

    same = by_name(first) == by_name(second) if subtype == "form-data" else first == second
    assert (mark(made(first, "one")) == mark(made(second, "two"))) == same


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_a_changed_file_counts(first, second):
    def upload(content: bytes, name: str = "a.png") -> Request:
        head = [("Content-Disposition", f'form-data; name="f"; filename="{name}"')]
        return multipart([(head, content)], boundary="not-in-eight-bytes")

    assert (mark(upload(first)) == mark(upload(second))) == (first == second)
    assert mark(upload(first)) != mark(upload(first, "b.png"))


def test_method_path_query_type_encoding_and_body_count():
    """Each of these alone makes another request."""
    body = b'{"a":1}'
    requests = [
        request(body),
        request(body, method="PUT"),
        request(body, path="/charges/7"),
        request(body, path="/Charges"),
        request(body, query=b"a=1"),
        request(body, query=b"a=2"),
        request(body, query=b"a=1&a=1"),
        request(b'{"a":2}'),
        request(b'{"a":1}x'),
        request(b""),
        request(b"null"),
        request(body, None),
        request(body, "text/plain"),
        request(body, "text/plain; charset=utf-8"),
        request(body, "application/merge-patch+json"),
        request(body, FORM),
        request(body, "application/json; charset=utf-16"),
        request(body, headers=((b"content-encoding", b"gzip"),)),
        request(body, headers=((b"content-encoding", b"br"),)),
        request(body, headers=((b"content-type", b"gzip"),)),
    ]
    assert len({mark(made) for made in requests}) == len(requests)


def test_paths_and_types_of_any_length_are_told_apart_and_long_ones_are_not_kept():
    """Clients choose both, so what is kept of them in memory is bounded."""
    fingerprints._begun_before.cache_clear()
    marks = set()
    for length in (400, 40_000):
        path, kind = "/" + "p" * length, "text/" + "t" * (length // 10)
        for made_path, made_kind in ((path, kind), (path + "1", kind), (path, kind + "1")):
            made = request(b"{}", made_kind)
            made.path = made_path
            marks.add(mark(made))
            assert mark(made) in marks
    assert len(marks) == 6
    assert fingerprints._begun_before.cache_info().currsize == 3


def test_other_headers_do_not_count():
    """A retry has a new date, a new trace and maybe a new token."""
    more = ((b"date", b"x"), (b"traceparent", b"y"), (b"content-length", b"7"))
    assert mark(request(b'{"a":1}', headers=more)) == mark(request(b'{"a":1}'))


HEADED = FingerprintRule(version=2, headers=("X-Tenant", "if-match"))


def headed(*lines: tuple[bytes, bytes], body: bytes = b'{"a":1}', **more) -> Request:
    return request(body, headers=lines, **more)


def test_headers_count_where_the_rule_names_them():
    """By their values, in the order of their names; absent, empty and moved are other requests."""
    requests = [
        headed(),
        headed((b"x-tenant", b"")),
        headed((b"x-tenant", b"-")),
        headed((b"x-tenant", b"a")),
        headed((b"x-tenant", b"A")),
        headed((b"if-match", b"a")),
        headed((b"x-tenant", b"a"), (b"if-match", b"a")),
        headed((b"x-tenant", b"a"), (b"x-tenant", b"b")),
        headed((b"x-tenant", b"b"), (b"x-tenant", b"a")),
    ]
    assert len({mark(made, HEADED) for made in requests}) == len(requests)
    assert len({mark(made) for made in requests}) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(b"x-tenant", b"a")], [(b"x-tenant", b" a\t")]),
        ([(b"x-tenant", b"a"), (b"x-tenant", b"b")], [(b"x-tenant", b"a, b")]),
        ([(b"x-tenant", b"a"), (b"if-match", b"b")], [(b"if-match", b"b"), (b"x-tenant", b"a")]),
        ([(b"x-tenant", b"a"), (b"x-other", b"b")], [(b"x-tenant", b"a")]),
    ],
)
def test_what_proxies_change_in_headers_does_not_count(first, second):
    """Blanks around a value, lines of one name that are joined, the order of the names."""
    assert mark(headed(*first), HEADED) == mark(headed(*second), HEADED)


def test_headers_cannot_be_shifted_into_the_body_or_another_header():
    marks = {
        mark(headed((b"x-tenant", tenant), (b"if-match", tag), body=body), HEADED)
        for tenant, tag, body in (
            (b"ab", b"c", b"r"),
            (b"a", b"bc", b"r"),
            (b"abc", b"", b"r"),
            (b"ab", b"", b"cr"),
            (b"", b"", b"abcr"),
        )
    }
    assert len(marks) == 5


def test_parameters_of_the_media_type_count_where_the_rule_says_so():
    rule = FingerprintRule(media_type_parameters=True)
    kinds = [
        "application/json",
        "application/json; v=1",
        "application/json; v=2",
        "application/json; v=1; w=2",
        "application/json; charset=utf-8",
        "application/json; =",
    ]
    assert len({mark(request(b"{}", kind), rule) for kind in kinds}) == len(kinds)
    plain = {mark(request(b"{}", kind)) for kind in kinds[:-1]}
    assert len(plain) == 1
    again = 'application/json ;W=2 ; V="1"'
    assert mark(request(b"{}", again), rule) == mark(request(b"{}", kinds[3]), rule)
    parts = [multipart([field("a", b"1")], boundary) for boundary in ("one", "two")]
    assert len({mark(made, rule) for made in parts}) == 1
    twice = request(b"{}", headers=((b"content-type", b"text/plain"),))
    assert mark(twice, rule) != mark(request(b"{}"), rule)
    assert mark(request(b"{}", None), rule) != mark(request(b"{}"), rule)


def test_a_media_type_past_the_limit_is_refused():
    rule = FingerprintRule(media_type_parameters=True)
    with pytest.raises(FingerprintImpossible, match="bytes in Content-Type"):
        mark(request(b"{}", headers=((b"content-type", b"x" * 5_000),)), rule)


def test_fields_of_the_query_can_be_left_out():
    rule = FingerprintRule(exclude_query=("ts", "\u00e9"))
    same = [b"a=1", b"a=1&ts=1", b"ts&a=1&ts=2", b"%74s=1&a=1", b"a=1&%C3%A9=1"]
    assert len({mark(request(query=query), rule) for query in same}) == 1
    assert mark(request(query=b"ts=1"), rule) == mark(request(), rule)
    others = [b"a=1", b"a=2&ts=1", b"b=1", b"TS=1&a=1", b""]
    assert len({mark(request(query=query), rule) for query in others}) == len(others)


def test_a_rule_that_reads_the_head_replaces_one_that_does_not():
    """Retries of requests from before the deploy still match, whatever their headers."""
    old = FingerprintRule()
    new = FingerprintRule(version=2, headers=("If-Match",), exclude_query=("ts",), previous=(old,))
    made = headed((b"if-match", b"1"), query=b"ts=1")
    before = request_fingerprints(made, old)
    assert request_fingerprints(made, new)[1:] == before
    assert _is_same(request_fingerprints(made, new), before)
    assert not _is_same(request_fingerprints(headed(query=b"ts=2"), new), before)
    after = request_fingerprints(made, new)
    assert not _is_same(request_fingerprints(headed((b"if-match", b"2")), new), after)


@given(
    st.tuples(*[st.text("/a1:", max_size=4)] * 2, *[st.binary(max_size=4)] * 2),
    st.tuples(*[st.text("/a1:", max_size=4)] * 2, *[st.binary(max_size=4)] * 2),
)
@example(("a", "bc", b"", b""), ("ab", "c", b"", b""))
@example(("", "1:a", b"", b""), ("1:a", "", b"", b""))
@example(("", "", b"", b"r"), ("", "", b"r", b""))
def test_nothing_can_be_shifted_from_one_part_into_another(first, second):
    """Bodies that count byte by byte are equal exactly when all parts of the requests are."""

    def made(parts: tuple[str, str, bytes, bytes]) -> Request:
        method, path, kind, body = parts
        return Request(method, path, b"", [(b"content-type", b"x/" + kind)], body)

    def shown(parts: tuple[str, str, bytes, bytes]) -> tuple[object, ...]:
        return (*parts[:2], parts[2].strip(b" \t"), parts[3])

    assert (mark(made(first)) == mark(made(second))) == (shown(first) == shown(second))


@given(st.binary(max_size=20))
def test_raw_bytes_never_meet_a_reading(body):
    """No body can be made whose bytes look like the canonical form of another."""
    readable = mark(request(b'{"a":1}'))
    for data in (body, b"j" + body, b"j{1:a3:#1e0"):
        assert mark(request(data, "text/plain")) != readable
        assert mark(request(b"\xff" + data)) != readable


def test_a_query_with_too_many_fields_is_refused():
    many = b"&".join(b"%d" % number for number in range(FIELD_LIMIT))
    assert mark(request(query=many)) != mark(request(query=many[:-1]))
    with pytest.raises(FingerprintImpossible, match="10,000 fields"):
        mark(request(query=many + b"&"))


@pytest.mark.parametrize("depth", [DEPTH_LIMIT + 1, 100_000])
def test_json_that_is_nested_too_deep_is_refused(depth):
    """At the limit it counts by its value; past it, and past what Python can read, nothing does."""
    good = b"[" * DEPTH_LIMIT + b"]" * DEPTH_LIMIT
    assert mark(request(good)) == mark(request(good + b" "))
    with pytest.raises(FingerprintImpossible, match="200 levels"):
        mark(request(b"[" * depth + b"]" * depth))


def test_a_stack_that_is_nearly_full_refuses_instead_of_failing():
    """How deep a body can be read depends on the stack that is left: too little is a refusal, never
    another fingerprint and never a RecursionError."""

    def below(frames):
        return mark(request(deep)) if frames == 0 else below(frames - 1)

    deep = b"[" * 150 + b"]" * 150
    expected, outcomes = mark(request(deep)), set()
    for frames in range(600, 1_000, 7):
        try:
            outcomes.add(below(frames) == expected)
        except FingerprintImpossible:
            outcomes.add("refused")
        except RecursionError:
            break  # There is not even room to begin.
    assert outcomes == {True, "refused"}


EXCLUDING = FingerprintRule(exclude=("/sent_at", "/meta/trace"))
INCLUDING = FingerprintRule(include=("/amount",))


def forms(**fields: str) -> list[Request]:
    """The same flat fields in every kind of body that has fields."""
    return [
        written(fields),
        request(urlencode(fields).encode(), FORM),
        multipart([field(name, text.encode()) for name, text in fields.items()]),
    ]


def test_excluded_fields_do_not_count_in_any_kind_of_body():
    first, again = forms(amount="1", sent_at="9"), forms(sent_at="10", amount="1")
    without, other = forms(amount="1"), forms(amount="2", sent_at="9")
    for made in zip(first, again, without, other, strict=True):
        marks = [mark(each, EXCLUDING) for each in made]
        assert marks[0] == marks[1] == marks[2] != marks[3]


def test_only_included_fields_count_in_any_kind_of_body():
    first, again = forms(amount="1", note="x"), forms(note="y", amount="1")
    other, absent = forms(amount="2", note="x"), forms(note="x")
    for made in zip(first, again, other, absent, strict=True):
        marks = [mark(each, INCLUDING) for each in made]
        assert marks[0] == marks[1]
        assert len(set(marks)) == 3


def test_excluded_fields_inside_others_do_not_count():
    first = written({"a": 1, "meta": {"trace": 1, "k": 1}})
    assert mark(first, EXCLUDING) == mark(written({"a": 1, "meta": {"k": 1}}), EXCLUDING)
    assert mark(first, EXCLUDING) != mark(written({"a": 1, "meta": {"k": 2}}), EXCLUDING)


def test_rules_do_not_reach_method_path_or_query():
    for changed in ({"method": "PUT"}, {"path": "/x"}, {"query": b"amount=1"}):
        assert mark(request(b"{}", **changed), INCLUDING) != mark(request(b"{}"), INCLUDING)


def test_raw_bodies_count_whole_under_every_rule():
    for rule in (EXCLUDING, INCLUDING):
        first, other = (request(body, "text/plain") for body in (b"amount=1", b"amount=1&x"))
        assert mark(first, rule) != mark(other, rule)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_new_rule_stays_comparable_to_the_records_of_the_old_one(kind):
    """Across a deploy an honest retry matches and another request does not."""
    old = FingerprintRule(version=1)
    new = FingerprintRule(version=2, exclude=("/sent_at",), previous=(old,))
    first = forms(amount="1", sent_at="9")[kind]
    other = forms(amount="2", sent_at="9")[kind]
    later = forms(amount="1", sent_at="10")[kind]
    stored = request_fingerprints(first, old)
    assert [item.rule for item in request_fingerprints(first, new)] == [2, 1]
    assert _is_same(request_fingerprints(first, new), stored)
    assert not _is_same(request_fingerprints(other, new), stored)
    assert not _is_same(request_fingerprints(later, new), stored)
    assert _is_same(request_fingerprints(later, new), request_fingerprints(first, new))


def test_every_earlier_rule_gives_the_fingerprint_that_it_gave_alone():
    rules = [FingerprintRule(version=n, exclude=(f"/{n}",)) for n in (1, 2)]
    new = FingerprintRule(version=3, previous=tuple(rules))
    made = request(b'{"1":1,"2":2}', JSON, query=b"a=1")
    assert request_fingerprints(made, new)[1:] == tuple(
        request_fingerprints(made, rule)[0] for rule in rules
    )


@pytest.mark.parametrize("path", ["/charges/", "//charges", "/charges//"])
@pytest.mark.parametrize("query", [b"", b"a=1"])
def test_slashes_make_no_other_request_unless_the_path_is_exact(path, query):
    """A retry by the other spelling is the same request."""
    rule = FingerprintRule()
    plain, other = request(b"{}", query=query), request(b"{}", path=path, query=query)
    assert request_fingerprints(plain, rule) == request_fingerprints(other, rule)
    plain.has_exact_path = other.has_exact_path = True
    assert request_fingerprints(plain, rule) != request_fingerprints(other, rule)


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_line_feed_at_the_end_of_a_path_makes_no_other_request(is_exact):
    """Not even where the path is exact: frameworks serve it as the path without it."""
    rule = FingerprintRule()
    plain, other = request(b"{}", path="/charges"), request(b"{}", path="/charges\n")
    plain.has_exact_path = other.has_exact_path = is_exact
    assert request_fingerprints(plain, rule) == request_fingerprints(other, rule)

"""Rules: what they match, and what is refused when they are made."""

from __future__ import annotations

import pytest

from retrysafe import (
    FOREVER,
    GLOBAL,
    AsyncIdempotency,
    Ending,
    FingerprintRule,
    Idempotency,
    InFlight,
    InvalidInput,
    Policy,
)
from retrysafe.core.keys.secret import NO_SECRETS
from retrysafe.core.settings import Settings
from retrysafe.errors import PolicyInvalid
from retrysafe.http import (
    ACCEPT,
    FieldsKey,
    IdempotencyMiddleware,
    Rule,
    StatusRule,
    Streaming,
    WSGIIdempotencyMiddleware,
)
from retrysafe.http.responses import Response
from retrysafe.http.routes import Route, RouteTable
from retrysafe.http.rules import checked_rules
from retrysafe.stores import MemoryStore

SETTINGS = Settings(None, Policy(), FingerprintRule(), NO_SECRETS)


def found(rules, method, path):
    """The position of the rule that matches, with its parameters."""
    table = RouteTable(rules, SETTINGS)
    match = table.find(method, path)
    if match is None:
        return None
    # The spelling of the path may have a route of its own, of the same rule.
    position = [route.rule for route in table.routes].index(match[0].rule)
    return position, dict(match[1])


@pytest.mark.parametrize(
    ("pattern", "path", "parameters"),
    [
        (None, "/anything/at/all", {}),
        ("/charges", "/charges", {}),
        ("/charges", "/charges/", {}),
        ("/charges/", "/charges", {}),
        ("/charges", "//charges", {}),
        ("/charges", "/charges///", {}),
        ("/charges", "/x/../charges", None),
        ("/charges", "/./charges", None),
        ("/charges", "/Charges", None),
        ("/", "//", {}),
        ("/charges", "/chargesx", None),
        ("/charges/{id}", "/charges/7", {"id": "7"}),
        ("/charges/{id}", "/charges/", None),
        ("/charges/{id}", "/charges/7/", {"id": "7"}),
        ("/charges/{id}", "/charges//7", {"id": "7"}),
        ("/charges/{id}/", "/charges/7", {"id": "7"}),
        ("/charges/{id}/", "/charges/7/", {"id": "7"}),
        ("/charges/{id}", "/charges/7/refunds", None),
        ("/c/{a}/r/{b}", "/c/1/r/2", {"a": "1", "b": "2"}),
        ("/f/{name}.json", "/f/a.json", {"name": "a"}),
        ("/f/{name}.json", "/f/axjson", None),
        ("/v1/*", "/v1/a/b", {}),
        ("/v1/*", "/v1/", {}),
        ("/v1/*", "/v1", {}),
        ("/v1/*", "/v10", None),
        ("/v1/*", "//v1//a/", {}),
        ("/v1/*", "/v1/a\nb", {}),
        ("/{version}/*", "/v2/a", {"version": "v2"}),
    ],
)
def test_paths_match_as_written(pattern, path, parameters):
    """Braces take one segment, a star at the end everything below, other characters themselves."""
    expected = None if parameters is None else (0, parameters)
    assert found([Rule(path=pattern)], "POST", path) == expected


def test_the_first_rule_that_matches_counts_whatever_its_kind():
    """Plain paths are looked up and patterns tried, but only the order decides."""
    rules = [
        Rule(path="/a/{id}", methods=("POST",)),
        Rule(path="/a/b", methods=("PUT", "DELETE")),
        Rule(path="/a/b", methods=("DELETE", "PATCH")),
        Rule(path="/a/*"),
        Rule(path="/off", protected=False),
        Rule(),
    ]
    assert found(rules, "POST", "/a/b") == (0, {"id": "b"})
    assert found(rules, "PUT", "/a/b") == (1, {})
    assert found(rules, "DELETE", "/a/b") == (1, {})
    assert found(rules, "PATCH", "/a/b") == (2, {})
    assert found(rules, "PUT", "/a/c") == (3, {})
    assert found(rules, "PUT", "/off") is None
    assert found(rules, "PUT", "/x") == (5, {})
    assert found(rules, "GET", "/a/b") is None
    assert found(rules[:1], "PUT", "/a/b") is None
    assert found([], "POST", "/a") is None


def test_records_are_listed_under_the_route_or_the_rules_name():
    """Operators see method and pattern unless the rule has a name."""
    table = RouteTable(
        [Rule(path="/c/{id}"), Rule(path="/" + "x" * 300), Rule(name="charge")], SETTINGS
    )
    assert table.routes[0].operations["POST"] == "POST /c/{id}"
    assert len(table.routes[1].operations["POST"]) == 255
    assert table.routes[2].operations == dict.fromkeys(("POST", "PUT", "PATCH", "DELETE"), "charge")


@pytest.mark.parametrize(
    ("in_flight", "of_policy", "expected"),
    [
        (None, InFlight.WAIT, (InFlight.WAIT, False)),
        (None, InFlight.FAIL, (InFlight.FAIL, False)),
        (InFlight.WAIT, InFlight.FAIL, (InFlight.WAIT, False)),
        (InFlight.FAIL, InFlight.WAIT, (InFlight.FAIL, False)),
        (ACCEPT, InFlight.WAIT, (InFlight.FAIL, True)),
    ],
)
def test_what_a_rule_says_of_duplicates_comes_before_its_policy(in_flight, of_policy, expected):
    """The rest of the policy stays; one that is accepted is not waited for."""
    policy = Policy(in_flight=of_policy, attempt_limit=3)
    route = Route(Rule(policy=policy, in_flight=in_flight), SETTINGS)
    assert (route.policy.in_flight, route.accepts_duplicates) == expected
    assert route.policy.attempt_limit == 3


def test_a_policy_does_not_take_what_only_http_can_answer():
    """And the word that it is shown by is the one that people write."""
    with pytest.raises(PolicyInvalid, match="got ACCEPT"):
        Policy(in_flight=ACCEPT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "charges"}, "slash"),
        ({"path": 7}, "slash"),
        ({"methods": ()}, "at least one"),
        ({"methods": ("GET",)}, "GET is safe"),
        ({"methods": ("post", "head")}, "HEAD is safe"),
        ({"methods": ("PSOT",)}, r"'PSOT' is no method of HTTP: did you mean POST\?"),
        ({"methods": ("POST", "PTACH")}, "did you mean PATCH"),
        ({"methods": "*"}, r"'\*' is no method of HTTP: write POST, for example"),
        ({"methods": (7,)}, "7 is no method of HTTP"),
        ({"required": "yes"}, "a rule's required is a bool, got 'yes'"),
        ({"protected": 0}, "a rule's protected is a bool, got 0"),
        ({"key": True}, "HeaderKey.* got True. .* required=False, .* protected=False"),
        ({"streaming": True}, "Streaming"),
        ({"stored": (200,)}, "StatusRule"),
        ({"strict": 1}, "bool"),
        ({"key": "header"}, "HeaderKey"),
        ({"request_limit_bytes": -1}, "request_limit_bytes"),
        ({"request_limit_bytes": True}, "request_limit_bytes"),
        ({"in_flight": "wait"}, "InFlight.FAIL, InFlight.WAIT or ACCEPT, got 'wait'"),
        ({"in_flight": ACCEPT, "streaming": Streaming.PASS}, "ACCEPT promises a status URL"),
        ({"in_flight": ACCEPT, "transaction": lambda: None}, "ACCEPT promises a status URL"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(options, message):
    """When it is made, not when the first request comes."""
    with pytest.raises(PolicyInvalid, match=message):
        Rule(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/a/{id"}, "no pattern"),
        ({"path": "/a/{0}"}, "no pattern"),
        ({"path": "/{a*}/b{c}"}, "no pattern"),
        ({"path": "/*/a/*"}, "no pattern"),
        ({"path": "/*/1"}, "no pattern"),
        ({"path": "/a/**"}, "no pattern"),
        ({"path": "/a<b"}, "no pattern"),
        ({"path": "/charges/:id"}, r"match nothing: write \{id\} for that segment"),
        ({"path": "/charges/<id>"}, r"write \{id\} for"),
        ({"path": "/v2/<int:n>/x"}, r"write \{n\} for"),
        ({"path": "/v2/{a}/:b"}, r"write \{b\} for"),
        ({"path": "/{id}/{id}"}, "twice"),
        ({"path": "/charges?x=1"}, "match nothing: leave out the query"),
        ({"path": "/charges#new"}, "match nothing: leave out the query and the fragment"),
        ({"path": "/charges "}, "match nothing: leave out blanks at its end"),
        ({"path": "/charges\n"}, "match nothing: leave out blanks at its end"),
        ({"path": "/my%20charges"}, "match nothing: write the character itself"),
        ({"path": "/v1\\charges"}, "match nothing: write slashes"),
        ({"path": "/v1//{id}"}, "match nothing: write single slashes"),
        ({"path": "/v1/../charges"}, r"match nothing: leave out \. and"),
        ({"path": "/v1/."}, r"match nothing: leave out \. and"),
        ({"headers": ("Set-Cookie",)}, "set-cookie"),
        ({"headers": "X-A"}, "list of header names"),
    ],
)
def test_a_route_that_cannot_work_is_refused(options, message):
    """Together with the rest of the table."""
    with pytest.raises(PolicyInvalid, match=message):
        RouteTable([Rule(**options)], SETTINGS)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ([{}], {"path": "/charges"}),
        ([{}], {}),
        ([{"path": "/*"}], {}),
        ([{"path": "/v1/*"}], {"path": "/v1/charges", "protected": False}),
        ([{"path": "/v1/*"}], {"path": "/v1/{kind}/*"}),
        ([{"path": "/v1/*"}], {"path": "/v1"}),
        ([{"path": "/charges"}], {"path": "/charges"}),
        ([{"path": "/charges"}], {"path": "/charges", "exact_path": True}),
        ([{"path": "/c/{id}"}], {"path": "/c/{order}"}),
        ([{"path": "/c/{id}"}], {"path": "/c/7"}),
        ([{"path": "/c/{id}", "protected": False}], {"path": "/c/{id}.json"}),
        (
            [{"methods": "POST"}, {"path": "/a", "methods": "PUT"}],
            {"path": "/a", "methods": ("POST", "PUT")},
        ),
        # Only together they take all of it.
        ([{"path": "/v1"}, {"path": "/v1/{a}/*"}], {"path": "/v1/*"}),
    ],
)
def test_a_rule_that_no_request_can_reach_is_refused(earlier, later):
    """What it says would be lost in silence; the message names who takes its requests."""
    rules = [Rule(**options) for options in (*earlier, later)]
    with pytest.raises(
        PolicyInvalid, match=rf"^rule {len(rules)} \(.*would never count.*rule 1 \("
    ):
        RouteTable(rules, SETTINGS)


def test_the_refusal_of_a_rule_says_which_one_comes_before_it():
    """And what to do."""
    rules = [Rule(path="/x"), Rule(path="/v1/*"), Rule(path="/v1/{id}", methods="POST")]
    told = (
        "rule 3 (POST /v1/{id}) would never count, because the first rule that matches does: rule "
        "2 (/v1/*) matches all its requests. Put the rule for fewer requests first, or leave it out"
    )
    with pytest.raises(PolicyInvalid) as caught:
        RouteTable(rules, SETTINGS)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ([{"path": "/charges"}], {}),
        ([{"path": "/v1/charges"}], {"path": "/v1/*"}),
        ([{"methods": "POST"}], {"path": "/charges"}),
        ([{"path": "/c/7"}], {"path": "/c/{id}"}),
        ([{"path": "/c/{id}.json"}], {"path": "/c/{id}"}),
        ([{"path": "/charges", "exact_path": True}], {"path": "/charges"}),
        ([{"path": "/charges/"}], {"path": "/charges"}),
        ([{"path": "/v1/{a}"}, {"path": "/v1"}, {"path": "/v1/{a}/{b}"}], {"path": "/v1/*"}),
        ([{"path": "/v1/{a}/*"}], {"path": "/v1/*"}),
        ([{"path": "/v1/*", "exact_path": True}], {"path": "/v1"}),
    ],
)
def test_a_rule_that_some_request_reaches_is_taken(earlier, later):
    """However few they are."""
    RouteTable([Rule(**options) for options in (*earlier, later)], SETTINGS)


def test_methods_may_be_one_and_in_any_case():
    """One name alone is what people write first, and other standards have methods too."""
    assert Rule(methods="post").methods == ("POST",)
    assert found([Rule(path="/a", methods=["mkcol"])], "MKCOL", "/a") == (0, {})


def test_a_colon_inside_a_segment_is_a_character_like_others():
    """Some name actions that way."""
    assert found([Rule(path="/charges/{id}:cancel")], "POST", "/charges/7:cancel") == (
        0,
        {"id": "7"},
    )
    assert found([Rule(path="/charges:batch")], "POST", "/charges:batch") == (0, {})


@pytest.mark.parametrize("rules", [["/charges"], "/charges", [Rule(), "/charges"]])
def test_rules_are_rules(rules):
    """A path alone is a likely guess."""
    with pytest.raises(PolicyInvalid, match=r"a rule is a Rule.*, got '/charges'"):
        checked_rules(rules)
    if not isinstance(rules, str):
        # Applications whose rules may be empty come straight here.
        with pytest.raises(PolicyInvalid, match=r"a rule is a Rule.*, got '/charges'"):
            RouteTable(rules, SETTINGS)


def test_statuses_end_attempts():
    """Below 400 succeeded, kept refusals failed, the rest released; both lists change that."""
    rule = StatusRule()
    endings = {status: rule.ending(status) for status in (200, 399, 400, 408, 425, 429, 499, 500)}
    assert endings == {
        200: Ending.SUCCEEDED,
        399: Ending.SUCCEEDED,
        400: Ending.FAILED,
        408: Ending.RELEASED,
        425: Ending.RELEASED,
        429: Ending.RELEASED,
        499: Ending.FAILED,
        500: Ending.RELEASED,
    }
    assert rule.ending(101) is Ending.RELEASED
    changed = StatusRule(kept=(429, 501), freed=(404, 200))
    assert changed.ending(429) is Ending.FAILED
    assert changed.ending(501) is Ending.FAILED
    assert changed.ending(404) is changed.ending(200) is Ending.RELEASED
    for options, message in (
        ({"kept": (99,)}, "from 200 to 599"),
        ({"freed": ("404",)}, "from 200 to 599"),
        ({"kept": (404,), "freed": (404,)}, "both"),
    ):
        with pytest.raises(PolicyInvalid, match=message):
            StatusRule(**options)


def test_an_empty_list_of_rules_is_refused():
    """Left out it means everything, so empty it must not mean nothing."""
    with pytest.raises(PolicyInvalid, match="protect nothing"):
        checked_rules([])
    assert checked_rules(None) is None
    assert checked_rules(iter([Rule()])) == (Rule(),)


@pytest.mark.parametrize(
    ("middleware", "face"),
    [(IdempotencyMiddleware, Idempotency), (WSGIIdempotencyMiddleware, AsyncIdempotency)],
)
def test_the_wrong_face_is_refused_when_the_application_is_built(middleware, face):
    """Else the first request would be the one to find out."""
    with pytest.raises(InvalidInput, match="needs an"):
        middleware(lambda *args: None, face(MemoryStore()), caller=GLOBAL)
    with pytest.raises(InvalidInput, match="needs an"):
        middleware(lambda *args: None, "sqlite:///b.db", caller=GLOBAL)


def test_an_exact_path_is_one_spelling():
    """With `exact_path`, slashes make another path, for plain ones and for patterns."""
    rules = [
        Rule(path="/charges", exact_path=True),
        Rule(path="/c/{id}", exact_path=True),
        Rule(path="/c/{id}/refunds", exact_path=True),
    ]
    assert found(rules, "POST", "/charges") == (0, {})
    assert found(rules, "POST", "/c/7") == (1, {"id": "7"})
    for path in ("/charges/", "//charges", "/c/7/", "/c//7"):
        assert found(rules, "POST", path) is None
    assert found([Rule(path="/v1//{id}", exact_path=True)], "POST", "/v1//7") == (0, {"id": "7"})
    # Not a slash: it is served as the path without it.
    assert found(rules, "POST", "/charges\n") == (0, {})
    assert found(rules, "POST", "/c/7/refunds\n") == (2, {"id": "7"})


def test_another_spelling_does_not_slip_to_a_later_rule():
    """A wide rule that is off does not take what an earlier one protects, by its other spelling."""
    rules = [Rule(path="/charges"), Rule(path="/c/{id}"), Rule(path="/*", protected=False)]
    assert found(rules, "POST", "/charges/") == (0, {})
    assert found(rules, "POST", "/c/7/") == (1, {"id": "7"})
    assert found(rules, "POST", "/other/") is None


def test_the_spelling_of_a_rule_comes_before_the_other_one():
    """Two rules that differ in their last slash are two rules."""
    rules = [Rule(path="/charges/", name="a"), Rule(path="/charges", name="b")]
    assert found(rules, "POST", "/charges/") == (0, {})
    assert found(rules, "POST", "/charges") == (1, {})


def test_a_path_is_covered_by_a_rule_that_is_off():
    """Somebody has decided about it."""
    table = RouteTable([Rule(path="/charges"), Rule(path="/open/*", protected=False)], SETTINGS)
    assert table.is_covered("POST", "/charges/")
    assert table.is_covered("POST", "/open/a")
    assert not table.is_covered("POST", "/other")
    assert not table.is_covered("GET", "/charges")


@pytest.mark.parametrize("status", [301, 404, 405])
def test_a_spelling_that_is_not_served_does_not_take_the_key(status):
    """Beside the rule's own spelling these free the key, unless they are named as kept.

    What an endpoint answers is what it came to, by whatever spelling it was reached.
    """
    rule = StatusRule()
    assert rule.ending_beside(Response(status, [], b"")) is not Ending.RELEASED
    response = Response(status, [], b"", is_unserved=True)
    assert rule.ending_of(response) is not Ending.RELEASED
    assert rule.ending_beside(response) is Ending.RELEASED
    assert StatusRule(kept=[status]).ending_beside(response) is not Ending.RELEASED
    assert rule.ending_beside(Response(201, [], b"")) is Ending.SUCCEEDED
    # Posting and being sent to the receipt is done.
    assert rule.ending_beside(Response(302, [], b"")) is Ending.SUCCEEDED


@pytest.mark.parametrize("status", [307, 308])
def test_a_request_that_is_to_be_sent_elsewhere_frees_its_key(status):
    """Nothing was done, and a client that follows must not get the same answer again."""
    assert StatusRule().ending(status) is Ending.RELEASED
    assert StatusRule(kept=[status]).ending(status) is Ending.SUCCEEDED


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"path": None}, "covers all paths: its operations would share their keys"),
        ({"path": "/v1/*"}, "covers everything in /v1/\\*"),
        ({"path": "/orders"}, r"/orders has no such parameter \(it has none\): write /id"),
        ({"path": "/orders/{order}"}, r"it has \{order\}"),
    ],
)
def test_a_natural_key_is_of_one_operation_and_of_what_its_path_names(rule, told):
    """Else two operations would meet in one key, and every request would be refused."""
    source = FieldsKey("{id}", window=FOREVER)
    with pytest.raises(PolicyInvalid, match=told):
        RouteTable([Rule(key=source, **rule)], SETTINGS)
    # A rule that is off makes no keys.
    RouteTable([Rule(key=source, protected=False, **rule)], SETTINGS)
    RouteTable([Rule(key=source, path="/orders/{id}/pay")], SETTINGS)

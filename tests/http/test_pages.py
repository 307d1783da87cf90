"""The policy page and the status page, in both worlds."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe import FOREVER, BodyKey, Ending, FingerprintRule, InFlight, InvalidInput, Policy
from retrysafe.errors import PolicyInvalid
from retrysafe.http import ACCEPT, FieldsKey, HeaderKey, Rule, StatusRule, Streaming
from retrysafe.http.problems import KINDS
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, ManualClock, Moment

RULES = [
    Rule(path="/off", protected=False),
    Rule(
        path="/charges/{id}",
        methods=("POST",),
        policy=Policy(
            active_window=timedelta(hours=2),
            in_flight=InFlight.WAIT,
            wait_limit=timedelta(seconds=7),
            outcome_limit_bytes=4321,
        ),
        fingerprint=FingerprintRule(include=("/amount",)),
        stored=StatusRule(freed=(404,)),
        headers=("X-Total",),
        strict=True,
        request_limit_bytes=1234,
    ),
    Rule(path="/feed", streaming=Streaming.PASS, key=FieldsKey("/order", window=FOREVER)),
    Rule(
        path="/a&b",
        required=False,
        fingerprint=FingerprintRule(exclude=("/sent_at",)),
    ),
]


def test_the_policy_is_made_from_the_live_rules(make_subject):
    """Programs read every route with what is in force for it."""
    subject = make_subject(rules=RULES)
    reply = subject.ask("GET", "/idempotency-policy", accept="application/json")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["vary"] == "accept"
    off, charges, feed, odd = reply.json["routes"]
    assert off == {
        "path": "/off",
        "methods": ["POST", "PUT", "PATCH", "DELETE"],
        "key": "off",
    }
    assert charges["key"] == "required"
    assert charges["bare_keys"] is False
    assert charges["retention_seconds"] == 7200
    assert (charges["in_flight"], charges["wait_limit_seconds"]) == ("wait", 7)
    assert charges["freed_statuses"] == ["307-308", "404", "408", "425", "429", "500-599"]
    assert "x-total" in charges["stored_headers"]
    assert charges["same_request"].endswith("these fields: /amount")
    assert (charges["request_limit_bytes"], charges["response_limit_bytes"]) == (1234, 4321)
    assert feed["response_is_kept"] is False
    assert feed["key_source"] == "these fields: /order"
    assert charges["key_source"] == "the Idempotency-Key header"
    assert (charges["responds_async"], feed["responds_async"]) == (True, False)
    assert odd["same_request"].endswith("without these fields: /sent_at")
    assert reply.json["status_url"] == "/idempotency-status/{key}"
    assert reply.json["key"]["characters_limit"] == 255


def test_every_problem_has_its_anchor(make_subject):
    """The type of each refusal leads to a place on the page for people."""
    subject = make_subject(rules=RULES)
    reply = subject.ask("GET", "/idempotency-policy", accept="text/html,application/json")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = reply.body.decode()
    for kind in KINDS:
        assert f'id="{kind.slug}"' in page
    assert "<dd>2 hours</dd>" in page
    assert "<dd>required, in the Idempotency-Key header</dd>" in page
    assert "recognised by these fields: /order</dd>" in page
    assert "/a&amp;b" in page
    assert "/a&b" not in page
    json_types = {
        item["type"]
        for item in subject.ask("GET", "/idempotency-policy", accept="application/json").json[
            "problems"
        ]
    }
    assert json_types == {f"/idempotency-policy#{kind.slug}" for kind in KINDS}


def test_nothing_is_said_of_202_where_no_route_answers_with_it(make_subject):
    """Atomic routes and streams do not, and their clients must not wait for it."""
    rules = [
        Rule(path="/orders", transaction=lambda: None),
        Rule(path="/feed", streaming=Streaming.PASS),
        Rule(path="/off", protected=False),
    ]
    told = make_subject(rules=rules).ask("GET", "/idempotency-policy").body
    assert b"respond-async" not in told
    one = make_subject(rules=[*rules, Rule(path="/charges")]).ask("GET", "/idempotency-policy").body
    assert one.count(b"respond-async") == 2
    assert b"202" in one


def test_a_route_that_accepts_duplicates_says_so(make_subject):
    """To people and to programs; 409 is for those who waited in vain."""
    rules = [Rule(path="/jobs", in_flight=ACCEPT), Rule(path="/orders", in_flight=InFlight.WAIT)]
    subject = make_subject(rules=rules)
    shown = subject.ask("GET", "/idempotency-policy", accept="application/json").json["routes"]
    assert [route["in_flight"] for route in shown] == ["accept", "wait"]
    page = subject.ask("GET", "/idempotency-policy").body.decode()
    jobs, orders = page.split("<h3><code>")[1:3]
    assert "<dd>202 with the URL where its outcome can be read, unless it prefers to wait" in jobs
    assert "409 with Retry-After when that wait runs out" in jobs
    assert "<dd>waits up to 10 s for the first response, then 409" in orders
    assert "/idempotency-status/{key}" in page


def test_the_pages_can_live_elsewhere_and_leave_the_old_paths_alone(make_subject):
    """And other methods on their paths are the application's."""
    places = {"policy_path": "/docs/retries", "status_path": "/retries"}
    subject = make_subject(rules=[Rule(protected=False)], **places)
    assert b"<h1>" in subject.ask("GET", "/docs/retries", key=None).body
    assert subject.ask("GET", "/retries/k", key=None).problem == "key-unknown"
    assert subject.ask("GET", "/idempotency-policy", key=None).body == b'{"run": 1}'
    assert subject.ask("POST", "/docs/retries", key=None).body == b'{"run": 2}'


def test_head_of_a_page_has_no_body(make_subject):
    """The headers are those of GET."""
    subject = make_subject()
    get, head = (subject.ask(method, "/idempotency-policy") for method in ("GET", "HEAD"))
    assert head.body == b""
    assert head.headers == get.headers
    assert int(head.headers["content-length"]) == len(get.body)


def test_the_status_of_a_finished_key_is_its_response(make_subject):
    """For its own caller; to everybody else the key does not exist."""
    subject = make_subject()
    subject.ask()
    reply = subject.ask("GET", "/idempotency-status/k-1", key=None)
    assert (reply.status, reply.body, reply.is_replay) == (201, b'{"run": 1}', True)
    assert reply.headers["location"] == "/charges/1"
    assert "set-cookie" not in reply.headers
    for options in ({"caller": "bob"}, {"path": "/idempotency-status/k-2"}):
        reply = subject.ask(**{"method": "GET", "path": "/idempotency-status/k-1"} | options)
        assert (reply.status, reply.problem) == (404, "key-unknown")
        assert b"run" not in reply.body
    assert subject.ask("GET", "/idempotency-status/k-1", caller=None).status == 401
    for path in ("/idempotency-status/", "/idempotency-status/" + "x" * 256):
        assert subject.ask("GET", path).problem == "key-unknown"


def test_the_status_of_a_freed_key_says_that_it_may_be_tried_again(make_subject):
    """The response of the attempt that failed is not the operation's outcome."""
    subject = make_subject()
    subject.shop.status = 503
    subject.ask()
    reply = subject.ask("GET", "/idempotency-status/k-1")
    assert (reply.status, reply.json["state"]) == (200, "released")
    assert "retry-after" not in reply.headers


def test_the_status_of_a_key_past_its_window_is_unknown(make_subject):
    """Even while its outcome is still kept for audit."""
    clock = ManualClock()
    subject = make_subject(MemoryStore(now_ms=clock))
    subject.ask()
    clock.advance(timedelta(hours=24))
    assert subject.ask("GET", "/idempotency-status/k-1").problem == "key-unknown"


def test_the_status_shows_the_present_life_of_a_key(make_subject):
    """An outcome of an earlier life is audit, not status."""
    clock = ManualClock()
    subject = make_subject(MemoryStore(now_ms=clock), face={"cache": False})
    subject.ask()
    clock.advance(timedelta(hours=24))
    subject.ask()
    assert subject.ask("GET", "/idempotency-status/k-1").body == b'{"run": 2}'


def test_the_status_is_read_without_the_audit(make_subject):
    """Clients poll it, and the audit may cost the store a scan."""

    class Noting(MemoryStore):
        reads = ()

        async def read(self, key, *, with_audit=False):
            self.reads = (*self.reads, with_audit)
            return await super().read(key, with_audit=with_audit)

    store = Noting()
    subject = make_subject(store)
    subject.ask()
    assert subject.ask("GET", "/idempotency-status/k-1").is_replay
    assert store.reads == (False,)


@pytest.mark.parametrize(
    ("policy", "slug"),
    [
        (Policy(outcome_limit_bytes=5), "outcome-unavailable"),
        (Policy(unlisted=Ending.FAILED), "operation-failed"),
        (Policy(release_limit=1), "attempts-exhausted"),
    ],
)
def test_the_status_of_an_operation_without_a_response(make_subject, policy, slug):
    """Done without one, failed for good, given up: each is told as what it is."""
    subject = make_subject(rule=Rule(policy=policy))
    if slug == "outcome-unavailable":
        subject.ask()
    else:
        subject.shop.error = LookupError("no ledger")
        with pytest.raises(LookupError):
            subject.ask()
        subject.ask()
    reply = subject.ask("GET", "/idempotency-status/k-1")
    assert reply.problem == slug
    assert reply.json["key"] == "k-1"
    # What went wrong inside is not for clients.
    assert b"ledger" not in reply.body


def test_the_status_page_tells_of_a_store_that_is_down(make_subject):
    """503, to be asked again."""
    store = FaultyStore(MemoryStore())
    subject = make_subject(store)
    store.fail(Moment.BEFORE, method="read")
    reply = subject.ask("GET", "/idempotency-status/k-1")
    assert (reply.status, reply.problem) == (503, "store-unavailable")


@pytest.mark.parametrize("caller", ["", "x" * 256, None], ids=["empty", "over-long", "nobody"])
def test_the_status_page_refuses_the_callers_that_requests_are_refused_for(make_subject, caller):
    """What is no caller gets 401 at the status URL as well, and never a 500."""
    subject = make_subject(caller=lambda _: caller)
    asked, looked = subject.ask(), subject.ask("GET", "/idempotency-status/k", key=None)
    assert (asked.status, asked.problem) == (401, "caller-unknown")
    assert (looked.status, looked.problem) == (401, "caller-unknown")
    assert looked.headers["www-authenticate"] == "Bearer"


def test_the_policy_tells_of_keys_that_may_be_left_out_and_of_headers_that_count(make_subject):
    rule = Rule(
        key=HeaderKey(otherwise=BodyKey(intent="X-Intent")),
        fingerprint=FingerprintRule(
            headers=("If-Match", "X-Tenant"), exclude_query=("ts",), media_type_parameters=True
        ),
    )
    subject = make_subject(rules=[rule], face={"secret": "a secret of these tests"})
    page = subject.ask("GET", "/idempotency-policy", accept="application/json")
    (route,) = page.json["routes"]
    assert (route["key"], route["takes_header"]) == ("optional", True)
    assert route["same_request"] == (
        "the method, the path, the query (without ts), the headers If-Match, X-Tenant, "
        "the parameters of the media type and the body"
    )
    html = subject.ask("GET", "/idempotency-policy").body.decode()
    assert "<dt>Without a key</dt><dd>repeated requests are recognised by all that they" in html


# Who may read the policy page.


def _is_staff(request):
    return request.header(b"x-staff") == b"yes"


def test_the_policy_page_can_be_for_some(make_subject):
    """Others find nothing there, and no shared cache keeps what the readers see."""
    subject = make_subject(policy_page=_is_staff)
    assert subject.ask("GET", "/idempotency-policy", x_staff="yes").status == 200
    reply = subject.ask("GET", "/idempotency-policy", x_staff="yes")
    assert reply.headers["cache-control"] == "no-store"
    hidden = subject.ask("GET", "/idempotency-policy")
    assert (hidden.status, hidden.body) == (404, b"")
    assert hidden.headers["cache-control"] == "no-store"
    assert subject.ask("HEAD", "/idempotency-policy").status == 404
    assert subject.ask(key=None).headers["link"] == '</idempotency-policy>; rel="describedby"'
    assert subject.shop.runs == []


def test_without_a_policy_page_its_path_is_the_applications(make_subject):
    """Problems keep their types, which programs tell them by, and lead nowhere; the status page
    stays."""
    subject = make_subject(policy_page=False)
    assert subject.ask("GET", "/idempotency-policy").status == 201
    assert len(subject.shop.runs) == 1
    refused = subject.ask(key=None)
    assert refused.json["type"] == "/idempotency-policy#key-missing"
    assert "link" not in refused.headers
    subject.ask()
    assert subject.ask("GET", "/idempotency-status/k-1").status == 201


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_an_unclear_answer_shows_no_policy_page(make_subject, answer):
    """A coroutine, or a user that is none, would count as true."""
    subject = make_subject(policy_page=lambda request: answer)
    with pytest.raises(InvalidInput, match="says True or False"):
        subject.ask("GET", "/idempotency-policy")


@pytest.mark.parametrize("readers", [None, "staff", 1])
def test_readers_that_are_no_function_are_refused(make_subject, readers):
    with pytest.raises(PolicyInvalid, match="policy_page is True, False"):
        make_subject(policy_page=readers)


def test_readers_are_told_by_a_plain_function(make_subject):
    async def is_staff(request):
        return True

    with pytest.raises(PolicyInvalid, match="plain function"):
        make_subject(policy_page=is_staff)

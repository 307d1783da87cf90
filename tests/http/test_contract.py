"""What both middlewares owe their clients, whichever world the application lives in."""

import logging
from datetime import timedelta

import pytest

from retrysafe import (
    FOREVER,
    GLOBAL,
    BodyKey,
    Ending,
    FingerprintRule,
    InvalidInput,
    Policy,
    StoreUnavailable,
)
from retrysafe.core.events import EventKind, Result
from retrysafe.errors import PolicyInvalid, SchemaMissing
from retrysafe.http import (
    Breaker,
    FieldsKey,
    HeaderKey,
    IdempotencyMiddleware,
    Rule,
    StatusRule,
    api_key,
    basic_user,
    bearer_token,
    gateway_header,
)
from retrysafe.runtime.calls import calls_of
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, ManualClock, Moment

SECRET = b"0123456789abcdef0123456789abcdef"


def test_a_retry_gets_the_first_response_again(make_subject):
    """Status, body and the headers on the list come back; what belongs to one client does not."""
    subject = make_subject()
    first, second = subject.ask(), subject.ask()
    assert (first.status, second.status) == (201, 201)
    assert first.body == second.body == b'{"run": 1}'
    assert second.headers["location"] == "/charges/1"
    assert second.headers["content-type"] == "application/json"
    assert second.headers["content-length"] == "10"
    assert (first.is_replay, second.is_replay) == (False, True)
    assert len(subject.shop.runs) == 1
    assert first.headers["set-cookie"] == "session=1"
    assert first.headers["x-request-id"] == "r-1"
    assert not {"set-cookie", "x-request-id", "x-total"} & second.headers.keys()


def test_a_rule_can_store_more_headers(make_subject):
    """A header that the rule names is replayed as well."""
    subject = make_subject(rules=[Rule(path="/charges", headers=("X-Total",))])
    subject.ask()
    assert subject.ask().headers["x-total"] == "1000"


def test_a_missing_key_is_refused_before_anything_runs(make_subject):
    """400 with the reason and a link to the policy."""
    subject = make_subject()
    reply = subject.ask(key=None)
    assert (reply.status, reply.problem) == (400, "key-missing")
    assert reply.json["retryable"] is False
    assert reply.json["instance"] == "/charges"
    assert reply.json["type"] == "/idempotency-policy#key-missing"
    assert reply.headers["link"] == '</idempotency-policy>; rel="describedby"'
    assert subject.shop.runs == []


@pytest.mark.parametrize("key", ['""', '"open', '"a" "b"', "a b", '"' + "x" * 256 + '"'])
def test_a_malformed_key_is_refused(make_subject, key):
    """400, and nothing runs."""
    subject = make_subject()
    reply = subject.ask(key=key)
    assert (reply.status, reply.problem) == (400, "key-invalid")
    assert subject.shop.runs == []


def test_bare_keys_are_taken_unless_the_rule_is_strict(make_subject):
    """A bare token and the quoted string of it are one key."""
    lenient = make_subject()
    assert lenient.ask(key="k-1").status == 201
    assert lenient.ask(key='"k-1"').is_replay
    strict = make_subject(rules=[Rule(strict=True)])
    assert strict.ask(key="k-1").problem == "key-invalid"


def test_another_request_under_the_same_key_is_refused(make_subject):
    """422 for another body, path, query or method; the stored response is not shown."""
    subject = make_subject(rules=[Rule()])
    subject.ask()
    for options in (
        {"body": b'{"amount":2}'},
        {"path": "/orders"},
        {"path": "/charges?x=1"},
        {"method": "PUT"},
    ):
        reply = subject.ask(**options)
        assert (reply.status, reply.problem) == (422, "key-reused")
        assert b'"run' not in reply.body
        assert reply.json["key"] == "k-1"
    assert len(subject.shop.runs) == 1


def test_equal_json_is_the_same_request_however_it_is_written(make_subject):
    """Order and blanks do not count."""
    subject = make_subject()
    subject.ask(body=b'{"a": 1, "b": 2}')
    assert subject.ask(body=b'{"b":2,"a":1}').is_replay


def test_fields_can_be_left_out_of_the_comparison(make_subject):
    """A rule's fingerprint says which fields count."""
    subject = make_subject(rules=[Rule(fingerprint=FingerprintRule(exclude=("/sent_at",)))])
    subject.ask(body=b'{"a":1,"sent_at":1}')
    assert subject.ask(body=b'{"a":1,"sent_at":2}').is_replay


def test_keys_of_two_callers_never_meet(make_subject):
    """The same key and request run once for each caller."""
    subject = make_subject()
    assert subject.ask(caller="alice").body == b'{"run": 1}'
    assert subject.ask(caller="bob").body == b'{"run": 2}'
    assert subject.ask(caller="alice").body == b'{"run": 1}'


def test_an_unknown_caller_is_refused(make_subject):
    """401 with a challenge, and nothing runs."""
    subject = make_subject(challenge='Bearer realm="shop"')
    reply = subject.ask(caller=None)
    assert (reply.status, reply.problem) == (401, "caller-unknown")
    assert reply.headers["www-authenticate"] == 'Bearer realm="shop"'
    assert subject.shop.runs == []


def test_one_namespace_for_all_must_be_written_out(make_subject):
    """GLOBAL shares keys between callers; leaving the caller out is an error."""
    subject = make_subject(caller=GLOBAL)
    subject.ask(caller="alice")
    assert subject.ask(caller="bob").is_replay
    for wrong in (None, "alice"):
        with pytest.raises(InvalidInput, match="GLOBAL"):
            make_subject(caller=wrong)


def test_a_caller_that_cannot_be_one_is_refused(make_subject):
    """An empty name is nobody's; a coroutine that nobody awaits would be everybody's."""

    async def later(name):
        return name

    subject = make_subject(caller=lambda request: "")
    reply = subject.ask()
    assert (reply.status, reply.problem) == (401, "caller-unknown")
    assert reply.headers["www-authenticate"] == "Bearer"
    hidden = make_subject(caller=lambda request: later("alice"))
    with pytest.raises(InvalidInput, match="async def"):
        hidden.ask()
    assert hidden.shop.runs == []


@pytest.mark.parametrize(
    ("caller", "challenge"),
    [
        (bearer_token, "Bearer"),
        (basic_user, 'Basic realm="api"'),
        (api_key(), 'APIKey in="header", name="X-API-Key"'),
        (gateway_header("X-Account"), "Bearer"),
        (lambda request: None, "Bearer"),
    ],
)
def test_a_401_asks_for_what_the_caller_is_told_by(make_subject, caller, challenge):
    """And for something else where the application says so."""
    refused = make_subject(caller=caller).ask(caller=None)
    assert (refused.status, refused.problem) == (401, "caller-unknown")
    assert refused.headers["www-authenticate"] == challenge
    other = make_subject(caller=caller, challenge="DPoP").ask(caller=None)
    assert other.headers["www-authenticate"] == "DPoP"


def test_the_holder_of_an_api_key_is_a_caller(make_subject):
    """Each API key has its own keys, and a shared cache is told which header made the answer."""
    subject = make_subject(caller=api_key())
    subject.ask(x_api_key="live_1")
    again = subject.ask(x_api_key="live_1")
    assert again.is_replay
    assert again.headers["vary"] == "X-API-Key"
    assert not subject.ask(x_api_key="live_2").is_replay


@pytest.mark.parametrize("found", [7, b"alice", ["alice"]])
def test_a_caller_that_is_no_text_is_an_error_of_the_server(make_subject, found):
    """As a 401 it would be taken for the client's mistake; a number is an id without str()."""
    subject = make_subject(caller=lambda request: found)
    with pytest.raises(InvalidInput, match="the caller is a text"):
        subject.ask()
    assert subject.shop.runs == []


def test_a_function_may_find_that_the_namespace_is_shared(make_subject):
    """GLOBAL is a caller, too, also for single requests."""
    subject = make_subject(caller=lambda request: GLOBAL)
    assert (subject.ask().status, subject.ask().is_replay) == (201, True)


def test_the_caller_may_come_from_a_header_of_a_trusted_proxy(make_subject):
    """Any function of the request tells who calls."""
    subject = make_subject(caller=gateway_header("X-Account"))
    subject.ask(x_account="a")
    assert subject.ask(x_account="a").is_replay
    assert not subject.ask(x_account="b").is_replay


@pytest.mark.parametrize("status", [200, 301, 400, 402, 404, 409, 422])
def test_final_answers_are_kept(make_subject, status):
    """What a retry would only repeat is replayed, failures included."""
    subject = make_subject()
    subject.shop.status = status
    subject.ask()
    subject.shop.status = 201
    reply = subject.ask()
    assert (reply.status, reply.is_replay) == (status, True)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503])
def test_passing_troubles_free_the_key(make_subject, status):
    """The retry runs again and gets its own answer."""
    subject = make_subject()
    subject.shop.status = status
    assert subject.ask().status == status
    subject.shop.status = 201
    reply = subject.ask()
    assert (reply.status, reply.is_replay, reply.body) == (201, False, b'{"run": 2}')


def test_a_rule_says_which_answers_are_kept(make_subject):
    """Both lists differ from the default on purpose."""
    subject = make_subject(rules=[Rule(stored=StatusRule(kept=(503,), freed=(404,)))])
    subject.shop.status = 503
    subject.ask(key="a")
    assert subject.ask(key="a").is_replay
    subject.shop.status = 404
    subject.ask(key="b")
    assert not subject.ask(key="b").is_replay


def test_what_the_application_raises_reaches_the_server_and_frees_the_key(make_subject):
    """The server answers as it does without us; the retry runs."""
    subject = make_subject()
    subject.shop.error = LookupError("no ledger")
    with pytest.raises(LookupError, match="no ledger"):
        subject.ask()
    subject.shop.error = None
    reply = subject.ask()
    assert (reply.status, reply.is_replay) == (201, False)


@pytest.mark.parametrize(
    "policy",
    [Policy(unlisted=Ending.FAILED), Policy(terminal=(LookupError,))],
    ids=["unlisted", "declared"],
)
def test_a_failure_for_good_is_a_problem_on_retry(make_subject, policy):
    """A kept failure is not run again, whether it was declared; the exception's text is hidden."""
    subject = make_subject(rules=[Rule(policy=policy)])
    subject.shop.error = LookupError("secret host db-7")
    with pytest.raises(LookupError):
        subject.ask()
    reply = subject.ask()
    assert (reply.status, reply.problem) == (500, "operation-failed")
    assert reply.json["retryable"] is False
    assert b"db-7" not in reply.body
    assert len(subject.shop.runs) == 1


def _reused_for(subject, first, then="/orders"):
    """What a client is told that uses its key for two paths."""
    assert subject.ask(path=first).status == 201
    reply = subject.ask(path=then)
    assert (reply.status, reply.problem) == (422, "key-reused")
    return reply.json["detail"]


def test_a_key_of_another_route_is_refused_with_the_route(make_subject):
    """The same caller's own first use is told, in the words of its request."""
    subject = make_subject(rules=[Rule(path="/orders"), Rule(path="/{part}/{id}")])
    detail = _reused_for(subject, "/charges/7")
    assert detail.startswith("The key was first used for POST /{part}/{id}. Nothing was run")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        # Another caller's use of the key is nobody's business.
        ({"caller": GLOBAL}, Rule(path="/charges")),
        # A name that is not made for clients.
        ({}, Rule(path="/charges", name="legacy_billing.charge")),
        # A rule for everything says nothing that helps.
        ({}, Rule()),
    ],
)
def test_a_first_use_that_is_not_for_clients_is_not_named(make_subject, options, rule):
    """Refused all the same, in the usual words."""
    subject = make_subject(rules=[Rule(path="/orders"), rule], **options)
    detail = _reused_for(subject, "/charges")
    assert detail.startswith("The key was first used for a different request. Nothing was run")


def test_errors_of_retrysafe_inside_the_application_are_its_own(make_subject):
    """A handler that itself meets a reused key must not look like a reused key of its client."""
    from retrysafe import KeyReused

    subject = make_subject()
    subject.shop.error = KeyReused("inner", key="inner")
    with pytest.raises(KeyReused, match="inner"):
        subject.ask()


def test_attempts_end_at_the_limit(make_subject):
    """An operation that keeps failing is given up with a problem of its own."""
    subject = make_subject(rules=[Rule(policy=Policy(release_limit=1))])
    subject.shop.status = 500
    subject.ask()
    reply = subject.ask()
    assert (reply.status, reply.problem) == (500, "attempts-exhausted")
    assert len(subject.shop.runs) == 1


def test_the_last_failure_of_an_operation_that_was_given_up_is_not_for_clients(make_subject):
    """It is in the log and in the store; the problem's words stay those of the policy page."""
    events = []
    rules = [Rule(policy=Policy(release_limit=1))]
    subject = make_subject(rules=rules, face={"observers": [events.append]})
    subject.shop.error = LookupError("ledger.internal refused user pay_rw")
    with pytest.raises(LookupError):
        subject.ask()
    for _ in range(2):
        reply = subject.ask()
        assert (reply.status, reply.problem) == (500, "attempts-exhausted")
        assert b"LookupError" not in reply.body
        assert b"pay_rw" not in reply.body
    (given_up,) = [event for event in events if event.kind is EventKind.EXHAUSTED]
    assert given_up.detail.endswith("LookupError: ledger.internal refused user pay_rw")


def test_a_response_over_the_limit_is_sent_once_and_never_run_again(make_subject):
    """The retry hears that it is done."""
    subject = make_subject(rules=[Rule(policy=Policy(outcome_limit_bytes=5))])
    assert subject.ask().body == b'{"run": 1}'
    reply = subject.ask()
    assert (reply.status, reply.problem) == (409, "outcome-unavailable")
    assert reply.json["retryable"] is False
    assert "retry-after" not in reply.headers
    assert len(subject.shop.runs) == 1


def test_a_request_body_over_the_limit_is_refused(make_subject):
    """413 rather than a run without protection; the limit itself is allowed."""
    subject = make_subject(rules=[Rule(request_limit_bytes=10)])
    reply = subject.ask(body=b"x" * 11, content_length="11")
    assert (reply.status, reply.problem) == (413, "body-too-large")
    assert subject.shop.runs == []
    assert subject.ask(body=b"x" * 10, content_length="10").status == 201


def test_optional_keys_protect_when_they_are_there(make_subject):
    """Without one the request runs as ever; a broken one is still refused."""
    subject = make_subject(rules=[Rule(required=False)])
    assert subject.ask(key=None).body == b'{"run": 1}'
    assert subject.ask(key=None).body == b'{"run": 2}'
    subject.ask()
    assert subject.ask().is_replay
    assert subject.ask(key='"').status == 400


def test_the_first_matching_rule_counts(make_subject):
    """A route can be taken out of a wider rule."""
    subject = make_subject(
        rules=[
            Rule(path="/charges/preview", protected=False),
            Rule(path="/charges/{id}", required=False),
            Rule(path="/*"),
        ]
    )
    assert subject.ask(path="/charges/preview", key=None).status == 201
    assert not subject.ask(path="/charges/preview").is_replay
    assert not subject.ask(path="/charges/preview").is_replay
    assert subject.ask(path="/charges/7", key=None).status == 201
    assert subject.ask(path="/charges/7/refunds", key=None).status == 400


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_safe_methods_pass_untouched(make_subject, method):
    """With a key or without, they run as often as they are sent."""
    subject = make_subject()
    for _ in range(2):
        assert subject.ask(method=method).status == 201
    assert len(subject.shop.runs) == 2


def test_natural_keys_come_from_the_request(make_subject):
    """The same order is placed once without any header; another one runs."""
    subject = make_subject(rules=[Rule(path="/charges", key=FieldsKey("/order", window=FOREVER))])
    subject.ask(key=None, body=b'{"order": 7}')
    assert subject.ask(key=None, body=b'{"order": 7}').is_replay
    assert not subject.ask(key=None, body=b'{"order": 8}').is_replay
    reused = subject.ask(key=None, body=b'{"order": 7, "more": 1}')
    assert reused.problem == "key-reused"
    # Its client has no key to change: it is told what it can do.
    assert "recognised here by these fields: /order. An earlier" in reused.json["detail"]
    assert "new key" not in reused.json["detail"]
    assert subject.ask(key=None, body=b"{}").problem == "key-invalid"


def test_natural_keys_come_from_the_path(make_subject):
    """A parameter of the rule's pattern is a field like any other."""
    subject = make_subject(
        rules=[Rule(path="/orders/{id}/cancel", key=FieldsKey("{id}", window=FOREVER))]
    )
    subject.ask(key=None, path="/orders/1/cancel")
    assert subject.ask(key=None, path="/orders/1/cancel").is_replay
    assert not subject.ask(key=None, path="/orders/2/cancel").is_replay


def test_body_keys_end_with_their_window(make_subject):
    """Equal requests count as one until the window is over."""
    clock = ManualClock()
    subject = make_subject(
        MemoryStore(now_ms=clock),
        face={"secret": SECRET, "cache": False},
        rules=[Rule(key=BodyKey(window=timedelta(minutes=1)))],
    )
    subject.ask(key=None)
    assert subject.ask(key=None).is_replay
    clock.advance(timedelta(minutes=1))
    assert not subject.ask(key=None).is_replay


def test_clients_with_and_without_a_key_share_a_route(make_subject):
    """Each kind of key has its own window, and one request in both ways is two intents."""
    clock = ManualClock()
    subject = make_subject(
        MemoryStore(now_ms=clock),
        face={"secret": SECRET, "cache": False},
        rules=[Rule(key=HeaderKey(otherwise=BodyKey(window=timedelta(minutes=1))))],
    )
    assert not subject.ask(key=None).is_replay
    assert not subject.ask(key="k").is_replay
    assert subject.ask(key=None).is_replay
    clock.advance(timedelta(minutes=1))
    assert subject.ask(key="k").is_replay
    assert not subject.ask(key=None).is_replay
    assert len(subject.shop.runs) == 3


def test_a_key_from_a_body_cannot_be_sent_as_a_header(make_subject):
    """On a route with both it would be two intents under one key."""
    rule = Rule(key=HeaderKey(otherwise=BodyKey()))
    subject = make_subject(face={"secret": SECRET}, rules=[rule])
    assert subject.ask(key=None).status == 201
    made = "body:" + "x" * 43
    assert subject.ask(key=made).problem == "key-invalid"
    assert subject.ask(key=made[:-1]).status == 201


def test_a_key_that_is_made_from_fields_tells_of_the_one_that_was_sent(make_subject, caplog):
    """It does not count, and is never ignored in silence: an event each, one line in the log."""
    events = []
    rule = Rule(path="/charges", key=FieldsKey("/order", window=FOREVER))
    subject = make_subject(face={"observers": [events.append]}, rules=[rule])
    with caplog.at_level(logging.WARNING, "retrysafe"):
        assert not subject.ask(key="a", body=b'{"order": 7}').is_replay
        assert subject.ask(key="b", body=b'{"order": 7}').is_replay
        assert subject.ask(key=None, body=b'{"order": 7}').is_replay
    unread = [event.key.text for event in events if event.kind is EventKind.KEY_IGNORED]
    assert unread == ["a", "b"]
    told = [record.getMessage() for record in caplog.records]
    assert sum("'/charges' brings an Idempotency-Key, which does not" in text for text in told) == 1


def test_a_key_is_refused_where_requests_are_recognised_by_all_they_ask_for(make_subject):
    """Two keys would be one intent there, and the second order would be lost."""
    subject = make_subject(face={"secret": SECRET}, rules=[Rule(key=BodyKey())])
    reply = subject.ask(key="a")
    assert (reply.status, reply.problem) == (400, "key-unexpected")
    assert subject.ask(key=None).status == 201
    assert len(subject.shop.runs) == 1


def test_a_store_that_is_down_is_a_503(make_subject):
    """Nothing runs, and the client is told to come back."""
    store = FaultyStore(MemoryStore())
    subject = make_subject(store)
    store.fail(Moment.BEFORE, method="commit", times=None)
    reply = subject.ask()
    assert (reply.status, reply.problem) == (503, "store-unavailable")
    assert reply.json["retryable"] is True
    assert int(reply.headers["retry-after"]) >= 1
    assert subject.shop.runs == []
    store.heal()
    assert subject.ask().status == 201


def test_a_dead_store_is_left_alone(make_subject):
    """After failures in a row the store is not asked; when the time is over one request tries."""
    store = FaultyStore(MemoryStore())
    subject = make_subject(store, breaker=Breaker(failures_limit=2, open_seconds=1000))
    now = [0.0]
    protection = subject.app.protection
    protection._monotonic = protection.answers._monotonic = lambda: now[0]
    store.fail(Moment.BEFORE, method="commit", times=None)
    subject.ask()
    subject.ask()
    calls = len(store.calls)
    reply = subject.ask()
    assert (reply.status, reply.problem) == (503, "store-unavailable")
    assert reply.headers["retry-after"] == "1000"
    assert len(store.calls) == calls
    now[0] = 1000.0
    store.heal()
    assert subject.ask().status == 201
    assert subject.ask(key="other").status == 201


def test_answers_of_the_store_close_the_breaker(make_subject):
    """A refusal is an answer as well: only failures in a row count."""
    store = FaultyStore(MemoryStore())
    subject = make_subject(
        store, face={"cache": False}, breaker=Breaker(failures_limit=2, open_seconds=1000)
    )
    subject.ask()
    for _ in range(3):
        fault = store.fail(Moment.BEFORE, method="commit", times=None)
        assert subject.ask().status == 503
        store._faults.remove(fault)
        assert subject.ask(body=b"{}").status == 422
    assert not subject.app.protection.breaker.is_open


def test_a_store_that_is_not_set_up_is_told_to_the_operator(make_subject, caplog):
    """The client hears that retrying does not help; the log has the reason."""
    store = FaultyStore(MemoryStore())
    subject = make_subject(store)
    store.fail(Moment.BEFORE, method="commit", error=lambda call: SchemaMissing("no schema"))
    reply = subject.ask()
    assert (reply.status, reply.problem) == (503, "store-unusable")
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "no schema"
    ]


def test_failing_open_runs_at_once_when_the_claim_gets_no_answer(make_subject):
    """Whether it was written is not known, and not waited for: the service has asked for it."""
    store = FaultyStore(MemoryStore())
    events = []
    subject = make_subject(
        store,
        face={"observers": [events.append]},
        fail_open=True,
        breaker=Breaker(failures_limit=1, open_seconds=1000),
    )
    store.fail(Moment.AFTER, method="commit", times=None)
    for run in (1, 2, 3):
        reply = subject.ask(key=f"k-{run}")
        assert (reply.status, reply.body) == (201, b'{"run": %d}' % run)
        assert reply.headers["idempotency-protected"] == "false"
        assert subject.shop.runs[-1] == b'{"amount":1000,"currency":"eur"}'
        assert subject.app.protection.breaker.is_open
    kinds = [event.kind for event in events]
    # The first one asked, and thrice; the others left the store alone.
    story = [EventKind.CALLED, EventKind.UNPROTECTED, EventKind.ANSWERED]
    assert kinds == [EventKind.CALLED, *[EventKind.STORE_UNAVAILABLE] * 3, *story[1:], *story * 2]
    results = [event.result for event in events if event.kind is EventKind.ANSWERED]
    assert results == [Result.UNPROTECTED] * 3


def test_failing_open_never_runs_twice_for_one_request(make_subject):
    """An error of the store after the run, or in it, is no reason to run again."""
    store = FaultyStore(MemoryStore())
    rules = [Rule(policy=Policy(settle_patience=timedelta(0)))]
    subject = make_subject(store, rules=rules, fail_open=True)
    fault = store.fail(
        Moment.BEFORE, method="commit", times=None, when=lambda call: bool(call.arguments[1])
    )
    assert subject.ask().problem == "outcome-not-stored"
    assert len(subject.shop.runs) == 1
    store._faults.remove(fault)
    subject.shop.error = StoreUnavailable("the application's own store")
    with pytest.raises(StoreUnavailable, match="own store"):
        subject.ask(key='"k-2"')
    assert len(subject.shop.runs) == 2


def test_failing_open_does_not_run_what_has_begun(make_subject, monkeypatch):
    """Whatever the store's silence was about, the application is not called a second time."""
    subject = make_subject(fail_open=True)
    answer_call = calls_of(subject.idem).answer_call

    def silent(call, operation):
        answer_call(call, operation)
        raise StoreUnavailable("silent after the run")

    async def silent_later(call, operation):
        await answer_call(call, operation)
        raise StoreUnavailable("silent after the run")

    is_async = isinstance(subject.app, IdempotencyMiddleware)
    monkeypatch.setattr(calls_of(subject.idem), "answer_call", silent_later if is_async else silent)
    assert subject.ask().problem == "store-unavailable"
    assert len(subject.shop.runs) == 1


def test_failing_open_does_not_run_what_is_known_to_run_elsewhere(make_subject):
    """A store that falls silent while a request waits for the first one has said enough."""
    store = FaultyStore(MemoryStore())
    subject = make_subject(store, fail_open=True)
    known = StoreUnavailable("silent")
    known.is_in_flight = True
    store.fail(Moment.BEFORE, method="commit", times=None, error=lambda call: known)
    assert subject.ask().problem == "store-unavailable"
    assert subject.shop.runs == []


def test_an_outcome_that_could_not_be_stored_is_told_as_such(make_subject):
    """The operation ran; a client that retries blindly would run it again."""
    store = FaultyStore(MemoryStore())
    subject = make_subject(store, rules=[Rule(policy=Policy(settle_patience=timedelta(0)))])
    store.fail(
        Moment.BEFORE, method="commit", times=None, when=lambda call: bool(call.arguments[1])
    )
    reply = subject.ask()
    assert (reply.status, reply.problem) == (500, "outcome-not-stored")
    assert reply.json["retryable"] is False
    assert len(subject.shop.runs) == 1


def test_a_key_that_is_taken_over_meanwhile_is_told_as_such(make_subject):
    """The outcome of the attempt that lost its claim is not shown."""
    subject = make_subject(MemoryStore())
    answer = subject.shop.answer

    def lose(body):
        made = answer(body)
        record = next(iter(subject.idem._calls.store._records.values()))
        record.token = b"somebody else 16"
        return made

    subject.shop.answer = lose
    reply = subject.ask()
    assert (reply.status, reply.problem) == (409, "claim-lost")
    assert reply.json["retryable"] is True


def test_a_closed_object_says_nothing_of_the_store(make_subject):
    """Who asks it does not ask the store, so the breaker stays as it is."""
    breaker = Breaker(failures_limit=2, open_seconds=1000)
    subject = make_subject(breaker=breaker)
    subject.close()
    breaker.failed(0.0)
    assert subject.ask().problem == "closing"
    assert breaker.failures == 1


def test_a_closed_object_refuses(make_subject):
    """503 while the server shuts down."""
    subject = make_subject()
    subject.close()
    reply = subject.ask()
    assert (reply.status, reply.problem) == (503, "closing")


def test_paths_and_links_follow_the_mount(make_subject):
    """Rules name paths as the application does; links as its clients do."""
    subject = make_subject(rules=[Rule(path="/charges")])
    mounted = (
        {"scope": {"root_path": "/api", "path": "/api/charges"}}
        if hasattr(subject, "_runner")
        else {"environ": {"SCRIPT_NAME": "/api"}}
    )
    reply = subject.ask(key=None, **mounted)
    assert reply.json["type"] == "/api/idempotency-policy#key-missing"
    assert reply.json["instance"] == "/api/charges"


def test_rules_are_checked_when_they_are_made(make_subject):
    """What cannot work fails at the start of the program."""
    with pytest.raises(PolicyInvalid, match="not both"):
        make_subject(rules=[Rule()], rule=Rule())
    with pytest.raises(PolicyInvalid, match=r"^rules takes a list: rules=\[Rule\(…\)\]$"):
        make_subject(rules=Rule())
    with pytest.raises(PolicyInvalid, match="policy_path"):
        make_subject(policy_path="policy")
    with pytest.raises(InvalidInput, match="secret"):
        make_subject(rules=[Rule(key=BodyKey())])


def test_waiting_is_bounded_by_the_route(make_subject):
    """A client's wait is capped, and the cap is told."""
    subject = make_subject(rules=[Rule(policy=Policy(wait_limit=timedelta(seconds=3)), wait=True)])
    assert subject.ask(prefer="wait=100").headers["preference-applied"] == "wait=3"
    assert subject.ask(prefer="wait=2").headers["preference-applied"] == "wait=2"
    assert subject.ask(prefer="wait=0").headers["preference-applied"] == "wait=0"


def test_what_clients_wait_for_takes_bounded_memory(make_subject):
    """The policies of their waits are kept, but not all that they can think of."""
    subject = make_subject(rules=[Rule(policy=Policy(wait_limit=timedelta(hours=1)), wait=True)])
    for seconds in range(1, 300):
        assert subject.ask(prefer=f"wait={seconds}").status == 201
    assert len(subject.app.protection._waits) == 256


def test_a_protection_further_in_leaves_a_protected_request_alone(make_subject):
    """Its own claim would find the key in flight, and that refusal would be kept for ever."""
    store = MemoryStore()
    inner, outer = make_subject(store), make_subject(store)
    outer.app.app = inner.app
    first, second = outer.ask(), outer.ask()
    assert (first.status, second.status) == (201, 201)
    assert (first.is_replay, second.is_replay) == (False, True)
    assert len(inner.shop.runs) == 1
    assert inner.ask().is_replay


def test_another_request_that_an_application_makes_is_protected_by_itself(make_subject):
    """A batch passes copies of its request on, with other paths, and only its own is protected."""
    store = MemoryStore()
    inner, outer = make_subject(store), make_subject(store)
    outer.app.app = elsewhere(inner.app)
    assert outer.ask(key='"batch"').status == 201
    assert outer.ask(key='"other batch"').is_replay
    assert len(inner.shop.runs) == 1


def elsewhere(app):
    """Passes every request on to another path, under a key of that request's own."""

    async def asgi(scope, receive, send):
        headers = [line for line in scope["headers"] if line[0] != b"idempotency-key"]
        headers.append((b"idempotency-key", b'"part"'))
        await app({**scope, "path": "/parts", "headers": headers}, receive, send)

    def wsgi(environ, start_response):
        part = {**environ, "PATH_INFO": "/parts", "HTTP_IDEMPOTENCY_KEY": '"part"'}
        return app(part, start_response)

    return asgi if isinstance(app, IdempotencyMiddleware) else wsgi

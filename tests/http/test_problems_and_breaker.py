"""Problems for every error that clients can meet, and the breaker by an injected clock."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from retrysafe import errors
from retrysafe.http.breaker import Breaker
from retrysafe.http.problems import KINDS, ProblemContext, kind_of, problem_of
from tests.http.codes import CODES
from tests.http.driving import Reply

PLACE = ProblemContext("/policy", "/charges")
SECRET_TEXT = "host=db-7"


def reply_of(error):
    response = problem_of(error, PLACE, key="k")
    lines = [(name.decode(), value.decode()) for name, value in response.headers]
    return Reply(response.status, lines, response.body)


def test_codes_never_change():
    """Each reason has one code for ever, and no two share one."""
    codes = {kind.slug: kind.code for kind in KINDS}
    assert {slug: codes[slug] for slug in CODES} == CODES
    assert len(set(codes.values())) == len(KINDS)
    assert all(code.startswith("idempotency_") for code in codes.values())


def test_the_documents_list_every_code():
    """docs/http.md has a row for each code, with its status."""
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    for kind in KINDS:
        assert f"| `{kind.code}` | {kind.status} |" in text, kind.code


@pytest.mark.parametrize(
    ("error", "status", "slug", "retryable", "is_spoken"),
    [
        (errors.KeyInvalid(SECRET_TEXT), 400, "key-invalid", False, True),
        (errors.CallerMissing(SECRET_TEXT), 401, "caller-unknown", False, False),
        (errors.KeyReused(SECRET_TEXT), 422, "key-reused", False, False),
        (errors.OutcomeUnavailable(SECRET_TEXT), 409, "outcome-unavailable", False, False),
        (errors.ClaimLost(SECRET_TEXT), 409, "claim-lost", True, False),
        (errors.OutcomeNotStored(SECRET_TEXT, key="k"), 500, "outcome-not-stored", False, False),
        (errors.StoreUnavailable(SECRET_TEXT), 503, "store-unavailable", True, False),
        (errors.SchemaMissing(SECRET_TEXT), 503, "store-unusable", False, False),
        (errors.DigestCollision(SECRET_TEXT), 503, "store-unusable", False, False),
        (errors.Closed(SECRET_TEXT), 503, "closing", True, False),
        (
            errors.OperationFailed(SECRET_TEXT, key="k", type_name="x"),
            500,
            "operation-failed",
            False,
            False,
        ),
        (
            errors.AttemptsExhausted(SECRET_TEXT, key="k", type_name="x"),
            500,
            "attempts-exhausted",
            False,
            False,
        ),
    ],
)
def test_every_error_has_its_problem(error, status, slug, retryable, is_spoken):
    """Status, type, advice; the server's inside is never shown."""
    reply = reply_of(error)
    assert (reply.status, reply.problem) == (status, slug)
    assert reply.json["retryable"] is retryable
    assert ("retry-after" in reply.headers) is retryable
    assert (SECRET_TEXT in reply.body.decode()) is is_spoken
    assert reply.json["type"] == f"/policy#{slug}"
    assert reply.json["code"] == CODES[slug]
    assert reply.json["instance"] == "/charges"
    assert reply.json["key"] == "k"
    assert reply.headers["cache-control"] == "no-store"
    assert int(reply.headers["content-length"]) == len(reply.body)


def test_a_key_that_a_transaction_holds_says_so():
    """No lease frees it, so the time in Retry-After is no promise."""
    error = errors.OperationInFlight("x", key="k", retry_after=timedelta(seconds=1))
    assert "transaction" not in reply_of(error).json["detail"]
    error.is_locked = True
    told = reply_of(error)
    assert "An open transaction of the server holds its record" in told.json["detail"]
    assert (told.problem, told.headers["retry-after"]) == ("in-flight", "1")


def test_a_running_operation_says_when_to_come_back():
    """In whole seconds, rounded up, and in words for clients, who know nothing of leases."""
    error = errors.OperationInFlight(SECRET_TEXT, key="k", retry_after=timedelta(seconds=6.1))
    reply = reply_of(error)
    assert (reply.problem, reply.headers["retry-after"]) == ("in-flight", "7")
    assert reply.json["detail"] == (
        "The first request with this key has not ended. Nothing was run; send the same request "
        "with the same key again after the time in Retry-After."
    )


def test_a_failure_that_freed_the_key_may_be_tried_again():
    """This caller waited for a run that failed; it is told both."""
    error = errors.OperationFailed("x", key="k", type_name="x")
    error.retryable = True
    reply = reply_of(error)
    assert (reply.json["retryable"], reply.headers["retry-after"]) == (True, "1")


def test_other_errors_are_not_for_clients():
    """They are bugs, and the server reports them as such."""
    assert problem_of(LookupError("x"), PLACE) is None
    assert problem_of(errors.FlowSuspended("x"), PLACE) is None


def test_slugs_are_anchors_of_their_own():
    """No two kinds share one, and every kind can be met."""
    assert len({kind.slug for kind in KINDS}) == len(KINDS)
    assert all(kind.slug.replace("-", "").isalpha() for kind in KINDS)
    assert kind_of(errors.StoreRejected("x")).status == 503


def test_the_breaker_opens_after_failures_in_a_row():
    """A success in between starts the count anew."""
    breaker = Breaker(failures_limit=2, open_seconds=10)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(1.0)
    assert breaker.seconds_closed_off(1.0) == 0
    breaker.failed(2.0)
    assert breaker.is_open
    assert breaker.seconds_closed_off(5.0) == 7.0


def test_one_request_tries_when_the_time_is_over():
    """The others wait for its news; its failure opens anew, its success closes."""
    breaker = Breaker(failures_limit=1, open_seconds=10)
    breaker.failed(0.0)
    assert breaker.seconds_closed_off(10.0) == 0
    assert breaker.seconds_closed_off(10.0) == 10.0
    breaker.failed(12.0)
    assert breaker.seconds_closed_off(21.0) == 1.0
    assert breaker.seconds_closed_off(22.0) == 0
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.seconds_closed_off(22.0) == 0


def test_a_try_without_news_does_not_close_off_for_ever():
    """The request that tried was cancelled; another one may try later."""
    breaker = Breaker(failures_limit=1, open_seconds=10)
    breaker.failed(0.0)
    assert breaker.seconds_closed_off(10.0) == 0
    assert breaker.seconds_closed_off(20.0) == 0


@pytest.mark.parametrize("options", [{"failures_limit": 0}, {"open_seconds": 0}])
def test_a_breaker_needs_sense(options):
    """One that is always open would refuse everything."""
    with pytest.raises(ValueError, match="breaker"):
        Breaker(**options)

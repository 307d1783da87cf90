"""The guards of responses and requests over HTTP."""

from __future__ import annotations

from retrysafe.contrib.starlette import Retrysafe
from retrysafe.core.policy import Policy
from retrysafe.http import bodies, callers
from retrysafe.http.asgi import IdempotencyMiddleware
from retrysafe.http.asgi_run import AppRun
from retrysafe.http.held_response import Held
from retrysafe.http.routes import RouteTable
from retrysafe.http.rules import StatusRule
from retrysafe.http.unprotected import UnprotectedRuns
from retrysafe.http.wsgi import WSGIIdempotencyMiddleware
from tests.contrib import test_places
from tests.guards import test_http_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

HTTP_GUARDS: tuple[Guard, ...] = (
    Guard(
        "credentials are stored as a digest",
        "whoever reads the store or a copy of it can call as its clients",
        (
            InCode(
                callers.caller_of_credential,
                'return f"{scheme}:{digest[:_DIGEST_CHARACTERS]}"',
                'return f"{scheme}:{value.decode()}"',
            ),
        ),
        properties.test_a_credential_is_stored_as_a_digest,
    ),
    Guard(
        "digests of credentials are keyed with the secret",
        "whoever reads the store finds short credentials by trying",
        (InCode(callers.caller_of_credential, "if secret is None:", "if True:"),),
        properties.test_a_stored_digest_cannot_be_compared_with_guesses,
    ),
    Guard(
        "a response that passes is settled before its first byte",
        "a crash in the middle of a stream runs the operation again that its client has seen",
        (InCode(AppRun._begin_passing, "await asyncio.shield(self._gate)", "pass"),),
        properties.test_a_stream_is_durable_before_its_first_byte,
    ),
    Guard(
        "a response that is held back has a limit while it is collected",
        "an endless response takes all memory, and every operation of the process with it",
        (
            InCode(
                Held.take,
                "self._size <= self._limit_bytes and",
                "self._limit_bytes is not None and",
            ),
        ),
        properties.test_an_endless_response_is_not_collected,
    ),
    Guard(
        "a response in pieces waits for what its application raises",
        "a response that was cut short is replayed as if it were whole",
        (InCode(AppRun._hold, "self._wait_for_the_end(_TURNS)", "self._finish_held()"),),
        properties.test_a_response_that_was_cut_short_is_not_stored,
    ),
    Guard(
        "what raises after a whole response does not free its key",
        "a background task that fails runs the operation again",
        (InCode(AppRun._fail, "if self._is_ended and not is_from_stream(error):", "if False:"),),
        properties.test_a_failure_after_the_response_does_not_run_it_again,
    ),
    Guard(
        "large bodies are compared beside the loop",
        "a hostile body holds the loop, no lease is renewed, and other processes take over",
        (
            InCode(
                IdempotencyMiddleware.answer,
                "if len(plan.request.body) + len(plan.request.query) < LARGE_BODY_BYTES",
                "if plan is not None",
            ),
        ),
        properties.test_a_large_body_does_not_hold_the_loop,
    ),
    Guard(
        "headers of parts are read without a pattern",
        "blanks in a multipart body hold the loop for seconds, with the same end",
        (
            InCode(
                bodies._part,
                "if not colon or _NAME.fullmatch(name) is None:",
                'if re.fullmatch(rb"(.*?)[ \\t]*+", text, re.DOTALL) is None:',
            ),
        ),
        properties.test_blanks_in_a_part_take_time_in_proportion,
    ),
    Guard(
        "rules match paths without regard to slashes",
        "a request with a slash at its end runs unprotected, as often as it is sent",
        (
            InCode(
                RouteTable._look,
                "found = self._beside.get((method, plain_path(path)), found)",
                "pass",
            ),
        ),
        properties.test_no_spelling_of_a_path_runs_twice,
    ),
    Guard(
        "methods match without regard to case",
        "a request with the method `post` runs unprotected, as often as it is sent",
        (
            InCode(
                WSGIIdempotencyMiddleware.__call__,
                'environ["REQUEST_METHOD"].upper()',
                'environ["REQUEST_METHOD"]',
            ),
        ),
        properties.test_no_spelling_of_a_method_runs_twice,
    ),
    Guard(
        "only what no endpoint answered frees the key of another spelling",
        "an endpoint that answers 404 after its work runs again, as often as it is sent",
        (
            InCode(
                StatusRule.ending_beside,
                "if response.is_unserved and status in",
                "if status in",
            ),
        ),
        properties.test_an_endpoint_that_answers_404_does_not_run_again,
    ),
    Guard(
        "a run without a claim is remembered by its process",
        "a service that fails open runs every retry again while its store is down",
        (InCode(UnprotectedRuns._end, "if ending is Ending.RELEASED:", "if ending:"),),
        properties.test_a_run_without_a_claim_is_not_run_again,
    ),
    Guard(
        "a run without a claim is noted before it starts",
        "a service that fails open runs one key many times at once",
        (InCode(UnprotectedRuns.answer, "self.running[digest] = run", "pass"),),
        properties.test_a_run_without_a_claim_does_not_run_beside_itself,
    ),
    Guard(
        "a run without a claim gives way to one with a claim that has begun",
        "a service that fails open runs one key twice at once, while its store comes back",
        (InCode(UnprotectedRuns.answer, "claimed = self._claimed.get(digest)", "claimed = None"),),
        properties.test_a_run_without_a_claim_does_not_run_beside_a_claimed_one,
    ),
    Guard(
        "a run with a claim gives way to one without that has begun",
        "the same, when the claim is granted late",
        (InCode(UnprotectedRuns.begin_claimed, "if known is None:", "if run:"),),
        properties.test_a_claimed_run_does_not_run_beside_one_without_a_claim,
    ),
    Guard(
        "a run without a claim asks once more what has ended with one",
        "a service that fails open runs again what has just ended",
        (
            InCode(
                UnprotectedRuns.answer,
                "remembered = recall(call)",
                "remembered = None",
            ),
        ),
        properties.test_a_run_without_a_claim_does_not_follow_a_claimed_one,
    ),
    Guard(
        "a claim that gives way is released, whatever the policy says of exceptions",
        "an operation that never ran under its claim is remembered as failed",
        (
            InCode(
                Policy.judge,
                "if isinstance(error, OperationInFlight) and not error.has_record:",
                "if False:",
            ),
        ),
        properties.test_a_claim_that_gives_way_is_released,
    ),
    Guard(
        "an endpoint of Starlette is served by the route that the request came by",
        "the method of a second route runs unprotected, once for every retry",
        (InCode(Retrysafe._served_by, "if _leads_to(served.endpoint, scope)", ""),),
        test_places.test_every_route_of_an_endpoint_has_natural_keys_of_its_own,
    ),
)

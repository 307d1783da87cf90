"""The guards of requests that a worker sends again."""

from __future__ import annotations

from retrysafe.core.policy import Policy
from retrysafe.http import resumption, stored_request
from retrysafe.http.resumption import Resumption
from retrysafe.http.wsgi_resume import ThreadResumption
from tests.guards import test_resumption_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode
from tests.http import test_resumable_threads as threads

RESUMPTION_GUARDS: tuple[Guard, ...] = (
    Guard(
        "only an object of the worker makes a request a resumed one",
        "whoever gets text into the scope or the environ calls as anybody",
        (
            InCode(
                resumption.resumption_in,
                "found if isinstance(found, Resumption) else None",
                "found",
            ),
        ),
        properties.test_what_others_put_into_a_scope_makes_no_resumed_request,
    ),
    Guard(
        "a 401 or 403 of a resumed request is not kept",
        "a client is told that it may not do what it was allowed to do, for good",
        (InCode(Resumption.kept, "if status in _REFUSALS:", "if False:"),),
        properties.test_a_refusal_of_a_resumed_request_is_never_stored,
    ),
    Guard(
        "a refused resumed request is no failure of its operation",
        "the same, where the policy keeps exceptions",
        (InCode(Policy.judge, "if isinstance(error, ResumedRequestRefused):", "if False:"),),
        properties.test_a_refusal_is_no_failure_whatever_the_policy_says_of_exceptions,
    ),
    Guard(
        "a resumed request that would free its key leaves it to its lease",
        "an outage at the wrong moment leaves an accepted request half done for ever",
        (InCode(Resumption.kept, "judge(response) is Ending.RELEASED", "judge is None"),),
        properties.test_a_resumed_request_that_would_free_its_key_is_tried_again,
    ),
    Guard(
        "only listed headers are stored with a request",
        "whoever reads the store can call as its clients",
        (InCode(stored_request.payload_of, "if name in resumable.names", "if name"),),
        properties.test_a_stored_request_holds_no_credential,
    ),
    Guard(
        "credentials cannot be listed",
        "the same",
        (InCode(stored_request._checked_name, "if holds_credential(lowered):", "if False:"),),
        properties.test_no_credential_can_be_listed,
    ),
    Guard(
        "one request runs under the claim of a worker",
        "another request that the application sends itself runs without a claim of its own",
        (
            InCode(
                Resumption.plan,
                "if self.is_taken or request.path",
                "if request.path",
            ),
        ),
        properties.test_a_request_inside_a_resumed_one_does_not_run_under_its_claim,
    ),
    Guard(
        "a worker's thread looks at its lease before the application runs",
        "a worker that stood still runs what another one runs",
        (InCode(ThreadResumption.served, "if self.attempt.is_lost:", "if False:"),),
        threads.test_a_worker_that_stood_still_looks_at_its_lease_before_the_application_runs,
    ),
    Guard(
        "a resumed request is known by its path",
        "another request of the route is run in its place, and its response kept for it",
        (InCode(Resumption.plan, " or request.path != self.request.seen_path", ""),),
        properties.test_a_resumed_request_runs_at_its_own_path,
    ),
)

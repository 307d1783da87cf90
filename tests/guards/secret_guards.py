"""The guards of secrets that are replaced."""

from __future__ import annotations

from retrysafe.core import machine, nested_claims
from retrysafe.core.attempt import Attempt
from retrysafe.core.keys.secret import Secrets
from retrysafe.core.nested_claims import NestedRunner
from retrysafe.core.steps.writer import StepWriter
from tests.guards import test_secret_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

SECRET_GUARDS: tuple[Guard, ...] = (
    Guard(
        "fingerprints are keyed with the secret",
        "whoever reads the store finds small requests by trying",
        (InCode(Secrets.fingerprints, "if not listed:", "if True:"),),
        properties.test_a_stored_fingerprint_cannot_be_compared_with_guesses,
    ),
    Guard(
        "fingerprints are compared under one secret",
        "a new secret turns honest retries into refusals",
        (
            InCode(
                machine.is_mismatch,
                "and is_comparable(fingerprint, record.fingerprint)",
                "",
            ),
        ),
        properties.test_a_new_secret_refuses_no_retry,
    ),
    Guard(
        "a key that a secret has made is claimed in all its forms",
        "a process with the old secret and one with the new both run the operation",
        (InCode(nested_claims.nested, "if len(set(levels)) == 1:", "if True:"),),
        properties.test_a_new_secret_runs_nothing_again,
    ),
    Guard(
        "what an inner claim says about itself is no outcome of the outer one",
        "a request that is refused gets the outcome of another one the second time",
        (
            InCode(
                NestedRunner._end_by_error,
                "if nest.token is None and not nest.is_replay:",
                "if False:",
            ),
        ),
        properties.test_a_refused_request_is_refused_again,
    ),
    Guard(
        "steps are recorded under all forms of a key",
        "a process that knows another secret runs a recorded step again",
        (
            InCode(
                StepWriter.writes_around,
                "for lease in self._held",
                "for lease in ()",
            ),
        ),
        properties.test_a_new_secret_runs_no_step_again,
    ),
    Guard(
        "a refused claim on all forms of a key keeps what it took over",
        "a refused duplicate wipes out recorded steps, and the next attempt runs them again",
        (InCode(NestedRunner._let_go, "if decision is not Decision.ADMIT:", "if False:"),),
        properties.test_a_refused_duplicate_wipes_out_no_step,
    ),
    Guard(
        "child keys are made with the secret that the operation began with",
        "an attempt after a new secret sends its call downstream under another key, a second time",
        (
            InCode(
                Attempt._parent,
                "self._secrets.parent(self.key, keys, self._fingerprint)",
                "self._secrets.parent(self.key, keys, None)",
            ),
        ),
        properties.test_a_new_secret_does_not_change_child_keys,
    ),
    Guard(
        "child keys are not made with a secret that is only guessed",
        "during an upgrade with two secrets an attempt sends its call downstream a second time",
        (InCode(Secrets.began_with, "if len(self.listed) > 1:", "if False:"),),
        properties.test_no_secret_is_guessed_for_child_keys,
    ),
)

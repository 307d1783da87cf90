"""The guards of secrets that are replaced."""

from __future__ import annotations

from retrysafe.core import machine
from retrysafe.core.attempt import Attempt
from retrysafe.core.secret import Secrets
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
        "child keys are made with the secret that the operation began with",
        "an attempt after a new secret sends its call downstream under another key, a second time",
        (
            InCode(
                Attempt.child_key,
                "self._secrets.began_with(self._fingerprint)",
                "self._secrets.value",
            ),
        ),
        properties.test_a_new_secret_does_not_change_child_keys,
    ),
)

"""The guards of corrected requests."""

from __future__ import annotations

from retrysafe.core import machine, run, transitions
from retrysafe.core.attempt import Attempt
from retrysafe.core.engine import Engine
from retrysafe.core.policy import Policy
from retrysafe.core.run import Runner
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.sqlite.schema import SQL
from tests.guards import test_correction_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode, InStatement

_RECORDS = "`stores/sqlite/sql/records.sql`"
_SETTLEMENTS = "`stores/sqlite/sql/settlements.sql`"
_NO_STEP = "NOT EXISTS (SELECT 1 FROM retrysafe_steps AS s WHERE s.digest = k.digest)"

CORRECTION_GUARDS: tuple[Guard, ...] = (
    Guard(
        "only after nothing happened is a request corrected",
        "a second card is charged after a failure of which nobody knows what it did",
        (InCode(machine.claim_trigger, "record.nothing_happened", "True"),),
        properties.test_an_unlisted_failure_keeps_the_key,
    ),
    Guard(
        "a key that its client has sent belongs to one request",
        "two requests of a client that mixes up its keys both run",
        (InCode(machine.claim_trigger, "and request.takes_corrections", ""),),
        properties.test_a_clients_key_takes_no_correction,
    ),
    Guard(
        "another operation is no correction",
        "a refund takes the key of a charge",
        (InCode(machine.claim_trigger, "and record.operation == request.operation", ""),),
        properties.test_another_operation_is_no_correction,
    ),
    Guard(
        "a stored step has happened",
        "what the first request has reserved is reserved once more",
        (
            InCode(
                MemoryStore._settle,
                "changed.nothing_happened and not self._steps.get(digest)",
                "changed.nothing_happened",
            ),
        ),
        properties.test_a_stored_step_keeps_the_key,
    ),
    Guard(
        "a stored step has happened, in SQLite's statement",
        "the same, where the statement that reads the record looks for steps",
        (InStatement(SQL, "select_key", _NO_STEP, "1", f"{_RECORDS}, `select_key`"),),
        properties.test_a_stored_step_keeps_the_key_in_sqlite,
    ),
    Guard(
        "a harmless ending speaks for its own attempt",
        "a second card is charged after an attempt that died with the first one charged",
        (
            InCode(
                transitions._settled,
                "settlement.nothing_happened and not record.is_uncertain",
                "settlement.nothing_happened",
            ),
        ),
        properties.test_a_crash_in_its_life_keeps_the_key,
    ),
    Guard(
        "a harmless ending speaks for its own attempt, in SQLite's statement",
        "the same, where the statement decides instead of the table",
        (
            InStatement(
                SQL,
                "settle_key",
                "AND NOT is_uncertain",
                "",
                f"{_SETTLEMENTS}, `settle_key`",
            ),
        ),
        properties.test_a_crash_in_its_life_keeps_the_key_in_sqlite,
    ),
    Guard(
        "the claim that follows notes what is uncertain",
        "the same after an attempt whose ending nobody has called harmless",
        (
            InCode(
                transitions._counted,
                "previous.is_uncertain or not previous.nothing_happened",
                "False",
            ),
        ),
        properties.test_an_unlisted_ending_in_its_life_keeps_the_key,
    ),
    Guard(
        "the mark that nothing happened is of one claim",
        "after a deploy that was taken back, the mark of an earlier attempt is believed",
        (
            InStatement(
                SQL,
                "select_key",
                "k.nothing_happened_token = k.token",
                "k.nothing_happened_token IS NOT NULL",
                f"{_RECORDS}, `select_key`",
            ),
        ),
        properties.test_a_mark_counts_for_the_claim_that_made_it,
    ),
    Guard(
        "a corrected request brings its own arguments",
        "a worker finishes the corrected request with what was declined",
        (
            InCode(
                transitions.is_new_request,
                "decision is Decision.ADMIT or changed.fingerprint != record.fingerprint",
                "decision is Decision.ADMIT",
            ),
        ),
        properties.test_a_corrected_request_does_not_run_with_the_arguments_before_it,
    ),
    Guard(
        "an outcome that may be replaced is not kept by its owner",
        "a decline is replayed while, or after, the corrected request is paid",
        (
            InCode(
                Runner._remember_ending,
                "or not call.nothing_happened(came_to)",
                "or True",
            ),
        ),
        properties.test_what_was_declined_is_not_replayed_after_its_correction,
    ),
    Guard(
        "a step that ran and could not be stored has happened",
        "what the first request has reserved is reserved once more for the corrected one",
        (InCode(run._with_steps, "steps.has_unrecorded or ", ""),),
        properties.test_an_unstored_step_keeps_the_key,
    ),
    Guard(
        "an outcome that may be replaced is not kept by who replays it",
        "the same in another process",
        (InCode(Engine._replay_stored, "0 if answer.nothing_happened else ", ""),),
        properties.test_what_was_replayed_is_not_replayed_after_its_correction,
    ),
    Guard(
        "a corrected request has child keys of its own",
        "a receiver downstream refuses it, or answers with the decline of the first",
        (InCode(Attempt.child_key, ", correction=self._correction", ""),),
        properties.test_child_keys_are_those_of_the_corrected_request,
    ),
    Guard(
        "what retrysafe raises is never nothing",
        "a step that ran and could not be stored runs again for another request",
        (InCode(Policy.is_nothing_happened, " and not isinstance(error, _UNCERTAIN)", ""),),
        properties.test_a_step_that_could_not_be_stored_is_not_nothing,
    ),
)

"""The guards of recovery."""

from __future__ import annotations

from retrysafe.core import machine, recovery
from retrysafe.core.engine import Engine
from retrysafe.core.recovery import Recovery
from retrysafe.core.settle import Settler
from retrysafe.runtime.resumable import Resumable
from retrysafe.stores.sqlite import claims
from retrysafe.stores.sqlite.schema import SQL
from retrysafe.stores.sqlite.sweep import Sweeping
from tests.guards import test_recovery_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode, InStatement
from tests.simulation.invariants import Invariant

_SQL = "`stores/sqlite/sql/recovery.sql`"

RECOVERY_GUARDS: tuple[Guard, ...] = (
    Guard(
        "a worker takes over by the token that it saw",
        "two workers, or a worker and a retry, run an operation one after the other",
        (
            InCode(
                machine.recover_trigger,
                "return held_trigger(record, Trigger.RECOVER, held)",
                "return Trigger.RECOVER",
            ),
        ),
        properties.test_a_worker_never_takes_over_from_a_successor,
        (Invariant.ZOMBIE,),
    ),
    Guard(
        "a worker admits nothing",
        "an operation that was done and forgotten runs again with its old arguments",
        (InCode(Engine._lead, "if call.recovers is not None:", "if False:"),),
        properties.test_a_worker_never_starts_a_new_life,
    ),
    Guard(
        "a failure that nobody heard of leaves the key to its lease",
        "an outage at the wrong moment leaves an operation half done for ever",
        (
            InCode(
                Settler.is_postponed,
                "if ending is not Ending.RELEASED or call.recovers is None:",
                "if True:",
            ),
        ),
        properties.test_a_failure_in_a_worker_is_tried_again,
    ),
    Guard(
        "arguments have a limit, before anything runs",
        "a large request fills the table that every worker walks over",
        (InCode(Resumable.payload, "payload.size_bytes > limit_bytes", "False"),),
        properties.test_arguments_over_the_limit_are_refused,
    ),
    Guard(
        "a new life drops the arguments of the earlier one",
        "a worker runs what an earlier request asked for",
        (
            InCode(
                claims._decide, 'connection.execute(SQL["delete_arguments"], (digest,))', "pass"
            ),
            InStatement(
                SQL,
                "select_arguments",
                " AND first_claimed_at_ms = ?",
                " AND ? IS NOT NULL",
                f"{_SQL}, `select_arguments`",
            ),
        ),
        properties.test_a_new_life_has_no_old_arguments,
    ),
    Guard(
        "arguments are removed with their key",
        "personal data outlives what it was needed for",
        (
            InCode(
                Sweeping._remove_rows,
                'connection.execute(SQL["delete_arguments_of_keys"], (ids,))',
                "pass",
            ),
            InStatement(
                SQL,
                "delete_needless_arguments",
                "k.digest IS NULL OR",
                "",
                f"{_SQL}, `delete_needless_arguments`",
            ),
        ),
        properties.test_arguments_go_with_their_key,
    ),
    Guard(
        "arguments belong to one life of their key",
        "what an older release left behind is run for another request",
        (
            InStatement(
                SQL,
                "select_resumable",
                " AND k.first_claimed_at_ms = a.first_claimed_at_ms",
                "",
                f"{_SQL}, `select_resumable`",
            ),
        ),
        properties.test_arguments_of_an_earlier_life_are_not_used,
    ),
    Guard(
        "a walk goes on behind what it cannot resume",
        "keys that cannot be resumed any more keep all others from being finished",
        (InCode(Recovery.resume_all, "if len(page) < PAGE_LIMIT:", "if True:"),),
        properties.test_what_cannot_be_resumed_holds_up_nobody,
    ),
    Guard(
        "arguments are read before the claim",
        "a deploy that changed a function uses up the attempts of its keys",
        (InCode(Resumable._read, "self._signature.bind(*args, **kwargs)", "pass"),),
        properties.test_unreadable_arguments_use_up_no_attempt,
    ),
    Guard(
        "attempts of a worker are spaced",
        "a provider that is down for minutes makes every operation fail for good",
        (InCode(recovery.back_off_ms, "if attempt <= 1:", "if True:"),),
        properties.test_attempts_of_an_operation_that_fails_are_spaced,
    ),
)

"""The guards of durable steps."""

from __future__ import annotations

from retrysafe.core.steps import compensation
from retrysafe.core.steps.compensation import Compensator
from retrysafe.core.steps.history import StepHistory
from retrysafe.core.steps.joined import JoinedSteps
from retrysafe.core.steps.run import StepRun
from retrysafe.core.steps.writer import StepWriter
from tests.guards import test_step_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode
from tests.simulation.invariants import Invariant

STEP_GUARDS: tuple[Guard, ...] = (
    Guard(
        "a later attempt reads what is recorded",
        "a takeover repeats the effects of finished steps",
        (InCode(StepHistory.__init__, "{} if is_first else None", "{}"),),
        properties.test_a_recorded_step_is_not_run_again,
        (Invariant.STEP_ONCE,),
    ),
    Guard(
        "a step is recorded before the operation goes on",
        "a crash after the next effect repeats this one",
        (
            InCode(
                StepRun._record,
                "await self.writer.record(self._encoded(taken), taken.value)",
                "self._encoded(taken)",
            ),
        ),
        properties.test_a_step_is_recorded_before_the_operation_goes_on,
        (Invariant.STEP_EXACT,),
    ),
    Guard(
        "a step that is refused ends the operation",
        "a zombie goes on to its next effect",
        (
            InCode(
                StepWriter.write,
                "if decision is Decision.LOST or self._lease.is_revoked:",
                "if False:",
            ),
        ),
        properties.test_a_refused_step_ends_the_operation,
    ),
    Guard(
        "the stored steps are those of the own claim",
        "a zombie goes on from the steps of its successor",
        (InCode(StepWriter._read, "stored.record.token != lease.token", "False"),),
        properties.test_the_steps_of_a_successor_are_not_used,
    ),
    Guard(
        "no step starts on a lease that has run out",
        "a process that stood still repeats what its successor has done",
        (InCode(StepRun.perform, "if self._attempt.is_lost:", "if False:"),),
        properties.test_no_step_starts_on_a_lease_that_has_run_out,
    ),
    Guard(
        "steps keep their order",
        "a deploy that changes an operation under way mixes results",
        (
            InCode(
                StepHistory.begin,
                "NOWHERE not in (stored.position, position) and stored.position != position",
                "False",
            ),
        ),
        properties.test_a_changed_order_is_refused,
    ),
    Guard(
        "a name is one step",
        "a second effect is taken for the first one by the next attempt",
        (
            InCode(
                StepHistory.begin,
                "name in self.under_way.values() or name in self._finished",
                "False",
            ),
        ),
        properties.test_a_name_is_one_step,
    ),
    Guard(
        "no recorded step is left out",
        "an operation completes although something else was done for its key",
        (InCode(compensation._conclude, "if not missing:", "if True:"),),
        properties.test_no_recorded_step_is_left_out,
    ),
    Guard(
        "a failure is durable before anything is undone",
        "after a crash the operation succeeds with half of its steps undone",
        (
            InCode(
                compensation._conclude,
                "await run.writer.record(Step(FAILURE_NAME, book.next_position(), payload))",
                "pass",
            ),
        ),
        properties.test_a_failure_is_durable_before_anything_is_undone,
    ),
    Guard(
        "what is undone is remembered",
        "after a crash a refund is paid twice",
        (
            InCode(
                compensation._undo_all,
                "        await run.writer.record(Step(name, position, _DONE))\n    return None",
                "        pass\n    return None",
            ),
        ),
        properties.test_what_is_undone_is_remembered,
    ),
    Guard(
        "no ending is settled while a step is under way",
        "a retry runs the step again beside itself, or it is never undone",
        (InCode(StepRun.end, "if book.under_way else None", "if False else None"),),
        properties.test_no_ending_is_settled_while_a_step_is_under_way,
    ),
    Guard(
        "a key is not freed while a step that ran is not recorded",
        "the retry runs the step again at once",
        (
            InCode(
                StepRun.record_the_rest,
                "list(self._unstored.values())",
                "()",
            ),
        ),
        properties.test_a_key_is_not_freed_while_a_step_is_not_recorded,
    ),
    Guard(
        "a step counts as recorded only when the store has said so",
        "a key is freed for a retry that repeats what the store never heard of",
        (
            InCode(
                StepRun._record,
                "await self.writer.record(self._encoded(taken), taken.value)",
                "self._unstored.pop(taken.name); "
                "await self.writer.record(self._encoded(taken), taken.value)",
            ),
        ),
        properties.test_a_step_that_was_not_written_is_written_before_the_key_is_freed,
    ),
    Guard(
        "an ending outlives its caller while its steps are checked",
        "the outcome of a finished operation is lost, and the operation runs again",
        (
            InCode(
                Compensator.conclude,
                "self._background.finish(orphan, told)",
                "orphan.close()",
            ),
        ),
        properties.test_an_ending_outlives_its_caller,
        # Its lease has nobody to give it up either.
        (Invariant.NOT_LOST, Invariant.NO_HANG),
    ),
    Guard(
        "no step runs outside an open transaction that has recorded one",
        "the effect happens, and its record waits for a lock that the operation itself holds",
        (InCode(JoinedSteps.look_after, "if fate is Fate.OPEN:", "if False:"),),
        properties.test_no_step_runs_beside_an_open_transaction,
    ),
)

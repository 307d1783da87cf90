"""The guards against what a signal's handler raises between two of our lines."""

from __future__ import annotations

from retrysafe.core import handlers
from retrysafe.core.atomic.complete_in import undo_quietly
from retrysafe.core.insist import insist
from retrysafe.core.one_call import OneCall
from retrysafe.core.run import Runner
from retrysafe.core.steps import compensation
from retrysafe.core.steps.run import StepRun
from retrysafe.core.values import codec
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit.direct import as_store_error
from tests.core import test_alarmed as alarmed
from tests.guards import test_signal_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

SIGNAL_GUARDS: tuple[Guard, ...] = (
    Guard(
        "what a signal's handler raises after the operation is no failure of it",
        "the key is freed at once, and the retry runs the operation again",
        (InCode(Runner.run, "is_interruption(attempt.made, error)", "False"),),
        properties.test_an_operation_that_returned_does_not_run_again,
    ),
    Guard(
        "no signal is looked for between the operation's return and its note",
        "the same, for the one place that Python looks at in between",
        (InCode(OneCall.make, "self._ended[_RETURNED]", "self._ended.default_factory()"),),
        properties.test_no_signal_is_looked_for_right_after_the_operation,
    ),
    Guard(
        "nor what it raises in the function of an adapter, after the application's",
        "the key is freed at once, and the retry runs the request again",
        (InCode(OneCall.is_own, "not is_of_handler(error, is_ours_only=True)", "True"),),
        alarmed.test_what_a_handler_raises_in_the_function_of_an_adapter_is_not,
    ),
    Guard(
        "nor what it raises before the operation's first line",
        "it is stored as the operation's failure for good, although nothing of it has run",
        (InCode(OneCall.is_own, "return not is_of_handler(error)\n", "return True\n"),),
        properties.test_what_a_handler_raises_before_the_first_line_fails_nothing,
    ),
    Guard(
        "nor before that of a step",
        "it costs a try, and a step that may be tried once fails without having run",
        (InCode(StepRun.perform, "is_interruption(made, error)", "False"),),
        alarmed.test_a_step_that_has_not_begun_is_not_tried_again,
    ),
    Guard(
        "nor after a step that the user's transaction has kept",
        "the step is tried again, and the transaction commits both",
        (InCode(StepRun.perform, "or is_of_handler(error)", "or False"),),
        alarmed.test_a_step_that_its_transaction_has_kept_is_not_tried_again,
    ),
    Guard(
        "nor while such a step is being undone",
        "it is tried again beside what the first try has written",
        (InCode(undo_quietly, "if is_of_handler(error):", "if False:"),),
        alarmed.test_a_step_that_may_not_be_undone_is_not_tried_again,
    ),
    Guard(
        "nor before that of a compensation",
        "the key is freed, and told to have failed to undo what nobody has tried to",
        (InCode(compensation._undo_all, "is_interruption(taken.made, problem)", "False"),),
        alarmed.test_a_refund_that_has_not_begun_is_paid_after_the_lease,
    ),
    Guard(
        "an error of retrysafe that leaves a handler is not taken for the end of an ending",
        "the outcome is lost, and after the lease the operation runs again",
        (InCode(handlers.is_refusal, "not is_of_handler(error)", "True"),),
        properties.test_an_error_of_retrysafe_that_leaves_a_handler_is_no_ending,
    ),
    Guard(
        "nor for the store's refusal",
        "the same, when the handler's own call was refused",
        (InCode(insist, "if is_of_handler(error):", "if False:"),),
        properties.test_a_refusal_that_leaves_a_handler_is_not_the_stores,
    ),
    Guard(
        "nor for what keeps the steps from being brought to an end",
        "the same, for an operation with steps",
        (InCode(compensation._told, "if is_of_handler(problem):", "if False:"),),
        properties.test_nor_while_steps_are_looked_after,
    ),
    Guard(
        "nor for the refusal of the rows that left in the same batch",
        "other threads' outcomes are withheld for what a handler of the main thread raised",
        (InCode(as_store_error, " or is_of_handler(error)", ""),),
        alarmed.test_what_a_handler_raises_in_a_commit_is_no_word_about_its_rows,
    ),
    Guard(
        "a step is noted before it is called",
        "a signal's handler raises after the step, and the retry runs it again",
        (InCode(StepRun._run_new, "self._unstored[name] = taken", "pass"),),
        properties.test_a_step_that_returned_does_not_run_again,
    ),
    Guard(
        "a step is tried again only for what it raised itself",
        "a signal's handler raises after the step, which runs again at once",
        (InCode(StepRun.perform, "is_interruption(made, error)", "False"),),
        alarmed.test_a_step_that_returned_is_not_tried_again,
    ),
    Guard(
        "a step of which nobody knows whether it ran leaves the key to its lease",
        "the retry runs it again at once",
        (InCode(StepRun.record_the_rest, "if taken.is_doubtful:", "if False:"),),
        properties.test_a_step_in_doubt_frees_no_key,
    ),
    Guard(
        "what was undone is remembered, whatever a signal's handler raises after it",
        "a refund is paid twice",
        (InCode(compensation._undo_all, "if taken.has_returned:", "if False:"),),
        alarmed.test_a_refund_is_not_paid_twice,
    ),
    Guard(
        "what a handler raises around a step's flow is not what the step has returned",
        "an operation goes on with a result of a step that never ran",
        (InCode(run_sync, "and is_of_handler(stop)", "and False"),),
        properties.test_a_handlers_stop_iteration_is_no_result_of_a_step,
    ),
    Guard(
        "a value is not to blame for what handlers raise while it is encoded",
        "the outcome is withheld for good",
        (InCode(codec.require_again, "if not is_of_handler(raised):", "if True:"),),
        alarmed.test_signals_in_a_row_while_the_outcome_is_encoded_withhold_nothing,
    ),
    Guard(
        "nor is a failure",
        "a failure for good is told as another class than it was declared",
        (InCode(codec.encode_failure, "if not is_of_handler(problem):", "if True:"),),
        alarmed.test_while_a_failure_is_encoded,
    ),
)

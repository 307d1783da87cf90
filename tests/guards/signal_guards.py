"""The guards against what a signal's handler raises between two of our lines."""

from __future__ import annotations

from retrysafe.core.one_call import OneCall
from retrysafe.core.run import Runner
from retrysafe.core.steps import compensation
from retrysafe.core.steps.run import StepRun
from tests.core import test_alarmed as alarmed
from tests.guards import test_signal_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

SIGNAL_GUARDS: tuple[Guard, ...] = (
    Guard(
        "what a signal's handler raises after the operation is no failure of it",
        "the key is freed at once, and the retry runs the operation again",
        (InCode(Runner.run, "not attempt.made.is_own(error)", "False"),),
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
        (InCode(OneCall.is_own, "return not _is_of_handler(own)", "return True"),),
        alarmed.test_what_a_handler_raises_in_the_function_of_an_adapter_is_not,
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
        (InCode(StepRun.perform, "not made.is_own(error)", "False"),),
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
)

"""The guards of atomic mode."""

from __future__ import annotations

from retrysafe.core.atomic.block import AtomicBlock
from retrysafe.core.atomic.run import AtomicRunner, _AtomicRun
from retrysafe.stores.sqlite.atomic import SqliteTransaction
from tests.core import test_atomic_runner as runner
from tests.guards import test_atomic_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

ATOMIC_GUARDS: tuple[Guard, ...] = (
    Guard(
        "an answer that frees the key rolls its transaction back",
        "a failure is kept for good, with what it had written so far",
        (
            InCode(
                _AtomicRun._operate,
                "_KINDS.get(self.ending)",
                "_KINDS.get(self.ending, SettleKind.COMPLETE)",
            ),
        ),
        properties.test_an_answer_that_frees_the_key_takes_its_writes_back,
    ),
    Guard(
        "an answer that freed the key is not shared as an outcome",
        "callers are replayed a run of which nothing is left",
        (InCode(AtomicRunner.lead, "and run.ending is not Ending.RELEASED", ""),),
        runner.test_an_answer_that_freed_the_key_is_not_for_those_who_came_meanwhile,
    ),
    Guard(
        "SQLite's write lock is that of the file that the path leads to",
        "a file that is deleted while it is in use lets a key run in the old and in the new one",
        (InCode(SqliteTransaction._take_write_lock, "self._require_unmoved()", "pass"),),
        properties.test_a_deleted_file_grants_no_claim_in_a_transaction,
    ),
    Guard(
        "mismatch in the user's transaction",
        "another request under the key runs, or gets a stranger's outcome",
        (InCode(AtomicBlock._claim, "if answer.decision is Decision.MISMATCH:", "if False:"),),
        properties.test_another_request_in_a_transaction_is_refused,
    ),
    Guard(
        "mismatch beside a rival's transaction",
        "another request under the key is told to come back, for ever",
        (InCode(AtomicBlock._without_lock, "if seen.decision is Decision.MISMATCH:", "if False:"),),
        properties.test_another_request_is_refused_while_a_rival_has_the_lock,
    ),
    Guard(
        "the lock of an atomic run",
        "two transactions claim one key, and one of them fails at its commit",
        (
            InCode(
                AtomicBlock._admission,
                "if not await transaction.lock(call.key, None):",
                "if await transaction.lock(call.key, None) is None:",
            ),
        ),
        properties.test_nothing_is_claimed_beside_a_rivals_transaction,
    ),
    Guard(
        "fence of an atomic run",
        "a write is committed without its outcome, and the retry writes again",
        (InCode(AtomicBlock._settle, "if decision is not Decision.APPLY:", "if False:"),),
        properties.test_a_claim_that_was_rolled_back_inside_does_not_complete,
    ),
)

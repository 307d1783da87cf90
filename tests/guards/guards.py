"""The guards: each with the mutation that removes it, and what fails when it is gone.

The one list behind `docs/guards.md` and behind the test that removes every guard in turn.
"""

from __future__ import annotations

from retrysafe.core import flights, machine, transitions
from retrysafe.core.cache import ReplayCache
from retrysafe.core.engine import Engine
from retrysafe.core.flights import Flights
from retrysafe.core.machine import Trigger
from retrysafe.core.model import Condition, Decision
from retrysafe.core.run import Runner
from retrysafe.core.settle import Settler
from retrysafe.http.asgi_run import AppRun
from retrysafe.runtime.group_commit.tasks import TaskGroupCommit
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit
from retrysafe.runtime.task_ports import LoopPorts
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.sqlite import claims, file, settlements
from retrysafe.stores.sqlite import store as sqlite_store
from retrysafe.stores.sqlite.connections import Connections
from retrysafe.stores.sqlite.file import DatabaseFile
from retrysafe.stores.sqlite.schema import SQL
from tests.core import test_interrupted as interrupted
from tests.guards import test_properties as properties
from tests.guards.atomic_guards import ATOMIC_GUARDS
from tests.guards.consumer_guards import CONSUMER_GUARDS
from tests.guards.correction_guards import CORRECTION_GUARDS
from tests.guards.failover_guards import FAILOVER_GUARDS
from tests.guards.guard import Guard
from tests.guards.http_guards import HTTP_GUARDS
from tests.guards.key_guards import KEY_GUARDS
from tests.guards.lease_guards import LEASE_GUARDS
from tests.guards.mutation import InCode, InEntry, InStatement
from tests.guards.outbox_guards import OUTBOX_GUARDS
from tests.guards.recovery_guards import RECOVERY_GUARDS
from tests.guards.resumption_guards import RESUMPTION_GUARDS
from tests.guards.secret_guards import SECRET_GUARDS
from tests.guards.signal_guards import SIGNAL_GUARDS
from tests.guards.step_guards import STEP_GUARDS
from tests.simulation.invariants import Invariant

_SETTLEMENTS = "`stores/sqlite/sql/settlements.sql`"


GUARDS: tuple[Guard, ...] = (
    Guard(
        "fence: only the record's token writes",
        "a zombie overwrites the new owner's outcome",
        (
            InCode(
                machine.held_trigger, "record is None or record.token != token", "record is None"
            ),
        ),
        properties.test_a_zombie_is_refused,
        (Invariant.ZOMBIE,),
    ),
    Guard(
        "fence in SQLite's settling statement",
        "the same, where the statement decides instead of the table",
        (
            InStatement(
                SQL,
                "insert_outcome",
                "AND token = ?",
                "AND ? IS NOT NULL",
                f"{_SETTLEMENTS}, `insert_outcome`",
            ),
        ),
        properties.test_a_zombie_is_refused_by_sqlite,
    ),
    Guard(
        "fence in SQLite's statement for many endings",
        "the same for endings that share a batch",
        (
            InEntry(
                settlements._COUNT_HELD.statements,
                2,
                settlements._COUNT_HELD.statements[2].replace("k.token = ended.column2 AND", ""),
                f"{_SETTLEMENTS}, `count_held`",
            ),
        ),
        properties.test_a_zombie_in_a_batch_is_refused_by_sqlite,
    ),
    Guard(
        "SQLite keeps a batch of endings only when all of them stand",
        "an ending that was refused leaves its outcome behind, and is reported as stored",
        (
            InCode(
                settlements._settle_all,
                "if held != len(settlements):",
                "if False:",
            ),
        ),
        properties.test_a_batch_of_endings_is_taken_back_when_one_is_refused,
    ),
    Guard(
        "nothing starts on a lease that has run out",
        "a process that stood still between its claim and its operation runs next to its successor",
        (
            InCode(
                Engine._is_late,
                "return self._monotonic() >= asked + granted.remaining_ms / 1000",
                "return False",
            ),
        ),
        properties.test_nothing_starts_on_a_lease_that_has_run_out,
    ),
    Guard(
        "the lease is looked at right before the operation",
        "a process that stood still after its grant runs next to its successor",
        (InCode(Runner.run, "if nest or lease.is_lost(self._monotonic()):", "if False:"),),
        properties.test_a_lease_is_looked_at_right_before_the_operation,
    ),
    Guard(
        "the task of an application looks at the lease",
        "a request whose task got its turn late runs next to its successor",
        (
            InCode(
                AppRun._serve,
                "if isinstance(attempt, Attempt) and attempt.is_lost:",
                "if False:",
            ),
        ),
        properties.test_the_task_of_an_application_looks_at_the_lease,
    ),
    Guard(
        "an operation that stops because its claim is lost does not end the run",
        "a zombie's ClaimLost becomes the stored failure of its successor's key",
        (
            InCode(
                Runner._failed,
                "if isinstance(error, ClaimLost) and attempt.is_lost:",
                "if False:",
            ),
        ),
        properties.test_a_lost_operation_does_not_end_the_run,
    ),
    Guard(
        "a released record takes no ending from its old owner",
        "an operator's force is undone by the owner that it was meant to end",
        (
            InEntry(
                machine.TABLE,
                (Trigger.COMPLETE, Condition.RELEASED),
                Decision.APPLY,
                "`core/machine.py`, the table",
            ),
        ),
        properties.test_a_forced_release_refuses_the_old_owner,
        (Invariant.ZOMBIE,),
    ),
    Guard(
        "SQLite settles pending rows only",
        "the same, where the statement decides instead of the table",
        (
            InStatement(
                SQL,
                "insert_outcome",
                " AND state = 1",
                "",
                f"{_SETTLEMENTS}, `insert_outcome`",
            ),
        ),
        properties.test_a_forced_release_refuses_the_old_owner_in_sqlite,
    ),
    Guard(
        "lease: a pending record is running until its lease ends",
        "an operation runs twice at the same time",
        (
            InCode(
                machine.condition_of,
                "Condition.RUNNING if now_ms < record.lease_ends_at_ms else Condition.ABANDONED",
                "Condition.ABANDONED",
            ),
        ),
        properties.test_a_running_operation_is_not_run_again,
        (Invariant.ONE_OWNER,),
    ),
    Guard(
        "renewal: a running attempt is given to the heartbeat",
        "a healthy operation that takes longer than its lease is run by somebody else as well",
        (InCode(Runner.run, "self._renewals.add(lease)", "pass"),),
        properties.test_a_running_operation_is_renewed,
    ),
    Guard(
        "an extend never shortens a lease",
        "a delayed renewal ends a lease that its owner counts on",
        (
            InCode(
                transitions.extend,
                "max(record.lease_ends_at_ms, now_ms + extension.lease_ms)",
                "now_ms + extension.lease_ms",
            ),
        ),
        properties.test_an_extend_never_shortens_a_lease,
        (Invariant.LEASE_KEPT,),
    ),
    Guard(
        "an operator's plain release is refused under a live owner",
        "a release by mistake starts a second run",
        (
            InEntry(
                machine.TABLE,
                (Trigger.OPERATOR_RELEASE, Condition.RUNNING),
                Decision.APPLY,
                "`core/machine.py`, the table",
            ),
        ),
        properties.test_an_operator_cannot_release_a_running_operation,
        (Invariant.ONE_OWNER,),
    ),
    Guard(
        "mismatch: the request is compared before the state",
        "a reused key shows one request's outcome to another",
        (
            InCode(
                machine.is_mismatch,
                "return fingerprint.digest != record.fingerprint",
                "return False",
            ),
        ),
        properties.test_another_request_is_refused,
        (Invariant.SAME_REQUEST,),
    ),
    Guard(
        "mismatch within the process",
        "a local follower gets the outcome of its leader's different request",
        (InCode(flights.is_same_request, "return mine.digest == other.digest", "return True"),),
        properties.test_another_request_is_refused_while_the_first_runs_here,
        (Invariant.OWN_OUTCOME, Invariant.HONEST_ANSWER),
    ),
    Guard(
        "a leader's refusal is not passed on to another request",
        "the honest retry of the first request is refused because a stranger asked before it",
        (
            InCode(
                Engine._disembark,
                "if not is_same:\n        return None",
                "if False:\n        return None",
            ),
        ),
        properties.test_a_refusal_is_not_passed_on,
        (Invariant.HONEST_ANSWER,),
    ),
    Guard(
        "mismatch in the replay cache",
        "a cached outcome is shown to a different request",
        (
            InCode(
                Engine.recall,
                'self._refusals.check_same(call, cached, "process")',
                "pass",
            ),
        ),
        properties.test_another_request_is_refused_from_the_cache,
        (Invariant.OWN_OUTCOME,),
    ),
    Guard(
        "a row is compared with the key's text",
        "two keys with one digest are served for each other",
        (InCode(transitions.claim, "if record is not None and (", "if False and ("),),
        properties.test_a_colliding_digest_is_refused,
    ),
    Guard(
        "no release on cancellation",
        "an operation that was cut off half-way is run again at once",
        (
            InCode(
                Runner.run,
                "        except Exception as error:",
                "        except BaseException as error:",
            ),
        ),
        properties.test_a_cancelled_operation_keeps_its_key,
        (Invariant.NO_EARLY_RERUN,),
    ),
    Guard(
        "attempt limit",
        "an operation that kills its worker kills every worker, one after the other",
        (
            InCode(
                machine.exhausted_limit, "if attempt - 1 - releases >= attempt_limit:", "if False:"
            ),
        ),
        properties.test_attempts_end_at_their_limit,
        (Invariant.ATTEMPT_LIMIT,),
    ),
    Guard(
        "a pending record never expires",
        "a crashed attempt is forgotten, and with it the attempt count and the fingerprint",
        (InCode(machine.condition_of, "else Condition.ABANDONED", "else Condition.OUTLIVED"),),
        properties.test_an_abandoned_attempt_is_remembered,
        (Invariant.ONE_OWNER, Invariant.SAME_REQUEST),
    ),
    Guard(
        "a pending row is never swept from SQLite",
        "the key vanishes under a running retry, and a second run starts",
        (
            InCode(
                transitions._granted,
                "settled_at_ms, expires_at_ms = None, None",
                "settled_at_ms, expires_at_ms = None, previous and previous.expires_at_ms",
            ),
            InStatement(
                SQL,
                "still_outlived",
                " AND state <> 1",
                "",
                "`stores/sqlite/sql/sweep.sql`, `still_outlived`",
            ),
        ),
        properties.test_a_running_retry_is_not_swept,
    ),
    Guard(
        "SQLite's sweep decides under the write lock",
        "a key that came back while the sweep looked vanishes, and a second run starts",
        (
            InStatement(
                SQL,
                "still_outlived",
                " AND expires_at_ms <= ? AND state <> 1",
                " AND ? IS NOT NULL",
                "`stores/sqlite/sql/sweep.sql`, `still_outlived`",
            ),
        ),
        properties.test_a_key_that_came_back_is_not_swept,
    ),
    Guard(
        "a claim that is asked for again is confirmed by its token",
        "a claim whose answer was lost blocks its own caller until the lease ends",
        (InCode(machine.claim_trigger, "if record.token == request.token:", "if False:"),),
        properties.test_a_claim_with_a_lost_answer_is_found_again,
        (Invariant.OWN_CLAIM,),
    ),
    Guard(
        "an outcome is stored before it is shown",
        "a caller acts on a result that a crash then forgets",
        (
            InCode(
                Settler.settle,
                "answer = await self._write(call, settlement, attempt, value)",
                "self._background.finish("
                "self._settle_orphan(call, lease, settlement, attempt), str); "
                "answer = SettleAnswer(Decision.APPLY)",
            ),
        ),
        properties.test_an_outcome_is_stored_before_it_is_shown,
        (Invariant.STORED_FIRST, Invariant.ZOMBIE),
    ),
    Guard(
        "an unstorable result is withheld, not released",
        "an operation that has run is run again because of its result's type or size",
        (
            InCode(
                Settler.payload_of,
                "payload = codec.withheld(codec.message_of(error))",
                "ending, payload = Ending.RELEASED, codec.withheld(codec.message_of(error))",
            ),
        ),
        properties.test_a_result_that_cannot_be_stored_does_not_free_the_key,
        (Invariant.NO_EARLY_RERUN,),
    ),
    Guard(
        "an outcome is stored although its caller is cancelled",
        "a client that disconnects makes the operation run again",
        (
            InCode(
                Settler._hand_over,
                "self._background.finish(orphan, self.abandoning(call, attempt))",
                "orphan.close()",
            ),
        ),
        properties.test_an_outcome_survives_its_cancelled_caller,
        (Invariant.NOT_LOST,),
    ),
    Guard(
        "a cached outcome ends with its active window",
        "a key that is free again still replays its past",
        (InCode(ReplayCache.keep, "if remaining_ms < seconds * 1000:", "if False:"),),
        properties.test_a_cached_outcome_ends_with_its_window,
    ),
    Guard(
        "a landing wakes every follower",
        "duplicates in the same process wait until they look again by themselves",
        (
            InCode(
                Flights.land,
                "_wake(flight.waiters)",
                "pass",
            ),
        ),
        properties.test_a_landing_wakes_everybody,
    ),
    Guard(
        "whoever signs up for news looks at the phase afterwards",
        "a duplicate signs up just after its leader has told everybody, and waits for ever",
        (
            InCode(
                Flights.enlist,
                "if flight.phase is phase:",
                "if True:",
            ),
        ),
        properties.test_nobody_signs_up_for_news_that_are_over,
    ),
    Guard(
        "one operation of the dictionary decides who leads",
        "two threads lead one key at the same time, and wait for each other's lease",
        (
            InCode(
                Flights.join,
                "flight = self._by_digest.setdefault(digest, mine)\n    if",
                "flight = self._by_digest.get(digest) or mine\n"
                "    self._by_digest[digest] = flight\n    if",
            ),
        ),
        properties.test_one_of_two_leads_a_key,
    ),
    Guard(
        "a waiter stays on the list until it was told",
        "a signal among the wake-ups leaves a follower asleep for ever",
        (
            InCode(
                flights._wake,
                "waiters[0].set()\n        del waiters[0]",
                "waiters.pop(0).set()",
            ),
        ),
        interrupted.test_a_signal_among_the_wake_ups_leaves_nobody_asleep,
    ),
    Guard(
        "a flight is marked as landed where no signal comes in between",
        "a signal leaves a flight without a leader: its key is refused until the process ends",
        (
            InCode(
                Engine._answer,
                "mine.phase = Phase.LANDED",
                "pass",
            ),
        ),
        interrupted.test_a_signal_before_the_landing_leaves_no_flight,
    ),
    Guard(
        "a lease that nobody holds is not renewed, though it was not removed",
        "a signal leaves a lease that is renewed for as long as the process lives",
        (
            InCode(
                Runner.run,
                "lease.is_held = False",
                "pass",
            ),
        ),
        interrupted.test_a_signal_before_the_end_of_the_renewals_leaves_no_lease,
    ),
    Guard(
        "a new life drops the old steps (memory)",
        "a key that is used anew skips work that it has not done",
        (InCode(MemoryStore._claim, "self._steps.pop(digest, None)", "pass"),),
        properties.test_a_new_life_starts_without_steps,
    ),
    Guard(
        "a new life drops the old steps (SQLite)",
        "the same",
        (
            InCode(
                claims._decide,
                'connection.execute(SQL["delete_steps"], (digest,))',
                "pass",
            ),
        ),
        properties.test_a_new_life_starts_without_steps_in_sqlite,
    ),
    Guard(
        "SQLite reads the clock under the write lock",
        "a lease is granted that ended while its claim waited, or a live one is taken over",
        (
            InCode(sqlite_store.SqliteStore._apply, "= self._now_ms()", "= self._early_ms"),
            InCode(
                sqlite_store.SqliteStore.commit,
                "answers = self._write(",
                "self._early_ms = self._now_ms(); answers = self._write(",
            ),
        ),
        properties.test_sqlite_reads_the_clock_under_the_write_lock,
    ),
    Guard(
        "SQLite spares a lease that ended while nobody could write",
        "a process that stands still with the write lock makes a healthy owner lose its key",
        (InCode(claims._decide, "if spared is not None:", "if False:"),),
        properties.test_sqlite_spares_an_owner_that_could_not_write,
    ),
    Guard(
        "SQLite commits with `synchronous=FULL`",
        "a power cut forgets a claim whose operation already ran",
        (InCode(file.make_durable, "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"),),
        properties.test_sqlite_commits_reach_the_disk,
    ),
    Guard(
        "SQLite writes only to the file that its path leads to",
        "a file that is deleted while it is in use lets a key run in the old and in the new one",
        (InCode(Connections._write, "self.file.require_unmoved()", "pass"),),
        properties.test_a_deleted_sqlite_file_grants_no_claim,
    ),
    Guard(
        "SQLite writes only under the locks that others see",
        "the same, when only the files beside it are deleted",
        (InCode(DatabaseFile.remember, "self._beside = tuple(beside)", "self._beside = ()"),),
        properties.test_sqlite_without_its_shared_locks_grants_no_claim,
    ),
    Guard(
        "an interrupted carrier hands its duty over (threads)",
        "every later claim and ending of the process waits for ever",
        (
            InCode(
                ThreadGroupCommit._submit,
                "self._leave(entry)\n                raise",
                "raise",
            ),
        ),
        properties.test_an_interrupted_carrier_hands_over,
    ),
    Guard(
        "an interrupted carrier fails all rows of its batch (tasks)",
        "tasks wait for ever for a commit that was cancelled",
        (
            InCode(
                TaskGroupCommit._fail,
                "future.set_exception(as_store_error(error or asyncio.CancelledError()))",
                "pass",
            ),
        ),
        properties.test_an_interrupted_batch_tells_every_task,
    ),
    Guard(
        "a loop that ends waits for the last writes",
        "`asyncio.run` that ends without `close` loses outcomes, and their operations run again",
        (InCode(LoopPorts._write_before_the_loop_ends, "await self.drain()", "pass"),),
        properties.test_what_is_queued_is_stored_before_its_loop_ends,
    ),
    *ATOMIC_GUARDS,
    *STEP_GUARDS,
    *SIGNAL_GUARDS,
    *OUTBOX_GUARDS,
    *RECOVERY_GUARDS,
    *RESUMPTION_GUARDS,
    *FAILOVER_GUARDS,
    *LEASE_GUARDS,
    *HTTP_GUARDS,
    *KEY_GUARDS,
    *CORRECTION_GUARDS,
    *SECRET_GUARDS,
    *CONSUMER_GUARDS,
)

_INTRODUCTION = """\
# Guards

Each line of this table is a piece of code without which a promise of
[the guarantees](guarantees.md) breaks. The test suite takes the guards out one by one and sees
the named test fail; where the simulation reaches the guard, it must find the broken promise too.

Generated from `tests/guards/guards.py` by `make docs`. Do not edit.

"""


def render_table() -> str:
    """The table of all guards, in Markdown."""
    lines = [
        "| guard | where | what it prevents | test that fails without it | simulation finds |",
        "|---|---|---|---|---|",
    ]
    for guard in GUARDS:
        module = guard.check.__module__.replace(".", "/")
        test = f"`{module}.py::{guard.check.__name__}`"
        found = (
            " or ".join(f"`{invariant.name}`" for invariant in guard.breaks) or "out of its reach"
        )
        lines.append(f"| {guard.name} | {guard.where} | {guard.prevents} | {test} | {found} |")
    lines += ["", "What the simulation checks after every step:", ""]
    lines += ["| invariant | promise |", "|---|---|"]
    lines += [f"| `{invariant.name}` | {invariant.value} |" for invariant in Invariant]
    return "\n".join(lines) + "\n"


def render_page() -> str:
    """The whole of `docs/guards.md`."""
    return _INTRODUCTION + render_table()

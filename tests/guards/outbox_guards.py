"""The guards of the outbox and of the relay."""

from __future__ import annotations

from retrysafe.core.attempt import Attempt
from retrysafe.core.outbox import entries
from retrysafe.core.outbox.staging import Staging
from retrysafe.core.settle import settlement_of
from retrysafe.core.steps.compensation import Compensator
from retrysafe.relay.deliveries import HeldEntries
from retrysafe.relay.delivery_loop import RelayEngine
from retrysafe.relay.pools import TaskDeliveryPool, ThreadDeliveryPool
from retrysafe.stores.sqlite import settlements
from retrysafe.stores.sqlite.schema import SQL
from tests.guards import test_outbox_properties as outbox_properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode, InStatement

_OUTBOX = "`stores/sqlite/sql/outbox.sql`"

OUTBOX_GUARDS: tuple[Guard, ...] = (
    Guard(
        "fence of the outbox: only the claim's token settles an entry",
        "a relay that stood still overwrites what the next one has delivered",
        (
            InCode(
                entries.settled,
                "entry is None or entry.state is not EntryState.WAITING "
                "or entry.token != ending.token",
                "entry is None",
            ),
        ),
        outbox_properties.test_a_zombie_relay_is_refused,
    ),
    Guard(
        "fence of the outbox in SQLite's statement",
        "the same, where the statement decides",
        (
            InStatement(
                SQL,
                "settle_entry",
                "AND token = :token AND state = 1",
                "AND :token IS NOT NULL",
                f"{_OUTBOX}, `settle_entry`",
            ),
        ),
        outbox_properties.test_a_zombie_relay_is_refused_by_sqlite,
    ),
    Guard(
        "an entry is still due when it is claimed",
        "two relays that looked at once deliver the same entry",
        (
            InStatement(
                SQL,
                "claim_entries",
                "AND state = 1 AND due_at_ms <= :now_ms",
                "AND :now_ms IS NOT NULL",
                f"{_OUTBOX}, `claim_entries`",
            ),
        ),
        outbox_properties.test_what_a_rival_has_claimed_since_the_look_is_left_to_it,
    ),
    Guard(
        "only the head of an aggregate is claimed",
        "an entry overtakes an earlier one that failed or is dead",
        (
            InCode(
                entries.holds_back,
                "entry.state is EntryState.WAITING or "
                "(dead_blocks and entry.state is EntryState.DEAD)",
                "entry.state is EntryState.WAITING and entry.token is None",
            ),
        ),
        outbox_properties.test_a_head_holds_its_aggregate_back,
    ),
    Guard(
        "an ending that is confirmed stages nothing",
        "a settlement whose answer was lost delivers its entries twice",
        (
            InCode(
                settlements.settle,
                "if item.entries and answer == _APPLIED:",
                "if item.entries:",
            ),
        ),
        outbox_properties.test_a_confirmed_ending_stages_nothing_again,
    ),
    Guard(
        "nothing is staged after the outcome",
        "an entry is taken on that nobody writes",
        (InCode(Staging.stage, "if self._is_closed:", "if False:"),),
        outbox_properties.test_nothing_is_staged_into_the_void,
    ),
    Guard(
        "a released attempt delivers nothing",
        "every attempt of an operation that is tried again sends its messages",
        (
            InCode(
                settlement_of,
                "if entries and ending is not Ending.RELEASED:",
                "if entries:",
            ),
        ),
        outbox_properties.test_a_released_attempt_delivers_nothing,
    ),
    Guard(
        "staging asks whether the store writes entries",
        "a store that knows nothing of entries drops them without a word",
        (
            InCode(
                Attempt._new_outbox,
                "if not self._ports.store.capabilities.has_outbox:",
                "if False:",
            ),
        ),
        outbox_properties.test_a_store_without_an_outbox_is_asked_first,
    ),
    Guard(
        "a relay knows its own entry again",
        "after it stood still, one relay delivers an entry twice at the same time",
        (
            InCode(
                HeldEntries.take_on,
                "if known is not None and self.is_under_way(number):",
                "if False:",
            ),
        ),
        outbox_properties.test_a_relay_does_not_deliver_an_entry_twice_at_once,
    ),
    Guard(
        "an entry that ends its relays is buried",
        "an entry that kills its relay kills every relay after it",
        (InCode(RelayEngine._claim, "if self._is_deadly(entry):", "if False:"),),
        outbox_properties.test_an_entry_that_kills_relays_is_buried,
    ),
    Guard(
        "tries count when they begin",
        "an entry that kills its relay buries those that the relay had only claimed",
        (
            InCode(
                entries.claimed,
                "due_at_ms=now_ms + claim.lease_ms",
                "due_at_ms=now_ms + claim.lease_ms, attempts=entry.attempts + 1",
            ),
        ),
        outbox_properties.test_what_a_relay_only_claims_is_not_tried,
    ),
    Guard(
        "what may have ended a relay begins alone",
        "nobody can tell which of several deliveries kills the relays",
        (
            InCode(
                HeldEntries._wait,
                "if entry.open_try is OpenTry.NONE:",
                "if entry.open_try is not OpenTry.ALONE:",
            ),
        ),
        outbox_properties.test_what_a_dead_relay_had_begun_is_delivered_alone,
    ),
    Guard(
        "tries beside others bury nobody",
        "an entry dies for the company that it was in",
        (InCode(RelayEngine._is_deadly, "entry.open_try is OpenTry.ALONE", "True"),),
        outbox_properties.test_no_entry_is_buried_for_its_company,
    ),
    Guard(
        "threads look at the lease before each delivery",
        "a relay that stood still delivers what it had only queued, after a later entry",
        (
            InCode(
                ThreadDeliveryPool._deliver_all, "is_begun = may_begin(entry)", "is_begun = True"
            ),
        ),
        outbox_properties.test_a_thread_looks_before_it_delivers,
    ),
    Guard(
        "tasks look at the lease before each delivery",
        "the same, on an event loop",
        (InCode(TaskDeliveryPool._deliver_all, "is_begun = may_begin(entry)", "is_begun = True"),),
        outbox_properties.test_a_task_looks_before_it_delivers,
    ),
    Guard(
        "fence of the outbox: only the claim's token begins a delivery",
        "a relay that stood still delivers what an operator has discarded",
        (
            InCode(
                entries.begun,
                "entry is None or entry.state is not EntryState.WAITING "
                "or entry.token != start.token",
                "entry is None",
            ),
        ),
        outbox_properties.test_a_zombie_relay_begins_nothing,
    ),
    Guard(
        "the same fence in SQLite's statement",
        "the same, where the statement decides",
        (
            InStatement(
                SQL,
                "begin_entry",
                "AND token = :token AND state = 1",
                "AND :token IS NOT NULL",
                f"{_OUTBOX}, `begin_entry`",
            ),
        ),
        outbox_properties.test_a_zombie_relay_begins_nothing_in_sqlite,
    ),
    Guard(
        "an ending is forgotten only when the store has heard it",
        "a delivered entry is delivered again after every short outage",
        (
            InCode(
                RelayEngine._write,
                "endings = self._endings\n",
                "endings, self._endings = self._endings, []\n",
            ),
        ),
        outbox_properties.test_an_ending_that_was_not_heard_is_told_again,
    ),
    Guard(
        "the lease of a slow delivery is renewed",
        "a second relay delivers what the first is still delivering",
        (
            InCode(
                HeldEntries.due_renewals,
                "    # The one that",
                "    return {}\n    # The one that",
            ),
        ),
        outbox_properties.test_a_slow_delivery_is_renewed,
    ),
    Guard(
        "nothing is staged inside a step",
        "a resumed operation skips the step, and its message is never sent",
        (InCode(Attempt._require_stageable, "self.steps.book.is_inside()", "False"),),
        outbox_properties.test_nothing_is_staged_inside_a_step,
    ),
    Guard(
        "the entries of a cancelled caller go with its outcome",
        "the operation counts as done, and its messages are lost",
        (InCode(Compensator.conclude_orphan, "entries=entries", "entries=()"),),
        outbox_properties.test_a_cancelled_caller_with_steps_keeps_its_entries,
    ),
)

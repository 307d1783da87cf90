"""The state machine: the whole table, the rules in its module's docstring, the edges of time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core import machine
from retrysafe.core.machine import CONDITIONS, TABLE, Trigger, condition_of, decide, recover_trigger
from retrysafe.core.model import (
    Condition,
    Decision,
    Ending,
    Fingerprint,
    OperatorCommand,
    SettleKind,
    State,
)
from tests.core.building import LEASE_MS, MARK, NOW, OTHER_MARK, OTHER_TOKEN, TOKEN, record, request

# Written by hand, from the rules and not from the code. Columns as in HEADER.
HEADER = "absent running abandoned succeeded failed released outlived"
GOLDEN = """
claim                  | admit  | in flight | take over | replay   | replay   | take over | admit
claim, other request   | admit  | mismatch  | mismatch  | mismatch | mismatch | mismatch  | admit
claim, corrected request | admit | mismatch | mismatch | mismatch | take over | take over | admit
claim, same token      | admit  | confirm   | take over | replay   | replay   | take over | admit
recover                | lost   | in flight | take over | lost     | lost     | lost      | lost
complete               | lost   | apply     | apply     | confirm  | lost     | lost      | lost
fail                   | lost   | apply     | apply     | lost     | confirm  | lost      | lost
release                | lost   | apply     | apply     | lost     | lost     | confirm   | lost
extend                 | lost   | apply     | apply     | lost     | lost     | lost      | lost
record step            | lost   | apply     | apply     | lost     | lost     | lost      | lost
any write, other token | lost   | lost      | lost      | lost     | lost     | lost      | lost
operator release       | refuse | refuse    | apply     | refuse   | apply    | apply     | confirm
operator force release | refuse | apply     | apply     | refuse   | apply    | apply     | confirm
operator expire        | refuse | refuse    | refuse    | apply    | apply    | apply     | confirm
sweep                  | keep   | keep      | keep      | keep     | keep     | keep      | delete
"""

CLAIMS = (Trigger.CLAIM, Trigger.CLAIM_MISMATCHED, Trigger.CLAIM_CORRECTED, Trigger.CLAIM_AGAIN)
OWNER_WRITES = (
    Trigger.COMPLETE,
    Trigger.FAIL,
    Trigger.RELEASE,
    Trigger.EXTEND,
    Trigger.RECORD_STEP,
)
OPERATOR = (Trigger.OPERATOR_RELEASE, Trigger.OPERATOR_FORCE_RELEASE, Trigger.OPERATOR_EXPIRE)
THERE = (Condition.RUNNING, Condition.ABANDONED, Condition.SUCCEEDED, Condition.FAILED)
PENDING = (Condition.RUNNING, Condition.ABANDONED)
SETTLED_STATES = (State.SUCCEEDED, State.FAILED, State.RELEASED)


def golden() -> dict[tuple[Trigger, Condition], Decision]:
    cells = {}
    for line in GOLDEN.strip().splitlines():
        trigger, *decisions = (cell.strip() for cell in line.split("|"))
        for condition, decision in zip(HEADER.split(), decisions, strict=True):
            cells[Trigger(trigger), Condition(condition)] = Decision(decision)
    return cells


def test_the_whole_table_is_as_written_here():
    assert golden() == TABLE


def test_every_cell_is_decided():
    """There is no pair of a wish and a condition to which the machine has no answer."""
    assert set(TABLE) == {(trigger, condition) for trigger in Trigger for condition in Condition}
    assert set(CONDITIONS) == set(Condition)
    assert all(decide(trigger, condition) in Decision for trigger, condition in TABLE)


@pytest.mark.parametrize("condition", [*THERE, Condition.RELEASED])
def test_another_request_is_refused_whatever_the_record_is(condition):
    """A different request under the same key is refused before anything else is looked at."""
    assert decide(Trigger.CLAIM_MISMATCHED, condition) is Decision.MISMATCH


def test_pending_never_runs_again_while_its_lease_holds():
    granted = {Decision.ADMIT, Decision.TAKE_OVER}
    for trigger in CLAIMS:
        assert decide(trigger, Condition.RUNNING) not in granted


@given(st.integers(0, 10**15))
def test_a_pending_record_never_expires(now_ms):
    """However old it is, and even with an expiry in its row, only its lease frees it."""
    item = record(expires_at_ms=1)
    assert condition_of(item, now_ms) in PENDING
    for condition in PENDING:
        assert decide(Trigger.SWEEP, condition) is Decision.KEEP
        assert decide(Trigger.OPERATOR_EXPIRE, condition) is Decision.REFUSE


@pytest.mark.parametrize("condition", Condition)
def test_only_the_holder_of_the_token_writes(condition):
    assert decide(Trigger.WRITE_UNHELD, condition) is Decision.LOST


@pytest.mark.parametrize("trigger", OWNER_WRITES)
def test_the_holder_of_an_expired_lease_still_holds_the_token(trigger):
    """Until somebody takes over, its outcome is kept: it is the only one there is."""
    assert decide(trigger, Condition.ABANDONED) is Decision.APPLY


@pytest.mark.parametrize(
    ("trigger", "condition"),
    [
        (Trigger.CLAIM_AGAIN, Condition.RUNNING),
        (Trigger.COMPLETE, Condition.SUCCEEDED),
        (Trigger.FAIL, Condition.FAILED),
        (Trigger.RELEASE, Condition.RELEASED),
    ],
)
def test_repeating_a_write_that_stands_is_confirmed(trigger, condition):
    """An ambiguous commit can be retried: the second one changes nothing and says yes."""
    assert decide(trigger, condition) is Decision.CONFIRM


@pytest.mark.parametrize("trigger", OWNER_WRITES)
def test_a_settled_outcome_never_changes(trigger):
    """No later write of the owner replaces an ending by a different one."""
    for condition in (Condition.SUCCEEDED, Condition.FAILED, Condition.RELEASED):
        assert decide(trigger, condition) in (Decision.CONFIRM, Decision.LOST)


@pytest.mark.parametrize("trigger", [*CLAIMS, *OWNER_WRITES, Trigger.WRITE_UNHELD])
def test_a_record_past_its_window_counts_as_absent(trigger):
    assert decide(trigger, Condition.OUTLIVED) is decide(trigger, Condition.ABSENT)


def test_only_outlived_records_are_swept():
    swept = {
        condition
        for condition in Condition
        if decide(Trigger.SWEEP, condition) is not Decision.KEEP
    }
    assert swept == {Condition.OUTLIVED}


@pytest.mark.parametrize("trigger", OPERATOR)
def test_an_operator_cannot_act_on_what_is_not_there(trigger):
    assert decide(trigger, Condition.ABSENT) is Decision.REFUSE


def test_an_operator_never_frees_a_success_or_by_chance_a_running_one():
    """Releasing a success would run it twice; a running one needs the force command."""
    assert decide(Trigger.OPERATOR_RELEASE, Condition.SUCCEEDED) is Decision.REFUSE
    assert decide(Trigger.OPERATOR_FORCE_RELEASE, Condition.SUCCEEDED) is Decision.REFUSE
    assert decide(Trigger.OPERATOR_RELEASE, Condition.RUNNING) is Decision.REFUSE
    assert decide(Trigger.OPERATOR_FORCE_RELEASE, Condition.RUNNING) is Decision.APPLY


def test_a_worker_goes_on_with_what_is_abandoned_and_with_nothing_else():
    """It starts no new life, and never runs what a caller was told has failed."""
    taken = {
        condition
        for condition in Condition
        if decide(Trigger.RECOVER, condition) in (Decision.ADMIT, Decision.TAKE_OVER)
    }
    assert taken == {Condition.ABANDONED}


@pytest.mark.parametrize(
    ("held", "token", "trigger"),
    [
        (TOKEN, OTHER_TOKEN, Trigger.RECOVER),
        (OTHER_TOKEN, OTHER_TOKEN * 2, Trigger.WRITE_UNHELD),
        (OTHER_TOKEN, TOKEN, Trigger.CLAIM_AGAIN),
        (TOKEN, TOKEN, Trigger.CLAIM_AGAIN),
    ],
)
def test_a_worker_is_known_by_the_token_that_it_saw(held, token, trigger):
    """Its own token is a claim asked for again; any other is somebody else's hold."""
    assert recover_trigger(record(), held=held, token=token) is trigger


@pytest.mark.parametrize("state", SETTLED_STATES)
def test_a_worker_that_asks_again_after_its_end_has_lost(state):
    """A copy of its claim that was delayed must not free, replay or restart what has ended."""
    trigger = recover_trigger(record(state), held=OTHER_TOKEN, token=TOKEN)
    assert trigger is Trigger.WRITE_UNHELD


def test_a_worker_finds_nothing_where_there_is_no_record():
    assert recover_trigger(None, held=TOKEN, token=OTHER_TOKEN) is Trigger.WRITE_UNHELD


def test_decisions_belong_to_kinds_of_triggers():
    """A claim is never "lost" and a write never "replayed": callers branch on these sets."""
    allowed = {
        CLAIMS: {"admit", "take over", "in flight", "replay", "mismatch", "confirm"},
        (*OWNER_WRITES, Trigger.WRITE_UNHELD): {"apply", "confirm", "lost"},
        OPERATOR: {"apply", "confirm", "refuse"},
        (Trigger.RECOVER,): {"take over", "in flight", "lost"},
        (Trigger.SWEEP,): {"keep", "delete"},
    }
    assert sum(len(triggers) for triggers in allowed) == len(Trigger)
    for triggers, decisions in allowed.items():
        for trigger in triggers:
            assert {decide(trigger, condition).value for condition in Condition} <= decisions


# Conditions at the edges of time.


def test_no_record_is_absent():
    assert condition_of(None, NOW) is Condition.ABSENT


@pytest.mark.parametrize(
    ("offset", "condition"),
    [
        (-1, Condition.RUNNING),
        (0, Condition.ABANDONED),
        (1, Condition.ABANDONED),
    ],
)
def test_a_lease_ends_exactly_at_its_end(offset, condition):
    assert condition_of(record(), NOW + LEASE_MS + offset) is condition


@pytest.mark.parametrize("state", SETTLED_STATES)
def test_a_window_ends_exactly_at_its_end(state):
    item = record(state, expires_at_ms=NOW + 5)
    assert condition_of(item, NOW + 4) is Condition(state.name.lower())
    assert condition_of(item, NOW + 5) is Condition.OUTLIVED


@pytest.mark.parametrize("state", SETTLED_STATES)
def test_a_settled_record_does_not_look_at_its_lease(state):
    item = record(state, lease_ends_at_ms=0, expires_at_ms=None)
    assert condition_of(item, 10**15) is Condition(state.name.lower())


# Who asks.


def test_fingerprints_are_compared_under_one_rule():
    """The first fingerprint of the record's rule decides, wherever it stands in the list."""
    item = record(rule=1, fingerprint=b"F" * 16)
    new_rule = Fingerprint(2, b"N" * 16)
    assert not machine.is_mismatch(item, (MARK,), record().operation)
    assert machine.is_mismatch(item, (OTHER_MARK,), record().operation)
    assert not machine.is_mismatch(item, (new_rule, MARK), record().operation)
    assert machine.is_mismatch(item, (new_rule, OTHER_MARK), record().operation)


def test_an_unknown_rule_counts_as_a_match():
    """During a deploy that changes the rule, an honest retry must not be refused."""
    assert not machine.is_mismatch(record(rule=9), (MARK, OTHER_MARK), record().operation)
    assert not machine.is_mismatch(record(), (), record().operation)


def test_another_operation_under_an_unknown_rule_is_another_request():
    """Two routes with rules of their own must never answer for each other."""
    assert machine.is_mismatch(record(rule=9), (MARK, OTHER_MARK), "refund")
    assert not machine.is_mismatch(record(), (MARK,), "renamed")


@pytest.mark.parametrize(
    ("item", "mark", "token", "trigger"),
    [
        (None, MARK, TOKEN, Trigger.CLAIM),
        (record(), MARK, OTHER_TOKEN, Trigger.CLAIM),
        (record(), MARK, TOKEN, Trigger.CLAIM_AGAIN),
        (record(), OTHER_MARK, OTHER_TOKEN, Trigger.CLAIM_MISMATCHED),
        (record(), OTHER_MARK, TOKEN, Trigger.CLAIM_MISMATCHED),
    ],
)
def test_a_claim_is_told_apart_by_request_first_then_by_token(item, mark, token, trigger):
    assert machine.claim_trigger(item, request(token, mark)) is trigger


@pytest.mark.parametrize(
    ("item", "changes", "trigger"),
    [
        (record(State.FAILED, nothing_happened=True), {}, Trigger.CLAIM_CORRECTED),
        (record(State.RELEASED, nothing_happened=True), {}, Trigger.CLAIM_CORRECTED),
        (record(State.FAILED), {}, Trigger.CLAIM_MISMATCHED),
        (
            record(State.FAILED, nothing_happened=True),
            {"takes_corrections": False},
            Trigger.CLAIM_MISMATCHED,
        ),
        (
            record(State.FAILED, nothing_happened=True, operation="shop.refund"),
            {},
            Trigger.CLAIM_MISMATCHED,
        ),
        (record(State.FAILED, nothing_happened=True), {"fingerprints": (MARK,)}, Trigger.CLAIM),
    ],
)
def test_only_a_derived_key_after_nothing_takes_a_corrected_request(item, changes, trigger):
    """Both sides have to say so, and it is the same operation; the same request is none."""
    wish = replace(request(OTHER_TOKEN, OTHER_MARK), takes_corrections=True)
    assert machine.claim_trigger(item, replace(wish, **changes)) is trigger


@pytest.mark.parametrize("kind", SettleKind)
def test_a_write_counts_only_with_the_records_token(kind):
    """This is the fence."""
    assert machine.settle_trigger(record(), kind, TOKEN) is Trigger(kind.name.lower())
    assert machine.settle_trigger(record(), kind, OTHER_TOKEN) is Trigger.WRITE_UNHELD
    assert machine.settle_trigger(None, kind, TOKEN) is Trigger.WRITE_UNHELD


@pytest.mark.parametrize("command", OperatorCommand)
def test_every_operator_command_is_a_trigger(command):
    assert machine.operator_trigger(command).value == f"operator {command.value}"


@pytest.mark.parametrize(
    ("attempt", "releases", "limit"),
    [
        (1, 0, None),
        (3, 0, None),
        (4, 0, "attempt_limit"),
        # What ended with a word does not count against the limit of crashes, nor a crash against
        # that of releases.
        (4, 1, None),
        (5, 1, "attempt_limit"),
        (4, 2, "release_limit"),
        (6, 2, "attempt_limit"),
    ],
)
def test_each_limit_counts_its_own_attempts(attempt, releases, limit):
    """The limit itself is still an attempt, and each limit says that it is the one."""
    counted = machine.exhausted_limit(attempt, releases, attempt_limit=3, release_limit=2)
    assert counted == limit


def test_releases_are_not_limited_unless_the_policy_says_so():
    """An outage of a week must not end a key for good."""
    assert machine.exhausted_limit(100, 99, attempt_limit=1, release_limit=None) is None


def test_stored_numbers_never_change():
    """They are in databases, and endings and settle kinds are the states they lead to."""
    assert {state.name: state.value for state in State} == {
        "PENDING": 1,
        "SUCCEEDED": 2,
        "FAILED": 3,
        "RELEASED": 4,
    }
    for ending in Ending:
        assert State(ending).name == ending.name
    assert {kind.name: State(kind) for kind in SettleKind} == {
        "COMPLETE": State.SUCCEEDED,
        "FAIL": State.FAILED,
        "RELEASE": State.RELEASED,
    }


def test_of_several_forms_the_one_with_an_outcome_counts():
    """Then what runs or may have run; what gave way says nothing."""
    assert sorted(Condition, key=machine.how_far) == [
        Condition.ABSENT,
        Condition.OUTLIVED,
        Condition.RELEASED,
        Condition.ABANDONED,
        Condition.RUNNING,
        Condition.FAILED,
        Condition.SUCCEEDED,
    ]

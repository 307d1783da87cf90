"""A policy is checked once, when it is made, and judges by the nearest ancestor."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core.model import Ending, State
from retrysafe.core.policy import (
    FOREVER,
    LEASE_MAXIMUM,
    LEASE_MINIMUM,
    OUTCOME_LIMIT_MAXIMUM_BYTES,
    WAIT_LIMIT_MAXIMUM,
    InFlight,
    Policy,
)
from retrysafe.errors import (
    AwaitForgotten,
    CommitHookFailed,
    OperationInFlight,
    PolicyInvalid,
    ResumedRequestRefused,
    SecretMissing,
)

SECOND = timedelta(seconds=1)
MOMENT = timedelta(microseconds=1)


class Declined(Exception):
    """A business failure."""


class CardExpired(Declined):
    """A narrower business failure."""


class TryAgainDeclined(Declined):
    """A business failure that is listed as retryable."""


class Outage(Exception):
    """Not related to Declined."""


class BothDeclinedAndOutage(TryAgainDeclined, CardExpired):
    """Two listed ancestors; the first in the method resolution order is nearer."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lease": 30}, ["lease", "timedelta", "30"]),
        ({"active_window": None}, ["active_window", "timedelta", "None"]),
        ({"audit_window": "30d"}, ["audit_window", "timedelta", "'30d'"]),
        ({"wait_limit": 1.5}, ["wait_limit", "timedelta", "1.5"]),
        ({"settle_patience": 10}, ["settle_patience", "timedelta", "10"]),
        ({"lease": LEASE_MINIMUM - MOMENT}, ["lease", "0:00:00.100000", "1 day"]),
        ({"lease": LEASE_MAXIMUM + MOMENT}, ["lease", "0:00:00.100000", "1 day"]),
        ({"active_window": 29 * SECOND}, ["active_window", "0:00:29", "lease", "0:00:30"]),
        ({"audit_window": 23 * 3600 * SECOND}, ["audit_window", "23:00:00", "active_window"]),
        ({"audit_window": timedelta(days=36_501)}, ["audit_window", "36,500 days"]),
        ({"wait_limit": -MOMENT}, ["wait_limit", "between 0:00:00"]),
        ({"wait_limit": WAIT_LIMIT_MAXIMUM + MOMENT}, ["wait_limit", "1 day"]),
        ({"settle_patience": -MOMENT}, ["settle_patience", "negative"]),
        ({"run_limit": 29 * SECOND}, ["run_limit", "at least the lease", "0:00:30"]),
        ({"run_limit": 60}, ["run_limit", "timedelta", "60"]),
        ({"attempt_limit": 0}, ["attempt_limit", "1 to 1,000,000", "0"]),
        ({"attempt_limit": 1_000_001}, ["attempt_limit", "1000001"]),
        ({"release_limit": 0}, ["release_limit", "None or a whole number", "0"]),
        ({"release_limit": True}, ["release_limit", "True"]),
        ({"attempt_limit": None}, ["attempt_limit", "must be a whole number", "None"]),
        ({"attempt_limit": True}, ["attempt_limit", "whole number", "True"]),
        ({"attempt_limit": 2.0}, ["attempt_limit", "whole number", "2.0"]),
        ({"outcome_limit_bytes": 0}, ["outcome_limit_bytes", "67,108,864"]),
        ({"outcome_limit_bytes": OUTCOME_LIMIT_MAXIMUM_BYTES + 1}, ["outcome_limit_bytes"]),
        ({"outcome_limit_bytes": None}, ["outcome_limit_bytes", "None"]),
        ({"arguments_limit_bytes": 0}, ["arguments_limit_bytes", "67,108,864"]),
        ({"arguments_limit_bytes": True}, ["arguments_limit_bytes", "True"]),
        ({"in_flight": "wait"}, ["in_flight", "InFlight.WAIT", "'wait'"]),
        ({"unlisted": Ending.SUCCEEDED}, ["unlisted", "Ending.FAILED"]),
        ({"unlisted": 4}, ["unlisted", "Ending.RELEASED", "4"]),
        ({"unlisted": State.RELEASED}, ["unlisted", "Ending.RELEASED"]),
        ({"terminal": (KeyboardInterrupt,)}, ["terminal", "KeyboardInterrupt", "cancellation"]),
        ({"retryable": (BaseException,)}, ["retryable", "classes of exceptions"]),
        ({"terminal": ("ValueError",)}, ["terminal", "'ValueError'"]),
        ({"terminal": "ValueError"}, ["terminal", "classes of exceptions"]),
        ({"terminal": None}, ["terminal", "classes of exceptions", "None"]),
        ({"terminal": (Outage,), "retryable": (Outage,)}, ["Outage", "both"]),
    ],
)
def test_each_senseless_setting_is_refused_with_its_name(changes, words):
    """The message names the setting, what it may be and what it was."""
    with pytest.raises(PolicyInvalid) as caught:
        Policy(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lease": LEASE_MINIMUM},
        {"lease": LEASE_MAXIMUM},
        {"active_window": 30 * SECOND, "audit_window": 30 * SECOND},
        {"wait_limit": timedelta(0)},
        {"wait_limit": WAIT_LIMIT_MAXIMUM, "in_flight": InFlight.WAIT},
        {"settle_patience": timedelta(0)},
        {"run_limit": 30 * SECOND},
        {"run_limit": None},
        {"attempt_limit": 1},
        {"attempt_limit": 1_000_000},
        {"release_limit": 1},
        {"release_limit": 1_000_000},
        {"outcome_limit_bytes": 1},
        {"outcome_limit_bytes": OUTCOME_LIMIT_MAXIMUM_BYTES},
        {"unlisted": Ending.FAILED},
        # The key outlasts its outcome.
        {"active_window": FOREVER},
    ],
)
def test_limits_themselves_are_allowed(changes):
    """Each bound is inclusive, and the value is kept as given."""
    policy = Policy(**changes)
    for name, value in changes.items():
        assert getattr(policy, name) == value


@given(st.integers(100_000, 86_400_000_000))
def test_milliseconds_never_round_a_lease_up(microseconds):
    """Stored milliseconds are whole and never longer than what was asked for."""
    lease = timedelta(microseconds=microseconds)
    policy = Policy(lease=lease)
    assert timedelta(milliseconds=policy.lease_ms) <= lease
    assert lease - timedelta(milliseconds=policy.lease_ms) < timedelta(milliseconds=1)


def test_windows_are_precomputed():
    policy = Policy(active_window=timedelta(hours=1), audit_window=timedelta(hours=2))
    assert (policy.lease_ms, policy.active_ms, policy.audit_ms) == (30_000, 3_600_000, 7_200_000)


def test_with_changes_keeps_the_rest_and_the_original():
    policy = Policy(terminal=(Declined,), attempt_limit=3)
    changed = policy.with_changes(lease=10 * SECOND)
    assert (changed.lease, changed.lease_ms) == (10 * SECOND, 10_000)
    assert (changed.terminal, changed.attempt_limit) == ((Declined,), 3)
    assert policy.lease == 30 * SECOND


def test_with_changes_checks_the_result():
    """A change that contradicts a setting that was not changed is refused."""
    with pytest.raises(PolicyInvalid, match="active_window"):
        Policy().with_changes(active_window=SECOND)


def test_with_changes_names_unknown_settings_and_known_ones():
    with pytest.raises(PolicyInvalid) as caught:
        Policy().with_changes(leese=SECOND, lease_ms=5)
    assert "no setting lease_ms, leese" in str(caught.value)
    assert "attempt_limit" in str(caught.value)


def test_one_exception_class_alone_is_a_list_of_one():
    assert Policy(terminal=Declined).terminal == (Declined,)


def test_lists_of_exceptions_become_tuples():
    """The policy stays hashable and cannot be changed from outside."""
    types = [Declined]
    policy = Policy(terminal=types)
    types.append(Outage)
    assert policy.terminal == (Declined,)
    assert hash(policy) == hash(Policy(terminal=Declined))


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (Declined(), Ending.FAILED),
        (CardExpired(), Ending.FAILED),
        (TryAgainDeclined(), Ending.RELEASED),
        (BothDeclinedAndOutage(), Ending.RELEASED),
        (Outage(), Ending.RELEASED),
    ],
)
def test_nearest_listed_ancestor_judges(error, ending):
    """A narrower class decides over its listed parent; unlisted errors free the key."""
    assert Policy(terminal=Declined, retryable=TryAgainDeclined).judge(error) is ending


@pytest.mark.parametrize("unlisted", [Ending.FAILED, Ending.RELEASED])
def test_unlisted_errors_end_as_the_policy_says(unlisted):
    assert Policy(terminal=Declined, unlisted=unlisted).judge(Outage()) is unlisted


def test_retryable_parent_and_terminal_child():
    """Listing Exception as retryable does not weaken a terminal child."""
    policy = Policy(terminal=CardExpired, retryable=Exception, unlisted=Ending.FAILED)
    assert policy.judge(CardExpired()) is Ending.FAILED
    assert policy.judge(Declined()) is Ending.RELEASED


def test_a_result_that_nobody_awaited_is_a_failure_for_good():
    """What the operation did before would be done again; a forgotten step is as any exception."""
    policy = Policy(retryable=(Exception,))
    assert policy.judge(AwaitForgotten("the result", is_final=True)) is Ending.FAILED
    assert policy.judge(AwaitForgotten("a step")) is Ending.RELEASED
    assert policy.judge(CommitHookFailed("rows are there")) is Ending.FAILED


def test_a_run_that_gave_way_frees_its_key():
    """Nothing ran under its claim. A conflict of another operation is as any exception."""
    policy = Policy(unlisted=Ending.FAILED)
    conflict = OperationInFlight("it runs", key="k", retry_after=SECOND)
    assert policy.judge(conflict) is Ending.FAILED
    conflict.has_record = False
    assert policy.judge(conflict) is Ending.RELEASED


def test_a_missing_secret_never_ends_an_operation():
    """Another process knows it, and goes on: kept, the failure would be replayed to that one."""
    for policy in (Policy(unlisted=Ending.FAILED), Policy(terminal=(Exception,))):
        assert policy.judge(SecretMissing("not listed here")) is Ending.RELEASED


def test_a_refused_resumed_request_never_ends_an_operation():
    """Its client was let in once: kept, the refusal would be replayed to that one."""
    for policy in (Policy(unlisted=Ending.FAILED), Policy(terminal=(Exception,))):
        refused = ResumedRequestRefused("answered with 401")
        assert policy.judge(refused) is Ending.RELEASED
        # It may have run without a claim.
        refused.is_final = True
        assert policy.judge(refused) is Ending.FAILED


def test_a_key_brings_its_own_window():
    """The outcome is kept at least as long as it is replayed, except for a key for ever."""
    policy = Policy()
    short = policy.with_window(timedelta(minutes=5), of="a key")
    assert (short.active_window, short.audit_window) == (
        timedelta(minutes=5),
        policy.audit_window,
    )
    long = policy.with_window(timedelta(days=60), of="a key")
    assert long.active_window == long.audit_window == timedelta(days=60)
    forever = policy.with_window(FOREVER, of="a key")
    assert (forever.active_window, forever.audit_window) == (FOREVER, policy.audit_window)


@pytest.mark.parametrize("window", [None, 300, timedelta(seconds=29)])
def test_a_window_that_is_none_or_shorter_than_the_lease_is_refused(window):
    with pytest.raises(PolicyInvalid, match="the window of a key"):
        Policy(lease=timedelta(seconds=30)).with_window(window, of="a key")

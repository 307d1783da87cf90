"""Operators: what a person may do to a key, and what would be unsafe."""

from __future__ import annotations

import pytest

from retrysafe.core.model import Condition, Decision, OperatorCommand, SettleKind, State
from retrysafe.core.transitions import OPERATOR_RELEASE_KEPT_MS
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    FAILURE,
    KEY,
    LEASE_MS,
    OTHER,
    Probe,
    key_of,
)

_RELEASES = (OperatorCommand.RELEASE, OperatorCommand.FORCE_RELEASE)


class OperatorCases(SuiteBase):
    """A command does what it says or is refused; it never half-happens."""

    def test_a_running_operation_is_not_released_by_accident(self, probe: Probe) -> None:
        """A plain release of a running key is refused, and the owner notices nothing."""
        token = probe.hold()
        stored = probe.stored()
        assert probe.operate(OperatorCommand.RELEASE) is Decision.REFUSE
        assert probe.stored() == stored
        assert probe.end(SettleKind.COMPLETE, token) is Decision.APPLY

    @pytest.mark.parametrize("command", _RELEASES)
    def test_a_success_is_never_released(self, probe: Probe, command: OperatorCommand) -> None:
        """What was done is done: releasing it would run it twice."""
        probe.arrange(Condition.SUCCEEDED)
        stored = probe.stored()
        assert probe.operate(command) is Decision.REFUSE
        assert probe.stored() == stored
        assert probe.claim().decision is Decision.REPLAY

    @pytest.mark.parametrize("seen", [Condition.FAILED, Condition.RELEASED])
    def test_a_success_is_not_expired_for_a_failure_that_somebody_saw(
        self, probe: Probe, seen: Condition
    ) -> None:
        """The key was tried again since they looked: expired, what succeeded would run twice."""
        probe.arrange(seen)
        looked_at = probe.read().seen
        assert probe.operate(OperatorCommand.RELEASE) is Decision.APPLY
        token = probe.hold()
        assert probe.end(SettleKind.COMPLETE, token) is Decision.APPLY
        stored = probe.stored()
        assert probe.operate(OperatorCommand.EXPIRE, seen=looked_at) is Decision.REFUSE
        assert probe.stored() == stored

    def test_an_owner_that_took_over_keeps_what_was_abandoned_when_somebody_saw_it(
        self, probe: Probe
    ) -> None:
        """A forced release is meant for the owner who is gone, not for the next one."""
        old = probe.arrange(Condition.ABANDONED)
        looked_at = probe.read().seen
        assert probe.extend(old).decision is Decision.APPLY
        assert probe.operate(OperatorCommand.FORCE_RELEASE, seen=looked_at) is Decision.REFUSE
        probe.advance(LEASE_MS)
        token = probe.hold()
        assert probe.operate(OperatorCommand.FORCE_RELEASE, seen=looked_at) is Decision.REFUSE
        running = probe.read().seen
        probe.advance(LEASE_MS)
        assert probe.operate(OperatorCommand.FORCE_RELEASE, seen=running) is Decision.APPLY
        assert probe.end(SettleKind.COMPLETE, token) is Decision.LOST

    @pytest.mark.parametrize("command", _RELEASES)
    @pytest.mark.parametrize(
        "condition", [Condition.ABANDONED, Condition.FAILED, Condition.RELEASED]
    )
    def test_a_release_frees_the_key_for_the_same_request(
        self, probe: Probe, command: OperatorCommand, condition: Condition
    ) -> None:
        """The attempts start over, another request is still refused, and the steps are kept."""
        probe.arrange(condition)
        assert probe.operate(command) is Decision.APPLY
        found = probe.read()
        assert (found.condition, found.record.attempt) == (Condition.RELEASED, 0)
        assert found.record.settled_at_ms == probe.clock()
        assert probe.claim(KEY, None, OTHER).decision is Decision.MISMATCH
        answer = probe.claim()
        assert (answer.decision, answer.attempt) == (Decision.TAKE_OVER, 1)
        assert [step.name for step in probe.read().steps] == ["arranged"]

    def test_a_released_failure_is_not_replayed(self, probe: Probe) -> None:
        """The stored failure moves to the audit, and the next run's outcome is what replays."""
        token = probe.hold()
        probe.end(SettleKind.FAIL, token, payload=FAILURE)
        probe.operate(OperatorCommand.RELEASE)
        probe.advance(1)
        token = probe.hold()
        probe.end(SettleKind.COMPLETE, token)
        assert probe.claim().state is State.SUCCEEDED
        assert [item.state for item in probe.read().outcomes] == [State.FAILED, State.SUCCEEDED]

    def test_a_forced_release_admits_the_next_claim(self, probe: Probe) -> None:
        """The key of a running operation is free at once."""
        probe.hold()
        assert probe.operate(OperatorCommand.FORCE_RELEASE) is Decision.APPLY
        assert probe.claim().decision is Decision.TAKE_OVER

    def test_a_release_of_a_crashed_attempt_is_kept_until_the_key_is_used(
        self, probe: Probe
    ) -> None:
        """Its record does not say how long the key is meant to be: steps done run never again."""
        token = probe.hold()
        probe.record(token, "charge", 1)
        probe.advance(LEASE_MS)
        probe.operate(OperatorCommand.RELEASE)
        probe.advance(400 * OPERATOR_RELEASE_KEPT_MS)
        assert probe.sweep().keys == 0
        assert probe.claim().decision is Decision.TAKE_OVER
        assert [step.name for step in probe.read().steps] == ["charge"]

    @pytest.mark.parametrize("days", [0, 1, 7])
    def test_a_release_is_kept_as_long_as_the_ending_before_it(
        self, probe: Probe, days: int
    ) -> None:
        """A failure that is kept for a week stays known for a week after its release.

        For a day at least: long enough for the retries that the release was made for.
        """
        active_ms = days * OPERATOR_RELEASE_KEPT_MS + 10
        token = probe.hold()
        probe.end(SettleKind.FAIL, token, active_ms=active_ms)
        probe.advance(5)
        probe.operate(OperatorCommand.RELEASE)
        kept_ms = max(active_ms, OPERATOR_RELEASE_KEPT_MS)
        assert probe.read().record.expires_at_ms == probe.clock() + kept_ms

    @pytest.mark.parametrize(
        "condition", [Condition.SUCCEEDED, Condition.FAILED, Condition.RELEASED]
    )
    def test_an_expired_key_starts_a_new_life(self, probe: Probe, condition: Condition) -> None:
        """Expiry frees a settled key at once, for any request, and keeps its audit."""
        token = probe.arrange(condition)
        assert probe.operate(OperatorCommand.EXPIRE) is Decision.APPLY
        assert probe.read().condition is Condition.OUTLIVED
        answer = probe.claim(KEY, None, OTHER)
        assert (answer.decision, answer.attempt) == (Decision.ADMIT, 1)
        found = probe.read()
        assert found.steps == []
        assert [item.token for item in found.outcomes] == [token]

    @pytest.mark.parametrize("condition", [Condition.RUNNING, Condition.ABANDONED])
    def test_a_pending_key_is_never_expired(self, probe: Probe, condition: Condition) -> None:
        """Nobody knows how far a pending operation got, so it cannot be forgotten."""
        probe.arrange(condition)
        stored = probe.stored()
        assert probe.operate(OperatorCommand.EXPIRE) is Decision.REFUSE
        assert probe.stored() == stored

    @pytest.mark.parametrize("command", OperatorCommand)
    def test_an_unknown_key_is_refused(self, probe: Probe, command: OperatorCommand) -> None:
        """A mistyped key gets no record and no false success."""
        assert probe.operate(command) is Decision.REFUSE
        assert probe.find() is None

    @pytest.mark.parametrize("command", OperatorCommand)
    def test_an_outlived_key_is_confirmed(self, probe: Probe, command: OperatorCommand) -> None:
        """It is free already; nothing is written."""
        probe.arrange(Condition.OUTLIVED)
        stored = probe.stored()
        assert probe.operate(command) is Decision.CONFIRM
        assert probe.stored() == stored

    def test_a_command_touches_one_key(self, probe: Probe) -> None:
        """The same text of another caller stays as it was."""
        neighbour = key_of(KEY.text, caller="caller-2")
        for key in (KEY, neighbour):
            probe.end(SettleKind.FAIL, probe.hold(key), key)
        stored = probe.stored(neighbour)
        probe.operate(OperatorCommand.RELEASE)
        assert probe.stored(neighbour) == stored

    def test_an_expired_key_is_swept(self, probe: Probe) -> None:
        """What an operator expired goes with the next sweep."""
        probe.arrange(Condition.SUCCEEDED)
        probe.operate(OperatorCommand.EXPIRE)
        assert probe.sweep().keys == 1
        assert probe.find() is None
        probe.advance(ACTIVE_MS)
        assert probe.claim().decision is Decision.ADMIT

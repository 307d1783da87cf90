"""Settlements: only the owner writes, and what it wrote stands."""

from __future__ import annotations

import pytest

from retrysafe.core.model import Decision, OperatorCommand, SettleKind, State
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    AUDIT_MS,
    ENDINGS,
    FAILURE,
    KEY,
    LEASE_MS,
    RESULT,
    Probe,
    key_of,
    kind_name,
    settlement,
)


class SettlementCases(SuiteBase):
    """The fence: zero effect for everybody but the holder of the record's token."""

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    def test_an_ending_is_stored(self, probe: Probe, kind: SettleKind) -> None:
        """State, instants and outcome are written together; the claim's own words stay."""
        token = probe.hold()
        before = probe.read().record
        probe.advance(250)
        assert probe.end(kind, token) is Decision.APPLY
        found = probe.read()
        now_ms = probe.clock()
        before.state = State(kind)
        before.settled_at_ms = now_ms
        before.expires_at_ms = now_ms + ACTIVE_MS
        assert found.record == before
        (outcome,) = found.outcomes
        assert (outcome.token, outcome.attempt, outcome.state) == (token, 1, State(kind))
        assert outcome.payload == RESULT
        assert (outcome.settled_at_ms, outcome.audit_ends_at_ms) == (now_ms, now_ms + AUDIT_MS)

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    def test_repeating_an_ending_is_confirmed(self, probe: Probe, kind: SettleKind) -> None:
        """A commit whose answer was lost can be retried; the first one stands unchanged."""
        token = probe.hold()
        probe.end(kind, token)
        stored = probe.stored()
        probe.advance(10)
        assert probe.end(kind, token, payload=FAILURE) is Decision.CONFIRM
        assert probe.stored() == stored

    @pytest.mark.parametrize("first", ENDINGS, ids=kind_name)
    @pytest.mark.parametrize("second", ENDINGS, ids=kind_name)
    def test_an_outcome_never_changes(
        self, probe: Probe, first: SettleKind, second: SettleKind
    ) -> None:
        """An owner cannot turn one ending into another."""
        token = probe.hold()
        probe.end(first, token)
        stored = probe.stored()
        expected = Decision.CONFIRM if first is second else Decision.LOST
        assert probe.end(second, token, payload=FAILURE) is expected
        assert probe.stored() == stored

    @pytest.mark.parametrize("kind", SettleKind, ids=kind_name)
    def test_an_owner_that_was_taken_over_writes_nothing(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """The zombie is refused while the new owner runs."""
        zombie = probe.hold()
        probe.advance(LEASE_MS)
        owner = probe.hold()
        stored = probe.stored()
        assert probe.settle(settlement(kind, KEY, zombie)).decision is Decision.LOST
        assert probe.stored() == stored
        assert probe.end(SettleKind.COMPLETE, owner) is Decision.APPLY

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    @pytest.mark.parametrize("standing", ENDINGS, ids=kind_name)
    def test_an_owner_that_was_taken_over_changes_no_outcome(
        self, probe: Probe, kind: SettleKind, standing: SettleKind
    ) -> None:
        """The zombie is refused after the new owner settled; equal endings are no repetition."""
        zombie = probe.hold()
        probe.advance(LEASE_MS)
        owner = probe.hold()
        probe.end(standing, owner)
        stored = probe.stored()
        assert probe.end(kind, zombie, payload=FAILURE) is Decision.LOST
        assert probe.stored() == stored

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    def test_an_owner_of_an_earlier_life_writes_nothing(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """A key that was forgotten and claimed anew is fenced from its whole past."""
        zombie = probe.hold()
        probe.end(SettleKind.COMPLETE, zombie)
        probe.advance(ACTIVE_MS)
        probe.hold()
        stored = probe.stored()
        assert probe.end(kind, zombie) is Decision.LOST
        assert probe.extend(zombie).decision is Decision.LOST
        assert probe.stored() == stored

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    def test_an_owner_whose_key_was_swept_writes_nothing(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """Attempt 1 after a sweep is not the attempt 1 of before: tokens tell, numbers do not."""
        zombie = probe.hold()
        probe.end(SettleKind.RELEASE, zombie)
        probe.advance(ACTIVE_MS)
        assert probe.sweep().keys == 1
        assert probe.end(kind, zombie) is Decision.LOST
        assert probe.find() is None
        owner = mint_token()
        assert probe.claim(KEY, owner).attempt == 1
        assert probe.end(kind, zombie) is Decision.LOST
        assert probe.read().record.token == owner

    def test_a_token_of_another_key_writes_nothing(self, probe: Probe) -> None:
        """A token holds its own key and no other."""
        probe.hold()
        neighbour = key_of("key-2")
        token = probe.hold(neighbour)
        assert probe.end(SettleKind.COMPLETE, token) is Decision.LOST
        assert probe.end(SettleKind.COMPLETE, token, neighbour) is Decision.APPLY

    def test_a_settled_record_is_not_extended(self, probe: Probe) -> None:
        """A heartbeat that arrives after the ending finds nothing to renew."""
        token = probe.hold()
        probe.end(SettleKind.COMPLETE, token)
        stored = probe.stored()
        answer = probe.extend(token)
        assert (answer.decision, answer.remaining_ms) == (Decision.LOST, 0)
        assert probe.stored() == stored

    def test_every_attempt_leaves_its_ending_in_the_audit(self, probe: Probe) -> None:
        """Releases and the final outcome are all there, oldest first."""
        for _ in range(2):
            token = probe.hold()
            probe.end(SettleKind.RELEASE, token, payload=FAILURE)
            probe.advance(1)
        token = probe.hold()
        probe.end(SettleKind.COMPLETE, token)
        endings = [(item.attempt, item.state) for item in probe.read().outcomes]
        released, succeeded = State.RELEASED, State.SUCCEEDED
        assert endings == [(1, released), (2, released), (3, succeeded)]
        assert probe.claim().payload == RESULT

    def test_an_ending_without_a_payload_is_an_ending(self, probe: Probe) -> None:
        """The key is settled; there is only nothing to show."""
        token = probe.hold()
        assert probe.end(SettleKind.COMPLETE, token, payload=None) is Decision.APPLY
        answer = probe.claim()
        assert (answer.decision, answer.payload) == (Decision.REPLAY, None)
        assert probe.read().outcomes == []

    def test_a_forced_release_fences_the_owner(self, probe: Probe) -> None:
        """Once an operator took the key away, its owner's outcome is refused."""
        token = probe.hold()
        assert probe.operate(OperatorCommand.FORCE_RELEASE) is Decision.APPLY
        stored = probe.stored()
        assert probe.end(SettleKind.COMPLETE, token) is Decision.LOST
        assert probe.end(SettleKind.FAIL, token) is Decision.LOST
        assert probe.extend(token).decision is Decision.LOST
        assert probe.record(token) is Decision.LOST
        assert probe.stored() == stored

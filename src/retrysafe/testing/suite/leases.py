"""Leases: to the millisecond, by the store's clock, and never shorter than promised."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.model import Condition, Decision, ExtendAnswer, Extension, SettleKind
from retrysafe.errors import StoreError
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    ENDINGS,
    KEY,
    LEASE_MS,
    Probe,
    key_of,
    kind_name,
)


class LeaseCases(SuiteBase):
    """Pending never runs again while its lease holds, and never blocks a key after that."""

    def test_a_lease_holds_to_its_last_millisecond(self, probe: Probe) -> None:
        """One millisecond before the end the key is in flight; at the end it is taken over."""
        probe.hold()
        probe.advance(LEASE_MS - 1)
        answer = probe.claim()
        assert (answer.decision, answer.remaining_ms) == (Decision.IN_FLIGHT, 1)
        assert probe.read().condition is Condition.RUNNING
        probe.advance(1)
        assert probe.read().condition is Condition.ABANDONED
        answer = probe.claim()
        assert (answer.decision, answer.condition) == (Decision.TAKE_OVER, Condition.ABANDONED)

    def test_the_remaining_time_is_what_is_left(self, probe: Probe) -> None:
        """Grant, conflict and confirmation tell the rest of the lease by the store's clock."""
        token = mint_token()
        granted = probe.claim(KEY, token, lease_ms=10_000)
        ends_at_ms = probe.clock() + 10_000
        assert (granted.remaining_ms, granted.lease_ends_at_ms) == (10_000, ends_at_ms)
        probe.advance(2_500)
        for presented in (mint_token(), token):
            # Another lease is wished for, and the standing one is told.
            answer = probe.claim(KEY, presented, lease_ms=60_000)
            assert (answer.remaining_ms, answer.lease_ends_at_ms) == (7_500, ends_at_ms)

    def test_a_conflict_tells_how_long_the_attempt_has_run(self, probe: Probe) -> None:
        """Counted from the claim that runs now: neither a renewal nor an earlier attempt moves it.

        Whoever is told when to come back, is told by this; no caller compares clocks.
        """
        token = probe.hold()
        probe.advance(700)
        probe.extend(token)
        probe.advance(300)
        answer = probe.claim()
        assert (answer.decision, answer.elapsed_ms) == (Decision.IN_FLIGHT, 1_000)
        probe.advance(LEASE_MS)
        assert probe.claim().decision is Decision.TAKE_OVER
        probe.advance(40)
        assert probe.claim().elapsed_ms == 40

    def test_a_takeover_gets_its_own_lease(self, probe: Probe) -> None:
        """The new lease starts at the takeover and has the length that was asked for."""
        probe.hold()
        probe.advance(LEASE_MS + 5)
        answer = probe.claim(lease_ms=7_000)
        assert (answer.remaining_ms, answer.lease_ends_at_ms) == (7_000, probe.clock() + 7_000)
        probe.advance(6_999)
        assert probe.claim().decision is Decision.IN_FLIGHT

    def test_a_replay_tells_the_rest_of_the_active_window(self, probe: Probe) -> None:
        """The replay's remaining time is counted from the settlement."""
        token = probe.hold()
        probe.advance(100)
        probe.end(SettleKind.COMPLETE, token, active_ms=5_000)
        assert probe.claim().remaining_ms == 5_000
        probe.advance(4_999)
        answer = probe.claim()
        assert (answer.decision, answer.remaining_ms) == (Decision.REPLAY, 1)
        probe.advance(1)
        assert probe.claim().decision is Decision.ADMIT

    def test_an_extension_counts_from_now(self, probe: Probe) -> None:
        """The new end is now plus the lease, and a rival sees it."""
        token = probe.hold()
        probe.advance(20_000)
        answer = probe.extend(token, lease_ms=LEASE_MS)
        assert (answer.decision, answer.remaining_ms) == (Decision.APPLY, LEASE_MS)
        assert answer.lease_ends_at_ms == probe.clock() + LEASE_MS
        probe.advance(LEASE_MS - 1)
        assert probe.claim().decision is Decision.IN_FLIGHT
        probe.advance(1)
        assert probe.claim().decision is Decision.TAKE_OVER

    def test_extensions_are_answered_in_order(self, probe: Probe) -> None:
        """One batch extends what is held, and tells each of the others that it lost."""
        keys = [key_of(f"key-{number}") for number in range(40)]
        tokens = [probe.hold(key) for key in keys]
        for key, token in list(zip(keys, tokens, strict=True))[::4]:
            probe.end(SettleKind.COMPLETE, token, key)
        probe.advance(1_000)
        wishes = [Extension(key, token, LEASE_MS) for key, token in zip(keys, tokens, strict=True)]
        # In another order than the keys were claimed in, which is that of no index.
        wishes.reverse()
        answers = probe.extend_all(wishes)
        ends_at_ms = probe.clock() + LEASE_MS
        kept = ExtendAnswer(Decision.APPLY, LEASE_MS, ends_at_ms)
        lost = ExtendAnswer(Decision.LOST)
        assert answers[::-1] == [kept if place % 4 else lost for place in range(40)]
        assert probe.read(keys[1]).record.lease_ends_at_ms == ends_at_ms

    def test_a_former_owner_beside_the_owner_is_told_apart(self, probe: Probe) -> None:
        """Two processes may be merged on their way; each token hears its own answer."""
        zombie = probe.hold()
        probe.advance(LEASE_MS)
        owner = probe.hold()
        for tokens in ((zombie, owner), (owner, zombie)):
            answers = probe.extend_all([Extension(KEY, token, LEASE_MS) for token in tokens])
            decisions = {
                token: answer.decision
                for token, answer in zip(tokens, answers, strict=True)
                if isinstance(answer, ExtendAnswer)
            }
            assert decisions == {zombie: Decision.LOST, owner: Decision.APPLY}

    def test_a_poisoned_extension_fails_alone(self, probe: Probe) -> None:
        """A lease that cannot be stored is refused or kept exactly; its neighbours stand."""
        keys = [key_of(f"key-{number}") for number in range(3)]
        wishes = [Extension(key, probe.hold(key), LEASE_MS) for key in keys]
        wishes[1].lease_ms = 2**70
        answers = probe.extend_all(wishes)
        kept = ExtendAnswer(Decision.APPLY, LEASE_MS, probe.clock() + LEASE_MS)
        assert [answers[0], answers[2]] == [kept, kept]
        refused = answers[1]
        assert isinstance(refused, StoreError) or refused.remaining_ms == 2**70

    def test_an_extension_never_shortens(self, probe: Probe) -> None:
        """An extension that ends before the standing lease leaves it, and tells what stands."""
        token = probe.hold()
        ends_at_ms = probe.clock() + LEASE_MS
        probe.advance(1_000)
        answer = probe.extend(token, lease_ms=5_000)
        assert (answer.decision, answer.remaining_ms) == (Decision.APPLY, LEASE_MS - 1_000)
        assert answer.lease_ends_at_ms == ends_at_ms
        assert probe.read().record.lease_ends_at_ms == ends_at_ms

    def test_an_extension_changes_the_lease_only(self, probe: Probe) -> None:
        """Attempt, owner, instants of claiming and steps stay as they are."""
        token = probe.hold()
        probe.record(token)
        before = probe.read()
        probe.advance(1_000)
        probe.extend(token)
        after = probe.read()
        before.record.lease_ends_at_ms = after.record.lease_ends_at_ms
        assert (after.record, after.steps) == (before.record, before.steps)

    def test_an_owner_whose_lease_ended_may_extend_until_somebody_takes_over(
        self, probe: Probe
    ) -> None:
        """Late is not lost; lost is lost for good."""
        token = probe.hold()
        probe.advance(LEASE_MS + 1)
        assert probe.extend(token).decision is Decision.APPLY
        assert probe.claim().decision is Decision.IN_FLIGHT
        probe.advance(LEASE_MS)
        probe.hold()
        assert probe.extend(token).decision is Decision.LOST

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    def test_an_owner_whose_lease_ended_may_settle_until_somebody_takes_over(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """The outcome of a run that took too long is kept when nobody ran in between."""
        token = probe.hold()
        probe.advance(10 * LEASE_MS)
        assert probe.end(kind, token) is Decision.APPLY

    def test_a_pending_record_never_expires(self, probe: Probe) -> None:
        """However old it is, only its lease frees it: it is taken over, not forgotten."""
        token = probe.hold()
        probe.record(token)
        probe.advance(100 * ACTIVE_MS)
        answer = probe.claim()
        assert (answer.decision, answer.attempt) == (Decision.TAKE_OVER, 2)
        assert [step.name for step in probe.read().steps] == ["reserve"]

    def test_a_clock_that_jumps_back_frees_nothing(self, probe: Probe) -> None:
        """A corrected clock makes a lease longer, never shorter; nobody is told to wait so long."""
        token = probe.hold()
        probe.clock.jump_back(timedelta(hours=1))
        answer = probe.claim()
        assert answer.decision is Decision.IN_FLIGHT
        assert answer.lease_ends_at_ms == probe.clock() + LEASE_MS + ACTIVE_MS
        assert answer.remaining_ms == LEASE_MS
        assert probe.end(SettleKind.COMPLETE, token) is Decision.APPLY
        assert probe.claim().decision is Decision.REPLAY

    def test_an_extension_after_a_jump_back_keeps_the_longer_lease(self, probe: Probe) -> None:
        """The lease that was promised stands although the clock went back before it."""
        token = probe.hold()
        ends_at_ms = probe.clock() + LEASE_MS
        probe.clock.jump_back(timedelta(hours=1))
        assert probe.extend(token).lease_ends_at_ms == ends_at_ms

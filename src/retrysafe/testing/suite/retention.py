"""Retention: what is kept, for how long, and what a sweep may take."""

from __future__ import annotations

import pytest

from retrysafe.core.model import (
    Condition,
    Decision,
    OperatorCommand,
    Payload,
    SettleKind,
    State,
)
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
    colliding,
    key_of,
    kind_name,
)


class RetentionCases(SuiteBase):
    """Two windows: the active one frees the key, the audit one ends the outcome."""

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    def test_the_active_window_ends_to_the_millisecond(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """A record counts until the window's last millisecond, swept or not."""
        token = probe.hold()
        probe.end(kind, token)
        probe.advance(ACTIVE_MS - 1)
        assert probe.read().condition is Condition(State(kind).name.lower())
        assert probe.sweep().keys == 0
        probe.advance(1)
        assert probe.read().condition is Condition.OUTLIVED

    def test_an_outlived_key_starts_a_new_life(self, probe: Probe) -> None:
        """Attempt 1, a new birth, no old steps, and the old outcomes still in the audit."""
        first = probe.hold()
        probe.end(SettleKind.RELEASE, first, payload=FAILURE)
        second = probe.hold()
        probe.record(second)
        probe.end(SettleKind.COMPLETE, second)
        probe.advance(ACTIVE_MS)
        answer = probe.claim()
        assert (answer.decision, answer.condition) == (Decision.ADMIT, Condition.OUTLIVED)
        assert (answer.attempt, answer.payload) == (1, None)
        found = probe.read()
        assert (found.record.attempt, found.record.state) == (1, State.PENDING)
        assert found.record.first_claimed_at_ms == probe.clock()
        assert (found.record.settled_at_ms, found.record.expires_at_ms) == (None, None)
        assert found.steps == []
        assert {item.token for item in found.outcomes} == {first, second}

    def test_a_new_life_replays_its_own_outcome(self, probe: Probe) -> None:
        """Neither the payload nor the state of an earlier life is served."""
        probe.end(SettleKind.COMPLETE, probe.hold(), payload=RESULT)
        probe.advance(ACTIVE_MS)
        probe.end(SettleKind.FAIL, probe.hold(), payload=FAILURE)
        answer = probe.claim()
        assert (answer.state, answer.payload, answer.attempt) == (State.FAILED, FAILURE, 1)
        payloads = [item.payload for item in probe.read().outcomes]
        assert payloads == [RESULT, FAILURE]

    def test_a_read_without_the_audit_gives_the_standing_outcome_only(self, probe: Probe) -> None:
        """What a replay gives, also in a second life; the rest is as with the whole audit."""

        def standing() -> list[Payload]:
            lean, whole = probe.read(with_audit=False), probe.read()
            assert (lean.record, lean.condition) == (whole.record, whole.condition)
            assert (lean.steps, lean.arguments) == (whole.steps, whole.arguments)
            assert all(item in whole.outcomes for item in lean.outcomes)
            return [item.payload for item in lean.outcomes]

        assert probe.find(with_audit=False) is None
        first = probe.hold(arguments=RESULT)
        probe.end(SettleKind.RELEASE, first, payload=FAILURE)
        assert standing() == []
        second = probe.hold()
        probe.record(second)
        assert standing() == []
        probe.end(SettleKind.COMPLETE, second, payload=RESULT)
        assert standing() == [RESULT]
        probe.advance(ACTIVE_MS)
        third = probe.hold()
        assert standing() == []
        probe.end(SettleKind.FAIL, third, payload=FAILURE)
        assert standing() == [FAILURE]
        assert [item.token for item in probe.read(with_audit=False).outcomes] == [third]
        probe.operate(OperatorCommand.RELEASE)
        assert standing() == []

    def test_the_last_outcome_is_of_the_present_life(self, probe: Probe) -> None:
        """The newest ending counts, also under later claims; what an earlier life left does not."""
        assert probe.last() is None
        first = probe.hold()
        assert probe.last() is None
        probe.end(SettleKind.RELEASE, first, payload=RESULT)
        probe.advance(1)
        second = probe.hold()
        probe.end(SettleKind.RELEASE, second, payload=FAILURE)
        for _ in range(2):
            probe.hold()
            probe.advance(LEASE_MS)
            assert probe.last() == probe.read().outcomes[-1]
        last = probe.last()
        assert last is not None
        assert (last.token, last.attempt, last.payload) == (second, 2, FAILURE)
        assert last.state is State.RELEASED
        assert probe.last(colliding(KEY, "another key")) is None
        assert probe.last(colliding(KEY, KEY.text, caller="another caller")) is None
        probe.end(SettleKind.COMPLETE, probe.hold())
        probe.advance(ACTIVE_MS)
        probe.hold()
        assert probe.last() is None

    def test_an_ending_without_an_outcome_leaves_the_last_one(self, probe: Probe) -> None:
        """A claim that was given back has nothing to tell; the failure before it still counts."""
        first = probe.hold()
        probe.end(SettleKind.RELEASE, first, payload=FAILURE)
        probe.advance(1)
        probe.end(SettleKind.RELEASE, probe.hold(), payload=None)
        probe.advance(1)
        probe.hold()
        last = probe.last()
        assert last is not None
        assert (last.token, last.payload) == (first, FAILURE)

    def test_a_swept_outcome_is_not_the_last_one(self, probe: Probe) -> None:
        """It is gone, and what another key stored since is not taken for it."""
        probe.end(SettleKind.RELEASE, probe.hold(), audit_ms=1_000)
        probe.hold()
        probe.advance(1_000)
        assert probe.sweep().outcomes == 1
        other = key_of("other")
        probe.end(SettleKind.RELEASE, probe.hold(other), other)
        assert probe.last() is None
        assert probe.last(other) is not None

    @pytest.mark.parametrize("kind", [SettleKind.COMPLETE, SettleKind.FAIL], ids=kind_name)
    def test_a_key_may_outlast_its_outcome(self, probe: Probe, kind: SettleKind) -> None:
        """It stays done when its audit is over, and takes no other key's outcome for its own."""
        token = probe.hold()
        probe.end(kind, token, active_ms=1_000 * AUDIT_MS)
        # Past the day as well, which a store may drop as a whole.
        probe.advance(AUDIT_MS + 2 * 24 * 3_600_000)
        while probe.sweep().has_more:
            pass
        other = key_of("other")
        probe.end(SettleKind.COMPLETE, probe.hold(other), other)
        answer = probe.claim()
        assert (answer.decision, answer.state) == (Decision.REPLAY, State(kind))
        assert answer.payload is None
        found = probe.read()
        assert (found.record.token, found.outcomes) == (token, [])
        assert probe.claim(other).payload == RESULT

    def test_a_swept_key_keeps_its_audit(self, probe: Probe) -> None:
        """The outcome outlives the key's row, and is there when the key comes back."""
        token = probe.hold()
        probe.end(SettleKind.COMPLETE, token)
        probe.advance(ACTIVE_MS)
        report = probe.sweep()
        assert (report.keys, report.outcomes) == (1, 0)
        assert probe.find() is None
        assert probe.claim().attempt == 1
        assert [item.token for item in probe.read().outcomes] == [token]

    def test_outcomes_end_with_the_audit_window(self, probe: Probe) -> None:
        """Kept until its last millisecond, removed by the first sweep after it."""
        probe.end(SettleKind.COMPLETE, probe.hold())
        probe.advance(ACTIVE_MS)
        probe.sweep()
        probe.advance(AUDIT_MS - ACTIVE_MS - 1)
        assert probe.sweep().outcomes == 0
        probe.hold()
        assert len(probe.read().outcomes) == 1
        probe.advance(1)
        assert probe.sweep().outcomes == 1
        assert probe.read().outcomes == []

    def test_an_outcome_past_its_audit_does_not_free_its_key(self, probe: Probe) -> None:
        """With a short audit the key stays settled: there is nothing to show, nothing to run."""
        probe.end(SettleKind.COMPLETE, probe.hold(), audit_ms=1_000)
        probe.advance(1_000)
        assert probe.sweep().outcomes == 1
        answer = probe.claim()
        assert (answer.decision, answer.payload) == (Decision.REPLAY, None)

    def test_steps_go_with_their_key(self, probe: Probe) -> None:
        """A key that comes back after the sweep finds no step of its past."""
        token = probe.hold()
        probe.record(token)
        probe.end(SettleKind.COMPLETE, token)
        probe.advance(ACTIVE_MS)
        assert probe.sweep().keys == 1
        probe.hold()
        assert probe.read().steps == []

    def test_a_sweep_never_touches_pending(self, probe: Probe) -> None:
        """Running or abandoned, with any age, the record, its steps and its past stay."""
        running, abandoned = key_of("running"), key_of("abandoned")
        for key in (running, abandoned):
            probe.end(SettleKind.RELEASE, probe.hold(key), key, audit_ms=1000 * AUDIT_MS)
        probe.hold(abandoned)
        token = probe.hold(running)
        probe.record(token, key=running)
        probe.advance(100 * ACTIVE_MS)
        probe.extend(token, running)
        before = probe.stored(running), probe.stored(abandoned)
        report = probe.sweep()
        assert (report.keys, report.outcomes, report.has_more) == (0, 0, False)
        assert (probe.stored(running), probe.stored(abandoned)) == before

    def test_a_sweep_of_nothing_is_quiet(self, probe: Probe) -> None:
        """An empty store has nothing to sweep and no next round."""
        report = probe.sweep()
        assert (report.keys, report.outcomes, report.has_more) == (0, 0, False)

    def test_a_sweep_is_bounded(self, probe: Probe) -> None:
        """No round removes more than its limit, and the rounds end when everything is gone."""
        self._settle_many(probe, 7, active_ms=1_000, audit_ms=AUDIT_MS)
        probe.advance(1_000)
        removed = _sweep_rounds(probe, limit=3, rounds=4)
        assert [keys for keys, _ in removed if keys] == [3, 3, 1]
        assert all(outcomes == 0 for _, outcomes in removed)
        assert all(probe.find(key_of(f"key-{number}")) is None for number in range(7))

    def test_a_sweep_of_outcomes_is_bounded(self, probe: Probe) -> None:
        """The audit is swept by the same limit, also while its keys are still active."""
        self._settle_many(probe, 7, active_ms=ACTIVE_MS, audit_ms=1_000)
        probe.advance(1_000)
        removed = _sweep_rounds(probe, limit=3, rounds=4)
        assert [outcomes for _, outcomes in removed if outcomes] == [3, 3, 1]
        assert all(keys == 0 for keys, _ in removed)
        assert all(probe.read(key_of(f"key-{n}")).outcomes == [] for n in range(7))

    def test_a_round_that_left_something_says_so(self, probe: Probe) -> None:
        """`has_more` may ask for a round too many, never for one too few."""
        self._settle_many(probe, 4, active_ms=1_000, audit_ms=1_000)
        probe.advance(1_000)
        assert probe.sweep(limit=3).has_more
        assert not probe.sweep(limit=3).has_more

    def test_a_sweep_takes_only_what_is_outlived(self, probe: Probe) -> None:
        """Live neighbours of an outlived key stay as they were."""
        live = key_of("live")
        probe.end(SettleKind.COMPLETE, probe.hold(live), live)
        probe.end(SettleKind.COMPLETE, probe.hold(), active_ms=1_000)
        probe.advance(1_000)
        stored = probe.stored(live)
        assert probe.sweep().keys == 1
        assert (probe.find(), probe.stored(live)) == (None, stored)

    def test_an_outlived_key_that_came_back_is_not_swept(self, probe: Probe) -> None:
        """The new life is pending, whatever the old one was."""
        probe.end(SettleKind.COMPLETE, probe.hold())
        probe.advance(ACTIVE_MS)
        token = probe.hold()
        probe.advance(10 * LEASE_MS)
        assert probe.sweep().keys == 0
        assert probe.read().record.token == token

    def test_a_store_closes_twice(self, probe: Probe) -> None:
        """Closing gives back what is held, and may be repeated."""
        probe.hold(KEY)
        probe.close()
        probe.close()

    def _settle_many(self, probe: Probe, count: int, *, active_ms: int, audit_ms: int) -> None:
        for number in range(count):
            key = key_of(f"key-{number}")
            token = probe.hold(key)
            probe.end(SettleKind.COMPLETE, token, key, active_ms=active_ms, audit_ms=audit_ms)


def _sweep_rounds(probe: Probe, *, limit: int, rounds: int) -> list[tuple[int, int]]:
    """What each round removed, until one says that nothing is left."""
    removed = []
    for _ in range(rounds):
        report = probe.sweep(limit)
        assert max(report.keys, report.outcomes) <= limit
        removed.append((report.keys, report.outcomes))
        if not report.has_more:
            return removed
    raise AssertionError(f"{rounds} rounds of {limit} were not enough: {removed}")

"""Steps: what a later attempt need not do again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from retrysafe.core.model import Condition, Decision, OperatorCommand, SettleKind
from retrysafe.errors import StoreError
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    FAILURE,
    KEY,
    LEASE_MS,
    RESULT,
    Probe,
    key_of,
    request,
)


def _names(probe: Probe) -> list[str]:
    return [step.name for step in probe.read().steps]


class StepCases(SuiteBase):
    """A finished step stays finished for one life of its key."""

    def test_steps_come_back_in_their_order(self, probe: Probe) -> None:
        """By position, not by name and not by the order of writing."""
        token = probe.hold()
        for name, position in (("zeta", 2), ("alpha", 3), ("mid", 1)):
            assert probe.record(token, name, position) is Decision.APPLY
        steps = [(step.name, step.position) for step in probe.read().steps]
        assert steps == [("mid", 1), ("zeta", 2), ("alpha", 3)]

    def test_the_first_result_of_a_step_stands(self, probe: Probe) -> None:
        """Repeating it is accepted; another one is refused. Neither changes what is stored."""
        token = probe.hold()
        probe.record(token, "charge", 1, payload=RESULT)
        assert probe.record(token, "charge", 9, payload=RESULT) is Decision.APPLY
        for other in (
            replace(RESULT, form="bytes.1"),
            replace(RESULT, head=b"other"),
            replace(RESULT, body=b"other"),
        ):
            assert probe.record(token, "charge", 9, payload=other) is Decision.LOST
        (step,) = probe.read().steps
        assert (step.position, step.payload) == (1, RESULT)

    def test_the_first_result_stands_over_attempts(self, probe: Probe) -> None:
        """A new owner that runs a finished step again does not change its result."""
        probe.record(probe.hold(), "charge", payload=RESULT)
        probe.advance(LEASE_MS)
        assert probe.record(probe.hold(), "charge", payload=FAILURE) is Decision.LOST
        assert [step.payload for step in probe.read().steps] == [RESULT]

    def test_a_token_that_comes_back_has_no_say_in_stored_steps(self, probe: Probe) -> None:
        """A late copy of a claim takes the key back: what the owner in between did stands."""
        wish = request()
        assert probe.ask(wish).decision is Decision.ADMIT
        probe.advance(LEASE_MS)
        assert probe.record(probe.hold(), "charge", payload=RESULT) is Decision.APPLY
        probe.advance(LEASE_MS)
        assert probe.ask(wish).decision is Decision.TAKE_OVER
        assert probe.record(wish.token, "charge", payload=FAILURE) is Decision.LOST
        assert [step.payload for step in probe.read().steps] == [RESULT]

    def test_a_lost_owner_records_no_step(self, probe: Probe) -> None:
        """The steps of a zombie are refused: the new owner must not skip what it did."""
        zombie = probe.hold()
        probe.record(zombie, "before")
        probe.advance(LEASE_MS)
        owner = probe.hold()
        assert probe.record(zombie, "after", 2) is Decision.LOST
        assert probe.record(mint_token(), "stranger", 2) is Decision.LOST
        assert _names(probe) == ["before"]
        assert probe.record(owner, "own", 2) is Decision.APPLY
        assert _names(probe) == ["before", "own"]

    def test_an_owner_whose_lease_ended_may_record_until_somebody_takes_over(
        self, probe: Probe
    ) -> None:
        """What is known to be done is worth keeping while nobody else runs."""
        token = probe.hold()
        probe.advance(LEASE_MS + 1)
        assert probe.record(token) is Decision.APPLY
        assert _names(probe) == ["reserve"]

    def test_a_settled_record_takes_no_step(self, probe: Probe) -> None:
        """After its ending an attempt has no more steps."""
        token = probe.hold()
        probe.end(SettleKind.COMPLETE, token)
        assert probe.record(token) is Decision.LOST
        assert probe.read().steps == []

    def test_an_absent_key_takes_no_step(self, probe: Probe) -> None:
        """A step makes no record."""
        assert probe.record(mint_token()) is Decision.LOST
        assert probe.find() is None

    def test_steps_survive_release_and_takeover(self, probe: Probe) -> None:
        """Every attempt of one life resumes where the one before it ended."""
        token = probe.hold()
        probe.record(token, "first", 1)
        probe.end(SettleKind.RELEASE, token)
        token = probe.hold()
        probe.record(token, "second", 2)
        probe.advance(LEASE_MS)
        probe.hold()
        assert _names(probe) == ["first", "second"]

    def test_steps_survive_an_operator_release(self, probe: Probe) -> None:
        """An operator frees the key, and the next attempt still skips what is done."""
        token = probe.hold()
        probe.record(token, "first", 1)
        probe.end(SettleKind.FAIL, token)
        assert probe.operate(OperatorCommand.RELEASE) is Decision.APPLY
        probe.hold()
        assert _names(probe) == ["first"]

    def test_a_new_life_has_no_old_steps(self, probe: Probe) -> None:
        """A key claimed anew after its window must do everything again."""
        token = probe.hold()
        probe.record(token, "old", 1)
        probe.end(SettleKind.COMPLETE, token)
        probe.advance(ACTIVE_MS)
        assert probe.claim().condition is Condition.OUTLIVED
        assert probe.read().steps == []

    @pytest.mark.parametrize("kind", [SettleKind.COMPLETE, SettleKind.FAIL, SettleKind.RELEASE])
    def test_cleanup_takes_the_steps_along(self, probe: Probe, kind: SettleKind) -> None:
        """A key that is used again after a sweep must not skip what only its past has done."""
        token = probe.hold()
        probe.record(token, "charge", 1)
        probe.end(kind, token)
        probe.advance(ACTIVE_MS)
        assert probe.sweep().keys == 1
        token = probe.hold()
        assert probe.read().steps == []
        # Not even one that was hidden until its name came up again.
        assert probe.record(token, "charge", 2, payload=FAILURE) is Decision.APPLY
        assert [(step.position, step.payload) for step in probe.read().steps] == [(2, FAILURE)]

    def test_cleanup_leaves_the_steps_of_an_attempt_under_way(self, probe: Probe) -> None:
        """Nor of one that was abandoned: somebody will go on from there."""
        token = probe.hold()
        probe.record(token, "charge", 1)
        probe.advance(ACTIVE_MS + LEASE_MS)
        assert probe.sweep().keys == 0
        assert _names(probe) == ["charge"]

    def test_a_zombie_leaves_no_step_after_the_cleanup(self, probe: Probe) -> None:
        """A write that comes after its key is gone must not wait there for the next life."""
        token = probe.hold()
        probe.end(SettleKind.RELEASE, token)
        probe.advance(ACTIVE_MS)
        assert probe.sweep().keys == 1
        assert probe.record(token, "charge") is Decision.LOST
        probe.hold()
        assert probe.read().steps == []

    def test_steps_belong_to_one_key(self, probe: Probe) -> None:
        """Equal names under two keys are two steps."""
        neighbour = key_of("key-2")
        probe.record(probe.hold(), "charge", payload=RESULT)
        probe.record(probe.hold(neighbour), "charge", key=neighbour, payload=FAILURE)
        assert [step.payload for step in probe.read().steps] == [RESULT]
        assert [step.payload for step in probe.read(neighbour).steps] == [FAILURE]

    @pytest.mark.parametrize("name", ["naïve 日本 😀", "a:b/c", " "])
    def test_any_name_of_a_step_is_kept(self, probe: Probe, name: str) -> None:
        """Names come back as they were given."""
        probe.record(probe.hold(), name)
        assert _names(probe) == [name]

    def test_a_name_that_is_not_text_is_stored_exactly_or_refused(self, probe: Probe) -> None:
        """A lone surrogate has no UTF-8 form: a store that needs one refuses in its own words."""
        token = probe.hold()
        try:
            assert probe.record(token, "\ud800") is Decision.APPLY
            expected = ["\ud800"]
        except StoreError as error:
            assert not error.retryable
            expected = []
        assert _names(probe) == expected
        assert probe.record(token, "plain", 2) is Decision.APPLY
        assert probe.end(SettleKind.COMPLETE, token, KEY) is Decision.APPLY

"""Collisions: two keys with one digest, of which neither is ever served for the other."""

from __future__ import annotations

from itertools import product

import pytest

from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import Condition, Decision, OperatorCommand, SettleKind
from retrysafe.errors import DigestCollision
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import KEY, PRESENT, Probe, colliding

# Another text, another caller, and a pair that only its frame keeps apart.
_TWINS = (
    colliding(KEY, "key-2"),
    colliding(KEY, KEY.text, caller="caller-2"),
    colliding(KEY, "1key-1", caller="caller-"),
)


class CollisionCases(SuiteBase):
    """The stored text decides whose record it is; the digest only finds it."""

    @pytest.mark.parametrize("condition", PRESENT)
    def test_a_claim_of_the_other_key_is_refused(self, probe: Probe, condition: Condition) -> None:
        """In every condition, with the standing record unchanged and never shown."""
        probe.arrange(condition)
        stored = probe.stored()
        for twin in _TWINS:
            with pytest.raises(DigestCollision) as refused:
                probe.claim(twin)
            assert refused.value.key == twin.text
            assert not refused.value.retryable
        assert probe.stored() == stored

    def test_reading_the_other_key_finds_nothing(self, probe: Probe) -> None:
        """Neither record nor audit of the standing key is shown."""
        probe.end(SettleKind.COMPLETE, probe.hold())
        assert [probe.find(twin) for twin in _TWINS] == [None] * len(_TWINS)
        assert [item.record.text for item in probe.listed(RecordQuery())] == [KEY.text]

    @pytest.mark.parametrize("condition", PRESENT)
    def test_a_command_on_the_other_key_is_refused(
        self, probe: Probe, condition: Condition
    ) -> None:
        """An operator that names one key never changes the other: for it there is no record."""
        probe.arrange(condition)
        stored = probe.stored()
        for twin, command in product(_TWINS, OperatorCommand):
            assert probe.operate(command, twin) is Decision.REFUSE
        assert probe.stored() == stored

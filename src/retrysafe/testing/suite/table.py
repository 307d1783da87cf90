"""Every cell of the state machine's table, brought about through the port."""

from __future__ import annotations

from typing import Final

import pytest

from retrysafe.core import transitions
from retrysafe.core.machine import TABLE, Trigger
from retrysafe.core.model import (
    ClaimRequest,
    Condition,
    Decision,
    Extension,
    OperatorCommand,
    Record,
    SettleKind,
    Settlement,
    StoredKey,
)
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    KEY,
    LEASE_MS,
    OTHER,
    Probe,
    kind_name,
    request,
    settlement,
    without_payload,
)

_SETTLE_KINDS: Final = {
    Trigger.COMPLETE: SettleKind.COMPLETE,
    Trigger.FAIL: SettleKind.FAIL,
    Trigger.RELEASE: SettleKind.RELEASE,
}
_COMMANDS: Final = {
    Trigger.OPERATOR_RELEASE: OperatorCommand.RELEASE,
    Trigger.OPERATOR_FORCE_RELEASE: OperatorCommand.FORCE_RELEASE,
    Trigger.OPERATOR_EXPIRE: OperatorCommand.EXPIRE,
}
_CLAIMS: Final = (
    Trigger.CLAIM,
    Trigger.CLAIM_MISMATCHED,
    Trigger.CLAIM_CORRECTED,
    Trigger.CLAIM_AGAIN,
)


def _cells(*triggers: Trigger) -> pytest.MarkDecorator:
    cells = [
        pytest.param(trigger, condition, id=f"{trigger.value}-{condition.value}".replace(" ", "_"))
        for trigger, condition in TABLE
        if trigger in triggers
    ]
    return pytest.mark.parametrize(("trigger", "condition"), cells)


class TableCases(SuiteBase):
    """A store answers as the table does, and writes what the transition writes."""

    @_cells(*_CLAIMS)
    def test_claim_answers_as_the_table(
        self, probe: Probe, trigger: Trigger, condition: Condition
    ) -> None:
        """Each kind of claim gets the table's decision, and the row becomes the model's row."""
        is_correctable = trigger is Trigger.CLAIM_CORRECTED
        wish = _claim_request(trigger, probe.arrange(condition, nothing_happened=is_correctable))
        before = probe.find()
        expected = transitions.claim(_record(before), wish, probe.clock())
        answer = probe.ask(wish)
        assert answer.decision is TABLE[trigger, condition]
        assert without_payload(answer) == expected[1]
        after = probe.read()
        assert after.record == (expected[0] or _record(before))
        assert after.outcomes == ([] if before is None else before.outcomes)

    @_cells(Trigger.RECOVER)
    def test_worker_is_answered_as_the_table(
        self, probe: Probe, trigger: Trigger, condition: Condition
    ) -> None:
        """A worker gets what it saw abandoned, and the row becomes the model's row."""
        held, wish = probe.arrange(condition), request(KEY)
        before, stored = probe.find(), probe.stored()
        expected = transitions.take_over(_record(before), wish, held, probe.clock())
        answer = probe.take_over(wish, held)
        assert answer.decision is TABLE[trigger, condition]
        assert answer == expected[1]
        if expected[0] is None:
            assert probe.stored() == stored
        else:
            assert probe.read().record == expected[0]

    @_cells(*_SETTLE_KINDS)
    def test_settlement_answers_as_the_table(
        self, probe: Probe, trigger: Trigger, condition: Condition
    ) -> None:
        """Each write of the last owner gets the table's decision, and only APPLY writes."""
        token = probe.arrange(condition)
        self._settle_and_compare(
            probe, settlement(_SETTLE_KINDS[trigger], KEY, token), TABLE[trigger, condition]
        )

    @_cells(Trigger.WRITE_UNHELD)
    @pytest.mark.parametrize("kind", SettleKind, ids=kind_name)
    def test_unheld_settlement_is_lost(
        self, probe: Probe, trigger: Trigger, condition: Condition, kind: SettleKind
    ) -> None:
        """A token that is not the record's writes nothing, in any condition."""
        probe.arrange(condition)
        assert TABLE[trigger, condition] is Decision.LOST
        self._settle_and_compare(probe, settlement(kind, KEY, mint_token()), Decision.LOST)

    def _settle_and_compare(self, probe: Probe, wish: Settlement, decision: Decision) -> None:
        before = probe.find()
        stored = probe.stored()
        expected = transitions.settle(_record(before), wish, probe.clock())
        assert probe.settle(wish) == expected[1]
        assert expected[1].decision is decision
        if decision is Decision.APPLY:
            assert probe.read().record == expected[0]
        else:
            assert probe.stored() == stored

    @_cells(Trigger.EXTEND, Trigger.WRITE_UNHELD)
    def test_extension_answers_as_the_table(
        self, probe: Probe, trigger: Trigger, condition: Condition
    ) -> None:
        """A lease is extended for the owner of a pending record, and for nobody else."""
        token = probe.arrange(condition)
        if trigger is Trigger.WRITE_UNHELD:
            token = mint_token()
        before = probe.find()
        stored = probe.stored()
        wish = Extension(KEY, token, 2 * LEASE_MS)
        expected = transitions.extend(_record(before), wish, probe.clock())
        assert probe.extend_all([wish]) == [expected[1]]
        assert expected[1].decision is TABLE[trigger, condition]
        if expected[0] is not None:
            assert probe.read().record == expected[0]
        else:
            assert probe.stored() == stored

    @_cells(Trigger.RECORD_STEP, Trigger.WRITE_UNHELD)
    def test_step_answers_as_the_table(
        self, probe: Probe, trigger: Trigger, condition: Condition
    ) -> None:
        """A step is stored for the owner of a pending record, and for nobody else."""
        token = probe.arrange(condition)
        stored = probe.stored()
        if trigger is Trigger.WRITE_UNHELD:
            token = mint_token()
        decision = probe.record(token, "tried", 2)
        assert decision is TABLE[trigger, condition]
        if decision is Decision.APPLY:
            assert [step.name for step in probe.read().steps] == ["arranged", "tried"]
        else:
            assert probe.stored() == stored

    @_cells(*_COMMANDS)
    def test_operator_answers_as_the_table(
        self, probe: Probe, trigger: Trigger, condition: Condition
    ) -> None:
        """Each command gets the table's decision, and only APPLY writes."""
        probe.arrange(condition)
        before = probe.find()
        stored = probe.stored()
        expected = transitions.operate(_record(before), _COMMANDS[trigger], probe.clock())
        decision = probe.operate(_COMMANDS[trigger])
        assert decision is TABLE[trigger, condition]
        if decision is Decision.APPLY:
            after = probe.read()
            assert after.record == expected[0]
            assert before is not None
            assert (after.steps, after.outcomes) == (before.steps, before.outcomes)
        else:
            assert probe.stored() == stored

    @_cells(Trigger.SWEEP)
    def test_sweep_answers_as_the_table(
        self, probe: Probe, trigger: Trigger, condition: Condition
    ) -> None:
        """A sweep removes an outlived key and touches nothing else."""
        probe.arrange(condition)
        stored = probe.stored()
        report = probe.sweep()
        if TABLE[trigger, condition] is Decision.DELETE:
            assert (report.keys, probe.find()) == (1, None)
        else:
            assert (report.keys, probe.stored()) == (0, stored)


def _record(found: StoredKey | None) -> Record | None:
    return None if found is None else found.record


def _claim_request(trigger: Trigger, token: bytes) -> ClaimRequest:
    if trigger is Trigger.CLAIM_MISMATCHED:
        return request(KEY, None, OTHER)
    if trigger is Trigger.CLAIM_CORRECTED:
        return request(KEY, None, OTHER, takes_corrections=True)
    if trigger is Trigger.CLAIM_AGAIN:
        return request(KEY, token)
    return request(KEY)

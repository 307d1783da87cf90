"""Corrected requests: which key takes one, and what it finds there.

A key takes another request only after a life in which nothing happened, by its rule's word for
every attempt and with no step stored. Everything else is another request under a used key.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Fingerprint,
    OperatorCommand,
    Payload,
    SettleKind,
    State,
)
from retrysafe.core.ports import Store
from retrysafe.core.transitions import correction_of
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    ASKED,
    FAILURE,
    KEY,
    LEASE_MS,
    OTHER,
    Probe,
    answered,
    key_of,
    kind_name,
    request,
    settlement,
)

_THIRD: Final = Fingerprint(1, b"third third thi.")
_HARMLESS: Final = (SettleKind.FAIL, SettleKind.RELEASE)
_RACERS: Final = 8
_harmless = pytest.mark.parametrize("kind", _HARMLESS, ids=kind_name)


def _corrected(key: Key = KEY, fingerprint: Fingerprint = OTHER) -> ClaimRequest:
    return request(key, None, fingerprint, takes_corrections=True)


def _ended(probe: Probe, kind: SettleKind, token: bytes, key: Key = KEY) -> None:
    assert probe.end(kind, token, key, payload=FAILURE, nothing_happened=True) is Decision.APPLY


class CorrectionCases(SuiteBase):
    """A failure that its user has mended is no trap, and an uncertain one stays refused."""

    @_harmless
    def test_a_corrected_request_takes_the_place_of_the_first(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """It is the next attempt; from then on the first one is another request."""
        _ended(probe, kind, probe.hold())
        wish = _corrected()
        answer = probe.ask(wish)
        assert (answer.decision, answer.attempt) == (Decision.TAKE_OVER, 2)
        record = probe.read().record
        assert (record.fingerprint, record.token) == (OTHER.digest, wish.token)
        assert probe.claim().decision is Decision.MISMATCH
        assert probe.end(SettleKind.COMPLETE, wish.token) is Decision.APPLY
        assert probe.claim().decision is Decision.MISMATCH
        assert probe.ask(_corrected()).decision is Decision.REPLAY

    def test_the_same_request_is_replayed_or_runs_as_ever(self, probe: Probe) -> None:
        """That nothing happened changes nothing for it, and the replay says that it may be."""
        _ended(probe, SettleKind.FAIL, probe.hold())
        answer = probe.ask(request(takes_corrections=True))
        assert (answer.decision, answer.payload) == (Decision.REPLAY, FAILURE)
        assert answer.nothing_happened
        assert probe.operate(OperatorCommand.RELEASE) is Decision.APPLY
        assert probe.claim().decision is Decision.TAKE_OVER

    @_harmless
    def test_a_mismatch_shows_nothing_of_the_first(self, probe: Probe, kind: SettleKind) -> None:
        """Neither its outcome nor whether it could be corrected."""
        _ended(probe, kind, probe.hold())
        answer = probe.claim(KEY, None, OTHER)
        assert answer.decision is Decision.MISMATCH
        assert (answer.payload, answer.nothing_happened) == (None, False)

    @_harmless
    def test_a_key_of_a_client_takes_no_corrected_request(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """Nor does any key take another operation."""
        _ended(probe, kind, probe.hold())
        stored = probe.stored()
        assert probe.ask(request(KEY, None, OTHER)).decision is Decision.MISMATCH
        another = request(KEY, None, OTHER, operation="refund", takes_corrections=True)
        assert probe.ask(another).decision is Decision.MISMATCH
        assert probe.stored() == stored

    @_harmless
    def test_an_ending_that_is_not_listed_stays_refused(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """Nobody knows what happened."""
        probe.end(kind, probe.hold(), payload=FAILURE)
        assert probe.ask(_corrected()).decision is Decision.MISMATCH

    def test_a_success_takes_no_correction_whatever_its_owner_says(self, probe: Probe) -> None:
        """What succeeded has happened."""
        _ended(probe, SettleKind.COMPLETE, probe.hold())
        assert probe.ask(_corrected()).decision is Decision.MISMATCH

    @_harmless
    def test_a_stored_step_keeps_the_key_for_its_request(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """A part of the operation is done, whatever its ending says."""
        token = probe.hold()
        assert probe.record(token) is Decision.APPLY
        _ended(probe, kind, token)
        stored = probe.stored()
        assert probe.ask(_corrected()).decision is Decision.MISMATCH
        assert probe.stored() == stored

    @_harmless
    def test_a_step_of_an_earlier_attempt_counts_as_well(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """Also when every attempt since has ended with nothing done."""
        token = probe.hold()
        probe.record(token)
        _ended(probe, SettleKind.RELEASE, token)
        _ended(probe, kind, probe.hold())
        assert probe.ask(_corrected()).decision is Decision.MISMATCH

    @_harmless
    def test_a_crash_before_the_harmless_ending_stays_uncertain(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """The attempt that died may have done everything but say so."""
        probe.arrange(Condition.ABANDONED, nothing_happened=True)
        _ended(probe, kind, probe.hold())
        assert not probe.read().record.nothing_happened
        assert probe.ask(_corrected()).decision is Decision.MISMATCH

    @_harmless
    def test_an_unlisted_ending_before_the_harmless_one_stays_uncertain(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """One that freed the key, and one that an operator took back."""
        assert probe.end(SettleKind.RELEASE, probe.hold()) is Decision.APPLY
        _ended(probe, kind, probe.hold())
        assert probe.ask(_corrected()).decision is Decision.MISMATCH
        failed = key_of("failed")
        assert probe.end(SettleKind.FAIL, probe.hold(failed), failed) is Decision.APPLY
        assert probe.operate(OperatorCommand.RELEASE, failed) is Decision.APPLY
        _ended(probe, kind, probe.hold(failed), failed)
        assert probe.ask(_corrected(failed)).decision is Decision.MISMATCH

    def test_harmless_endings_in_a_row_stay_correctable(self, probe: Probe) -> None:
        """Nothing happened, again and again: each request may be corrected once more."""
        _ended(probe, SettleKind.RELEASE, probe.hold())
        _ended(probe, SettleKind.RELEASE, probe.hold())
        for number, fingerprint in enumerate((OTHER, _THIRD, ASKED), 3):
            wish = _corrected(KEY, fingerprint)
            answer = probe.ask(wish)
            assert (answer.decision, answer.attempt) == (Decision.TAKE_OVER, number)
            _ended(probe, SettleKind.FAIL, wish.token)

    @pytest.mark.parametrize("condition", [Condition.RUNNING, Condition.ABANDONED])
    def test_a_corrected_request_is_as_pending_as_any(
        self, probe: Probe, condition: Condition
    ) -> None:
        """While it runs, and after its crash, nobody takes its place but its own retry."""
        _ended(probe, SettleKind.FAIL, probe.hold())
        assert probe.ask(_corrected()).decision is Decision.TAKE_OVER
        if condition is Condition.ABANDONED:
            probe.advance(LEASE_MS)
        assert probe.ask(_corrected(KEY, _THIRD)).decision is Decision.MISMATCH
        assert probe.ask(request(takes_corrections=True)).decision is Decision.MISMATCH
        is_running = condition is Condition.RUNNING
        expected = Decision.IN_FLIGHT if is_running else Decision.TAKE_OVER
        assert probe.ask(_corrected()).decision is expected

    def test_what_tells_a_corrected_request_is_the_same_in_every_attempt(
        self, probe: Probe
    ) -> None:
        """Child keys are made with it; a request that corrects nothing has none."""
        assert probe.claim(token=None).correction == b""
        probe.advance(LEASE_MS)
        assert probe.claim().correction == b""
        key = key_of("corrected")
        _ended(probe, SettleKind.FAIL, probe.hold(key), key)
        wish = _corrected(key)
        told = probe.ask(wish).correction
        assert told == correction_of(probe.read(key).record)
        assert OTHER.digest in told
        assert probe.ask(wish).correction == told
        probe.advance(LEASE_MS)
        again = _corrected(key)
        assert probe.ask(again).correction == told
        probe.advance(LEASE_MS)
        assert probe.take_over(request(key, None, OTHER), again.token).correction == told

    def test_a_new_life_corrects_nothing(self, probe: Probe) -> None:
        """The request of the life before is over, and so is what became of it."""
        _ended(probe, SettleKind.FAIL, probe.hold())
        wish = _corrected()
        probe.ask(wish)
        _ended(probe, SettleKind.FAIL, wish.token)
        assert probe.operate(OperatorCommand.EXPIRE) is Decision.APPLY
        answer = probe.ask(_corrected(KEY, _THIRD))
        assert (answer.decision, answer.correction) == (Decision.ADMIT, b"")
        record = probe.read().record
        assert (record.corrected_at_ms, record.is_uncertain, record.releases) == (None, False, 0)

    @_harmless
    def test_the_arguments_are_those_of_the_corrected_request(
        self, probe: Probe, kind: SettleKind
    ) -> None:
        """A worker that finishes it must not run what was declined."""
        first, second = Payload("json.1", b"", b"1"), Payload("json.1", b"", b"2")
        _ended(probe, kind, probe.hold(arguments=first))
        wish = _corrected()
        wish.arguments = second
        assert probe.ask(wish).decision is Decision.TAKE_OVER
        assert probe.read().arguments == second
        _ended(probe, kind, wish.token)
        assert probe.ask(_corrected(KEY, _THIRD)).decision is Decision.TAKE_OVER
        assert probe.read().arguments is None

    def test_endings_and_corrections_of_a_batch_are_each_their_own(self, probe: Probe) -> None:
        """Marked or not, with a step or not: no row counts for its neighbour."""
        keys = [key_of(f"key {number}") for number in range(8)]
        tokens = [probe.hold(key) for key in keys]
        probe.record(tokens[0], key=keys[0])
        endings = [
            settlement(
                SettleKind.FAIL if number % 2 else SettleKind.RELEASE,
                key,
                token,
                payload=FAILURE,
                nothing_happened=number < 6,
            )
            for number, (key, token) in enumerate(zip(keys, tokens, strict=True))
        ]
        probe.commit([], endings)
        claimed, _ = probe.commit([_corrected(key) for key in keys])
        decisions = [answered(result).decision for result in claimed]
        assert decisions == [
            Decision.MISMATCH,
            *[Decision.TAKE_OVER] * 5,
            *[Decision.MISMATCH] * 2,
        ]

    def test_an_operator_who_releases_leaves_it_correctable(self, probe: Probe) -> None:
        """What was harmless stays so; what was released by force in the middle does not."""
        _ended(probe, SettleKind.FAIL, probe.hold())
        assert probe.operate(OperatorCommand.RELEASE) is Decision.APPLY
        wish = _corrected()
        assert probe.ask(wish).decision is Decision.TAKE_OVER
        assert probe.operate(OperatorCommand.FORCE_RELEASE) is Decision.APPLY
        assert probe.ask(_corrected(KEY, _THIRD)).decision is Decision.MISMATCH

    @_harmless
    def test_racing_corrections_have_one_winner(
        self, probe: Probe, joined: Store, kind: SettleKind
    ) -> None:
        """Of many corrected requests, all different, exactly one runs; the others are refused."""
        key = key_of("raced")
        _ended(probe, kind, probe.hold(key), key)
        marks = [Fingerprint(1, b"%016d" % number) for number in range(_RACERS)]
        wishes = [_corrected(key, mark) for mark in marks]
        stores = [(probe.store, joined)[number % 2] for number in range(_RACERS)]
        flows = [partial(_claim, store, wish) for store, wish in zip(stores, wishes, strict=True)]
        decisions = [answer.decision for answer in self.race(probe.store, flows)]
        assert decisions.count(Decision.TAKE_OVER) == 1
        assert decisions.count(Decision.MISMATCH) == _RACERS - 1
        record = probe.read(key).record
        winner = wishes[decisions.index(Decision.TAKE_OVER)]
        assert (record.token, record.state, record.attempt) == (winner.token, State.PENDING, 2)
        assert record.fingerprint == winner.fingerprints[0].digest


async def _claim(store: Store, wish: ClaimRequest) -> ClaimAnswer:
    claimed, _ = await store.commit([wish], [])
    return answered(claimed[0])

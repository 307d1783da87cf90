"""Races: whatever the interleaving, one owner and one ending.

The racers of each case are let go together, half of them on the store under test and half on a
second object over the same records (`join_store`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import pytest

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    OperatorCommand,
    Payload,
    SettleAnswer,
    SettleKind,
    Settlement,
    Step,
    StepWrite,
)
from retrysafe.core.ports import Store
from retrysafe.errors import StoreError
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    FAILURE,
    KEY,
    LEASE_MS,
    RESULT,
    Probe,
    answered,
    key_of,
    request,
    settlement,
)

RACERS: Final = 8
# Each round is a new key: enough of them to meet the narrow interleavings now and then, few
# enough for a store that needs milliseconds for every commit.
ROUNDS: Final = 6

Flow = Callable[[], Coroutine[Any, Any, Any]]

_CLAIMABLE: Final = (
    (Condition.ABSENT, Decision.ADMIT),
    (Condition.ABANDONED, Decision.TAKE_OVER),
    (Condition.RELEASED, Decision.TAKE_OVER),
    (Condition.OUTLIVED, Decision.ADMIT),
)


async def _claim(store: Store, wish: ClaimRequest) -> ClaimAnswer:
    claimed, _ = await store.commit([wish], [])
    return answered(claimed[0])


async def _settle(store: Store, wish: Settlement) -> SettleAnswer:
    _, settled = await store.commit([], [wish])
    result = settled[0]
    if isinstance(result, StoreError):
        raise result
    return result


class ConcurrencyCases(SuiteBase):
    """No interleaving makes two owners."""

    @pytest.mark.parametrize(("condition", "granted"), _CLAIMABLE)
    def test_racing_claims_have_one_winner(
        self, probe: Probe, joined: Store, condition: Condition, granted: Decision
    ) -> None:
        """Of many claims of a free key exactly one is granted, and the record is its."""
        for number in range(ROUNDS):
            key = key_of(f"raced-{number}")
            probe.arrange(condition, key)
            wishes = [request(key) for _ in range(RACERS)]
            answers = self.race(
                probe.store,
                [partial(_claim, store, wish) for store, wish in _shared(probe, joined, wishes)],
            )
            decisions = [answer.decision for answer in answers]
            assert decisions.count(granted) == 1
            assert decisions.count(Decision.IN_FLIGHT) == RACERS - 1
            assert probe.read(key).record.token == wishes[decisions.index(granted)].token
            assert {answer.attempt for answer in answers} == {probe.read(key).record.attempt}

    def test_racing_repetitions_of_one_claim_are_one_claim(
        self, probe: Probe, joined: Store
    ) -> None:
        """The same token from many sides is granted once and confirmed to the rest."""
        for number in range(ROUNDS):
            wish = request(key_of(f"raced-{number}"))
            flows = [
                partial(_claim, store, wish)
                for store, _ in _shared(probe, joined, list(range(RACERS)))
            ]
            decisions = sorted(answer.decision for answer in self.race(probe.store, flows))
            assert decisions == [Decision.ADMIT] + [Decision.CONFIRM] * (RACERS - 1)

    def test_a_late_ending_races_takeovers(self, probe: Probe, joined: Store) -> None:
        """Either the late owner's outcome stands and is replayed, or one rival runs; never both."""
        for number in range(ROUNDS):
            key = key_of(f"raced-{number}")
            token = probe.arrange(Condition.ABANDONED, key)
            wishes = [request(key) for _ in range(RACERS - 1)]
            flows: list[Flow] = [
                partial(_claim, store, wish) for store, wish in _shared(probe, joined, wishes)
            ]
            late = settlement(SettleKind.COMPLETE, key, token)
            flows.insert(number % RACERS, partial(_settle, probe.store, late))
            decisions = [answer.decision for answer in self.race(probe.store, flows)]
            ending = decisions.pop(number % RACERS)
            if ending is Decision.APPLY:
                assert decisions == [Decision.REPLAY] * (RACERS - 1)
                assert probe.read(key).record.token == token
            else:
                assert ending is Decision.LOST
                assert decisions.count(Decision.TAKE_OVER) == 1
                assert decisions.count(Decision.IN_FLIGHT) == RACERS - 2
                winner = wishes[decisions.index(Decision.TAKE_OVER)]
                assert probe.read(key).record.token == winner.token

    def test_racing_endings_of_one_claim_leave_one(self, probe: Probe, joined: Store) -> None:
        """A claim that is completed and failed at once has one ending, and that one is replayed."""
        for number in range(ROUNDS):
            key = key_of(f"raced-{number}")
            token = probe.hold(key)
            wishes = [
                settlement(SettleKind.COMPLETE, key, token, payload=RESULT),
                settlement(SettleKind.FAIL, key, token, payload=FAILURE),
            ]
            flows = [
                partial(_settle, store, wish) for store, wish in _shared(probe, joined, wishes)
            ]
            decisions = [answer.decision for answer in self.race(probe.store, flows)]
            assert sorted(decisions) == [Decision.APPLY, Decision.LOST]
            standing = wishes[decisions.index(Decision.APPLY)]
            assert probe.claim(key).payload == standing.payload
            assert [item.payload for item in probe.read(key).outcomes] == [standing.payload]

    def test_racing_repetitions_of_one_ending_are_one_ending(
        self, probe: Probe, joined: Store
    ) -> None:
        """One applies, the others find it standing."""
        for number in range(ROUNDS):
            key = key_of(f"raced-{number}")
            wishes = [settlement(SettleKind.COMPLETE, key, probe.hold(key))] * RACERS
            flows = [
                partial(_settle, store, wish) for store, wish in _shared(probe, joined, wishes)
            ]
            decisions = sorted(answer.decision for answer in self.race(probe.store, flows))
            assert decisions == [Decision.APPLY] + [Decision.CONFIRM] * (RACERS - 1)
            assert len(probe.read(key).outcomes) == 1

    def test_racing_results_of_one_step_leave_the_first(self, probe: Probe, joined: Store) -> None:
        """A step that is recorded from many sides has one result: that of the only one told so."""
        token = probe.hold()
        payloads = [Payload("bytes.1", b"", bytes([number])) for number in range(RACERS)]
        writes = [StepWrite(KEY, token, Step("charge", 1, payload)) for payload in payloads]
        flows = [
            partial(store.record_step, write) for store, write in _shared(probe, joined, writes)
        ]
        decisions = self.race(probe.store, flows)
        assert sorted(decisions) == [Decision.APPLY] + [Decision.LOST] * (RACERS - 1)
        (step,) = probe.read().steps
        assert step.payload == payloads[decisions.index(Decision.APPLY)]

    def test_a_forced_release_races_the_ending(self, probe: Probe, joined: Store) -> None:
        """The outcome stands or the key is released; the answers tell which."""
        for number in range(ROUNDS):
            key = key_of(f"raced-{number}")
            token = probe.hold(key)
            flows: list[Flow] = [
                partial(_settle, probe.store, settlement(SettleKind.COMPLETE, key, token)),
                partial(joined.operate, key, OperatorCommand.FORCE_RELEASE),
            ]
            answer, commanded = self.race(probe.store, flows)
            condition = probe.read(key).condition
            if answer.decision is Decision.APPLY:
                assert (commanded, condition) == (Decision.REFUSE, Condition.SUCCEEDED)
            else:
                assert answer.decision is Decision.LOST
                assert (commanded, condition) == (Decision.APPLY, Condition.RELEASED)

    def test_batches_in_opposite_order_meet_without_a_deadlock(
        self, probe: Probe, joined: Store
    ) -> None:
        """Two batches over the same keys are both answered, and every key has one owner."""
        for number in range(ROUNDS):
            keys = [key_of(f"raced-{number}-{index}") for index in range(32)]
            batches = [
                [request(key) for key in (keys if racer % 2 else list(reversed(keys)))]
                for racer in range(4)
            ]
            flows = [
                partial(store.commit, batch, []) for store, batch in _shared(probe, joined, batches)
            ]
            owners: dict[Key, list[bytes]] = {key: [] for key in keys}
            for batch, (claimed, _) in zip(batches, self.race(probe.store, flows), strict=True):
                for wish, result in zip(batch, claimed, strict=True):
                    if answered(result).decision is Decision.ADMIT:
                        owners[wish.key].append(wish.token)
            assert owners == {key: [probe.read(key).record.token] for key in keys}

    def test_a_sweep_races_a_new_life(self, probe: Probe, joined: Store) -> None:
        """A key that is claimed while it is swept has its new owner, and never disappears."""
        for number in range(ROUNDS):
            key = key_of(f"raced-{number}")
            probe.arrange(Condition.OUTLIVED, key)
            wish = request(key)
            flows: list[Flow] = [partial(joined.sweep, 100), partial(_claim, probe.store, wish)]
            _, answer = self.race(probe.store, flows)
            assert (answer.decision, answer.attempt) == (Decision.ADMIT, 1)
            found = probe.read(key)
            assert (found.record.token, found.steps) == (wish.token, [])
            probe.end(SettleKind.RELEASE, wish.token, key)

    def test_a_zombie_races_the_new_owner(self, probe: Probe, joined: Store) -> None:
        """Both end at once; the new owner's outcome is the one that stands."""
        for number in range(ROUNDS):
            key = key_of(f"raced-{number}")
            zombie = probe.hold(key)
            probe.advance(LEASE_MS)
            owner = mint_token()
            assert probe.claim(key, owner).decision is Decision.TAKE_OVER
            wishes = [
                settlement(SettleKind.COMPLETE, key, zombie, payload=FAILURE),
                settlement(SettleKind.COMPLETE, key, owner, payload=RESULT),
            ]
            flows = [
                partial(_settle, store, wish) for store, wish in _shared(probe, joined, wishes)
            ]
            decisions = [answer.decision for answer in self.race(probe.store, flows)]
            assert decisions == [Decision.LOST, Decision.APPLY]
            assert probe.claim(key).payload == RESULT


def _shared(probe: Probe, joined: Store, items: list[Any]) -> list[tuple[Store, Any]]:
    """Deals the items out to the two store objects in turn."""
    return [(joined if index % 2 else probe.store, item) for index, item in enumerate(items)]

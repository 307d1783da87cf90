"""Recovery: arguments that live with their claim, and claims that a worker takes over."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from retrysafe.core.model import (
    ClaimAnswer,
    Condition,
    Decision,
    OperatorCommand,
    Payload,
    SettleKind,
)
from retrysafe.core.ports import Store
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    ENDINGS,
    KEY,
    LEASE_MS,
    OTHER,
    PRESENT,
    Probe,
    key_of,
    kind_name,
    request,
    settlement,
)

FIRST = Payload("json.1", b"", b'[["order-1"],{}]')
SECOND = Payload("tagged.1", b"head", b"\x00\xff")


class RecoveryCases(SuiteBase):
    """Stored with the claim, removed with the key, and taken over by exactly one."""

    # Arguments.

    def test_arguments_are_stored_with_the_claim(self, probe: Probe) -> None:
        """To the byte, also those that are no text."""
        for number, arguments in enumerate((FIRST, SECOND, Payload("bytes.1", b"", b""))):
            key = key_of(f"key-{number}")
            probe.hold(key, arguments=arguments)
            assert probe.read(key).arguments == arguments

    def test_nothing_is_stored_without_arguments(self, probe: Probe) -> None:
        """A claim that brings none leaves none, whatever its neighbours bring."""
        probe.commit([request(key_of("a"), arguments=FIRST), request(), request(key_of("b"))])
        assert probe.read().arguments is None
        assert probe.read(key_of("b")).arguments is None
        assert probe.read(key_of("a")).arguments == FIRST

    def test_a_repeated_claim_brings_no_arguments(self, probe: Probe) -> None:
        """It is confirmed, and changes nothing."""
        token = probe.hold()
        answer = probe.claim(KEY, token, arguments=FIRST)
        assert answer.decision is Decision.CONFIRM
        assert probe.read().arguments is None

    def test_a_batch_keeps_the_arguments_of_each_row(self, probe: Probe) -> None:
        """Every key gets its own, and those that bring none get none."""
        wishes = [
            request(
                key_of(f"key-{number}"),
                arguments=Payload("json.1", b"", b"%d" % number) if number % 3 else None,
            )
            for number in range(30)
        ]
        claimed, _ = probe.commit(wishes)
        assert {item.decision for item in claimed if isinstance(item, ClaimAnswer)} == {
            Decision.ADMIT
        }
        for wish in wishes:
            assert probe.read(wish.key).arguments == wish.arguments

    def test_a_refused_claim_changes_no_arguments(self, probe: Probe) -> None:
        """In flight, mismatched or replayed: what is stored is the owner's."""
        token = probe.hold(arguments=FIRST)
        assert probe.ask(request(arguments=SECOND)).decision is Decision.IN_FLIGHT
        assert probe.ask(request(KEY, None, OTHER, arguments=SECOND)).decision is Decision.MISMATCH
        assert probe.read().arguments == FIRST
        probe.end(SettleKind.COMPLETE, token)
        assert probe.ask(request(arguments=SECOND)).decision is Decision.REPLAY
        assert probe.read().arguments == FIRST

    def test_two_claims_of_one_key_in_a_batch(self, probe: Probe) -> None:
        """The first one gets the key, and its arguments are those that count."""
        claimed, _ = probe.commit([request(), request(arguments=FIRST)])
        assert [getattr(item, "decision", item) for item in claimed] == [
            Decision.ADMIT,
            Decision.IN_FLIGHT,
        ]
        assert probe.read().arguments is None
        key = key_of("key-2")
        probe.commit([request(key, arguments=FIRST), request(key, arguments=SECOND)])
        assert probe.read(key).arguments == FIRST

    def test_a_takeover_keeps_the_first_arguments(self, probe: Probe) -> None:
        """An equal request may bring others in what does not count; a worker uses the first."""
        token = probe.hold(arguments=FIRST)
        probe.advance(LEASE_MS)
        token = probe.hold(arguments=SECOND)
        assert probe.read().arguments == FIRST
        probe.end(SettleKind.RELEASE, token)
        probe.hold()
        assert probe.read().arguments == FIRST

    def test_a_takeover_stores_arguments_that_were_missing(self, probe: Probe) -> None:
        """An operation that was made resumable meanwhile is so from its next attempt on."""
        probe.hold()
        probe.advance(LEASE_MS)
        probe.hold(arguments=FIRST)
        assert probe.read().arguments == FIRST

    @pytest.mark.parametrize("arguments", [None, SECOND], ids=["without", "with"])
    def test_a_new_life_has_only_its_own_arguments(
        self, probe: Probe, arguments: Payload | None
    ) -> None:
        """Nobody resumes an operation with what another one was called with."""
        probe.end(SettleKind.RELEASE, probe.hold(arguments=FIRST))
        probe.advance(ACTIVE_MS)
        probe.hold(arguments=arguments)
        assert probe.read().arguments == arguments

    @pytest.mark.parametrize("arguments", [None, SECOND], ids=["without", "with"])
    def test_a_life_of_the_same_instant_has_only_its_own_arguments(
        self, probe: Probe, arguments: Payload | None
    ) -> None:
        """Also where the clock was set back to the very millisecond of the earlier claim."""
        token = probe.hold(arguments=FIRST)
        probe.end(SettleKind.COMPLETE, token, active_ms=0)
        assert probe.claim(arguments=arguments).condition is Condition.OUTLIVED
        assert probe.read().arguments == arguments

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    def test_arguments_go_with_their_key(self, probe: Probe, kind: SettleKind) -> None:
        """A key that comes back after the sweep finds no arguments of its past."""
        probe.end(kind, probe.hold(arguments=FIRST))
        probe.advance(ACTIVE_MS)
        assert probe.sweep().keys == 1
        probe.hold()
        assert probe.read().arguments is None

    def test_an_ending_that_says_so_takes_its_arguments_along(self, probe: Probe) -> None:
        """Those of its own key, and only if it is applied."""
        keys = [key_of(f"key-{number}") for number in range(3)]
        tokens = [probe.hold(key, arguments=FIRST) for key in keys]
        wishes = [
            settlement(kind, key, token)
            for kind, key, token in zip(
                (SettleKind.COMPLETE, SettleKind.FAIL, SettleKind.COMPLETE),
                keys,
                (*tokens[:2], mint_token()),
                strict=True,
            )
        ]
        for wish in wishes:
            wish.drops_arguments = True
        # In a batch, and alone.
        _, answers = probe.commit([], wishes[1:])
        assert [getattr(item, "decision", item) for item in answers] == [
            Decision.APPLY,
            Decision.LOST,
        ]
        assert probe.read(keys[0]).arguments == FIRST
        assert probe.settle(wishes[0]).decision is Decision.APPLY
        assert probe.read(keys[0]).arguments is probe.read(keys[1]).arguments is None
        assert probe.read(keys[2]).arguments == FIRST

    def test_a_sweep_removes_the_arguments_of_what_has_ended(self, probe: Probe) -> None:
        """For good: a released, a running and an abandoned key keep theirs."""
        kept = {Condition.ABANDONED: True, Condition.RUNNING: True, Condition.RELEASED: True}
        expected = {**kept, Condition.SUCCEEDED: False, Condition.FAILED: False}
        for condition in expected:
            probe.arrange(condition, key_of(condition.value), arguments=FIRST)
        probe.sweep()
        for condition, is_kept in expected.items():
            found = probe.read(key_of(condition.value))
            assert found.condition is condition
            assert (found.arguments is not None) == is_kept

    def test_a_sweep_is_bounded_in_arguments_too(self, probe: Probe) -> None:
        """Another round is asked for while more may be left."""
        keys = [key_of(f"key-{number}") for number in range(5)]
        for key in keys:
            probe.end(SettleKind.COMPLETE, probe.hold(key, arguments=FIRST), key)
        assert probe.sweep(2).has_more
        assert sum(probe.read(key).arguments is not None for key in keys) == 3
        while probe.sweep(2).has_more:
            pass
        assert all(probe.read(key).arguments is None for key in keys)

    def test_an_operator_release_keeps_the_arguments(self, probe: Probe) -> None:
        """The next attempt of this life may need them."""
        probe.hold(arguments=FIRST)
        probe.advance(LEASE_MS)
        assert probe.operate(OperatorCommand.RELEASE) is Decision.APPLY
        assert probe.read().arguments == FIRST

    # Listing.

    def test_abandoned_records_are_listed(self, probe: Probe) -> None:
        """Those in that condition and no others, from the last millisecond of the lease on."""
        for condition in PRESENT:
            if condition is not Condition.ABANDONED:
                probe.arrange(condition, key_of(condition.value))
        late = key_of("late")
        probe.hold(late)
        probe.advance(LEASE_MS - 1)
        assert late.text not in [item.record.text for item in probe.abandoned()]
        probe.advance(1)
        found = {item.record.text: item for item in probe.abandoned()}
        assert late.text in found
        for item in found.values():
            stored = probe.read(key_of(item.record.text))
            assert (item.record, item.condition) == (stored.record, Condition.ABANDONED)
            assert (item.steps, item.outcomes, item.now_ms) == ([], [], probe.clock())

    def test_the_listing_of_abandoned_records_is_bounded(self, probe: Probe) -> None:
        """Never more than asked for, and none twice."""
        for number in range(5):
            probe.hold(key_of(f"key-{number}"))
        assert probe.abandoned() == []
        probe.advance(LEASE_MS)
        assert len({item.record.text for item in probe.abandoned(3)}) == 3
        assert len({item.record.text for item in probe.abandoned(5)}) == 5
        assert len(probe.abandoned(50)) == 5

    def test_what_can_be_resumed_is_walked_over_by_digest(self, probe: Probe) -> None:
        """Page by page each is met once, with its arguments; others are not met."""
        keys = [key_of(f"key-{number}") for number in range(7)]
        for number, key in enumerate(keys):
            probe.hold(key, arguments=Payload("json.1", b"", b"%d" % number))
        probe.hold(key_of("without"))
        assert probe.resumable() == []
        probe.advance(LEASE_MS)
        probe.hold(key_of("running"), arguments=FIRST)
        met, after = [], b""
        while page := probe.resumable(3, after):
            assert len(page) <= 3
            met += page
            after = page[-1].record.digest
        assert [item.record.text for item in met] == [
            key.text for key in sorted(keys, key=lambda key: key.digest)
        ]
        for item in met:
            stored = probe.read(key_of(item.record.text))
            assert (item.record, item.arguments) == (stored.record, stored.arguments)
            assert (item.condition, item.now_ms) == (Condition.ABANDONED, probe.clock())

    def test_only_what_is_asked_for_is_to_be_resumed(self, probe: Probe) -> None:
        """Of some operations, by their whole names; the limit counts these only."""
        names = ["charge", "charge café", 'the "great", {old}\\one', "Charge", "refund"]
        for name in names:
            for number in range(3):
                key = key_of(f"{name}-{number}")
                probe.ask(request(key, operation=name, arguments=FIRST))
        probe.advance(LEASE_MS)

        def met(*operations: str, limit: int = 100) -> list[str]:
            return [item.record.operation for item in probe.resumable(limit, b"", operations)]

        for name in names:
            assert met(name) == [name] * 3
        assert sorted(met("refund", "Charge")) == ["Charge"] * 3 + ["refund"] * 3
        assert met("refund", "absent", limit=2) == ["refund"] * 2
        assert (met("absent"), met("charg%", "char"), met()) == ([], [], [])

    def test_what_was_taken_over_or_ended_is_not_to_be_resumed(self, probe: Probe) -> None:
        """A walk shows only what nobody holds."""
        token = probe.hold(arguments=FIRST)
        probe.advance(LEASE_MS)
        assert len(probe.resumable()) == 1
        for kind in ENDINGS:
            token = probe.hold()
            assert probe.resumable() == []
            probe.end(kind, token, active_ms=1)
            assert probe.resumable() == []
            probe.advance(1)

    # Taking over.

    def test_a_worker_takes_over_what_it_saw(self, probe: Probe) -> None:
        """As the next attempt, under its own token; steps, fingerprint and arguments stay."""
        owner = probe.hold(arguments=FIRST)
        probe.record(owner, "reserve")
        probe.advance(LEASE_MS)
        before = probe.read()
        wish = request(KEY, None, OTHER, lease_ms=1_000, operation="again", owner="worker")
        answer = probe.take_over(wish, owner)
        assert (answer.decision, answer.condition) == (Decision.TAKE_OVER, Condition.ABANDONED)
        assert (answer.attempt, answer.remaining_ms) == (2, 1_000)
        after = probe.read()
        expected = replace(
            before.record,
            token=wish.token,
            attempt=2,
            operation="again",
            owner="worker",
            claimed_at_ms=probe.clock(),
            lease_ends_at_ms=probe.clock() + 1_000,
            is_uncertain=True,  # The owner that died may have done anything.
        )
        assert after.record == expected
        assert (after.steps, after.arguments) == (before.steps, FIRST)
        assert probe.end(SettleKind.COMPLETE, owner) is Decision.LOST
        assert probe.end(SettleKind.COMPLETE, wish.token) is Decision.APPLY

    @pytest.mark.parametrize("condition", Condition, ids=lambda item: item.value)
    def test_a_worker_takes_over_nothing_else(self, probe: Probe, condition: Condition) -> None:
        """Neither under another token, nor in any other condition, and never a new life."""
        held = probe.arrange(condition, arguments=FIRST)
        stored = probe.find()
        assert probe.take_over(request(), mint_token()).decision is Decision.LOST
        if condition is not Condition.ABANDONED:
            answer = probe.take_over(request(arguments=SECOND), held)
            is_running = condition is Condition.RUNNING
            assert answer.decision is (Decision.IN_FLIGHT if is_running else Decision.LOST)
        assert probe.find() == stored

    def test_a_worker_whose_answer_was_lost_asks_again(self, probe: Probe) -> None:
        """It is confirmed, and no attempt is counted for it."""
        owner = probe.hold()
        probe.advance(LEASE_MS)
        wish = request()
        probe.take_over(wish, owner)
        answer = probe.take_over(wish, owner)
        assert (answer.decision, answer.attempt) == (Decision.CONFIRM, 2)

    def test_a_worker_and_a_retry_want_one_key(self, store: Store, probe: Probe) -> None:
        """Whoever comes first has it; the other loses, or is in flight."""
        owner = probe.hold(arguments=FIRST)
        probe.advance(LEASE_MS)
        retry = probe.claim()
        assert retry.decision is Decision.TAKE_OVER
        assert probe.take_over(request(), owner).decision is Decision.LOST

    def test_workers_that_race_for_one_key(self, store: Store, joined: Store, probe: Probe) -> None:
        """Of many that saw the same token exactly one gets the key."""
        owner = probe.hold(arguments=FIRST)
        probe.advance(LEASE_MS)
        wishes = [request(owner=f"worker-{number}") for number in range(8)]
        answers = self.race(
            store,
            [
                partial(place.take_over, wish, owner)
                for wish, place in zip(wishes, [store, joined] * 4, strict=True)
            ],
        )
        decisions = [answer.decision for answer in answers]
        assert decisions.count(Decision.TAKE_OVER) == 1
        assert decisions.count(Decision.LOST) == len(wishes) - 1
        found = probe.read().record
        assert found.attempt == 2
        assert found.token == wishes[decisions.index(Decision.TAKE_OVER)].token

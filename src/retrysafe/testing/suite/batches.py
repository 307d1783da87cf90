"""Batches: many rows in one commit, each with its own answer."""

from __future__ import annotations

import pytest

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Payload,
    SettleAnswer,
    SettleKind,
    Settlement,
)
from retrysafe.core.ports import ClaimResult, SettleResult
from retrysafe.errors import DigestCollision, StoreError
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    KEY,
    LEASE_MS,
    OTHER,
    RESULT,
    Probe,
    colliding,
    key_of,
    request,
    settlement,
)

# Text that Python can hold and UTF-8 cannot.
_SURROGATE = "\ud800"


def _decisions(results: list[ClaimResult] | list[SettleResult]) -> list[Decision]:
    decisions = []
    for result in results:
        assert isinstance(result, ClaimAnswer | SettleAnswer), f"refused: {result!r}"
        decisions.append(result.decision)
    return decisions


class BatchCases(SuiteBase):
    """Rows stand and fall alone, and are answered in the order in which they were given."""

    def test_an_empty_batch_is_answered(self, probe: Probe) -> None:
        """Nothing asked, nothing answered."""
        assert probe.commit() == ([], [])

    def test_answers_come_in_order(self, probe: Probe) -> None:
        """Each answer belongs to the row at its place, whatever order the store writes in."""
        keys = [key_of(f"key-{number}") for number in range(20)]
        taken = keys[::3]
        tokens = {key.digest: probe.hold(key) for key in taken}
        claimed, _ = probe.commit([request(key) for key in keys])
        expected = [Decision.IN_FLIGHT if key in taken else Decision.ADMIT for key in keys]
        assert _decisions(claimed) == expected
        settlements = [
            settlement(
                SettleKind.COMPLETE,
                key,
                tokens.get(key.digest, mint_token()),
                payload=Payload("bytes.1", b"", key.text.encode()),
            )
            for key in reversed(keys)
        ]
        _, settled = probe.commit([], settlements)
        expected = [Decision.APPLY if key in taken else Decision.LOST for key in reversed(keys)]
        assert _decisions(settled) == expected
        for key in taken:
            replayed = probe.claim(key).payload
            assert replayed is not None
            assert replayed.body == key.text.encode()

    def test_claims_and_settlements_are_mixed(self, probe: Probe) -> None:
        """One batch carries every kind of row."""
        keys = {kind: key_of(kind.name) for kind in SettleKind}
        tokens = {kind: probe.hold(key) for kind, key in keys.items()}
        probe.advance(1_000)
        new, standing = key_of("new"), key_of("standing")
        probe.end(SettleKind.COMPLETE, probe.hold(standing), standing)
        claimed, settled = probe.commit(
            [request(new), request(standing), request(standing, None, OTHER)],
            [settlement(kind, keys[kind], tokens[kind]) for kind in SettleKind],
        )
        assert _decisions(claimed) == [Decision.ADMIT, Decision.REPLAY, Decision.MISMATCH]
        assert isinstance(claimed[1], ClaimAnswer)
        assert claimed[1].payload == RESULT
        assert _decisions(settled) == [Decision.APPLY] * len(SettleKind)
        conditions = {kind: probe.read(key).condition for kind, key in keys.items()}
        assert conditions == {
            SettleKind.COMPLETE: Condition.SUCCEEDED,
            SettleKind.FAIL: Condition.FAILED,
            SettleKind.RELEASE: Condition.RELEASED,
        }

    def test_an_owner_wins_over_a_takeover_beside_it(self, probe: Probe) -> None:
        """The lease is over, and its owner's ending shares a batch with a rival's claim.

        Settlements count first: an outcome that is there is not thrown away.
        """
        token = probe.hold()
        probe.advance(LEASE_MS)
        ending = settlement(SettleKind.COMPLETE, KEY, token)
        claimed, settled = probe.commit([request()], [ending])
        assert _decisions(settled) == [Decision.APPLY]
        assert _decisions(claimed) == [Decision.REPLAY]

    def test_an_owner_wins_over_a_takeover_beside_it_and_beside_a_poisoned_row(
        self, probe: Probe
    ) -> None:
        """Also when the batch is taken apart, because one of its rows is refused."""
        token = probe.arrange(Condition.ABANDONED)
        claimed, settled = probe.commit(
            [request(key_of("poisoned"), operation=_SURROGATE), request()],
            [settlement(SettleKind.COMPLETE, KEY, token)],
        )
        assert _decisions(settled) == [Decision.APPLY]
        assert _decisions(claimed[1:]) == [Decision.REPLAY]

    def test_one_key_twice_in_a_batch_has_one_winner(self, probe: Probe) -> None:
        """Rows for one key count as if one came after the other."""
        wishes = [request() for _ in range(5)]
        claimed, _ = probe.commit(wishes)
        decisions = _decisions(claimed)
        assert sorted(decisions) == [Decision.ADMIT] + [Decision.IN_FLIGHT] * 4
        assert probe.read().record.token == wishes[decisions.index(Decision.ADMIT)].token

    def test_one_abandoned_key_twice_in_a_batch_has_one_winner(self, probe: Probe) -> None:
        """A takeover is granted once, and the rest see the new lease."""
        probe.arrange(Condition.ABANDONED)
        wishes = [request() for _ in range(5)]
        claimed, _ = probe.commit(wishes)
        decisions = _decisions(claimed)
        assert sorted(decisions) == [Decision.IN_FLIGHT] * 4 + [Decision.TAKE_OVER]
        assert probe.read().record.token == wishes[decisions.index(Decision.TAKE_OVER)].token
        assert probe.read().record.attempt == 2

    def test_one_outlived_key_twice_in_a_batch_has_one_winner(self, probe: Probe) -> None:
        """A new life starts once."""
        probe.arrange(Condition.OUTLIVED)
        claimed, _ = probe.commit([request() for _ in range(5)])
        assert sorted(_decisions(claimed)) == [Decision.ADMIT] + [Decision.IN_FLIGHT] * 4

    def test_two_requests_under_one_new_key_in_a_batch(self, probe: Probe) -> None:
        """One of them gets the key, and the other is a mismatch in that same batch."""
        claimed, _ = probe.commit([request(), request(KEY, None, OTHER)])
        assert sorted(_decisions(claimed)) == [Decision.ADMIT, Decision.MISMATCH]

    def test_one_claim_repeated_in_a_batch_is_confirmed(self, probe: Probe) -> None:
        """The same token twice is one claim."""
        wish = request()
        claimed, _ = probe.commit([wish, wish])
        assert sorted(_decisions(claimed)) == [Decision.ADMIT, Decision.CONFIRM]
        assert probe.read().record.attempt == 1

    def test_one_settlement_repeated_in_a_batch_is_confirmed(self, probe: Probe) -> None:
        """One of the two applies, the other finds it standing."""
        wish = settlement(SettleKind.COMPLETE, KEY, probe.hold())
        _, settled = probe.commit([], [wish, wish])
        assert sorted(_decisions(settled)) == [Decision.APPLY, Decision.CONFIRM]
        assert len(probe.read().outcomes) == 1

    def test_two_endings_of_one_claim_in_a_batch(self, probe: Probe) -> None:
        """One ending stands, and its outcome is the one that is replayed."""
        token = probe.hold()
        other = Payload("failure.1", b"", b"other")
        wishes = [
            settlement(SettleKind.COMPLETE, KEY, token),
            settlement(SettleKind.FAIL, KEY, token, payload=other),
        ]
        _, settled = probe.commit([], wishes)
        decisions = _decisions(settled)
        assert sorted(decisions) == [Decision.APPLY, Decision.LOST]
        assert probe.claim().payload == wishes[decisions.index(Decision.APPLY)].payload
        assert len(probe.read().outcomes) == 1

    def test_a_claim_and_the_end_of_the_same_key_in_a_batch(self, probe: Probe) -> None:
        """A rival's claim and the owner's ending may meet in one batch, in either order."""
        token = probe.hold()
        claimed, settled = probe.commit([request()], [settlement(SettleKind.COMPLETE, KEY, token)])
        assert _decisions(settled) == [Decision.APPLY]
        assert _decisions(claimed)[0] in (Decision.IN_FLIGHT, Decision.REPLAY)

    @pytest.mark.parametrize("place", [0, 3, 6])
    def test_a_poisoned_claim_fails_alone(self, probe: Probe, place: int) -> None:
        """A text that cannot be stored is refused or kept exactly; its neighbours stand."""
        held = [(key_of(f"held-{n}"), probe.hold(key_of(f"held-{n}"))) for n in range(3)]
        poisoned = key_of("poisoned")
        claims = [request(key_of(f"key-{number}")) for number in range(6)]
        claims.insert(place, request(poisoned, operation=_SURROGATE))
        claimed, settled = probe.commit(
            claims, [settlement(SettleKind.COMPLETE, key, token) for key, token in held]
        )
        self._check_poisoned(probe, poisoned, claimed.pop(place))
        assert _decisions(claimed) == [Decision.ADMIT] * 6
        assert _decisions(settled) == [Decision.APPLY] * 3
        for wish in (item for item in claims if item.key != poisoned):
            assert probe.read(wish.key).record.token == wish.token
        # The store is not stuck in the transaction that failed.
        assert probe.claim(key_of("later")).decision is Decision.ADMIT

    def test_a_poisoned_claim_fails_alone_when_it_is_alone(self, probe: Probe) -> None:
        """The row's error is its answer, not an exception of the batch."""
        ((result,), _) = probe.commit([request(operation=_SURROGATE)])
        self._check_poisoned(probe, KEY, result)

    def test_a_poisoned_takeover_leaves_the_record(self, probe: Probe) -> None:
        """A refused row changes nothing: the key stays takeable by an honest claim."""
        probe.arrange(Condition.ABANDONED)
        stored = probe.stored()
        ((result,), _) = probe.commit([request(operation=_SURROGATE)])
        if isinstance(result, StoreError):
            assert probe.stored() == stored
            assert probe.claim().decision is Decision.TAKE_OVER
        else:
            assert result.decision is Decision.TAKE_OVER

    def test_a_poisoned_settlement_fails_alone(self, probe: Probe) -> None:
        """A refused outcome leaves its claim pending; the others are settled."""
        keys = [key_of(f"key-{number}") for number in range(4)]
        tokens = [probe.hold(key) for key in keys]
        wishes: list[Settlement] = [
            settlement(SettleKind.COMPLETE, key, token)
            for key, token in zip(keys, tokens, strict=True)
        ]
        wishes[1].payload = Payload(_SURROGATE, b"", b"")
        claimed, settled = probe.commit([request(key_of("new"))], wishes)
        refused = settled.pop(1)
        assert _decisions(claimed) == [Decision.ADMIT]
        assert _decisions(settled) == [Decision.APPLY] * 3
        found = probe.read(keys[1])
        if isinstance(refused, StoreError):
            assert not refused.retryable
            assert (found.condition, found.outcomes) == (Condition.RUNNING, [])
            assert probe.end(SettleKind.COMPLETE, tokens[1], keys[1]) is Decision.APPLY
        else:
            assert [item.payload.form for item in found.outcomes] == [_SURROGATE]

    def test_a_collision_fails_alone(self, probe: Probe) -> None:
        """A key that meets another one's digest is refused; the rest of the batch stands."""
        probe.hold()
        twin = colliding(KEY, "key-2")
        wishes: list[ClaimRequest] = [request(key_of("a")), request(twin), request(key_of("b"))]
        claimed, _ = probe.commit(wishes)
        assert isinstance(claimed[1], DigestCollision)
        assert _decisions([claimed[0], claimed[2]]) == [Decision.ADMIT] * 2

    def _check_poisoned(self, probe: Probe, key: Key, result: ClaimResult) -> None:
        found = probe.find(key)
        if isinstance(result, StoreError):
            assert not result.retryable
            assert found is None
        else:
            assert found is not None
            assert found.record.operation == _SURROGATE

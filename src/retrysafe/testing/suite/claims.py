"""Claims: who gets a key, and as what the others leave."""

from __future__ import annotations

import pytest

from retrysafe.core.keys.key import GLOBAL
from retrysafe.core.model import Condition, Decision, Fingerprint, Payload, SettleKind, State
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    ASKED,
    FAILURE,
    KEY,
    LEASE_MS,
    OTHER,
    PRESENT,
    RESULT,
    Probe,
    key_of,
    request,
)

_LIVE = tuple(item for item in PRESENT if item is not Condition.OUTLIVED)


class ClaimCases(SuiteBase):
    """One owner at a time; a duplicate leaves with the truth."""

    def test_a_claim_stores_all_it_was_given(self, probe: Probe) -> None:
        """The row holds the request's words, and the store's instants."""
        wish = request(operation="charge café", owner="host-1:42")
        now_ms = probe.clock()
        answer = probe.ask(wish)
        assert (answer.decision, answer.condition) == (Decision.ADMIT, Condition.ABSENT)
        assert (answer.attempt, answer.state) == (1, State.PENDING)
        record = probe.read().record
        assert (record.digest, record.caller, record.text) == (KEY.digest, KEY.caller, KEY.text)
        assert (record.operation, record.owner) == (wish.operation, wish.owner)
        assert (record.rule, record.fingerprint) == (ASKED.rule, ASKED.digest)
        assert (record.state, record.token, record.attempt) == (State.PENDING, wish.token, 1)
        assert (record.first_claimed_at_ms, record.claimed_at_ms) == (now_ms, now_ms)
        assert record.lease_ends_at_ms == now_ms + LEASE_MS
        assert (record.settled_at_ms, record.expires_at_ms) == (None, None)

    def test_a_second_claim_is_in_flight(self, probe: Probe) -> None:
        """While the lease holds nobody else is admitted, and the owner stays the owner."""
        token = probe.hold()
        for _ in range(3):
            assert probe.claim().decision is Decision.IN_FLIGHT
        assert probe.read().record.token == token
        assert probe.end(SettleKind.COMPLETE, token) is Decision.APPLY

    def test_repeating_a_claim_is_confirmed(self, probe: Probe) -> None:
        """A claim whose answer was lost, asked again with its token, is the same claim."""
        token = probe.hold()
        stored = probe.stored()
        probe.advance(1)
        answer = probe.claim(KEY, token)
        assert (answer.decision, answer.attempt) == (Decision.CONFIRM, 1)
        assert answer.remaining_ms == LEASE_MS - 1
        assert probe.stored() == stored

    def test_claims_of_one_key_in_a_batch_count_one_after_the_other(self, probe: Probe) -> None:
        """The later one meets what the earlier one has written: here, another operation."""
        probe.end(SettleKind.RELEASE, probe.hold())
        first = request(operation="refund")
        unknown_rule = Fingerprint(9, b"nine nine nine n")
        again = request(KEY, first.token, unknown_rule, operation="refund")
        claimed, _ = probe.commit([first, again])
        decisions = [getattr(answer, "decision", None) for answer in claimed]
        assert decisions == [Decision.TAKE_OVER, Decision.CONFIRM]

    @pytest.mark.parametrize(
        ("kind", "state", "payload"),
        [
            (SettleKind.COMPLETE, State.SUCCEEDED, RESULT),
            (SettleKind.FAIL, State.FAILED, FAILURE),
        ],
        ids=["complete", "fail"],
    )
    def test_a_settled_key_replays(
        self, probe: Probe, kind: SettleKind, state: State, payload: Payload
    ) -> None:
        """Every later claim gets the first outcome, and as what it was stored."""
        token = probe.hold()
        assert probe.end(kind, token, payload=payload) is Decision.APPLY
        for _ in range(3):
            answer = probe.claim()
            assert answer.decision is Decision.REPLAY
            assert (answer.state, answer.attempt, answer.payload) == (state, 1, payload)

    def test_the_owner_that_claims_again_after_settling_gets_a_replay(self, probe: Probe) -> None:
        """A claim delayed on its way does not reopen what its own token has settled."""
        token = probe.hold()
        probe.end(SettleKind.COMPLETE, token)
        answer = probe.claim(KEY, token)
        assert (answer.decision, answer.payload) == (Decision.REPLAY, RESULT)

    def test_only_a_replay_carries_a_payload(self, probe: Probe) -> None:
        """Neither a grant, nor a conflict, nor a mismatch shows an outcome."""
        token = probe.hold()
        assert probe.claim().payload is None
        probe.end(SettleKind.RELEASE, token, payload=FAILURE)
        retaken = mint_token()
        answer = probe.claim(KEY, retaken)
        assert (answer.decision, answer.payload) == (Decision.TAKE_OVER, None)
        probe.end(SettleKind.COMPLETE, retaken)
        assert probe.claim(KEY, None, OTHER).payload is None

    @pytest.mark.parametrize("condition", _LIVE)
    def test_a_mismatch_is_decided_before_the_state(
        self, probe: Probe, condition: Condition
    ) -> None:
        """Another request is refused in every live condition, and even with the owner's token."""
        token = probe.arrange(condition)
        stored = probe.stored()
        for presented in (mint_token(), token):
            answer = probe.claim(KEY, presented, OTHER)
            assert (answer.decision, answer.condition) == (Decision.MISMATCH, condition)
            assert answer.payload is None
        assert probe.stored() == stored

    def test_an_outlived_key_takes_another_request(self, probe: Probe) -> None:
        """Past the active window the key is free, for a different request as well."""
        probe.arrange(Condition.OUTLIVED)
        answer = probe.claim(KEY, None, OTHER)
        assert (answer.decision, answer.condition) == (Decision.ADMIT, Condition.OUTLIVED)
        assert probe.read().record.fingerprint == OTHER.digest

    def test_the_first_fingerprint_is_stored(self, probe: Probe) -> None:
        """Of several rules, the current one (which comes first) is what the record is made by."""
        probe.hold(KEY, Fingerprint(3, b"three three thr."), ASKED)
        record = probe.read().record
        assert (record.rule, record.fingerprint) == (3, b"three three thr.")

    def test_an_earlier_rule_still_recognises_its_records(self, probe: Probe) -> None:
        """A record of rule 1 is compared with the request's fingerprint under rule 1."""
        probe.hold(KEY, ASKED)
        new_rule = Fingerprint(2, b"two two two two.")
        assert probe.claim(KEY, None, new_rule, ASKED).decision is Decision.IN_FLIGHT
        assert probe.claim(KEY, None, new_rule, OTHER).decision is Decision.MISMATCH

    def test_an_unknown_rule_counts_as_a_match(self, probe: Probe) -> None:
        """During a deploy, a record of a rule that this request does not know is no mismatch."""
        probe.hold(KEY, Fingerprint(9, b"nine nine nine n"))
        assert probe.claim(KEY, None, ASKED).decision is Decision.IN_FLIGHT

    def test_a_takeover_keeps_the_first_fingerprint(self, probe: Probe) -> None:
        """A retry under a new rule does not make the record forget what it was made for."""
        probe.hold(KEY, ASKED)
        probe.advance(LEASE_MS)
        probe.hold(KEY, Fingerprint(2, b"two two two two."), ASKED)
        record = probe.read().record
        assert (record.rule, record.fingerprint) == (ASKED.rule, ASKED.digest)
        assert probe.claim(KEY, None, OTHER).decision is Decision.MISMATCH

    def test_attempts_are_counted(self, probe: Probe) -> None:
        """Every takeover, after a lost lease or a release, is the next attempt of one life."""
        born_at_ms = probe.clock()
        token = probe.hold()
        for attempt in (2, 3):
            probe.advance(LEASE_MS)
            token = mint_token()
            answer = probe.claim(KEY, token)
            assert (answer.decision, answer.attempt) == (Decision.TAKE_OVER, attempt)
            assert answer.condition is Condition.ABANDONED
        probe.end(SettleKind.RELEASE, token, payload=FAILURE)
        answer = probe.claim()
        assert (answer.decision, answer.attempt) == (Decision.TAKE_OVER, 4)
        assert answer.condition is Condition.RELEASED
        record = probe.read().record
        assert (record.attempt, record.first_claimed_at_ms) == (4, born_at_ms)
        assert record.claimed_at_ms == probe.clock()

    def test_refusals_count_no_attempt(self, probe: Probe) -> None:
        """In-flight, mismatched and confirmed claims leave the attempt as it is."""
        token = probe.hold()
        probe.claim()
        probe.claim(KEY, None, OTHER)
        probe.claim(KEY, token)
        assert probe.read().record.attempt == 1

    def test_a_takeover_writes_the_new_owner(self, probe: Probe) -> None:
        """Operation and owner are those of whoever runs it now."""
        probe.hold()
        probe.advance(LEASE_MS)
        probe.ask(request(operation="refund", owner="owner-2"))
        record = probe.read().record
        assert (record.operation, record.owner) == ("refund", "owner-2")

    def test_a_released_record_runs_out_of_its_window(self, probe: Probe) -> None:
        """A released key that nobody retried counts as absent after its active window."""
        token = probe.hold()
        probe.end(SettleKind.RELEASE, token)
        probe.advance(ACTIVE_MS)
        answer = probe.claim()
        assert (answer.decision, answer.attempt) == (Decision.ADMIT, 1)

    def test_a_release_without_a_window_leaves_the_key_as_it_was(self, probe: Probe) -> None:
        """So a claim is given back that nobody ran: the next one is the first, of any request."""
        for fingerprint in (ASKED, OTHER):
            token = probe.hold(KEY, fingerprint)
            given_back = probe.end(SettleKind.RELEASE, token, payload=None, active_ms=0, audit_ms=0)
            assert given_back is Decision.APPLY
        answer = probe.claim()
        assert (answer.decision, answer.attempt) == (Decision.ADMIT, 1)

    def test_callers_do_not_share_keys(self, probe: Probe) -> None:
        """The same text of two callers, or of nobody in particular, names three records."""
        keys = [KEY, key_of(KEY.text, caller="caller-2"), key_of(KEY.text, caller=GLOBAL)]
        tokens = [probe.hold(key) for key in keys]
        assert len({probe.read(key).record.digest for key in keys}) == 3
        assert [probe.read(key).record.token for key in keys] == tokens
        probe.end(SettleKind.COMPLETE, tokens[0])
        assert probe.claim(keys[1]).decision is Decision.IN_FLIGHT

    def test_any_text_of_a_key_is_kept(self, probe: Probe) -> None:
        """Keys are compared exactly: case, white space, accents and lookalikes tell them apart."""
        texts = ["a", "A", "a ", " a", "\u00e9", "e\u0301", "日本", "😀", "%", "_", "'", '"', "\\"]
        texts += ["x" * 255, "😀" * 255]
        for text in texts:
            assert probe.claim(key_of(text)).decision is Decision.ADMIT
        assert [probe.read(key_of(text)).record.text for text in texts] == texts

    def test_reading_an_unknown_key_finds_nothing(self, probe: Probe) -> None:
        """A key that nobody claimed has no record, and looking for it makes none."""
        assert probe.find() is None
        assert probe.claim().decision is Decision.ADMIT

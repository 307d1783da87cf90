"""Staging: entries come with an ending, once, and outlive the key that staged them."""

from __future__ import annotations

from functools import partial

import pytest

from retrysafe.core.model import Decision, SettleKind
from retrysafe.core.outbox.entries import (
    EntryState,
)
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.outbox_probe import (
    KEEP_MS,
    OutboxBase,
    OutboxProbe,
    staged,
)
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    ENDINGS,
    KEY,
    LEASE_MS,
    RESULT,
    key_of,
    kind_name,
    settlement,
)


class OutboxStagingCases(OutboxBase):
    """What is staged is there with the outcome, and not before."""

    def test_entries_come_with_the_ending_and_not_before(self, outbox: OutboxProbe) -> None:
        """While the operation runs there is nothing to deliver; with its outcome there is all."""
        token = outbox.probe.hold()
        assert outbox.taken() == []
        assert outbox.end(token, [staged("a"), staged("b")]) is Decision.APPLY
        now_ms = outbox.probe.clock()
        first, second = outbox.taken()
        assert (first.key, second.key) == ("entry:a", "entry:b")
        assert first.id < second.id
        assert (first.topic, first.content_type, first.body) == (
            "orders.paid",
            "application/json",
            b"{}",
        )
        assert (first.caller, first.origin) == (KEY.caller, KEY.text)
        assert (first.state, first.attempts, first.aggregate) == (EntryState.WAITING, 0, None)
        assert (first.staged_at_ms, first.due_at_ms) == (now_ms, now_ms + LEASE_MS)
        assert (first.settled_at_ms, first.expires_at_ms, first.last_error) == (None, None, None)
        assert outbox.probe.read().outcomes[0].payload == RESULT

    def test_a_zombie_stages_nothing(self, outbox: OutboxProbe) -> None:
        """Its ending is refused, and its entries with it; the new owner's count."""
        zombie = outbox.probe.hold()
        outbox.probe.advance(LEASE_MS)
        owner = outbox.probe.hold()
        assert outbox.end(zombie, [staged("zombie")]) is Decision.LOST
        assert outbox.taken() == []
        assert outbox.end(owner, [staged("owner")]) is Decision.APPLY
        assert outbox.names() == ["owner"]

    def test_an_ending_that_is_repeated_stages_once(self, outbox: OutboxProbe) -> None:
        """Whoever did not hear the answer asks again, and receivers hear of it once."""
        token = outbox.probe.hold()
        assert outbox.end(token, [staged("a")]) is Decision.APPLY
        assert outbox.end(token, [staged("a")]) is Decision.CONFIRM
        assert outbox.names() == ["a"]

    def test_a_new_life_of_the_key_stages_anew(self, outbox: OutboxProbe) -> None:
        """The operation ran again, so its entries are delivered again, under the same keys."""
        for _ in range(2):
            outbox.stage(staged("a"), key=KEY)
            (entry,) = outbox.taken()
            assert entry.key == "entry:a"
            outbox.deliver(entry)
            outbox.probe.advance(ACTIVE_MS)

    @pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
    def test_a_batch_stages_for_each_of_its_rows(
        self, outbox: OutboxProbe, kind: SettleKind
    ) -> None:
        """Endings with and without entries, a lost one and a claim: each has its own answer."""
        probe = outbox.probe
        keys = [key_of(f"row-{number}") for number in range(4)]
        wishes = [settlement(kind, key, probe.hold(key)) for key in keys]
        wishes[0].entries = (staged("first"), staged("second"))
        wishes[2].entries = (staged("third"),)
        wishes[3].token = mint_token()
        wishes[3].entries = (staged("never"),)
        claimed, settled = probe.commit([], wishes)
        decisions = [getattr(answer, "decision", answer) for answer in settled]
        assert decisions == [Decision.APPLY] * 3 + [Decision.LOST]
        assert claimed == []
        assert sorted(outbox.names()) == ["first", "second", "third"]

    def test_bodies_and_names_come_back_as_they_are(self, outbox: OutboxProbe) -> None:
        """Any byte in a body, and any text as an aggregate."""
        body = bytes(range(256))
        outbox.stage(staged("empty", body=b""), staged("bytes", 'ü "☃" {,}\\', body=body))
        empty, full = outbox.taken()
        assert (empty.body, full.body, full.aggregate) == (b"", body, 'ü "☃" {,}\\')

    def test_hints_tell_of_what_was_staged(self, outbox: OutboxProbe) -> None:
        """After the commit, and only when there is something new."""
        told: list[int] = []
        hints = outbox.outbox.hints
        listener = partial(told.append, 1)
        hints.listen(listener)
        outbox.probe.end(SettleKind.COMPLETE, outbox.probe.hold())
        assert told == []
        outbox.stage(staged("a"))
        assert told == [1]
        hints.forget(listener)
        outbox.stage(staged("b"))
        assert told == [1]

    # Retention.

    def test_a_sweep_takes_what_is_over_and_nothing_else(self, outbox: OutboxProbe) -> None:
        """Delivered entries after the time that they are kept, in bounded rounds."""
        outbox.stage(staged("a"), staged("b"), staged("c"), staged("dead"), staged("waiting"))
        *delivered, dead, waiting = outbox.taken()
        outbox.deliver(*delivered)
        outbox.settle(dead, EntryState.DEAD)
        outbox.settle(waiting, EntryState.WAITING)
        outbox.probe.advance(KEEP_MS - 1)
        assert outbox.probe.sweep().entries == 0
        outbox.probe.advance(1)
        report = outbox.probe.sweep(2)
        assert (report.entries, report.has_more) == (2, True)
        assert outbox.probe.sweep(2).entries == 1
        assert [found.entry.key for found in outbox.listed()] == ["entry:waiting", "entry:dead"]

    def test_entries_outlive_the_key_that_staged_them(self, outbox: OutboxProbe) -> None:
        """What is not delivered yet must not vanish with the record."""
        outbox.stage(staged("a"), key=KEY)
        outbox.probe.advance(ACTIVE_MS)
        assert outbox.probe.sweep().keys == 1
        assert outbox.probe.find() is None
        assert outbox.names() == ["a"]

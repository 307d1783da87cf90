"""The order of the outbox: heads of aggregates first, and every aggregate in its turn."""

from __future__ import annotations

from retrysafe.core.model import Decision
from retrysafe.core.outbox.entries import (
    Entry,
    EntryCommand,
    EntryState,
)
from retrysafe.testing.suite.outbox_probe import (
    WAIT_MS,
    OutboxBase,
    OutboxProbe,
    keys_of,
    staged,
)
from retrysafe.testing.suite.probe import (
    LEASE_MS,
)


class OutboxOrderCases(OutboxBase):
    """Entries of one aggregate keep their order; others do not wait for them."""

    def test_an_aggregate_gives_its_head_only(self, outbox: OutboxProbe) -> None:
        """The next one comes when the head is delivered, and other aggregates do not wait."""
        outbox.stage(staged("a1", "a"), staged("b1", "b"), staged("a2", "a"), staged("free"))
        outbox.stage(staged("a3", "a"))
        first = outbox.taken()
        assert keys_of(first) == ["a1", "b1", "free"]
        assert outbox.taken() == []
        outbox.deliver(*first)
        (second,) = outbox.taken()
        assert keys_of([second]) == ["a2"]
        outbox.deliver(second)
        assert outbox.names() == ["a3"]

    def test_a_head_that_fails_holds_the_others_back(self, outbox: OutboxProbe) -> None:
        """In its back-off, in a rival's hands and after its relay died."""
        outbox.stage(staged("a1", "a"), staged("a2", "a"))
        (head,) = outbox.taken()
        outbox.settle(head, EntryState.WAITING, wait_ms=WAIT_MS)
        assert outbox.taken() == []
        outbox.probe.advance(WAIT_MS)
        assert outbox.names() == ["a1"]
        outbox.probe.advance(LEASE_MS)
        assert outbox.names() == ["a1"]

    def test_a_head_that_waits_for_its_time_holds_the_others_back(
        self, outbox: OutboxProbe
    ) -> None:
        """The order of staging is the order of delivery, whatever the instants say."""
        at_ms = outbox.probe.clock() + 10_000
        outbox.stage(staged("a1", "a", deliver_at_ms=at_ms), staged("a2", "a"))
        assert outbox.taken() == []
        outbox.probe.advance(10_000)
        assert outbox.names() == ["a1"]

    def test_a_dead_head_blocks_its_aggregate_until_an_operator_decides(
        self, outbox: OutboxProbe
    ) -> None:
        """What comes after a message that never arrived may make no sense without it."""
        outbox.stage(staged("a1", "a"), staged("a2", "a"))
        (head,) = outbox.taken()
        outbox.settle(head, EntryState.DEAD)
        assert outbox.taken() == []
        assert outbox.operate(EntryCommand.RETRY, head.id) is Decision.APPLY
        (again,) = outbox.taken()
        assert (again.id, again.attempts) == (head.id, 0)
        outbox.settle(again, EntryState.DEAD)
        assert outbox.operate(EntryCommand.DISCARD, head.id) is Decision.APPLY
        assert outbox.names() == ["a2"]

    def test_a_dead_head_frees_its_aggregate_where_that_is_asked_for(
        self, outbox: OutboxProbe
    ) -> None:
        """And only for the relay that asks for it."""
        outbox.stage(staged("a1", "a"), staged("a2", "a"))
        (head,) = outbox.taken()
        outbox.settle(head, EntryState.DEAD)
        assert outbox.names(dead_blocks=True) == []
        assert outbox.names(dead_blocks=False) == ["a2"]

    # Many of them.

    def test_a_claim_is_bounded_and_takes_the_longest_due_first(self, outbox: OutboxProbe) -> None:
        """At most as many free entries, and as many heads, as were asked for."""
        for number in range(6):
            outbox.stage(staged(f"free {number}"), staged(f"lane {number}", f"lane {number}"))
            outbox.probe.advance(1)
        found = outbox.take(2)
        assert sorted(keys_of(found.entries)) == ["free 0", "free 1", "lane 0", "lane 1"]
        assert found.after is not None

    def test_a_walk_reaches_every_aggregate(self, outbox: OutboxProbe) -> None:
        """Also those behind many whose heads have to wait; and then it says that it is over."""
        at_ms = outbox.probe.clock() + 10_000
        waiting = [
            staged(f"w{number}", f"w{number:02}", deliver_at_ms=at_ms) for number in range(30)
        ]
        outbox.stage(*waiting, staged("a", "a"), staged("x", "x"), staged("z", "z"))
        found: list[Entry] = []
        after: str | None = ""
        for _ in range(100):
            assert after is not None
            part = outbox.take(1, after=after)
            assert len(part.entries) <= 1
            found += part.entries
            after = part.after
            if after is None:
                break
        assert after is None
        assert sorted(keys_of(found)) == ["a", "x", "z"]

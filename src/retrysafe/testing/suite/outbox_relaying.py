"""Relaying: entries go to one relay at a time, by lease and fence."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import pytest

from retrysafe.core.model import Decision
from retrysafe.core.outbox.entries import (
    ClaimedEntries,
    EntryClaim,
    EntryCondition,
    EntryEnding,
    EntryState,
)
from retrysafe.core.outbox.port import outbox_of
from retrysafe.core.ports import Store
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.outbox_probe import (
    KEEP_MS,
    OVER,
    WAIT_MS,
    OutboxBase,
    OutboxProbe,
    keys_of,
    staged,
)
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    LEASE_MS,
)

RACERS: Final = 6


class OutboxRelayCases(OutboxBase):
    """What is staged is delivered at least once, by one relay at a time."""

    def test_an_entry_is_not_delivered_before_its_time(self, outbox: OutboxProbe) -> None:
        """To the millisecond, by the store's clock."""
        at_ms = outbox.probe.clock() + 10_000
        outbox.stage(staged("later", deliver_at_ms=at_ms))
        outbox.stage(staged("later too", "lane", deliver_at_ms=at_ms))
        outbox.probe.advance(9_999)
        assert outbox.names() == []
        outbox.probe.advance(1)
        assert sorted(outbox.names()) == ["later", "later too"]

    @pytest.mark.parametrize("aggregate", [None, "lane"])
    def test_a_claim_holds_to_the_last_millisecond_of_its_lease(
        self, outbox: OutboxProbe, aggregate: str | None
    ) -> None:
        """One relay has the entry; when it is silent for too long, the next one gets it."""
        entry = outbox.one(aggregate)
        outbox.probe.advance(LEASE_MS - 1)
        assert outbox.taken() == []
        assert outbox.read(entry.id).condition is EntryCondition.CLAIMED
        outbox.probe.advance(1)
        assert outbox.read(entry.id).condition is EntryCondition.WAITING
        (again,) = outbox.taken()
        assert again.id == entry.id

    @pytest.mark.parametrize("state", OVER, ids=lambda state: state.name.lower())
    def test_a_zombie_relay_settles_nothing(self, outbox: OutboxProbe, state: EntryState) -> None:
        """Its late word is refused while the next relay has the entry, and after that too."""
        zombie = outbox.one()
        outbox.probe.advance(LEASE_MS)
        (owner,) = outbox.taken()
        before = outbox.read(owner.id)
        assert outbox.settle(zombie, state, error="late") is Decision.LOST
        assert outbox.extend(zombie) is Decision.LOST
        assert outbox.read(owner.id) == before
        outbox.deliver(owner)
        assert outbox.settle(zombie, state) is Decision.LOST
        assert outbox.read(owner.id).condition is EntryCondition.DELIVERED

    def test_a_relay_that_is_late_may_settle_until_the_next_one_claims(
        self, outbox: OutboxProbe
    ) -> None:
        """What is delivered need not be delivered again."""
        entry = outbox.one()
        outbox.probe.advance(LEASE_MS)
        outbox.deliver(entry)
        assert outbox.taken() == []

    def test_a_lease_is_extended_and_never_shortened(self, outbox: OutboxProbe) -> None:
        """A slow delivery keeps its entry."""
        entry = outbox.one()
        outbox.probe.advance(LEASE_MS - 1)
        assert outbox.extend(entry) is Decision.APPLY
        assert outbox.extend(entry, 1) is Decision.APPLY
        outbox.probe.advance(LEASE_MS - 1)
        assert outbox.taken() == []
        outbox.probe.advance(1)
        assert outbox.names() == ["one"]

    # What becomes of it.

    def test_a_delivered_entry_is_over(self, outbox: OutboxProbe) -> None:
        """Nobody gets it again, and a repeated word about it is refused."""
        entry = outbox.one()
        outbox.deliver(entry)
        stored = outbox.read(entry.id)
        assert stored.condition is EntryCondition.DELIVERED
        assert stored.entry.settled_at_ms == stored.now_ms
        assert stored.entry.expires_at_ms == stored.now_ms + KEEP_MS
        outbox.probe.advance(10 * LEASE_MS)
        assert outbox.taken() == []
        assert outbox.settle(entry, EntryState.WAITING) is Decision.LOST

    def test_a_failed_delivery_waits_for_its_next_try(self, outbox: OutboxProbe) -> None:
        """To the millisecond, with the error for an operator; each try is counted."""
        entry = outbox.one()
        assert outbox.begin(entry) is Decision.APPLY
        failed = outbox.settle(entry, EntryState.WAITING, error="refused", wait_ms=WAIT_MS)
        assert failed is Decision.APPLY
        stored = outbox.read(entry.id)
        assert (stored.condition, stored.entry.last_error) == (EntryCondition.WAITING, "refused")
        outbox.probe.advance(WAIT_MS - 1)
        assert outbox.taken() == []
        outbox.probe.advance(1)
        (again,) = outbox.taken()
        assert (again.attempts, again.last_error) == (1, "refused")
        outbox.deliver(again)
        assert outbox.read(entry.id).entry.last_error == "refused"

    def test_a_dead_entry_is_not_tried_again(self, outbox: OutboxProbe) -> None:
        """It keeps its error and waits for an operator, for ever if need be."""
        entry = outbox.one()
        assert outbox.settle(entry, EntryState.DEAD, error="gone") is Decision.APPLY
        outbox.probe.advance(10 * ACTIVE_MS)
        assert outbox.taken() == []
        outbox.probe.sweep()
        stored = outbox.read(entry.id)
        assert (stored.condition, stored.entry.last_error) == (EntryCondition.DEAD, "gone")
        assert stored.entry.expires_at_ms is None

    # Races.

    def test_racing_relays_share_the_entries(self, outbox: OutboxProbe, joined: Store) -> None:
        """Each entry goes to one of them, and no aggregate to two."""
        for number in range(10):
            outbox.stage(
                staged(f"free {number}"),
                staged(f"first {number}", f"lane {number}"),
                staged(f"second {number}", f"lane {number}"),
            )
        stores = [joined if number % 2 else outbox.probe.store for number in range(RACERS)]
        flows: list[Callable[[], Coroutine[Any, Any, ClaimedEntries]]] = [
            partial(outbox_of(store).claim, EntryClaim(mint_token(), 100, LEASE_MS))
            for store in stores
        ]
        found = [entry for part in self.race(outbox.probe.store, flows) for entry in part.entries]
        # A relay that met rivals everywhere may have got nothing; whatever is left comes now.
        found += outbox.taken()
        expected = [f"{kind} {number}" for kind in ("first", "free") for number in range(10)]
        assert sorted(keys_of(found)) == expected

    def test_a_zombie_relay_races_the_next_one(self, outbox: OutboxProbe, joined: Store) -> None:
        """Both have a word about the entry at once; the owner's is the one that counts."""
        for _ in range(RACERS):
            zombie = outbox.one()
            outbox.probe.advance(LEASE_MS)
            (owner,) = outbox.taken()
            endings = [
                EntryEnding(entry.id, entry.token or b"", state, keep_ms=KEEP_MS)
                for entry, state in ((zombie, EntryState.DEAD), (owner, EntryState.DELIVERED))
            ]
            flows: list[Callable[[], Coroutine[Any, Any, list[Decision]]]] = [
                partial(outbox_of(store).write, [ending])
                for store, ending in zip((joined, outbox.probe.store), endings, strict=True)
            ]
            answers = self.race(outbox.probe.store, flows)
            assert answers == [[Decision.LOST], [Decision.APPLY]]
            assert outbox.read(owner.id).condition is EntryCondition.DELIVERED

"""Tries: counted when their delivery begins, and open until somebody tells how they ended."""

from __future__ import annotations

import pytest

from retrysafe.core.model import Decision
from retrysafe.core.outbox.entries import (
    EntryCommand,
    EntryCondition,
    EntryEnding,
    EntryStart,
    EntryState,
    EntryWrite,
    OpenTry,
)
from retrysafe.testing.suite.outbox_probe import (
    KEEP_MS,
    OVER,
    OutboxBase,
    OutboxProbe,
    keys_of,
    staged,
)
from retrysafe.testing.suite.probe import LEASE_MS


class OutboxTryCases(OutboxBase):
    """A relay that dies leaves behind what it had begun, and of nothing else a try is counted."""

    def test_a_claim_counts_no_try(self, outbox: OutboxProbe) -> None:
        """However often a relay dies with entries that it only holds, they are as they were."""
        entry = outbox.one("lane")
        for _ in range(3):
            assert outbox.tries(entry.id) == (0, OpenTry.NONE)
            outbox.probe.advance(LEASE_MS)
            (entry,) = outbox.taken()

    @pytest.mark.parametrize("is_alone", [False, True])
    def test_a_try_counts_when_its_delivery_begins(
        self, outbox: OutboxProbe, is_alone: bool
    ) -> None:
        """It is open through later claims, so that the next relay knows of it."""
        entry = outbox.one()
        expected = (1, OpenTry.ALONE if is_alone else OpenTry.SHARED)
        assert outbox.begin(entry, is_alone=is_alone) is Decision.APPLY
        assert outbox.tries(entry.id) == expected
        outbox.probe.advance(LEASE_MS)
        (again,) = outbox.taken()
        assert (again.attempts, again.open_try) == expected
        assert outbox.begin(again) is Decision.APPLY
        assert outbox.tries(entry.id) == (2, OpenTry.SHARED)

    def test_the_first_of_a_claim_begin_with_it(self, outbox: OutboxProbe) -> None:
        """As many as the relay can deliver at once; what comes back is as it was before."""
        outbox.stage(staged("a"), staged("b", "lane"), staged("c"), staged("d", "other"))
        found = outbox.take(begins=2)
        first, second, third, fourth = found.entries
        assert found.begun == {first.id, second.id}
        assert {(entry.attempts, entry.open_try) for entry in found.entries} == {(0, OpenTry.NONE)}
        begun = [outbox.tries(entry.id) for entry in (first, second)]
        assert begun == [(1, OpenTry.SHARED)] * 2
        waiting = [outbox.tries(entry.id) for entry in (third, fourth)]
        assert waiting == [(0, OpenTry.NONE)] * 2

    def test_an_entry_with_an_open_try_never_begins_with_a_claim(self, outbox: OutboxProbe) -> None:
        """It may be what ended its relay, and is delivered alone; the next ones begin instead."""
        outbox.stage(staged("a"), staged("b"), staged("c", "lane"))
        assert len(outbox.take(begins=1).begun) == 1
        outbox.probe.advance(LEASE_MS)
        found = outbox.take(begins=2)
        suspect, *others = found.entries
        assert found.begun == {entry.id for entry in others}
        assert (suspect.attempts, suspect.open_try) == (1, OpenTry.SHARED)
        assert outbox.tries(suspect.id) == (1, OpenTry.SHARED)

    def test_a_start_that_is_repeated_is_counted_once(self, outbox: OutboxProbe) -> None:
        """Its answer may have been lost."""
        entry = outbox.one()
        assert [outbox.begin(entry) for _ in range(2)] == [Decision.APPLY] * 2
        assert outbox.tries(entry.id) == (1, OpenTry.SHARED)

    def test_a_start_extends_the_lease_and_never_shortens_it(self, outbox: OutboxProbe) -> None:
        """What begins late has its whole lease before it, also if the old one had run out."""
        entry = outbox.one()
        outbox.probe.advance(LEASE_MS)
        assert outbox.begin(entry) is Decision.APPLY
        assert outbox.begin(entry, lease_ms=1) is Decision.APPLY
        outbox.probe.advance(LEASE_MS - 1)
        assert outbox.taken() == []
        outbox.probe.advance(1)
        assert keys_of(outbox.taken()) == ["one"]

    @pytest.mark.parametrize("aggregate", [None, "lane"])
    def test_a_zombie_relay_begins_nothing(
        self, outbox: OutboxProbe, aggregate: str | None
    ) -> None:
        """It has only queued the entry, and another relay has it by now, or has delivered it."""
        zombie = outbox.one(aggregate)
        outbox.probe.advance(LEASE_MS)
        (owner,) = outbox.taken()
        before = outbox.read(owner.id)
        assert outbox.begin(zombie) is Decision.LOST
        assert outbox.read(owner.id) == before
        outbox.deliver(owner)
        assert outbox.begin(zombie) is Decision.LOST
        assert outbox.read(owner.id).condition is EntryCondition.DELIVERED

    @pytest.mark.parametrize("command", EntryCommand)
    def test_nothing_begins_after_an_operator_has_decided(
        self, outbox: OutboxProbe, command: EntryCommand
    ) -> None:
        """A discarded entry that were delivered could come after its successor."""
        zombie = outbox.one("lane")
        outbox.probe.advance(LEASE_MS)
        assert outbox.operate(command, zombie.id) is Decision.APPLY
        before = outbox.read(zombie.id)
        assert outbox.begin(zombie) is Decision.LOST
        assert outbox.read(zombie.id) == before

    @pytest.mark.parametrize("state", OVER, ids=lambda state: state.name.lower())
    def test_an_ending_closes_the_try(self, outbox: OutboxProbe, state: EntryState) -> None:
        """Its relay lived, so nothing speaks against the entry."""
        entry = outbox.one()
        outbox.begin(entry)
        assert outbox.settle(entry, state) is Decision.APPLY
        assert outbox.tries(entry.id) == (1, OpenTry.NONE)

    def test_what_is_given_back_is_as_it_was(self, outbox: OutboxProbe) -> None:
        """A relay that stops has counted what it was about to begin; others get it at once."""
        outbox.one()
        outbox.probe.advance(LEASE_MS)
        (entry,) = outbox.taken()
        outbox.begin(entry)
        outbox.probe.advance(LEASE_MS)
        (suspect,) = outbox.taken()
        outbox.begin(suspect, is_alone=True)
        assert outbox.give_back(suspect) is Decision.APPLY
        assert outbox.tries(entry.id) == (1, OpenTry.SHARED)
        assert outbox.read(entry.id).condition is EntryCondition.WAITING
        assert keys_of(outbox.taken()) == ["one"]

    def test_a_retry_by_an_operator_starts_over(self, outbox: OutboxProbe) -> None:
        """An entry that was dead for its relay's end is tried as any other."""
        entry = outbox.one()
        outbox.begin(entry, is_alone=True)
        outbox.probe.advance(LEASE_MS)
        assert outbox.operate(EntryCommand.RETRY, entry.id) is Decision.APPLY
        assert outbox.tries(entry.id) == (0, OpenTry.NONE)

    def test_endings_and_starts_are_written_in_one_go(self, outbox: OutboxProbe) -> None:
        """In any order, each with its own answer."""
        outbox.stage(staged("a"), staged("b"), staged("c", "lane"))
        entries = {entry.key.removeprefix("entry:"): entry for entry in outbox.taken()}
        tokens = {name: entry.token or b"" for name, entry in entries.items()}
        writes: list[EntryWrite] = [
            EntryStart(entries["b"].id, tokens["b"], 1, LEASE_MS),
            EntryEnding(entries["a"].id, tokens["a"], EntryState.DELIVERED, keep_ms=KEEP_MS),
            EntryStart(entries["c"].id, b"x" * 16, 1, LEASE_MS),
        ]
        decisions = self.run(outbox.outbox.write(writes))
        assert decisions == [Decision.APPLY, Decision.APPLY, Decision.LOST]
        assert outbox.read(entries["a"].id).condition is EntryCondition.DELIVERED
        assert outbox.tries(entries["b"].id) == (1, OpenTry.SHARED)
        assert outbox.tries(entries["c"].id) == (0, OpenTry.NONE)

"""What operators see of the outbox, and what they may change."""

from __future__ import annotations

from typing import Any

import pytest

from retrysafe.core.model import Decision
from retrysafe.core.outbox.entries import (
    DISCARDED_KEEP_MS,
    EntryCommand,
    EntryCondition,
    EntryState,
)
from retrysafe.testing.suite.outbox_probe import (
    OutboxBase,
    OutboxProbe,
    keys_of,
    staged,
)
from retrysafe.testing.suite.probe import (
    LEASE_MS,
)


class OutboxOperatorCases(OutboxBase):
    """Entries can be listed, tried again and discarded, when they are nobody's."""

    @pytest.mark.parametrize("command", EntryCommand)
    @pytest.mark.parametrize("condition", EntryCondition)
    def test_an_operator_changes_what_is_not_under_way_and_not_over(
        self, outbox: OutboxProbe, condition: EntryCondition, command: EntryCommand
    ) -> None:
        """A claimed entry is somebody's; what was delivered cannot be taken back."""
        entry = outbox.arrange(condition)
        before = outbox.read(entry.id)
        decision = outbox.operate(command, entry.id)
        after = outbox.read(entry.id)
        if condition not in (EntryCondition.WAITING, EntryCondition.DEAD):
            assert (decision, after) == (Decision.REFUSE, before)
        elif command is EntryCommand.RETRY:
            assert (decision, after.condition) == (Decision.APPLY, EntryCondition.WAITING)
            (again,) = outbox.taken()
            assert (again.id, again.attempts) == (entry.id, 0)
        else:
            assert (decision, after.condition) == (Decision.APPLY, EntryCondition.DISCARDED)
            assert after.entry.expires_at_ms == after.now_ms + DISCARDED_KEEP_MS
            assert outbox.taken() == []

    def test_an_operator_ends_the_claim_of_a_relay_that_is_gone(self, outbox: OutboxProbe) -> None:
        """A late word of that relay does not undo what the operator has decided."""
        zombie = outbox.one()
        outbox.probe.advance(LEASE_MS)
        assert outbox.operate(EntryCommand.RETRY, zombie.id) is Decision.APPLY
        assert outbox.settle(zombie, EntryState.DEAD) is Decision.LOST
        assert outbox.operate(EntryCommand.DISCARD, zombie.id) is Decision.APPLY
        assert outbox.settle(zombie, EntryState.WAITING) is Decision.LOST

    def test_an_unknown_entry_is_nowhere(self, outbox: OutboxProbe) -> None:
        """It is not read, not changed and not settled."""
        entry = outbox.one()
        unknown = entry.id + 1
        assert outbox.find(unknown) is None
        for command in EntryCommand:
            assert outbox.operate(command, unknown) is Decision.REFUSE
        entry.id = unknown
        assert outbox.settle(entry, EntryState.DELIVERED) is Decision.LOST
        assert outbox.extend(entry) is Decision.LOST

    def test_entries_are_listed_newest_first(self, outbox: OutboxProbe) -> None:
        """All, or those of a topic, an aggregate or some conditions, up to the limit."""
        outbox.stage(staged("a", "lane"), staged("b"), staged("c", "lane"))
        taken = {entry.key: entry for entry in outbox.taken()}
        outbox.settle(taken["entry:a"], EntryState.DEAD)

        def names(**query: Any) -> list[str]:
            return keys_of([found.entry for found in outbox.listed(**query)])

        assert names() == ["c", "b", "a"]
        assert names(limit=2) == ["c", "b"]
        assert names(aggregate="lane") == ["c", "a"]
        assert names(topic="orders.paid", limit=1) == ["c"]
        assert names(topic="other") == []
        for condition, expected in (
            (EntryCondition.WAITING, ["c"]),
            (EntryCondition.CLAIMED, ["b"]),
            (EntryCondition.DEAD, ["a"]),
            (EntryCondition.DELIVERED, []),
        ):
            assert names(conditions=frozenset({condition})) == expected
            found = outbox.listed(conditions=frozenset({condition}))
            assert {item.condition for item in found} <= {condition}
        both = frozenset({EntryCondition.DEAD, EntryCondition.CLAIMED})
        assert names(conditions=both) == ["b", "a"]

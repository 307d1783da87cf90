"""The outbox: entries come with an ending, go to one relay at a time, and keep their order.

These cases are for stores that have an outbox, as their capabilities say.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import pytest

from retrysafe.core.keys import Key
from retrysafe.core.model import Decision, SettleKind, StagedEntry
from retrysafe.core.outbox import (
    DISCARDED_KEEP_MS,
    ClaimedEntries,
    Entry,
    EntryClaim,
    EntryCommand,
    EntryCondition,
    EntryEnding,
    EntryQuery,
    EntryState,
    StoredEntry,
)
from retrysafe.core.outbox_ports import Outbox, outbox_of
from retrysafe.core.ports import Store
from retrysafe.runtime.face import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    ENDINGS,
    KEY,
    LEASE_MS,
    RESULT,
    Probe,
    key_of,
    kind_name,
    settlement,
)

RACERS: Final = 6
KEEP_MS: Final = 60_000
WAIT_MS: Final = 5_000

OVER: Final = (EntryState.WAITING, EntryState.DELIVERED, EntryState.DEAD)


def staged(
    name: str, aggregate: str | None = None, *, body: bytes = b"{}", deliver_at_ms: int = 0
) -> StagedEntry:
    """An entry in the usual words."""
    return StagedEntry(
        f"entry:{name}", "orders.paid", "application/json", body, aggregate, deliver_at_ms
    )


class OutboxProbe:
    """A store's outbox, with verbs that read as what happens to an entry."""

    def __init__(self, probe: Probe, run: Callable[[Any], Any]) -> None:
        self.probe = probe
        self._run = run

    @property
    def outbox(self) -> Outbox:
        """The entries."""
        return outbox_of(self.probe.store)

    def stage(self, *entries: StagedEntry, key: Key | None = None) -> None:
        """Runs an operation that stages these entries."""
        key = key or key_of(f"stages {mint_token().hex()}")
        token = self.probe.hold(key)
        assert self.end(token, entries, key) is Decision.APPLY

    def end(
        self,
        token: bytes,
        entries: Sequence[StagedEntry],
        key: Key = KEY,
        kind: SettleKind = SettleKind.COMPLETE,
    ) -> Decision:
        """Ends an attempt with entries."""
        wish = settlement(kind, key, token)
        wish.entries = tuple(entries)
        return self.probe.settle(wish).decision

    def take(
        self,
        limit: int = 100,
        *,
        after: str = "",
        dead_blocks: bool = True,
        lease_ms: int = LEASE_MS,
    ) -> ClaimedEntries:
        """One claim of a relay."""
        wish = EntryClaim(mint_token(), limit, lease_ms, after, dead_blocks)
        found: ClaimedEntries = self._run(self.outbox.claim(wish))
        assert all(entry.token == wish.token for entry in found.entries)
        return found

    def taken(self, limit: int = 100, *, dead_blocks: bool = True) -> list[Entry]:
        """What one claim gives."""
        return self.take(limit, dead_blocks=dead_blocks).entries

    def names(self, limit: int = 100, *, dead_blocks: bool = True) -> list[str]:
        """The names of what one claim gives."""
        found = self.taken(limit, dead_blocks=dead_blocks)
        return [entry.key.removeprefix("entry:") for entry in found]

    def settle(
        self,
        entry: Entry,
        state: EntryState,
        *,
        error: str | None = None,
        is_counted: bool = True,
        wait_ms: int = 0,
    ) -> Decision:
        """What became of a delivery."""
        assert entry.token is not None
        ending = EntryEnding(entry.id, entry.token, state, wait_ms, is_counted, KEEP_MS, error)
        (decision,) = self._run(self.outbox.settle([ending]))
        assert isinstance(decision, Decision)
        return decision

    def deliver(self, *entries: Entry) -> None:
        """Marks entries as delivered, together."""
        endings = [
            EntryEnding(entry.id, entry.token or b"", EntryState.DELIVERED, keep_ms=KEEP_MS)
            for entry in entries
        ]
        assert self._run(self.outbox.settle(endings)) == [Decision.APPLY] * len(entries)

    def extend(self, entry: Entry, lease_ms: int = LEASE_MS) -> Decision:
        """Extends a relay's lease."""
        (decision,) = self._run(self.outbox.extend(entry.token or b"", [entry.id], lease_ms))
        assert isinstance(decision, Decision)
        return decision

    def operate(self, command: EntryCommand, number: int) -> Decision:
        """An operator's command."""
        decision: Decision = self._run(self.outbox.operate(number, command))
        return decision

    def find(self, number: int) -> StoredEntry | None:
        """What is stored of an entry, if anything."""
        found: StoredEntry | None = self._run(self.outbox.read(number))
        return found

    def read(self, number: int) -> StoredEntry:
        """What is stored of an entry that is there."""
        found = self.find(number)
        assert found is not None
        return found

    def listed(self, **query: Any) -> list[StoredEntry]:
        """The entries of a query."""
        found: list[StoredEntry] = self._run(self.outbox.list_entries(EntryQuery(**query)))
        return found

    def one(self, aggregate: str | None = None) -> Entry:
        """Stages one entry and takes it."""
        self.stage(staged("one", aggregate))
        (entry,) = self.taken()
        return entry

    def arrange(self, condition: EntryCondition) -> Entry:
        """An entry that is in this condition."""
        entry = self.one()
        if condition is EntryCondition.WAITING:
            self.settle(entry, EntryState.WAITING, wait_ms=WAIT_MS)
        elif condition is EntryCondition.DISCARDED:
            self.settle(entry, EntryState.DEAD)
            assert self.operate(EntryCommand.DISCARD, entry.id) is Decision.APPLY
        elif condition is not EntryCondition.CLAIMED:
            self.settle(entry, EntryState[condition.name])
        assert self.read(entry.id).condition is condition
        return entry


def _keys(entries: Sequence[Entry]) -> list[str]:
    return [entry.key.removeprefix("entry:") for entry in entries]


class OutboxCases(SuiteBase):
    """What is staged is delivered at least once, by one relay at a time, in its order."""

    @pytest.fixture
    def outbox(self, probe: Probe) -> OutboxProbe:
        """The outbox of the store under test."""
        if not probe.store.capabilities.has_outbox:
            pytest.skip("this store has no outbox")
        return OutboxProbe(probe, self.run)

    # Coming in.

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
        assert (first.state, first.attempts, first.aggregate) == (EntryState.WAITING, 1, None)
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

    # Going to a relay.

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
        assert (again.id, again.attempts) == (entry.id, 2)

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
        failed = outbox.settle(entry, EntryState.WAITING, error="refused", wait_ms=WAIT_MS)
        assert failed is Decision.APPLY
        stored = outbox.read(entry.id)
        assert (stored.condition, stored.entry.last_error) == (EntryCondition.WAITING, "refused")
        outbox.probe.advance(WAIT_MS - 1)
        assert outbox.taken() == []
        outbox.probe.advance(1)
        (again,) = outbox.taken()
        assert (again.attempts, again.last_error) == (2, "refused")
        outbox.deliver(again)
        assert outbox.read(entry.id).entry.last_error == "refused"

    def test_a_try_that_did_not_take_place_is_not_counted(self, outbox: OutboxProbe) -> None:
        """A relay that stops gives back what it has not begun."""
        entry = outbox.one()
        assert outbox.settle(entry, EntryState.WAITING, is_counted=False) is Decision.APPLY
        (again,) = outbox.taken()
        assert (again.id, again.attempts) == (entry.id, 1)

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

    # Order.

    def test_an_aggregate_gives_its_head_only(self, outbox: OutboxProbe) -> None:
        """The next one comes when the head is delivered, and other aggregates do not wait."""
        outbox.stage(staged("a1", "a"), staged("b1", "b"), staged("a2", "a"), staged("free"))
        outbox.stage(staged("a3", "a"))
        first = outbox.taken()
        assert _keys(first) == ["a1", "b1", "free"]
        assert outbox.taken() == []
        outbox.deliver(*first)
        (second,) = outbox.taken()
        assert _keys([second]) == ["a2"]
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
        assert (again.id, again.attempts) == (head.id, 1)
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
        assert sorted(_keys(found.entries)) == ["free 0", "free 1", "lane 0", "lane 1"]
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
        assert sorted(_keys(found)) == ["a", "x", "z"]

    # For operators.

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
            assert (again.id, again.attempts) == (entry.id, 1)
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
            return _keys([found.entry for found in outbox.listed(**query)])

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
        assert sorted(_keys(found)) == expected

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
                partial(outbox_of(store).settle, [ending])
                for store, ending in zip((joined, outbox.probe.store), endings, strict=True)
            ]
            answers = self.race(outbox.probe.store, flows)
            assert answers == [[Decision.LOST], [Decision.APPLY]]
            assert outbox.read(owner.id).condition is EntryCondition.DELIVERED

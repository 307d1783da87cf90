"""What a relay holds: which entries wait to begin, which are under way, and how long they are its.

Owns the order in which claimed entries begin, and the look at their leases by the local clock. An
entry whose last try ended without a word may be what ended its relay, so it begins alone: if this
relay dies too, it is known why. The others have their turn between two of those. It must not know
stores, pools and targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

from retrysafe.core.outbox.entries import ClaimedEntries, Entry, EntryStart, OpenTry
from retrysafe.relay.policy import RelayPolicy

# Two renewals may fail before a lease ends.
_RENEWALS_PER_LEASE = 3


class HeldEntries:
    """The entries of one relay, from their claim to their end."""

    def __init__(self, policy: RelayPolicy, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lease_seconds = policy.lease.total_seconds()
        self._lease_ms = max(1, round(self._lease_seconds * 1000))
        # A delivery that takes longer than this hangs, and is not waited for by one that begins
        # alone: threads cannot be interrupted.
        self._patience_seconds = policy.timeout.total_seconds()
        # By number, as they were claimed; of those that have begun, with this try counted.
        self._entries: dict[int, Entry] = {}
        # When their leases end, counted from before the store was asked, so never too late.
        self._ends: dict[int, float] = {}
        self._renew_at = math.inf
        self._renewal_offset = self._lease_seconds * (1 / _RENEWALS_PER_LEASE - 1)
        # Those that wait, in the order of their claims, and those that wait to begin alone.
        self._waiting: dict[int, None] = {}
        self._suspects: list[int] = []
        # When those began that the pool has, and which of them began alone.
        self._begun_at: dict[int, float] = {}
        self._alone: int | None = None
        # Until when the others have their turn, before the next one begins alone.
        self._others_until = -math.inf

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def suspect_count(self) -> int:
        """How many wait to begin alone."""
        return len(self._suspects)

    def is_alone_next(self) -> bool:
        """Whether one has begun alone, or is the next to; it shares its relay with nothing."""
        return self._alone_under_way() or (
            bool(self._suspects) and self._monotonic() >= self._others_until
        )

    def none_due(self) -> None:
        """Notes that the store has nothing for the others' turn, which ends with what they do."""
        if not self._waiting and self._is_quiet():
            self._others_until = -math.inf

    def take_on(self, found: ClaimedEntries, asked: float) -> list[Entry]:
        """Adds what a claim gave that was asked for at that time; which of it begins now.

        Some of it this relay may have already, if its lease had run out: that has a new token, and
        what is under way stays under way.
        """
        ends = asked + self._lease_seconds
        begun = []
        for entry in found.entries:
            number = entry.id
            known = self._entries.get(number)
            if known is not None and self.is_under_way(number):
                # The row has counted the try that is under way, and tells of it as open.
                entry.open_try = known.open_try
                self._entries[number], self._ends[number] = entry, ends
                continue
            if known is not None:
                self.remove(number)
            self._entries[number], self._ends[number] = entry, ends
            if number in found.begun:
                self._begun_at[number] = asked
                entry.attempts += 1
                begun.append(entry)
            else:
                self._wait(entry)
        self._renew_before(ends)
        return begun

    def _wait(self, entry: Entry) -> None:
        if entry.open_try is OpenTry.NONE:
            self._waiting[entry.id] = None
            return
        self._suspects.append(entry.id)
        # Those that nothing speaks against but their company come first: one that has ended a
        # relay alone must not keep them waiting for a lease each time.
        self._suspects.sort(key=self._suspicion)

    def _suspicion(self, number: int) -> tuple[int, int, int]:
        entry = self._entries[number]
        return entry.open_try, entry.attempts, number

    def _renew_before(self, ends: float) -> None:
        self._renew_at = min(self._renew_at, ends + self._renewal_offset)

    def is_under_way(self, number: int) -> bool:
        """Whether the pool has it."""
        return number in self._begun_at

    def take_back(self, number: int) -> Entry | None:
        """Takes an entry out whose delivery has not begun, as it was claimed; None if unknown."""
        is_counted = self.is_under_way(number)
        entry = self.remove(number)
        if entry is not None and is_counted:
            entry.attempts -= 1
        return entry

    def remove(self, number: int) -> Entry | None:
        """Takes an entry out, with the token that it has now; None if unknown."""
        self._waiting.pop(number, None)
        if number in self._suspects:
            self._suspects.remove(number)
        if self._alone == number:
            self._end_alone()
        self._begun_at.pop(number, None)
        self._ends.pop(number, None)
        return self._entries.pop(number, None)

    # What begins.

    def may_begin(self, entry: Entry) -> bool:
        """Whether the entry is still this relay's by the local clock; asked from any thread.

        A process that stood still may have lost it meanwhile to another relay, or to an operator.
        """
        return self._monotonic() < self._ends.get(entry.id, -math.inf)

    def next_starts(self, limit: int) -> list[EntryStart]:
        """Which deliveries begin now, if at most `limit` may be under way."""
        if self.is_alone_next():
            if self._is_quiet():
                return [self._start(self._suspects[0], is_alone=True)]
            return []
        return [self._start(number) for number in islice(self._waiting, self._room(limit))]

    def _room(self, limit: int) -> int:
        return max(0, limit - len(self._begun_at))

    def room_to_begin(self, limit: int) -> int:
        """How many may begin beside what is under way and what waits already."""
        return max(0, self._room(limit) - len(self._waiting))

    def _start(self, number: int, *, is_alone: bool = False) -> EntryStart:
        entry = self._entries[number]
        assert entry.token is not None  # Only claimed entries are held.
        return EntryStart(number, entry.token, entry.attempts + 1, self._lease_ms, is_alone)

    def _is_quiet(self) -> bool:
        now = self._monotonic()
        return all(now >= begun + self._patience_seconds for begun in self._begun_at.values())

    def _alone_under_way(self) -> bool:
        return self._alone is not None and not self._is_quiet()

    def _end_alone(self) -> None:
        """Gives the others as much time as the one that was alone has had.

        Suspects that hang would else keep everything waiting, one timeout after the other.
        """
        assert self._alone is not None  # The callers have looked.
        now = self._monotonic()
        self._others_until = min(self._others_until, now + now - self._begun_at[self._alone])
        self._alone = None

    def begun(self, number: int, asked: float, *, is_alone: bool = False) -> Entry:
        """Notes that a start was written, and gives the entry for its delivery."""
        if is_alone:
            self._suspects.remove(number)
            self._alone = number
            # If it hangs. A thread cannot be interrupted, and nobody waits for it for longer.
            self._others_until = asked + 2 * self._patience_seconds
        self._waiting.pop(number, None)
        self._begun_at[number] = asked
        self._ends[number] = asked + self._lease_seconds
        entry = self._entries[number]
        entry.attempts += 1
        return entry

    def put_back(self, number: int) -> None:
        """Lets an entry wait again: its lease may have ended before its delivery began."""
        entry = self._entries.get(number)
        if entry is not None:
            if self._alone == number:
                self._end_alone()
            del self._begun_at[number]
            entry.attempts -= 1
            self._wait(entry)

    def waiting(self, *, with_suspects: bool) -> list[int]:
        """Those whose delivery has not begun."""
        return [*self._waiting, *(self._suspects if with_suspects else ())]

    # Leases.

    def due_renewals(self) -> dict[bytes, list[int]]:
        """The entries to renew, by their tokens; none before one of them is due, then all."""
        if self._monotonic() < self._renew_at:
            return {}
        # The one that this was set for may have ended, or begun with a new lease.
        self._set_renewal()
        if self._monotonic() < self._renew_at:
            return {}
        held: dict[bytes, list[int]] = {}
        for number, entry in self._entries.items():
            if self._ends[number] > -math.inf:
                assert entry.token is not None  # Only claimed entries are held.
                held.setdefault(entry.token, []).append(number)
        return held

    def renewed(self, numbers: list[int], asked: float) -> None:
        """Notes new leases, asked for at that time."""
        for number in numbers:
            self._ends[number] = asked + self._lease_seconds
        self._set_renewal()

    def lost(self, number: int) -> bool:
        """Notes that the entry is somebody else's; whether its delivery is under way here."""
        if not self.is_under_way(number):
            self.remove(number)
            self._set_renewal()
            return False
        # What the pool has only queued must not begin any more.
        self._ends[number] = -math.inf
        self._set_renewal()
        return True

    def _set_renewal(self) -> None:
        self._renew_at = math.inf
        self._renew_before(min((e for e in self._ends.values() if e > -math.inf), default=math.inf))

    def seconds_to_renewal(self) -> float:
        """How long until a lease is due; infinite without one."""
        return self._renew_at - self._monotonic()

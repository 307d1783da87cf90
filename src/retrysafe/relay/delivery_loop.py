"""The relay's engine: claim due entries, have them delivered, write what became of them.

Owns the order: an entry is claimed, its try is counted before its delivery begins, and its ending
is written after. A crash in between repeats a delivery and never loses one. One code for threads
and for event loops; it speaks to the outbox port and to a pool. Which entries are due is the
store's decision.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from retrysafe.core.model import Decision
from retrysafe.core.outbox.entries import (
    Entry,
    EntryClaim,
    EntryEnding,
    EntryStart,
    EntryState,
    OpenTry,
    error_text,
    tries_text,
)
from retrysafe.core.outbox.port import Outbox
from retrysafe.errors import DeliveryFailed, StoreUnavailable
from retrysafe.relay.deliveries import HeldEntries
from retrysafe.relay.policy import RelayPolicy
from retrysafe.relay.ports import DeliveryPool, Finished

_logger: Final = logging.getLogger("retrysafe")

# Entries on hand for each delivery at a time: the pool is not to wait for the store. A slow target
# gets no more than that, because an entry on hand is one that no other relay can deliver.
_ON_HAND: Final = 2
_RATE_WINDOW_SECONDS: Final = 0.05
# Tries are counted by a write before they begin: for as many deliveries as the pool can begin at
# once, and for those that it will have begun after this many turns of the relay. Else a quick
# target would wait for the store between any two deliveries. Not for more, because what is counted
# and has not begun is under suspicion when the relay dies.
_TURNS_AHEAD: Final = 2
# A turn that is quicker is taken for this long, so that a commit is shared by many.
_TURN_MINIMUM_SECONDS: Final = 0.005
# Outages in a row after which a relay that stops leaves its last endings to the leases, and after
# which a drain is given up.
_LAST_TRIES: Final = 3
# A store that does not answer is asked again after this, longer each time.
_OUTAGE_SECONDS: Final = 0.5
_OUTAGE_MAXIMUM_SECONDS: Final = 30.0
# A walk over many waiting aggregates is work for the store; most of the time belongs to others.
_REST_SHARE: Final = 4.0


@dataclass(slots=True)
class RelayReport:
    """What a relay has done so far."""

    delivered: int = 0
    # Deliveries that failed and are tried again.
    failed: int = 0
    dead: int = 0
    # Entries that were another relay's by then, or an operator had discarded: before their delivery
    # began, or when its ending was written.
    lost: int = 0
    # Entries given back before their delivery began: because the relay stopped, or because another
    # one had to be delivered alone.
    returned: int = 0


class RelayEngine:
    """Delivers entries until it is stopped; any number of them may work on one store."""

    def __init__(
        self,
        outbox: Outbox,
        pool: DeliveryPool,
        policy: RelayPolicy,
        *,
        monotonic: Callable[[], float],
        mint_token: Callable[[], bytes],
        jitter: Callable[[], float] = random.random,
        on_report: Callable[[RelayReport], None] | None = None,
    ) -> None:
        self._outbox = outbox
        self._pool = pool
        self._policy = policy
        self._monotonic = monotonic
        self._mint_token = mint_token
        self._jitter = jitter
        self._on_report = on_report
        self._report = RelayReport()
        self._lease_ms = max(1, round(policy.lease.total_seconds() * 1000))
        self._held = HeldEntries(policy, monotonic)
        # Endings that the store has not heard of yet.
        self._endings: list[EntryEnding] = []
        # Those among them that it may have heard of: its answer was lost.
        self._unsure: set[int] = set()
        self._after = ""
        self._outages = 0
        self._window_started = monotonic()
        self._window_finished = 0
        # How many deliveries may have begun, by the store's count, and how many be on hand.
        self._begun_limit = pool.size
        self._on_hand = pool.size * _ON_HAND
        self._turn_seconds = _TURN_MINIMUM_SECONDS
        self.is_stopping = False

    @property
    def report(self) -> RelayReport:
        """A copy of the counts so far."""
        return replace(self._report)

    def stop(self) -> None:
        """Claims nothing more; what is under way is finished. Safe in a signal's function."""
        self.is_stopping = True
        self._pool.wake()

    async def run(self, *, until_idle: bool = False) -> None:
        """Works until it is stopped, or until nothing is due.

        Waits for a store that does not answer, except for the last word of a stop and in a drain.
        Raises what is no outage.
        """
        while True:
            started = self._monotonic()
            has_walked = False
            try:
                self._collect()
                await self._write()
                await self._renew()
                if not self.is_stopping:
                    has_walked = await self._claim()
                self._outages = 0
                self._turned(self._monotonic() - started)
            except StoreUnavailable as error:
                self._outages += 1
                _logger.warning("the relay's store does not answer: %s", error)
                if not self._held and self._outages >= _LAST_TRIES:
                    # The leases free what the store could not be told of.
                    if self.is_stopping:
                        return
                    if until_idle:
                        raise
            is_busy = bool(self._held or self._endings)
            if not is_busy and (self.is_stopping or (until_idle and has_walked)):
                return
            if self._outages or not self._has_more_to_do(has_walked=has_walked):
                await self._pool.wait(self._rest_seconds(self._monotonic() - started))

    def _has_more_to_do(self, *, has_walked: bool) -> bool:
        if self.is_stopping:
            return False
        return bool(self._starts()) or not (has_walked or self._is_full())

    # What has ended.

    def _collect(self) -> None:
        if self.is_stopping:
            withdrawn = [entry.id for entry in self._pool.withdraw()]
            self._give_back(withdrawn + self._held.waiting(with_suspects=True))
        ended = self._pool.finished()
        for finished in ended:
            if finished.is_begun:
                self._judge(finished)
            else:
                # The store is asked before it begins after all.
                self._held.put_back(finished.entry.id)
        self._measure(len(ended))

    def _give_back(self, numbers: list[int]) -> None:
        """Frees entries whose delivery has not begun for other relays, as they were claimed."""
        for number in numbers:
            entry = self._held.take_back(number)
            if entry is not None:
                assert entry.token is not None  # Only claimed entries are held.
                self._endings.append(
                    EntryEnding(
                        number,
                        entry.token,
                        EntryState.WAITING,
                        attempts=entry.attempts,
                        open_try=entry.open_try,
                    )
                )
                self._report.returned += 1

    def _turned(self, seconds: float) -> None:
        """Notes how long a turn takes; a slow one is forgotten slowly."""
        slowest = max(seconds, self._turn_seconds * 0.9)
        self._turn_seconds = max(slowest, _TURN_MINIMUM_SECONDS)

    def _measure(self, count: int) -> None:
        """Adapts how many entries are on hand to how quickly they are delivered."""
        self._window_finished += count
        now = self._monotonic()
        seconds = now - self._window_started
        if seconds >= _RATE_WINDOW_SECONDS:
            per_turn = self._window_finished / seconds * self._turn_seconds
            ahead = min(round(per_turn * _TURNS_AHEAD), self._policy.batch_limit * 4)
            self._begun_limit = self._pool.size + ahead
            self._on_hand = max(self._pool.size * _ON_HAND, self._begun_limit)
            self._window_started, self._window_finished = now, 0

    def _judge(self, finished: Finished) -> None:
        """Delivered, another try, or dead."""
        entry, error = finished.entry, finished.error
        if error is None:
            self._end(entry, EntryState.DELIVERED)
            return
        text = error_text(error)
        is_final = isinstance(error, DeliveryFailed) and error.is_final
        if is_final or entry.attempts >= self._policy.attempt_limit:
            self._bury(entry, text)
            return
        wait_ms = self._policy.back_off.wait_ms(entry.attempts, self._jitter)
        if isinstance(error, DeliveryFailed) and error.retry_after is not None:
            wait_ms = max(wait_ms, round(error.retry_after.total_seconds() * 1000))
        self._report.failed += 1
        _logger.warning(
            "entry %d (%s, %s) was not delivered, try %d, next in %d ms: %s",
            entry.id,
            entry.key,
            entry.topic,
            entry.attempts,
            wait_ms,
            text,
        )
        self._end(entry, EntryState.WAITING, wait_ms=wait_ms, error=text)

    def _bury(self, entry: Entry, text: str) -> None:
        self._report.dead += 1
        _logger.error(
            "entry %d (%s, %s) is dead after %s: %s",
            entry.id,
            entry.key,
            entry.topic,
            tries_text(entry.attempts),
            text,
        )
        self._end(entry, EntryState.DEAD, error=text)

    def _end(
        self, entry: Entry, state: EntryState, *, wait_ms: int = 0, error: str | None = None
    ) -> None:
        # With the token of a later claim by this same relay, if its lease had run out meanwhile.
        held = self._held.remove(entry.id) or entry
        assert held.token is not None  # Only claimed entries come here.
        keep_ms = round(self._policy.keep.total_seconds() * 1000)
        self._endings.append(EntryEnding(entry.id, held.token, state, wait_ms, keep_ms, error))

    # What is written, in one go.

    def _starts(self) -> list[EntryStart]:
        return self._held.next_starts(self._begun_limit)

    async def _write(self) -> None:
        """Tells the store what has ended, and what begins; then that begins."""
        starts = [] if self.is_stopping else self._starts()
        if starts and starts[0].is_alone:
            # If it ends this relay, nothing else has to wait for a lease.
            self._give_back(self._held.waiting(with_suspects=False))
        endings = self._endings
        if not endings and not starts:
            return
        asked = self._monotonic()
        try:
            decisions = await self._outbox.write([*endings, *starts])
        except StoreUnavailable:
            self._unsure.update(ending.id for ending in endings)
            raise
        # Forgotten only now: an answer that was lost is asked for again, and the token tells.
        self._endings, unsure, self._unsure = [], self._unsure, set()
        self._begin(starts, decisions[len(endings) :], asked)
        for ending, decision in zip(endings, decisions, strict=False):
            is_delivered = ending.state is EntryState.DELIVERED
            if decision is Decision.LOST and ending.id not in unsure:
                self._report_lost(ending.id, "it may be delivered again")
            elif is_delivered:
                self._report.delivered += 1
        if self._on_report is not None and endings:
            self._on_report(self.report)

    def _begin(self, starts: list[EntryStart], decisions: list[Decision], asked: float) -> None:
        """Hands to the pool what is still this relay's, with the try counted."""
        for start, decision in zip(starts, decisions, strict=True):
            if decision is Decision.LOST:
                self._drop(start.id)
            else:
                begun = self._held.begun(start.id, asked, is_alone=start.is_alone)
                self._pool.start(begun, self._held.may_begin)

    def _drop(self, number: int) -> None:
        if not self._held.lost(number):
            self._report_lost(number, "it is not delivered here")

    def _report_lost(self, number: int, consequence: str) -> None:
        self._report.lost += 1
        _logger.warning(
            "another relay or an operator has entry number %d by now: %s", number, consequence
        )

    # What is under way.

    async def _renew(self) -> None:
        """Extends the leases of what takes long, and stops what was lost before it began."""
        for token, numbers in self._held.due_renewals().items():
            asked = self._monotonic()
            decisions = await self._outbox.extend(token, numbers, self._lease_ms)
            answers = list(zip(numbers, decisions, strict=True))
            kept = [number for number, decision in answers if decision is not Decision.LOST]
            self._held.renewed(kept, asked)
            for number, decision in answers:
                if decision is Decision.LOST:
                    self._drop(number)

    # What is next.

    def _room(self) -> int:
        # Entries that wait to begin alone keep no place from the others.
        return self._on_hand - len(self._held) + self._held.suspect_count

    def _is_full(self) -> bool:
        # Asked for only when a worthwhile number can be taken: each claim is a commit. And nothing
        # is kept from other relays while one entry is delivered alone.
        return self._held.is_alone_next() or self._room() <= self._on_hand // 4

    async def _claim(self) -> bool:
        """Takes entries on; True when the walk over the aggregates is through and found nothing."""
        if self._is_full():
            return False
        asked = self._monotonic()
        # For free entries and for heads each: a claim may give both in full, so a pool may for a
        # moment have twice as many on hand, and neither kind ever waits for the other.
        claim = EntryClaim(
            self._mint_token(),
            min(self._room(), self._policy.batch_limit),
            self._lease_ms,
            self._after,
            self._policy.dead_blocks,
            # Of a claim whose answer is lost, what began with it would be counted for nothing.
            0 if self._outages else self._held.room_to_begin(self._begun_limit),
        )
        found = await self._outbox.claim(claim)
        was_start = not self._after
        self._after = found.after or ""
        for entry in self._held.take_on(found, asked):
            self._pool.start(entry, self._held.may_begin)
        for entry in found.entries:
            if self._is_deadly(entry):
                self._bury(entry, "its last try, alone, ended without a word from its relay")
        has_walked = not found.entries and found.after is None and was_start
        if has_walked:
            self._held.none_due()
        return has_walked

    def _is_deadly(self, entry: Entry) -> bool:
        """Whether it ended its last relay while nothing else was under way, and may end this one.

        Tries beside others do not bury: any of those may have ended the relay.
        """
        return (
            entry.open_try is OpenTry.ALONE
            and entry.attempts >= self._policy.attempt_limit
            and not self._held.is_under_way(entry.id)
        )

    def _rest_seconds(self, worked_seconds: float) -> float:
        poll_seconds = self._policy.poll.total_seconds()
        if self._outages:
            grown = _OUTAGE_SECONDS * float(2 ** min(self._outages - 1, 10))
            return min(grown, _OUTAGE_MAXIMUM_SECONDS) * (0.5 + self._jitter() / 2)
        if self._held:
            return max(0.0, min(poll_seconds, self._held.seconds_to_renewal()))
        # Spread, so that relays that were started together do not ask together for ever.
        rest = poll_seconds * (0.75 + self._jitter() / 2)
        return max(rest, worked_seconds * _REST_SHARE)

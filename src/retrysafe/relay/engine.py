"""The relay's engine: claim due entries, have them delivered, write what became of them.

Owns the order: an entry is claimed before it is delivered, and its ending is written after. A crash
in between repeats a delivery and never loses one. One code for threads and for event loops; it
speaks to the outbox port and to a crew. Which entries are due is the store's decision.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from retrysafe.core.model import Decision
from retrysafe.core.outbox import Entry, EntryClaim, EntryEnding, EntryState, error_text, tries_text
from retrysafe.core.outbox_ports import Outbox
from retrysafe.errors import DeliveryFailed, StoreUnavailable
from retrysafe.relay.policy import RelayPolicy
from retrysafe.relay.ports import Crew, Finished

_logger: Final = logging.getLogger("retrysafe")

# Entries on hand for each delivery at a time: the crew is not to wait for the store. A quick target
# gets as many as it takes in this time, so that commits are shared by many; a slow one gets no
# more than that, because an entry on hand is one that no other relay can deliver.
_ON_HAND: Final = 2
_ON_HAND_SECONDS: Final = 0.1
_RATE_WINDOW_SECONDS: Final = 0.05
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
    # Deliveries whose ending was refused: another relay had the entry by then.
    lost: int = 0
    # Entries given back because the relay stopped.
    returned: int = 0


class RelayEngine:
    """Delivers entries until it is stopped; any number of them may work on one store."""

    def __init__(
        self,
        outbox: Outbox,
        crew: Crew,
        policy: RelayPolicy,
        *,
        monotonic: Callable[[], float],
        mint_token: Callable[[], bytes],
        jitter: Callable[[], float] = random.random,
        on_report: Callable[[RelayReport], None] | None = None,
    ) -> None:
        self._outbox = outbox
        self._crew = crew
        self._policy = policy
        self._monotonic = monotonic
        self._mint_token = mint_token
        self._jitter = jitter
        self._on_report = on_report
        self._report = RelayReport()
        self._lease_ms = max(1, round(policy.lease.total_seconds() * 1000))
        # By number: the entries that the crew has, and when their lease is to be renewed.
        self._flying: dict[int, Entry] = {}
        self._renew_at: dict[bytes, float] = {}
        # Endings that the store has not heard of yet.
        self._endings: list[EntryEnding] = []
        # Those among them that it may have heard of: its answer was lost.
        self._unsure: set[int] = set()
        self._after = ""
        self._outages = 0
        self._window_started = monotonic()
        self._window_finished = 0
        self._on_hand = crew.size * _ON_HAND
        self.is_stopping = False

    @property
    def report(self) -> RelayReport:
        """A copy of the counts so far."""
        return replace(self._report)

    def stop(self) -> None:
        """Claims nothing more; what is under way is finished. Safe in a signal's function."""
        self.is_stopping = True
        self._crew.wake()

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
                await self._write_endings()
                await self._renew()
                if not self.is_stopping:
                    has_walked = await self._claim()
                self._outages = 0
            except StoreUnavailable as error:
                self._outages += 1
                _logger.warning("the relay's store does not answer: %s", error)
                if not self._flying and self._outages >= _LAST_TRIES:
                    # The leases free what the store could not be told of.
                    if self.is_stopping:
                        return
                    if until_idle:
                        raise
            is_busy = bool(self._flying or self._endings)
            if not is_busy and (self.is_stopping or (until_idle and has_walked)):
                return
            if self._outages or has_walked or self._is_full() or self.is_stopping:
                await self._crew.wait(self._rest_seconds(self._monotonic() - started))

    # What has ended.

    def _collect(self) -> None:
        if self.is_stopping:
            for entry in self._crew.withdraw():
                self._end(entry, EntryState.WAITING, is_counted=False)
                self._report.returned += 1
        ended = self._crew.finished()
        for finished in ended:
            self._judge(finished)
        self._measure(len(ended))

    def _measure(self, count: int) -> None:
        """Adapts how many entries are on hand to how quickly they are delivered."""
        self._window_finished += count
        now = self._monotonic()
        seconds = now - self._window_started
        if seconds >= _RATE_WINDOW_SECONDS:
            wanted = round(self._window_finished / seconds * _ON_HAND_SECONDS)
            least, most = self._crew.size * _ON_HAND, self._policy.batch_limit * 4
            self._on_hand = max(least, min(wanted, most))
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
        self,
        entry: Entry,
        state: EntryState,
        *,
        wait_ms: int = 0,
        is_counted: bool = True,
        error: str | None = None,
    ) -> None:
        # Of a later claim by this same relay, if its lease had run out meanwhile.
        held = self._flying.pop(entry.id, entry)
        assert held.token is not None  # Only claimed entries come here.
        keep_ms = round(self._policy.keep.total_seconds() * 1000)
        self._endings.append(
            EntryEnding(entry.id, held.token, state, wait_ms, is_counted, keep_ms, error)
        )

    async def _write_endings(self) -> None:
        """Tells the store in one go what has ended since the last time."""
        if not self._endings:
            return
        endings = self._endings
        try:
            decisions = await self._outbox.settle(endings)
        except StoreUnavailable:
            self._unsure.update(ending.id for ending in endings)
            raise
        # Forgotten only now: an answer that was lost is asked for again, and the token tells.
        self._endings, unsure, self._unsure = [], self._unsure, set()
        for ending, decision in zip(endings, decisions, strict=True):
            is_delivered = ending.state is EntryState.DELIVERED
            if decision is Decision.LOST and ending.id not in unsure:
                self._report.lost += 1
                _logger.warning(
                    "another relay has entry number %d by now: it may be delivered again",
                    ending.id,
                )
            elif is_delivered:
                self._report.delivered += 1
        if self._on_report is not None:
            self._on_report(self.report)

    # What is under way.

    async def _renew(self) -> None:
        """Extends the leases of deliveries that take long."""
        now = self._monotonic()
        held: dict[bytes, list[int]] = {}
        for entry in self._flying.values():
            assert entry.token is not None  # Only claimed entries fly.
            held.setdefault(entry.token, []).append(entry.id)
        self._renew_at = {token: at for token, at in self._renew_at.items() if token in held}
        for token, at in list(self._renew_at.items()):
            if at <= now:
                await self._outbox.extend(token, held[token], self._lease_ms)
                self._renew_at[token] = now + self._policy.lease.total_seconds() / 3

    # What is next.

    def _room(self) -> int:
        return self._on_hand - len(self._flying)

    def _is_full(self) -> bool:
        # Asked for only when a worthwhile number can be taken: each claim is a commit.
        return self._room() <= self._on_hand // 4

    async def _claim(self) -> bool:
        """Takes entries on; True when the walk over the aggregates is through and found nothing."""
        if self._is_full():
            return False
        asked = self._monotonic()
        # For free entries and for heads each: a claim may give both in full, so a crew may for a
        # moment have twice as many on hand, and neither kind ever waits for the other.
        claim = EntryClaim(
            self._mint_token(),
            min(self._room(), self._policy.batch_limit),
            self._lease_ms,
            self._after,
            self._policy.dead_blocks,
        )
        found = await self._outbox.claim(claim)
        was_start = not self._after
        self._after = found.after or ""
        if found.entries:
            self._renew_at[claim.token] = asked + self._policy.lease.total_seconds() / 3
        for entry in found.entries:
            self._take_on(entry)
        return not found.entries and found.after is None and was_start

    def _take_on(self, entry: Entry) -> None:
        if entry.attempts > self._policy.attempt_limit:
            # Every try so far ended with the relay itself, or nobody heard how; the next one may
            # end the next relay.
            self._flying[entry.id] = entry
            error = entry.last_error or "every try ended without a word from its relay"
            self._bury(entry, error)
            return
        is_flying = entry.id in self._flying
        self._flying[entry.id] = entry
        if not is_flying:
            self._crew.start(entry)

    def _rest_seconds(self, worked_seconds: float) -> float:
        poll_seconds = self._policy.poll.total_seconds()
        if self._outages:
            grown = _OUTAGE_SECONDS * float(2 ** min(self._outages - 1, 10))
            return min(grown, _OUTAGE_MAXIMUM_SECONDS) * (0.5 + self._jitter() / 2)
        if self._renew_at:
            due = min(self._renew_at.values()) - self._monotonic()
            return max(0.0, min(poll_seconds, due))
        # Spread, so that relays that were started together do not ask together for ever.
        rest = poll_seconds * (0.75 + self._jitter() / 2)
        return max(rest, worked_seconds * _REST_SHARE)

"""The consumer's loop: takes messages, has them handled, carries the verdicts out.

Owns the buffer, the lanes, what is held back, and the graceful stop. It runs in an event loop, also
for handlers in threads, which get a pool of their own: so that no handler can keep deadlines from
being prolonged. It must not know any broker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from retrysafe.consumers.broker import Broker
from retrysafe.consumers.deadlines import Deadline, Deadlines
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Outage, Verdict

_logger = logging.getLogger("retrysafe.consumers")

# Handles a message, in this loop or in a thread.
Handle = Callable[[Message, Deadline, int], Awaitable[Verdict]]

# After the broker did not answer: soon enough for people who watch, too rare to be a burden.
_AWAY_SECONDS: Final = 1.0
# For one batch of verdicts: a broker that hangs must not keep the others from being told.
_SETTLE_SECONDS: Final = 30.0
# Messages in the buffer for each that is handled: the next one is there when a place is free.
_BUFFERED_PER_PLACE: Final = 2
# Of a log, for each place: what waits behind a busy lane and leaves the room to other lanes.
_BEHIND_PER_PLACE: Final = 50
# After a fault of this package itself: long enough not to be a hot loop.
_UNKNOWN: Final = timedelta(seconds=30)
_GIVEN_BACK: Final = Verdict(Action.LEAVE, "the consumer is stopping")
_WITHDRAWN: Final = Verdict(Action.LEAVE, "another consumer gets it")
_OUT_OF_TURN: Final = Verdict(Action.LEAVE, "an earlier message of its lane comes back first")


@dataclass(slots=True)
class Counts:
    """What became of the messages so far."""

    received: int = 0
    handled: int = 0
    duplicates: int = 0
    left: int = 0
    retried: int = 0
    dropped: int = 0
    dead_lettered: int = 0
    # Deadlines that passed before the verdict: the broker delivers the message again.
    lost: int = 0
    # Verdicts that the broker did not take: it delivers the message again.
    unsettled: int = 0

    def add(self, verdict: Verdict) -> None:
        """Counts one settled message."""
        if verdict.action is Action.ACK and verdict.has_run:
            self.handled += 1
        elif verdict.action is Action.ACK:
            self.duplicates += 1
        elif verdict.action is Action.LEAVE:
            self.left += 1
        elif verdict.action is Action.RETRY:
            self.retried += 1
        elif verdict.action is Action.DROP:
            self.dropped += 1
        else:
            self.dead_lettered += 1


class ConsumerLoop:
    """Consumes from one broker until it is stopped."""

    def __init__(
        self,
        broker: Broker,
        handle: Handle,
        *,
        concurrency: int,
        stop_limit: timedelta,
        cut_delay: timedelta,
        on_change: Callable[[Counts], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cut_delay` is when a message comes back whose handler was cut short by the stop."""
        self._broker = broker
        self._handle = handle
        self._concurrency = concurrency
        self._stop_seconds = stop_limit.total_seconds()
        self._cut = Verdict(Action.LEAVE, "its handler was cut short", cut_delay)
        self._on_change = on_change
        self._monotonic = monotonic
        self.counts = Counts()
        self._deadlines = Deadlines(
            broker.extend, broker.deadline_seconds, monotonic, broker.renew_seconds
        )
        # Waiting for a place, in the order in which they came.
        self._waiting: deque[Message] = deque()
        # What is held back here, with how often that was so: a retry of its own is set.
        self._held: dict[Message, int] = {}
        self._outages: set[Message] = set()
        self._running: dict[asyncio.Task[None], Message] = {}
        # Lanes that have a message running or held.
        self._busy_lanes: set[str] = set()
        self._verdicts: list[tuple[Message, Verdict]] = []
        # How many verdicts the broker is being told.
        self._leaving = 0
        # Of a log: verdicts that the broker did not take, until they are told again.
        self._unsettled: dict[Message, tuple[Verdict, asyncio.TimerHandle]] = {}
        self._timers: dict[Message, asyncio.TimerHandle] = {}
        self._stopping = asyncio.Event()
        # Something has changed that the loop may wait for.
        self._news = asyncio.Event()
        self._has_verdicts = asyncio.Event()
        # One batch at a time: the last one of a stop must not overtake the one before it.
        self._settling = asyncio.Lock()
        # What ended the upkeep, which nothing may do.
        self._fault: BaseException | None = None

    def stop(self) -> None:
        """Takes no more messages; comes from the loop's own thread."""
        self._stopping.set()
        self._news.set()

    async def run(self) -> bool:
        """Consumes until `stop`; False when handlers were cut short."""
        self._broker.bind(self)
        upkeep = [
            asyncio.create_task(self._deadlines.run()),
            asyncio.create_task(self._settle_all()),
        ]
        for task in upkeep:
            task.add_done_callback(self._upkeep_ended)
        try:
            await self._take()
            has_ended_well = await self._wind_up()
        finally:
            for task in upkeep:
                task.cancel()
            for timer in (*self._timers.values(), *(each for _, each in self._unsettled.values())):
                timer.cancel()
            await asyncio.gather(*upkeep, return_exceptions=True)
        if self._fault is not None:
            raise self._fault
        return has_ended_well

    def _upkeep_ended(self, task: asyncio.Task[None]) -> None:
        """Stops the consumer: without its upkeep it would take messages and settle none."""
        if not task.cancelled():
            self._fault = task.exception()
            _logger.critical("the consumer stops: %r", self._fault, exc_info=self._fault)
            self.stop()

    # Taking messages.

    async def _take(self) -> None:
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        try:
            await self._take_until(stopped)
        finally:
            stopped.cancel()

    async def _take_until(self, stopped: asyncio.Future[Any]) -> None:
        while not self._stopping.is_set():
            self._news.clear()
            room = self._room()
            if room <= 0:
                await self._news.wait()
                continue
            receiving: asyncio.Future[Any] = asyncio.ensure_future(self._broker.receive(room))
            await asyncio.wait({receiving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # A poll is not cut short: what it brings would be lost until its deadline. But
                # nobody waits for it with messages that others could have.
                self._give_back_waiting()
            try:
                received = await receiving
            except Exception as error:
                _logger.warning("the broker did not give messages: %r", error)
                await self._rest(_AWAY_SECONDS)
                continue
            for message in received:
                self.counts.received += 1
                self._deadlines.add(message)
                self._waiting.append(message)
            if received:
                self._start_waiting()
                # Messages that are there must not keep what they wake from its turn.
                await asyncio.sleep(0)

    def _room(self) -> int:
        if self._outages:
            # Each delivery counts at the broker, which may dead-letter by that count: while no
            # message can be handled, none is taken.
            return 0
        used = len(self._running) + len(self._held) + len(self._waiting)
        # As long as the broker has not been told, the message is here.
        used += len(self._verdicts) + self._leaving + len(self._unsettled)
        if not self._broker.gives_back:
            # A key that fails, or is slow, must not keep the others from coming.
            behind = sum(each.lane in self._busy_lanes for each in self._waiting)
            used -= min(behind, self._concurrency * _BEHIND_PER_PLACE)
        return self._concurrency * _BUFFERED_PER_PLACE - used

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    # Having them handled.

    def _start_waiting(self) -> None:
        """Starts what may start: a place is free, and nothing of its lane is before it."""
        passed: deque[Message] = deque()
        passed_lanes: set[str] = set()
        while self._waiting and len(self._running) < self._concurrency:
            message = self._waiting.popleft()
            lane = message.lane
            if self._stopping.is_set() or (
                lane is not None and (lane in self._busy_lanes or lane in passed_lanes)
            ):
                passed.append(message)
                if lane is not None:
                    passed_lanes.add(lane)
                continue
            self._start(message)
        self._waiting.extendleft(reversed(passed))

    def _start(self, message: Message) -> None:
        if message.lane is not None:
            self._busy_lanes.add(message.lane)
        task = asyncio.create_task(self._run(message))
        self._running[task] = message
        task.add_done_callback(self._ended)

    async def _run(self, message: Message) -> None:
        tries = self._held.pop(message, 0)
        # It may have waited: the process may have stood still, or the broker been away.
        deadline = self._deadlines.of(message)
        if deadline.is_lost(self._monotonic()):
            self._outages.discard(message)
            self._forget_lost(message)
            return
        try:
            verdict = await self._handle(message, deadline, tries)
        finally:
            self._outages.discard(message)
            # What its attempt held is over; the message is this consumer's until it is settled.
            deadline.stops_renewing = None
        if deadline.is_lost(self._monotonic()):
            # Whatever was settled in the store is found by the next delivery.
            self._forget_lost(message)
        else:
            self._conclude(message, verdict, tries)

    def _conclude(self, message: Message, verdict: Verdict, tries: int) -> None:
        if self._holds(verdict):
            self._hold(message, verdict, tries)
        else:
            self._settle(message, verdict)

    def _ended(self, task: asyncio.Task[None]) -> None:
        message = self._running.pop(task)
        if task.cancelled():
            # By the stop, or by something that the handler met. Nobody knows how far it got: its
            # key is free when the lease ends.
            self._conclude(message, self._cut, 0)
        elif (error := task.exception()) is not None:
            _logger.error("a message was not handled: %r", error, exc_info=error)
            self._conclude(message, Verdict(Action.RETRY, f"not handled: {error!r}", _UNKNOWN), 0)
        if message not in self._held and message.lane is not None:
            self._busy_lanes.discard(message.lane)
        if not self._stopping.is_set():
            self._start_waiting()
        self._news.set()

    def _forget_lost(self, message: Message) -> None:
        self.counts.lost += 1
        _logger.warning("the broker may have given %s to another consumer", message.identity)
        self._deadlines.remove(message)
        self._give_back_lane(message)
        self._told()

    # Holding back.

    def _holds(self, verdict: Verdict) -> bool:
        if verdict.is_final or self._stopping.is_set():
            return False
        return verdict.outage is Outage.OURS or not self._broker.gives_back

    def _hold(self, message: Message, verdict: Verdict, tries: int) -> None:
        """Keeps the message here until its pause is over; its lane waits with it."""
        if not tries:
            _logger.warning("%s is held: %s", message.identity, verdict.reason)
        # Who waits for somebody else has not tried.
        self._held[message] = tries + (verdict.action is Action.RETRY)
        if verdict.outage is Outage.OURS:
            self._outages.add(message)
        self.counts.add(verdict)
        self._told()
        self._timers[message] = asyncio.get_running_loop().call_later(
            verdict.delay.total_seconds(), self._try_again, message
        )

    def _try_again(self, message: Message) -> None:
        if not self._stopping.is_set():
            del self._timers[message]
            self._start(message)

    def withdraw(self, is_meant: Callable[[Message], bool]) -> None:
        """Gives back what has not begun: its broker wants to give it to another consumer."""
        # What is held and has no timer any more is just about to begin.
        for message in [each for each in (*self._timers, *self._waiting) if is_meant(each)]:
            if message in self._timers:
                self._timers.pop(message).cancel()
                del self._held[message]
                self._outages.discard(message)
                if message.lane is not None:
                    self._busy_lanes.discard(message.lane)
            else:
                self._waiting.remove(message)
            self._verdicts.append((message, _WITHDRAWN))
        for message in [each for each in self._unsettled if is_meant(each)]:
            self._unsettled.pop(message)[1].cancel()
            self._verdicts.append((message, _WITHDRAWN))
        self._has_verdicts.set()
        self._news.set()

    # Carrying verdicts out.

    def _settle(self, message: Message, verdict: Verdict) -> None:
        self._verdicts.append((message, verdict))
        if not verdict.is_final:
            if verdict.action is Action.RETRY:
                _logger.warning("%s is retried: %s", message.identity, verdict.reason)
            self._give_back_lane(message)
        elif verdict.action is Action.DEAD_LETTER:
            _logger.error("%s is dead-lettered: %s", message.identity, verdict.reason)
        self._has_verdicts.set()

    def _give_back_lane(self, message: Message) -> None:
        """Gives back what waits behind a message that comes again: it must not overtake it."""
        if message.lane is None or not self._broker.gives_back:
            # A log's own order holds: what waits in it has its turn, or is withdrawn with it.
            return
        behind = [each for each in self._waiting if each.lane == message.lane]
        for each in behind:
            self._waiting.remove(each)
            self._verdicts.append((each, _OUT_OF_TURN))
            self._has_verdicts.set()

    async def _settle_all(self) -> None:
        """Carries out what has gathered; what comes meanwhile leaves together."""
        while True:
            await self._has_verdicts.wait()
            await self._settle_batch()

    async def _settle_batch(self) -> None:
        async with self._settling:
            self._has_verdicts.clear()
            batch, self._verdicts = self._verdicts, []
            if not batch:
                return
            self._leaving = len(batch)
            try:
                async with asyncio.timeout(_SETTLE_SECONDS):
                    unsettled = set(await self._broker.settle(batch))
            except Exception as error:
                _logger.warning("the broker did not settle %d messages: %r", len(batch), error)
                unsettled = {message for message, _ in batch}
            finally:
                self._leaving = 0
        for message, verdict in batch:
            if message in unsettled:
                self.counts.unsettled += 1
                if self._tells_again(message, verdict):
                    continue
            else:
                self.counts.add(verdict)
            self._deadlines.remove(message)
        self._told()

    def _tells_again(self, message: Message, verdict: Verdict) -> bool:
        """Keeps a verdict that was not taken: a log does not deliver the message again."""
        if self._broker.gives_back or self._stopping.is_set():
            return False
        timer = asyncio.get_running_loop().call_later(_AWAY_SECONDS, self._tell_again, message)
        self._unsettled[message] = (verdict, timer)
        return True

    def _tell_again(self, message: Message) -> None:
        verdict, _ = self._unsettled.pop(message)
        self._verdicts.append((message, verdict))
        self._has_verdicts.set()

    def _told(self) -> None:
        if self._on_change is not None:
            try:
                self._on_change(self.counts)
            except Exception:
                _logger.exception("on_change raised; messages are handled all the same")
        self._news.set()

    # Stopping.

    def _give_back_waiting(self) -> None:
        for message, timer in self._timers.items():
            timer.cancel()
            del self._held[message]
            self._verdicts.append((message, _GIVEN_BACK))
        self._timers.clear()
        self._verdicts += [(message, _GIVEN_BACK) for message in self._waiting]
        self._waiting.clear()
        for message, (verdict, timer) in self._unsettled.items():
            timer.cancel()
            self._verdicts.append((message, verdict))
        self._unsettled.clear()
        self._has_verdicts.set()

    async def _wind_up(self) -> bool:
        """Gives back what has not begun, lets the rest end within the limit."""
        self._give_back_waiting()
        running = dict(self._running)
        if running:
            await asyncio.wait(running, timeout=self._stop_seconds)
        cut = [task for task in running if not task.done()]
        for task in cut:
            task.cancel()
        if cut:
            _, deaf = await asyncio.wait(cut, timeout=1)
            self._verdicts += [(running[task], self._cut) for task in deaf]
            _logger.error("%d handlers were cut short by the stop", len(cut))
        await asyncio.sleep(0)
        await self._settle_batch()
        return not cut

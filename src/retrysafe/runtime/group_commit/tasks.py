"""Group commit among the tasks of one event loop.

Owns the queues between tasks and a store, and when the next batch leaves. A timer only sees to it
that no row waits behind a commit that hangs, where the store takes a second one beside it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    SettleAnswer,
    SettleKind,
    Settlement,
)
from retrysafe.core.ports import ClaimResult, SettleResult, Store
from retrysafe.errors import StoreError
from retrysafe.runtime.drive import hidden_task
from retrysafe.runtime.group_commit.direct import FEW_ROWS, HELD_UP_SECONDS, as_store_error

# Replays are not parted into smaller batches than this: what a batch costs by itself would show.
REPLAYS_SHARE: Final = 32
# Those of a batch of at least so many rows, with none beside it, go on in two halves. Fewer than
# half as many do not leave beside others, for the same reason.
SPLIT_ROWS: Final = 32


class _Batch:
    """One batch of tasks on its way: its rows, and who waits for them."""

    __slots__ = (
        "claimed",
        "claiming",
        "claims",
        "has_left",
        "is_held_up",
        "is_over",
        "rows",
        "settlements",
        "settling",
        "unwanted",
    )

    def __init__(self) -> None:
        self.has_left = False
        # Whether somebody has waited for it in vain.
        self.is_held_up = False
        # Whether the store is done with it, so that it keeps nobody waiting.
        self.is_over = False
        self.claims: list[ClaimRequest] = []
        self.claiming: list[asyncio.Future[Any]] = []
        # What became of the claims; empty while nobody knows.
        self.claimed: list[ClaimResult] = []
        # The keys of claims that nobody is going to run.
        self.unwanted: list[Key] = []
        self.settlements: list[Settlement] = []
        self.settling: list[asyncio.Future[Any]] = []
        # How many rows it has left with.
        self.rows = 0


class TaskGroupCommit:
    """Group commit among the tasks of one event loop."""

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        require_outside: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        # Raises in a task whose own transaction is the store's one writer. Asked here, because the
        # batch that a claim leaves in is committed by another task.
        self._require_outside = require_outside
        self._loop = loop
        self._new_future: Callable[[], asyncio.Future[Any]] = loop.create_future
        capabilities = store.capabilities
        self._batch_limit = capabilities.batch_limit
        self._batches_limit = capabilities.batches_in_flight
        # Apart, as the store takes them.
        self._claims: deque[tuple[ClaimRequest, asyncio.Future[Any]]] = deque()
        self._endings: deque[tuple[Settlement, asyncio.Future[Any]]] = deque()
        self._small_batches_limit = capabilities.small_batches_in_flight
        self._batches: dict[asyncio.Task[None], _Batch] = {}
        self._batches_count = 0
        # How many of them are held up, and the rows of the others.
        self._held_up_count = 0
        self._rows_under_way = 0
        # Whether a batch is about to leave, and takes along what comes until then.
        self._is_boarding = False
        # Whether the last batch was one of replays, as far as its first row tells.
        self._is_replaying = False
        # How many batches have left; and, while rows wait behind one, who sees whether it is stuck.
        self._departures = 0
        self._lookout: asyncio.TimerHandle | None = None

    def claim(self, request: ClaimRequest) -> asyncio.Future[ClaimAnswer]:
        """Claims a key in the next batch; raises `StoreUnavailable` inside of an atomic block."""
        if self._require_outside is not None:
            self._require_outside()
        future = self._new_future()
        try:
            self._claims.append((request, future))
            if not self._is_boarding:
                self._leave_or_wait()
        except BaseException:
            # The stack ends here, perhaps. Nobody is going to run what this would claim.
            if self._claims and self._claims[-1][1] is future:
                del self._claims[-1]
            raise
        return future

    def settle(self, settlement: Settlement) -> asyncio.Future[SettleAnswer]:
        """Ends an attempt in the next batch; cancelling the wait does not stop it."""
        future = self._new_future()
        try:
            self._endings.append((settlement, future))
            if not self._is_boarding:
                self._leave_or_wait()
        except BaseException:
            # Its caller hears of it, and goes on with it.
            if self._endings and self._endings[-1][1] is future:
                del self._endings[-1]
            raise
        return future

    def let_go(self, key: Key) -> None:
        """Has a claim given back when it is granted: whoever waited for it is leaving.

        It is told by this very object, because others may claim an equal key. One that is still
        here needs nothing: it does not leave without its caller.
        """
        for batch in self._batches.values():
            if any(request.key is key for request in batch.claims):
                batch.unwanted.append(key)

    def _leave_or_wait(self) -> None:
        may_leave = self._may_leave()
        if not may_leave:
            self._end_the_rest()
            if self._is_boarding:
                return  # For the rows behind one that has just ended.
            may_leave = self._may_leave()
        if may_leave:
            self._begin_batch()
        elif self._lookout is None and self._batches_count < self._batches_limit:
            self._lookout = self._loop.call_later(HELD_UP_SECONDS, self._look_out, self._departures)

    def _look_out(self, departures: int) -> None:
        """Lets those who wait leave beside a batch that is held up."""
        self._lookout = None
        if not (self._claims or self._endings) or self._is_boarding:
            return
        if self._departures == departures:
            # They are waited for once: what comes after this leaves beside them too.
            for batch in self._batches.values():
                self._pass_over(batch)
        self._go_on()

    def _go_on(self) -> None:
        """Those who wait leave; where that fails and nothing is under way, it is tried later."""
        try:
            self._leave_or_wait()
        except BaseException as error:
            try:
                if not self._batches_count and self._lookout is None:
                    self._lookout = self._loop.call_later(
                        HELD_UP_SECONDS, self._look_out, self._departures
                    )
            except BaseException:
                queued = [future for _, future in (*self._endings, *self._claims)]
                self._endings.clear()
                self._claims.clear()
                self._fail(queued, error)
            raise

    def _pass_over(self, batch: _Batch) -> None:
        if batch.has_left and not batch.is_held_up and not batch.is_over:
            batch.is_held_up = True
            self._held_up_count += 1
            self._rows_under_way -= batch.rows

    def _may_leave(self) -> bool:
        """Whether the next batch leaves now: as the only one, or beside others.

        Beside others when they have few rows, or when it is full itself or as large as they are.
        Replays share no flush that would be worth waiting for.
        """
        under_way = self._batches_count
        if under_way == self._held_up_count:
            return under_way < self._batches_limit
        if self._rows_under_way < FEW_ROWS and under_way < self._small_batches_limit:
            return True
        if under_way >= self._batches_limit:
            return False
        rows = len(self._claims) + len(self._endings)
        return (
            self._is_replaying
            or rows >= self._batch_limit
            or rows >= max(SPLIT_ROWS // 2, self._rows_under_way)
        )

    def _begin_batch(self) -> None:
        # It leaves in the next turn of the loop: what other ready tasks add comes along. It must
        # not begin at once: where the store answers at once as well, each batch would begin within
        # the one before it.
        batch = _Batch()
        carrying = self._carry(batch)
        self._batches_count += 1
        self._is_boarding = True
        try:
            task = hidden_task(carrying, self._loop)
            task.add_done_callback(self._carried)
            self._batches[task] = batch
        except BaseException:
            # Whoever asks for this may be where the stack ends. As if it had not: a task that was
            # begun all the same finds that its batch is over.
            self._batches_count -= 1
            self._is_boarding = False
            batch.is_over = True
            carrying.close()
            raise

    def _board(self, batch: _Batch) -> None:
        """Takes along what fits in; endings first, because each of them ends somebody's wait."""
        left = self._batch_limit
        if self._is_replaying and self._batches_count < self._batches_limit:
            # Half of them are answered here while the store reads the others.
            left = min(left, max(REPLAYS_SHARE, (len(self._claims) + 1) // 2))
        endings, settlements, settling = self._endings, batch.settlements, batch.settling
        # Each is taken out at the end: one that is in neither place would never be told.
        while endings and left:
            settlement, future = endings[0]
            # Written whether its caller still waits or not.
            settlements.append(settlement)
            settling.append(future)
            left -= 1
            del endings[0]
        waiting, claims, claiming = self._claims, batch.claims, batch.claiming
        while waiting and left:
            request, future = waiting[0]
            # A claim whose caller is gone would block its key for a lease with nobody to run it.
            if not future.done():
                claims.append(request)
                claiming.append(future)
                left -= 1
            del waiting[0]

    async def _carry(self, batch: _Batch) -> None:
        if batch.is_over:
            return
        self._is_boarding = False
        self._board(batch)
        rows = len(batch.claims) + len(batch.settlements)
        batch.has_left, batch.rows = True, rows
        self._departures += 1
        self._rows_under_way += rows
        try:
            if self._endings or self._claims:
                self._leave_or_wait()
        finally:
            if rows:
                await self._commit(batch)

    async def _commit(self, batch: _Batch) -> None:
        try:
            claimed, settled = await self._store.commit(batch.claims, batch.settlements)
            first = None if settled else claimed[0]
            self._is_replaying = (
                isinstance(first, ClaimAnswer) and first.decision is Decision.REPLAY
            )
            if len(settled) != len(batch.settling) or len(claimed) != len(batch.claiming):
                told, rows = len(settled) + len(claimed), batch.rows
                raise ValueError(f"the store gave {told} answers to {rows} rows")
            batch.claimed = claimed
        except BaseException as error:
            self._fail((*batch.settling, *batch.claiming), error)
            if not isinstance(error, StoreError):
                raise
            return
        try:
            self._end(batch)
        finally:
            # Whatever becomes of the next batch, these rows stand.
            await self._tell([*batch.settling, *batch.claiming], [*settled, *claimed])

    async def _tell(
        self, waiting: Sequence[asyncio.Future[Any]], answers: Sequence[ClaimResult | SettleResult]
    ) -> None:
        """Answers everybody, in such an order that they work while the store works.

        They take a while with what they are told, and nothing is sent in the meantime: a loop runs
        all who are ready before it starts what they have asked for, and uvloop writes after that.
        """
        told = turns = 0
        if self._is_boarding:
            # The next batch leaves in this turn, and they begin in the one after.
            turns = 1
        elif self._batches_limit > 1 and not self._batches_count and len(waiting) >= SPLIT_ROWS:
            # Nothing is on its way. Were all of them told at once, all would leave at once again:
            # the store would rest for as long as they work, and they for as long as it does. The
            # first half works in the next turn, what it has to write leaves in the one after, and
            # then the others begin.
            told, turns = len(waiting) // 2, 2
            _answer(waiting[:told], answers[:told])
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        finally:
            # Also when this task is cancelled: what the store has said stands.
            _answer(waiting[told:], answers[told:])

    def _end_the_rest(self) -> None:
        """Ends those whose end was not heard of, because the call back was broken off."""
        for task in [task for task in self._batches if task.done()]:
            self._carried(task)

    def _carried(self, task: asyncio.Task[None]) -> None:
        batch = self._batches.pop(task, None)
        if batch is None:
            return  # It never left.
        error = None if task.cancelled() else task.exception()
        if error is not None or task.cancelled():
            # Most were told already, unless there was no memory for that.
            self._fail((*batch.settling, *batch.claiming), error)
        self._end(batch)

    def _fail(self, waiting: Iterable[asyncio.Future[Any]], error: BaseException | None) -> None:
        """Tells those who were not that nobody knows what became of their rows."""
        # After the end of the loop nobody can be told, and trying to would hide the error.
        is_over = self._loop.is_closed()
        for future in waiting:
            if not future.done() and not is_over:
                future.set_exception(as_store_error(error or asyncio.CancelledError()))

    def _end(self, batch: _Batch) -> None:
        """Makes room for the next batch, which leaves if there is anything to take along.

        Called when the store is done with a batch, and again when everybody has been told: some
        may have let go of their claims in between.
        """
        if not batch.is_over:
            batch.is_over = True
            self._batches_count -= 1
            if batch.is_held_up:
                self._held_up_count -= 1
            elif batch.has_left:
                self._rows_under_way -= batch.rows
            else:
                self._is_boarding = False  # Cancelled before; its rows are still in the queue.
        if batch.unwanted and batch.claimed:
            self._give_back(batch)
            batch.unwanted.clear()
        if (self._endings or self._claims) and not self._is_boarding:
            self._go_on()

    def _give_back(self, batch: _Batch) -> None:
        """Releases what was granted to nobody, before the claims that wait here leave.

        Without a window, so that the key is as it was: no attempt counts that ran nothing. Where
        that would wipe out what earlier attempts have left, the lease frees the key instead. Were
        each of those released, the retries against a slow store would soon be all that are allowed.
        """
        for request, answer in zip(batch.claims, batch.claimed, strict=True):
            if (
                isinstance(answer, ClaimAnswer)
                and answer.decision is Decision.ADMIT
                and any(request.key is key for key in batch.unwanted)
            ):
                future = self._new_future()
                # Nobody waits for it; when it fails there is still the lease.
                future.add_done_callback(_look_at)
                release = Settlement(SettleKind.RELEASE, request.key, request.token)
                self._endings.append((release, future))

    async def drain(self) -> None:
        """Waits until everything that was submitted is answered."""
        while self._endings or self._claims or self._batches:
            self._end_the_rest()
            if self._batches:
                await asyncio.wait(set(self._batches))
            else:
                await asyncio.sleep(0)


def _answer(waiting: Sequence[asyncio.Future[Any]], answers: Sequence[Any]) -> None:
    for future, answer in zip(waiting, answers, strict=True):
        if future.done():
            continue  # Its caller was cancelled; the row stands all the same.
        if isinstance(answer, StoreError):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _look_at(future: asyncio.Future[Any]) -> None:
    """An error that nobody has looked at is told by the loop as a mistake."""
    if not future.cancelled():
        future.exception()

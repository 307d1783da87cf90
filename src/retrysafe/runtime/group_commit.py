"""Group commit: rows that arrive while a commit is under way leave together in the next one.

Owns the queue between callers and a store. No row waits for a timer to be merged: one that arrives
when nothing is under way leaves at once, so an idle system waits for nothing, and a busy one pays
one disk flush for many rows. Among tasks a timer only sees to it that none waits behind a commit
that hangs, where the store takes a second one beside it. A failed commit is told to every row in
it; nobody knows whether it happened, and asking again with the same token is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, Final

from retrysafe.core.keys import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    SettleAnswer,
    SettleKind,
    Settlement,
)
from retrysafe.core.ports import ClaimResult, Store
from retrysafe.errors import StoreError, StoreUnavailable, error_like
from retrysafe.runtime.drive import run_sync

Row = ClaimRequest | Settlement
_WAITING: Final = object()
# While fewer rows than this are on their way, the next one leaves at once if the store allows it.
# More of them wait for each other: small batches cost client and server as much as large ones.
FEW_ROWS: Final = 3
# A batch that takes longer than this is held up, by one connection perhaps, and others must not
# wait for it. Long against any flush, and short against any lease.
HELD_UP_SECONDS: Final = 0.05
# Replays are not parted into smaller batches than this: what a batch costs by itself would show.
REPLAYS_SHARE: Final = 32
_ADMIT: Final = Decision.ADMIT
_REPLAY: Final = Decision.REPLAY


class _Entry:
    """One row on its way, and the place where its thread waits."""

    __slots__ = ("batch", "gate", "has_left", "result", "row", "to_wake")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.result: Any = _WAITING
        # Set when this entry's thread is to carry the next batch; the entry is its first row.
        self.batch: list[_Entry] | None = None
        self.gate: threading.Lock | None = None
        # Set when this entry's thread was interrupted: it takes nothing over any more.
        self.has_left = False
        # Whom this entry's thread must wake before it leaves.
        self.to_wake: list[_Entry] | None = None


def _split(
    batch: Iterable[_Entry],
) -> tuple[list[ClaimRequest], list[_Entry], list[Settlement], list[_Entry]]:
    """Claims and settlements as the store takes them, each with those who wait for them."""
    claims: list[ClaimRequest] = []
    claiming: list[_Entry] = []
    settlements: list[Settlement] = []
    settling: list[_Entry] = []
    for entry in batch:
        row = entry.row
        if isinstance(row, ClaimRequest):
            claims.append(row)
            claiming.append(entry)
        else:
            settlements.append(row)
            settling.append(entry)
    return claims, claiming, settlements, settling


def _as_store_error(error: BaseException) -> StoreError:
    """A fresh error for one caller: a shared one would collect everybody's traceback."""
    if not isinstance(error, StoreError):
        fresh = StoreUnavailable(f"the commit broke off: {error!r}")
        fresh.__cause__ = error
        return fresh
    # It stands in for the original, with where that was raised and why. Chained to it instead,
    # one problem would be told twice in every traceback. Not through its constructor, which may
    # take anything in the class of somebody else's store.
    try:
        copied = error_like(error)
    except Exception:
        # Whatever is odd about its class, everybody who waits must be told.
        copied = StoreUnavailable(str(error), key=error.key)
    copied = copied.with_traceback(error.__traceback__)
    copied.__cause__ = error.__cause__
    return copied


class ThreadGroupCommit:
    """Group commit among threads: one of the waiting threads carries the batch for the others."""

    def __init__(self, store: Store) -> None:
        self._store = store
        capabilities = store.capabilities
        self._batch_limit = capabilities.batch_limit
        self._carriers_limit = capabilities.batches_in_flight
        self._lock = threading.Lock()
        self._queue: list[_Entry] = []
        self._carriers: set[_Entry] = set()

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key in the next batch."""
        answer: ClaimAnswer = self._submit(request)
        return answer

    async def settle(self, settlement: Settlement) -> SettleAnswer:
        """Ends or extends an attempt in the next batch."""
        answer: SettleAnswer = self._submit(settlement)
        return answer

    def _submit(self, row: Row) -> Any:
        entry = _Entry(row)
        try:
            self._take_part(entry)
        except BaseException:
            # A signal may raise in the main thread at any line. Whatever this thread owes to the
            # others by then is done before it goes, or all of them would wait for ever.
            self._leave(entry)
            raise
        result = entry.result
        if isinstance(result, StoreError):
            raise result
        return result

    def _take_part(self, entry: _Entry) -> None:
        """Returns when the row is answered; by then this thread may have carried a batch."""
        with self._lock:
            if len(self._carriers) < self._carriers_limit:
                entry.batch = [entry]
                self._carriers.add(entry)
            else:
                entry.gate = threading.Lock()
                entry.gate.acquire()
                self._queue.append(entry)
        if entry.gate is not None:
            # Released when the row is answered, or when this thread is to carry a batch.
            entry.gate.acquire()
            self._wake(entry)
        if entry.batch is not None:
            self._carry(entry.batch)
            self._leave(entry)

    def _carry(self, batch: list[_Entry]) -> None:
        try:
            if len(batch) == 1:
                self._carry_alone(batch[0])
                return
            claims, claiming, settlements, settling = _split(batch)
            claimed, settled = run_sync(self._store.commit(claims, settlements))
            for entry, claim_answer in zip(claiming, claimed, strict=True):
                entry.result = claim_answer
            for entry, settle_answer in zip(settling, settled, strict=True):
                entry.result = settle_answer
        except StoreError as error:
            self._fail(batch, error)
        except BaseException as error:
            # Also for an interrupt in this thread: the other rows' threads must be told.
            self._fail(batch, error)
            raise

    def _carry_alone(self, entry: _Entry) -> None:
        row = entry.row
        if isinstance(row, ClaimRequest):
            ((entry.result,), _) = run_sync(self._store.commit([row], []))
        else:
            (_, (entry.result,)) = run_sync(self._store.commit([], [row]))

    @staticmethod
    def _fail(batch: list[_Entry], error: BaseException) -> None:
        for entry in batch:
            entry.result = _as_store_error(error)

    def _leave(self, entry: _Entry) -> None:
        """Gives the queue to its first thread and wakes the batch, or takes back a queued row.

        It is called again when it was interrupted, so every step is harmless to repeat.
        """
        with self._lock:
            entry.has_left = True
            if entry in self._carriers:
                if not self._queue and entry.batch == [entry] and entry.result is not _WAITING:
                    self._carriers.discard(entry)  # Alone, as a single caller always is.
                    return
                self._hand_over(entry)
            elif entry in self._queue:
                self._queue.remove(entry)
        self._wake(entry)

    def _hand_over(self, entry: _Entry) -> None:
        batch = entry.batch or []
        for other in batch:
            if other.result is _WAITING:
                other.result = StoreUnavailable("the thread that carried it was interrupted")
        to_wake = [other for other in batch if other is not entry]
        carriers = self._carriers - {entry}
        following = self._queue[: self._batch_limit]
        if following:
            following[0].batch = following
            carriers.add(following[0])
            # Woken first, because its commit is what everybody else waits for.
            to_wake.append(following[0])
        rest = self._queue[self._batch_limit :]
        # One statement without a call: no signal can come between these stores.
        entry.batch, entry.to_wake, self._carriers, self._queue = None, to_wake, carriers, rest

    def _wake(self, entry: _Entry) -> None:
        """Wakes the next of those who are to be woken, and leaves the others to it.

        A chain, because threads that are woken all at once only queue for the interpreter, and
        the system switches between them for nothing.
        """
        while entry.to_wake:
            following = entry.to_wake[-1]
            if following.batch is None and len(entry.to_wake) > 1:
                with self._lock:
                    # Whoever was interrupted while it waited wakes nobody any more.
                    if not following.has_left:
                        # After a signal in between both have the list, and wake twice.
                        following.to_wake = entry.to_wake[:-1]
                        entry.to_wake = [following]
            gate = following.gate
            if gate is not None and gate.locked():
                with contextlib.suppress(RuntimeError):  # Somebody else was faster.
                    gate.release()
            entry.to_wake.pop()


class _Flight:
    """One batch of tasks on its way: its rows, and who waits for them."""

    __slots__ = (
        "claimed",
        "claiming",
        "claims",
        "has_left",
        "settlements",
        "settling",
        "unwanted",
    )

    def __init__(self) -> None:
        self.has_left = False
        self.claims: list[ClaimRequest] = []
        self.claiming: list[asyncio.Future[Any]] = []
        # What became of the claims; empty while nobody knows.
        self.claimed: list[ClaimResult] = []
        # The keys of claims that nobody is going to run.
        self.unwanted: list[Key] = []
        self.settlements: list[Settlement] = []
        self.settling: list[asyncio.Future[Any]] = []

    @property
    def rows(self) -> int:
        return len(self.claims) + len(self.settlements)


class TaskGroupCommit:
    """Group commit among the tasks of one event loop."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._new_future: Callable[[], asyncio.Future[Any]] = loop.create_future
        capabilities = store.capabilities
        self._batch_limit = capabilities.batch_limit
        self._flights_limit = capabilities.batches_in_flight
        # Apart, as the store takes them.
        self._claims: deque[tuple[ClaimRequest, asyncio.Future[Any]]] = deque()
        self._endings: deque[tuple[Settlement, asyncio.Future[Any]]] = deque()
        self._small_flights_limit = capabilities.small_batches_in_flight
        self._flights: dict[asyncio.Task[None], _Flight] = {}
        self._flights_count = 0
        self._rows_in_flight = 0
        # Whether a flight is about to leave, and takes along what comes until then.
        self._is_boarding = False
        # Whether the last batch was one of replays, as far as its first row tells.
        self._is_replaying = False
        # How many flights have left; and, while rows wait behind one, who sees whether it is stuck.
        self._departures = 0
        self._lookout: asyncio.TimerHandle | None = None

    def claim(self, request: ClaimRequest) -> asyncio.Future[ClaimAnswer]:
        """Claims a key in the next batch."""
        future = self._new_future()
        self._claims.append((request, future))
        if not self._is_boarding:
            self._launch_or_wait()
        return future

    def settle(self, settlement: Settlement) -> asyncio.Future[SettleAnswer]:
        """Ends or extends an attempt in the next batch; cancelling the wait does not stop it."""
        future = self._new_future()
        self._endings.append((settlement, future))
        if not self._is_boarding:
            self._launch_or_wait()
        return future

    def let_go(self, key: Key) -> None:
        """Has a claim given back when it is granted: whoever waited for it is leaving.

        It is told by this very object, because others may claim an equal key. One that is still
        here needs nothing: it does not leave without its caller.
        """
        for flight in self._flights.values():
            if any(request.key is key for request in flight.claims):
                flight.unwanted.append(key)

    def _launch_or_wait(self) -> None:
        if self._may_launch():
            self._launch()
        elif self._lookout is None and self._flights_count < self._flights_limit:
            self._lookout = self._loop.call_later(HELD_UP_SECONDS, self._look_out, self._departures)

    def _look_out(self, departures: int) -> None:
        """Lets those who wait leave beside a batch that is held up."""
        self._lookout = None
        if not (self._claims or self._endings) or self._is_boarding:
            return
        if self._departures == departures and self._flights_count < self._flights_limit:
            self._launch()
        else:
            self._launch_or_wait()

    def _may_launch(self) -> bool:
        """Whether the next batch leaves now: as the only one, or beside others.

        Beside others when they have few rows, or when it is full itself. Replays share no flush
        that would be worth waiting for.
        """
        flights = self._flights_count
        if not flights:
            return True
        if self._rows_in_flight < FEW_ROWS and flights < self._small_flights_limit:
            return True
        return flights < self._flights_limit and (
            self._is_replaying or len(self._claims) + len(self._endings) >= self._batch_limit
        )

    def _launch(self) -> None:
        # It leaves in the next turn of the loop: what other ready tasks add comes along. A loop
        # with eager tasks lets it leave before `create_task` returns, with what there is by then.
        flight = _Flight()
        self._flights_count += 1
        self._is_boarding = True
        task = self._loop.create_task(self._fly(flight))
        self._flights[task] = flight
        task.add_done_callback(self._landed)

    def _board(self, flight: _Flight) -> None:
        """Takes along what fits in; endings first, because each of them ends somebody's wait."""
        left = self._batch_limit
        if self._is_replaying and self._flights_count < self._flights_limit:
            # Half of them are answered here while the store reads the others.
            left = min(left, max(REPLAYS_SHARE, (len(self._claims) + 1) // 2))
        endings, settlements, settling = self._endings, flight.settlements, flight.settling
        while endings and left:
            settlement, future = endings.popleft()
            # Written whether its caller still waits or not.
            settlements.append(settlement)
            settling.append(future)
            left -= 1
        waiting, claims, claiming = self._claims, flight.claims, flight.claiming
        while waiting and left:
            request, future = waiting.popleft()
            # A claim whose caller is gone would block its key for a lease with nobody to run it.
            if not future.done():
                claims.append(request)
                claiming.append(future)
                left -= 1

    async def _fly(self, flight: _Flight) -> None:
        self._is_boarding = False
        self._board(flight)
        flight.has_left = True
        self._departures += 1
        rows = flight.rows
        self._rows_in_flight += rows
        if self._endings or self._claims:
            self._launch_or_wait()
        if rows:
            await self._commit(flight)

    async def _commit(self, flight: _Flight) -> None:
        try:
            claimed, settled = await self._store.commit(flight.claims, flight.settlements)
            first = None if settled else claimed[0]
            self._is_replaying = isinstance(first, ClaimAnswer) and first.decision is _REPLAY
            _require_as_many(settled, flight.settling)
            _require_as_many(claimed, flight.claiming)
            flight.claimed = claimed
        except BaseException as error:
            for future in (*flight.settling, *flight.claiming):
                if not future.done():
                    future.set_exception(_as_store_error(error))
            if not isinstance(error, StoreError):
                raise
            return
        _answer(flight.settling, settled)
        _answer(flight.claiming, claimed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        flight = self._flights.pop(task)
        self._flights_count -= 1
        if flight.has_left:
            self._rows_in_flight -= flight.rows
        else:
            self._is_boarding = False  # Cancelled before; its rows are still in the queue.
        if not task.cancelled():
            task.exception()  # Told to every row already.
        if flight.unwanted and flight.claimed:
            self._give_back(flight)
        if (self._endings or self._claims) and not self._is_boarding:
            self._launch_or_wait()

    def _give_back(self, flight: _Flight) -> None:
        """Releases what was granted to nobody, before the claims that wait here leave.

        Without a window, so that the key is as it was: no attempt counts that ran nothing. Where
        that would wipe out what earlier attempts have left, the lease frees the key instead. Were
        each of those released, the retries against a slow store would soon be all that are allowed.
        """
        for request, answer in zip(flight.claims, flight.claimed, strict=True):
            if (
                isinstance(answer, ClaimAnswer)
                and answer.decision is _ADMIT
                and any(request.key is key for key in flight.unwanted)
            ):
                future = self._new_future()
                # Nobody waits for it; when it fails there is still the lease.
                future.add_done_callback(_look_at)
                release = Settlement(SettleKind.RELEASE, request.key, request.token)
                self._endings.append((release, future))

    async def drain(self) -> None:
        """Waits until everything that was submitted is answered."""
        while self._endings or self._claims or self._flights:
            if self._flights:
                await asyncio.wait(set(self._flights))
            else:
                await asyncio.sleep(0)


def _require_as_many(answers: Sized, waiting: Sized) -> None:
    if len(answers) != len(waiting):
        raise ValueError(f"the store gave {len(answers)} answers to {len(waiting)} rows")


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


class DirectWriter:
    """Rows one by one, for a store that never waits: there is nothing to merge them behind."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key."""
        ((answer,), _) = await self._store.commit([request], [])
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def settle(self, settlement: Settlement) -> SettleAnswer:
        """Ends or extends an attempt."""
        (_, (answer,)) = await self._store.commit([], [settlement])
        if isinstance(answer, StoreError):
            raise answer
        return answer

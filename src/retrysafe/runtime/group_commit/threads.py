"""Group commit among threads: one of those who wait carries the batch for the others.

Owns the queue between threads and a store, who carries next and when. Nobody waits for a timer,
except behind a commit that hangs where the store takes a second one beside it, and behind a thread
that was broken off before it could hand over: whoever comes or waits sees that, and does it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from typing import Any, Final

from retrysafe.core.handlers import is_of_handler
from retrysafe.core.model import ClaimRequest, Settlement
from retrysafe.core.ports import Store
from retrysafe.errors import ClaimLost, StoreError, StoreUnavailable
from retrysafe.reentry import reentered
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit.direct import FEW_ROWS, HELD_UP_SECONDS, as_store_error

Row = ClaimRequest | Settlement
_WAITING: Final = object()


class _QueuedRow:
    """One row on its way, and the place where its thread waits."""

    __slots__ = ("batch", "gate", "here", "is_held_up", "result", "row", "to_wake")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.result: Any = _WAITING
        # Set when this entry's thread is to carry a batch, its own row included.
        self.batch: list[_QueuedRow] | None = None
        self.gate: threading.Lock | None = None
        # Held by its thread's `with` for as long as that takes part: everybody sees who is gone, by
        # a signal or at the end of the stack (decision 31).
        self.here = threading.Lock()
        # Set when somebody has waited in vain for the batch of this entry's thread.
        self.is_held_up = False
        # Whom this entry's thread must wake before it leaves.
        self.to_wake: list[_QueuedRow] | None = None


class ThreadGroupCommit:
    """Group commit among threads: one of the waiting threads carries the batch for the others."""

    def __init__(self, store: Store) -> None:
        self._store = store
        capabilities = store.capabilities
        self._batch_limit = capabilities.batch_limit
        self._carriers_limit = capabilities.batches_in_flight
        self._lock = threading.Lock()
        self._queue: list[_QueuedRow] = []
        self._carriers: set[_QueuedRow] = set()
        # Who is in here, by thread: a signal's handler may call from inside.
        self._inside: dict[int, _QueuedRow] = {}
        # Whether a fork has made this a copy of another process's.
        self._is_parents = False
        # How many batches have left.
        self._departures = 0
        # A store with one writer says whether this thread is that writer.
        has_one = hasattr(type(store), "refuse_reentry")
        self._refuse_reentry: Callable[[], None] | None = (
            getattr(store, "refuse_reentry") if has_one else None  # noqa: B009 — few stores have it.
        )

    def leave_to_parent(self) -> None:
        """Writes nothing more: this process is a fork of the one that runs the operations."""
        self._is_parents = True

    async def _submit(self, row: Row) -> Any:
        """Claims a key or ends an attempt in the next batch; raises the row's `StoreError`."""
        if self._is_parents:
            raise ClaimLost(
                "this process was forked while the operation ran, which is its parent's to end: "
                "nothing was stored. End a forked child with os._exit",
                key=row.key.text,
            )
        thread = threading.get_ident()
        inside = self._inside.get(thread)
        if inside is not None and inside.here.locked():
            # It would wait for a batch that this very thread carries, or is to carry next.
            raise reentered("a commit")
        if self._refuse_reentry is not None:
            # A signal's handler that came in the middle of another write, such as a step's: the
            # thread that carries this row would wait for the lock that this thread holds.
            self._refuse_reentry()
        entry = _QueuedRow(row)
        try:
            with entry.here:
                try:
                    self._inside[thread] = entry
                    self._take_part(entry)
                except BaseException:
                    # What this thread owes to the others by now is done before it goes, or by them
                    # when this fails, too: decision 31.
                    self._leave(entry)
                    raise
        finally:
            self._inside.pop(thread, None)
        result = entry.result
        if isinstance(result, StoreError):
            raise result
        return result

    claim = settle = _submit

    def _take_part(self, entry: _QueuedRow) -> None:
        """Returns when the row is answered; by then this thread may have carried a batch."""
        with self._lock:
            gone = self._relieve() if self._carriers else []
            if self._may_leave(len(self._queue) + 1, self._carriers):
                self._board(entry)
            else:
                entry.gate = threading.Lock()
                entry.gate.acquire()
                self._queue.append(entry)
        for other in gone:
            self._wake(other)
        if entry.gate is not None:
            self._wait(entry, entry.gate)
            self._wake(entry)
        if entry.batch is not None:
            self._carry(entry.batch)
            self._leave(entry)

    def _relieve(self) -> list[_QueuedRow]:
        """Hands over for those who are gone without it; gives those who have others to wake."""
        gone = [carrier for carrier in self._carriers if not carrier.here.locked()]
        if gone:
            self._queue = [entry for entry in self._queue if entry.here.locked()]
        for carrier in gone:
            self._hand_over(carrier)
        return gone

    def _may_leave(self, rows: int, carriers: Collection[_QueuedRow]) -> bool:
        """Whether a batch of so many rows leaves now: as the only one, or beside others.

        Beside others when they have few rows, or when it is full itself.
        """
        if not carriers:
            return True
        if len(carriers) >= self._carriers_limit:
            return False
        if rows >= self._batch_limit:
            return True
        # Those that are held up were waited for once; nobody knows when they end.
        return (
            sum(len(carrier.batch or ()) for carrier in carriers if not carrier.is_held_up)
            < FEW_ROWS
        )

    def _board(self, entry: _QueuedRow) -> None:
        """Has this entry's thread carry what waits, its own row among it."""
        others = self._queue.copy()
        if entry in others:
            others.remove(entry)
        batch = [entry, *others[: self._batch_limit - 1]]
        rest, carriers = others[self._batch_limit - 1 :], {*self._carriers, entry}
        departures = self._departures + 1
        # One statement without a call: no signal can come between these stores.
        entry.batch, self._carriers, self._queue, self._departures = (
            batch,
            carriers,
            rest,
            departures,
        )

    def _wait(self, entry: _QueuedRow, gate: threading.Lock) -> None:
        """Returns when the row is answered, or when this thread is to carry a batch."""
        departures = self._departures
        while not gate.acquire(timeout=HELD_UP_SECONDS):
            with self._lock:
                gone = self._relieve()
                if self._departures == departures and entry in self._queue:
                    # What is under way is held up; what waits behind it leaves beside it, now and
                    # from now on.
                    for carrier in self._carriers:
                        carrier.is_held_up = True
                    if len(self._carriers) < self._carriers_limit:
                        self._board(entry)
                departures = self._departures
            for other in gone:
                self._wake(other)
            if entry.batch is not None or entry.result is not _WAITING:
                return  # Whoever was to open the gate may be gone.

    def _carry(self, batch: list[_QueuedRow]) -> None:
        try:
            claiming: list[_QueuedRow] = []
            settling: list[_QueuedRow] = []
            claims: list[ClaimRequest] = []
            settlements: list[Settlement] = []
            for entry in batch:
                row = entry.row
                if isinstance(row, ClaimRequest):
                    claims.append(row)
                    claiming.append(entry)
                else:
                    settlements.append(row)
                    settling.append(entry)
            claimed, settled = run_sync(self._store.commit(claims, settlements))
            for entry, claim_answer in zip(claiming, claimed, strict=True):
                entry.result = claim_answer
            for entry, settle_answer in zip(settling, settled, strict=True):
                entry.result = settle_answer
        except BaseException as error:
            # Also for an interrupt in this thread: the other rows' threads must be told.
            self._fail(batch, error)
            # The last two have to do with where the store was called, and with nothing in it: what
            # was sent may stand.
            is_told = isinstance(error, StoreError | RecursionError | MemoryError)
            if not is_told or is_of_handler(error):
                raise

    @staticmethod
    def _fail(batch: list[_QueuedRow], error: BaseException) -> None:
        for entry in batch:
            entry.result = as_store_error(error)

    def _leave(self, entry: _QueuedRow) -> None:
        """Gives the queue to its first thread and wakes the batch, or takes back a queued row."""
        with self._lock:
            if entry in self._carriers:
                if not self._queue and entry.batch == [entry] and entry.result is not _WAITING:
                    self._carriers.discard(entry)  # Alone, as a single caller always is.
                    return
                self._hand_over(entry)
            elif entry in self._queue:
                self._queue.remove(entry)
        self._wake(entry)

    def _hand_over(self, entry: _QueuedRow) -> None:
        batch = entry.batch or []
        for other in batch:
            if other.result is _WAITING:
                other.result = StoreUnavailable("the thread that carried it was interrupted")
        to_wake = [other for other in batch if other is not entry]
        carriers = self._carriers - {entry}
        following = self._queue[: self._batch_limit]
        rest, departures = self._queue, self._departures
        leader, led = entry, None
        if following and self._may_leave(len(following), carriers):
            leader, led = following[0], following
            carriers.add(following[0])
            # Woken first, because its commit is what everybody else waits for.
            to_wake.append(following[0])
            rest, departures = self._queue[self._batch_limit :], departures + 1
        # One statement without a call: no signal can come between these stores.
        entry.batch, leader.batch, entry.to_wake, self._carriers, self._queue, self._departures = (
            None,
            led,
            to_wake,
            carriers,
            rest,
            departures,
        )

    def _wake(self, entry: _QueuedRow) -> None:
        """Wakes the next of those who are to be woken, and leaves the others to it.

        A chain, because threads that are woken all at once only queue for the interpreter, and
        the system switches between them for nothing.
        """
        while entry.to_wake:
            following = entry.to_wake[-1]
            # Whoever was interrupted while it waited wakes nobody any more.
            if following.batch is None and len(entry.to_wake) > 1 and following.here.locked():
                # After a signal in between both have the list, and wake twice.
                following.to_wake = entry.to_wake[:-1]
                entry.to_wake = [following]
            gate = following.gate
            if gate is not None and gate.locked():
                with contextlib.suppress(RuntimeError):  # Somebody else was faster.
                    gate.release()
            entry.to_wake.pop()

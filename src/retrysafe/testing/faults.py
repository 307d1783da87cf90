"""Faults on demand: a store that fails where a test tells it to.

Owns the moments at which a port call can fail. A fault before the effect is a store that could
not be reached; a fault after the effect is the ambiguous one, where the write stands and its
answer is lost. Code that is right survives both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from retrysafe.core.keys.key import Key
from retrysafe.core.listing import RecordPage, RecordQuery
from retrysafe.core.model import (
    NO_NOTE,
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    OperatorCommand,
    OperatorNote,
    Settlement,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.outbox.entries import (
    ClaimedEntries,
    EntryClaim,
    EntryCommand,
    EntryQuery,
    EntryWrite,
    Hints,
    StoredEntry,
)
from retrysafe.core.outbox.port import Outbox, outbox_of
from retrysafe.core.ports import (
    Capabilities,
    ClaimResult,
    ExtendResult,
    SettleResult,
    Store,
    Transaction,
)
from retrysafe.errors import StoreUnavailable
from retrysafe.testing.faulty_transaction import FaultyTransaction

T = TypeVar("T")


class Moment(StrEnum):
    """When a faulty call fails."""

    BEFORE = "before the effect"
    AFTER = "after the effect"


@dataclass(frozen=True, slots=True)
class PortCall:
    """One call of a store's method, as it was made."""

    # Counted from 1 over the store's whole life: over all methods, and over this method alone.
    number: int
    method_number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(slots=True)
class LoggedCall:
    """A call and what became of it; `fault` is None for a call that the wrapper let through."""

    call: PortCall
    fault: Moment | None = None
    # What the caller saw: an injected fault, or an error of the store itself.
    error: BaseException | None = None


MakeError = Callable[[PortCall], BaseException]


def store_unavailable(call: PortCall) -> StoreUnavailable:
    """The default error of a fault."""
    return StoreUnavailable(f"injected fault: call {call.number} ({call.method}) failed")


@dataclass(slots=True, eq=False)
class Fault:
    """A rule about which calls fail; made by `FaultyStore.fail`."""

    moment: Moment
    method: str | None
    number: int | None
    when: Callable[[PortCall], bool]
    make_error: MakeError
    times_left: int | None

    def matches(self, call: PortCall) -> bool:
        """Whether the call is one that must fail."""
        if self.times_left == 0 or self.method not in (None, call.method):
            return False
        counted = call.number if self.method is None else call.method_number
        return self.number in (None, counted) and self.when(call)


def _always(_: PortCall) -> bool:
    return True


class FaultyStore:
    """Any store, with faults injected at its port calls and a log of all of them.

    Without faults it behaves exactly as the store that it wraps.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._log: list[LoggedCall] = []
        self._counts: dict[str, int] = {}

    # What a test says.

    def fail(
        self,
        moment: Moment,
        *,
        method: str | None = None,
        number: int | None = None,
        when: Callable[[PortCall], bool] = _always,
        times: int | None = 1,
        error: MakeError = store_unavailable,
    ) -> Fault:
        """Lets calls fail from now on, until the fault was used `times` times (None: for ever).

        A call fails when everything given agrees with it: its `method`, its `number` (counted
        over this method when one is given, else over all calls, from 1), and the predicate. Of
        several faults that agree, the earliest is used. Raises `ValueError` for a method that a
        store does not have: such a fault would never happen, and the test would prove nothing.
        """
        if method is not None and method not in METHODS:
            raise ValueError(f"a store has no method {method!r}, only {', '.join(METHODS)}")
        fault = Fault(moment, method, number, when, error, times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Takes all faults away."""
        with self._lock:
            self._faults.clear()

    @property
    def log(self) -> list[LoggedCall]:
        """Every call so far, in the order in which they started."""
        with self._lock:
            return list(self._log)

    @property
    def calls(self) -> list[PortCall]:
        """The calls of the log, without what became of them."""
        return [logged.call for logged in self.log]

    # The port.

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped store."""
        return self._store.capabilities

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Makes a batch durable."""
        return await self._call("commit", self._store.commit, claims, settlements)

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases."""
        return await self._call("extend", self._store.extend, extensions, timeout_seconds)

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result."""
        return await self._call("record_step", self._store.record_step, write)

    async def read(self, key: Key, *, with_audit: bool = False) -> StoredKey | None:
        """The record of a key."""
        return await self._call("read", partial(self._store.read, with_audit=with_audit), key)

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending of a key."""
        return await self._call("last_outcome", self._store.last_outcome, key)

    async def list_records(self, query: RecordQuery) -> RecordPage:
        """Records for an operator."""
        return await self._call("list_records", self._store.list_records, query)

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """Records that nobody holds any more."""
        return await self._call("list_abandoned", self._store.list_abandoned, limit)

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """Those that have arguments."""
        return await self._call(
            "list_resumable", self._store.list_resumable, limit, after, operations
        )

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims an abandoned key for a worker."""
        return await self._call("take_over", self._store.take_over, request, held)

    async def operate(
        self, key: Key, command: OperatorCommand, note: OperatorNote = NO_NOTE
    ) -> Decision:
        """Applies an operator's command."""
        return await self._call("operate", self._store.operate, key, command, note)

    async def sweep(self, limit: int) -> SweepReport:
        """Removes what is past its windows."""
        return await self._call("sweep", self._store.sweep, limit)

    @property
    def outbox(self) -> FaultyOutbox:
        """The entries of the wrapped store, with the faults of its methods."""
        return FaultyOutbox(outbox_of(self._store), self._call)

    @property
    def join(self) -> Callable[[object], FaultyTransaction]:
        """Joins a user's transaction, with the faults of its methods.

        A store that cannot join any has no such method, and then this one has none either.
        """
        wrapped: Any = self._store
        join: Callable[[object], Transaction] = wrapped.join
        return lambda connection: FaultyTransaction(join(connection), self._call)

    async def close(self) -> None:
        """Closes the wrapped store."""
        await self._call("close", self._store.close)

    async def _call(
        self, name: str, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any
    ) -> T:
        logged, fault = self._begin(name, arguments)
        try:
            if fault is not None and fault.moment is Moment.BEFORE:
                raise fault.make_error(logged.call)
            answer = await method(*arguments)
            if fault is not None:
                raise fault.make_error(logged.call)
        except BaseException as error:
            logged.error = error
            raise
        return answer

    def _begin(self, name: str, arguments: tuple[Any, ...]) -> tuple[LoggedCall, Fault | None]:
        with self._lock:
            method_number = self._counts[name] = self._counts.get(name, 0) + 1
            call = PortCall(len(self._log) + 1, method_number, name, arguments)
            fault = next((fault for fault in self._faults if fault.matches(call)), None)
            if fault is not None and fault.times_left is not None:
                fault.times_left -= 1
            logged = LoggedCall(call, None if fault is None else fault.moment)
            self._log.append(logged)
            return logged, fault


class FaultyOutbox:
    """The outbox of a `FaultyStore`; its methods are named `outbox.claim` and so on."""

    def __init__(self, outbox: Outbox, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._outbox = outbox
        self._call = call

    @property
    def hints(self) -> Hints:
        """Those of the wrapped outbox; they never fail."""
        return self._outbox.hints

    async def claim(self, claim: EntryClaim) -> ClaimedEntries:
        """Takes due entries."""
        found: ClaimedEntries = await self._call("outbox.claim", self._outbox.claim, claim)
        return found

    async def write(self, writes: Sequence[EntryWrite]) -> list[Decision]:
        """Writes what became of entries, and what begins."""
        decisions: list[Decision] = await self._call("outbox.write", self._outbox.write, writes)
        return decisions

    async def extend(self, token: bytes, ids: Sequence[int], lease_ms: int) -> list[Decision]:
        """Extends leases."""
        decisions: list[Decision] = await self._call(
            "outbox.extend", self._outbox.extend, token, ids, lease_ms
        )
        return decisions

    async def read(self, number: int) -> StoredEntry | None:
        """One entry."""
        found: StoredEntry | None = await self._call("outbox.read", self._outbox.read, number)
        return found

    async def list_entries(self, query: EntryQuery) -> list[StoredEntry]:
        """Entries for an operator."""
        found: list[StoredEntry] = await self._call(
            "outbox.list_entries", self._outbox.list_entries, query
        )
        return found

    async def operate(self, number: int, command: EntryCommand) -> Decision:
        """Applies an operator's command."""
        decision: Decision = await self._call(
            "outbox.operate", self._outbox.operate, number, command
        )
        return decision


# Every method of the ports, by name.
METHODS: Final = (
    "commit",
    "extend",
    "record_step",
    "read",
    "last_outcome",
    "list_records",
    "list_abandoned",
    "list_resumable",
    "take_over",
    "operate",
    "sweep",
    "close",
    "outbox.claim",
    "outbox.write",
    "outbox.extend",
    "outbox.read",
    "outbox.list_entries",
    "outbox.operate",
    "transaction.begin",
    "transaction.keep",
    "transaction.undo",
    "transaction.lock",
    "transaction.look",
    "transaction.claim",
    "transaction.sees_changes",
    "transaction.settle",
    "transaction.stage",
    "transaction.fate",
    "transaction.record_step",
    "transaction.step_fate",
)

if TYPE_CHECKING:

    def _is_a_store(store: FaultyStore) -> Store:
        """Fails the type check when the port changes and the wrapper does not."""
        return store

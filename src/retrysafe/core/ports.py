"""The ports: what the engine needs from the outside, as narrow protocols.

All of them are `async def`, and all of them come in two kinds. A blocking implementation never
suspends, so a flow over it can be driven by one `send(None)` and needs no event loop; an asyncio
implementation suspends as usual. The engine cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from retrysafe.core.events import Reporter
from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.listing import RecordPage, RecordQuery
from retrysafe.core.model import (
    NO_NOTE,
    ClaimAnswer,
    ClaimRequest,
    Decision,
    ExtendAnswer,
    Extension,
    OperatorCommand,
    OperatorNote,
    SettleAnswer,
    Settlement,
    StagedEntry,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
    plain_members,
)
from retrysafe.core.one_call import OneCall
from retrysafe.core.run_times import RunTimes
from retrysafe.errors import StoreError

if TYPE_CHECKING:
    from retrysafe.core.attempt import Attempt


@plain_members
class Waits(Enum):
    """How a store's methods behave while they wait for something outside the process."""

    # They never suspend, so nobody keeps a time-out for them; one that does says SUSPENDING.
    NEVER = "never"
    BLOCKING = "blocking"
    SUSPENDING = "suspending"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the layers above a store need to know about it."""

    waits: Waits
    # How many rows one commit should carry at most, and how many commits may be under way.
    batch_limit: int = 64
    batches_in_flight: int = 1
    # How many commits may be under way while they carry a few rows only. Merging saves nothing
    # then, and a row that waits for a rival's commit is late for nothing.
    small_batches_in_flight: int = 0
    # Whether it writes the outbox entries of a settlement, and has an `outbox` to relay them from.
    has_outbox: bool = False
    # Whether an open transaction keeps every other one from writing anything.
    has_one_writer: bool = False


ClaimResult = ClaimAnswer | StoreError
SettleResult = SettleAnswer | StoreError
ExtendResult = ExtendAnswer | StoreError


class Store(Protocol):
    """A place for records; `retrysafe.testing.StoreSuite` is its definition.

    Every method may raise `StoreUnavailable`. For a write it means that nobody knows whether the
    write happened; repeating it with the same token is always safe.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Makes a batch durable and answers each row in order.

        A row that the store cannot take is answered with its own `StoreError`, and the others
        stand. Rows for one key are applied as if one after the other, settlements before claims: an
        outcome that is there must not lose to a takeover beside it.
        """

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases and answers each in order; a row that cannot be taken as in `commit`.

        No token of a key comes twice in one call: an attempt is renewed by one heartbeat.
        A healthy owner loses its key when this comes late. So it waits for nothing that is not the
        file or the server itself: neither for a `commit` under way, nor for a connection of a pool
        that is used up. When the time is over it raises `StoreUnavailable`, and what it waited for
        is given up: the next call goes over a fresh connection.
        """

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a finished step's result, if the token still holds the key.

        The first result stands: repeating it is APPLY, and another one is LOST.
        """

    async def read(self, key: Key, *, with_audit: bool = False) -> StoredKey | None:
        """The record of a key with its steps, its arguments and the outcome that a replay gives.

        Only a succeeded or failed record has that outcome. With the audit, the outcomes are instead
        all that are stored of the key, oldest first. Finding those may cost a scan, and only people
        look at them: an operation and a client that polls read without.
        """

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending that is stored of the key's present life; none of earlier lives.

        An operation asks for it, so it is found without a scan.
        """

    async def list_records(self, query: RecordQuery) -> RecordPage:
        """Records for an operator, newest claim first, without steps and audit.

        A store that cannot search everything within `query.seconds` says in the page what it left.
        """

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """At most `limit` pending records whose lease has ended, without steps and audit.

        A large store may look at its records in several statements, and show one that was settled
        meanwhile.
        """

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """At most `limit` abandoned records of these operations, with their arguments.

        Those that have arguments, by their digests, and behind the digest `after` only: a walk over
        all of them is not held up by some that cannot be resumed. Without operations there is none.
        """

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims a key that is abandoned by the owner of the token `held`; LOST if it is not.

        The arguments of the request are not looked at: those that are stored stay.
        """

    async def operate(
        self, key: Key, command: OperatorCommand, note: OperatorNote = NO_NOTE
    ) -> Decision:
        """Applies an operator's command, and keeps who gave it and why with the change.

        Refused for a key that is no longer what `note.seen` says.
        """

    async def sweep(self, limit: int) -> SweepReport:
        """Removes at most `limit` outlived keys and `limit` outcomes past their audit window.

        And at most `limit` arguments of operations that have ended: nobody needs them any more.
        """

    async def close(self) -> None:
        """Gives back what the store holds; closing twice is harmless."""


@runtime_checkable
class ExtendsAnywhere(Protocol):
    """A suspending store that renews leases in any event loop, also beside its user's.

    Then a loop that is busy, or blocked, does not hold up the renewals of what runs on it.
    """

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """As `Store.extend`, over connections of the running loop."""

    async def end_extending(self) -> None:
        """Closes what `extend` has opened in the running loop, which ends."""


class Writer(Protocol):
    """One row at a time for the engine; group commit merges them on the way to the store."""

    def claim(self, request: ClaimRequest) -> Awaitable[ClaimAnswer]:
        """Claims a key; raises the row's `StoreError`."""

    def settle(self, settlement: Settlement) -> Awaitable[SettleAnswer]:
        """Ends an attempt; raises the row's `StoreError`."""


class Fate(Enum):
    """What became of an outcome that was written in a user's transaction."""

    STANDS = "stands"
    OPEN = "open"
    UNDONE = "undone"


class Transaction(Protocol):
    """A user's open transaction that retrysafe has joined.

    What is written here commits or rolls back together with the user's own writes. Errors of the
    database reach the user as the driver's own, because the user's transaction is what they end.
    """

    @property
    def waits(self) -> Waits:
        """Whether its methods block or suspend."""

    async def begin(self) -> None:
        """Marks the point that `undo` returns to; raises `TransactionMissing`."""

    async def keep(self) -> None:
        """Hands what was written since `begin` to the user's transaction."""

    async def undo(self) -> None:
        """Takes back everything since `begin`, the user's writes and the lock included."""

    async def lock(self, key: Key, wait_seconds: float | None) -> bool:
        """Keeps other transactions off the key until this one ends; None asks without waiting.

        After a wait that ran out, only `undo` may follow.
        """

    async def look(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would be answered by what others have committed; writes nothing."""

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key under the lock; raises `DigestCollision`."""

    async def sees_changes(self) -> bool:
        """Whether asking again can show what others commit while this transaction is open."""

    async def settle(self, settlement: Settlement) -> Decision:
        """Ends an attempt: APPLY, CONFIRM or LOST."""

    async def stage(self, entries: Sequence[StagedEntry]) -> None:
        """Writes outbox entries that belong to no operation."""

    async def fate(self, settlement: Settlement) -> Fate:
        """What became of a settlement that was applied here, seen from outside."""

    async def record_step(self, write: StepWrite) -> Decision:
        """Records a step if the token holds the key, and locks the key: APPLY or LOST.

        LOST also when the step is recorded, whatever its result: what was done for it in the user's
        transaction has been done before.
        """

    async def step_fate(self, write: StepWrite) -> Fate:
        """What became of a step that was recorded here, seen from outside."""


class SoleWriter(Protocol):
    """What a user's transaction can be asked as well, where the store has one writer."""

    def is_open(self) -> bool:
        """Whether it has not ended; asked from any thread, and answered without a wait."""


class Joins(Protocol):
    """A store that can work inside a user's transaction."""

    def join(self, connection: object) -> Transaction:
        """The transaction of a user's connection; raises `InvalidInput` for unknown kinds."""


class Signal(Protocol):
    """A one-time wake-up for one waiter."""

    def set(self) -> None:
        """Wakes the waiter, now or when it starts to wait."""

    async def wait(self, timeout_seconds: float | None) -> bool:
        """Waits for `set`; False when the time ran out first."""


class LocalClock(Protocol):
    """Local time and local waiting. No decision about a record uses this clock."""

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps, and that counts a suspension of the machine."""

    async def sleep(self, seconds: float) -> None:
        """Waits."""

    def signal(self) -> Signal:
        """A fresh signal."""


class Renewals(Protocol):
    """Keeps the leases of running attempts alive."""

    def add(self, lease: Lease) -> None:
        """Starts renewing."""

    def remove(self, lease: Lease) -> None:
        """Stops renewing; unknown leases are ignored."""


class Background(Protocol):
    """Finishes what a cancelled caller left behind."""

    def finish(self, flow: Coroutine[Any, Any, None], abandon: Callable[[str], None]) -> None:
        """Runs the flow to its end without the caller.

        When that cannot be done the flow is closed, and `abandon` is called with the reason: what
        is lost by then must be told.
        """


class WorkerPool(Protocol):
    """Runs flows beside the caller, a few at a time."""

    @property
    def size(self) -> int:
        """How many run at the same time."""

    @property
    def has_given_up(self) -> bool:
        """Whether what is under way was cancelled, because nobody waits for it any more."""

    async def wait_for_room(self, timeout_seconds: float) -> bool:
        """Waits until there may be room, or the pool is being stopped; False when time ran out."""

    async def has_room(self) -> bool:
        """Waits until one more may start; False when the pool is being stopped."""

    def start(self, flow: Coroutine[Any, Any, None]) -> None:
        """Runs the flow in the room that was just asked for, or raises and keeps the room free.

        A flow raises nothing but what ends a thread or a task, and has told of that before.
        """


class Lock(Protocol):
    """Mutual exclusion for state shared by callers of one process."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None: ...


class Executor(Protocol):
    """What differs between threads and the tasks of an event loop.

    How an operation and its steps are called, how a flow of the core is driven, and how a user's
    connection is joined.
    """

    @property
    def step_lock(self) -> Lock:
        """Guards the steps of attempts, which an operation may take in threads of its own."""

    def perform(
        self, attempt: Attempt, operation: Callable[..., Any], args: Any, kwargs: Any
    ) -> Awaitable[Any]:
        """Calls an operation as the current attempt; without arguments it gets the attempt.

        The attempt is told of the call before it is made, and of how it ended.
        """

    def perform_step(self, call: Callable[..., Any], made: OneCall) -> Awaitable[Any]:
        """Makes the call of a step; what can be awaited is awaited."""

    def drive(self, flow: Coroutine[Any, Any, Any], waits: Waits | None = None) -> Any:
        """Runs a flow to its end, or gives it back to be awaited where flows suspend.

        `waits` says how the transaction waits that the flow works in; None for one without.
        """

    def join(self, connection: object) -> Transaction:
        """The transaction that an attempt completes in; raises `InvalidInput`."""

    def join_step(self, connection: object) -> Transaction:
        """The transaction of a step or of an atomic block; raises `InvalidInput`."""

    def current(self) -> object:
        """The attempt that the running code belongs to, as far as its context tells."""

    def who(self) -> object:
        """Who calls, where a signal's handler could come to wait for itself; None elsewhere."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything that the core is given by the runtime, for one process or one event loop."""

    # Last outcomes, steps, takeovers and confirmed leases; claims and endings go to the writer.
    store: Store
    writer: Writer
    clock: LocalClock
    # Guards the flights and the replay cache.
    lock: Lock
    renewals: Renewals
    background: Background
    executor: Executor
    report: Reporter
    # How long operations took. Outlives the ports: a loop that ends takes no experience with it.
    run_times: RunTimes
    mint_token: Callable[[], bytes]
    # Who holds a claim, for operators. Another one after a fork, as all ports are.
    owner: str

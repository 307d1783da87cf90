"""Leading a flight in atomic mode: transaction, claim, operation and outcome from one hand.

Owns the order around the user's transaction: it is opened for a leader only, the outcome counts
once the transaction has committed, and every other way out frees the key. It must not know
databases, threads or event loops; it speaks to ports.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Generic, Protocol, TypeVar

from retrysafe.core.atomic.block import AtomicBlock
from retrysafe.core.call import Answer, Call
from retrysafe.core.events import EventKind
from retrysafe.core.flights import Flight, Flights, Phase
from retrysafe.core.keys.canonical import Part
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Ending, Payload, SettleKind
from retrysafe.core.outbox.staging import Staging
from retrysafe.core.ports import Ports
from retrysafe.core.run import Runner
from retrysafe.core.settings import Settings
from retrysafe.core.settle import Settler
from retrysafe.core.values import codec
from retrysafe.errors import KeyReused, OperationInFlight, StoreUnavailable

_KINDS: Final = {Ending.SUCCEEDED: SettleKind.COMPLETE, Ending.FAILED: SettleKind.FAIL}

C = TypeVar("C")


class InTransaction(Generic[C]):
    """What is written on `connection` commits with the outcome, or is rolled back with it."""

    __slots__ = ("_block", "connection")

    def __init__(self, block: AtomicBlock, connection: C) -> None:
        self._block = block
        self.connection = connection

    @property
    def key(self) -> Key:
        """The key of the run."""
        return self._block.call.key

    @property
    def outbox(self) -> Staging:
        """Takes entries that are committed with the outcome, and delivered after it."""
        return self._block.outbox

    def child_key(self, *parts: Part) -> str:
        """The key for a call downstream; raises `SecretMissing`."""
        return self._block.child_key(*parts)


class AtomicAttempt(InTransaction[C]):
    """One run of an operation in a transaction: everything written on `connection` is part of it.

    The transaction is committed with the outcome, or rolled back; the operation does neither.
    """

    __slots__ = ()

    @property
    def operation(self) -> str:
        """What the record is listed under."""
        return self._block.call.operation

    @property
    def number(self) -> int:
        """Which attempt this is; one that was rolled back does not count."""
        return self._block.attempt


AtomicInvoke = Callable[[AtomicAttempt[Any]], Awaitable[Any]]


class Transacting(Protocol):
    """Where the transactions of atomic runs come from, and what their errors mean."""

    def open(self) -> AbstractAsyncContextManager[Any]:
        """A connection with an open transaction: committed at the end, rolled back on errors."""

    def is_outage(self, error: Exception) -> bool:
        """Whether the database could not be reached or gave up, so that a retry can help."""


class _Undone(Exception):
    """Rolls a transaction back whose value frees the key; only the transaction sees it."""


class AtomicRunner:
    """Leads flights whose claim, writes and outcome are one transaction of the user."""

    __slots__ = (
        "_flights",
        "_monotonic",
        "_ports",
        "_remember",
        "_report",
        "_settings",
        "payload_of",
    )

    def __init__(
        self,
        ports: Ports,
        settings: Settings,
        flights: Flights,
        runner: Runner,
        settler: Settler,
    ) -> None:
        self._ports = ports
        self._settings = settings
        self._monotonic = ports.clock.monotonic
        self._report = ports.report
        self._flights = flights
        self._remember = runner.remember
        # How the operation ended that returned a value, and what is stored of it.
        self.payload_of = settler.payload_of

    async def lead(
        self, flight: Flight, call: Call, invoke: AtomicInvoke, transacting: Transacting
    ) -> Answer[Any]:
        """The outcome of the key's one run; raises as a block does, and what the operation raises.

        Errors of the database that a retry can cure are raised as `StoreUnavailable`: whatever
        became of the transaction, its key tells.
        """
        flight.is_atomic = True
        run = _AtomicRun(self, flight, call, invoke, transacting)
        asked = self._monotonic()
        try:
            await run.transact()
        except _Undone:
            pass  # The block has told that the key is free.
        except Exception as error:
            self._share_error(flight, run, error)
            if run.error is error or not transacting.is_outage(error):
                if run.has_left:
                    # The commit failed, after the block had told of an outcome.
                    self._report(EventKind.RELEASED, call, run.attempt)
                raise
            raise self._unavailable(flight, call, error) from error
        if run.payload is not None and run.ending is not Ending.RELEASED:
            self._remember(call, flight, run.payload, run.attempt, asked, run.remaining_ms)
        return Answer(run.value, run.is_replay, run.attempt)

    def _share_error(self, flight: Flight, run: _AtomicRun, error: Exception) -> None:
        """Tells the followers what holds for them, too."""
        if run.error is error:
            limit_bytes = run.call.policy.outcome_limit_bytes
            flight.share(codec.encode_failure(error, limit_bytes), run.attempt, is_released=True)
        elif isinstance(error, KeyReused):
            flight.first_operation = error.first_operation or ""
        elif isinstance(error, OperationInFlight):
            seconds = error.retry_after.total_seconds()
            flight.conflict_ends_monotonic = self._monotonic() + seconds

    def _unavailable(self, flight: Flight, call: Call, error: Exception) -> StoreUnavailable:
        flight.outage = f"the transaction did not end well: {codec.message_of(error)}"
        self._report(EventKind.STORE_UNAVAILABLE, call, detail=flight.outage)
        return StoreUnavailable(flight.outage, key=call.key.text)

    def started(self, flight: Flight, trace: str) -> None:
        """The key is claimed: followers no longer wait for the claim."""
        flight.began_monotonic = self._monotonic()
        flight.trace = trace
        self._flights.enter(flight, Phase.RUNNING)

    def block(self, call: Call, connection: Any) -> AtomicBlock:
        """The block in that transaction; raises `InvalidInput` for unknown connections."""
        transaction = self._ports.executor.join_step(connection)
        return AtomicBlock(call, transaction, self._ports, self._settings)


class _AtomicRun:
    """One pass through the transaction, and what is known of it so far."""

    def __init__(
        self,
        lead: AtomicRunner,
        flight: Flight,
        call: Call,
        invoke: AtomicInvoke,
        transacting: Transacting,
    ) -> None:
        self._lead = lead
        self._flight = flight
        self._invoke = invoke
        self._transacting = transacting
        self.call = call
        self.attempt = 0
        self.is_replay = False
        self.value: Any = None
        self.ending = Ending.SUCCEEDED
        self.payload: Payload | None = None
        self.remaining_ms = 0
        # Whether the block is over and kept: only the commit is left.
        self.has_left = False
        # What the operation itself raised.
        self.error: Exception | None = None

    async def transact(self) -> None:
        async with self._transacting.open() as connection:
            block = self._lead.block(self.call, connection)
            await block.enter()
            self.attempt = block.attempt
            try:
                if block.replayed:
                    self._replay(block)
                else:
                    await self._operate(block, connection)
            except BaseException as error:
                await block.leave(error)
                raise
            await block.leave(None)
            self.has_left = not block.replayed

    def _replay(self, block: AtomicBlock) -> None:
        self.is_replay = True
        self._flight.trace = block.replayed_trace
        self.value = block.value
        self.payload = block.replayed_payload
        self.remaining_ms = block.replayed_ms

    async def _operate(self, block: AtomicBlock, connection: Any) -> None:
        call, lead = self.call, self._lead
        lead.started(self._flight, call.progress.trace)
        try:
            self.value = await self._invoke(AtomicAttempt(block, connection))
        except Exception as error:
            self.error = error
            raise
        self.ending, self.payload = lead.payload_of(call, self.value, self.attempt)
        kind = _KINDS.get(self.ending)
        if kind is None:
            self._flight.share(self.payload, self.attempt, is_released=True)
            raise _Undone
        await block.conclude(kind, self.payload, self.value)
        if call.nothing_happened is None or not call.nothing_happened(self.value):
            # Else a corrected request may take its place at any moment.
            self.remaining_ms = call.policy.active_ms

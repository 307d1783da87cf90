"""Running steps: each one once per key, its result stored before the operation goes on.

Owns the order of a step: what is stored is looked up first, then the call is made, then its result
is written with the claim's token. Between the call and the write lies the one gap that nobody can
close from here; child keys let the other side close it. It must not know stores, threads or loops.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from retrysafe.core.atomic.block import storable_payload
from retrysafe.core.atomic.complete_in import undo_quietly
from retrysafe.core.call import Call
from retrysafe.core.events import EventKind
from retrysafe.core.lease import Lease
from retrysafe.core.model import Decision, Payload, Step, StepWrite
from retrysafe.core.ports import Fate, Ports, Signal, Transaction
from retrysafe.core.steps.history import StepHistory, StepOptions, StepRetry, Undo, checked_name
from retrysafe.core.steps.pending import PendingStep
from retrysafe.core.steps.writer import StepWriter
from retrysafe.core.stop_iteration import is_listed
from retrysafe.core.values import codec
from retrysafe.core.values.codec import OutcomeCodec, codec_of_step
from retrysafe.core.values.trees import NotReadable
from retrysafe.errors import (
    AwaitForgotten,
    ClaimLost,
    InvalidInput,
    StepNotStored,
    StepUnavailable,
)

if TYPE_CHECKING:
    from retrysafe.core.attempt import Attempt


class _JoinedStep:
    """A step that was recorded in the user's transaction, until that has ended."""

    __slots__ = ("connection", "transaction", "write")

    def __init__(self, connection: object, transaction: Transaction, write: StepWrite) -> None:
        self.connection = connection
        self.transaction = transaction
        self.write = write


class StepRun:
    """The steps of one attempt at work."""

    __slots__ = (
        "_attempt",
        "_clock",
        "_executor",
        "_joined",
        "_lease",
        "_loaders",
        "_lock",
        "_not_begun",
        "_quiet",
        "_terminal_errors",
        "_unstored_calls",
        "book",
        "call",
        "has_uncertain",
        "writer",
    )

    def __init__(self, ports: Ports, attempt: Attempt, call: Call, lease: Lease) -> None:
        self._clock = ports.clock
        self._executor = ports.executor
        self._lock = ports.executor.step_lock
        self._attempt = attempt
        self._lease = lease
        self.call = call
        self.book = StepHistory(call.key.text, is_first=attempt.is_first)
        self.writer = StepWriter(ports, call, lease, attempt.number)
        # Those who wait for the stored steps while somebody reads them; None while nobody does.
        self._loaders: list[Signal] | None = None
        # Whom the last step under way wakes, once the operation has ended.
        self._quiet: Signal | None = None
        self._joined: list[_JoinedStep] = []
        # Whether a try of a step ended in a way after which nobody knows what it did.
        self.has_uncertain = False
        # What was called of steps that ran and may not be stored.
        self._unstored_calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._terminal_errors: list[Exception] = []
        # The steps that were asked for and that nobody has awaited yet, in order.
        self._not_begun: dict[PendingStep, None] = {}

    def step(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: StepOptions
    ) -> Any:
        """Runs the step or gives its stored result; to be awaited where flows suspend."""
        make = partial(self._step, checked_name(name), call, args, options)
        return self._executor.drive(PendingStep(name, make, self._not_begun))

    async def _step(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: StepOptions
    ) -> Any:
        await self.load()
        await self.look_after_transactions(options.connection)
        await self._require_unsettled(name)
        book = self.book
        place = book.place(is_known=self._executor.current() is self._attempt)
        with self._lock:
            # It ran in this attempt, whose operation was told that nobody knows whether it is
            # stored, and asks again: it is our own write that is made again, not another step.
            doubtful = self.writer.doubtful.get(name)
            if doubtful is None or not _is_equal(self._unstored_calls.get(name), (call, args)):
                doubtful = None
                position, stored = book.begin(name, place)
            else:
                book.require_open(name, place)
                del self.writer.doubtful[name]
                book.under_way += 1
        try:
            if doubtful is not None:
                await self.writer.record(*doubtful)
                book.advance(doubtful[0].position)
                return doubtful[1]
            outcome_codec = codec_of_step(call, options.returns)
            if stored is None:
                return await self._run_new(name, position, call, args, options, outcome_codec)
            value = self._stored_value(stored, outcome_codec, options)
            book.advance(position)
            return value
        except StepNotStored:
            self._unstored_calls[name] = (call, args)
            raise
        finally:
            with self._lock:
                book.under_way -= 1
                quiet = None if book.under_way else self._quiet
            if quiet is not None:
                quiet.set()

    async def _require_unsettled(self, name: str) -> None:
        """Raises `InvalidInput` once `complete_in` has ended the attempt with the user's commit.

        The step would run, and then be told that another owner has the key.
        """
        joined = self._attempt.joined
        if joined is not None and await joined.fate() is Fate.STANDS:
            text = self.call.key.text
            raise InvalidInput(
                f"{text!r} is completed, in a transaction that has committed: step {name!r} comes "
                "too late; ask for it before complete_in",
                key=text,
            )

    async def _run_new(
        self,
        name: str,
        position: int,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        options: StepOptions,
        outcome_codec: OutcomeCodec,
    ) -> Any:
        """Runs a step that no earlier attempt has finished, and records it."""
        book = self.book
        is_joined = options.connection is not None
        try:
            if is_joined:
                value = await self._run_joined(name, position, call, args, options, outcome_codec)
            else:
                value = await self.perform(
                    lambda: self._executor.perform_step(call, args), options.retry, options.terminal
                )
        except BaseException:
            with self._lock:
                book.abandon(name)
            raise
        with self._lock:
            book.finish(name, position)
            if options.compensate is not None:
                book.undos.append(Undo(name, options.compensate, options.retry, value))
        book.advance(position)
        if not is_joined:
            payload = self._payload(outcome_codec, value)
            await self.writer.record(Step(name, position, payload), value)
        return value

    async def end(self) -> None:
        """Takes no more steps, and waits until none is under way: each is recorded or given up.

        One task or thread may leave an operation while another is still inside a step of it. A key
        that were settled now could run that step again beside itself, or leave it never undone.
        Raises `ClaimLost` when the lease ends first; then the key is no longer this attempt's.
        """
        book, attempt = self.book, self._attempt
        with self._lock:
            book.is_over = True
            if not book.under_way:
                return
            quiet = self._quiet = self._clock.signal()
        while book.under_way:
            attempt.raise_if_lost()
            # The lease is renewed meanwhile; when it is not, nobody waits for longer than it lasts.
            await quiet.wait(attempt.time_left.total_seconds())

    def _stored_value(self, step: Step, outcome_codec: OutcomeCodec, options: StepOptions) -> Any:
        """What an earlier attempt's step returned; raises `StepUnavailable`."""
        value, error = None, None
        try:
            if step.payload.form == codec.WITHHELD:
                raise NotReadable(codec.withheld_reason(step.payload))
            value = outcome_codec.decode(step.payload)
        except NotReadable as unreadable:
            error = StepUnavailable(
                f"step {step.name!r} of {self.call.key.text!r} is done and will not run again, "
                f"but its result is not there: {unreadable}",
                key=self.call.key.text,
            )
        if options.compensate is not None:
            undo = Undo(step.name, options.compensate, options.retry, value, error)
            with self._lock:
                self.book.undos.append(undo)
        if error is not None:
            raise error
        return value

    def _payload(self, outcome_codec: OutcomeCodec, value: Any) -> Payload:
        """What is stored of a result; whatever is wrong with it, the step must not run again."""
        try:
            limit_bytes = self.call.policy.outcome_limit_bytes
            payload = codec.bounded(outcome_codec.encode(value), limit_bytes)
        except Exception as error:
            payload = codec.withheld(codec.message_of(error))
        if payload.form == codec.WITHHELD:
            self.writer.tell(EventKind.WITHHELD, codec.withheld_reason(payload))
        return payload

    async def load(self) -> None:
        """Reads the stored steps once, whoever of several asks first."""
        book = self.book
        while not book.is_read():
            signal: Signal | None = None
            with self._lock:
                if self._loaders is None:
                    if book.is_read():
                        return  # Another thread was done with it just before the lock.
                    self._loaders = []
                else:
                    signal = self._clock.signal()
                    self._loaders.append(signal)
            if signal is not None:
                await signal.wait(None)
                continue
            try:
                book.stored = await self.writer.read()
            finally:
                with self._lock:
                    waiters, self._loaders = self._loaders or [], None
                for waiter in waiters:
                    waiter.set()

    def require_begun(self) -> None:
        """Raises `AwaitForgotten` for steps that were asked for and never awaited.

        They have not run. An operation that ends so has not done what its code says, whatever it
        returned.
        """
        if not self._not_begun:
            return
        names = ", ".join(repr(asked.name) for asked in self._not_begun)
        text = self.call.key.text
        raise AwaitForgotten(
            f"the operation of {text!r} asked for {names} and did not await it, so it has not run: "
            "write await before every step",
            key=text,
        )

    async def check_complete(self) -> None:
        """Raises when completing now would leave steps out, or a failure behind."""
        self.require_begun()
        await self.load()
        if self.book.failure is not None:
            raise self.book.undone("the operation")
        missing = self.book.missing()
        if missing:
            raise self.book.changed(missing)

    async def perform(
        self,
        run_once: Callable[[], Awaitable[Any]],
        retry: StepRetry,
        terminal: tuple[type[Exception], ...] = (),
    ) -> Any:
        """Makes a call as often as the retry policy allows."""
        book = self.book
        tried = 0
        while True:
            # A zombie must not start an effect that its successor may have had already.
            if self._attempt.is_lost:
                await self._attempt.hold()
            before = book.enter()
            is_certain = False
            try:
                value = await run_once()
                is_certain = True
                return value
            except Exception as error:
                is_certain = self._is_nothing_happened(error)
                tried += 1
                if is_listed(error, terminal):
                    self._terminal_errors.append(error)
                    raise
                if isinstance(error, ClaimLost) or not retry.allows(error, tried):
                    raise
            finally:
                if not is_certain:
                    self.has_uncertain = True
                book.leave(before)
            await self._clock.sleep(retry.pause_seconds(tried))

    def _is_nothing_happened(self, error: Exception) -> bool:
        listed = self.call.nothing_happened
        return listed is not None and listed(error)

    @property
    def attempt_number(self) -> int:
        """Which attempt of the key this is."""
        return self._attempt.number

    def is_terminal(self, error: Exception) -> bool:
        """Whether this very exception came from a step for which it is terminal."""
        return any(error is item for item in self._terminal_errors)

    async def undo(self, undo: Undo) -> None:
        """Takes a finished step back."""
        await self.perform(
            lambda: self._executor.perform_step(undo.call, (undo.value,)), undo.retry
        )

    # In the user's transaction.

    async def _run_joined(
        self,
        name: str,
        position: int,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        options: StepOptions,
        outcome_codec: OutcomeCodec,
    ) -> Any:
        """Runs the step in the user's transaction and records it there.

        Each try has a savepoint of its own, so that nothing of a failed one stays behind.
        """
        transaction = self._executor.join_step(options.connection)
        # Before the record is written: the next renewal comes at any moment.
        leases = (self._lease, *self._attempt.held)
        for lease in leases:
            lease.is_joined = True

        async def run_once() -> Any:
            await transaction.begin()
            try:
                value = await self._executor.perform_step(call, args)
                payload = storable_payload(self.call, outcome_codec, value)
                write = self.writer.write_of(Step(name, position, payload))
                for each in (*self.writer.writes_around(write.step), write):
                    if await transaction.record_step(each) is Decision.LOST:
                        raise self.writer.lost()
            except BaseException:
                await undo_quietly(transaction)
                raise
            await transaction.keep()
            self._joined.append(_JoinedStep(options.connection, transaction, write))
            # From now on the transaction itself keeps renewals off the record, for as long as it is
            # open; then they go there again, where the previous release looks. Not after a failed
            # try: the next one would meet a record that was renewed since its snapshot.
            for lease in leases:
                lease.is_joined = lease.may_be_settled
            return value

        return await self.perform(run_once, options.retry, options.terminal)

    async def look_after_transactions(self, connection: object = None) -> None:
        """Finds out what became of the steps that were recorded in users' transactions.

        Raises `InvalidInput` while one is open on another connection than the given one: it has
        locked the record, so whatever is to be written now would wait for it for ever.
        """
        for joined in list(self._joined):
            step = joined.write.step
            fate = await joined.transaction.step_fate(joined.write)
            if fate is Fate.OPEN:
                if joined.connection is connection:
                    continue
                text = self.call.key.text
                raise InvalidInput(
                    f"the transaction of step {step.name!r} of {text!r} is still open: commit it "
                    "before the next step outside it, and before the operation ends",
                    key=text,
                )
            self._joined.remove(joined)
            with self._lock:
                if fate is Fate.UNDONE:
                    self.book.take_back(step.name)
                else:
                    self.book.committed.add(step.name)


def _is_equal(one: object, other: object) -> bool:
    """Whether two calls of a step are one; what cannot be compared is not."""
    try:
        return bool(one == other)
    except Exception:
        return False

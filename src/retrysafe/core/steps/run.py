"""Running steps: each one once per key, its result stored before the operation goes on.

Owns the order of a step: what is stored is looked up first, then the call is made, then its result
is written with the claim's token. Between the call and the write lies the one gap that nobody can
close from here; child keys let the other side close it. It must not know stores, threads or loops.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from retrysafe.core.call import Call
from retrysafe.core.events import EventKind
from retrysafe.core.handlers import is_of_handler, is_refusal
from retrysafe.core.lease import Lease
from retrysafe.core.model import Payload, Step
from retrysafe.core.one_call import OneCall, is_interruption
from retrysafe.core.ports import Fate, Ports, Signal
from retrysafe.core.steps.history import StepHistory, StepOptions, Undo, checked_name
from retrysafe.core.steps.joined import JoinedSteps
from retrysafe.core.steps.pending import PendingStep
from retrysafe.core.steps.taken import TakenStep
from retrysafe.core.steps.writer import StepWriter
from retrysafe.core.stop_iteration import is_listed
from retrysafe.core.values import codec
from retrysafe.core.values.codec import OutcomeCodec, codec_of_step
from retrysafe.core.values.trees import NotReadable
from retrysafe.errors import (
    AwaitForgotten,
    ClaimLost,
    InvalidInput,
    RetrysafeError,
    StepNotStored,
    StepUnavailable,
)

if TYPE_CHECKING:
    from retrysafe.core.attempt import Attempt

# How often the ending of an operation looks by itself whether a step is under way.
LOOK_SECONDS: Final = 0.25


class StepRun:
    """The steps of one attempt at work."""

    __slots__ = (
        "_attempt",
        "_background",
        "_clock",
        "_executor",
        "_leases",
        "_loaders",
        "_lock",
        "_not_begun",
        "_quiet",
        "_terminal_errors",
        "_unstored",
        "book",
        "call",
        "has_uncertain",
        "joined",
        "writer",
    )

    def __init__(self, ports: Ports, attempt: Attempt, call: Call, lease: Lease) -> None:
        self._clock = ports.clock
        self._background = ports.background
        self._executor = ports.executor
        self._lock = ports.executor.step_lock
        self._attempt = attempt
        self.call = call
        self.book = StepHistory(call.key.text, is_first=attempt.is_first)
        self.writer = StepWriter(ports, call, lease, attempt.number)
        # Those who wait for the stored steps while somebody reads them; None while nobody does.
        self._loaders: list[Signal] | None = None
        # Whom the last step under way wakes, once the operation has ended.
        self._quiet: Signal | None = None
        # Made with the first of them: most operations have none, and pay nothing for it.
        self.joined: JoinedSteps | None = None
        self._leases = (lease, *attempt.held)
        # Whether a try of a step ended in a way after which nobody knows what it did.
        self.has_uncertain = False
        # The steps that were called and are not known to be stored.
        self._unstored: dict[str, TakenStep] = {}
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
        if self.joined is not None:
            await self.joined.look_after(options.connection)
        await self._require_unsettled(name)
        book = self.book
        place = book.place(is_known=self._executor.current() is self._attempt)
        taken = TakenStep(name, call, args, options)
        try:
            # Inside the try: it is under way from its place in the book on, and a signal's handler
            # may raise right after that.
            with self._lock:
                # It ran in this attempt, whose operation was told that nobody knows whether it is
                # stored, and asks again: it is our own write that is made again, not another step.
                left = self._left(name)
                if left is not None and left.is_of(call, args):
                    taken = left
                    book.require_open(name, place)
                    book.under_way[taken] = name
                else:
                    left = None
                    taken.position, stored = book.begin(name, place, taken)
            if left is not None:
                await self._record(left)
                return left.value
            taken.outcome_codec = codec_of_step(call, options.returns)
            if stored is None:
                return await self._run_new(taken)
            value = self._stored_value(stored, taken.outcome_codec, options)
            book.advance(taken.position)
            return value
        finally:
            with self._lock:
                book.under_way.pop(taken, None)
                quiet = None if book.under_way else self._quiet
            if quiet is not None:
                quiet.set()

    def _left(self, name: str) -> TakenStep | None:
        """The step with this name that has returned and that nobody is storing; under the lock.

        Raises `StepNotStored` for one of which nobody knows whether it ran.
        """
        left = self._unstored.get(name)
        if left is None or left in self.book.under_way:
            return None
        if left.is_doubtful:
            raise self._in_doubt(left)
        if not left.has_returned:
            return None
        self._finish(left)
        return left

    def _in_doubt(self, taken: TakenStep) -> StepNotStored:
        text = self.call.key.text
        return StepNotStored(
            f"step {taken.name!r} of {text!r} was interrupted by a signal's handler, and nobody "
            "knows whether it ran. A later attempt runs it again",
            key=text,
            value=None,
        )

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

    async def _run_new(self, taken: TakenStep) -> Any:
        """Runs a step that no earlier attempt has finished, and records it."""
        name, options = taken.name, taken.options
        if options.connection is not None:
            value = await self.perform(taken, options.terminal, self._opened_joined().making(taken))
            self.book.advance(taken.position)
            return value
        try:
            # Before the call, which can then not return unseen.
            self._unstored[name] = taken
            value = await self.perform(taken, options.terminal)
            await self._record(taken)
            return value
        except BaseException as error:
            if not (taken.has_returned or taken.is_doubtful):
                self._unstored.pop(name, None)
            elif taken.has_returned and not (name in self.writer.handed_over or is_refusal(error)):
                # A signal's handler raised before it was as far as that.
                abandon = partial(self.writer.abandon, name)
                self._background.finish(self._record_left(taken), abandon)
            raise

    def _opened_joined(self) -> JoinedSteps:
        with self._lock:
            if self.joined is None:
                self.joined = JoinedSteps(
                    self._executor, self.call, self._leases, self.book, self.writer, self._finish
                )
            return self.joined

    def _finish(self, taken: TakenStep) -> None:
        """Takes note that a step has run; as often as it is asked for."""
        name, options = taken.name, taken.options
        self.book.finish(name, taken.position)
        if options.compensate is not None:
            undo = Undo(name, options.compensate, options.retry, taken.value)
            self.book.undos.setdefault(name, undo)

    async def _record(self, taken: TakenStep) -> None:
        """Makes a step durable that has run; raises as `StepWriter.record` does."""
        await self.writer.record(self._encoded(taken), taken.value)
        self._unstored.pop(taken.name, None)

    async def _write(self, taken: TakenStep) -> None:
        """The same for a caller who is looked after elsewhere."""
        await self.writer.write(self._encoded(taken), taken.value)
        self._unstored.pop(taken.name, None)

    def _encoded(self, taken: TakenStep) -> Step:
        """What is stored of a step that has run; the running code is behind it from now on."""
        with self._lock:
            self._finish(taken)
        self.book.advance(taken.position)
        if taken.step is None:
            taken.step = Step(taken.name, taken.position, self._payload(taken))
        return taken.step

    async def _record_left(self, taken: TakenStep) -> None:
        """The same for a caller who is gone."""
        try:
            await self._write(taken)
        except RetrysafeError:
            return  # Insisted on before the key is freed.

    async def record_the_rest(self) -> None:
        """Insists once more on what could not be written, before the key is freed for a retry.

        A freed key runs again at once, and what is not recorded runs with it. Raises `ClaimLost`
        when there is another owner, and `StepNotStored` when the store still cannot be told, or for
        a step of which nobody knows whether it ran: only the lease may free the key then.
        """
        for taken in list(self._unstored.values()):
            if taken.is_doubtful:
                raise self._in_doubt(taken)
            if taken.has_returned:
                # Also one that is written in the background: that does not count it out.
                await self._write(taken)

    @property
    def has_unrecorded(self) -> bool:
        """Whether a step ran of which nobody knows that it is stored."""
        return bool(self._unstored)

    async def end(self) -> None:
        """Takes no more steps, and waits until none is under way: each is recorded or given up.

        One task or thread may leave an operation while another is still inside a step of it. A key
        that were settled now could run that step again beside itself, or leave it never undone.
        Raises `ClaimLost` when the lease ends first; then the key is no longer this attempt's.
        """
        book, attempt = self.book, self._attempt
        with self._lock:
            book.is_over = True
            quiet = self._quiet = self._clock.signal() if book.under_way else None
        while quiet is not None and book.under_way:
            attempt.raise_if_lost()
            # The lease is renewed meanwhile; when it is not, nobody waits for longer than it lasts.
            # Looked at now and then: a signal's handler may have kept the last step from telling.
            await quiet.wait(min(LOOK_SECONDS, attempt.time_left.total_seconds()))
        for taken in list(self._unstored.values()):
            if taken.has_returned:
                # Also where a signal's handler has kept its caller from it.
                self._finish(taken)

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
                self.book.undos[step.name] = undo
        if error is not None:
            raise error
        return value

    def _payload(self, taken: TakenStep) -> Payload:
        """What is stored of a result; whatever is wrong with it, the step must not run again."""
        outcome_codec, value = taken.outcome_codec, taken.value
        assert outcome_codec is not None  # It is known before the call is made.
        limit_bytes = self.call.policy.outcome_limit_bytes
        try:
            payload = codec.bounded(outcome_codec.encode(value), limit_bytes)
        except Exception as error:
            codec.require_again(error, partial(outcome_codec.encode, value))
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
        taken: TakenStep,
        terminal: tuple[type[Exception], ...] = (),
        run_once: Callable[[OneCall], Awaitable[Any]] | None = None,
    ) -> Any:
        """Makes a call as often as its retry policy allows; `run_once` makes it in a transaction.

        What a signal's handler raised after the call had ended is not tried again for.
        """
        book, retry = self.book, taken.options.retry
        tried = 0
        while True:
            # A zombie must not start an effect that its successor may have had already.
            if self._attempt.is_lost:
                await self._attempt.hold()
            made = taken.made = OneCall(taken.call, taken.args)
            before = book.trail()
            is_certain, raised = False, ""
            self.writer.tell(EventKind.STEP_BEGAN, taken.name)
            try:
                book.enter()
                if run_once is None:
                    value = await self._executor.perform_step(taken.call, made)
                else:
                    value = await run_once(made)
                is_certain = True
                return value
            except Exception as error:
                is_joined = run_once is not None
                if is_interruption(made, error) and (not is_joined or is_of_handler(error)):
                    raise
                is_certain = self._is_nothing_happened(error)
                raised = type(error).__name__
                tried += 1
                if is_listed(error, terminal):
                    self._terminal_errors.append(error)
                    raise
                if isinstance(error, ClaimLost) or not retry.allows(error, tried):
                    raise
            finally:
                if not is_certain:
                    self.has_uncertain = True
                # By one call of C: a signal must not leave the mark of being inside.
                book.leave(before)
                self.writer.tell(EventKind.STEP_ENDED, taken.name, raised)
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

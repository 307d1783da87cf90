"""An attempt as the operation sees it: its number, its claim, its steps, its child keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar, TypeVarTuple, overload

from retrysafe.core.atomic.complete_in import JoinedOutcome, complete_in
from retrysafe.core.call import Call
from retrysafe.core.callables import require_function
from retrysafe.core.keys.canonical import Part
from retrysafe.core.keys.key import Key, checked_secret, child_key
from retrysafe.core.lease import Lease
from retrysafe.core.model import ClaimAnswer, Decision, StagedEntry
from retrysafe.core.one_call import OneCall
from retrysafe.core.outbox.staging import Staging
from retrysafe.core.ports import Ports
from retrysafe.core.renewal import confirm
from retrysafe.core.settings import Settings
from retrysafe.core.steps.history import (
    ONE_TRY,
    Exceptions,
    StepOptions,
    StepRetry,
    checked_exceptions,
)
from retrysafe.core.steps.run import StepRun
from retrysafe.errors import ClaimLost, InvalidInput

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# The first may go over a connection that died while the process stood still, and is then no answer
# of the store; the second goes over a fresh one. An answer ends the tries.
HOLD_TRIES: Final = 2


class Attempt:
    """One run of an operation. Available inside the operation as `current_attempt()`.

    `is_first` says that no earlier attempt in this life of the key can have left effects behind.
    """

    __slots__ = (
        "_call",
        "_correction",
        "_fingerprint",
        "_lease",
        "_monotonic",
        "_outbox",
        "_ports",
        "_secrets",
        "held",
        "is_first",
        "joined",
        "key",
        "made",
        "number",
        "operation",
        "steps",
    )

    def __init__(
        self, call: Call, lease: Lease, granted: ClaimAnswer, ports: Ports, settings: Settings
    ) -> None:
        self._call = call
        self._lease = lease
        self._ports = ports
        self._monotonic = ports.clock.monotonic
        self._secrets = settings.secrets
        self.operation = call.operation
        self.number = granted.attempt
        self.key = call.key
        # Claims on other keys of the same request, which hold as long as this one must.
        self.held: tuple[Lease, ...] = ()
        # Of the record, where an earlier attempt has begun it: tells with which secret.
        self._fingerprint = granted.fingerprint
        # What tells its request from the one that it has corrected; empty for all others.
        self._correction = granted.correction
        # Not the same as number 1: an operator's release starts the numbers over.
        self.is_first = granted.decision is Decision.ADMIT
        nest = call.nest
        if nest is not None:
            self.held = nest.held
            self._fingerprint = granted.fingerprint or nest.fingerprint
            self._correction = granted.correction or nest.correction
            self.is_first = self.is_first and not nest.is_later
            self.key = self._secrets.key_by(nest.keys, self._fingerprint, call.key)
        # The call of the operation; None until the executor is about to make it.
        self.made: OneCall | None = None
        # The outcome that `complete_in` wrote last; the engine asks what became of it.
        self.joined: JoinedOutcome | None = None
        # Made with the first step: most operations have none, and pay nothing for them.
        self.steps: StepRun | None = None
        self._outbox: Staging | None = None

    @property
    def token(self) -> bytes:
        """The claim's token: random, and unique in the whole history of the key."""
        return self._lease.token

    @property
    def deadline(self) -> datetime:
        """When the lease ends unless it is renewed, by the store's clock."""
        return datetime.fromtimestamp(self._lease.ends_at_ms / 1000, UTC)

    @property
    def time_left(self) -> timedelta:
        """What is surely left of the lease; zero when the claim is lost or the attempt over."""
        if self._lease.is_settled:
            return timedelta()
        now = self._monotonic()
        left = min(lease.seconds_left(now) for lease in (self._lease, *self.held))
        return timedelta(seconds=left)

    @property
    def is_lost(self) -> bool:
        """Whether another owner has, or may have, the key: stop before the next effect."""
        now = self._monotonic()
        leases = (self._lease, *self.held)
        return self._lease.is_settled or any(lease.is_lost(now) for lease in leases)

    def raise_if_lost(self) -> None:
        """Raises `ClaimLost` when the claim is, or may be, lost. Call it before an effect."""
        self._require_running(ClaimLost)
        if self.is_lost:
            raise ClaimLost(
                f"the claim on {self.key.text!r} is lost or its lease ran out", key=self.key.text
            )

    def _require_running(self, kind: type[ClaimLost | InvalidInput] = InvalidInput) -> None:
        # Nothing was taken from it: it holds nothing any more.
        if self._lease.is_settled:
            raise kind(
                f"attempt {self.number} of {self.key.text!r} has ended, and its ending is stored: "
                "nothing more can be done in it",
                key=self.key.text,
            )

    async def hold(self) -> None:
        """Makes sure of the claim before work begins that had to wait; for executors and steps.

        The process may have stood still, the machine been suspended, or a queue been long. Where
        the lease may be over by the local clock, only the store can tell: it is asked, and the
        lease is the owner's again if nobody was faster. Raises `ClaimLost`.
        """
        for lease in (*self.held, self._lease):
            await self._confirmed(lease)
        self.raise_if_lost()

    async def _confirmed(self, lease: Lease) -> None:
        ports = self._ports
        for _ in range(HOLD_TRIES):
            now = self._monotonic()
            if not lease.is_lost(now) or not lease.may_renew(now):
                return
            await confirm(ports.store, self._monotonic, ports.report, lease)

    def complete_in(self, connection: object, value: Any) -> Any:
        """Writes the outcome in the user's open transaction, so that both commit or neither does.

        `value` is then the outcome, whatever the operation returns. Make it the last thing before
        the commit. For a protected request it is what the endpoint returns. It is awaited exactly
        when the connection's own methods are. Raises `ClaimLost` when another owner has the key:
        let it end the transaction. Raises `TransactionMissing` when none is open, and
        `InvalidInput` for a value or a connection that cannot be used, or for an outcome that frees
        the key.
        """
        self._require_running()
        return complete_in(
            self._ports.executor,
            self._call,
            self._lease,
            connection,
            value,
            entries=() if self._outbox is None else self._outbox.entries(),
            check=self._check_complete,
            keep=self._keep,
        )

    async def load_steps(self) -> None:
        """Reads what earlier attempts recorded, which the attempt's ending has to fit.

        For executors whose operations may complete in a thread, where the store cannot be awaited.
        Raises `ClaimLost` and `StoreUnavailable`.
        """
        steps = self.steps_to_conclude
        if steps is not None:
            await steps.load()

    async def _check_complete(self) -> None:
        """Raises `StepsChanged` or `OperationUndone` when completing would leave steps out."""
        steps = self.steps_to_conclude
        if steps is not None:
            await steps.check_complete()

    @overload
    def step(
        self,
        name: str,
        call: Callable[[*Ts], Coroutine[Any, Any, T]],
        /,
        *args: *Ts,
        retry: StepRetry = ...,
        terminal: Exceptions = ...,
        returns: type | tuple[type, ...] | None = ...,
        compensate: Callable[[T], object] | None = ...,
        in_transaction: object = ...,
    ) -> Awaitable[T]: ...

    @overload
    def step(
        self,
        name: str,
        call: Callable[[*Ts], T],
        /,
        *args: *Ts,
        retry: StepRetry = ...,
        terminal: Exceptions = ...,
        returns: type | tuple[type, ...] | None = ...,
        compensate: Callable[[T], object] | None = ...,
        in_transaction: object = ...,
    ) -> T: ...

    def step(
        self,
        name: str,
        call: Callable[[*Ts], Any],
        /,
        *args: *Ts,
        retry: StepRetry = ONE_TRY,
        terminal: Exceptions = (),
        returns: type | tuple[type, ...] | None = None,
        compensate: Callable[[Any], Any] | None = None,
        in_transaction: object = None,
    ) -> Any:
        """Runs `call(*args)` once for the key, and returns the stored result to later attempts.

        With `AsyncIdempotency` it is awaited, and so is what the call returns; type checkers want
        an async function there. `retry` tries again within this attempt. An exception of a
        `terminal` type that leaves the operation ends it for good. `compensate` is called with
        the result when the operation fails for good. `in_transaction` takes a connection with an
        open transaction: the step is recorded in it.

        Raises what the call raises; `StepReused`, `StepsChanged`, `StepUnavailable`,
        `StepNotStored`, `ClaimLost`, `OperationUndone`, `StoreUnavailable`, and `InvalidInput`.
        """
        require_function(
            call, 'pass the function and its arguments, step("charge", charge, 500), not its result'
        )
        options = StepOptions(
            retry, checked_exceptions("terminal", terminal), returns, compensate, in_transaction
        )
        steps = self._opened_steps()
        self._require_running()
        return steps.step(name, call, args, options)

    def _opened_steps(self) -> StepRun:
        with self._ports.executor.step_lock:
            if self.steps is None:
                self.steps = StepRun(self._ports, self, self._call, self._lease)
            return self.steps

    @property
    def steps_to_conclude(self) -> StepRun | None:
        """The steps that the attempt's ending has to fit; None when there can be none.

        A later attempt that has asked for no step may still leave out those of an earlier one.
        """
        if self.steps is not None or self.is_first:
            return self.steps
        return self._opened_steps()

    def _keep(self, joined: JoinedOutcome) -> None:
        self.joined = joined
        if self._outbox is not None:
            self._outbox.close()

    @property
    def outbox(self) -> Staging:
        """What the operation has delivered once its outcome stands; raises `InvalidInput`."""
        if self._outbox is None:
            self._outbox = self._new_outbox()
        return self._outbox

    def _new_outbox(self) -> Staging:
        if not self._ports.store.capabilities.has_outbox:
            raise InvalidInput("this attempt's store has no outbox to stage entries in")
        return Staging(*self._parent(), self._require_stageable, self._correction)

    def _parent(self) -> tuple[Key, bytes | None]:
        """What child keys are made of: the key by the secret that the operation began with."""
        nest = self._call.nest
        keys = None if nest is None else nest.keys
        secret, key = self._secrets.parent(self.key, keys, self._fingerprint)
        return key, secret

    def _require_stageable(self) -> None:
        self.raise_if_lost()
        if self.steps is not None and self.steps.book.is_inside():
            raise InvalidInput(
                f"an entry of {self.key.text!r} was staged inside a step: a later attempt skips "
                "the step, and the entry with it; stage it after the step",
                key=self.key.text,
            )

    def staged(self) -> tuple[StagedEntry, ...]:
        """What was staged, to be written with the outcome; nothing can be staged after it."""
        if self._outbox is None:
            return ()
        self._outbox.close()
        return self._outbox.entries()

    def child_key(self, *parts: Part) -> str:
        """The key for a call downstream: the same in every attempt, different for other parts.

        A corrected request has child keys of its own. Raises `SecretMissing` when no secret was
        configured, or not the one that the operation began with.
        """
        key, secret = self._parent()
        return child_key(checked_secret(secret), key, *parts, correction=self._correction)

    def __repr__(self) -> str:
        return f"Attempt({self.key!r}, number={self.number})"

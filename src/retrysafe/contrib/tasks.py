"""A task of a queue, run once: what Celery, Dramatiq and Taskiq have in common.

Owns how a task and its id become a call, and which endings send a message back without blaming it.
It must not know a framework: each of them says in its own module how a message comes back.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any, Final, TypedDict

from retrysafe.consumers.engine import (
    AsyncEngine,
    Call,
    FingerprintRule,
    Idempotency,
    Key,
    Policy,
    ThreadEngine,
    covering,
    engine_of,
    operation_name,
    run_sync,
)
from retrysafe.consumers.verdict import Action, Outage, rule_of
from retrysafe.core.settings import CallerSource, checked_caller, checked_policy
from retrysafe.core.values.codec import codec_for
from retrysafe.errors import Closed, InvalidInput, OperationInFlight, RetrysafeError
from retrysafe.runtime.describe import KeySource, Once

_logger = logging.getLogger("retrysafe.tasks")

# The parameter that gets the attempt of a task with a transaction.
ATTEMPT: Final = "attempt"
# How long the key of a done task is kept unless a window is stated. SQS keeps no message longer.
# Other brokers keep one until it is acked: it runs again when its worker died between the outcome
# and the ack, and no other one took messages for so long.
ID_WINDOW: Final = timedelta(days=14)
# How long a message stays away when the store is: it costs nothing to ask again.
OUTAGE_DELAY: Final = timedelta(seconds=10)
CLOSED_DELAY: Final = timedelta(seconds=1)

# The messages whose tasks run here. A task that calls a guarded function directly has its message
# in sight, which is not that function's: by its id the call would wait for itself.
_running: ContextVar[frozenset[tuple[str, str]]] = ContextVar(
    "retrysafe_tasks", default=frozenset()
)


class ComeBack(Exception):  # It is no error: it tells a framework what to do.
    """The task did not run here, or nobody knows its outcome: its message must come back."""

    def __init__(self, cause: RetrysafeError, delay: timedelta, because: str) -> None:
        super().__init__(f"{because}: {cause}")
        self.cause = cause
        self.delay = delay
        self.because = because

    @property
    def delay_seconds(self) -> float:
        """The delay, never so short that messages spin."""
        return max(self.delay.total_seconds(), 0.1)


class OnceOptions(TypedDict, total=False):
    """How a task is run once, whatever the framework: what each `once` takes."""

    # None: the id of the task. Else as in `Idempotency.once`, with a window.
    key: KeySource | None
    window: timedelta | None
    # Of a natural key: the function's own name unless given; it must stay the same.
    name: str | None
    caller: CallerSource | None
    policy: Policy | None
    fingerprint: FingerprintRule | None
    ignore: Iterable[str]
    returns: type | tuple[type, ...] | None
    # Opens a transaction of yours; the task gets `attempt`, whose `connection` it is.
    transaction: Callable[[], Any] | None


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The same, with defaults."""

    idempotency: Idempotency
    _: KW_ONLY
    key: KeySource | None = None
    window: timedelta | None = None
    name: str | None = None
    caller: CallerSource | None = None
    policy: Policy | None = None
    fingerprint: FingerprintRule | None = None
    ignore: Iterable[str] = ()
    returns: type | tuple[type, ...] | None = None
    transaction: Callable[[], Any] | None = None


@dataclass(slots=True)
class TaskGuard:
    """Runs one task function once for each id, or for each key."""

    function: Callable[..., Any]
    options: TaskOptions
    _: KW_ONLY
    # What ids are unique in, such as "celery:shop.charge".
    scope: str
    name: str = ""
    # What the framework's own words raise, such as Celery's `Retry`: they always free the key.
    control: tuple[type[Exception], ...] = ()
    # A parameter that is not part of what is asked for: the task itself, when it is bound.
    bound: str | None = None
    _engine: ThreadEngine | AsyncEngine = field(init=False)
    _once: Once | None = field(init=False, default=None)
    _policy: Policy = field(init=False)
    _signature: inspect.Signature = field(init=False)
    _ignored: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        self._engine = engine_of(options.idempotency, self.function)
        self._signature = inspect.signature(self.function)
        if options.key is not None or not self.name:
            # Not the task's: a call without a message must find the same natural key.
            self.name = options.name or operation_name(self.function)
        if isinstance(options.ignore, str):
            raise InvalidInput(
                f"ignore takes a list of parameter names, write [{options.ignore!r}]"
            )
        takes_attempt = options.transaction is not None
        if takes_attempt and ATTEMPT not in self._signature.parameters:
            raise InvalidInput(
                f"with transaction=… {self.name} needs a keyword parameter {ATTEMPT!r}: its "
                "connection is the open transaction, so write def "
                f"{self.function.__name__}(…, *, {ATTEMPT}=None)"
            )
        own = [ATTEMPT] if takes_attempt else []
        self._ignored = frozenset(
            [*options.ignore, *own, *([self.bound] if self.bound is not None else [])]
        )
        policy = checked_policy(options.policy or self._engine.policy)
        policy = policy.with_changes(retryable=(*policy.retryable, *self.control))
        if options.key is not None:
            self._once = self._engine.calls.operations.once(
                self.function,
                key=options.key,
                window=options.window,
                caller=options.caller,
                name=self.name,
                policy=policy,
                fingerprint=options.fingerprint,
                ignore=self._ignored,
                returns=options.returns,
            )
            self._policy = self._once.policy
        elif options.window is None:
            self._policy = covering(policy, ID_WINDOW)
        else:
            self._policy = policy.with_window(options.window, of=f"the task {self.name}")

    def run(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The outcome of the task; raises `ComeBack`, the stored failure, what the task raises."""
        return run_sync(self.run_async(task_id, args, kwargs))

    async def run_async(
        self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """As `run`, for tasks of an event loop."""
        raised: list[Exception] = []
        mark = _running.set(_running.get() | {(self.scope, task_id)})

        async def invoke(attempt: Any) -> Any:
            given = kwargs if self.options.transaction is None else {**kwargs, ATTEMPT: attempt}
            try:
                value = self.function(*args, **given)
                return await value if inspect.isawaitable(value) else value
            except Exception as error:
                raised.append(error)
                raise

        try:
            call = self._call(task_id, args, kwargs)
            transaction = self.options.transaction
            if transaction is None:
                return (await self._engine.answer(call, invoke)).value
            return (await self._engine.answer_atomic(call, transaction, invoke)).value
        except RetrysafeError as error:
            if error in raised:
                raise
            return self._ended(task_id, error)
        finally:
            _running.reset(mark)

    def is_running(self, task_id: str) -> bool:
        """Whether the task of this message runs here: a second call of it is a plain one."""
        return (self.scope, task_id) in _running.get()

    def run_directly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call without a message: by its key where it has one, else a plain call."""
        return run_sync(self.run_directly_async(args, kwargs))

    async def run_directly_async(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As `run_directly`, for tasks of an event loop."""
        if self._once is None:
            if self.options.transaction is not None:
                raise InvalidInput(
                    f"{self.name} was called directly, without a message whose id it could run "
                    "under in a transaction: send it, or declare its key=(…)"
                )
            value = self.function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        try:
            return await self.run_async("", args, kwargs)
        except ComeBack as ending:
            raise ending.cause from None

    def _call(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        if self._once is not None:
            return self._once.call(args, kwargs)
        if not task_id:
            raise InvalidInput(f"{self.name} was called without a task id: declare its key=(…)")
        settings = self._engine.calls.settings
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        request = {
            name: value for name, value in bound.arguments.items() if name not in self._ignored
        }
        caller = self.options.caller
        key = (
            Key(task_id, caller=self.scope)
            if caller is None
            else settings.call_key(task_id, checked_caller(caller))
        )
        return Call(
            key,
            settings.fingerprints(self.options.fingerprint, self.name, request),
            self._policy,
            self.name,
            codec_for(self.function, self.options.returns),
        )

    def _ended(self, task_id: str, error: RetrysafeError) -> None:
        """Returns for a task that is done; raises `ComeBack`, or the error itself."""
        rule = rule_of(error)
        if rule.action is Action.ACK:
            _logger.warning("%s of task %s: %s: %s", self.name, task_id, rule.because, error)
            return
        if rule.action is Action.LEAVE or rule.outage is not Outage.NONE:
            raise ComeBack(error, self._delay(error, rule.outage), rule.because) from error
        raise error

    def _delay(self, error: RetrysafeError, outage: Outage) -> timedelta:
        if outage is not Outage.NONE:
            return OUTAGE_DELAY
        if isinstance(error, OperationInFlight):
            return error.retry_after
        if isinstance(error, Closed):
            return CLOSED_DELAY
        # Until the lease ends, nobody can do anything for it.
        return self._policy.lease


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below all decorators: what tells whether two wrappers are of one function."""
    found = inspect.unwrap(function)
    inner: Callable[..., Any] = getattr(found, "__func__", found)
    return inner


def public_signature(function: Callable[..., Any], options: TaskOptions) -> inspect.Signature:
    """The parameters that whoever sends the task passes: those of the function but `attempt`."""
    signature = inspect.signature(function)
    if options.transaction is None:
        return signature
    kept = [item for name, item in signature.parameters.items() if name != ATTEMPT]
    return signature.replace(parameters=kept)

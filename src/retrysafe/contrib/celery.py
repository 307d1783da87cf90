"""Celery tasks that run once, however often a broker delivers them.

Owns what a message of Celery's does when its key is busy or the store is away. How a task becomes a
call is in `tasks`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar, Unpack

from retrysafe.contrib.tasks import (
    ComeBack,
    OnceOptions,
    TaskGuard,
    TaskOptions,
    innermost,
    public_signature,
)
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra
from retrysafe.idempotency import Idempotency

try:
    from celery import Task, current_task
    from celery.exceptions import Ignore, Reject, Retry
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "celery", error) from None

_logger = logging.getLogger("retrysafe.tasks")

P = ParamSpec("P")
T = TypeVar("T")


def once(
    idempotency: Idempotency, **options: Unpack[OnceOptions]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates the function of a task, below `@app.task`, so that each task id runs it once.

    `key` and `window` make a natural key of the arguments instead, as in `Idempotency.once`. With
    `transaction` the function gets `attempt`, whose `connection` is the open transaction.
    """
    made = TaskOptions(idempotency, **options)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if isinstance(function, Task):
            raise InvalidInput("write @once(…) below @app.task, so that it wraps the function")
        guards = _Guards(function, made)

        @functools.wraps(function)
        def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
            value: T = guards.run(current_task, args, kwargs)
            return value

        run_once.__signature__ = public_signature(function, made)  # type: ignore[attr-defined]
        return run_once

    return decorate


class OnceTask(Task):  # type: ignore[misc]  # Celery has no types.
    """A base for tasks that run once, with the settings of Celery's that this needs.

    Subclass it with an `idempotency`, and pass the subclass as `base=`. `once_options` takes what
    `once` takes.
    """

    abstract = True
    # A message is forgotten when its outcome is stored, not before its task begins.
    acks_late = True
    # Else a worker process that is killed takes its message along.
    reject_on_worker_lost = True
    idempotency: ClassVar[Idempotency | None] = None
    once_options: ClassVar[Mapping[str, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the task once for the message that it came with."""
        if self.request.called_directly or self._guards.is_running(self):
            # As Celery does it: the call gets a request of its own, without a message.
            return super().__call__(*args, **kwargs)
        return self._guards.run(self, args, kwargs)

    @functools.cached_property
    def _guards(self) -> _Guards:
        if self.idempotency is None:
            raise InvalidInput(
                f"{self.name} has no idempotency: write class Once(OnceTask): idempotency = "
                "Idempotency(…), and base=Once"
            )
        return _Guards(self.run, TaskOptions(self.idempotency, **self.once_options))


class _Guards:
    """The guard of one function, made when its task is known."""

    def __init__(self, function: Callable[..., Any], options: TaskOptions) -> None:
        self._function = function
        self._options = options
        self._made: dict[str, TaskGuard] = {}
        # Refuses at once what can be known without a task.
        self._guard("", None)

    def _guard(self, name: str, bound: str | None) -> TaskGuard:
        guard = self._made.get(name)
        if guard is None:
            guard = TaskGuard(
                self._function,
                self._options,
                scope=f"celery:{name}",
                name=name,
                control=(Retry, Ignore, Reject),
                bound=bound,
            )
            self._made[name] = guard
        return guard

    def run(self, task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The outcome of the task that runs here; its message comes back, or the task raises."""
        # Celery's `current_task` is a proxy, which is false without a task.
        request = task.request if task else None
        has_message = request is not None and not request.called_directly
        if request is None or not has_message or not self._is_of(task):
            return self._guard("", None).run_directly(args, kwargs)
        is_new = task.name not in self._made
        guard = self._guard(task.name, _bound_parameter(self._function, args))
        if guard.is_running(request.id):
            return guard.run_directly(args, kwargs)
        if is_new:
            _check(task)
        try:
            return guard.run(request.id, args, kwargs)
        except ComeBack as ending:
            if request.is_eager:
                raise ending.cause from None
            _send_back(task, ending)

    def is_running(self, task: Any) -> bool:
        """Whether the message of the task is being handled here already."""
        made = self._made.get(task.name)
        return made is not None and made.is_running(task.request.id)

    def _is_of(self, task: Any) -> bool:
        """Whether the function is the task's, and not one that the task calls directly.

        Raises `InvalidInput` when nobody can tell: it must not run unprotected by mistake.
        """
        own = innermost(self._function)
        if innermost(task.run) is own:
            return True
        if any(innermost(other.run) is own for other in task.app.tasks.values()):
            return False
        raise InvalidInput(
            f"{task.name} hides the function that once() protects: use functools.wraps in the "
            "decorators between @app.task and @once"
        )


def _bound_parameter(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """The name of the parameter that holds the task, for a function with `bind=True`."""
    parameters = list(inspect.signature(function).parameters)
    is_bound = bool(parameters) and bool(args) and isinstance(args[0], Task)
    return parameters[0] if is_bound else None


def _check(task: Any) -> None:
    """Warns of settings of Celery's under which a crash loses a message."""
    if not task.acks_late:
        _logger.warning(
            "%s forgets its message before it runs, so a crash loses it: set acks_late=True and "
            "reject_on_worker_lost=True, or use base=OnceTask",
            task.name,
        )
    elif not task.reject_on_worker_lost:
        _logger.warning(
            "%s forgets its message when its worker process is killed: set "
            "reject_on_worker_lost=True, or use base=OnceTask",
            task.name,
        )


def _send_back(task: Any, ending: ComeBack) -> NoReturn:
    """Publishes the message again with a delay, as it is: no retry is used up, no state is set."""
    request = task.request
    _logger.info("%s of task %s comes back: %s", task.name, request.id, ending)
    try:
        task.signature_from_request(
            request, countdown=ending.delay_seconds, retries=request.retries
        ).apply_async()
    except Exception as problem:
        # The broker keeps it only where it was not acked before the task began.
        if task.acks_late:
            raise Reject(problem, requeue=True) from ending.cause
        raise ending.cause from problem
    raise Ignore from ending.cause

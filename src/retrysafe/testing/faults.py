"""Faults on demand: a store that fails where a test tells it to.

Owns the moments at which a port call can fail. A fault before the effect is a store that could
not be reached; a fault after the effect is the ambiguous one, where the write stands and its
answer is lost. Code that is right survives both.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from retrysafe.core.outbox.port import Outbox, outbox_of
from retrysafe.core.ports import Store, Transaction
from retrysafe.errors import StoreUnavailable

T = TypeVar("T")

if TYPE_CHECKING:
    # What the methods of a store are, its port says; there is no list of them here.
    _AnyPort = Any
else:
    _AnyPort = object


# The methods of the ports that can fail, as a test names them.
_PORTS: Final = {"": Store, "outbox.": Outbox, "transaction.": Transaction}
METHODS: Final = tuple(
    f"{prefix}{name}"
    for prefix, port in _PORTS.items()
    for name, member in vars(port).items()
    if inspect.iscoroutinefunction(member)
)


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


class _Faulty(_AnyPort):  # type: ignore[misc]  # A stand-in for any port.
    """Any object of a port: its methods go through `call`, everything else is the object's own."""

    def __init__(self, wrapped: Any, prefix: str, call: Callable[..., Any]) -> None:
        self._wrapped = wrapped
        self._prefix = prefix
        self._through = call

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":  # Not made yet, as while it is copied.
            raise AttributeError(name)
        found = getattr(self._wrapped, name)
        named = f"{self._prefix}{name}"
        return partial(self._through, named, found) if named in METHODS else found


class FaultyStore(_Faulty):
    """Any store, with faults injected at its port calls and a log of all of them.

    Without faults it behaves exactly as the store that it wraps.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, "", self._call)
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

    # The port, as far as it is more than methods.

    @property
    def outbox(self) -> Outbox:
        """The entries of the wrapped store; their faults are named `outbox.claim` and so on."""
        return cast("Outbox", _Faulty(outbox_of(self._store), "outbox.", self._call))

    @property
    def join(self) -> Callable[[object], Transaction]:
        """Joins a user's transaction; its faults are named `transaction.begin` and so on.

        A store that cannot join any has no such method, and then this one has none either.
        """
        wrapped: Any = self._store
        join: Callable[[object], Transaction] = wrapped.join
        return lambda connection: cast(
            "Transaction", _Faulty(join(connection), "transaction.", self._call)
        )

    async def _call(
        self,
        name: str,
        method: Callable[..., Coroutine[Any, Any, T]],
        *arguments: Any,
        **keywords: Any,
    ) -> T:
        logged, fault = self._begin(name, arguments)
        try:
            if fault is not None and fault.moment is Moment.BEFORE:
                raise fault.make_error(logged.call)
            answer = await method(*arguments, **keywords)
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

"""A tiny deterministic world for the engine: a clock that stands still, flows that are stepped.

Every wait is a pause that the test ends, so a race is an order of calls and nothing else.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.engine import Engine
from retrysafe.core.events import Event, EventKind, Reporter, Result
from retrysafe.core.keys.key import Key
from retrysafe.core.keys.secret import NO_SECRETS, Secrets
from retrysafe.core.lease import Lease
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    SettleAnswer,
    Settlement,
    State,
    StepWrite,
    StoredKey,
    StoredOutcome,
)
from retrysafe.core.one_call import OneCall
from retrysafe.core.ports import ExtendResult, Ports, Waits
from retrysafe.core.run_times import RunTimes
from retrysafe.core.settings import Settings
from retrysafe.errors import InvalidInput, StoreUnavailable
from retrysafe.stores.memory.store import MemoryStore
from tests.core.building import KEY

Invoke = Callable[[Attempt], Awaitable[Any]]
Join = Callable[[object], Any]


class Pause:
    """Suspends a flow until the test steps it again."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def drive(flow: Coroutine[Any, Any, Any]) -> Any:
    """Runs a flow that never pauses to its end."""
    try:
        flow.send(None)
    except StopIteration as stop:
        return stop.value
    flow.close()
    raise AssertionError("the flow paused")


class Flow:
    """A flow that is stepped from pause to pause."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def step(self) -> Flow:
        """Runs to the next pause, or to the end."""
        return self._run(lambda: self._coroutine.send(None))

    def throw(self, error: BaseException) -> Flow:
        """Goes on from the pause with an exception, as a cancellation does."""
        return self._run(lambda: self._coroutine.throw(error))

    def _run(self, resume: Callable[[], Any]) -> Flow:
        assert not self.is_done
        try:
            resume()
        except StopIteration as stop:
            self.is_done, self.value = True, stop.value
        except BaseException as error:
            self.is_done, self.error = True, error
        return self


@dataclass
class Clock:
    """One time for the store and for the process."""

    seconds: float = 1_000.0

    def now_ms(self) -> int:
        return round(self.seconds * 1000)

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class ManualSignal:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    async def wait(self, timeout_seconds: float | None) -> bool:
        ends = None if timeout_seconds is None else self._clock.seconds + timeout_seconds
        while not self._is_set:
            if ends is not None and self._clock.seconds >= ends:
                return False
            await Pause()
        return True


@dataclass
class ManualClock:
    """Sleeping moves the clock at once; what is to happen meanwhile can be told."""

    clock: Clock
    slept: list[float] = field(default_factory=list)
    meanwhile: deque[Callable[[], Any]] = field(default_factory=deque)
    pauses: bool = False
    on_signal: Callable[[], Any] | None = None

    def monotonic(self) -> float:
        return self.clock.seconds

    async def sleep(self, seconds: float) -> None:
        assert len(self.slept) < 1_000, "a sleep that never ends"
        self.slept.append(seconds)
        self.clock.advance(seconds)
        if self.meanwhile:
            self.meanwhile.popleft()()
        if self.pauses:
            await Pause()

    def signal(self) -> ManualSignal:
        if self.on_signal is not None:
            act, self.on_signal = self.on_signal, None
            act()
        return ManualSignal(self.clock)


@dataclass
class Fault:
    """What goes wrong with one call to the store, before or after it took effect."""

    error: BaseException | None = None
    is_after: bool = False
    pauses: bool = False
    # A pause between the effect and its answer, as when the process stands still.
    stalls: bool = False


class ScriptedWriter:
    """One row at a time to the store, with faults in the order in which they are to happen."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.claims: list[ClaimRequest] = []
        self.settlements: list[Settlement] = []
        self.payload_forms: list[str] = []
        self.claim_faults: deque[Fault | None] = deque()
        self.settle_faults: deque[Fault | None] = deque()

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        self.claims.append(request)

        async def act() -> Any:
            return (await self._store.commit([request], []))[0][0]

        return await _faulty(self.claim_faults, act)

    async def settle(self, settlement: Settlement) -> SettleAnswer:
        self.settlements.append(settlement)
        self.payload_forms.append(settlement.payload.form)

        async def act() -> Any:
            return (await self._store.commit([], [settlement]))[1][0]

        return await _faulty(self.settle_faults, act)


async def _faulty(faults: deque[Fault | None], act: Callable[[], Any]) -> Any:
    fault = (faults.popleft() if faults else None) or Fault()
    if fault.pauses:
        await Pause()
    if fault.error is not None and not fault.is_after:
        raise fault.error
    answer = await act()
    if fault.stalls:
        await Pause()
    if fault.error is not None:
        raise fault.error
    if isinstance(answer, Exception):
        raise answer
    return answer


class ScriptedStore:
    """What else the core asks a store, with faults in the order in which they are to happen."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.capabilities = store.capabilities
        self.reads = 0
        self.writes: list[str] = []
        self.confirmed: list[Extension] = []
        self.is_silent = False
        self.read_faults: deque[Fault | None] = deque()
        self.write_faults: deque[Fault | None] = deque()
        self.take_over_faults: deque[Fault | None] = deque()
        self.ending_faults: deque[Fault | None] = deque()

    async def read(self, key: Key) -> StoredKey | None:
        self.reads += 1
        return await _faulty(self.read_faults, lambda: self._store.read(key))

    async def record_step(self, write: StepWrite) -> Decision:
        self.writes.append(write.step.name)
        return await _faulty(self.write_faults, lambda: self._store.record_step(write))

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        return await _faulty(self.ending_faults, lambda: self._store.last_outcome(key))

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        return await _faulty(self.take_over_faults, lambda: self._store.take_over(request, held))

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        self.confirmed += extensions
        if self.is_silent:
            raise StoreUnavailable("no answer")
        return await self._store.extend(extensions, timeout_seconds)


class RecordedRenewals:
    def __init__(self) -> None:
        self.running: list[Lease] = []
        self.count = 0

    def add(self, lease: Lease) -> None:
        self.running.append(lease)
        self.count += 1

    def remove(self, lease: Lease) -> None:
        if lease in self.running:
            self.running.remove(lease)


current: ContextVar[Attempt | None] = ContextVar("current", default=None)


class DrivenExecutor:
    """Performs operations that take their attempt and nothing else; flows are stepped by tests."""

    step_lock = nullcontext()
    current = staticmethod(current.get)

    def __init__(self, join: Join | None = None) -> None:
        self._join = join

    async def perform(
        self, attempt: Attempt, operation: Invoke, _args: object, _kwargs: object
    ) -> Any:
        made = attempt.made = OneCall(operation, (attempt,))
        try:
            flow = made.make()
            made.go_on()
            value = await flow
        except BaseException as error:
            made.fail(error)
            raise
        made.end(value)
        return value

    async def perform_step(self, call: Callable[..., Any], made: OneCall) -> Any:
        """Makes the call of a step; what can be awaited is awaited."""
        value = made.make()
        if hasattr(value, "__await__"):
            made.go_on()
            try:
                value = await value
            except BaseException as error:
                made.fail(error)
                raise
            made.end(value)
        return value

    def drive(self, flow: Coroutine[Any, Any, Any], waits: Waits | None = None) -> Any:
        return flow if waits is None else drive(flow)

    def join(self, connection: object) -> Any:
        if self._join is None:
            raise InvalidInput("this store cannot work in a transaction")
        return self._join(connection)

    join_step = join

    def who(self) -> None:
        pass


def ports_over(writer: Any, clock: Any, **changes: Any) -> Ports:
    """Ports of which a test names only what matters to it."""
    fields: dict[str, Any] = {
        "store": None,
        "lock": threading.RLock(),
        "renewals": RecordedRenewals(),
        "background": None,
        "executor": DrivenExecutor(),
        "report": Reporter(None),
        "run_times": RunTimes(),
        "mint_token": lambda: os.urandom(16),
        "owner": "host:1",
    }
    return Ports(writer=writer, clock=clock, **{**fields, **changes})


class Heard(list[Event]):
    """What was reported; the first and the last event of each call are kept apart."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self._followed: list[Any] = []

    def hear(self, event: Event) -> None:
        if event.kind is EventKind.CALLED:
            self._followed.append(event.call)
        elif event.kind is EventKind.ANSWERED:
            # Each call has exactly one result.
            self._followed.remove(event.call)
            self.results.append(event.result)
        else:
            self.append(event)


class World:
    """An engine over a memory store, with everything around it in the test's hands."""

    def __init__(
        self, *, cache: bool = False, secret: bytes | None = None, join: Join | None = None
    ) -> None:
        self.join = join
        self.clock = Clock()
        self.store = MemoryStore(now_ms=self.clock.now_ms)
        self.heard = Heard()
        self.background: list[Coroutine[Any, Any, None]] = []
        # For each of them, what is called when nobody runs it to its end.
        self.abandon: list[Callable[[str], None]] = []
        self.ran: list[int] = []
        self._tokens = 0
        self._cache = cache
        self._secret = secret
        self._processes: list[Process] = []
        self.first = self.process()

    def process(self, *secrets: bytes | None) -> Process:
        """Another process on the same store, with secrets of its own if they are given."""
        made = Process(self, Secrets(*(secrets or (self._secret,))))
        self._processes.append(made)
        return made

    def mint_token(self) -> bytes:
        self._tokens += 1
        return self._tokens.to_bytes(16)

    def finish(self, flow: Coroutine[Any, Any, None], abandon: Callable[[str], None]) -> None:
        self.background.append(flow)
        self.abandon.append(abandon)

    @property
    def kinds(self) -> list[str]:
        """What was reported, in order."""
        return [event.kind.value for event in self.heard]


def state(world: World) -> State | None:
    """What has become of the tests' key; None when it has no record."""
    stored = drive(world.store.read(KEY))
    return None if stored is None else stored.record.state


class Process:
    """One engine with its own flights, cache and renewals."""

    def __init__(self, world: World, secrets: Secrets = NO_SECRETS) -> None:
        self.world = world
        self.writer = ScriptedWriter(world.store)
        self.store = ScriptedStore(world.store)
        self.clock = ManualClock(world.clock)
        self.renewals = RecordedRenewals()
        self._flows: list[Flow] = []
        self.ports = ports_over(
            self.writer,
            self.clock,
            store=self.store,
            renewals=self.renewals,
            background=world,
            executor=DrivenExecutor(world.join),
            report=Reporter(world.heard.hear),
            mint_token=world.mint_token,
        )
        self.settings = Settings(secrets=secrets, has_cache=world._cache)
        self.engine = Engine(self.ports, self.settings)

    def operating(self, operation: Invoke) -> Invoke:
        """The operation in its own context, as the executors run it."""

        async def invoke(attempt: Attempt) -> Any:
            token = current.set(attempt)
            try:
                return await operation(attempt)
            finally:
                current.reset(token)

        return invoke

    def start(self, call: Call, invoke: Invoke | None = None) -> Flow:
        """A call, run to its first pause."""
        flow = Flow(self.engine.answer(call, invoke or self.returning(7)))
        # Kept, because a flow that nobody refers to is closed on the spot, as if cancelled.
        self._flows.append(flow)
        return flow.step()

    def answer(self, call: Call, invoke: Invoke | None = None) -> Answer[Any]:
        """A call, run to its end."""
        return drive(self.engine.answer(call, invoke or self.returning(7)))

    def returning(self, value: Any) -> Invoke:
        async def operation(attempt: Attempt) -> Any:
            self.world.ran.append(attempt.number)
            return value

        return operation

    def raising(self, error: BaseException) -> Invoke:
        async def operation(attempt: Attempt) -> Any:
            self.world.ran.append(attempt.number)
            raise error

        return operation

    def pausing(self, ending: Any) -> Invoke:
        """Pauses once in the middle, then returns or raises the ending."""

        async def operation(attempt: Attempt) -> Any:
            self.world.ran.append(attempt.number)
            await Pause()
            if isinstance(ending, BaseException):
                raise ending
            return ending

        return operation

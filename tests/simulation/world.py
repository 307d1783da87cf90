"""One seed, one interleaving: processes with their engines over one store, and what befalls them.

Owns the shared store with its clock, the callers, the operations and the faults. The ledger of
`invariants` watches from outside; nothing here trusts what the engine says about itself.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Any

from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.engine import Engine
from retrysafe.core.events import Event, EventKind, Reporter
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimRequest,
    Decision,
    Extension,
    Fingerprint,
    OperatorCommand,
    Payload,
    Settlement,
    StepWrite,
    StoredKey,
    StoredOutcome,
)
from retrysafe.core.policy import InFlight
from retrysafe.core.ports import Lock, Ports
from retrysafe.core.run_times import RunTimes
from retrysafe.core.settings import Settings
from retrysafe.core.values.codec import WITHHELD, ValueCodec
from retrysafe.errors import (
    ClaimLost,
    KeyReused,
    OperationInFlight,
    StepNotStored,
    StoreError,
    StoreRejected,
)
from retrysafe.stores.memory.store import MemoryStore
from tests.core.driving import DrivenExecutor
from tests.simulation.answers import Busy, Declined, Unstorable, judge_answer
from tests.simulation.invariants import Close, Execution, Invariant, Ledger
from tests.simulation.ports import (
    Fault,
    SimulatedBackground,
    SimulatedClock,
    SimulatedRenewals,
    SimulatedWriter,
    TakeOver,
)
from tests.simulation.scenario import (
    DERIVED_LIMITS,
    KEYS,
    LEASE_SECONDS,
    PATIENT,
    POLICIES,
    RELEASE_LIMITS,
    REQUEST_OF,
    REQUESTS,
    CallerPlan,
    Scenario,
    draw_scenario,
)
from tests.simulation.scheduler import (
    READY,
    Hung,
    Interrupted,
    Process,
    Scheduler,
    Task,
    suspend,
)

# The store's clock starts far from zero, so that a confusion with a duration shows.
EPOCH_MS = 1_700_000_000_000
# Small steps, steps past every lease, and one back: hosts do correct their clocks.
JUMPS_MS = (40, 400, 1_100, 4_000, -300)
CODEC = ValueCodec()
# Of so many scenarios workers are part, and then every operation is resumable.
WORKER_RATE = 0.2
ARGUMENTS = Payload("json.1", b"", b"[[],{}]")
CURRENT: ContextVar[Attempt | None] = ContextVar("simulated_attempt", default=None)
FAULTS = tuple(Fault)
COMMANDS = tuple(OperatorCommand)


@dataclass(slots=True)
class Result:
    """What a seed showed; `violation` is None when everything held."""

    seed: int
    violation: str | None
    seen: Counter[str]
    trace: list[str]


class SimulatedExecutor(DrivenExecutor):
    """As in the tests of the core, with a lock and a context of its own; nobody has connections."""

    current = staticmethod(CURRENT.get)

    def __init__(self, lock: Lock) -> None:
        super().__init__()
        self.step_lock = lock


class Host:
    """A process and its engine."""

    __slots__ = ("clock", "engine", "process")

    def __init__(
        self, world: World, process: Process, lateness_seconds: float | None, has_cache: bool
    ) -> None:
        self.process = process
        self.clock = SimulatedClock(world, process)
        writer, lock = SimulatedWriter(world, process), threading.Lock()
        ports = Ports(
            store=writer,
            writer=writer,
            clock=self.clock,
            lock=lock,
            renewals=SimulatedRenewals(world, process, self.clock, writer, lateness_seconds),
            background=SimulatedBackground(world, process),
            executor=SimulatedExecutor(lock),
            report=world.report,
            run_times=RunTimes(),
            mint_token=world.mint_token,
            owner=process.name,
        )
        self.engine = Engine(ports, Settings(has_cache=has_cache))


class World:
    """Everything that one seed simulates."""

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self._chance = self.random.random
        self.seen: Counter[str] = Counter()
        self.trace: list[str] | None = [] if is_traced else None
        self.plan: Scenario = draw_scenario(self.random)
        # Drawn apart: what happens without a worker does not depend on whether there could be one.
        self.plan.has_worker = Random(f"worker {seed}").random() < WORKER_RATE
        self.scheduler = Scheduler(self.random, self.plan.tick_ms)
        self.ledger = Ledger(
            {KEYS[number].text: limit for number, limit in enumerate(self.plan.limits)},
            {
                KEYS[number].text: RELEASE_LIMITS[limit]
                for number, limit in enumerate(self.plan.limits)
            },
            REQUEST_OF,
            {
                KEYS[number].text
                for number, limit in enumerate(self.plan.limits)
                if limit in DERIVED_LIMITS
            },
        )
        self.report = Reporter(self._reported)
        self.store = MemoryStore(now_ms=self.store_now_ms)
        self._jumped_ms = 0
        self._tokens = 0
        self.hosts = [
            Host(self, Process(f"p{number}", rate, offset), lateness, has_cache)
            for number, (rate, offset, lateness, has_cache) in enumerate(self.plan.processes)
        ]
        if self.plan.laggard is not None:
            self.scheduler.laggard = self.hosts[self.plan.laggard].process

    # What the ports use.

    def store_now_ms(self) -> int:
        """The store's clock, which jumps."""
        return EPOCH_MS + int(self.scheduler.now_ms) + self._jumped_ms

    def mint_token(self) -> bytes:
        """Unique and reproducible."""
        self._tokens += 1
        return b"%016d" % self._tokens

    def draw_fault(self) -> Fault | None:
        """What goes wrong with the next row."""
        if self.plan.fault_rate and self._chance() < self.plan.fault_rate:
            return FAULTS[int(self._chance() * len(FAULTS))]
        return None

    async def apply(self, row: Any) -> Any:
        """Lets a row take effect, and the ledger judge the answer in the same instant."""
        now_ms = self.store_now_ms()
        if isinstance(row, ClaimRequest):
            ((answer,), _) = await self.store.commit([row], [])
            if isinstance(answer, StoreError):
                raise answer
            if self.ledger.claimed(row, answer, now_ms):
                self.saw("request corrected")
            self.saw(f"claim: {answer.decision.value}")
        elif isinstance(row, TakeOver):
            answer = await self.store.take_over(row.request, row.held)
            self.ledger.taken_over(row.request, row.held, answer, now_ms)
            self.saw(f"recovery: {answer.decision.value}")
        elif isinstance(row, StepWrite):
            decision = await self.store.record_step(row)
            self.ledger.step_recorded(row, decision)
            self.saw(f"step: {decision.value}")
            self.note(f"store: {_told(row)} -> {decision.value}")
            return decision
        elif isinstance(row, Extension):
            (answer,) = await self.store.extend([row], 1.0)
            self.ledger.extended(row, answer, now_ms)
            self.saw(f"extend: {answer.decision.value}")
        else:
            self._maybe_refuse(row)
            (_, (answer,)) = await self.store.commit([], [row])
            self.ledger.settled(row, answer, now_ms)
            self.saw(f"{row.kind.name.lower()}: {answer.decision.value}")
        if self.trace is not None:
            self.note(f"store: {_told(row)} -> {answer.decision.value}")
        return answer

    async def read(self, key: Key) -> StoredKey | None:
        """The record, with its steps, for the attempt that asks."""
        attempt = CURRENT.get()
        assert attempt is not None
        stored = await self.store.read(key)
        self.saw("steps read")
        if stored is None or stored.record.token != attempt.token:
            self.ledger.learned_of_loss(attempt.token)
        await suspend(READY)
        return stored

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The last ending, for whoever gives the key up."""
        self.saw("last ending read")
        return await self.store.last_outcome(key)

    def _maybe_refuse(self, row: Settlement) -> None:
        """Some outcomes the store cannot hold; it refuses them however often they are sent."""
        if row.payload is None or row.payload.form == WITHHELD:
            return
        ledger = self.ledger
        if row.token in ledger.answered_tokens:
            return  # What was stored once is not refused later.
        is_refused = row.token in ledger.refused_by_store
        if is_refused or (self.plan.fault_rate and self._chance() < 0.02):
            ledger.refused_by_store.add(row.token)
            raise StoreRejected("simulated: the store refuses this row")

    def send_late(self, row: Any) -> None:
        """The row takes effect later, when nobody waits for its answer any more."""
        if not self.scheduler.is_over:
            delay_ms = self.random.choice((0.0, 50.0, 1_500.0))
            self.scheduler.spawn(self._fly(copy.copy(row), delay_ms), None, "late row")

    def maybe_send_late(self, row: Any) -> None:
        """The row of somebody who is gone may be on its way, or not."""
        if not self.scheduler.is_over and self._chance() < 0.5:
            self.send_late(row)

    async def _fly(self, row: Any, delay_ms: float) -> None:
        await suspend(self.scheduler.now_ms + delay_ms)
        try:
            await self.apply(row)
        except StoreRejected:
            pass  # Nobody is there to be told.
        self.saw("row arrived late")

    # Operations.

    def _invoke(self, host: Host, plan: CallerPlan, caller: object) -> Any:
        ledger, chance = self.ledger, self._chance
        key = KEYS[plan.key].text

        async def invoke(attempt: Attempt) -> Any:
            run = ledger.start(
                key,
                attempt.token,
                number=attempt.number,
                caller=caller,
                process=host.process,
                request=plan.request,
            )
            self.note(f"run {run.text} starts as attempt {attempt.number}")
            CURRENT.set(attempt)
            is_careful = chance() < 0.2
            try:
                for number in range(self.plan.steps[plan.key]):
                    await self._step(host, attempt, f"step {number}", run)
                for _ in range(int(chance() * 3)):
                    await self._work(host)
                    if is_careful:
                        attempt.raise_if_lost()
            except ClaimLost:
                # It stops because it may no longer own the key, so this is not an ending.
                run.close = Close.CUT
                raise ClaimLost(run.text, key=key) from None
            except (StoreError, StepNotStored):
                # The operation cannot go on without its steps; it may be tried again.
                run.close = Close.RETRYABLE
                self.saw("no steps to go on from")
                raise Busy(run.text) from None
            except BaseException:
                run.close = Close.CUT
                self.note(f"run {run.text} is cut off")
                raise
            return self._end(run)

        return invoke

    async def _step(self, host: Host, attempt: Attempt, name: str, run: Execution) -> None:
        ledger = self.ledger

        async def effect() -> str:
            ledger.step_started(run.key, run.token, name)
            await self._work(host)
            self.saw("step ran")
            return f"{name} of {run.text}"

        value = await attempt.step(name, effect)
        ledger.step_given(run.key, run.token, name, value)
        if run.text not in value:
            self.saw("step skipped")

    async def _work(self, host: Host) -> None:
        host.process.check_alive()
        if self._chance() < self.plan.long_run_rate:
            await host.clock.sleep(self.random.choice((0.2, 0.7, 1.8, 4.0)) * LEASE_SECONDS)
        else:
            await suspend(READY)

    def _end(self, run: Execution) -> Any:
        draw = self._chance()
        if draw < 0.15:
            run.close = Close.TERMINAL
            raise Declined(run.text)
        if draw < 0.3:
            run.close = Close.RETRYABLE
            raise Busy(run.text)
        run.close = Close.RETURNED
        self.note(f"run {run.text} returns")
        if draw < 0.33:
            run.is_unstorable = True
            return Unstorable(run.text)
        return run.text

    # Callers and others.

    async def _caller(self, host: Host, plan: CallerPlan, name: str) -> Any:
        if plan.delay_seconds:
            await host.clock.sleep(plan.delay_seconds)
        key = KEYS[plan.key]
        call = Call(key, plan.fingerprints, plan.policy, "simulated", CODEC)
        if self.plan.limits[plan.key] in DERIVED_LIMITS:
            call.nothing_happened = plan.policy.is_nothing_happened
        if self.plan.has_worker:
            call.arguments = ARGUMENTS
        result: Any = None
        for _ in range(plan.tries):
            caller = object()
            was_busy = self.ledger.has_live_run(key.text)
            try:
                result = await host.engine.answer(call, self._invoke(host, plan, caller))
            except Exception as error:
                result = error
            self.note(f"{name} gets {result!r}")
            self._take(result, plan, was_busy)
            judge_answer(
                self.ledger,
                key=key.text,
                request=plan.request,
                caller=caller,
                result=result,
            )
            if isinstance(result, (Answer, KeyReused, Declined)):
                break
            await host.clock.sleep(plan.pause_seconds)
        return result

    def _take(self, result: Any, plan: CallerPlan, was_busy: bool) -> None:
        """Counts what the answer shows, so that a simulation of nothing would be noticed."""
        key = KEYS[plan.key].text
        if isinstance(result, Answer):
            is_waited = was_busy and plan.policy.in_flight is InFlight.WAIT
            self.saw("replayed after a wait" if result.replayed and is_waited else "answered")
        elif isinstance(result, KeyReused) and self.ledger.has_live_run(key):
            self.saw("mismatch in flight")
        else:
            self.saw(type(result).__name__)

    async def _worker(self, host: Host) -> None:
        """Takes over what it sees abandoned, late or soon after it has looked."""
        for _ in range(4):
            await host.clock.sleep(self._chance() * 1.5 * LEASE_SECONDS)
            for stored in await self.store.list_resumable(10, b"", ("simulated",)):
                await suspend(READY)
                await self._recover(host, stored)

    async def _recover(self, host: Host, stored: StoredKey) -> None:
        record, caller = stored.record, object()
        number, request = int(record.text[1:]), REQUEST_OF[record.fingerprint]
        mark = (Fingerprint(record.rule, record.fingerprint),)
        # The first of them never waits for others, as a worker does not.
        policy = POLICIES[self.plan.limits[number], False][0]
        plan = CallerPlan(0, number, request, mark, policy, 0.0, 1, 0.0)
        call = Call(KEYS[number], mark, policy, "simulated", CODEC, recovers=record.token)
        try:
            result: Any = await host.engine.answer(call, self._invoke(host, plan, caller))
        except Exception as error:
            result = error
        self.note(f"worker on {host.process.name} gets {result!r}")
        self.saw(f"worker: {type(result).__name__}")
        if not isinstance(result, ClaimLost):
            # Of a claim that it never had nobody needs to be told anything.
            judge_answer(
                self.ledger, key=record.text, request=request, caller=caller, result=result
            )

    async def _operator(self) -> None:
        for _ in range(2):
            await suspend(self.scheduler.now_ms + self._chance() * 1_500)
            key = KEYS[int(self._chance() * self.plan.keys)]
            command = self.random.choice(COMMANDS)
            now_ms = self.store_now_ms()
            decision = await self.store.operate(key, command)
            self.note(f"operator: {command.value} {key.text} -> {decision.value}")
            self.ledger.operated(key.text, command, decision, now_ms)
            if decision is Decision.APPLY:
                self.saw(f"operator: {command.value}")

    async def _sweeper(self) -> None:
        for _ in range(3):
            await suspend(self.scheduler.now_ms + self._chance() * 2_000)
            now_ms = self.store_now_ms()
            report = await self.store.sweep(100)
            self.ledger.swept(now_ms)
            if report.keys:
                self.saw("swept")

    # The course of a seed.

    def run(self) -> Result:
        """Runs the scenario, then a last caller per key that must get an answer."""
        for number, plan in enumerate(self.plan.callers):
            host = self.hosts[plan.process]
            name = f"caller {number} on {host.process.name}"
            self.scheduler.spawn(self._caller(host, plan, name), host.process, name, True)
        if self.plan.has_operator:
            self.scheduler.spawn(self._operator(), None, "operator")
        if self.plan.has_worker:
            for host in self.hosts[:2]:
                self.scheduler.spawn(
                    self._worker(host), host.process, f"worker on {host.process.name}", True
                )
        if self.plan.has_sweeper:
            self.scheduler.spawn(self._sweeper(), None, "sweeper")
        try:
            self.scheduler.run(self._before_step)
            self.ledger.check_nothing_lost()
            if self.ledger.violation is None:
                self._ask_once_more()
        except Hung as error:
            self.ledger.violated(Invariant.NO_HANG, str(error))
        except Exception as error:
            self.ledger.violated(Invariant.HONEST_ANSWER, f"a task ended with {error!r}")
        finally:
            self.scheduler.close()
        return Result(self.seed, self.ledger.violation, self.seen, self.trace or [])

    def _before_step(self, task: Task) -> BaseException | None:
        """What befalls the world before this task goes on; the result is thrown into it."""
        if self.ledger.violation is not None:
            self.scheduler.is_over = True
            return None
        plan, chance = self.plan, self._chance
        if plan.jump_rate and chance() < plan.jump_rate:
            jump_ms = self.random.choice(JUMPS_MS)
            self._jumped_ms += jump_ms
            self.note(f"the store's clock jumps by {jump_ms} ms")
        if task.process is None:
            return None
        if plan.crash_rate and chance() < plan.crash_rate:
            self.note(f"{task.process.name} crashes")
            self.saw("process crashed")
            self.scheduler.kill(task.process)
            return None
        if task.is_caller and plan.cancel_rate and chance() < plan.cancel_rate:
            self.note(f"{task.name} is cancelled")
            self.saw("caller cancelled")
            return Interrupted()
        if self.trace is not None:
            self.note(f"{task.name} goes on")
        return None

    def _ask_once_more(self) -> None:
        """In quiet weather, every key that was ever claimed answers a patient caller."""
        plan = self.plan
        plan.crash_rate = plan.cancel_rate = plan.fault_rate = plan.jump_rate = 0.0
        host = Host(self, Process("last", 1.0, 0.0), 0.0, False)
        for key, truth in list(self.ledger.truths.items()):
            number = int(key[1:])
            last = CallerPlan(
                process=0,
                key=number,
                request=truth.request,
                fingerprints=REQUESTS[truth.request][0],
                policy=PATIENT[plan.limits[number]],
                delay_seconds=0.0,
                tries=1,
                pause_seconds=0.0,
            )
            self.scheduler.spawn(self._last(host, last), host.process, f"last caller of {key}")
        self.scheduler.run(self._before_step)

    async def _last(self, host: Host, plan: CallerPlan) -> None:
        result = await self._caller(host, plan, "last caller")
        if isinstance(result, (OperationInFlight, StoreError, KeyReused)):
            self.ledger.violated(Invariant.HONEST_ANSWER, f"the last caller got {result!r}")

    # What is seen.

    def _reported(self, event: Event) -> None:
        self.saw(event.kind.value)
        if event.kind is EventKind.SETTLE_FAILED:
            self.ledger.given_up.add((event.key.text, event.attempt))
        elif event.kind is EventKind.POSTPONED:
            # Left to the lease on purpose: the next worker tries again.
            self.ledger.given_up.add((event.key.text, event.attempt))

    def saw(self, what: str) -> None:
        """Counts something that the simulation must have shown at least once."""
        self.seen[what] += 1

    def note(self, line: str) -> None:
        """Adds a line to the trace, when there is one."""
        if self.trace is not None:
            self.trace.append(f"{self.scheduler.now_ms:10.1f} ms  {line}")


def run_seed(seed: int, *, is_traced: bool = False) -> Result:
    """Simulates one seed; equal seeds give equal results in any process."""
    return World(seed, is_traced=is_traced).run()


def _told(row: Any) -> str:
    kind = "claim"
    if isinstance(row, Settlement):
        kind = row.kind.name.lower()
    elif isinstance(row, Extension):
        kind = "extend"
    elif isinstance(row, StepWrite):
        kind = row.step.name
    elif isinstance(row, TakeOver):
        kind = "take over"
    return f"{kind} {row.key.text} by {row.token.lstrip(b'0').decode()}"

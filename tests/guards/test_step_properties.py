"""One property per guard of durable steps; as `test_properties`, plain and short."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from retrysafe import (
    AsyncIdempotency,
    ClaimLost,
    Idempotency,
    InvalidInput,
    OperationInFlight,
    OutcomeNotStored,
    Policy,
    current_attempt,
)
from retrysafe.errors import StepNotStored, StepReused, StepsChanged, StoreMissing
from retrysafe.stores import Condition, MemoryStore
from retrysafe.testing import FaultyStore, Moment


class Declined(Exception):
    """The failure for good."""


class Later(Exception):
    """A failure that frees the key."""


class Stop(BaseException):
    """The end of the process."""


POLICY = Policy(terminal=Declined, lease=timedelta(seconds=30))


@contextmanager
def shop(store: MemoryStore | None = None) -> Iterator[tuple[Idempotency, list[str]]]:
    """A face, and what the steps really did."""
    with Idempotency(store or MemoryStore(), caller="shop", policy=POLICY, cache=False) as idem:
        yield idem, []


def run(idem: Idempotency, operation, *args):
    return idem.run("order", operation, *args, name="place", request=None)


def steps(ran: list[str], *names: str, error: BaseException | None = None, undo=None):
    def operation():
        for name in names:
            current_attempt().step(name, ran.append, name, compensate=undo and undo(name))
        if error is not None:
            raise error

    return operation


def test_a_recorded_step_is_not_run_again():
    """The next attempt skips it."""
    with shop() as (idem, ran):
        with pytest.raises(Later):
            run(idem, steps(ran, "charge", error=Later()))
        run(idem, steps(ran, "charge", "mail"))
        assert ran == ["charge", "mail"]


def test_a_step_is_recorded_before_the_operation_goes_on():
    """What comes after it finds it in the store."""
    with shop() as (idem, ran):

        def operation():
            current_attempt().step("charge", ran.append, "charge")
            return [step.name for step in idem.read("order").steps]

        assert run(idem, operation) == ["charge"]


def test_a_refused_step_ends_the_operation():
    """It does not come to its next effect."""
    with shop() as (idem, ran):

        def operation():
            attempt = current_attempt()
            attempt.step("charge", lambda: idem.release("order", force=True))
            ran.append("next effect")

        with pytest.raises(ClaimLost):
            run(idem, operation)
        assert ran == []


def test_the_steps_of_a_successor_are_not_used():
    """An owner that has lost its key is told when it asks for the stored steps."""
    with shop() as (idem, ran), shop(idem._calls.store) as (other, _):
        with pytest.raises(Later):
            run(idem, steps(ran, error=Later()))

        def operation():
            other.release("order", force=True)
            run(other, steps(ran, "charge"))
            with pytest.raises(ClaimLost):
                current_attempt().step("charge", ran.append, "charge")

        with pytest.raises(ClaimLost):
            run(idem, operation)
        assert ran == ["charge"]


def test_no_step_starts_on_a_lease_that_has_run_out():
    """Somebody else may have run it by now, and only the store can tell."""
    with shop() as (idem, ran), shop(idem._calls.store) as (other, _):

        def operation():
            attempt = current_attempt()
            attempt._lease.ends_monotonic = 0.0
            other.release("order", force=True)
            attempt.step("charge", ran.append, "charge")

        with pytest.raises(ClaimLost):
            run(idem, operation)
        assert ran == []


def test_a_changed_order_is_refused():
    """The results of an operation under way are not mixed with those of new code."""
    with shop() as (idem, ran):
        with pytest.raises(Later):
            run(idem, steps(ran, "reserve", "charge", error=Later()))
        with pytest.raises(StepsChanged):
            run(idem, steps(ran, "charge", "reserve"))


def test_a_name_is_one_step():
    """The second one of a name is refused."""
    with shop() as (idem, ran):
        with pytest.raises(StepReused):
            run(idem, steps(ran, "charge", "charge"))
        assert ran == ["charge"]


def test_no_recorded_step_is_left_out():
    """An operation that has done something must ask for it before it completes."""
    with shop() as (idem, ran):
        with pytest.raises(Later):
            run(idem, steps(ran, "charge", error=Later()))
        with pytest.raises(StepsChanged):
            run(idem, steps(ran))
        assert idem.read("order").condition is Condition.RELEASED


def crashing_undo(ran: list[str], at: str):
    """Compensations of which one ends the process, the first time."""
    crashes = [Stop()]

    def undo(name: str):
        def call(_):
            if name == at and crashes:
                raise crashes.pop()
            ran.append(f"undo {name}")

        return call

    return undo


def crashed_undoing(idem: Idempotency, ran: list[str]):
    """An operation that failed for good and crashed after it had undone one of two steps."""
    undo = crashing_undo(ran, "a")
    with pytest.raises(Stop):
        run(idem, steps(ran, "a", "b", error=Declined("no"), undo=undo))
    idem.release("order", force=True)
    return undo


def test_a_failure_is_durable_before_anything_is_undone():
    """A later attempt whose code would succeed still fails."""
    with shop() as (idem, ran):
        undo = crashed_undoing(idem, ran)
        with pytest.raises(Declined):
            run(idem, steps(ran, "a", "b", "c", undo=undo))
        assert idem.read("order").condition is Condition.FAILED


def test_what_is_undone_is_remembered():
    """A later attempt undoes the rest only."""
    with shop() as (idem, ran):
        undo = crashed_undoing(idem, ran)
        with pytest.raises(Declined):
            run(idem, steps(ran, "a", "b", undo=undo))
        assert ran == ["a", "b", "undo b", "undo a"]


def test_no_ending_is_settled_while_a_step_is_under_way():
    """A key is not freed before the step that a sibling's failure left behind is recorded."""

    async def scenario():
        charging = asyncio.Event()
        seen = []
        async with AsyncIdempotency(MemoryStore(), caller="shop", policy=POLICY) as idem:

            async def charge():
                await charging.wait()
                seen.append((await idem.read("order")).condition)

            async def fail():
                # Once the operation's own task is through, the charge goes on.
                asyncio.get_running_loop().call_later(0.01, charging.set)
                raise Later

            async def operation():
                step = current_attempt().step
                await asyncio.gather(step("charge", charge), step("mail", fail))

            with pytest.raises(Later):
                await idem.run("order", operation, name="x", request=None)
            return seen, [step.name for step in (await idem.read("order")).steps]

    assert asyncio.run(scenario()) == ([Condition.RUNNING], ["charge"])


def test_a_key_is_not_freed_while_a_step_is_not_recorded():
    """A store that cannot be told of it leaves the key to its lease."""
    store = FaultyStore(MemoryStore())
    store.fail(
        Moment.BEFORE, method="record_step", times=None, error=lambda _: StoreMissing("gone")
    )
    with shop(store) as (idem, ran):

        def operation():
            with pytest.raises(StepNotStored):
                current_attempt().step("charge", ran.append, "charge")
            raise Later

        with pytest.raises(OutcomeNotStored):
            run(idem, operation)
        assert idem.read("order").condition is Condition.RUNNING
        with pytest.raises(OperationInFlight):
            run(idem, steps(ran, "charge"))
        assert ran == ["charge"]


def test_a_step_that_was_not_written_is_written_before_the_key_is_freed():
    """The store was out for one write only: the retry finds the step."""
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="record_step", error=lambda _: StoreMissing("gone"))
    with shop(store) as (idem, ran):

        def operation():
            with pytest.raises(StepNotStored):
                current_attempt().step("charge", ran.append, "charge")
            raise Later

        with pytest.raises(Later):
            run(idem, operation)
        run(idem, steps(ran, "charge"))
        assert ran == ["charge"]


def test_an_ending_outlives_its_caller():
    """A caller that is cancelled while its ending waits for a step loses no outcome."""

    async def scenario():
        charging = asyncio.Event()
        async with AsyncIdempotency(MemoryStore(), caller="shop", policy=POLICY) as idem:
            ended = asyncio.Event()
            tasks = []

            async def operation():
                tasks.append(asyncio.create_task(current_attempt().step("charge", charging.wait)))
                await asyncio.sleep(0)  # The step begins.
                ended.set()
                return "done"

            caller = asyncio.create_task(idem.run("order", operation, name="x", request=None))
            await ended.wait()
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            charging.set()
            await idem._calls.bound().loop_ports.background.drain()
            await asyncio.gather(*tasks)
            return (await idem.read("order")).condition

    assert asyncio.run(scenario()) is Condition.SUCCEEDED


def test_no_step_runs_beside_an_open_transaction():
    """It is refused before its call is made."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shop.db"
        ran: list[str] = []

        def operation():
            attempt = current_attempt()
            with closing(sqlite3.connect(path)) as connection:
                attempt.step("book", ran.append, "book", in_transaction=connection)
                with pytest.raises(InvalidInput):
                    attempt.step("mail", ran.append, "mail")

        policy = POLICY.with_changes(settle_patience=timedelta(0))
        with Idempotency(f"sqlite:///{path}", caller="shop", policy=policy) as idem:
            run(idem, operation)
        assert ran == ["book"]

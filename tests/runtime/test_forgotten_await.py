"""A forgotten `await` is a failure, never a success: what was not awaited has not run."""

from __future__ import annotations

import asyncio

import pytest

from retrysafe import (
    AsyncIdempotency,
    Ending,
    Idempotency,
    InvalidInput,
    OperationFailed,
    Policy,
    current_attempt,
    step,
)
from retrysafe.errors import AwaitForgotten
from retrysafe.stores import Condition


async def charge_later(customer, amount):
    return {"customer": customer, "amount": amount}


class Till:
    """What was really done."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def charge(self, what="charge"):
        self.ran.append(what)
        return f"{what} done"


@pytest.fixture
def till() -> Till:
    return Till()


def played(scenario, **options):
    """Runs a scenario with an object of its own, and gives what it returns."""

    async def play():
        async with AsyncIdempotency("memory://", caller="c", **options) as idem:
            return await scenario(idem)

    return asyncio.run(play())


def test_an_operation_that_forgets_to_await_a_step_does_not_succeed(till):
    """The key is freed, the steps that ran are kept, and the corrected operation goes on."""

    async def forgetful():
        await current_attempt().step("reserve", till.charge, "reserve")
        current_attempt().step("charge", till.charge)
        return "ok"

    async def corrected():
        await current_attempt().step("reserve", till.charge, "reserve")
        return await current_attempt().step("charge", till.charge)

    async def scenario(idem):
        with pytest.raises(AwaitForgotten, match="of 'k' asked for 'charge' and did not await it"):
            await idem.run("k", forgetful, name="pay", request=None)
        stored = await idem.read("k")
        assert stored.condition is Condition.RELEASED
        assert [item.name for item in stored.steps] == ["reserve"]
        return await idem.answer("k", corrected, name="pay", request=None)

    answer = played(scenario)
    assert (answer.value, answer.attempt) == ("charge done", 2)
    assert till.ran == ["reserve", "charge"]


def test_a_decorated_step_and_one_that_is_returned_are_missed_too(till):
    """The other ways to ask for a step and not to await it."""
    decorated = step("charge")(till.charge)

    async def calling():
        decorated()

    async def returning():
        return current_attempt().step("charge", till.charge)

    async def scenario(idem):
        for operation in (calling, returning):
            with pytest.raises(AwaitForgotten, match="asked for 'charge' and did not await it"):
                await idem.run(f"k {operation.__name__}", operation, request=None)

    played(scenario)
    assert till.ran == []


def test_a_plain_function_that_returns_a_step_has_it_awaited(till):
    """As it has everything awaited that it returns."""

    async def scenario(idem):
        return await idem.run(
            "k", lambda: current_attempt().step("charge", till.charge), request=None
        )

    assert played(scenario) == "charge done"


def test_a_step_left_to_a_task_that_has_not_begun_is_missed(till):
    """The operation takes no step after its end, so this one would never run."""

    async def scenario(idem):
        tasks = []

        async def operation():
            tasks.append(asyncio.create_task(current_attempt().step("charge", till.charge)))
            return "ok"

        with pytest.raises(AwaitForgotten, match="asked for 'charge' and did not await it"):
            await idem.run("k", operation, request=None)
        with pytest.raises(InvalidInput, match="has ended: it takes no steps"):
            await tasks[0]

    played(scenario)
    assert till.ran == []


def test_a_step_that_was_cancelled_before_it_began_is_not_missed(till):
    """To decide against a step is not to forget it."""

    async def operation():
        task = asyncio.create_task(current_attempt().step("charge", till.charge))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return "without"

    async def scenario(idem):
        return await idem.run("k", operation, request=None)

    assert played(scenario) == "without"
    assert till.ran == []


def test_what_the_operation_raises_is_told_and_not_what_it_forgot(till):
    """The first problem is the one to mend."""

    async def operation():
        current_attempt().step("charge", till.charge)
        raise LookupError("no such customer")

    async def scenario(idem):
        with pytest.raises(LookupError, match="no such customer"):
            await idem.run("k", operation, request=None)

    played(scenario)


def test_a_policy_that_fails_on_the_unknown_fails_on_a_forgotten_step_too(till):
    """It is judged as every other exception of the operation."""

    async def operation():
        current_attempt().step("charge", till.charge)

    async def scenario(idem):
        with pytest.raises(AwaitForgotten, match="did not await it"):
            await idem.run("k", operation, request=None)
        return (await idem.read("k")).condition

    assert played(scenario, policy=Policy(unlisted=Ending.FAILED)) is Condition.FAILED


def test_what_ran_before_a_returned_coroutine_does_not_run_again(till):
    """Whatever the policy says of exceptions, a retry gets the failure and runs nothing."""

    async def operation():
        await till.charge()
        return till.charge("receipt")

    async def scenario(idem):
        for _ in range(2):
            with pytest.raises(AwaitForgotten, match="was not awaited"):
                await idem.run("k", operation, request=None)

    played(scenario, policy=Policy(retryable=(Exception,)))
    assert till.ran == ["charge"]


def test_a_coroutine_is_no_result(till):
    """It was only made. What else the operation did nobody knows, so it fails for good."""

    async def forgetful():
        return till.charge()

    async def scenario(idem):
        with pytest.raises(
            AwaitForgotten,
            match=r"the operation returned a coroutine that was not awaited, so Till.charge has",
        ):
            await idem.run("k", forgetful, name="pay", request=None)
        assert (await idem.read("k")).condition is Condition.FAILED
        await idem.release("k")
        return await idem.run("k", till.charge, name="pay", request=None)

    assert played(scenario) == "charge done"
    assert till.ran == ["charge"]


def test_a_coroutine_is_no_result_of_a_step(till):
    """The step is not recorded as done, and may be asked for again."""

    async def forgetful():
        return till.charge()

    async def operation():
        attempt = current_attempt()
        with pytest.raises(AwaitForgotten, match="step returned a coroutine that was not awaited"):
            await attempt.step("charge", forgetful)
        assert till.ran == []
        return await attempt.step("charge", till.charge)

    async def scenario(idem):
        return await idem.run("k", operation, request=None)

    assert played(scenario) == "charge done"


def test_steps_beside_a_wrong_one_leave_no_coroutine_behind():
    """In a gather the wrong step is found while the others are only asked for."""

    async def both():
        attempt = current_attempt()
        await asyncio.gather(
            attempt.step("a", charge_later, "c1", 1),
            attempt.step("b", charge_later("c1", 2)),
        )

    async def scenario():
        async with AsyncIdempotency("memory://", caller="c") as idem:
            with pytest.raises(InvalidInput, match=r"step\(\"charge\", charge, 500\), not its res"):
                await idem.run("k", both)
            return await idem.read("k")

    stored = asyncio.run(scenario())
    assert stored.condition.value == "released"
    assert stored.steps == []


def test_a_plain_function_that_returns_a_coroutine_fails_for_good_in_a_thread(till):
    """What it did before it made the coroutine must not be done again."""

    def operation():
        till.ran.append("charge")
        return till.charge("receipt")

    with Idempotency("memory://", caller="c") as idem:
        with pytest.raises(AwaitForgotten, match="a coroutine that nobody awaits here"):
            idem.run("k", operation, request=None)
        with pytest.raises(OperationFailed, match="use AsyncIdempotency"):
            idem.run("k", operation, request=None)
    assert till.ran == ["charge"]


def test_an_object_that_is_async_itself_has_done_nothing_in_a_thread():
    """Calling it only makes a coroutine: the key is freed."""

    class Charge:
        async def __call__(self):
            raise AssertionError("nobody awaits it")

    with Idempotency("memory://", caller="c") as idem:
        with pytest.raises(InvalidInput, match="the operation is async: use AsyncIdempotency"):
            idem.run("k", Charge(), name="pay", request=None)
        assert idem.read("k").condition is Condition.RELEASED

"""Durable steps as users write them, on both faces: tasks, threads, decorators, failures."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    InvalidInput,
    Policy,
    StepRetry,
    current_attempt,
    step,
)
from retrysafe.errors import (
    CompensationFailed,
    StepNotStored,
    StepReused,
    StepsChanged,
    StepUnavailable,
)
from retrysafe.stores import Condition, MemoryStore
from retrysafe.testing.faults import FaultyStore, Moment


class Broken(Exception):
    """A failure that frees the key."""


class Declined(Exception):
    """A failure for good."""


class Sold(StopIteration):
    """A failure for good that no coroutine raises."""


FINAL = Policy(terminal=Declined)


class Shop:
    """One operation for both faces: steps one after the other, then an ending."""

    def __init__(self, subject) -> None:
        self.subject = subject
        self.is_async = hasattr(subject, "_runner")
        self.ran: list[object] = []
        # What the steps gave to the operation, over all attempts.
        self.values: list[object] = []

    def do(self, what):
        self.ran.append(what)
        return {"done": what}

    def undo(self, result):
        self.ran.append(f"undo {result['done']}")

    def run(self, *steps, error=None, returns="complete", policy=None, **options):
        """Runs the steps, each a name or a tuple of what `step` takes and its options."""

        def made():
            for item in steps:
                name, call, args, more = (
                    item if isinstance(item, tuple) else (item, self.do, (), {})
                )
                yield current_attempt().step(name, call, *(args or (name,)), **more)

        def ended():
            if error is not None:
                raise error
            return returns

        if self.is_async:

            async def operation():
                for item in made():
                    assert inspect.isawaitable(item)
                    self.values.append(await item)
                return ended()

        else:

            def operation():
                self.values.extend(made())
                return ended()

        return self.subject.run(
            "order-1", operation, name="place", request=None, policy=policy, **options
        )


@pytest.fixture
def shop(subject, url) -> Shop:
    return Shop(subject(url, caller="tenant"))


def test_a_retry_goes_on_from_the_last_step(shop):
    """What was done is not done again."""
    with pytest.raises(Broken):
        shop.run("reserve", "charge", error=Broken())
    assert shop.run("reserve", "charge", "receipt") == "complete"
    assert shop.ran == ["reserve", "charge", "receipt"]


def test_a_changed_operation_is_refused(shop):
    """The next attempt must ask for the same steps in the same order."""
    with pytest.raises(Broken):
        shop.run("reserve", "charge", error=Broken())
    with pytest.raises(StepsChanged):
        shop.run("charge", "reserve")
    with pytest.raises(StepsChanged):
        shop.run("reserve")
    with pytest.raises(StepsChanged):
        shop.run()
    with pytest.raises(StepReused):
        shop.run("reserve", "reserve")
    assert shop.run("reserve", "charge") == "complete"
    assert shop.ran == ["reserve", "charge"]


def test_retries_terminal_failures_and_ways_back(shop):
    """The charge is tried three times and declined; the reservation is taken back."""

    def decline(amount):
        shop.ran.append(amount)
        raise (Declined if len(shop.ran) == 4 else Broken)("no")

    retry = StepRetry(tries=5, pause=timedelta(0))
    with pytest.raises(Declined):
        shop.run(
            ("reserve", shop.do, ("chair",), {"compensate": shop.undo}),
            ("charge", decline, (100,), {"retry": retry, "terminal": Declined}),
        )
    assert shop.ran == ["chair", 100, 100, 100, "undo chair"]
    stored = shop.subject.call("read", "order-1")
    assert stored.condition is Condition.FAILED
    assert [item.name for item in stored.steps] == ["reserve", "!failed", "!undo reserve"]


def test_a_step_that_raises_stop_iteration_is_judged_by_that(shop):
    """Tried again where the retry lists it, and terminal where the step does."""

    def decline(amount):
        shop.ran.append(amount)
        raise StopIteration("no") if len(shop.ran) < 3 else Sold("no")

    retry = StepRetry(tries=5, pause=timedelta(0), on=StopIteration)
    with pytest.raises(RuntimeError) as caught:
        shop.run(("charge", decline, (100,), {"retry": retry, "terminal": Sold}))
    assert type(caught.value.__cause__) is Sold
    assert shop.ran == [100, 100, 100]
    assert shop.subject.call("read", "order-1").condition is Condition.FAILED


def test_a_way_back_that_fails_is_finished_by_the_next_attempt(shop):
    """The failure stays what it was."""
    broken = [OSError("no route")]

    def undo(result):
        if broken:
            raise broken.pop()
        shop.undo(result)

    steps = (("reserve", shop.do, ("chair",), {"compensate": undo}),)
    with pytest.raises(CompensationFailed):
        shop.run(*steps, error=Declined("no"), policy=FINAL)
    with pytest.raises(Declined, match="no"):
        shop.run(*steps, "charge", policy=FINAL)
    assert shop.ran == ["chair", "undo chair"]


@dataclass
class Receipt:
    number: int


def make_receipt(number: int) -> Receipt:
    return Receipt(number)


def test_results_come_back_as_what_they_were(shop):
    """By the call's annotation, seen through a partial; or by `returns`."""

    @dataclass
    class Local:
        """No module has it, so that only a declaration finds it."""

        number: int

    def make_local(number) -> Local:
        return Local(number)

    def make_unannounced(number):
        return Local(number)

    make_local.__annotations__["return"] = Local
    for _ in range(2):
        with pytest.raises(Broken):
            shop.run(
                ("a", make_local, (7,), {}),
                ("b", partial(partial(make_local)), (7,), {}),
                ("c", make_unannounced, (7,), {"returns": Local}),
                error=Broken(),
            )
    assert shop.values == [Local(7)] * 6
    with pytest.raises(StepUnavailable, match="not loaded here"):
        shop.run(("a", make_unannounced, (7,), {}))


def test_a_result_that_cannot_be_stored_is_not_run_again(shop):
    """The first attempt uses it; the next one is told that it is gone."""
    steps = (("charge", lambda name: shop.do(name) and object(), (), {}),)
    with pytest.raises(Broken):
        shop.run(*steps, error=Broken())
    with pytest.raises(StepUnavailable):
        shop.run(*steps)
    assert shop.ran == ["charge"]


def test_a_generator_is_no_step(shop):
    """Calling one runs nothing, so it could be recorded as done without being done."""

    def generate(name):
        yield name

    with pytest.raises(InvalidInput, match="generator"):
        shop.run(("charge", generate, (), {}))
    assert shop.subject.call("read", "order-1").steps == []


def test_the_cost_of_steps_in_store_calls(subject):
    """One write per step; one read for a later attempt; nothing for operations without steps."""
    store = FaultyStore(MemoryStore())
    shop = Shop(subject(store, caller="tenant", cache=False))
    with pytest.raises(Broken):
        shop.run("a", "b", error=Broken())
    assert [item.method for item in store.calls] == [
        "commit",
        "record_step",
        "record_step",
        "commit",
    ]
    shop.run("a", "b", "c")
    assert [item.method for item in store.calls[4:]] == ["commit", "read", "record_step", "commit"]
    shop.run("a", "b", "c")
    assert [item.method for item in store.calls[8:]] == ["commit"]
    shop.subject.run("plain", lambda: 1)
    assert [item.method for item in store.calls[9:]] == ["commit", "commit"]


def test_a_store_that_stays_silent_is_reported_with_the_value(subject):
    """The step ran; whoever catches the error has its result."""
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="record_step", times=None)
    shop = Shop(subject(store, caller="tenant"))
    policy = Policy(settle_patience=timedelta(milliseconds=10))
    with pytest.raises(StepNotStored) as caught:
        shop.run("charge", policy=policy)
    assert caught.value.value == {"done": "charge"}


# Tasks.


def run_async(store, scenario):
    async def main():
        async with AsyncIdempotency(store, caller="tenant") as idem:
            return await scenario(idem)

    return asyncio.run(main())


def test_steps_of_tasks_run_side_by_side(url):
    """All of a gather are under way together, in any order; each runs once over two attempts."""
    ran = []

    async def scenario(idem):
        async def operation(order, error):
            attempt = current_attempt()
            await attempt.step("start", ran.append, "start")
            barrier = asyncio.Barrier(len(order))

            async def charge(item):
                await barrier.wait()  # Nobody passes before all of them are here.
                ran.append(item)
                return item

            async def branch(item):
                value = await attempt.step(f"charge {item}", charge, item)
                await attempt.step(f"mail {item}", ran.append, f"mail {item}")
                return value

            values = await asyncio.gather(*(branch(item) for item in order))
            await attempt.step("end", ran.append, "end")
            if error is not None:
                raise error
            return sorted(values)

        with pytest.raises(Broken):
            await idem.run("k", operation, "abc", Broken(), name="x", request=None)
        assert len(ran) == len(set(ran)) == 8
        value = await idem.run("k", operation, "cba", None, name="x", request=None)
        stored = await idem.read("k")
        return value, {item.name: item.position for item in stored.steps}

    value, positions = run_async(url, scenario)
    assert value == ["a", "b", "c"]
    assert len(ran) == 8
    assert positions == {
        "start": 1,
        **{f"charge {item}": 2 for item in "abc"},
        **{f"mail {item}": 3 for item in "abc"},
        "end": 2,
    }


def test_a_cancelled_operation_keeps_the_step_that_it_had_finished(url):
    """The write is on its way when the caller is cancelled; the next attempt skips the step."""
    ran = []

    async def scenario(idem):
        policy = Policy(lease=timedelta(milliseconds=200))
        loop_ports = idem._calls.bound().loop_ports
        record_step = loop_ports.store.record_step
        writing = asyncio.Event()

        async def record_and_tell(write):
            writing.set()
            return await record_step(write)

        loop_ports.store.record_step = record_and_tell

        async def operation():
            await current_attempt().step("charge", ran.append, "charge")
            return "done"

        task = asyncio.create_task(idem.run("k", operation, policy=policy, request=None))
        await writing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await loop_ports.background.drain()
        stored = await idem.read("k")
        assert [item.name for item in stored.steps] == ["charge"]
        await idem.release("k", force=True)
        return await idem.run("k", operation, policy=policy, request=None)

    assert run_async(url, scenario) == "done"
    assert ran == ["charge"]


def test_a_plain_function_is_a_step_of_an_async_operation():
    """It is called in the loop's thread, and its result is awaited with the step."""

    async def scenario(idem):
        async def operation():
            return await current_attempt().step("charge", threading.get_ident)

        return await idem.run("k", operation, request=None)

    assert run_async("memory://", scenario) == threading.get_ident()


def test_an_async_function_is_no_step_of_a_blocking_operation():
    """Nothing of it runs, and the advice says which face to use."""

    async def charge():
        raise AssertionError("must not run")

    def operation():
        current_attempt().step("charge", charge)

    with (
        Idempotency("memory://", caller="tenant") as idem,
        pytest.raises(InvalidInput, match="AsyncIdempotency"),
    ):
        idem.run("k", operation, request=None)


@pytest.mark.parametrize("error", [Broken("mail"), Declined("fraud")], ids=["freed", "failed"])
def test_a_step_that_a_gather_leaves_behind_is_waited_for(url, error):
    """Its sibling fails first; the key is settled after it is recorded, and it runs once."""
    ran = []

    async def scenario(idem):
        may_end = asyncio.Event()

        async def charge():
            await may_end.wait()
            ran.append((await idem.read("k")).condition)
            return "paid"

        async def mail(number):
            if number == 1:
                # By then the operation has ended, and its ending waits for the charge.
                asyncio.get_running_loop().call_later(0.05, may_end.set)
                raise error

        async def operation():
            attempt = current_attempt()
            charging = attempt.step("charge", charge, compensate=ran.append)
            return await asyncio.gather(charging, attempt.step("mail", mail, attempt.number))

        with pytest.raises(type(error)):
            await idem.run("k", operation, name="x", request=None, policy=FINAL)
        if isinstance(error, Broken):
            await idem.run("k", operation, name="x", request=None, policy=FINAL)

    run_async(url, scenario)
    assert ran == [Condition.RUNNING] + ["paid"] * isinstance(error, Declined)


# Threads.


@pytest.mark.parametrize("is_copied", [True, False], ids=["copied context", "plain threads"])
def test_steps_of_threads_run_side_by_side(url, is_copied):
    """A pool of threads runs each step once, whoever is first, and the attempt's order holds."""
    ran = []

    def operation(order, error):
        attempt = current_attempt()
        attempt.step("start", ran.append, "start")
        barrier = threading.Barrier(3)

        def charge(item):
            barrier.wait(30)
            ran.append(item)

        def one(item):
            attempt.step(f"charge {item}", charge, item)

        with ThreadPoolExecutor(3) as pool:
            contexts = [contextvars.copy_context() for _ in order]
            jobs = [
                pool.submit(context.run, one, item) if is_copied else pool.submit(one, item)
                for context, item in zip(contexts, order, strict=True)
            ]
            for job in jobs:
                job.result()
        attempt.step("end", ran.append, "end")
        if error is not None:
            raise error
        return "done"

    with Idempotency(url, caller="tenant") as idem:
        with pytest.raises(Broken):
            idem.run("k", operation, "abc", Broken(), name="x", request=None)
        assert idem.run("k", operation, "cab", None, name="x", request=None) == "done"
        positions = {item.name: item.position for item in idem.read("k").steps}
    assert sorted(ran) == ["a", "b", "c", "end", "start"]
    place = 2 if is_copied else 0
    assert positions == {"start": 1, "end": 2, **{f"charge {item}": place for item in "abc"}}


@pytest.mark.parametrize("error", [Broken("mail"), Declined("fraud")], ids=["freed", "failed"])
def test_a_step_in_a_long_lived_pool_is_waited_for(url, error):
    """The operation's thread leaves first; the key is settled after the other thread's step."""
    began, may_end, ran, seen = threading.Event(), threading.Event(), [], []

    def charge():
        began.set()
        assert may_end.wait(30)
        seen.append(idem.read("k").condition)
        ran.append("charge")
        return "paid"

    def operation(pool):
        attempt = current_attempt()
        context = contextvars.copy_context()
        job = pool.submit(
            context.run, partial(attempt.step, "charge", charge, compensate=ran.append)
        )
        assert began.wait(30)
        if attempt.number == 1:
            # From here on only the wait for the step can keep the key from being settled.
            threading.Timer(0.05, may_end.set).start()
            raise error
        return job.result()

    with Idempotency(url, caller="tenant", policy=FINAL) as idem, ThreadPoolExecutor(1) as pool:
        with pytest.raises(type(error)):
            idem.run("k", operation, pool, name="x", request=None)
        assert seen == [Condition.RUNNING]
        if isinstance(error, Declined):
            assert ran == ["charge", "paid"]
        else:
            assert idem.run("k", operation, pool, name="x", request=None) == "paid"
            assert ran == ["charge"]


def test_threads_that_race_for_the_stored_steps_read_them_once(url):
    """The stored steps are read once for all threads of the attempt."""
    store = FaultyStore(MemoryStore())

    def operation(error):
        attempt = current_attempt()
        start = threading.Barrier(4)

        def one(number):
            start.wait(30)
            attempt.step(f"step {number}", lambda: None)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(4)))
        if error is not None:
            raise error

    with Idempotency(store, caller="tenant") as idem:
        with pytest.raises(Broken):
            idem.run("k", operation, Broken(), name="x", request=None)
        idem.run("k", operation, None, name="x", request=None)
    assert [item.method for item in store.calls].count("read") == 1
    assert [item.method for item in store.calls].count("record_step") == 4


# The decorator.


def test_a_decorated_function_is_a_step_where_it_is_called(shop):
    """With its arguments, its options, and a name per item where it is asked for."""
    calls = []

    @step("reserve", compensate=lambda result: calls.append(f"undo {result}"))
    def reserve(item, *, amount):
        calls.append((item, amount))
        return item

    @step(lambda item: f"charge {item}", retry=StepRetry(tries=2, pause=timedelta(0)))
    def charge(item):
        calls.append(item)
        if calls.count(item) == 1:
            raise Broken
        return f"charged {item}"

    def steps():
        yield reserve("chair", amount=2)
        yield charge("a")
        yield charge("b")

    if shop.is_async:

        async def operation():
            return [await item for item in steps()]

    else:

        def operation():
            return list(steps())

    assert shop.subject.run("k", operation) == ["chair", "charged a", "charged b"]
    assert calls == [("chair", 2), "a", "a", "b", "b"]
    names = [item.name for item in shop.subject.call("read", "k").steps]
    assert names == ["reserve", "charge a", "charge b"]
    assert reserve.__name__ == "reserve"


def test_a_decorated_async_function_is_awaited():
    """It looks like what it decorates."""

    @step("charge")
    async def charge(amount: int) -> Receipt:
        await asyncio.sleep(0)
        return Receipt(amount)

    async def scenario(idem):
        async def operation(error):
            receipt = await charge(7)
            if error is not None:
                raise error
            return receipt

        with pytest.raises(Broken):
            await idem.run("k", operation, Broken(), name="x", request=None)
        return await idem.run("k", operation, None, name="x", request=None)

    assert run_async("memory://", scenario) == Receipt(7)


def test_a_decorator_refuses_what_makes_no_sense_when_it_is_written():
    """Not when the first customer pays."""
    with pytest.raises(InvalidInput):
        step("")
    with pytest.raises(InvalidInput):
        step("charge", terminal=3)
    with pytest.raises(InvalidInput, match="generator"):

        @step("charge")
        def generate():
            yield 1


def test_a_step_decorator_without_brackets_never_passes_for_a_step():
    """The function would not run, and the operation would be stored as done without it."""
    text = r"write @step\('name'\) above the function"
    with pytest.raises(InvalidInput, match=text):

        @step
        async def charge(order):
            raise AssertionError("must not run")

    with pytest.raises(InvalidInput, match=text):

        @step
        def charged(order) -> dict[str, int]:
            raise AssertionError("must not run")

    # Nothing tells this one from a function that makes names, before somebody calls it.
    @step
    def plain(*args, **kwargs):
        raise AssertionError("must not run")

    with Idempotency(MemoryStore(), caller="shop") as idem:
        for args, kwargs in (((1,), {}), ((), {}), ((), {"order": 1}), ((1, 2), {})):
            with pytest.raises(InvalidInput, match=text):
                idem.run("order", lambda a=args, k=kwargs: plain(*a, **k), name="pay", request=None)


def test_functions_that_make_step_names_may_say_what_they_return():
    """Texts of any kind, whether annotations are classes or only texts themselves."""

    class Name(str):
        __slots__ = ()

    def names(item) -> Name:
        return Name(f"charge {item}")

    def names_evaluated(item):
        return Name(f"refund {item}")

    names_evaluated.__annotations__["return"] = Name
    charge, refund = step(names)(str), step(names_evaluated)(str)
    with Idempotency(MemoryStore(), caller="shop") as idem:
        assert idem.run("order", lambda: charge(1) + refund(2), name="pay", request=None) == "12"
    for kind in (None, dict, int):
        names_evaluated.__annotations__["return"] = kind
        with pytest.raises(InvalidInput, match="names_evaluated was not run"):
            step(names_evaluated)


def test_a_step_outside_an_operation_says_so():
    """There is no attempt that it could be a part of."""

    @step("charge")
    def charge():
        raise AssertionError("must not run")

    with pytest.raises(Exception, match="no operation is running here"):
        charge()

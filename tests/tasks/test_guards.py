"""What the frameworks' own ways would do to a message that must come back, or to a nested call."""

from __future__ import annotations

import asyncio
import functools
import threading
from datetime import timedelta

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage
from taskiq import InMemoryBroker
from taskiq.acks import AckableMessage
from taskiq.receiver import Receiver

from retrysafe import FOREVER, AsyncIdempotency, Idempotency, Key, Policy
from retrysafe.contrib import celery as for_celery
from retrysafe.contrib import dramatiq as for_dramatiq
from retrysafe.contrib import taskiq as for_taskiq
from retrysafe.errors import InvalidInput

POLICY = Policy(lease=timedelta(seconds=1))


@pytest.fixture
def idem():
    with Idempotency("memory://", caller="shop", policy=POLICY) as made:
        yield made


@pytest.fixture
def stub():
    """A broker that is not the global one."""
    broker = StubBroker()
    broker.add_middleware(CurrentMessage())
    broker.emit_after("process_boot")
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    yield broker
    worker.stop()
    broker.close()


def test_an_actor_that_calls_another_one_runs_both_once(idem, stub):
    """The message in sight is not the inner function's: by its id it would wait for itself."""
    done = []

    @dramatiq.actor(broker=stub)
    @for_dramatiq.once(idem)
    def pay(name):
        done.append(("pay", name))

    @dramatiq.actor(broker=stub)
    @for_dramatiq.once(idem)
    def order(name):
        done.append(("order", name))
        pay(name)

    order.send("a")
    stub.join("default", timeout=10_000)
    assert done == [("order", "a"), ("pay", "a")]


def test_a_busy_message_comes_back_to_an_actor_that_retries_nothing(idem, stub):
    """`retry_when` judges what the actor raises, not that its key is busy elsewhere."""
    done, release, came_back = [], threading.Event(), threading.Event()

    class Noted(dramatiq.Middleware):
        def after_enqueue(self, broker, message, delay):
            if delay:
                came_back.set()

    stub.add_middleware(Noted())

    @dramatiq.actor(broker=stub, retry_when=lambda retries, error: False)
    @for_dramatiq.once(idem, key=("name",), window=FOREVER, name="charge")
    def charge(name):
        done.append(name)
        assert release.wait(10)

    charge.send("a")
    charge.send("a")
    assert came_back.wait(10)
    release.set()
    stub.join("default", timeout=10_000)
    assert done == ["a"]
    assert stub.dead_letters == []


def test_an_actor_whose_function_is_hidden_is_refused(idem, stub):
    """Nobody could tell whose the message is: it must not run unprotected."""
    done = []

    def hides(function):
        def wrapper(*args):
            return function(*args)

        return wrapper

    @dramatiq.actor(broker=stub, max_retries=0, actor_name="hidden")
    @hides
    @for_dramatiq.once(idem)
    def charge():
        done.append("charge")

    charge.send()
    with pytest.raises(InvalidInput, match=r"functools\.wraps"):
        stub.join("default", timeout=10_000)
    assert done == []


def test_a_worker_without_current_message_is_refused(idem):
    """Without the middleware a message has no id in sight."""
    broker = StubBroker()
    broker.emit_after("process_boot")
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    done = []

    @dramatiq.actor(broker=broker, max_retries=0)
    @for_dramatiq.once(idem)
    def charge():
        done.append("charge")

    charge.send()
    with pytest.raises(InvalidInput, match="CurrentMessage"):
        broker.join("default", timeout=10_000)
    worker.stop()
    broker.close()
    assert done == []


def test_a_celery_task_whose_function_is_hidden_is_refused(idem):
    """As for actors; a decorator that says what it wraps is fine."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_always_eager = True

    def hides(function):
        def wrapper(*args):
            return function(*args)

        return wrapper

    def shows(function):
        return functools.wraps(function)(hides(function))

    @for_celery.once(idem)
    def charge(name):
        return name

    hidden = app.task(name="hidden", acks_late=True, reject_on_worker_lost=True, shared=False)(
        hides(charge)
    )
    shown = app.task(name="shown", acks_late=True, reject_on_worker_lost=True, shared=False)(
        shows(charge)
    )
    assert shown.delay("a").get() == "a"
    app.tasks.pop("shown")
    with pytest.raises(InvalidInput, match=r"functools\.wraps"):
        hidden.delay("a").get()
    app.close()


def test_a_direct_call_and_a_message_share_a_natural_key(idem):
    """The key's name is the function's, whatever the task is called."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_always_eager = True
    done = []

    @app.task(name="another.name", acks_late=True, reject_on_worker_lost=True, shared=False)
    @for_celery.once(idem, key=("invoice",), window=FOREVER)
    def pay(invoice):
        done.append(invoice)

    pay(42)
    pay.delay(42).get()
    pay.delay(42).get()
    assert done == [42]
    app.close()


def test_a_message_that_cannot_be_requeued_is_not_acked(idem):
    """Taskiq acks whatever ends: until the broker takes the copy, the message stays."""

    async def scene():
        refusals, acked, sent = [2], [], []

        class Broker(InMemoryBroker):
            async def kick(self, message):
                if refusals[0]:
                    refusals[0] -= 1
                    raise ConnectionError("the broker is away")
                sent.append(message)

        broker = Broker()
        async with AsyncIdempotency("memory://", policy=POLICY) as asynchronous:
            begun, ends = asyncio.Event(), asyncio.Event()

            @broker.task(task_name="charge")
            @for_taskiq.once(asynchronous)
            async def charge(name: str):
                raise AssertionError("it runs elsewhere")

            async def elsewhere():
                begun.set()
                await ends.wait()

            key = Key("busy", caller="taskiq:charge")
            running = asyncio.create_task(
                asynchronous.run(key, elsewhere, name="charge", request={"name": "a"})
            )
            await begun.wait()
            message = charge.kicker().with_task_id("busy")._prepare_message("a")
            data = broker.formatter.dumps(message).message

            async def ack():
                acked.append(len(sent))

            await Receiver(broker).callback(AckableMessage(data=data, ack=ack))
            ends.set()
            await running
        assert acked == [1]

    asyncio.run(scene())

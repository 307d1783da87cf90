"""FastStream workers as processes that are killed, on real brokers."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
import uuid
from collections import Counter

import pytest

from retrysafe import Idempotency
from retrysafe.consumers import consumer_name
from retrysafe.consumers.engine import engine_of, make_call, run_sync
from tests.tasks.scene import LIMIT_SECONDS, Scene
from tests.tasks.work import POLICY

FIXTURES = {
    "rabbitmq": lambda get: get("rabbitmq").url,
    "nats": lambda get: get("nats_server").url,
    "redis": lambda get: get("valkey_server").url(7),
    "kafka": lambda get: get("kafka_server").address,
}


def make_topics(address, name):
    from confluent_kafka.admin import AdminClient, NewTopic

    counts = {"work": 2} | dict.fromkeys(("before", "after", "ack", "done", "place"), 1)
    admin = AdminClient({"bootstrap.servers": address})
    made = admin.create_topics(
        [NewTopic(f"{name}-{each}", count, 1) for each, count in counts.items()]
    )
    for each in made.values():
        each.result(30)


@pytest.fixture(params=FIXTURES)
def scene(request, tmp_path, monkeypatch):
    url = FIXTURES[request.param](request.getfixturevalue)
    name = f"q{uuid.uuid4().hex[:8]}"
    if request.param == "kafka":
        make_topics(url, name)
    environment = {
        "RETRYSAFE_TEST_KIND": request.param,
        "RETRYSAFE_TEST_BROKER": url,
        "RETRYSAFE_TEST_QUEUE": name,
    }
    made = Scene(tmp_path, environment)
    made.kind, made.name = request.param, name
    made.set_in(monkeypatch)
    from tests.tasks import faststream_app, work

    importlib.reload(work)
    made.app = importlib.reload(faststream_app)
    with asyncio.Runner() as made.runner:
        made.runner.run(made.app.broker.connect())
        if made.kind == "rabbitmq":
            made.dead = made.runner.run(made.app.broker.declare_queue(made.app.dead_queue()))
        yield made
        made.runner.run(made.app.broker.stop())
        made.runner.run(made.app.idem.close())
    made.close()


def worker(scene, *, hangs=False):
    before = len(scene.lines("ready"))
    process = scene.start("tests.tasks.faststream_app", hangs=hangs)
    scene.until(lambda: len(scene.lines("ready")) > before, "the worker listens")
    return process


def send(scene, queue="work", key=None, partition=1, **values):
    """Publishes a message; what a broker needs to tell it from others goes along."""
    if scene.kind == "kafka" and queue == "work" and values.get("wish") in scene.app.WORK:
        queue = values["wish"]
    options = dict(scene.app.target(queue))
    if key is not None:
        options["headers"] = {"Idempotency-Key": key}
    if scene.kind == "rabbitmq":
        options |= {"message_id": uuid.uuid4().hex, "persist": True}
    if scene.kind == "nats":
        options["stream"] = scene.name
    if scene.kind == "kafka" and queue == "work":
        options["partition"] = partition
    scene.runner.run(scene.app.broker.publish(json.dumps(values).encode(), **options))


CALLERS = {
    "rabbitmq": lambda name: consumer_name(f"amqp:{name}-work"),
    "nats": lambda name: consumer_name(f"nats:{name}", "work"),
    "redis": lambda name: consumer_name(f"redis:{name}-work", "shop"),
    "kafka": lambda name: consumer_name(f"kafka:{name}-work", f"{name}-work"),
}


class BusyElsewhere:
    """Another owner of a message's key, in this process."""

    def __init__(self, scene, key, **values):
        idem = Idempotency(scene.store)
        self.begun, self.ends = threading.Event(), threading.Event()

        async def hold(attempt):
            self.begun.set()
            assert self.ends.wait(LIMIT_SECONDS)
            return {"name": "elsewhere", "wish": None}

        def work():
            engine = engine_of(idem, work)
            call = make_call(
                engine,
                text=key,
                callers=[CALLERS[scene.kind](scene.name)],
                body=json.dumps(values).encode(),
                operation="elsewhere",
                handler=work,
                policy=POLICY,
                rule=None,
            )
            run_sync(engine.answer(call, hold))
            idem.close()

        self.thread = threading.Thread(target=work)
        self.thread.start()
        assert self.begun.wait(10)

    def end(self):
        self.ends.set()
        self.thread.join()


def test_killed_and_restarted_workers_handle_each_message_once(scene):
    """Killed before, during and after the work, redelivered, raced, retried: one effect each."""
    first = worker(scene, hangs=True)
    send(scene, name="stuck", wish="stuck", partition=0)
    scene.until(lambda: scene.lines("stuck")["stuck"] > 1, "the stuck one fails")
    # A later success must not pass the one that failed: also the killed worker leaves it.
    send(scene, name="free")
    scene.until(lambda: scene.lines("done")["free"], "the later one is done")
    for wish in ("before", "after", "ack"):
        send(scene, name=wish, wish=wish)
    scene.until(lambda: len(scene.lines("hangs")) == 3, "all hang")
    # Last, because its open transaction keeps the others from writing to SQLite.
    send(scene, "place", name="order", wish="after")
    scene.until(lambda: scene.lines("hangs")["order"], "the transaction hangs")
    scene.kill(first)

    busy = BusyElsewhere(scene, "busy", name="busy")
    second = worker(scene)
    for _ in range(2):
        send(scene, name="twice", key="twice")
        send(scene, name="named", natural="named")
    send(scene, name="flaky", tries=2)
    send(scene, name="hopeless", tries=9)
    send(scene, name="busy", key="busy")
    scene.until(lambda: "it runs elsewhere" in scene.logs(), "the busy one waits")
    busy.end()
    once = {"before", "ack", "stuck", "free", "twice", "named", "flaky"}
    published = {*once, "after", "elsewhere"}
    scene.until(lambda: published <= set(scene.lines("done")) and scene.orders(), "all done")
    scene.until(lambda: scene.lines("try")["hopeless"] == 3, "the hopeless one is given up")
    scene.until(lambda: is_dead(scene, "hopeless"), "the hopeless one is a dead letter")
    scene.stop(second)
    # The price of effects outside the database: repeated when the process dies after the effect.
    assert scene.lines("effect") == {**dict.fromkeys(once, 1), "after": 2}
    assert scene.lines("done") == Counter(published)
    assert scene.orders() == {"order": 1}
    assert scene.lines("try") == {"flaky": 2, "hopeless": 3}


def is_dead(scene, name):
    if scene.kind == "nats":
        return "is a dead letter" in scene.logs()  # The server keeps it in the stream.
    if scene.kind != "rabbitmq":
        return scene.lines("dead")[name] == 1

    return scene.runner.run(scene.dead.get(fail=False)) is not None

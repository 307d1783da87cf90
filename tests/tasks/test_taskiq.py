"""Taskiq workers as processes that are killed, on real brokers."""

from __future__ import annotations

import asyncio
import importlib
import uuid

import pytest

from retrysafe import Key
from tests.tasks.scene import Elsewhere, Scene

BROKERS = ["redis", "rabbitmq"]


@pytest.fixture(params=BROKERS)
def scene(request, tmp_path, valkey_server, monkeypatch):
    is_redis = request.param == "redis"
    broker = valkey_server.url(6) if is_redis else request.getfixturevalue("rabbitmq").url
    made = Scene(
        tmp_path,
        {"RETRYSAFE_TEST_BROKER": broker, "RETRYSAFE_TEST_QUEUE": f"q{uuid.uuid4().hex[:8]}"},
    )
    made.set_in(monkeypatch)
    from tests.tasks import taskiq_app, work

    importlib.reload(work)
    made.tasks = importlib.reload(taskiq_app)
    with asyncio.Runner() as made.runner:
        made.runner.run(made.tasks.broker.startup())
        yield made
        made.runner.run(made.tasks.broker.shutdown())
        made.runner.run(made.tasks.idem.close())
    made.close()


def worker(scene, *, hangs=False):
    return scene.start(
        *("taskiq", "worker", "tests.tasks.taskiq_app:broker", "--workers", "1"),
        hangs=hangs,
    )


def test_killed_and_restarted_workers_do_each_task_once(scene):
    """Killed before, during and after the work, redelivered, raced, retried: one effect each."""
    tasks = scene.tasks

    def send(task, task_id=None, **values):
        scene.runner.run(task.kicker().with_task_id(task_id or uuid.uuid4().hex).kiq(**values))

    send(tasks.charge, name="before", wish="before")
    send(tasks.charge, name="after", wish="after")
    first = worker(scene, hangs=True)
    scene.until(lambda: len(scene.lines("hangs")) == 2, "all hang")
    # Last, because it stops the loop of the worker.
    send(tasks.charge, name="ack", wish="ack")
    scene.until(lambda: len(scene.lines("hangs")) == 3, "the done one hangs before its ack")
    scene.kill(first)
    inside = worker(scene, hangs=True)
    # Not before: the stream may still know the killed one as a reader, and give it the message.
    scene.until(lambda: scene.logs().count("Listening started") == 2, "the next worker listens")
    send(tasks.place, name="order", wish="after")
    scene.until(lambda: scene.lines("hangs")["order"], "the transaction hangs")
    scene.kill(inside)

    send(tasks.charge, name="twice", task_id="twice")
    send(tasks.charge, name="twice", task_id="twice")
    send(tasks.charge_named, name="named")
    send(tasks.charge_named, name="named")
    send(tasks.flaky, name="flaky", tries=3)
    send(tasks.flaky, name="hopeless", tries=9)
    name = "tests.tasks.taskiq_app:charge"
    elsewhere = Elsewhere(
        scene,
        Key("busy", caller=f"taskiq:{name}"),
        name,
        {"name": "busy", "seconds": 0.0, "wish": None},
    )
    send(tasks.charge, name="busy", task_id="busy")
    second = worker(scene)
    scene.until(lambda: "comes back" in scene.logs(), "the busy one is sent back")
    elsewhere.end()
    once = {"before", "ack", "twice", "named", "flaky"}
    scene.until(lambda: once <= set(scene.lines("effect")) and scene.orders(), "all done")
    scene.until(lambda: scene.lines("try")["hopeless"] == 3, "the hopeless one is given up")
    scene.stop(second)
    # The price of effects outside the database: repeated when the process dies after the effect.
    assert scene.lines("effect") == {**dict.fromkeys(once, 1), "after": 2}
    assert scene.orders() == {"order": 1}
    assert scene.lines("try") == {"flaky": 3, "hopeless": 3}

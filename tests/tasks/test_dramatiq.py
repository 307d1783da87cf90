"""Dramatiq workers as processes that are killed, on real brokers."""

from __future__ import annotations

import importlib
import uuid

import pytest

from retrysafe import Key
from tests.tasks.scene import Elsewhere, Scene

BROKERS = ["redis", "rabbitmq"]


@pytest.fixture(params=BROKERS)
def scene(request, tmp_path, valkey_server, monkeypatch):
    is_redis = request.param == "redis"
    broker = valkey_server.url(5) if is_redis else request.getfixturevalue("rabbitmq").url
    made = Scene(
        tmp_path,
        {"RETRYSAFE_TEST_BROKER": broker, "RETRYSAFE_TEST_QUEUE": f"q{uuid.uuid4().hex[:8]}"},
    )
    made.set_in(monkeypatch)
    from tests.tasks import dramatiq_app, work

    importlib.reload(work)
    made.tasks = importlib.reload(dramatiq_app)
    yield made
    made.tasks.broker.close()
    made.tasks.idem.close()
    made.close()


def worker(scene, *, hangs=False):
    # The scripts of Dramatiq start one process for each of its own; one is enough here.
    return scene.start(
        *("dramatiq", "tests.tasks.dramatiq_app", "--processes", "1", "--threads", "5"),
        hangs=hangs,
    )


def test_killed_and_restarted_workers_run_each_actor_once(scene):
    """Killed before, during and after the work, redelivered, raced, retried: one effect each."""
    tasks = scene.tasks
    tasks.charge.send(name="before", wish="before")
    tasks.charge.send(name="after", wish="after")
    tasks.charge.send(name="ack", wish="ack")
    first = worker(scene, hangs=True)
    scene.until(lambda: len(scene.lines("hangs")) == 3, "all hang")
    # Last, because its open transaction keeps the others from writing to SQLite.
    tasks.place.send(name="order", wish="after")
    scene.until(lambda: len(scene.lines("hangs")) == 4, "the transaction hangs")
    scene.kill(first)

    twice = tasks.charge.message(name="twice")
    tasks.broker.enqueue(twice)
    tasks.broker.enqueue(twice.copy(options={"redis_message_id": str(uuid.uuid4())}))
    tasks.charge_named.send(name="named")
    tasks.charge_named.send(name="named")
    tasks.flaky.send(name="flaky", tries=3)
    tasks.flaky.send(name="hopeless", tries=9)
    tasks.calls_another.send(name="caller")
    busy = tasks.charge.message(name="busy")
    elsewhere = Elsewhere(
        scene,
        Key(busy.message_id, caller="dramatiq:charge"),
        "charge",
        {"name": "busy", "seconds": 0.0, "wish": None},
    )
    tasks.broker.enqueue(busy)
    second = worker(scene)
    scene.until(lambda: "comes back" in scene.logs(), "the busy one is sent back")
    elsewhere.end()
    once = {"before", "ack", "twice", "named", "flaky", "caller", "caller directly"}
    scene.until(lambda: once <= set(scene.lines("effect")) and scene.orders(), "all done")
    scene.until(lambda: scene.lines("try")["hopeless"] == 3, "the hopeless one is given up")
    scene.stop(second)
    # The price of effects outside the database: repeated when the process dies after the effect.
    assert scene.lines("effect") == {**dict.fromkeys(once, 1), "after": 2}
    assert scene.orders() == {"order": 1}
    assert scene.lines("try") == {"flaky": 3, "hopeless": 3}

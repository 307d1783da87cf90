"""Celery workers as processes that are killed, on real brokers."""

from __future__ import annotations

import importlib
import uuid

import pytest

from retrysafe import Key
from tests.tasks.scene import Elsewhere, Scene

# Each broker once, and each pool of workers.
PAIRS = [
    ("redis", "gevent"),
    ("rabbitmq", "prefork"),
    ("sqs", "threads"),
    pytest.param(("redis", "prefork"), marks=pytest.mark.long),
]


def broker_url(name, request):
    if name == "rabbitmq":
        return request.getfixturevalue("rabbitmq").url
    server = request.getfixturevalue("moto_server")
    return server.endpoint.replace("http://", "sqs://local:local@")


@pytest.fixture(params=PAIRS, ids="-".join)
def scene(request, tmp_path, valkey_server, monkeypatch):
    queue = f"q{uuid.uuid4().hex[:8]}"
    name, pool = request.param
    backend = valkey_server.url(request.param_index)
    is_redis = name == "redis"
    broker = backend if is_redis else broker_url(name, request)
    environment = {
        "RETRYSAFE_TEST_BROKER": broker,
        "RETRYSAFE_TEST_BACKEND": backend,
        "RETRYSAFE_TEST_QUEUE": queue,
    }
    made = Scene(tmp_path, environment)
    made.set_in(monkeypatch)
    from tests.tasks import celery_app, work

    importlib.reload(work)
    made.tasks = importlib.reload(celery_app)
    made.is_redis, made.pool = is_redis, pool
    with made.tasks.app.connection_for_read() as connection:
        made.channel = connection.default_channel
        yield made
        if name == "sqs":
            made.channel.sqs().close()
    made.tasks.app.close()
    made.tasks.idem.close()
    made.close()


def worker(scene, *, hangs=False):
    # With gevent, Celery looks for messages every two seconds while it has none.
    concurrency = "20" if scene.pool == "gevent" else "4"
    return scene.start(
        *("celery", "-A", "tests.tasks.celery_app", "worker", "--concurrency", concurrency),
        *("--pool", scene.pool, "--without-gossip", "--without-mingle", "--loglevel", "INFO"),
        hangs=hangs,
    )


def test_killed_and_restarted_workers_do_each_task_once(scene):
    """Killed before, during and after the work, redelivered, raced, retried: one effect each."""
    tasks = scene.tasks
    tasks.charge.delay(name="before", wish="before")
    tasks.charge.delay(name="after", wish="after")
    tasks.charge.delay(name="ack", wish="ack")
    first = worker(scene, hangs=True)
    scene.until(lambda: len(scene.lines("hangs")) == 3, "all hang")
    # Last, because its open transaction keeps the others from writing to SQLite.
    tasks.place.delay(name="order", wish="after")
    scene.until(lambda: len(scene.lines("hangs")) == 4, "the transaction hangs")
    scene.kill(first)

    tasks.charge.apply_async(kwargs={"name": "twice"}, task_id="twice")
    tasks.charge.apply_async(kwargs={"name": "twice"}, task_id="twice")
    tasks.charge_named.delay(name="named")
    tasks.charge_named.delay(name="named")
    tasks.bound.apply_async(kwargs={"name": "bound"}, task_id="bound-id")
    tasks.calls_another.delay(name="caller")
    tasks.calls_itself.delay(name="itself again", times=1)
    tasks.flaky.delay(name="flaky", tries=3)
    tasks.flaky.delay(name="hopeless", tries=9)
    tasks.retries_itself.delay(name="itself", tries=3)
    slow = tasks.charge.delay(name="slow", seconds=5.0)
    name = "tests.tasks.celery_app.charge"
    elsewhere = Elsewhere(
        scene,
        Key("busy", caller=f"celery:{name}"),
        name,
        {"name": "busy", "seconds": 0.0, "wish": None},
    )
    busy = tasks.charge.apply_async(kwargs={"name": "busy"}, task_id="busy")
    from celery import chord

    chord([tasks.charge.s(name="one"), tasks.charge.s(name="two")])(tasks.total.s())
    second = worker(scene)
    # As the worker says it of itself: "thread" for threads.
    scene.until(lambda: f"({scene.pool.rstrip('s')})" in scene.logs(), "it runs in that pool")
    scene.until(lambda: scene.lines("total"), "the chord's body ran")
    scene.until(lambda: "comes back" in scene.logs(), "the busy one is sent back")
    elsewhere.end()
    assert busy.get(timeout=60) == {"name": "elsewhere"}
    assert slow.get(timeout=60) == {"name": "slow"}
    once = {"before", "ack", "twice", "named", "bound", "flaky", "itself", "slow", "one", "two"}
    once |= {"caller", "caller by bound", "itself again 0", "itself again 1"}

    def is_done():
        give_back(scene)
        return once <= set(scene.lines("effect")) and scene.orders()

    scene.until(is_done, "all done")
    scene.stop(second)
    # The price of effects outside the database: repeated when the process dies after the effect.
    assert scene.lines("effect") == {**dict.fromkeys(once, 1), "after": 2}
    assert scene.orders() == {"order": 1}
    assert scene.lines("try") == {"flaky": 3, "itself": 3, "hopeless": 3}
    assert scene.lines("id")["bound-id"] == 1
    assert scene.lines("total") == {"one,two": 1}


def give_back(scene):
    """Has Redis give back what the killed worker held; workers look for it every 100 seconds."""
    if scene.is_redis:
        scene.channel.qos.restore_visible(num=100, interval=20)

"""From one database to another, through a relay, a broker and a consumer: one effect."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import timedelta

import boto3
import pytest

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.cli.targets import chosen_target
from retrysafe.consumers import Consumer
from retrysafe.consumers.urls import broker_of
from retrysafe.relay import AsyncRelay, RelayPolicy
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore, SqliteStore
from tests.consumers.benches import KafkaBench, NatsBench, RabbitBench, SqsBench

LIMIT_SECONDS = 60
REGION = "eu-central-1"


def sqs_target(bench):
    return f"sqs:///{bench.name}?endpoint={bench.server.endpoint}&region={REGION}"


def sns_target(bench):
    """A topic that the queue is subscribed to."""
    with closing(
        boto3.client(
            "sns",
            endpoint_url=bench.server.endpoint,
            region_name=REGION,
            aws_access_key_id="local",
            aws_secret_access_key="local",
        )
    ) as sns:
        arn = sns.create_topic(Name=bench.name)["TopicArn"]
        asked = bench.client.get_queue_attributes(
            QueueUrl=bench.queue_url, AttributeNames=["QueueArn"]
        )
        sns.subscribe(
            TopicArn=arn,
            Protocol="sqs",
            Endpoint=asked["Attributes"]["QueueArn"],
            Attributes={"RawMessageDelivery": "true"},
        )
    return f"sns:///{arn}?endpoint={bench.server.endpoint}"


# The server, its queue, the target, the topic of the entry, and how often the message is there
# after it was sent twice: a stream of NATS drops repetitions by itself.
WAYS = {
    "sqs": ("moto_server", SqsBench, sqs_target, "orders.paid", 2),
    "sns": ("moto_server", SqsBench, sns_target, "orders.paid", 2),
    "kafka": (
        "kafka_server",
        KafkaBench,
        lambda bench: f"kafka://{bench.server.address}/{bench.name}",
        "orders.paid",
        2,
    ),
    "rabbitmq": ("rabbitmq", RabbitBench, lambda bench: bench.server.url, "{name}", 2),
    "nats": ("nats_server", NatsBench, lambda bench: bench.server.url, "{name}.paid", 1),
}


def place_order(path, topic):
    """A business write and the entry that tells of it, in one transaction."""
    store = SqliteStore(path)
    run_sync(store.migrate())
    with Idempotency(store, caller="shop") as idem, closing(sqlite3.connect(path)) as shop:
        shop.execute("CREATE TABLE orders (name TEXT)")
        shop.isolation_level = None
        shop.execute("BEGIN IMMEDIATE")
        with idem.atomic(shop, "order-42") as run:
            shop.execute("INSERT INTO orders VALUES ('pen')")
            run.outbox.stage(topic, {"order": 42}, aggregate="order-42")
            run.complete(None)
        shop.execute("COMMIT")
    run_sync(store.close())


def die_after_sending(url, target):
    """A relay in a process of its own, killed between the broker's word and its own note."""
    command = [
        *(sys.executable, "-m", "retrysafe", "relay", "--store", url, "--lease", "1"),
        *("--timeout", "1", "--target", "python:tests.consumers.dying_relay:deliver"),
    ]
    environment = os.environ | {"RETRYSAFE_TEST_TARGET": target}
    ended = subprocess.run(
        command, env=environment, capture_output=True, timeout=LIMIT_SECONDS, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


async def relay_again(path, target_url):
    """What the dead relay had is delivered once more when its lease has ended."""
    store = SqliteStore(path)
    target = chosen_target(target_url)
    second = timedelta(seconds=1)
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            policy = RelayPolicy(lease=10 * second, timeout=5 * second)
            while (await AsyncRelay(store, target, policy=policy).drain()).delivered == 0:  # noqa: ASYNC110 — a lease has no event.
                await asyncio.sleep(0.1)
    finally:
        await target.close()
        run_sync(store.close())


async def consume(bench, copies):
    ran = []

    async def handle(message):
        ran.append((message.json(), message.header("Idempotency-Key")))

    idem = AsyncIdempotency(MemoryStore(), caller="unused")
    consumer = Consumer(idem, handle, broker_of(bench.url, is_async=True))
    task = asyncio.create_task(consumer.run_async())
    async with asyncio.timeout(LIMIT_SECONDS):
        while consumer.counts.handled + consumer.counts.duplicates < copies:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.02)
        consumer.stop()
        await task
    await idem.close()
    return ran, consumer.counts


@pytest.mark.parametrize("way", WAYS)
def test_an_entry_that_a_dying_relay_sent_twice_has_one_effect(request, tmp_path, way):
    fixture, kind, target_of, topic, copies = WAYS[way]
    bench = kind(request.getfixturevalue(fixture))
    try:
        path = tmp_path / "shop.db"
        url, target = f"sqlite:///{path}", target_of(bench)
        place_order(path, topic.format(name=bench.name))
        die_after_sending(url, target)
        asyncio.run(relay_again(path, target))
        ran, counts = asyncio.run(consume(bench, copies))
    finally:
        bench.close()
    ((body, key),) = ran
    assert body == {"order": 42}
    assert key.startswith("entry:")
    assert counts.handled == 1
    # A relay that waits too long for a busy broker's word sends once more, as it promises.
    assert counts.duplicates >= copies - 1

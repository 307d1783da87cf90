"""FastStream subscribers as users write them; the broker comes from the environment."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from typing import Annotated, Any

from faststream import AckPolicy, BaseMiddleware, Context, FastStream

from retrysafe import AsyncIdempotency
from retrysafe.contrib.faststream import OnceMiddleware
from tests.consumers.handlers import PAUSE, note
from tests.tasks import work

KIND = os.environ.get("RETRYSAFE_TEST_KIND", "rabbitmq")
URL = os.environ.get("RETRYSAFE_TEST_BROKER", "amqp://127.0.0.1:1/")
NAME = os.environ.get("RETRYSAFE_TEST_QUEUE", "test")
# Kafka hands out one message of a subscriber at a time: what hangs must not be in the way.
WORK = ["work", "before", "after", "ack"] if KIND == "kafka" else ["work"]


def call(*args, **options):
    """How a subscriber is declared in a router."""
    return lambda router: router.subscriber(*args, **options)


def rabbitmq():
    from faststream.rabbit import RabbitBroker, RabbitQueue, RabbitRouter

    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{NAME}-dead"}

    def source(name):
        return [call(RabbitQueue(f"{NAME}-{name}", durable=True, arguments=dead))]

    return RabbitBroker, RabbitRouter, source, lambda name: {"queue": f"{NAME}-{name}"}


def nats():
    from faststream.nats import JStream, NatsBroker, NatsRouter, PullSub
    from nats.js.api import ConsumerConfig

    stream = JStream(NAME, subjects=[f"{NAME}.*"])
    config = ConsumerConfig(ack_wait=2)

    def source(name):
        options = {"stream": stream, "durable": name, "config": config, "max_workers": 10}
        return [call(f"{NAME}.{name}", pull_sub=PullSub(), **options)]

    return NatsBroker, NatsRouter, source, lambda name: {"subject": f"{NAME}.{name}"}


def redis():
    from faststream.redis import RedisBroker, RedisRouter, StreamSub

    def source(name):
        who = {"group": "shop", "consumer": f"worker-{os.getpid()}"}
        fresh = StreamSub(f"{NAME}-{name}", **who)
        abandoned = StreamSub(f"{NAME}-{name}", **who, min_idle_time=1_500)
        return [call(stream=each, max_workers=10) for each in (fresh, abandoned)]

    return RedisBroker, RedisRouter, source, lambda name: {"stream": f"{NAME}-{name}"}


def kafka():
    from faststream.confluent import KafkaBroker, KafkaRouter

    def source(name):
        return [
            call(
                f"{NAME}-{name}",
                group_id=f"{NAME}-{name}",
                ack_policy=AckPolicy.NACK_ON_ERROR,
                auto_offset_reset="earliest",
                session_timeout_ms=2_000,
                heartbeat_interval_ms=500,
                # So that a message which fails soon goes back to the topic.
                max_poll_interval_ms=5_000,
            )
        ]

    return KafkaBroker, KafkaRouter, source, lambda name: {"topic": f"{NAME}-{name}"}


def dead_queue():
    from faststream.rabbit import RabbitQueue

    return RabbitQueue(f"{NAME}-dead", durable=True)


Broker, Router, source, target = {
    "rabbitmq": rabbitmq,
    "nats": nats,
    "redis": redis,
    "kafka": kafka,
}[KIND]()
idem = AsyncIdempotency(work.STORE, caller="shop", policy=work.POLICY)


async def hang(where, name, wish):
    """Stops for ever where the wish says."""
    if work.must_hang(where, name, wish):
        note("hangs", name)
        await asyncio.sleep(1_000)


class HangBeforeAck(BaseMiddleware):
    async def publish_scope(self, call_next, cmd):
        result = await call_next(cmd)
        if self.msg is not None:
            await hang("ack", cmd.body["name"], cmd.body["wish"])
        return result


async def dead_letter(message, reason):
    note("dead", json.loads(message.body)["name"])


@asynccontextmanager
async def transaction():
    with work.transaction() as connection:
        yield connection


options: dict[str, Any] = {"policy": work.POLICY, "back_off": PAUSE, "tries": 3}
if KIND in ("redis", "kafka"):
    options["dead_letter"] = dead_letter
charges = OnceMiddleware(idem, key=lambda message: message.json().get("natural"), **options)
orders = OnceMiddleware(idem, transaction=transaction, **options)
broker = Broker(URL, graceful_timeout=5.0)
charging = Router(middlewares=[charges, HangBeforeAck])
ordering = Router(middlewares=[orders])


async def charge(order: dict[str, Any]):
    name, wish = order["name"], order.get("wish")
    if wish == "stuck" and work.HANGS:
        note("stuck", name)
        raise ConnectionError("the provider is away")
    if order.get("tries"):
        await asyncio.to_thread(work.fail_until, name, order["tries"])
    else:
        await hang("before", name, wish)
        note("effect", name)
        await hang("after", name, wish)
    return {"name": name, "wish": wish}


handler = charging.publisher(**target("done"))(charge)
for each in (each for name in WORK for each in source(name)):
    handler = each(charging)(handler)


async def done(result: dict[str, Any]):
    note("done", result["name"])


async def place(order: dict[str, Any], attempt: Annotated[Any, Context()]):
    attempt.connection.execute("INSERT INTO orders VALUES (?)", (order["name"],))
    await hang("after", order["name"], order.get("wish"))


for each in source("done"):
    done = each(charging)(done)
for each in source("place"):
    place = each(ordering)(place)
broker.include_routers(charging, ordering)
charges.check(broker)
orders.check(broker)
app = FastStream(broker)


@app.after_startup
async def ready():
    note("ready", str(os.getpid()))


if __name__ == "__main__":
    asyncio.run(app.run())

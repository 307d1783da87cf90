"""Actors as users write them; the broker comes from the environment."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage, Middleware

from retrysafe import FOREVER, Idempotency
from retrysafe.contrib.dramatiq import once
from tests.tasks import work

URL = os.environ.get("RETRYSAFE_TEST_BROKER", "redis://127.0.0.1:1")
QUEUE = os.environ.get("RETRYSAFE_TEST_QUEUE", "default")


class HangBeforeAck(Middleware):
    def after_process_message(self, broker, message, *, result=None, exception=None):
        work.hang("ack", message.kwargs.get("name"), message.kwargs.get("wish"))


broker = (
    RedisBroker(url=URL, heartbeat_timeout=1_000, maintenance_chance=1_000_000)
    if URL.startswith("redis")
    else RabbitmqBroker(url=URL)
)
broker.add_middleware(CurrentMessage())
broker.add_middleware(HangBeforeAck())
dramatiq.set_broker(broker)
idem = Idempotency(work.STORE, caller="shop", policy=work.POLICY)


@dramatiq.actor(queue_name=QUEUE, max_retries=0)
@once(idem)
def charge(name, seconds=0.0, wish=None):
    work.do(name, seconds, wish)


@dramatiq.actor(queue_name=QUEUE)
@once(idem, key=("name",), window=FOREVER)
def charge_named(name):
    work.do(name)


@dramatiq.actor(queue_name=QUEUE, max_retries=2, min_backoff=50, max_backoff=100)
@once(idem)
def flaky(name, tries):
    work.fail_until(name, tries)


@dramatiq.actor(queue_name=QUEUE)
@once(idem, transaction=work.transaction)
def place(name, wish=None, *, attempt=None):
    work.order(attempt.connection, name, wish)


@dramatiq.actor(queue_name=QUEUE)
@once(idem)
def calls_another(name):
    charge(name=f"{name} directly")
    work.do(name)

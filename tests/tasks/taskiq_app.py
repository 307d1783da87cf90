"""Taskiq tasks as users write them; the broker comes from the environment."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager

from taskiq import SimpleRetryMiddleware, TaskiqMiddleware
from taskiq_aio_pika import AioPikaBroker
from taskiq_aio_pika.queue import Queue
from taskiq_redis import RedisStreamBroker

from retrysafe import FOREVER, AsyncIdempotency
from retrysafe.contrib.taskiq import once
from tests.tasks import work

URL = os.environ.get("RETRYSAFE_TEST_BROKER", "redis://127.0.0.1:1")
QUEUE = os.environ.get("RETRYSAFE_TEST_QUEUE", "taskiq")


class HangBeforeAck(TaskiqMiddleware):
    async def post_save(self, message, result):
        work.hang("ack", message.kwargs.get("name"), message.kwargs.get("wish"))


broker = (
    RedisStreamBroker(URL, queue_name=QUEUE, idle_timeout=1_500, unacknowledged_lock_timeout=1)
    if URL.startswith("redis")
    else AioPikaBroker(URL, task_queues=[Queue(name=QUEUE)])
).with_middlewares(
    HangBeforeAck(),
    SimpleRetryMiddleware(default_retry_count=3),
)
idem = AsyncIdempotency(work.STORE, caller="shop", policy=work.POLICY)


@broker.task
@once(idem)
async def charge(name: str, seconds: float = 0.0, wish: str | None = None):
    return await asyncio.to_thread(work.do, name, seconds, wish)


@broker.task
@once(idem, key=("name",), window=FOREVER)
async def charge_named(name: str):
    return await asyncio.to_thread(work.do, name)


@broker.task(retry_on_error=True)
@once(idem)
async def flaky(name: str, tries: int):
    await asyncio.to_thread(work.fail_until, name, tries)


@asynccontextmanager
async def transaction():
    # In threads: in the loop it would wait for another task of that loop, for ever.
    manager = work.transaction()
    connection = await asyncio.to_thread(manager.__enter__)
    try:
        yield connection
    except BaseException as error:
        await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)


@broker.task
@once(idem, transaction=transaction)
async def place(name: str, wish: str | None = None, *, attempt=None):
    await asyncio.to_thread(work.order, attempt.connection, name, wish)

"""A broker in memory that does what a script says, and both ways to have a message handled."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from retrysafe import AsyncIdempotency, Idempotency, Policy
from retrysafe.consumers import Handler, Message
from retrysafe.consumers.consumer import checked_policy
from retrysafe.consumers.engine import engine_of
from retrysafe.consumers.judge import Judge
from retrysafe.runtime.drive import run_sync

LEASE = timedelta(seconds=30)


class ScriptedBroker:
    """Gives out what is put in, and remembers every verdict."""

    queue, group = "orders", "billing"

    def __init__(
        self,
        *messages,
        gives_back=True,
        deadline_seconds=30.0,
        renew_seconds=None,
        window=timedelta(days=4),
    ):
        self.gives_back = gives_back
        self.deadline_seconds = deadline_seconds
        self.renew_seconds = renew_seconds or deadline_seconds / 3
        self.window = window
        self.inbox = asyncio.Queue()
        for message in messages:
            self.inbox.put_nowait(message)
        self.settled = []
        self.extended = []
        self.lost = set()
        self.limits = []
        self.is_away = False
        self.news = asyncio.Condition()
        self.is_open = False

    def bind(self, buffer):
        self.buffer = buffer

    async def open(self):
        self.is_open = True

    async def redelivery_window(self):
        return self.window

    async def receive(self, limit):
        if self.is_away:
            raise ConnectionError("the broker is away")
        self.limits.append(limit)
        try:
            first = await asyncio.wait_for(self.inbox.get(), 0.05)
        except TimeoutError:
            return []
        found = [first]
        while len(found) < limit and not self.inbox.empty():
            found.append(self.inbox.get_nowait())
        return found

    async def extend(self, messages):
        self.extended.append([each.identity for each in messages])
        return [each for each in messages if each.identity in self.lost]

    async def settle(self, settled):
        async with self.news:
            self.settled += [
                (message.identity, verdict.action, verdict) for message, verdict in settled
            ]
            self.news.notify_all()
        return []

    async def close(self):
        self.is_open = False

    @property
    def actions(self):
        return [(identity, action.value) for identity, action, _ in self.settled]

    async def until(self, count):
        async with asyncio.timeout(10), self.news:
            await self.news.wait_for(lambda: len(self.settled) >= count)


def message(identity="1", body=b'{"amount": 5}', **options):
    return Message(body, identity=identity, **options)


class Threads:
    """Has messages handled in this thread, by a plain function."""

    idempotency = Idempotency

    def __init__(self, store, **options):
        self.idem = Idempotency(store, **options)

    def judge(self, function, *, queue="orders/billing", policy=None, **options):
        handler = Handler(function, **options)
        engine = engine_of(self.idem, handler.function)
        policy = checked_policy(handler, policy or engine.policy, queue, timedelta(hours=1))
        return Judge(engine, handler, names=[queue, *handler.aliases], policy=policy)

    def run(self, flow):
        return run_sync(flow)

    def close(self):
        self.idem.close()


class Tasks(Threads):
    """Has messages handled in a loop, by an async function."""

    def __init__(self, store, **options):
        self.idem = AsyncIdempotency(store, **options)
        self.runner = asyncio.Runner()

    def judge(self, function, **options):
        async def handle(*given):
            return function(*given)

        return super().judge(handle, **options)

    def run(self, flow):
        return self.runner.run(flow)

    def close(self):
        self.runner.run(self.idem.close())
        self.runner.close()


def policy(**options):
    return Policy(lease=LEASE, **options)

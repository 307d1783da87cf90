"""A consumer: one handler on one queue, each message once.

Owns the set-up: names, the check of the windows, threads or tasks. What happens to a message is in
`judge`, the loop around it in `loop`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from retrysafe.consumers.broker import Broker, Pushing
from retrysafe.consumers.deadlines import Deadline
from retrysafe.consumers.engine import (
    FOREVER,
    Key,
    Policy,
    ThreadEngine,
    covering,
    engine_of,
    run_sync,
)
from retrysafe.consumers.handler import Handler, consumer_name
from retrysafe.consumers.judge import Judge
from retrysafe.consumers.loop import ConsumerLoop, Counts
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Verdict
from retrysafe.errors import InvalidInput, PolicyInvalid

_logger = logging.getLogger("retrysafe.consumers")


class Consumer:
    """Runs a handler once for every message of a queue.

    With `Idempotency` the handler is a plain function and runs in threads; with `AsyncIdempotency`
    it is async. Raises `InvalidInput` for a handler of the other kind.
    """

    def __init__(
        self,
        idempotency: object,
        handler: Handler | Callable[..., Any],
        broker: Broker,
        *,
        concurrency: int = 10,
        stop_limit: timedelta = timedelta(seconds=30),
        on_change: Callable[[Counts], None] | None = None,
    ) -> None:
        """`stop_limit` is how long running handlers may take once the consumer is stopped."""
        self._handler = handler if isinstance(handler, Handler) else Handler(handler)
        self._engine = engine_of(idempotency, self._handler.function)
        self._broker = broker
        if concurrency < 1:
            raise InvalidInput(f"concurrency is a whole number from 1 up, got {concurrency}")
        self._concurrency = concurrency
        self._stop_limit = stop_limit
        self._on_change = on_change
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: ConsumerLoop | None = None
        self._is_stopped = False
        self.counts = Counts()

    @property
    def names(self) -> list[str]:
        """What this consumer's keys are stored under, and were before it was renamed."""
        own = consumer_name(self._broker.queue, self._broker.group)
        return [own, *(alias for alias in self._handler.aliases if alias != own)]

    def run(self) -> bool:
        """Consumes until `stop`, SIGTERM or SIGINT; False when handlers were cut short by it.

        A signal that has a handler of yours stays yours, and so do all outside of the main thread.
        """
        numbers: list[signal.Signals] = []
        if threading.current_thread() is threading.main_thread():
            usual = (signal.SIG_DFL, signal.default_int_handler)
            both = (signal.SIGTERM, signal.SIGINT)
            numbers = [each for each in both if signal.getsignal(each) in usual]
        return asyncio.run(self._run_until(numbers))

    async def _run_until(self, numbers: list[signal.Signals]) -> bool:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            forget()
            self.stop()

        def forget() -> None:
            # Another signal does what it does without us: it ends the process.
            for number in numbers:
                loop.remove_signal_handler(number)

        for number in numbers:
            loop.add_signal_handler(number, stop)
        try:
            return await self.run_async()
        finally:
            forget()

    async def run_async(self) -> bool:
        """As `run`, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        for name in self.names:
            Key("checked before any message is taken", caller=name)
        await self._broker.open()
        try:
            policy = checked_policy(
                self._handler,
                self._engine.policy,
                self._broker.queue,
                await self._broker.redelivery_window(),
            )
            self._compare_limits()
            judge = Judge(self._engine, self._handler, names=self.names, policy=policy)
            threads = ThreadPoolExecutor(self._concurrency, "retrysafe-consumer")
            try:
                return await self._consume(judge, threads, policy)
            finally:
                # Threads cannot be cut short; their keys are free when the leases end.
                threads.shutdown(wait=False, cancel_futures=True)
        finally:
            await self._broker.close()

    def _compare_limits(self) -> None:
        """Warns of a broker that gives a message up before its handler does."""
        limit: int | None = getattr(self._broker, "delivery_limit", None)
        if limit is not None and limit < self._handler.tries:
            _logger.warning(
                "%s gives a message up after %d deliveries, without a reason and before its %d "
                "tries are over: raise its limit well above them, or set tries lower",
                self._broker.queue,
                limit,
                self._handler.tries,
            )

    async def _consume(self, judge: Judge, threads: ThreadPoolExecutor, policy: Policy) -> bool:
        work = self._work = ConsumerLoop(
            self._broker,
            self._handle_in(threads, judge),
            concurrency=self._concurrency,
            stop_limit=self._stop_limit,
            cut_delay=policy.lease,
            on_change=self._on_change,
        )
        self.counts = work.counts
        if self._is_stopped:
            work.stop()
        return await work.run()

    def _handle_in(
        self, threads: ThreadPoolExecutor, judge: Judge
    ) -> Callable[[Message, Deadline, int], Awaitable[Verdict]]:
        if not isinstance(self._engine, ThreadEngine):
            return judge.handle
        loop = asyncio.get_running_loop()

        def in_thread(message: Message, deadline: Deadline, tries: int) -> Verdict:
            return run_sync(judge.handle(message, deadline, tries))

        async def handle(message: Message, deadline: Deadline, tries: int) -> Verdict:
            return await loop.run_in_executor(threads, in_thread, message, deadline, tries)

        return handle

    def stop(self) -> None:
        """Takes no more messages, lets running handlers end; comes from any thread or signal."""
        self._is_stopped = True
        loop, work = self._loop, self._work
        if loop is not None and work is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._stop, work)

    def _stop(self, work: ConsumerLoop) -> None:
        work.stop()
        if isinstance(self._broker, Pushing):
            self._broker.stop()


def checked_policy(handler: Handler, usual: Policy, queue: str, window: timedelta | None) -> Policy:
    """The policy of a consumer, whose active window covers what its broker may deliver again.

    Raises `PolicyInvalid` for a policy of the handler's own that does not: a message that comes
    after its key is forgotten runs again.
    """
    # The larger one: what people send back by hand is no reason to forget what the broker may.
    known = [each for each in (window, handler.redelivery) if each is not None]
    needed = max(known, default=None)
    if handler.policy is None:
        return covering(usual, needed)
    own = handler.policy
    if needed is None and own.active_window != FOREVER:
        raise PolicyInvalid(
            f"{queue} keeps messages without a limit, and active_window is {own.active_window}: a "
            "message that comes again later would run again. Set active_window=FOREVER, or "
            "redelivery=… to how long after its first delivery a message may come again"
        )
    if needed is not None and own.active_window < needed:
        raise PolicyInvalid(
            f"{queue} may deliver a message again for {needed}, and active_window is "
            f"{own.active_window}: a message that comes after that would run again. Set "
            f"active_window to {needed} or more"
        )
    return own

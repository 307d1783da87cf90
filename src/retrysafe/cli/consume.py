"""`retrysafe consume`: runs a function once for every message of a queue, until it is stopped."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Annotated, Any

import typer

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.cli import options, output
from retrysafe.cli.modules import imported
from retrysafe.cli.problems import ExitCode, Problem, usage
from retrysafe.cli.progress import shown_progress
from retrysafe.consumers import Consumer, Counts, Handler
from retrysafe.consumers.broker import Broker
from retrysafe.consumers.urls import broker_of
from retrysafe.idempotency import Idempotency


@options.examples(
    "retrysafe consume shop.payments:charge --from 'sqs:///payments?region=eu-central-1'",
    "retrysafe consume shop.payments:charge --from 'nats://localhost:4222/PAYMENTS?durable=shop'",
    "retrysafe consume shop.payments:charge --from 'amqp://guest@localhost/?queue=payments' --json",
    "retrysafe consume shop.payments:charge --from 'kafka://localhost:9092/payments?group=shop'",
)
def consume(
    context: typer.Context,
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:HANDLER",
            help="A function of a message, or a Handler.",
            show_default=False,
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="URL",
            help="The queue: sqs:///…, nats://…, amqp://… or kafka://….",
            show_default=False,
        ),
    ],
    store: options.StoreUrl = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1_000, help="Messages at a time.")
    ] = 10,
    tries: Annotated[
        int | None,
        typer.Option(
            "--tries",
            min=1,
            max=1_000_000,
            help="Failed attempts before a message is a dead letter.  [default: the handler's]",
            show_default=False,
        ),
    ] = None,
    stop_limit: Annotated[
        float,
        typer.Option(
            "--stop-limit",
            min=0,
            max=86_400,
            metavar="SECONDS",
            help="How long running handlers may take after SIGTERM.",
        ),
    ] = 30,
    as_json: options.AsJson = False,
) -> None:
    """Run a function once for every message of a queue, however often it is delivered.

    Any number of consumers may run at once. SIGTERM and Ctrl-C take no new messages, let running
    handlers end and give the rest back at once; a second one ends at once. Dead letters and retries
    do not change the exit code, which stays 0: look at the counts. It is 1 when handlers were cut
    short.
    """
    is_json = options.is_json(context, as_json)
    url = options.required_url(store)
    chosen = _handler(handler)
    if tries is not None:
        chosen = replace(chosen, tries=tries)
    is_async = inspect.iscoroutinefunction(chosen.function)
    broker = broker_of(source, is_async=is_async)
    counted = {
        "handled": "handled",
        "duplicates": "duplicates",
        "retried": "retried",
        "dead_lettered": "dead letters",
    }
    with shown_progress("consuming", counted, is_quiet=is_json, is_service=True) as show:
        consuming = _Consuming(chosen, broker, url, is_async=is_async)
        try:
            limit = timedelta(seconds=stop_limit)
            ended_well = asyncio.run(consuming.run(concurrency, limit, show))
        except (ConnectionError, OSError) as error:
            raise Problem("BrokerUnavailable", str(error), ExitCode.REFUSED, True) from error
    _show(consuming.counts, is_json=is_json)
    if not ended_well:
        # Handlers in threads cannot be ended; the leases free their keys.
        sys.stdout.flush()
        os._exit(ExitCode.REFUSED)


def _handler(path: str) -> Handler:
    """A handler by its path; raises a usage problem."""
    module_name, mark, name = path.partition(":")
    if not (mark and module_name and name):
        raise usage(f"a handler is named module:function, got {path}")
    found: Any = getattr(imported(module_name), name, None)
    if isinstance(found, Handler):
        return found
    if not callable(found):
        raise usage(f"{module_name} has no function {name}")
    return Handler(found)


class _Consuming:
    """One run of the command."""

    def __init__(self, handler: Handler, broker: Broker, url: str, *, is_async: bool) -> None:
        self._handler = handler
        self._broker = broker
        self._url = url
        self._is_async = is_async
        self.counts = Counts()

    async def run(
        self, concurrency: int, stop_limit: timedelta, show: Callable[[Counts], None]
    ) -> bool:
        """Consumes until a signal comes."""
        async with AsyncExitStack() as stack:
            idempotency = self._idempotency(stack)
            if self._handler.lifespan is not None:
                await stack.enter_async_context(self._handler.lifespan(self._url))
            consumer = Consumer(
                idempotency,
                self._handler,
                self._broker,
                concurrency=concurrency,
                stop_limit=stop_limit,
                on_change=show,
            )
            with _stopped_by_signals(consumer):
                try:
                    return await consumer.run_async()
                finally:
                    self.counts = consumer.counts

    def _idempotency(self, stack: AsyncExitStack) -> Idempotency | AsyncIdempotency:
        # What the consumer does not wait for, closing must not wait for either.
        limit = timedelta(seconds=5)
        if self._is_async:
            made = AsyncIdempotency(self._url)
            stack.push_async_callback(made.close, limit)
            return made
        blocking = Idempotency(self._url)
        stack.callback(blocking.close, limit)
        return blocking


@contextmanager
def _stopped_by_signals(consumer: Consumer) -> Iterator[None]:
    """Lets running handlers end; a service that is stopped has not failed."""
    loop = asyncio.get_running_loop()
    is_told = False

    def stop() -> None:
        nonlocal is_told
        if is_told:
            os._exit(ExitCode.INTERRUPTED)
        is_told = True
        consumer.stop()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _show(counts: Counts, *, is_json: bool) -> None:
    if is_json:
        output.write_json(asdict(counts))
        return
    told = ", ".join(
        f"{name.replace('_', '-')} {count:,}" for name, count in asdict(counts).items()
    )
    sys.stdout.write(told + "\n")

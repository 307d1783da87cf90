"""`retrysafe relay`: delivers outbox entries until it is stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from retrysafe.cli import options, output
from retrysafe.cli.progress import shown_progress
from retrysafe.cli.targets import check_target, chosen_target
from retrysafe.core.ports import Store
from retrysafe.relay import AsyncRelay, RelayPolicy, RelayReport, Target


@options.examples(
    "retrysafe relay --store sqlite:///app.db --target https://example.com/hooks",
    "retrysafe relay --target amqp://guest@localhost/ --exchange orders",
    "retrysafe relay --target nats://localhost:4222 --prefix shop.",
    "retrysafe relay --target kafka://localhost:9092 --prefix shop.",
    "retrysafe relay --target 'sqs:///orders.fifo?region=eu-central-1'",
    "retrysafe relay --target python:shop.messages:deliver --drain --json",
)
def relay(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="URL",
            help="Where to: https://…, amqp://…, nats://…, kafka://…, sqs:///…, sns:///…, or "
            "python:module:function.",
            show_default=False,
        ),
    ],
    store: options.StoreUrl = None,
    exchange: Annotated[
        str, typer.Option("--exchange", metavar="NAME", help="The exchange of RabbitMQ.")
    ] = "",
    prefix: Annotated[
        str,
        typer.Option("--prefix", metavar="TEXT", help="Before subjects of NATS, topics of Kafka."),
    ] = "",
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1_000, help="Deliveries at a time.")
    ] = 32,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, max=1_000_000, help="Tries before an entry is dead.")
    ] = 20,
    lease: Annotated[
        float,
        typer.Option(
            "--lease",
            min=1,
            max=86_400,
            metavar="SECONDS",
            help="What frees entries after a crash.",
        ),
    ] = 60,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.1, max=86_400, metavar="SECONDS", help="For one delivery."),
    ] = 30,
    poll: Annotated[
        float,
        typer.Option(
            "--poll", min=0.01, max=3_600, metavar="SECONDS", help="Rest when nothing is due."
        ),
    ] = 1,
    dead_frees: Annotated[
        bool,
        typer.Option(
            "--dead-frees", help="Go on with an aggregate behind a dead entry; else it waits."
        ),
    ] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="Stop when nothing is due any more.")
    ] = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Deliver outbox entries to a target, at least once each and in order per aggregate.

    Any number of relays may run at once. SIGTERM and Ctrl-C let what is under way end and give the
    rest back; a second one ends at once. Webhooks are signed with RETRYSAFE_WEBHOOK_SECRET. Entries
    that failed or are dead do not change the exit code, which stays 0: look at the counts.
    """
    is_json = options.is_json(context, as_json)
    check_target(target, exchange=exchange, prefix=prefix)
    policy = RelayPolicy(
        lease=timedelta(seconds=lease),
        timeout=timedelta(seconds=timeout),
        attempt_limit=attempts,
        dead_blocks=not dead_frees,
        poll=timedelta(seconds=poll),
    )
    counted = {"delivered": "delivered", "failed": "failed", "dead": "dead"}
    with (
        options.opened_store(store, busy_timeout) as opened,
        shown_progress("relaying", counted, is_quiet=is_json, is_service=not drain) as show,
    ):
        report = asyncio.run(
            _relayed(
                opened,
                lambda: chosen_target(target, exchange=exchange, prefix=prefix),
                policy,
                concurrency,
                show,
                is_draining=drain,
            )
        )
    if is_json:
        output.write_json(asdict(report))
        return
    sys.stdout.write(
        f"delivered {report.delivered:,}, failed {report.failed:,}, dead {report.dead:,}, "
        f"lost {report.lost:,}, given back {report.returned:,}\n"
    )


async def _relayed(
    store: Store,
    make_target: Any,
    policy: RelayPolicy,
    concurrency: int,
    show: Callable[[RelayReport], None],
    *,
    is_draining: bool,
) -> RelayReport:
    # Made inside the loop that it belongs to.
    target: Target = make_target()
    relay = AsyncRelay(store, target, policy=policy, concurrency=concurrency, on_report=show)
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(relay.drain() if is_draining else relay.run())
    is_told = False

    def stop() -> None:
        nonlocal is_told
        if is_told:
            work.cancel()
        is_told = True
        relay.stop()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        return await work
    except asyncio.CancelledError:
        return relay.report
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        close = getattr(target, "close", None)
        if close is not None:
            await close()

"""`python -m tests.consumers.soak`: every broker with both kinds of handlers, and a bar."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.consumers.benches import KafkaBench, NatsBench, RabbitBench, SqsBench
from tests.consumers.soak import CONSUMERS, HEAD, new_database, planned, soaked
from tests.servers.kafka import KafkaServer, kafka_binary
from tests.servers.moto import MotoServer
from tests.servers.nats import NatsServer
from tests.servers.postgres import PostgresServer
from tests.servers.rabbitmq import RabbitMQServer, rabbitmq_binary

BENCHES = {"sqs": SqsBench, "kafka": KafkaBench, "rabbitmq": RabbitBench, "nats": NatsBench}
HANDLERS = ("place", "charge")
PRINTED_SECONDS = 5.0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.consumers.soak")
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--brokers", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--handlers", nargs="+", choices=HANDLERS, default=list(HANDLERS))
    parser.add_argument("--store", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--kills", type=int, default=30, help="a third of it for Kafka")
    parser.add_argument("--freezes", type=int, default=6, help="a third of it for Kafka")
    parser.add_argument("--seed", type=int, help="of an earlier run, to see it again")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each run, at most")
    return parser.parse_args()


def command(stack: ExitStack) -> int:
    """The exit code: 0 when every promise held."""
    options = parsed()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}; see it again with --seed {seed}", flush=True)
    postgres = None
    if options.store == "postgresql":
        postgres = stack.enter_context(PostgresServer(settings={"max_connections": "200"}))
    rows, is_wrong = [], False
    for broker in options.brokers:
        server = started(stack, broker)
        # A group of Kafka's waits for the session of a dead member to end, each time.
        share = 3 if broker == "kafka" else 1
        for handler in options.handlers:
            plan = planned(
                seed,
                broker,
                options.messages,
                kills=options.kills // share,
                freezes=options.freezes // share,
            )
            bench = KafkaBench(server, CONSUMERS) if broker == "kafka" else BENCHES[broker](server)
            with shown(f"{broker}, {handler}", len(plan.good)) as show:
                result = soaked(
                    bench,
                    broker=broker,
                    database=None if postgres is None else new_database(postgres),
                    handler=handler,
                    plan=plan,
                    limit_seconds=options.minutes * 60,
                    show=show,
                )
            rows.append(result.row())
            print(rows[-1], flush=True)
            for wrong in result.wrong:
                is_wrong = True
                print(f"WRONG: {broker}, {handler}: {wrong}", flush=True)
    print("\n".join([HEAD, *rows]))
    print(f"seed {seed}: " + ("NOT as promised" if is_wrong else "every promise held"))
    return 1 if is_wrong else 0


def started(stack: ExitStack, broker: str):
    """The broker of that name; it ends with the stack."""
    if broker == "sqs":
        return stack.enter_context(MotoServer())
    if broker == "nats":
        server = NatsServer()
    else:
        binary = rabbitmq_binary() if broker == "rabbitmq" else kafka_binary()
        if binary is None:
            raise SystemExit(f"there is no {broker} on this machine")
        server = RabbitMQServer(binary) if broker == "rabbitmq" else KafkaServer(binary)
    return stack.enter_context(server)


@contextmanager
def shown(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, a line every few seconds elsewhere."""
    console = Console(file=sys.stdout)
    printed = time.monotonic()

    def line(done: int, kills: int) -> None:
        nonlocal printed
        if time.monotonic() - printed >= PRINTED_SECONDS:
            printed = time.monotonic()
            print(f"{what}: {done:>7,} of {total:,}, {kills} kills", flush=True)

    if not console.is_terminal:
        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[kills]} kills"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total, kills=0)
        yield lambda done, kills: progress.update(task, completed=done, kills=kills)

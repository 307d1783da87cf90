"""Hundreds of tasks, each sent up to three times, to workers of each framework that keep dying.

    python -m tests.tasks.soak --tasks 500
    python -m tests.tasks.soak --frameworks celery --brokers redis --handlers place --seed 42

Three worker processes are killed (SIGKILL, with all that they have started) at random, and started
again. With tasks in the transaction of their outcome (`place`), each order must be there exactly
once; with effects outside (`charge`), at least once, and the repeated ones are counted. Celery's
transport for Redis takes a message and notes that it has it in two commands: what a worker that is
killed in between has taken is lost, and is sent again here, as its sender would do.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import random
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.consumers.soak_command import shown
from tests.servers.rabbitmq import RabbitMQServer, rabbitmq_binary
from tests.servers.valkey import ValkeyServer, valkey_binary
from tests.tasks.scene import Scene

WORKERS = 3
TASK_SECONDS = 0.02
# Longer than a lease, and than a broker keeps a copy back: what would run twice has run by then.
QUIET_SECONDS = 6.0
# After that long without an effect, nobody has the missing ones any more.
LOST_SECONDS = 20.0
# Who has not begun has nothing to lose.
LEAST_LIFE_SECONDS = 2.5
# Messages ahead of the workers, so that whoever is killed has work.
SENT_AHEAD = 200
HANDLERS = ("place", "charge")


class Celery:
    """How to send a task under an id, and how to start a worker."""

    module = "tests.tasks.celery_app"
    command = (
        *("celery", "-A", module, "worker", "--concurrency", "4"),
        *("--without-gossip", "--without-mingle", "--loglevel", "WARNING"),
        # Each worker has a queue of its own by its name, also while its dead namesake has it.
        *("--hostname", "{serial}@soak"),
    )

    def open(self, tasks):
        self.connection = tasks.app.connection_for_read()
        self.channel = self.connection.default_channel
        self.is_redis = self.connection.transport.driver_type == "redis"

    def send(self, task, name):
        task.apply_async(kwargs={"name": name}, task_id=name)

    def tend(self):
        """Has Redis give back what killed workers held; workers look for it every 100 seconds."""
        if self.is_redis:
            self.channel.qos.restore_visible(num=100, interval=1)

    def close(self, tasks):
        self.connection.close()
        tasks.app.close()
        tasks.idem.close()

    @property
    def loses_messages(self):
        return self.is_redis


class Dramatiq:
    loses_messages = False
    module = "tests.tasks.dramatiq_app"
    command = ("dramatiq", module, "--processes", "1", "--threads", "4")

    def open(self, tasks):
        self.broker = tasks.broker

    def send(self, actor, name):
        # Redis keeps each delivery under an id of its own.
        options = {"redis_message_id": str(uuid.uuid4())}
        self.broker.enqueue(actor.message(name=name).copy(message_id=name, options=options))

    def tend(self):
        pass

    def close(self, tasks):
        tasks.broker.close()
        tasks.idem.close()


class Taskiq:
    loses_messages = False
    module = "tests.tasks.taskiq_app"
    command = ("taskiq", "worker", f"{module}:broker", "--workers", "1", "--max-async-tasks", "4")

    def open(self, tasks):
        self.runner = asyncio.Runner()
        self.runner.run(tasks.broker.startup())
        self.is_redis = tasks.URL.startswith("redis")
        self.tended = 0.0
        self.first = None

    def send(self, task, name):
        self.first = self.first or (task, name)
        self.runner.run(task.kicker().with_task_id(name).kiq(name=name))

    def tend(self):
        """Sends a task once more: its broker on Redis looks for lost messages behind new ones."""
        if self.is_redis and self.first and time.monotonic() - self.tended > 1:
            self.tended = time.monotonic()
            self.send(*self.first)

    def close(self, tasks):
        self.runner.run(tasks.broker.shutdown())
        self.runner.run(tasks.idem.close())
        self.runner.close()


FRAMEWORKS = {"celery": Celery, "dramatiq": Dramatiq, "taskiq": Taskiq}


@dataclass
class Soaked:
    """What came of it."""

    framework: str
    broker: str
    handler: str
    tasks: int
    sent: int
    kills: int = 0
    repeated: int = 0
    sent_again: int = 0
    seconds: float = 0
    wrong: list[str] = field(default_factory=list)

    def row(self) -> str:
        return (
            f"| {self.framework} | {self.broker} | {self.handler} | {self.tasks:,} "
            f"| {self.sent:,} | {self.kills} | {self.repeated} | {self.sent_again} "
            f"| {self.seconds:.0f} s |"
        )


HEAD = """\
| framework | broker | handler | tasks | sent | kills | repeated | sent again | time |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


class Soak:
    """One queue, its workers, and somebody who kills them."""

    def __init__(
        self, scene: Scene, framework, dice: random.Random, kills: list[int], messages: list[str]
    ) -> None:
        self.scene = scene
        self.framework = framework
        self.dice = dice
        self.messages = messages
        # At how many effects somebody is killed.
        self.kills = kills
        self.killed = self.sent_again = 0
        self.workers = [self._started() for _ in range(WORKERS)]

    def _started(self):
        serial = str(len(self.scene.processes))
        command = [part.replace("{serial}", serial) for part in self.framework.command]
        return self.scene.start(*command), time.monotonic()

    def run(self, send, found, limit_seconds: float, show) -> None:
        """Until each has its effect and nothing more happens; raises when that takes too long."""
        names, sent = set(self.messages), 0
        ends = time.monotonic() + limit_seconds
        done, quiet_since = -1, 0.0
        while True:
            self.framework.tend()
            counted, now = found(), time.monotonic()
            show(len(counted), self.killed)
            if counted.total() != done:
                done, quiet_since = counted.total(), now
            if now - quiet_since > QUIET_SECONDS and sent == len(self.messages):
                lost = names - counted.keys()
                if not lost:
                    return
                if self.framework.loses_messages and now - quiet_since > LOST_SECONDS:
                    self.sent_again += len(lost)
                    self.messages += sorted(lost)
                    quiet_since = now
            if now > ends:
                raise TimeoutError(f"{len(counted)} of {len(names)}\n{self.scene.logs()[-6000:]}")
            self._harm(done, now)
            # A kill that waits for somebody who is at work must find work left to do.
            is_held = bool(self.kills) and self.kills[0] <= done
            share = len(self.messages) / len(names)
            while sent < min(len(self.messages), done * share + SENT_AHEAD) and not is_held:
                send(self.messages[sent])
                sent += 1
            time.sleep(0.05)

    def _harm(self, done: int, now: float) -> None:
        place = self.dice.randrange(WORKERS)
        process, started = self.workers[place]
        if process.poll() is not None:
            raise AssertionError(f"a worker gave up: {self.scene.logs()[-6000:]}")
        if self.kills and self.kills[0] <= done and now - started >= LEAST_LIFE_SECONDS:
            self.kills.pop(0)
            self.scene.kill(process)
            self.killed += 1
            self.workers[place] = self._started()


def soaked(
    framework: str,
    broker: str,
    url: str,
    handler: str,
    *,
    tasks: int,
    kills: int,
    seed: int,
    limit_seconds: float,
    show=lambda done, kills: None,
) -> Soaked:
    """Runs one soak, on SQLite."""
    dice = random.Random(f"{seed} {framework} {broker} {handler}")
    names = [f"t{number}" for number in range(tasks)]
    sent = [name for name in names for _ in range(dice.randint(1, 3))]
    dice.shuffle(sent)
    at = sorted(dice.randrange(tasks * 9 // 10) for _ in range(kills))
    result = Soaked(framework, broker, handler, tasks, len(sent))
    with tempfile.TemporaryDirectory(prefix="retrysafe-soak-") as folder:
        scene = Scene(
            Path(folder),
            {
                "RETRYSAFE_TEST_BROKER": url,
                "RETRYSAFE_TEST_BACKEND": url if broker == "redis" else "",
                "RETRYSAFE_TEST_QUEUE": f"q{uuid.uuid4().hex[:8]}",
                "RETRYSAFE_TEST_TASK_SECONDS": str(TASK_SECONDS),
            },
        )
        os.environ.update(scene.environment)
        made = FRAMEWORKS[framework]()
        importlib.reload(importlib.import_module("tests.tasks.work"))
        module = importlib.reload(importlib.import_module(made.module))
        made.open(module)
        found = scene.orders if handler == "place" else lambda: scene.lines("effect")
        began = time.monotonic()
        try:
            soak = Soak(scene, made, dice, at, sent)
            task = getattr(module, handler)
            soak.run(lambda name: made.send(task, name), found, limit_seconds, show)
            result.kills, result.seconds = soak.killed, time.monotonic() - began
            result.sent_again = soak.sent_again
            for process, _ in soak.workers:
                scene.kill(process)
            counted = found()
        finally:
            made.close(module)
            scene.close()
    judge(result, set(names), counted)
    return result


def judge(result: Soaked, names: set[str], counted) -> None:
    """Says what is wrong with what came of it."""
    result.repeated = counted.total() - len(counted)
    if counted.keys() != names:
        result.wrong.append(f"not those that were sent: {sorted(counted.keys() ^ names)[:5]}")
    if result.handler == "place" and result.repeated:
        twice = [name for name, times in counted.items() if times > 1]
        result.wrong.append(f"repeated in one transaction: {twice[:5]}")


def urls(stack: ExitStack, brokers: list[str]):
    """The URL of each broker that is asked for; they end with the stack."""
    for broker in brokers:
        kind, binary = (
            (ValkeyServer, valkey_binary())
            if broker == "redis"
            else (RabbitMQServer, rabbitmq_binary())
        )
        if binary is None:
            raise SystemExit(f"there is no {broker} on this machine")
        server = kind(binary)
        stack.callback(server.remove)
        server.start()
        yield broker, server.url if broker == "rabbitmq" else server.url()


def main() -> int:
    """The exit code: 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tests.tasks.soak")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    brokers = ("rabbitmq", "redis")
    parser.add_argument("--brokers", nargs="+", choices=brokers, default=list(brokers))
    parser.add_argument("--handlers", nargs="+", choices=HANDLERS, default=list(HANDLERS))
    parser.add_argument("--seed", type=int, help="of an earlier run, to see it again")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each run, at most")
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    rows, is_wrong = [], False
    with ExitStack() as stack:
        for broker, url in urls(stack, options.brokers):
            for framework in options.frameworks:
                for handler in options.handlers:
                    what = f"{framework} on {broker}, {handler}"
                    with shown(what, options.tasks) as show:
                        result = soaked(
                            *(framework, broker, url, handler),
                            tasks=options.tasks,
                            kills=options.kills,
                            seed=seed,
                            limit_seconds=options.minutes * 60,
                            show=show,
                        )
                    rows.append(result.row())
                    for wrong in result.wrong:
                        is_wrong = True
                        print(f"WRONG: {what}: {wrong}", flush=True)
    print("\n".join([HEAD, *rows]))
    print(f"seed {seed}: " + ("NOT as promised" if is_wrong else "every promise held"))
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Thousands of messages, delivered up to three times each, to consumers that keep dying.

    python -m tests.consumers.soak --messages 10000
    python -m tests.consumers.soak --brokers nats --handlers place --seed 42

Four processes run `retrysafe consume` on one queue. They are killed (SIGKILL) and frozen (SIGSTOP,
for longer than the broker waits) at random, and started again. With handlers in the transaction of
their outcome (`place`), each order must be there exactly once; with effects outside (`charge`), at
least once, and the repeated ones are counted. The queue must be empty in the end, and only poison
be dead-lettered. The seed decides the messages, their order, and when which process is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.servers.fixtures import migrated

CONSUMERS = 4
# Ahead of the consumers, as a queue that is busy has them; Moto looks at each for every poll.
PUBLISHED_AHEAD = 500
CHUNK = 100
# One message of so many cannot be read by anybody.
POISON_ONE_IN = 100
_TICK_SECONDS = 0.02
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, order=True)
class Harm:
    """What happens to one process, or to the next that is at work, at that many effects."""

    at: int
    place: int
    is_kill: bool


@dataclass(frozen=True)
class Plan:
    """What is sent, and what happens to the consumers; all of it by the seed."""

    messages: int
    consumers: int
    harms: list[Harm]
    # Bodies with keys, in the order of their publication.
    deliveries: list[tuple[str, str]]
    good: set[str]
    poison: set[str]


def planned(
    seed: int,
    broker: str,
    messages: int,
    *,
    kills: int,
    freezes: int,
    consumers: int = CONSUMERS,
) -> Plan:
    dice = random.Random(f"{seed} {broker}")
    deliveries, good, poison = [], set(), set()
    for number in range(messages):
        name = f"m{number}"
        if number % POISON_ONE_IN == POISON_ONE_IN - 1:
            body = f"{{poison {name}"
            poison.add(body)
        else:
            body = json.dumps({"name": name, "seconds": round(dice.uniform(0.0, 0.01), 4)})
            good.add(name)
        deliveries += [(body, f"order-{number}")] * dice.randint(1, 3)
    dice.shuffle(deliveries)

    harms = [
        Harm(dice.randrange(len(good) * 9 // 10), dice.randrange(consumers), number < kills)
        for number in range(kills + freezes)
    ]
    return Plan(messages, consumers, sorted(harms), deliveries, good, poison)


class Effects:
    """What the handlers have really done, on either store, inside of a transaction or not."""

    def __init__(self, folder: Path, store: str, database: str | None, *, is_atomic: bool) -> None:
        self.path = folder / "effects"
        self.path.touch()
        self.shop = str(folder / "store.db") if database is None else database
        self.url = f"sqlite:///{self.shop}" if database is None else database
        self.is_atomic = is_atomic
        if database is None:
            from retrysafe.runtime.drive import run_sync
            from retrysafe.stores import SqliteStore

            made = SqliteStore(self.shop)
            run_sync(made.migrate())
            run_sync(made.close())
            self.connection = sqlite3.connect(self.shop, isolation_level=None, timeout=30)
        else:
            migrated(database)
            self.connection = psycopg.connect(database, autocommit=True)
        self.connection.execute("CREATE TABLE orders (name TEXT)")

    def count(self) -> int:
        """How far it is, repeated ones included."""
        if self.is_atomic:
            return self.connection.execute("SELECT count(*) FROM orders").fetchone()[0]
        return self.path.read_bytes().count(b"\n")

    def all(self) -> Counter[str]:
        if self.is_atomic:
            return Counter(name for (name,) in self.connection.execute("SELECT name FROM orders"))
        return Counter(self.path.read_text().splitlines())


@dataclass
class Soaked:
    """What came of it."""

    broker: str
    store: str
    handler: str
    messages: int
    deliveries: int
    kills: int = 0
    freezes: int = 0
    repeated: int = 0
    seconds: float = 0
    wrong: list[str] = field(default_factory=list)

    def row(self) -> str:
        rate = f"{self.repeated} ({self.repeated / self.messages:.2%})"
        return (
            f"| {self.broker} | {self.store} | {self.handler} | {self.messages:,} "
            f"| {self.deliveries:,} | {self.kills} | {self.freezes} | {rate} "
            f"| {self.seconds:.0f} s |"
        )


HEAD = """\
| broker | store | handler | messages | deliveries | kills | freezes | repeated | time |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


class Soak:
    """One queue, four consumers, and somebody who kills them."""

    def __init__(self, bench, effects: Effects, plan: Plan, folder: Path, handler: str) -> None:
        self.bench = bench
        self.effects = effects
        self.plan = plan
        self.folder = folder
        self.handler = handler
        self.consumers: dict[int, subprocess.Popen[bytes]] = {}
        self.started = [0.0] * plan.consumers
        self.frozen: dict[int, float] = {}
        # Longer than the broker waits for a consumer without a word.
        self.freeze_seconds = 8.0 if bench.is_log else 4.0
        # Who has not begun has nothing to lose; a group takes its time to let a new member in.
        self.least_life_seconds = 5.0 if bench.is_log else 2.0
        self.kills = self.freezes = self.published = 0
        self.harms = list(plan.harms)

    def start(self, place: int) -> None:
        environment = os.environ | {
            "RETRYSAFE_SOAK_EFFECTS": str(self.effects.path),
            "RETRYSAFE_SOAK_SHOP": self.effects.shop,
        }
        command = [
            *(sys.executable, "-m", "retrysafe", "consume"),
            *(f"tests.consumers.soak_handlers:{self.handler}", "--json"),
            *("--from", self.bench.url, "--store", self.effects.url),
        ]
        with (self.folder / f"log-{place}").open("ab") as log:
            self.consumers[place] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log
            )
        self.started[place] = time.monotonic()

    def run(self, limit_seconds: float, show) -> None:
        """Until everything is done; raises when that takes too long, or a consumer gives up."""
        ends = time.monotonic() + limit_seconds
        looked, empty = 0.0, 0
        for place in range(self.plan.consumers):
            self.start(place)
        while True:
            now = time.monotonic()
            done = self.effects.count()
            show(min(done, len(self.plan.good)), self.kills)
            self._harm(done, now)
            self._mend(now)
            if now - looked >= _LOOK_SECONDS:
                looked, left = now, self.bench.left()
                is_over = left == 0 and self.published == len(self.plan.deliveries)
                empty = empty + 1 if is_over and not self.frozen else 0
                if empty >= self.bench.looks:
                    return
                self._publish(done, left)
            if now > ends:
                raise TimeoutError(
                    f"not within {limit_seconds:.0f} s: {done} effects, {left} in the queue, "
                    f"{self.kills} kills\n{self.logs()}"
                )
            time.sleep(_TICK_SECONDS)

    def _publish(self, done: int, left: int) -> None:
        # A harm that waits for somebody who is at work must find work left to do.
        is_held = bool(self.harms) and self.harms[0].at <= done
        if left < PUBLISHED_AHEAD and not is_held:
            chunk = self.plan.deliveries[self.published : self.published + CHUNK]
            self.bench.publish_all(chunk)
            self.published += len(chunk)

    def _harm(self, done: int, now: float) -> None:
        """Does what is next, if its time has come."""
        if not self.harms or self.harms[0].at > done:
            return
        first = self.harms[0].place
        for place in (*range(first, self.plan.consumers), *range(first)):
            is_old = now - self.started[place] >= self.least_life_seconds
            if is_old and place not in self.frozen:
                break
        else:
            return
        is_kill = self.harms.pop(0).is_kill
        process = self.consumers[place]
        if is_kill:
            process.kill()
            process.wait()
            self.kills += 1
            self.start(place)
        else:
            process.send_signal(signal.SIGSTOP)
            self.frozen[place] = now + self.freeze_seconds
            self.freezes += 1

    def _mend(self, now: float) -> None:
        for place, until in list(self.frozen.items()):
            if now >= until:
                del self.frozen[place]
                self.consumers[place].send_signal(signal.SIGCONT)
        for process in self.consumers.values():
            if process.poll() is not None:
                raise AssertionError(f"a consumer gave up: {process.returncode}\n{self.logs()}")

    def stop(self, limit_seconds: float = 60) -> None:
        """Ends them as an orchestrator does."""
        running = [each for each in self.consumers.values() if each.poll() is None]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for process in running:
            # One that was killed and has just been started has no handler for it yet.
            assert process.wait(limit_seconds) in (0, -signal.SIGTERM), self.logs()

    def close(self) -> None:
        for process in self.consumers.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        self.bench.close()
        self.effects.connection.close()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("log-*")))


def soaked(
    bench,
    *,
    broker: str,
    database: str | None,
    handler: str,
    plan: Plan,
    limit_seconds: float,
    show=lambda done, kills: None,
) -> Soaked:
    """Runs one soak; without a database of PostgreSQL's, on SQLite."""
    store = "SQLite" if database is None else "PostgreSQL"
    result = Soaked(broker, store, handler, plan.messages, len(plan.deliveries))
    is_atomic = handler == "place"
    with tempfile.TemporaryDirectory(prefix="retrysafe-soak-") as name:
        folder = Path(name)
        effects = Effects(folder, store, database, is_atomic=is_atomic)
        soak = Soak(bench, effects, plan, folder, handler_name(bench, database, handler))
        began = time.monotonic()
        try:
            soak.run(limit_seconds, show)
            soak.stop()
            result.seconds = time.monotonic() - began
            result.kills, result.freezes = soak.kills, soak.freezes
            found, dead, left = effects.all(), bench.dead_letters(), bench.left()
        finally:
            soak.close()
    judge(result, plan, found, set(dead), left, is_atomic=is_atomic)
    return result


def handler_name(bench, database: str | None, handler: str) -> str:
    """Which of `soak_handlers`."""
    if handler == "charge":
        return "CHARGE_ASYNC" if bench.handler == "ASYNC" else "CHARGE"
    if database is None:
        return "PLACE_SQLITE"
    return "PLACE_ASYNC" if bench.handler == "ASYNC" else "PLACE_POSTGRES"


def judge(
    result: Soaked, plan: Plan, found: Counter[str], dead: set[str], left: int, *, is_atomic: bool
) -> None:
    """Says what is wrong with what came of it."""
    result.repeated = sum(found.values()) - len(found)
    if missing := plan.good - found.keys():
        result.wrong.append(f"{len(missing)} without effect, such as {sorted(missing)[:5]}")
    if invented := found.keys() - plan.good:
        result.wrong.append(f"effects that nobody asked for: {sorted(invented)[:5]}")
    if is_atomic and result.repeated:
        twice = sorted(name for name, times in found.items() if times > 1)
        result.wrong.append(f"{result.repeated} repeated in one transaction: {twice[:5]}")
    if dead != plan.poison:
        result.wrong.append(
            f"dead letters: by mistake {sorted(dead - plan.poison)[:5]}, "
            f"lacking {sorted(plan.poison - dead)[:5]}"
        )
    if left:
        result.wrong.append(f"{left} left in the queue")


def new_database(server) -> str:
    """A database of its own on a server, by its URL."""
    name = f"soak_{random.randrange(1 << 40):x}"
    with closing(psycopg.connect(server.url(), autocommit=True)) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.url(name)


def main() -> int:
    """The exit code: 0 when every promise held."""
    from tests.consumers.soak_command import command

    with ExitStack() as stack:
        return command(stack)


if __name__ == "__main__":
    sys.exit(main())

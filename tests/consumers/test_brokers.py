"""One table of cases for every broker, with the command as it is and real processes that die.

Three processes consume one queue. The first is killed with messages in three states: before the
work, after it, and after the outcome was stored but nothing acked. The second gets what the first
has left, with everything else that can happen to a message, and is stopped under load. The third
does the rest. Then the table says what must have come of each message.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest

from retrysafe import Idempotency
from retrysafe.consumers import Handler, Message
from retrysafe.consumers.engine import engine_of
from retrysafe.consumers.judge import Judge
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from tests.consumers.benches import (
    AsyncSqsBench,
    KafkaBench,
    NatsBench,
    PikaBench,
    RabbitBench,
    SqsBench,
    wish,
)
from tests.consumers.handlers import POLICY
from tests.servers.fixtures import missing
from tests.servers.kafka import kafka_binary
from tests.servers.rabbitmq import rabbitmq_binary

LIMIT_SECONDS = 90
# More would only make each of them slower.
SCENES_AT_ONCE = 4
LOAD = [f"load-{number}" for number in range(40)]


@dataclass(frozen=True)
class Case:
    """One message, or several under one key, and how often its effect must have happened."""

    name: str
    effects: int
    # Why a dead letter is one; None where there must be none.
    dead: str | None = None
    is_in_first: bool = False
    options: dict = field(default_factory=dict)
    key: str | None = None
    again: list[dict] | None = None
    body: str | None = None


CASES = [
    Case("killed before the work", 1, is_in_first=True, options={"hang": "before"}),
    # The price of effects outside the database: they are repeated when the process dies between the
    # effect and its record. The atomic handler below has no such gap.
    Case("killed after the work", 2, is_in_first=True, options={"hang": "after"}),
    Case("killed before the ack", 1, is_in_first=True),
    Case("first delivery", 1),
    Case("published twice under a key", 1, key="twice", again=[{}]),
    Case("longer than the broker's deadline", 1, options={"seconds": 5}),
    Case("fails for ever", 0, dead="3 tries failed", options={"fails": True}),
    Case("poison", 0, dead="not JSON", body="{poison"),
    Case("another payload under one key", 1, key="other", again=[{"seconds": 0.001}]),
    Case("runs elsewhere", 0, key="elsewhere"),
]
IDS = [case.name for case in CASES]


class Place:
    """The files of one scene, and the processes in it."""

    def __init__(self, folder, bench):
        self.bench = bench
        self.effects = folder / "effects"
        self.effects.touch()
        self.shop = folder / "store.db"
        self.store = SqliteStore(self.shop)
        run_sync(self.store.migrate())
        self.folder = folder
        self.processes = []

    def start(self, handler, *, hangs=False):
        environment = os.environ | {
            "RETRYSAFE_TEST_EFFECTS": str(self.effects),
            "RETRYSAFE_TEST_SHOP": str(self.shop),
            "RETRYSAFE_TEST_HANGS": self.bench.broker if hangs else "",
        }
        command = [
            *(sys.executable, "-m", "retrysafe", "consume", f"tests.consumers.handlers:{handler}"),
            *("--from", self.bench.url, "--store", f"sqlite:///{self.shop}", "--json"),
        ]
        with (self.folder / f"log-{len(self.processes)}").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.processes.append(process)
        return process

    def lines(self, what):
        found = [json.loads(line) for line in self.effects.read_text().splitlines()]
        return Counter(each["name"] for each in found if each["what"] == what)

    def until(self, is_so, what):
        end = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            if time.monotonic() > end or any(each.poll() for each in self.processes[-1:]):
                logs = [path.read_text()[-3000:] for path in sorted(self.folder.glob("log-*"))]
                raise AssertionError(
                    f"not within {LIMIT_SECONDS} s: {what}, but {self.lines('effect')}\n"
                    + "\n".join(logs)
                )
            time.sleep(0.05)

    def until_empty(self):
        """Waits for a queue that stays empty: not every broker tells what is in flight."""
        zeros = []

        def is_empty():
            zeros.append(self.bench.left() == 0)
            return len(zeros) >= self.bench.looks and all(zeros[-self.bench.looks :])

        self.until(is_empty, "the queue is empty")

    def stop(self, process):
        """Ends it as an orchestrator does; returns its counts."""
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0, (self.folder / "log-1").read_text()[-3000:]
        return json.loads(out)

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.bench.close()
        run_sync(self.store.close())


class Elsewhere:
    """Another consumer, in this process, that is at work on one key until it is let go."""

    def __init__(self, place, body):
        self.idem = Idempotency(place.store, caller="unused")
        self.begun, self.ends = threading.Event(), threading.Event()
        handler = Handler(self._hold)
        judge = Judge(
            engine_of(self.idem, self._hold), handler, names=[place.bench.caller], policy=POLICY
        )
        item = Message(body.encode(), {"Idempotency-Key": "elsewhere"})
        self.thread = threading.Thread(target=lambda: run_sync(judge.handle(item)))
        self.thread.start()
        assert self.begun.wait(10)

    def _hold(self, message):
        self.begun.set()
        assert self.ends.wait(LIMIT_SECONDS)

    def end(self):
        self.ends.set()
        self.thread.join()
        self.idem.close()


@dataclass
class Scene:
    effects: Counter
    dead: dict
    left: int
    counts: list[dict]
    is_log: bool


def publish(bench, case):
    for options in [{}, *(case.again or [])]:
        bench.publish(case.body or wish(case.name, **(case.options | options)), case.key)


def played(place):
    bench = place.bench
    first_cases = [case for case in CASES if case.is_in_first]
    for case in first_cases:
        publish(bench, case)
    first = place.start(bench.handler, hangs=True)
    names = {case.name for case in first_cases}
    place.until(lambda: set(place.lines("hangs")) == names, "all of the first process hang")
    first.kill()
    first.wait()

    elsewhere = Elsewhere(place, wish("runs elsewhere"))
    second = place.start(bench.handler)
    for case in CASES:
        if not case.is_in_first:
            publish(bench, case)
    expected = {case.name: case.effects for case in CASES if case.effects}
    place.until(lambda: place.lines("effect") == expected, f"effects {expected}")
    elsewhere.end()
    for name in LOAD:
        bench.publish(wish(name, seconds=0.2))
    place.until(lambda: sum(place.lines("effect")[name] for name in LOAD) >= 10, "some load")
    counts = [place.stop(second)]

    third = place.start(bench.handler)
    # Who is stopped before it has begun is killed by the signal, as every program is.
    bench.publish(wish("last"))
    place.until(lambda: place.lines("effect")["last"], "the third is at work")
    place.until_empty()
    counts.append(place.stop(third))
    return Scene(place.lines("effect"), bench.dead_letters(), bench.left(), counts, bench.is_log)


def played_atomic(place):
    """Killed after the business write and before the commit, then consumed again."""
    with closing(sqlite3.connect(place.shop)) as connection:
        connection.execute("CREATE TABLE orders (name TEXT)")
        connection.commit()
        place.bench.publish(wish("order", hang="after"))
        first = place.start("ATOMIC", hangs=True)
        place.until(lambda: place.lines("hangs")["order"], "it hangs before its commit")
        first.kill()
        first.wait()
        second = place.start("ATOMIC")
        place.until(lambda: connection.execute("SELECT * FROM orders").fetchall(), "the order")
        place.until_empty()
        counts = place.stop(second)
        return [name for (name,) in connection.execute("SELECT name FROM orders")], counts


def play(scene, kind, server, folder):
    place = Place(folder, kind(server))
    try:
        return scene(place)
    finally:
        place.close()


def server_of(fixture):
    """Finds a server that comes with the development requirements, so that it is always there."""

    def find(request, is_needed=False):
        return request.getfixturevalue(fixture)

    return find


def rabbitmq_of(request, is_needed=False):
    """The broker from Debian's package; None where it cannot be had and nobody needs it yet."""
    if not is_needed and rabbitmq_binary() is None:
        return None
    return request.getfixturevalue("rabbitmq")


def pika_of(request, is_needed=False):
    """The same broker, for the other library."""
    if find_spec("pika") is None:
        return missing("pika (make setup)") if is_needed else None
    return rabbitmq_of(request, is_needed)


def kafka_of(request, is_needed=False):
    """As with RabbitMQ."""
    if not is_needed and kafka_binary() is None:
        return None
    return request.getfixturevalue("kafka_server")


# Kafka's takes longest, and begins first: a group waits for the session of a dead member to end.
BENCHES = {
    "kafka": (kafka_of, KafkaBench),
    "sqs-threads": (server_of("moto_server"), SqsBench),
    "sqs-tasks": (server_of("moto_server"), AsyncSqsBench),
    "nats": (server_of("nats_server"), NatsBench),
    "rabbitmq": (rabbitmq_of, RabbitBench),
    "rabbitmq-pika": (pika_of, PikaBench),
}


@pytest.fixture(scope="module")
def playing(request, tmp_path_factory):
    """All scenes that are asked for, some at the same time: they mostly wait."""
    asked = {
        item.callspec.params[name]
        for item in request.session.items
        # Other modules have scenes of their own.
        if item.module is request.module and hasattr(item, "callspec")
        for name in {"scene", "atomic_scene"} & item.callspec.params.keys()
    }
    found = {name: BENCHES[name][0](request) for name in BENCHES if name in asked}
    with ThreadPoolExecutor(SCENES_AT_ONCE) as threads:
        yield {
            (scene, name): threads.submit(
                play, scene, BENCHES[name][1], server, tmp_path_factory.mktemp(name)
            )
            for name, server in found.items()
            if server is not None
            for scene in (played, played_atomic)
        }


def result_of(request, playing, scene):
    name = request.param
    if (scene, name) not in playing:
        BENCHES[name][0](request, is_needed=True)
    return playing[scene, name].result()


@pytest.fixture(scope="module", params=BENCHES)
def scene(request, playing):
    return result_of(request, playing, played)


@pytest.fixture(scope="module", params=BENCHES)
def atomic_scene(request, playing):
    return result_of(request, playing, played_atomic)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_case_has_its_effect_as_often_as_it_must(scene, case):
    assert scene.effects[case.name] == case.effects


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_only_poison_is_dead_lettered_and_says_why(scene, case):
    reasons = [
        reason
        for body, reason in scene.dead.items()
        if body == case.body or f'"{case.name}"' in body
    ]
    if case.dead is not None:
        assert [case.dead in reason for reason in reasons] == [True]
    elif case.name == "another payload under one key":
        assert [reason.partition(":")[0] for reason in reasons] == [
            "its key belongs to another payload, which is not run"
        ]
    else:
        assert reasons == []


def test_a_stop_under_load_loses_nothing_and_repeats_nothing(scene):
    """SIGTERM came in the middle: what ran has ended, what waited went back at once."""
    assert {name: scene.effects[name] for name in LOAD} == dict.fromkeys(LOAD, 1)
    assert scene.left == 0
    second, third = scene.counts
    assert second["handled"] + third["handled"] == sum(scene.effects.values()) - 2
    # Those of the table: killed before the ack, published twice, done elsewhere. A log is read
    # again from the first message that was given back; what was done behind it passes.
    duplicates = second["duplicates"] + third["duplicates"]
    assert duplicates >= 3 if scene.is_log else duplicates == 3
    assert (second["unsettled"], third["unsettled"], third["dead_lettered"]) == (0, 0, 0)


def test_same_transaction_a_kill_before_the_commit_leaves_nothing_behind(atomic_scene):
    """Business write and outcome are one transaction: killed between them, it happens once."""
    orders, counts = atomic_scene
    assert orders == ["order"]
    assert counts["handled"] == 1

"""The soak in small: what `make soak` does with ten thousand messages, in a few seconds."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.consumers.benches import KafkaBench, NatsBench, RabbitBench, SqsBench
from tests.consumers.soak import Soaked, judge, new_database, planned, soaked
from tests.servers.kafka import kafka_binary
from tests.servers.rabbitmq import rabbitmq_binary

MESSAGES = 200
LIMIT_SECONDS = 120

# Each broker, its server, a store, and whether the server can be had.
SCENES = {
    "kafka": ("kafka_server", KafkaBench, "postgresql", kafka_binary),
    "sqs": ("moto_server", SqsBench, "sqlite", lambda: True),
    "nats": ("nats_server", NatsBench, "postgresql", lambda: True),
    "rabbitmq": ("rabbitmq", RabbitBench, "sqlite", rabbitmq_binary),
}


def play(name, server, database, seed):
    _, kind, _, _ = SCENES[name]
    # Kafka's group waits for the session of each dead member.
    harm = {"kills": 1, "freezes": 0} if kind is KafkaBench else {"kills": 3, "freezes": 1}
    plan = planned(seed, name, MESSAGES, consumers=2, **harm)
    return soaked(
        kind(server),
        broker=name,
        database=database,
        handler="place",
        plan=plan,
        limit_seconds=LIMIT_SECONDS,
    )


@pytest.fixture(scope="module")
def results(request):
    """All at the same time: they mostly wait, for leases and for groups."""
    asked = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }
    seed = random.randrange(1_000_000)
    with ThreadPoolExecutor(len(SCENES)) as threads:
        futures = {}
        for name, (fixture, _, store, binary) in SCENES.items():
            if name not in asked or binary() is None:
                continue
            server = request.getfixturevalue(fixture)
            database = None
            if store == "postgresql":
                database = new_database(request.getfixturevalue("postgres_server"))
            futures[name] = threads.submit(play, name, server, database, seed)
        yield seed, futures


@pytest.mark.parametrize("name", SCENES)
def test_consumers_that_die_at_random_lose_nothing_and_place_each_order_once(
    request, results, name
):
    """Killed and frozen at any moment; only poison is dead-lettered, and the queue ends empty."""
    seed, futures = results
    if name not in futures:
        request.getfixturevalue(SCENES[name][0])
    result = futures[name].result()
    assert not result.wrong, f"seed {seed}: {result}"
    assert result.kills >= 1


def test_the_judge_of_the_soak_sees_what_is_wrong():
    """A soak that could not fail would prove nothing."""
    plan = planned(1, "any", 300, kills=2, freezes=1)
    assert planned(1, "any", 300, kills=2, freezes=1) == plan
    assert planned(2, "any", 300, kills=2, freezes=1) != plan
    right = Counter(dict.fromkeys(plan.good, 1))
    twice, lacking = right + Counter(["m1"]), right - Counter(["m1"])

    def wrong(found, dead=plan.poison, left=0, *, is_atomic=True):
        result = Soaked("any", "SQLite", "place", 300, len(plan.deliveries))
        judge(result, plan, found, dead, left, is_atomic=is_atomic)
        return [each.partition(",")[0].partition(":")[0] for each in result.wrong]

    assert wrong(right) == wrong(twice, is_atomic=False) == []
    assert wrong(twice) == ["1 repeated in one transaction"]
    assert wrong(lacking) == ["1 without effect"]
    assert wrong(right + Counter(["other"])) == ["effects that nobody asked for"]
    assert wrong(right, set()) == wrong(right, plan.poison | {"good"}) == ["dead letters"]
    assert wrong(right, left=1) == ["1 left in the queue"]

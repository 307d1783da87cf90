"""Dead letters of Kafka, on a real broker: a message that cannot be read, and a large one.

By the command as a process: the client library dies of headers that are read twice, and takes its
process along.
"""

from __future__ import annotations

import confluent_kafka
import pytest

from tests.consumers.benches import KafkaBench, wish
from tests.consumers.raw_kafka import produce
from tests.consumers.test_brokers import Place

# Beyond what a producer sends by default, as a publisher with another setting does.
LARGE_BYTES = 1_200_000


@pytest.fixture
def place(kafka_server, tmp_path):
    made = Place(tmp_path, KafkaBench(kafka_server, partitions=1))
    yield made
    made.close()


def test_what_cannot_be_read_and_what_is_large_are_dead_letters_and_hold_up_nobody(place):
    bench, key = place.bench, b"lane"
    produce(bench.server.address, bench.name, [(key, b"unreadable", [(b"\xff\xfe", b"v")])])
    producer = confluent_kafka.Producer({**bench.config, "message.max.bytes": 2 * LARGE_BYTES})
    producer.produce(bench.name, b"{" + b"x" * LARGE_BYTES, key)
    assert producer.flush(10) == 0
    bench.sent[0] += 2
    bench.publish(wish("good"), lane=key)
    process = place.start("THREADS")
    place.until(lambda: place.lines("effect")["good"] and bench.left() == 0, "all are settled")
    assert place.stop(process)["dead_lettered"] == 2
    dead = bench.dead_letters()
    assert "its properties cannot be read" in dead.pop("unreadable")
    ((large, reason),) = dead.items()
    assert (len(large), "not JSON" in reason) == (LARGE_BYTES + 1, True)

"""Messages on RabbitMQ that its libraries cannot read, or cannot send again, stop nobody."""

from __future__ import annotations

import asyncio
import struct

import pytest

from retrysafe import AsyncIdempotency
from retrysafe.consumers import Action, BackOff, Consumer, Handler, PayloadInvalid, Verdict
from retrysafe.consumers.amqp import RabbitQueue
from retrysafe.consumers.amqp_copies import buried, returning
from retrysafe.consumers.amqp_frames import mended
from retrysafe.consumers.pika import PikaQueue
from retrysafe.stores import MemoryStore
from tests.consumers.benches import RabbitBench
from tests.consumers.raw_amqp import RawPublisher, field, long, nested

END_OF_TIME = 2**63 - 1
# What pika or pamqp, or both, give up on.
UNREADABLE = {
    "id": {"message_id": b"\xff\xfe"},
    "name": {"message_id": b"a", "table": field(b"\xff", b"S", long(b"x"))},
    "deep": {"message_id": b"f", "table": field(b"k", b"F", long(field(b"\xff", b"V", b"")))},
    "timestamp": {"message_id": b"b", "timestamp": END_OF_TIME},
    "instant": {"message_id": b"c", "table": field(b"k", b"T", struct.pack(">Q", END_OF_TIME))},
    "nested": {"message_id": b"d", "table": nested(3_000)},
}
# What a frame has room for beside the name and the length of one header, an id of one byte, and the
# mode of delivery.
FULL = 131_072 - 8 - 12 - 2 - 4 - (2 + 1 + 4) - 1 - 2


@pytest.fixture(params=[RabbitQueue, PikaQueue], ids=["aio-pika", "pika"])
def kind(request):
    return request.param


@pytest.fixture
def bench(rabbitmq):
    made = RabbitBench(rabbitmq)
    yield made
    made.close()


@pytest.fixture
def raw(rabbitmq):
    made = RawPublisher(rabbitmq.url)
    yield made
    made.close()


async def consumed(bench, kind, handle, is_done):
    """Consumes until `is_done` of the counts; returns them."""
    handler = Handler(handle, tries=2, back_off=BackOff(first=BackOff().first / 8))
    async with AsyncIdempotency(MemoryStore(), caller="unused") as idem:
        broker = kind(bench.server.url, bench.name)
        connected, connect = [], broker._connected

        async def counted():
            connected.append(1)
            return await connect()

        broker._connected = counted
        consumer = Consumer(idem, handler, broker, concurrency=2)
        task = asyncio.create_task(consumer.run_async())
        async with asyncio.timeout(20):
            while not is_done(consumer.counts):  # noqa: ASYNC110 — counts have no event.
                await asyncio.sleep(0.02)
        consumer.stop()
        await task
        return consumer.counts, len(connected)


def dead_letters(bench):
    """By body, as the library reads them."""

    async def take():
        channel = await bench.connection.channel()
        queue = await channel.declare_queue(f"{bench.name}.dead", durable=True)
        found = {}
        while (message := await queue.get(fail=False, no_ack=True)) is not None:
            found[message.body.decode()] = message.headers
        return found

    return bench.runner.run(take())


def test_what_the_library_cannot_read_is_a_dead_letter_and_stops_nobody(bench, raw, kind):
    """With its reason and the bytes that it came with; the connection stays."""
    for name, options in UNREADABLE.items():
        raw.publish(bench.name, name.encode(), **options)
    for number in range(5):
        raw.publish(bench.name, b"good", message_id=b"g%d" % number)
    ran = []

    async def handle(message):
        ran.append(message.text)

    def is_done(counts):
        return counts.handled + counts.dead_lettered == len(UNREADABLE) + 5

    counts, connections = asyncio.run(consumed(bench, kind, handle, is_done))
    # Each library reads some of them.
    assert ran.count("good") == 5
    assert connections == 1
    dead = dead_letters(bench)
    assert {"id", "name", "deep", "nested"} <= set(dead)
    assert len(dead) == counts.dead_lettered
    for headers in dead.values():
        assert "its properties cannot be read" in headers["retrysafe-reason"]
    assert bytes(dead["nested"]["retrysafe-properties"]).endswith(b"\x02\x01d")
    assert bench.left() == 0


def test_a_routing_key_that_is_no_text_does_not_matter(bench, raw, kind):
    async def bind():
        exchange = await bench.channel.declare_exchange(f"{bench.name}.x", "fanout")
        await (await bench.channel.get_queue(bench.name)).bind(exchange)

    bench.runner.run(bind())
    properties = struct.pack(">H", 0x80) + b"\x02id"
    raw.route(f"{bench.name}.x".encode(), b"\xff\xfe", b"good", properties)
    ran = []

    async def handle(message):
        ran.append((message.text, message.identity))

    _, connections = asyncio.run(consumed(bench, kind, handle, lambda counts: counts.handled))
    assert (ran, connections) == ([("good", "id")], 1)


@pytest.mark.parametrize("tries", [1, 2])
def test_headers_that_fill_a_frame_are_retried_and_buried(bench, raw, kind, tries):
    """Ours give way, and the broker's: a frame that is too large ends the connection."""
    value = b"x" * FULL
    raw.publish(bench.name, b"full", message_id=b"1", table=field(b"k", b"S", long(value)))
    seen = []

    async def handle(message):
        seen.append(message.header("k"))
        if len(seen) == tries:
            raise PayloadInvalid("poison")
        raise ValueError("once more")

    counts, connections = asyncio.run(
        consumed(bench, kind, handle, lambda counts: counts.dead_lettered)
    )
    assert seen == [value.decode()] * tries
    assert (connections, counts.unsettled) == (1, 0)
    assert "poison" in dead_letters(bench)["full"]["retrysafe-reason"]


def test_a_value_that_the_library_reads_and_cannot_write_is_sent_as_its_text(bench, raw, kind):
    """pika writes no floating numbers, and neither writes 64 bits without a sign."""
    number = field(b"f", b"d", struct.pack(">d", 0.5)) + field(b"u", b"L", b"\xff" * 8)
    raw.publish(bench.name, b"n", message_id=b"1", table=number)
    seen = []

    async def handle(message):
        seen.append((message.header("f"), message.header("u")))
        if len(seen) == 1:
            raise ValueError("once more")

    asyncio.run(consumed(bench, kind, handle, lambda counts: counts.handled))
    assert seen[0] == seen[1]


def test_a_message_that_cannot_come_back_is_a_dead_letter_with_what_fits(rabbitmq, kind, bench):
    """Types that grow when they are written again: no copy of all headers can be sent."""
    many = b"".join(field(b"%05d" % place, b"b", b"\1") for place in range(16_000))
    raw = RawPublisher(rabbitmq.url)
    raw.publish(bench.name, b"many", message_id=b"1", table=many)
    raw.close()

    async def scene():
        broker = kind(bench.server.url, bench.name)
        await broker.open()
        try:
            async with asyncio.timeout(20):
                while not (found := await broker.receive(1)):
                    pass
            # As on a connection that allows less than the publisher's.
            broker._frame_max = lambda: 50_000
            later = Verdict(Action.RETRY, "again", BackOff().first)
            return list(await broker.settle([(found[0], later)]))
        finally:
            await broker.close()

    assert asyncio.run(scene()) == []
    headers = dead_letters(bench)["many"]
    assert headers["retrysafe-reason"].startswith("its headers do not fit into a copy")
    assert 3_000 < len(headers) < 16_000


def test_what_gives_way_in_a_copy():
    """The broker's notes first, then our count; of a dead letter the largest, and no more."""

    def size(headers):
        return sum(len(name) + len(str(value)) for name, value in headers.items())

    given = {"a": "1" * 10, "bb": "2" * 40, "x-death": "3" * 20}
    own = {"n": 1}
    assert returning(given, own, size, 100) == given | own
    assert returning(given, own, size, 60) == {"a": "1" * 10, "bb": "2" * 40, "n": 1}
    assert returning(given, own, size, 53) == {"a": "1" * 10, "bb": "2" * 40}
    assert returning(given, own, size, 52) is None
    assert buried(given, own, size, 100) == given | own
    assert buried(given, own, size, 52) == {"a": "1" * 10, "n": 1}
    assert buried(given, own, size, 5) == own


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(struct.pack(">BHI", 1, 1, 4) + b"\0\x3c\0\x0a" + b"\xce", id="another-method"),
        pytest.param(struct.pack(">BHI", 2, 1, 2) + b"\0\x3c" + b"\xce", id="cut-short"),
        pytest.param(struct.pack(">BHI", 2, 1, 14) + bytes(14) + b"\0", id="another-end"),
    ],
)
def test_a_frame_that_no_publisher_writes_is_not_mended(frame):
    with pytest.raises(ValueError, match="as it was"):
        mended(frame, ValueError("as it was"))

"""What is SQS's own: FIFO groups, batches, redrive, receipts that no longer count."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, InvalidInput, Policy
from retrysafe.consumers import Action, BackOff, Consumer, Handler, Verdict
from retrysafe.consumers.message import PayloadInvalid
from retrysafe.consumers.sqs import AsyncSqsQueue, SqsQueue
from retrysafe.errors import PolicyInvalid
from retrysafe.stores import MemoryStore
from tests.consumers.benches import SqsBench, wish

KINDS = [SqsQueue, AsyncSqsQueue]
DONE = Verdict(Action.ACK, "done")


@pytest.fixture
def bench(moto_server):
    made = SqsBench(moto_server)
    yield made
    made.close()


def queue_of(kind, bench, **options):
    options = {"visibility": timedelta(seconds=5), "wait": timedelta(seconds=1), **options}
    return kind(bench.name, endpoint=bench.server.endpoint, region="eu-central-1", **options)


async def received(queue, count):
    found = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await queue.receive(count - len(found))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_and_goes(kind, bench):
    """More than one batch of each: identities, counts, headers, deletes, delays."""

    async def scene():
        sent = {bench.publish(wish(f"m{number}"), f"key-{number}") for number in range(23)}
        queue = queue_of(kind, bench)
        await queue.open()
        try:
            messages = await received(queue, 23)
            assert {each.identity for each in messages} == sent
            assert {each.header("idempotency-key") for each in messages} == {
                f"key-{number}" for number in range(23)
            }
            assert {each.deliveries for each in messages} == {1}
            assert {each.lane for each in messages} == {None}
            assert list(await queue.extend(messages)) == []
            back, *rest = messages
            at_once = Verdict(Action.RETRY, "again", timedelta(0))
            settled = [(back, at_once), *((each, DONE) for each in rest)]
            assert list(await queue.settle(settled)) == []
            (again,) = await received(queue, 1)
            assert (again.identity, again.deliveries) == (back.identity, 2)
            assert bench.left() == 1
            # Its receipt is of an earlier delivery, or the message is gone.
            await queue.settle([(again, DONE)])
            assert list(await queue.extend([again])) == [again]
        finally:
            await queue.close()

    asyncio.run(scene())
    assert bench.left() == 0


def test_a_fifo_failure_holds_back_only_its_group(moto_server):
    """The failed message comes first again, those behind it after it; another group goes on."""
    bench = SqsBench(moto_server, is_fifo=True)
    for group in ("a", "b"):
        for number in (1, 2, 3):
            name = f"{group}{number}"
            bench.publish(wish(name), MessageGroupId=group, MessageDeduplicationId=name)
    seen = []

    async def handle(message):
        name = message.json()["name"]
        seen.append(name)
        if name == "a1" and seen.count("a1") == 1:
            raise LookupError("not yet")

    async def scene():
        queue = queue_of(AsyncSqsQueue, bench)
        idem = AsyncIdempotency(MemoryStore(), caller="unused")
        handler = Handler(handle, back_off=BackOff(timedelta(seconds=1), timedelta(seconds=1)))
        consumer = Consumer(idem, handler, queue)
        task = asyncio.create_task(consumer.run_async())
        async with asyncio.timeout(20):
            while consumer.counts.handled < 6:  # noqa: ASYNC110 — counts have no event.
                await asyncio.sleep(0.02)
        consumer.stop()
        assert await task
        await idem.close()

    asyncio.run(scene())
    bench.close()
    assert [name for name in seen if name[0] == "a"] == ["a1", "a1", "a2", "a3"]
    assert [name for name in seen if name[0] == "b"] == ["b1", "b2", "b3"]
    # The other group did not wait for the pause of the first.
    assert seen.index("b3") < len(seen) - 1 - seen[::-1].index("a1")


def test_dead_letters_go_where_the_redrive_policy_says(bench):
    """With the reason, before the message is deleted; its attributes stay, as many as fit."""
    dead = SqsBench(bench.server)
    arn = f"arn:aws:sqs:eu-central-1:123456789012:{dead.name}"
    bench.client.set_queue_attributes(
        QueueUrl=bench.queue_url,
        Attributes={
            "RedrivePolicy": json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 50})
        },
    )
    bench.publish(wish("poison"), "key-1")

    async def scene():
        queue = queue_of(SqsQueue, bench)
        await queue.open()
        try:
            assert queue.delivery_limit == 50
            window = await queue.redelivery_window()
            (message,) = await received(queue, 1)
            verdict = Verdict(Action.DEAD_LETTER, "line one\nline two")
            assert list(await queue.settle([(message, verdict)])) == []
        finally:
            await queue.close()
        return window

    # Four days here, four days there, and twelve hours in flight.
    assert asyncio.run(scene()) == timedelta(days=8, hours=12)
    answer = dead.client.receive_message(
        QueueUrl=dead.queue_url, MessageAttributeNames=["All"], WaitTimeSeconds=1
    )
    (letter,) = answer["Messages"]
    attributes = {name: each["StringValue"] for name, each in letter["MessageAttributes"].items()}
    assert attributes == {"Idempotency-Key": "key-1", "Retrysafe-Reason": "line one line two"}
    assert (bench.left(), letter["Body"]) == (0, wish("poison"))
    dead.close()


def test_a_dead_letter_that_is_not_taken_keeps_its_message(bench):
    """Nothing is deleted before its dead letter is safe."""
    bench.publish(wish("poison"))

    async def scene():
        queue = queue_of(SqsQueue, bench, dead_letter="not-there")
        await queue.open()
        try:
            (message,) = await received(queue, 1)
            verdict = Verdict(Action.DEAD_LETTER, "poison")
            assert list(await queue.settle([(message, verdict)])) == [message]
        finally:
            await queue.close()

    asyncio.run(scene())
    assert bench.left() == 1


def test_a_window_shorter_than_the_queues_retention_is_refused_in_numbers(bench):
    """Four days there, fourteen among the dead letters, twelve hours in flight."""

    async def handle(message):
        return None

    async def scene():
        idem = AsyncIdempotency(MemoryStore(), caller="unused")
        handler = Handler(handle, policy=Policy(active_window=timedelta(days=4)))
        with pytest.raises(PolicyInvalid, match=r"for 18 days, 12:00:00.* is 4 days, 0:00:00"):
            await Consumer(idem, handler, queue_of(SqsQueue, bench)).run_async()

    asyncio.run(scene())


def test_a_dead_letter_queue_of_the_usual_name_is_used_as_it_is_and_the_key_fits(bench):
    """It may have another retention; where not all attributes fit, the key does."""
    bench.client.create_queue(
        QueueName=f"{bench.name}-dlq", Attributes={"MessageRetentionPeriod": "3600"}
    )
    text = {"DataType": "String", "StringValue": "x"}
    names = [*(f"A{number}" for number in range(9)), "idempotency-key"]
    bench.client.send_message(
        QueueUrl=bench.queue_url,
        MessageBody=wish("poison"),
        MessageAttributes=dict.fromkeys(names, text),
    )

    async def scene():
        queue = queue_of(SqsQueue, bench)
        await queue.open()
        try:
            (message,) = await received(queue, 1)
            # The order in which SQS tells them is its own.
            attributes = message.receipt["MessageAttributes"]
            message.receipt["MessageAttributes"] = {name: attributes[name] for name in names}
            verdict = Verdict(Action.DEAD_LETTER, "poison")
            assert list(await queue.settle([(message, verdict)])) == []
        finally:
            await queue.close()

    asyncio.run(scene())
    url = bench.client.get_queue_url(QueueName=f"{bench.name}-dlq")["QueueUrl"]
    answer = bench.client.receive_message(
        QueueUrl=url, MessageAttributeNames=["All"], WaitTimeSeconds=1
    )
    assert {"idempotency-key", "Retrysafe-Reason"} < set(answer["Messages"][0]["MessageAttributes"])


def test_what_a_server_says_of_a_message_never_ends_a_batch():
    """Half a surrogate pair in a body, and a count without an end, are that message's matter."""
    found = {"Body": "\ud800", "MessageId": "m", "Attributes": {}}
    found["Attributes"]["ApproximateReceiveCount"] = "9" * 5_000
    message = SqsQueue("orders")._message(found)
    assert message.deliveries == 1
    with pytest.raises(PayloadInvalid, match="not UTF-8"):
        message.json()


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_that_is_not_there_is_said_so(kind, bench):
    async def scene():
        bench.name = "nowhere"
        with pytest.raises(InvalidInput, match="no SQS queue nowhere"):
            await queue_of(kind, bench).open()

    asyncio.run(scene())
    with pytest.raises(InvalidInput, match="which queue"):
        kind("")

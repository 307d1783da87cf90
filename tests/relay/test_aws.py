"""SQS and SNS as targets, on a server that imitates them."""

from __future__ import annotations

import asyncio
import socket
import uuid
from datetime import timedelta
from functools import partial

import boto3
import pytest
from botocore.exceptions import ClientError

from retrysafe import InvalidInput
from retrysafe.consumers.sqs import SqsQueue
from retrysafe.errors import DeliveryFailed
from retrysafe.relay import Relay
from retrysafe.relay.targets.aws import AsyncSns, AsyncSqs, Sns, Sqs
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore
from tests.forking import exit_code, fork
from tests.relay.scripted import deliver_by, entry, stage
from tests.relay.test_webhooks import delivery
from tests.servers.process import free_port

REGION = "eu-central-1"


def client(service, server):
    return boto3.client(
        service,
        endpoint_url=server.endpoint,
        region_name=REGION,
        aws_access_key_id="local",
        aws_secret_access_key="local",
    )


class Queue:
    """A queue of its own, and what is in it."""

    def __init__(self, server, *, is_fifo):
        self.name = f"t{uuid.uuid4().hex[:12]}" + (".fifo" if is_fifo else "")
        self.client = client("sqs", server)
        attributes = {"FifoQueue": "true"} if is_fifo else {}
        self.url = self.client.create_queue(QueueName=self.name, Attributes=attributes)["QueueUrl"]

    def messages(self):
        found = []
        while True:
            answer = self.client.receive_message(
                QueueUrl=self.url,
                MaxNumberOfMessages=10,
                MessageAttributeNames=["All"],
                AttributeNames=["All"],
            )
            if not answer.get("Messages"):
                return found
            found += answer["Messages"]
            for each in answer["Messages"]:
                self.client.delete_message(QueueUrl=self.url, ReceiptHandle=each["ReceiptHandle"])


@pytest.fixture
def queue(moto_server, request):
    made = Queue(moto_server, is_fifo=getattr(request, "param", False))
    yield made
    made.client.close()


def target_of(kind, name, server, **options):
    return kind(name, endpoint=server.endpoint, region=REGION, **options)


def sent(kind, name, server, *items, **options):
    make = partial(target_of, kind, name, server, **options)
    deliver_by(make, *items, is_blocking=kind in (Sqs, Sns))


def values(message):
    return {name: value["StringValue"] for name, value in message["MessageAttributes"].items()}


@pytest.mark.parametrize("kind", [Sqs, AsyncSqs])
def test_sqs_gets_the_key_as_an_attribute(moto_server, queue, kind):
    item = delivery()
    sent(kind, queue.name, moto_server, item)
    (message,) = queue.messages()
    assert message["Body"].encode() == item.body
    assert values(message) == {
        "Idempotency-Key": item.key,
        "Content-Type": item.content_type,
        "Retrysafe-Topic": item.topic,
        "Retrysafe-Attempt": "2",
        "Retrysafe-Aggregate": "order-7",
    }


@pytest.mark.parametrize("queue", [True], indirect=True)
def test_a_fifo_queue_drops_repetitions_and_groups_by_aggregate(moto_server, queue):
    """An aggregate that is no name of a group, and no aggregate at all, are groups too."""
    items = [
        delivery(key="entry:1"),
        delivery(key="entry:1"),
        delivery(key="entry:2", aggregate="größer " * 30),
        delivery(key="entry:3", aggregate=None),
        delivery(key="k" * 255, aggregate=None),
    ]
    sent(Sqs, queue.name, moto_server, *items)
    messages = queue.messages()
    assert [values(each)["Idempotency-Key"] for each in messages] == [
        "entry:1",
        "entry:2",
        "entry:3",
        "k" * 255,
    ]
    groups = [each["Attributes"]["MessageGroupId"] for each in messages]
    assert (groups[0], groups[2]) == ("order-7", "entry:3")
    assert len(set(groups)) == 4


@pytest.mark.parametrize("queue", [True], indirect=True)
def test_a_relay_keeps_the_order_of_an_aggregate(moto_server, queue):
    store = MemoryStore()
    stage(store, *(entry(f"n{number:02}", "lane") for number in range(12)))
    target = target_of(Sqs, queue.name, moto_server)
    try:
        assert Relay(store, target).drain().delivered == 12
    finally:
        run_sync(target.close())
    assert [each["Body"] for each in queue.messages()] == [f"n{number:02}" for number in range(12)]


@pytest.mark.parametrize("body", [b"", b"\xff\x00binary", b"with a \x07 bell", "grüß".encode()])
def test_every_body_arrives_as_it_was_at_a_consumer(moto_server, queue, body):
    """The service takes text without control characters alone, and never none."""
    sent(Sqs, queue.name, moto_server, delivery(body=body))

    async def main():
        broker = SqsQueue(queue.name, endpoint=moto_server.endpoint, region=REGION)
        await broker.open()
        try:
            return await broker.receive(1)
        finally:
            await broker.close()

    (message,) = asyncio.run(main())
    assert message.body == body


def test_a_message_too_large_is_refused_before_it_is_sent(moto_server, queue):
    """Whatever is tried again, it does not shrink: the entry is dead, and says the numbers."""
    nobody = type("Server", (), {"endpoint": f"http://127.0.0.1:{free_port()}"})
    arn = f"arn:aws:sns:{REGION}:123456789012:orders"
    for kind, name, limit in ((Sqs, queue.name, "1,048,576"), (Sns, arn, "262,144")):
        with pytest.raises(DeliveryFailed, match=f"takes {limit}") as raised:
            sent(kind, name, nobody, delivery(body=b"\xff" * 900_000))
        assert raised.value.is_final


def test_a_smaller_limit_of_the_queue_is_final_too(moto_server, queue):
    queue.client.set_queue_attributes(QueueUrl=queue.url, Attributes={"MaximumMessageSize": "1024"})
    with pytest.raises(DeliveryFailed, match="SQS refused the message") as raised:
        sent(Sqs, queue.name, moto_server, delivery(body=b"x" * 2_000))
    assert raised.value.is_final


@pytest.mark.parametrize("kind", [Sqs, AsyncSqs])
def test_a_queue_that_is_missing_is_tried_again_and_found(moto_server, queue, kind):
    """Somebody can make it without touching the entry."""
    queue.client.delete_queue(QueueUrl=queue.url)
    with pytest.raises(DeliveryFailed, match=f"there is no SQS {queue.name}") as raised:
        sent(kind, queue.name, moto_server, delivery())
    assert not raised.value.is_final
    queue.client.create_queue(QueueName=queue.name)
    sent(kind, queue.name, moto_server, delivery())
    assert len(queue.messages()) == 1


@pytest.mark.parametrize("kind", [Sqs, AsyncSqs])
def test_a_service_that_is_away_or_silent_is_an_outage_within_the_time_limit(kind):
    """The error is the library's own, for another try."""
    away = type("Server", (), {"endpoint": f"http://127.0.0.1:{free_port()}"})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        silent = type("Server", (), {"endpoint": f"http://127.0.0.1:{port}"})
        for server in (away, silent):
            with pytest.raises(Exception) as raised:
                sent(kind, "q", server, delivery(), timeout=timedelta(seconds=0.4))
            assert not getattr(raised.value, "is_final", False)


@pytest.mark.parametrize("name", ["", "a queue", "orders.paid", "q" * 81])
def test_names_that_no_queue_can_have_are_refused(name):
    with pytest.raises(InvalidInput, match="up to 80 letters"):
        Sqs(name)
    with pytest.raises(InvalidInput, match="named by its ARN"):
        Sns(name)


def test_a_child_makes_a_client_of_its_own(moto_server, queue):
    """On one connection, parent and child would read each other's answers."""
    target = target_of(Sqs, queue.name, moto_server)
    try:
        run_sync(target.deliver(delivery(key="entry:1")))
        parents = target._client

        def in_child():
            run_sync(target.deliver(delivery(key="entry:2")))
            assert target._client is not parents

        # As if a thread of the parent were just about to make it.
        with target._making:
            child = fork(in_child)
        assert exit_code(child) == 0
    finally:
        run_sync(target.close())
    assert len(queue.messages()) == 2


def test_a_target_delivers_in_one_loop_after_another(moto_server, queue):
    """A lock that somebody waited for belongs to its loop for ever."""
    target = target_of(AsyncSqs, queue.name, moto_server)

    async def main():
        await asyncio.gather(*(target.deliver(delivery()) for _ in range(3)))
        await target.close()

    for _ in range(2):
        asyncio.run(main())
    assert len(queue.messages()) == 6


def test_a_delivery_that_fails_takes_the_address_from_no_other():
    """It may fail in another thread between this one's look and its send."""
    sent_to = []

    class Client:
        def send_message(self, **options):
            sent_to.append(options["QueueUrl"])

    class Forgetful(Sqs):
        """Another thread forgets the address whenever it has been looked at."""

        @property
        def _url(self):
            found, self.known = self.known, ""
            return found

        @_url.setter
        def _url(self, value):
            self.known = value

    target = Forgetful("orders", client=Client())
    target.known = "http://queue"
    run_sync(target.deliver(delivery()))
    assert sent_to == ["http://queue"]


# SNS.


@pytest.fixture
def topic(moto_server, queue):
    """A topic of SNS, to which the queue is subscribed with raw delivery."""
    sns = client("sns", moto_server)
    attributes = {"FifoTopic": "true"} if queue.name.endswith(".fifo") else {}
    arn = sns.create_topic(Name=queue.name, Attributes=attributes)["TopicArn"]
    found = queue.client.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["QueueArn"])
    sns.subscribe(
        TopicArn=arn,
        Protocol="sqs",
        Endpoint=found["Attributes"]["QueueArn"],
        Attributes={"RawMessageDelivery": "true"},
    )
    yield arn
    sns.close()


@pytest.mark.parametrize("queue", [False, True], indirect=True, ids=["standard", "fifo"])
@pytest.mark.parametrize("kind", [Sns, AsyncSns])
def test_sns_hands_the_key_on_to_its_queues(moto_server, queue, topic, kind):
    item = delivery()
    sent(kind, topic, moto_server, item)
    (message,) = queue.messages()
    assert message["Body"].encode() == item.body
    assert values(message)["Idempotency-Key"] == item.key


def test_a_topic_that_is_missing_is_tried_again(moto_server):
    arn = f"arn:aws:sns:{REGION}:123456789012:t{uuid.uuid4().hex}"
    with pytest.raises(DeliveryFailed, match="there is no SNS") as raised:
        sent(Sns, arn, moto_server, delivery())
    assert not raised.value.is_final


@pytest.mark.parametrize(
    ("code", "words", "is_final"),
    [
        ("InvalidParameter", "Invalid parameter: Message too long", True),
        ("InvalidParameter", "Invalid parameter: TopicArn", False),
        ("com.amazonaws.sqs#InvalidMessageContents", "a control character", True),
        ("AWS.SimpleQueueService.NonExistentQueue", "no such queue", False),
        ("AccessDenied", "not allowed", False),
        ("ThrottlingException", "slow down", False),
        ("ExpiredToken", "expired", False),
    ],
)
def test_only_a_refusal_of_the_message_itself_is_final(code, words, is_final):
    """A setting, a right or a limit of the service would else make every entry dead."""
    error = ClientError({"Error": {"Code": code, "Message": words}}, "Publish")
    judged = Sns(f"arn:aws:sns:{REGION}:123456789012:orders")._judged(error, "entry:1")
    assert getattr(judged, "is_final", False) is is_final

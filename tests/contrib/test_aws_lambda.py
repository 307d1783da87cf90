"""Lambda functions: batches, groups, the time that is left, and environments that were frozen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    process_partial_response,
)

from retrysafe import AsyncIdempotency, Idempotency, Policy
from retrysafe.consumers import Handler
from retrysafe.contrib.aws_lambda import EventNotHandled, LambdaConsumer
from retrysafe.errors import InvalidInput

QUEUE = "arn:aws:sqs:eu-central-1:1:payments"


class Context:
    """What Lambda passes beside the event."""

    def __init__(self, left_ms=60_000):
        self.left_ms = left_ms

    def get_remaining_time_in_millis(self):
        return self.left_ms


class Shop:
    """A handler that remembers what it did."""

    def __init__(self):
        self.done = []
        self.failing = set()
        self.on_run = lambda: None

    def charge(self, message):
        name = message.json()["name"]
        self.on_run()
        if name in self.failing:
            raise LookupError(name)
        self.done.append(name)


@pytest.fixture
def shop():
    return Shop()


@pytest.fixture
def idem(tmp_path):
    with Idempotency(
        f"sqlite:///{tmp_path}/store.db", policy=Policy(lease=timedelta(seconds=2))
    ) as made:
        yield made


@pytest.fixture
def consumer(idem, shop):
    return LambdaConsumer(idem, shop.charge)


def record(name, group=None, queue=QUEUE, **attributes):
    system = {"ApproximateReceiveCount": "1"} | ({"MessageGroupId": group} if group else {})
    return {
        "messageId": f"id-{name}",
        "body": json.dumps({"name": name}),
        "attributes": system,
        "messageAttributes": {
            key: {"stringValue": value, "dataType": "String"} for key, value in attributes.items()
        },
        "eventSource": "aws:sqs",
        "eventSourceARN": queue,
    }


def failures(answer):
    return [each["itemIdentifier"] for each in answer["batchItemFailures"]]


def test_a_batch_reports_what_failed_and_runs_the_rest_once(consumer, shop):
    """A failure comes again, what is done is done without work in the next delivery."""
    event = {"Records": [record("a"), record("b"), record("c")]}
    shop.failing = {"b"}
    assert failures(consumer.sqs(event, Context())) == ["id-b"]
    shop.failing = set()
    assert failures(consumer.sqs(event, Context())) == []
    assert shop.done == ["a", "c", "b"]


def test_a_failure_in_a_fifo_queue_holds_back_its_group_alone(consumer, shop):
    """Order is kept within a group; the next invocation starts with no memory of the failure."""
    queue = f"{QUEUE}.fifo"
    names = [("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")]
    event = {"Records": [record(name, group, queue) for name, group in names]}
    shop.failing = {"a1"}
    assert failures(consumer.sqs(event, Context())) == ["id-a1", "id-a2"]
    shop.failing = set()
    assert failures(consumer.sqs(event, Context())) == []
    assert shop.done == ["b1", "b2", "a1", "a2"]


def test_a_group_of_a_standard_queue_keeps_no_order(consumer, shop):
    """Fair queues have groups too, and nothing waits there."""
    shop.failing = {"a1"}
    event = {"Records": [record("a1", "a"), record("a2", "a")]}
    assert failures(consumer.sqs(event, Context())) == ["id-a1"]


def test_nothing_starts_without_time_and_an_attempt_is_bounded_by_it(consumer, shop, idem):
    """What would be killed in the middle goes back; the lease never outlives the invocation."""
    late = Context(2_100)
    shop.on_run = lambda: setattr(late, "left_ms", 1_900)
    assert failures(consumer.sqs({"Records": [record("b"), record("a")]}, late)) == ["id-a"]
    with pytest.raises(EventNotHandled, match="time-out"):
        consumer.sqs({"Records": [record("a")]}, late)
    assert shop.done == ["b"]
    running = []
    shop.on_run = lambda: running.append(idem.read("message:id-a", caller="sqs:payments").record)
    assert failures(consumer.sqs({"Records": [record("a")]}, Context(2_100))) == []
    assert running[0].lease_ends_at_ms - running[0].claimed_at_ms == 1_100


def test_the_key_of_a_producer_counts(consumer, shop):
    """Two messages with one key are one."""
    header = {"Idempotency-Key": "order-1"}
    first, second = record("a", **header), record("a", **header) | {"messageId": "other"}
    assert failures(consumer.sqs({"Records": [first, second]}, Context())) == []
    assert shop.done == ["a"]


def test_powertools_processes_batches_with_it(consumer, shop):
    """Its processor takes the consumer as record handler."""
    processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)
    shop.failing = {"b"}
    event = {"Records": [record("a"), record("b")]}
    answer = process_partial_response(
        event=event, record_handler=consumer.sqs_record, processor=processor, context=Context()
    )
    assert failures(answer) == ["id-b"]
    assert shop.done == ["a"]


def test_sns_and_eventbridge_events_run_once_and_raise_until_they_are_done(consumer, shop):
    """A failure is raised, so that AWS delivers again; a second delivery does nothing."""
    note = {
        "MessageId": "n1",
        "TopicArn": "arn:aws:sns:eu-central-1:1:orders",
        "Message": json.dumps({"name": "sns"}),
        "MessageAttributes": {},
    }
    sns = {"Records": [{"EventSource": "aws:sns", "Sns": note}]}
    bus = {"id": "e1", "source": "shop", "detail-type": "Order", "detail": {}, "name": "bus"}
    shop.failing = {"sns", "bus"}
    for handle, event in ((consumer.sns, sns), (consumer.eventbridge, bus)):
        with pytest.raises(EventNotHandled):
            handle(event, Context())
    shop.failing = set()
    for _ in range(2):
        consumer.sns(sns, Context())
        consumer.eventbridge(bus, Context())
        consumer.eventbridge(bus | {"replay-name": "again"}, Context())
    assert shop.done == ["sns", "bus"]


def test_another_event_is_refused(consumer):
    """A function behind the wrong source says so."""
    for handle in (consumer.sqs, consumer.sns, consumer.eventbridge):
        with pytest.raises(InvalidInput, match="this is no"):
            handle({"Records": [{"EventSource": "aws:s3"}]}, Context())


def test_an_async_handler_keeps_its_loop_between_invocations(tmp_path):
    """The connections of the engine belong to one loop, which an invocation does not end."""
    done = []

    async def charge(message):
        done.append(message.json()["name"])

    idem = AsyncIdempotency(f"sqlite:///{tmp_path}/store.db")
    consumer = LambdaConsumer(idem, charge)
    for name in ("a", "b", "a"):
        assert failures(consumer.sqs({"Records": [record(name)]}, Context())) == []
    assert done == ["a", "b"]
    consumer._runner.run(idem.close())
    consumer._runner.close()


FROZEN = """
import json, sys, time
from datetime import timedelta
from retrysafe import Idempotency, Policy
from retrysafe.contrib.aws_lambda import LambdaConsumer
from tests.contrib.test_aws_lambda import Context

def charge(message):
    print("begun", flush=True)
    sys.stdin.readline()

with Idempotency(sys.argv[1], policy=Policy(lease=timedelta(seconds=1))) as idem:
    consumer = LambdaConsumer(idem, charge)
    print(json.dumps(consumer.sqs(json.loads(sys.argv[2]), Context())), flush=True)
"""


def test_a_thawed_environment_acks_nothing_that_another_one_has_taken_over(tmp_path, shop):
    """Frozen in the middle of a message for longer than its lease, it reports it as not done."""
    url = f"sqlite:///{tmp_path}/store.db"
    event = {"Records": [record("a")]}
    with (
        Idempotency(url, policy=Policy(lease=timedelta(seconds=1))) as idem,
        subprocess.Popen(
            [sys.executable, "-c", FROZEN, url, json.dumps(event)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as frozen,
    ):
        assert frozen.stdout.readline() == "begun\n"
        os.kill(frozen.pid, signal.SIGSTOP)
        consumer = LambdaConsumer(idem, Handler(shop.charge))
        until = time.monotonic() + 30
        while failures(consumer.sqs(event, Context())):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(frozen.pid, signal.SIGCONT)
        frozen.stdin.write("go on\n")
        frozen.stdin.flush()
        assert failures(json.loads(frozen.stdout.readline())) == ["id-a"]
    assert shop.done == ["a"]

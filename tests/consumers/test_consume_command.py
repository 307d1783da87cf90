"""`retrysafe consume` as people type it: URLs, what is refused, the demo's charge."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from retrysafe.cli.app import app
from retrysafe.consumers.amqp import RabbitQueue
from retrysafe.consumers.kafka import KafkaTopic
from retrysafe.consumers.nats import JetStream
from retrysafe.consumers.sqs import AsyncSqsQueue, SqsQueue
from retrysafe.consumers.urls import QueueUrlInvalid, broker_of
from tests.consumers.benches import NatsBench, SqsBench

LIMIT_SECONDS = 60


def command(*words, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "retrysafe", "consume", *words],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refused(capsys, *words):
    code = app(["consume", *words], standalone_mode=False)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "kind", "queue", "group"),
    [
        ("sqs:///pay?endpoint=http://127.0.0.1:1&region=r", SqsQueue, "sqs:pay", ""),
        ("sqs:///pay.fifo?group=g&visibility=5&wait=1", SqsQueue, "sqs:pay.fifo", "g"),
        ("nats://127.0.0.1:1/PAY?durable=d", JetStream, "nats:PAY", "d"),
        ("nats://u:p@h:1/PAY?durable=d&ack_wait=2&dead_letter=x", JetStream, "nats:PAY", "d"),
        ("amqp://u:p@127.0.0.1:1/?queue=pay", RabbitQueue, "amqp:pay", ""),
        ("amqps://h/a%2Fb?queue=pay&group=g&dead_letter=x", RabbitQueue, "amqp@a%2Fb:pay", "g"),
        ("kafka://127.0.0.1:1/pay?group=g", KafkaTopic, "kafka:pay", "g"),
        ("kafka://a:1,b:2/pay?group=g&session_timeout=6", KafkaTopic, "kafka:pay", "g"),
    ],
)
def test_urls_name_queues(url, kind, queue, group):
    broker = broker_of(url)
    assert (type(broker), broker.queue, broker.group) == (kind, queue, group)


def test_the_path_of_an_amqp_url_is_its_virtual_host():
    """As it was given: a slash inside its name stays escaped."""
    assert broker_of("amqps://h/shop%2Fa?queue=pay")._server_url == "amqps://h/shop%2Fa"
    assert broker_of("amqp://u:p@h:1/?queue=pay")._server_url == "amqp://u:p@h:1/"


def test_an_async_handler_gets_the_client_for_event_loops():
    assert type(broker_of("sqs:///pay", is_async=True)) is AsyncSqsQueue


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://127.0.0.1/pay", "names no queue"),
        ("payments", "names no queue"),
        ("sqs://host/pay", "is written sqs:///"),
        ("sqs:///", "is written sqs:///"),
        ("sqs:///pay?durable=d", "has no option durable"),
        ("sqs:///pay?visibility=soon", "number of seconds"),
        ("sqs:///pay?region=a&region=b", "given twice"),
        ("sqs:///pay?region", "cannot be read"),
        ("nats://h:1/PAY", "needs durable="),
        ("nats://h:1/?durable=d", "is written nats://"),
        ("nats://h:1/PAY?durable=d&group=g", "has no option group"),
        ("amqp://h:1/", "needs queue="),
        ("kafka://h:1/pay", "needs group="),
        ("kafka://h:1/?group=g", "is written kafka://"),
    ],
)
def test_urls_that_name_no_queue_are_refused_in_words(url, message):
    with pytest.raises(QueueUrlInvalid, match=message):
        broker_of(url)


def test_what_cannot_work_is_refused_before_any_message_is_taken(bench, tmp_path, capsys):
    """A handler that cannot be built takes no message, and marks none as done."""
    bench.publish("{}")
    store = f"sqlite:///{tmp_path / 'store.db'}"
    for words, code, message in (
        (("tests.consumers.handlers:nothing", "--from", bench.url), 2, "no function nothing"),
        (("tests.consumers.nowhere:work", "--from", bench.url), 2, "no module"),
        (("handlers", "--from", bench.url), 2, "module:function"),
        (("tests.consumers.broken:charge", "--from", bench.url), 2, "the database is not there"),
        (("tests.consumers.handlers:ASYNC", "--from", "nats://127.0.0.1:1/X?durable=d"), 1, ""),
    ):
        told = refused(capsys, *words, "--store", store)
        assert told[0] == code, told
        assert message in told[1]
    assert refused(capsys, "tests.consumers.handlers:ASYNC", "--from", bench.url)[0] == 2
    assert bench.left() == 1


@pytest.fixture
def bench(moto_server):
    made = SqsBench(moto_server)
    yield made
    made.close()


@pytest.fixture(params=["sqs", "nats"])
def any_bench(request):
    if request.param == "sqs":
        made = SqsBench(request.getfixturevalue("moto_server"))
    else:
        made = NatsBench(request.getfixturevalue("nats_server"))
    yield made
    made.close()


def test_the_demos_charge_is_made_once_for_each_message(any_bench, tmp_path):
    """Twice under a key, declined, no charge at all: what the demo on the same store would list."""
    path = tmp_path / "demo.db"

    def charge(customer, **options):
        return json.dumps({"amount": 5, "currency": "eur", "customer": customer, **options})

    any_bench.publish(charge("c1"), "order-1")
    # Stage directions are no part of what is asked for.
    any_bench.publish(charge("c1", delay_ms=1), "order-1")
    any_bench.publish(charge("c2", outcome="decline"))
    any_bench.publish(json.dumps({"amount": -1}))
    words = ("--from", any_bench.url, "--store", f"sqlite:///{path}", "--json")
    process = command("retrysafe.demo.messages:charge", *words)
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while len(charges(path)) < 2 or not any_bench.dead_letters() or any_bench.left():
            assert time.monotonic() < end, charges(path)
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, error
    assert sorted(charges(path)) == [("charge", "c1", "ok"), ("charge", "c2", "decline")]
    counts = json.loads(out)
    assert (counts["handled"], counts["duplicates"], counts["dead_lettered"]) == (2, 1, 1)


def charges(path):
    connection = sqlite3.connect(path)
    try:
        return connection.execute(
            "SELECT operation, customer, outcome FROM retrysafe_demo_ledger"
        ).fetchall()
    except sqlite3.OperationalError:
        return []  # Not made yet.
    finally:
        connection.close()

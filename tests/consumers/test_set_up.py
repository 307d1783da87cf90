"""What is settled before the first message: names, windows, limits, signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, InvalidInput, Policy
from retrysafe.consumers import Consumer, Handler, PayloadInvalid, consumer_name
from retrysafe.consumers.consumer import checked_policy
from retrysafe.errors import PolicyInvalid
from retrysafe.stores import MemoryStore
from tests.consumers.scripted import ScriptedBroker, message


@pytest.mark.parametrize(
    "alias",
    ["nats:PÄY/billing", "amqp:my queue", "kafka:a/b/c", "sqs:50%", "sqs:a%2fb", "", "/g", "q/"],
)
def test_an_alias_that_no_consumer_was_ever_stored_under_is_refused(alias):
    """It would find nothing, and what its consumer has done would run again."""
    with pytest.raises(InvalidInput, match="write consumer_name"):
        Handler(print, aliases=[alias])


def test_an_alias_is_what_the_former_consumer_was_stored_under():
    class Former(ScriptedBroker):
        queue, group = "amqp:my queue/50%", "bill/ing"

    idem = AsyncIdempotency(MemoryStore(), caller="unused")
    former = Consumer(idem, done, Former())
    handler = Handler(done, aliases=[consumer_name(Former.queue, Former.group)])
    assert Consumer(idem, handler, ScriptedBroker()).names[1:] == former.names


async def done(message):
    return None


def test_a_redelivery_never_shortens_the_window_of_the_broker():
    days = timedelta(days=4)
    short = Handler(print, redelivery=timedelta(days=1))
    assert checked_policy(short, Policy(), "q", days).active_window == days
    own = Handler(print, redelivery=timedelta(days=1), policy=Policy())
    with pytest.raises(PolicyInvalid, match="for 4 days"):
        checked_policy(own, Policy(), "q", days)


def test_null_is_no_natural_key():
    """All messages without a value would be one."""
    handler = Handler(print, key=("order", "line"))
    with pytest.raises(PayloadInvalid, match="null in line,"):
        handler.key_text(message(body=b'{"order": 1, "line": null}'))


@pytest.mark.parametrize(("limit", "is_told"), [(24, True), (25, False), (None, False)])
def test_a_broker_that_gives_up_before_the_handler_is_told_at_the_start(limit, is_told, caplog):
    async def scene():
        broker = ScriptedBroker()
        broker.delivery_limit = limit
        async with AsyncIdempotency(MemoryStore(), caller="unused") as idem:
            consumer = Consumer(idem, done, broker)
            consumer.stop()
            await consumer.run_async()

    asyncio.run(scene())
    assert ("after 24 deliveries" in caplog.text) is is_told


SERVICE = """
import os, signal
from retrysafe import Idempotency
from retrysafe.consumers import Consumer
from retrysafe.stores import MemoryStore
from tests.consumers.scripted import ScriptedBroker, message

def handle(_):
    os.kill(os.getpid(), signal.{name})

broker = ScriptedBroker(message("1"))
with Idempotency(MemoryStore(), caller="unused") as idem:
    print(Consumer(idem, handle, broker).run(), broker.actions, broker.is_open)
print(signal.getsignal(signal.{name}) in (signal.SIG_DFL, signal.default_int_handler))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_stops_a_program_that_runs_a_consumer(name):
    """The running handler ends, its message is acked, and the signal is given back."""
    told = subprocess.run(
        [sys.executable, "-c", SERVICE.format(name=name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.stdout.splitlines() == ["True [('1', 'ack')] False", "True"], told.stderr


def test_a_signal_that_has_a_handler_stays_with_it():
    idem = AsyncIdempotency(MemoryStore(), caller="unused")
    got = []

    async def handle(message):
        signal.raise_signal(signal.SIGTERM)

    consumer = Consumer(idem, handle, ScriptedBroker(message("1")))

    def own(number, _):
        got.append(number)
        consumer.stop()

    before = signal.signal(signal.SIGTERM, own)
    try:
        assert consumer.run()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]

"""AWS Lambda functions whose messages are handled once: SQS batches, SNS, EventBridge.

Owns how an event becomes messages, what goes back to the queue, and that the time that is left to
an invocation bounds leases and waits. What a message's ending means is the consumers' table.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from retrysafe.aws import ENCODING, decoded
from retrysafe.consumers.consumer import checked_policy
from retrysafe.consumers.engine import Policy, ThreadEngine, engine_of, run_sync
from retrysafe.consumers.handler import Handler, consumer_name
from retrysafe.consumers.judge import Judge
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Verdict
from retrysafe.errors import InvalidInput, RetrysafeError

_logger = logging.getLogger("retrysafe.consumers")

# A queue keeps a message for 14 days at most, so does its dead letter queue, and a receive hides it
# for 12 hours. SNS tries for 23 days, EventBridge for one.
LONGEST_REDELIVERY: Final = timedelta(days=28, hours=12)
# What is kept of an invocation's time to store the outcome and to answer.
MARGIN: Final = timedelta(seconds=1)
# With less than that nothing is started: so short a lease would not hold on a busy machine.
LEAST: Final = timedelta(seconds=1)


class EventNotHandled(RetrysafeError):
    """The event is not done: raised so that AWS delivers it again, and dead-letters it at last."""

    retryable = True


class LambdaConsumer:
    """Handles the messages in a function's events, each once.

    With `Idempotency` the handler is a plain function; with `AsyncIdempotency` it is async. Make
    one where the module is loaded. `name` tells two functions on one queue or topic apart.
    """

    def __init__(
        self, idempotency: object, handler: Handler | Callable[..., Any], *, name: str = ""
    ) -> None:
        """Raises `InvalidInput` for a handler of the other kind, `PolicyInvalid` for its window."""
        self._handler = handler if isinstance(handler, Handler) else Handler(handler)
        self._engine = engine_of(idempotency, self._handler.function)
        self._name = name
        self._policy = checked_policy(
            self._handler, self._engine.policy, "the source of the events", LONGEST_REDELIVERY
        )
        # One loop for all invocations: the engine's connections belong to it.
        self._runner: asyncio.Runner | None = None

    def sqs(self, event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        """Handles an SQS batch; returns which of its messages must come again.

        Turn `ReportBatchItemFailures` on in the event source mapping: without it, Lambda deletes
        them. A message of a FIFO queue that fails holds back its own group alone.
        """
        _require_time(context)
        failed: list[dict[str, str]] = []
        held: set[str] = set()
        for record in _records(event, "eventSource", "aws:sqs"):
            message = _sqs_message(record)
            is_held = message.lane is not None and message.lane in held
            if is_held or not self._handles(message, f"sqs:{_last(record)}", context):
                failed.append({"itemIdentifier": record["messageId"]})
                if message.lane is not None:
                    held.add(message.lane)
        return {"batchItemFailures": failed}

    def sqs_record(self, record: Any, lambda_context: Any = None) -> None:
        """Handles one SQS record; raises `EventNotHandled` when it must come again.

        It is the `record_handler` of a batch processor, such as Powertools'.
        """
        found: Mapping[str, Any] = getattr(record, "raw_event", record)
        self._require(_sqs_message(found), f"sqs:{_last(found)}", lambda_context)

    def sns(self, event: Mapping[str, Any], context: Any) -> None:
        """Handles an SNS event; raises `EventNotHandled` when it must come again."""
        for record in _records(event, "EventSource", "aws:sns"):
            note = record["Sns"]
            attributes = note.get("MessageAttributes") or {}
            headers = {name: str(item.get("Value", "")) for name, item in attributes.items()}
            message = Message(
                decoded(note["Message"], headers.get(ENCODING)), headers, note["MessageId"]
            )
            self._require(message, f"sns:{note['TopicArn'].rpartition(':')[2]}", context)

    def eventbridge(self, event: Mapping[str, Any], context: Any) -> None:
        """Handles an EventBridge event; raises `EventNotHandled` when it must come again.

        The message's body is the whole event as JSON.
        """
        if not isinstance(event, Mapping) or not {"id", "source", "detail-type"} <= event.keys():
            raise InvalidInput(f"this is no EventBridge event: {_shown(event)}")
        # A replay from an archive carries the archive's name, and is the same event.
        body = {name: value for name, value in event.items() if name != "replay-name"}
        message = Message(json.dumps(body, sort_keys=True).encode(), {}, event["id"])
        self._require(message, f"eventbridge:{event['source']}", context)

    def _require(self, message: Message, source: str, context: Any) -> None:
        _require_time(context)
        if not self._handles(message, source, context):
            raise EventNotHandled(
                f"message {message.identity} of {source} was not handled; the log says why"
            )

    def _handles(self, message: Message, source: str, context: Any) -> bool:
        """Whether AWS may forget the message."""
        left = _left(context)
        if left is not None and left < LEAST:
            _logger.warning("message %s comes again: no time is left for it", message.identity)
            return False
        verdict = self._verdict(message, source, self._bounded(left))
        if verdict.action in (Action.ACK, Action.DROP):
            return True
        _logger.warning("message %s comes again: %s", message.identity, verdict.reason)
        return False

    def _verdict(self, message: Message, source: str, policy: Policy) -> Verdict:
        own = consumer_name(source, self._name)
        names = [own, *(alias for alias in self._handler.aliases if alias != own)]
        # One for each message: AWS counts the tries, and nothing passes into the next invocation.
        handling = Judge(self._engine, self._handler, names=names, policy=policy).handle(message)
        if isinstance(self._engine, ThreadEngine):
            return run_sync(handling)
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(handling)

    def _bounded(self, left: timedelta | None) -> Policy:
        """The policy of an attempt that is killed when the invocation's time is over."""
        policy = self._policy
        if left is None:
            return policy
        return policy.with_changes(
            lease=min(policy.lease, left),
            run_limit=left if policy.run_limit is None else min(policy.run_limit, left),
            wait_limit=min(policy.wait_limit, left),
            settle_patience=min(policy.settle_patience, left),
        )


def _left(context: Any) -> timedelta | None:
    """What is left of the invocation but for the margin; None where nobody says."""
    tell = getattr(context, "get_remaining_time_in_millis", None)
    return None if tell is None else timedelta(milliseconds=tell()) - MARGIN


def _require_time(context: Any) -> None:
    """Raises `EventNotHandled` in an invocation that begins without the time for one message."""
    left = _left(context)
    if left is not None and left < LEAST:
        raise EventNotHandled(
            f"the invocation has {left + MARGIN} left, and a message needs {LEAST + MARGIN} or "
            "more: raise the function's time-out, to 5 seconds at least"
        )


def _records(event: Any, field: str, source: str) -> list[Mapping[str, Any]]:
    found = event.get("Records") if isinstance(event, Mapping) else None
    if not isinstance(found, list) or any(each.get(field) != source for each in found):
        raise InvalidInput(f"this is no event of {source}: {_shown(event)}")
    return found


def _sqs_message(record: Mapping[str, Any]) -> Message:
    attributes = record.get("messageAttributes") or {}
    headers = {
        name: item["stringValue"] for name, item in attributes.items() if item.get("stringValue")
    }
    system = record.get("attributes") or {}
    is_fifo = _last(record).endswith(".fifo")
    return Message(
        decoded(record["body"], headers.get(ENCODING)),
        headers,
        identity=record["messageId"],
        deliveries=int(system.get("ApproximateReceiveCount", 1)),
        lane=system.get("MessageGroupId") if is_fifo else None,
    )


def _last(record: Mapping[str, Any]) -> str:
    """The name of the queue, which its ARN ends with."""
    return str(record["eventSourceARN"]).rpartition(":")[2]


def _shown(event: object) -> str:
    return repr(event)[:200]

"""Amazon SQS: long polls, batched deletes, visibility that is prolonged; FIFO groups are lanes.

Owns how SQS carries verdicts out. `SqsQueue` uses boto3 in threads, `AsyncSqsQueue` aiobotocore;
both are driven by the same loop.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Final

from retrysafe.aws import ENCODING, client_options, decoded
from retrysafe.consumers.broker import Buffer, count_of, not_buried, readable
from retrysafe.consumers.deadlines import RENEWALS_PER_DEADLINE
from retrysafe.consumers.handler import KEY_HEADER
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Verdict
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra

# What SQS takes in one call.
_BATCH: Final = 10
_ATTRIBUTES: Final = 10
# Nobody may hold a message longer, however often its visibility is prolonged.
LONGEST_VISIBILITY: Final = timedelta(hours=12)
_DEAD_RETENTION_SECONDS: Final = 14 * 24 * 3600
_REASON: Final = "Retrysafe-Reason"
# A poll, a prolonging, a settlement, and one to spare: none of them waits for another.
_THREADS: Final = 4


class SqsQueue:
    """One queue, by boto3 in threads of its own.

    Dead letters go to the queue `dead_letter`, by default to that of the redrive policy, else to
    `QUEUE-dlq`, which is made when the first one comes.
    """

    gives_back = True

    def __init__(
        self,
        queue: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        visibility: timedelta = timedelta(seconds=30),
        wait: timedelta = timedelta(seconds=5),
        dead_letter: str | None = None,
        group: str = "",
    ) -> None:
        """`wait` is how long a poll waits for messages, at most 20 s; a stop waits for it."""
        if not queue:
            raise InvalidInput("which queue? Name it, such as SqsQueue('payments')")
        self._name = queue
        self._region = region
        self._endpoint = endpoint
        self._visibility_seconds = math.ceil(visibility.total_seconds())
        self._wait_seconds = min(20, math.ceil(wait.total_seconds()))
        self._dead_letter = dead_letter
        self._url = ""
        self._dead_url = ""
        self._attributes: dict[str, str] = {}
        self.queue, self.group = f"sqs:{queue}", group
        self.deadline_seconds = float(self._visibility_seconds)
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None

    # The client, which `AsyncSqsQueue` has another one of.

    async def _connect(self) -> None:
        try:
            boto3 = import_module("boto3")
        except ModuleNotFoundError as error:
            raise missing_extra(__name__, "sqs", error) from error
        session = boto3.session.Session(region_name=self._region)
        self._client = session.client(
            "sqs", **self._options(has_credentials=session.get_credentials() is not None)
        )
        self._threads = ThreadPoolExecutor(_THREADS, "retrysafe-sqs")

    def _options(self, *, has_credentials: bool) -> dict[str, Any]:
        return client_options(
            self._endpoint,
            has_credentials=has_credentials,
            connect_seconds=5,
            read_seconds=self._wait_seconds + 10,
            attempts=3,
        )

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        call = partial(getattr(self._client, method), **arguments)
        loop = asyncio.get_running_loop()
        answer: dict[str, Any] = await loop.run_in_executor(self._threads, call)
        return answer

    async def close(self) -> None:
        """Ends the client; what was not settled comes again after its visibility."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
            self._client.close()

    # The queue.

    @property
    def renew_seconds(self) -> float:
        """Two renewals may fail before the deadline."""
        return self.deadline_seconds / RENEWALS_PER_DEADLINE

    def bind(self, buffer: Buffer) -> None:
        """Nothing is taken back from a consumer here: its deadlines pass by themselves."""

    async def open(self) -> None:
        """Looks the queue up; raises `InvalidInput` when it is not there."""
        await self._connect()
        try:
            self._url = (await self._call("get_queue_url", QueueName=self._name))["QueueUrl"]
        except Exception as error:
            await self.close()
            if _is_missing(error):
                raise InvalidInput(f"there is no SQS queue {self._name} here") from error
            raise
        self._attributes = await self._attributes_of(self._url)

    async def _attributes_of(self, url: str) -> dict[str, str]:
        found = await self._call("get_queue_attributes", QueueUrl=url, AttributeNames=["All"])
        attributes: dict[str, str] = found.get("Attributes", {})
        return attributes

    @property
    def _is_fifo(self) -> bool:
        return self._name.endswith(".fifo")

    @property
    def delivery_limit(self) -> int | None:
        """How often SQS delivers a message before it is a dead letter of its redrive policy."""
        policy = self._attributes.get("RedrivePolicy")
        return None if policy is None else int(json.loads(policy)["maxReceiveCount"])

    async def redelivery_window(self) -> timedelta | None:
        """Retention of the queue and of its dead letters, and the longest visibility."""
        seconds = int(self._attributes.get("MessageRetentionPeriod", 14 * 24 * 3600))
        dead: dict[str, str] = {}
        if self._dead_letter or "RedrivePolicy" in self._attributes:
            dead = await self._attributes_of(await self._dead_letter_url())
        # The default one, which need not be there yet, keeps them as long as SQS can.
        seconds += int(dead.get("MessageRetentionPeriod", _DEAD_RETENTION_SECONDS))
        return timedelta(seconds=seconds) + LONGEST_VISIBILITY

    async def receive(self, limit: int) -> list[Message]:
        """One long poll."""
        answer = await self._call(
            "receive_message",
            QueueUrl=self._url,
            MaxNumberOfMessages=min(limit, _BATCH),
            WaitTimeSeconds=self._wait_seconds,
            VisibilityTimeout=self._visibility_seconds,
            AttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        return readable(answer.get("Messages", []), self._message)

    def _message(self, found: dict[str, Any]) -> Message:
        system = found.get("Attributes", {})
        headers = {
            name: value["StringValue"]
            for name, value in found.get("MessageAttributes", {}).items()
            if "StringValue" in value
        }
        return Message(
            decoded(found["Body"], headers.get(ENCODING)),
            headers,
            identity=found["MessageId"],
            deliveries=max(1, count_of(system.get("ApproximateReceiveCount", "1"))),
            lane=system.get("MessageGroupId") if self._is_fifo else None,
            receipt=found,
        )

    async def extend(self, messages: Sequence[Message]) -> Collection[Message]:
        """Prolongs visibility; a message whose receipt no longer counts is lost."""
        seconds = [(message, self._visibility_seconds) for message in messages]
        failed = await self._change_visibility(seconds)
        if any(not is_lost for is_lost in failed.values()):
            raise ConnectionError("SQS did not prolong the visibility of every message")
        return list(failed)

    async def settle(self, settled: Sequence[tuple[Message, Verdict]]) -> Collection[Message]:
        """Deletes what is final, in batches, and lets the rest come back after its delay."""
        unsettled: list[Message] = []
        done: list[Message] = []
        back: list[tuple[Message, int]] = []
        for message, verdict in settled:
            if verdict.action is Action.DEAD_LETTER:
                try:
                    await self._bury(message, verdict.reason)
                except Exception as error:
                    not_buried(message, error)
                    unsettled.append(message)
                    continue
            if verdict.is_final:
                done.append(message)
            else:
                delay = min(verdict.delay, LONGEST_VISIBILITY - timedelta(minutes=1))
                back.append((message, math.ceil(delay.total_seconds())))
        unsettled += await self._delete(done)
        unsettled += await self._change_visibility(back)
        return unsettled

    async def _delete(self, messages: Sequence[Message]) -> list[Message]:
        failed: list[Message] = []
        for batch in _batches(messages):
            entries = [
                {"Id": str(place), "ReceiptHandle": message.receipt["ReceiptHandle"]}
                for place, message in enumerate(batch)
            ]
            answer = await self._call("delete_message_batch", QueueUrl=self._url, Entries=entries)
            failed += [batch[int(each["Id"])] for each in answer.get("Failed", [])]
        return failed

    async def _change_visibility(
        self, messages: Sequence[tuple[Message, int]]
    ) -> dict[Message, bool]:
        """Sets visibilities; returns what failed, and whether the message is lost."""
        failed: dict[Message, bool] = {}
        for batch in _batches(messages):
            entries = [
                {
                    "Id": str(place),
                    "ReceiptHandle": message.receipt["ReceiptHandle"],
                    "VisibilityTimeout": seconds,
                }
                for place, (message, seconds) in enumerate(batch)
            ]
            answer = await self._call(
                "change_message_visibility_batch", QueueUrl=self._url, Entries=entries
            )
            for each in answer.get("Failed", []):
                failed[batch[int(each["Id"])][0]] = bool(each.get("SenderFault"))
        return failed

    # Dead letters.

    async def _dead_letter_url(self) -> str:
        if self._dead_url:
            return self._dead_url
        policy = self._attributes.get("RedrivePolicy")
        options: dict[str, Any] = {"QueueName": self._dead_letter or self._default_dead_letter()}
        if not self._dead_letter and policy is not None:
            *_, account, name = json.loads(policy)["deadLetterTargetArn"].split(":")
            options = {"QueueName": name, "QueueOwnerAWSAccountId": account}
        try:
            found = await self._call("get_queue_url", **options)
        except Exception as error:
            if not _is_missing(error) or self._dead_letter or policy is not None:
                raise
            found = await self._make_dead_letter()
        self._dead_url = found["QueueUrl"]
        return self._dead_url

    async def _make_dead_letter(self) -> dict[str, Any]:
        attributes = {"MessageRetentionPeriod": str(_DEAD_RETENTION_SECONDS)}
        if self._is_fifo:
            attributes["FifoQueue"] = "true"
        name = self._default_dead_letter()
        return await self._call("create_queue", QueueName=name, Attributes=attributes)

    def _default_dead_letter(self) -> str:
        if self._is_fifo:
            return f"{self._name.removesuffix('.fifo')}-dlq.fifo"
        return f"{self._name}-dlq"

    async def _bury(self, message: Message, reason: str) -> None:
        """Sends a copy with the reason where dead letters go; only then is the message deleted."""
        given = list(message.receipt.get("MessageAttributes", {}).items())
        # The key first: whatever does not fit, a message that is sent back must be known again.
        given.sort(key=lambda each: each[0].lower() != KEY_HEADER.lower())
        attributes = dict([each for each in given if each[0] != _REASON][: _ATTRIBUTES - 1])
        attributes[_REASON] = {"DataType": "String", "StringValue": _printable(reason)}
        options: dict[str, Any] = {}
        if self._is_fifo:
            options["MessageGroupId"] = message.lane
            options["MessageDeduplicationId"] = message.identity
        await self._call(
            "send_message",
            QueueUrl=await self._dead_letter_url(),
            MessageBody=message.receipt["Body"],
            MessageAttributes=attributes,
            **options,
        )


class AsyncSqsQueue(SqsQueue):
    """The same by aiobotocore, which needs no threads."""

    _stack: AsyncExitStack | None = None

    async def _connect(self) -> None:
        try:
            sessions = import_module("aiobotocore.session")
        except ModuleNotFoundError as error:
            raise missing_extra(__name__, "aiosqs", error) from error
        session = sessions.get_session()
        has_credentials = await session.get_credentials() is not None
        self._stack = AsyncExitStack()
        options = {"region_name": self._region, **self._options(has_credentials=has_credentials)}
        self._client = await self._stack.enter_async_context(
            session.create_client("sqs", **options)
        )

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await getattr(self._client, method)(**arguments)
        return answer

    async def close(self) -> None:
        """Ends the client."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()


def _batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + _BATCH] for start in range(0, len(items), _BATCH)]


def _is_missing(error: Exception) -> bool:
    """Whether SQS has no such queue."""
    response: dict[str, Any] = getattr(error, "response", {})
    code = f"{type(error).__name__} {response.get('Error', {}).get('Code', '')}"
    return "NonExistentQueue" in code or "QueueDoesNotExist" in code


def _printable(text: str) -> str:
    """The text as an attribute may have it."""
    return "".join(each if each.isprintable() else " " for each in text) or "unknown"

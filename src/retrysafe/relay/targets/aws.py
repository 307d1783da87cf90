"""Amazon SQS and SNS as targets: one message per entry, which the service keeps once it answers.

`Sqs` and `Sns` use boto3 in the threads of a `Relay`, `AsyncSqs` and `AsyncSns` aiobotocore in an
`AsyncRelay`; what is sent, and what an error means, is the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from contextlib import AsyncExitStack
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar, Final

from retrysafe import forks
from retrysafe.aws import ENCODING, client_options, encoded, error_code
from retrysafe.core.ports import Waits
from retrysafe.errors import DeliveryFailed, InvalidInput
from retrysafe.extras import missing_extra
from retrysafe.relay.ports import Delivery
from retrysafe.relay.targets.of_loop import OfLoop

# With all attributes: their names, their types and their values.
SQS_LIMIT_BYTES: Final = 1_048_576
SNS_LIMIT_BYTES: Final = 262_144
# Refusals of the message itself, which is the same at every try. A queue that is missing, a right
# that is missing and a service that is away can be mended without touching the entry.
_FINAL: Final = frozenset(
    {
        *("InvalidMessageContents", "InvalidParameterValue", "InvalidParameter"),
        *("InvalidAttributeValue", "ParameterValueInvalid", "ValidationException"),
    }
)
_MISSING: Final = frozenset({"QueueDoesNotExist", "NonExistentQueue", "NotFound"})
# What the services take as the name of a group of FIFO messages.
_GROUP: Final = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")
_QUEUE: Final = re.compile(r"[A-Za-z0-9_-]{1,75}(?:\.fifo|[A-Za-z0-9_-]{0,5})")
_ARN: Final = re.compile(r"arn:[a-z-]+:sns:([a-z0-9-]+):\d{12}:[A-Za-z0-9_-]{1,256}(?:\.fifo)?")


class _Service:
    """What SQS and SNS share, by boto3; the classes for event loops replace the client alone."""

    waits = Waits.BLOCKING
    _SERVICE: ClassVar[str]
    _LIMIT_BYTES: ClassVar[int]

    def __init__(
        self,
        name: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        client: Any = None,
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        self._name = name
        self._is_fifo = name.endswith(".fifo")
        self._region = region
        self._endpoint = endpoint
        self._timeout_seconds = timeout.total_seconds()
        self._owns_client = client is None
        self._client = client
        self._making = threading.Lock()
        # The client of an event loop, and what closes it.
        self._opened: OfLoop[tuple[Any, AsyncExitStack]] = OfLoop()
        forks.register(self)
        if client is None:
            # Here already: a library that is missing is no reason to try entries again.
            self._library()

    # The client.

    def _library(self) -> Any:
        try:
            return import_module("boto3.session")
        except ModuleNotFoundError as error:
            raise missing_extra(__name__, "sqs", error) from error

    def _options(self, *, has_credentials: bool) -> dict[str, Any]:
        # One try: when to try again is the relay's to say.
        half = self._timeout_seconds / 2
        return client_options(
            self._endpoint,
            has_credentials=has_credentials,
            connect_seconds=half,
            read_seconds=half,
            attempts=1,
        )

    def after_fork_in_child(self) -> None:
        """Makes a client of its own: on a connection of both, each would read the other's answers.

        One that you gave stays.
        """
        self._making = threading.Lock()
        if self._owns_client and self._client is not None:
            forks.park(self._client)
            self._client = None

    async def _open(self) -> Any:
        forks.refresh_if_stale()
        with self._making:
            if self._client is None:
                session = self._library().Session(region_name=self._region)
                has_credentials = session.get_credentials() is not None
                self._client = session.client(
                    self._SERVICE, **self._options(has_credentials=has_credentials)
                )
            return self._client

    async def _call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        client = await self._open()
        answer: dict[str, Any] = getattr(client, method)(**arguments)
        return answer

    async def close(self) -> None:
        """Closes the client, unless it is yours; the next delivery makes a new one."""
        client = self._client
        if self._owns_client and client is not None:
            self._client = None
            client.close()

    # Deliveries.

    async def deliver(self, delivery: Delivery) -> None:
        """Sends one entry; raises `DeliveryFailed`, and what botocore raises."""
        text, encoding = encoded(delivery.body)
        attributes = _attributes(delivery, encoding)
        size = len(text.encode()) + sum(
            len(part.encode())
            for name, value in attributes.items()
            for part in (name, value["DataType"], value["StringValue"])
        )
        if size > self._LIMIT_BYTES:
            raise DeliveryFailed(
                f"the message has {size:,} bytes with its attributes, and {self._SERVICE.upper()} "
                f"takes {self._LIMIT_BYTES:,}: store it elsewhere and send where it is",
                key=delivery.key,
                is_final=True,
            )
        options: dict[str, Any] = {"MessageAttributes": attributes}
        if self._is_fifo:
            # Entries without an aggregate have no order: each is a group of its own.
            options["MessageGroupId"] = _group(delivery.aggregate or delivery.key)
            options["MessageDeduplicationId"] = hashlib.sha256(delivery.key.encode()).hexdigest()
        try:
            await self._send(text, options)
        except Exception as error:
            raise self._judged(error, delivery.key) from error

    async def _send(self, text: str, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def _judged(self, error: Exception, key: str) -> Exception:
        """What to raise for an error: whether another try can help."""
        code = error_code(error)
        if code in _MISSING:
            return DeliveryFailed(f"there is no {self._SERVICE.upper()} {self._name}", key=key)
        # An address that is refused is the same for all entries: it is a setting to mend.
        if code in _FINAL and not any(name in str(error) for name in ("TopicArn", "QueueUrl")):
            return DeliveryFailed(
                f"{self._SERVICE.upper()} refused the message: {error}", key=key, is_final=True
            )
        return error


class Sqs(_Service):
    """Sends entries to a queue, for `Relay`.

    The key is the attribute `Idempotency-Key`. To a FIFO queue it is the deduplication id as well,
    and the aggregate is the group.
    """

    _SERVICE = "sqs"
    _LIMIT_BYTES = SQS_LIMIT_BYTES

    def __init__(
        self,
        queue: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        client: Any = None,
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        """`timeout` limits each call. A client of your own stays yours, with its own time-outs.

        Raises `InvalidInput` for a name that no queue can have.
        """
        if not _QUEUE.fullmatch(queue):
            raise InvalidInput(
                f"a queue's name has up to 80 letters, digits, - and _, got {queue!r}"
            )
        super().__init__(queue, region=region, endpoint=endpoint, client=client, timeout=timeout)
        self._url = ""

    async def _send(self, text: str, options: dict[str, Any]) -> None:
        # Read once: another delivery that fails forgets it.
        url = self._url
        if not url:
            found = await self._call("get_queue_url", {"QueueName": self._name})
            url = self._url = found["QueueUrl"]
        try:
            await self._call("send_message", {"QueueUrl": url, "MessageBody": text, **options})
        except Exception:
            # The queue may be another one by the next try.
            self._url = ""
            raise


class Sns(_Service):
    """Publishes entries to a topic of SNS, for `Relay`; FIFO as with `Sqs`."""

    _SERVICE = "sns"
    _LIMIT_BYTES = SNS_LIMIT_BYTES

    def __init__(
        self,
        arn: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        client: Any = None,
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        """`arn` names the topic, and its region unless you give another.

        Takes the rest as `Sqs` does. Raises `InvalidInput` for what is no ARN.
        """
        match = _ARN.fullmatch(arn)
        if match is None:
            raise InvalidInput(
                "a topic of SNS is named by its ARN, such as "
                f"arn:aws:sns:eu-central-1:123456789012:orders, got {arn!r}"
            )
        region = region or match.group(1)
        super().__init__(arn, region=region, endpoint=endpoint, client=client, timeout=timeout)

    async def _send(self, text: str, options: dict[str, Any]) -> None:
        await self._call("publish", {"TopicArn": self._name, "Message": text, **options})


class _OnLoop(_Service):
    """The client of an event loop."""

    waits = Waits.SUSPENDING

    def _library(self) -> Any:
        try:
            return import_module("aiobotocore.session")
        except ModuleNotFoundError as error:
            raise missing_extra(__name__, "aiosqs", error) from error

    async def _open(self) -> Any:
        if not self._owns_client:
            return self._client
        async with self._opened.opening():
            if self._opened.held is None:
                session = self._library().get_session()
                has_credentials = await session.get_credentials() is not None
                stack = AsyncExitStack()
                client = await stack.enter_async_context(
                    session.create_client(
                        self._SERVICE,
                        region_name=self._region,
                        **self._options(has_credentials=has_credentials),
                    )
                )
                self._opened.held = (client, stack)
            return self._opened.held[0]

    async def _call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(self._timeout_seconds):
            client = await self._open()
            answer: dict[str, Any] = await getattr(client, method)(**arguments)
            return answer

    async def close(self) -> None:
        """Closes the client, unless it is yours; the next delivery makes a new one."""
        opened = self._opened.taken()
        if opened is not None:
            await opened[1].aclose()


class AsyncSqs(_OnLoop, Sqs):
    """Sends entries to a queue, for `AsyncRelay`; takes what `Sqs` takes."""


class AsyncSns(_OnLoop, Sns):
    """Publishes entries to a topic of SNS, for `AsyncRelay`; takes what `Sns` takes."""


def _attributes(delivery: Delivery, encoding: str | None) -> dict[str, dict[str, str]]:
    values = {
        "Idempotency-Key": delivery.key,
        "Content-Type": delivery.content_type,
        "Retrysafe-Topic": delivery.topic,
        "Retrysafe-Attempt": str(delivery.attempt),
    }
    if delivery.aggregate is not None and delivery.aggregate.isprintable():
        values["Retrysafe-Aggregate"] = delivery.aggregate
    if encoding is not None:
        values[ENCODING] = encoding
    return {name: {"DataType": "String", "StringValue": value} for name, value in values.items()}


def _group(name: str) -> str:
    """The name as a group may have it: itself, or a digest of what does not fit."""
    if _GROUP.fullmatch(name):
        return name
    return hashlib.sha256(name.encode()).hexdigest()

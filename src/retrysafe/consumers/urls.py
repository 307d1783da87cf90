"""URLs of queues: what `--from` means. Owns their spelling; it must not open anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from retrysafe.consumers.broker import Broker
from retrysafe.errors import InvalidInput

SHAPES: Final = (
    "sqs:///QUEUE?endpoint=http://127.0.0.1:4566&region=eu-central-1",
    "nats://127.0.0.1:4222/STREAM?durable=NAME",
    "amqp://user:password@127.0.0.1:5672/?queue=QUEUE",
    "kafka://127.0.0.1:9092/TOPIC?group=GROUP",
)


# The libraries that speak to RabbitMQ: their modules here, and their classes.
_AMQP_CLIENTS: Final = {"aio-pika": ("amqp", "RabbitQueue"), "pika": ("pika", "PikaQueue")}


class QueueUrlInvalid(InvalidInput):
    """The URL names no queue that retrysafe can consume from."""


@dataclass(frozen=True, slots=True)
class _Url:
    """A queue's URL in its parts."""

    scheme: str
    # Host and port with the credentials, as the broker's library takes them.
    authority: str
    path: str
    options: dict[str, str]
    is_async: bool

    def taken(self, *names: str) -> dict[str, str]:
        """The options that this broker knows; raises `QueueUrlInvalid` for others."""
        unknown = sorted(set(self.options) - set(names))
        if unknown:
            raise QueueUrlInvalid(
                f"{self.scheme}://… has no option {', '.join(unknown)}; it has {', '.join(names)}"
            )
        return {name: self.options[name] for name in names if name in self.options}

    def needed(self, name: str) -> str:
        """An option that must be there."""
        found = self.options.get(name)
        if not found:
            raise QueueUrlInvalid(f"{self.scheme}://… needs {name}=…")
        return found


def broker_of(url: str, *, is_async: bool = False) -> Broker:
    """The queue that a URL means; raises `QueueUrlInvalid`.

    `is_async` prefers a client for event loops where a broker has two.
    """
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise QueueUrlInvalid(f"the URL of the queue cannot be read: {error}") from None
    make = _MAKERS.get(parts.scheme)
    if make is None:
        raise QueueUrlInvalid(f"{parts.scheme or url!r} names no queue: use " + " or ".join(SHAPES))
    options = dict(pairs)
    if len(options) != len(pairs):
        raise QueueUrlInvalid("an option of the queue's URL is given twice")
    return make(_Url(parts.scheme, parts.netloc, unquote(parts.path[1:]), options, is_async))


def _seconds(options: dict[str, Any], name: str) -> None:
    if name in options:
        try:
            options[name] = timedelta(seconds=float(options[name]))
        except (ValueError, OverflowError):
            raise QueueUrlInvalid(f"{name} is a number of seconds, got {options[name]!r}") from None


def _sqs(url: _Url) -> Broker:
    options: dict[str, Any] = url.taken(
        "endpoint", "region", "visibility", "wait", "dead_letter", "group"
    )
    if url.authority or not url.path:
        raise QueueUrlInvalid(f"a queue of SQS is written {SHAPES[0]}")
    _seconds(options, "visibility")
    _seconds(options, "wait")
    module = import_module("retrysafe.consumers.sqs")
    name = "AsyncSqsQueue" if url.is_async and find_spec("aiobotocore") else "SqsQueue"
    made: Broker = getattr(module, name)(url.path, **options)
    return made


def _nats(url: _Url) -> Broker:
    options: dict[str, Any] = url.taken("durable", "ack_wait", "dead_letter")
    durable = url.needed("durable")
    del options["durable"]
    if not url.path or "/" in url.path:
        raise QueueUrlInvalid(f"a stream of NATS is written {SHAPES[1]}")
    _seconds(options, "ack_wait")
    module = import_module("retrysafe.consumers.nats")
    made: Broker = module.JetStream(f"{url.scheme}://{url.authority}", url.path, durable, **options)
    return made


def _amqp(url: _Url) -> Broker:
    options: dict[str, Any] = url.taken("queue", "dead_letter", "group", "client")
    queue = url.needed("queue")
    del options["queue"]
    usual = "pika" if find_spec("aio_pika") is None and find_spec("pika") else "aio-pika"
    client = options.pop("client", usual)
    if client not in _AMQP_CLIENTS:
        raise QueueUrlInvalid(f"client is {' or '.join(_AMQP_CLIENTS)}, got {client!r}")
    module_name, kind = _AMQP_CLIENTS[client]
    module = import_module(f"retrysafe.consumers.{module_name}")
    # The path is the virtual host, spelled as it was given: "/" alone is the usual one.
    server = f"{url.scheme}://{url.authority}/{quote(url.path, safe='')}"
    made: Broker = getattr(module, kind)(server, queue, **options)
    return made


def _kafka(url: _Url) -> Broker:
    options: dict[str, Any] = url.taken("group", "dead_letter", "session_timeout")
    group = url.needed("group")
    del options["group"]
    if not url.authority or not url.path or "/" in url.path:
        raise QueueUrlInvalid(f"a topic of Kafka is written {SHAPES[3]}")
    _seconds(options, "session_timeout")
    if "session_timeout" in options:
        wait: timedelta = options.pop("session_timeout")
        options["session_timeout_ms"] = wait // timedelta(milliseconds=1)
    module = import_module("retrysafe.consumers.kafka")
    made: Broker = module.KafkaTopic(url.authority, url.path, group, **options)
    return made


_MAKERS: Final[dict[str, Callable[[_Url], Broker]]] = {
    "sqs": _sqs,
    "nats": _nats,
    "tls": _nats,
    "amqp": _amqp,
    "amqps": _amqp,
    "kafka": _kafka,
}

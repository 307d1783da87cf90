"""URLs of targets: what `--target` means. Owns their spelling; it must not connect to anything."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from retrysafe.cli.modules import imported
from retrysafe.cli.problems import usage
from retrysafe.relay import Target

# Not an option: what is on a command line can be seen by everybody on the machine.
SECRET_VARIABLE: Final = "RETRYSAFE_WEBHOOK_SECRET"
_HTTP: Final = ("https", "http")
_AMQP: Final = ("amqp", "amqps")
_NATS: Final = ("nats", "tls")
_KAFKA: Final = ("kafka",)
_AWS: Final = {"sqs": "AsyncSqs", "sns": "AsyncSns"}
_SCHEMES: Final = (*_HTTP, *_AMQP, *_NATS, *_KAFKA, *_AWS, "python")
# Commands run an event loop: of the two clients for AWS, they use that one.
_EXTRAS: Final = {
    "webhooks": "webhooks",
    "rabbitmq": "rabbitmq",
    "nats": "nats",
    "kafka": "kafka",
    "aws": "aiosqs",
}
_SHAPES: Final = {
    "kafka": "kafka://HOST:PORT, or kafka://HOST:PORT/TOPIC for all entries",
    "sqs": "sqs:///QUEUE?region=eu-central-1",
    "sns": "sns:///arn:aws:sns:eu-central-1:123456789012:TOPIC",
}


def check_target(url: str, *, exchange: str = "", prefix: str = "") -> None:
    """Raises a usage problem for a URL that names no target, and for options of another one."""
    scheme, mark, _ = url.partition(":")
    if not mark or scheme not in _SCHEMES:
        raise usage(
            f"{scheme!r} names no target: use https://…, amqp://…, nats://…, kafka://…, sqs:///…, "
            "sns:///… or python:module:function"
        )
    for option, value, schemes in (
        ("--exchange", exchange, _AMQP),
        ("--prefix", prefix, (*_NATS, *_KAFKA)),
    ):
        if value and scheme not in schemes:
            raise usage(f"{option} is for {schemes[0]}://… targets, and {scheme}: has none")


def chosen_target(url: str, *, exchange: str = "", prefix: str = "") -> Target:
    """The target that a URL means; raises a usage problem."""
    check_target(url, exchange=exchange, prefix=prefix)
    scheme, _, rest = url.partition(":")
    made: Target
    if scheme in _HTTP:
        # One on each line: while receivers change over, all of them sign.
        secrets = os.environ.get(SECRET_VARIABLE, "").splitlines()
        secrets = [secret for secret in secrets if secret]
        if not secrets:
            raise usage(
                f"webhooks are signed: set {SECRET_VARIABLE}, for example to the output of: "
                "openssl rand -hex 32"
            )
        made = _module("webhooks").AsyncWebhook(url, secrets)
    elif scheme in _AMQP:
        made = _module("rabbitmq").RabbitMQ(url, exchange=exchange)
    elif scheme in _NATS:
        made = _module("nats").NatsJetStream(url, prefix=prefix)
    elif scheme in _KAFKA:
        made = _kafka(url, prefix)
    elif scheme in _AWS:
        made = _aws(scheme, url)
    else:
        made = _function(rest)
    return made


def _parts(url: str, *known: str) -> tuple[str, str, dict[str, str]]:
    """Host, path and options of a URL; raises a usage problem."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise usage(f"the URL of the target cannot be read: {error}") from None
    options = dict(pairs)
    if len(options) != len(pairs) or not set(options) <= set(known):
        allowed = f"the options {', '.join(known)}, each once" if known else "no options"
        raise usage(f"{parts.scheme}: targets have {allowed}, got ?{parts.query}")
    return parts.netloc, unquote(parts.path[1:]), options


def _kafka(url: str, prefix: str) -> Target:
    servers, topic, _ = _parts(url)
    if not servers or (topic and prefix):
        raise usage(f"a target of Kafka is written {_SHAPES['kafka']}; --prefix is for the former")
    made: Target = _module("kafka").AsyncKafka(servers, topic=topic or None, prefix=prefix)
    return made


def _aws(scheme: str, url: str) -> Target:
    host, name, options = _parts(url, "endpoint", "region")
    if host or not name:
        raise usage(f"a target of {scheme.upper()} is written {_SHAPES[scheme]}")
    try:
        made: Target = getattr(_module("aws"), _AWS[scheme])(name, **options)
    except ModuleNotFoundError as error:
        raise _missing("aws", error) from error
    return made


def _module(name: str) -> Any:
    try:
        return import_module(f"retrysafe.relay.targets.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("retrysafe"):
            raise
        raise _missing(name, error) from error


def _missing(name: str, error: ModuleNotFoundError) -> Exception:
    return usage(
        f"this target needs {error.name}: install retrysafe with its extra {_EXTRAS[name]}"
    )


def _function(path: str) -> Any:
    """A function by its path; raises a usage problem."""
    module_name, mark, name = path.partition(":")
    if not (mark and module_name and name):
        raise usage(f"a function is named python:module:function, got python:{path}")
    function = getattr(imported(module_name), name, None)
    if not callable(function):
        raise usage(f"{module_name} has no function {name}")
    return function

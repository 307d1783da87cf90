"""A handler: the user's function with all that says how its messages are handled once.

Owns these settings and their checks. It must not know brokers or the engine's ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote, unquote

from retrysafe.consumers.engine import FingerprintRule, Policy
from retrysafe.consumers.message import Message, PayloadInvalid
from retrysafe.consumers.verdict import Action, BackOff
from retrysafe.core.keys.canonical import Part
from retrysafe.core.keys.key import KEY_LIMIT_CHARACTERS, looks_derived, natural_key
from retrysafe.errors import InvalidInput, KeyInvalid

# What keys begin with that are made from what the broker calls a message.
_MADE_HERE: Final = "message:"
KEY_HEADER: Final = "Idempotency-Key"

# The names of fields in a JSON payload, or a function of the message.
KeyFields = tuple[str, ...]
MessageKey = KeyFields | Callable[[Message], str | tuple[Part, ...] | None]


def consumer_name(queue: str, group: str = "") -> str:
    """The caller of a consumer's keys: its queue and its group, told apart whatever is in them."""
    parts = (queue, group) if group else (queue,)
    return "/".join(quote(part, safe=":.-_~@") for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A function and how its messages are handled; raises `InvalidInput` for what makes no sense.

    The function is called with the `Message`, and with a `transaction` also with the attempt, whose
    `connection` is the open transaction.
    """

    function: Callable[..., Any] = field(kw_only=False)
    # Where the key comes from when a message brings no Idempotency-Key. None: what the broker calls
    # the message. Field names, or a function: a natural key, which also recognises a message that
    # was published twice.
    key: MessageKey | None = None
    # Which parts of the payload count when two messages have one key.
    fingerprint: FingerprintRule | None = None
    # None: the policy of the Idempotency object, with a window that covers the broker's.
    policy: Policy | None = None
    # Opens a transaction of yours: business writes and outcome commit together, the ack follows.
    transaction: Callable[[], Any] | None = None
    # What a message does whose key runs elsewhere: it is left for later, or dropped.
    in_flight: Action = Action.LEAVE
    # How many attempts may fail before the message is dead-lettered. Outages do not count.
    tries: int = 25
    # Errors of yours that are outages, beside those of the network and of databases.
    outages: tuple[type[Exception], ...] = ()
    back_off: BackOff = field(default_factory=BackOff)
    # Former names, as `consumer_name` makes them, the newest first: what they have handled is done.
    aliases: Sequence[str] = ()
    # How long after its first delivery a message may come again, where the broker cannot tell:
    # dead letters that people send back by hand, a topic that is read again. A longer window of
    # the broker's stays.
    redelivery: timedelta | None = None
    # What `retrysafe consume` opens before the first message; called with the URL of the store.
    lifespan: Callable[[str], AbstractAsyncContextManager[Any]] | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidInput(f"a handler is a function of a message, got {self.function!r}")
        if self.in_flight not in (Action.LEAVE, Action.DROP):
            raise InvalidInput(
                f"in_flight is Action.LEAVE or Action.DROP, got {self.in_flight!r}: a message "
                "whose key runs elsewhere can wait, or be dropped"
            )
        if not isinstance(self.tries, int) or self.tries < 1:
            raise InvalidInput(f"tries is a whole number from 1 up, got {self.tries!r}")
        if not isinstance(self.outages, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, Exception) for kind in self.outages
        ):
            raise InvalidInput(f"outages takes a tuple of exception classes, got {self.outages!r}")
        if isinstance(self.key, str):
            raise InvalidInput(f"key takes a tuple of field names, write key=({self.key!r},)")
        if isinstance(self.aliases, str):
            raise InvalidInput(f"aliases takes a list of names, write [{self.aliases!r}]")
        for alias in self.aliases:
            _check_alias(alias)

    def key_text(self, message: Message) -> str:
        """The key of a message; raises `KeyInvalid`, `PayloadInvalid`, `FingerprintImpossible`."""
        if message.unreadable is not None:
            raise PayloadInvalid(f"its properties cannot be read: {message.unreadable}")
        sent = message.header(KEY_HEADER)
        if sent is not None:
            return _own_key(unquoted(sent))
        made = self._made(message)
        if isinstance(made, tuple):
            return natural_key("message", *made)
        if made is None and message.identity:
            made = f"{_MADE_HERE}{message.identity}"
            # A publisher may choose ids as long as a key may be.
            if len(made) > KEY_LIMIT_CHARACTERS:
                made = natural_key("message", "identity", message.identity)
        if not made:
            raise KeyInvalid(
                "the message has no identity: publish it with a message id or the header "
                f"{KEY_HEADER}, or pass key=(…) with the fields of its payload"
            )
        return made

    def _made(self, message: Message) -> str | tuple[Part, ...] | None:
        if self.key is None:
            return None
        if callable(self.key):
            return self.key(message)
        payload = message.json()
        if not isinstance(payload, dict):
            raise PayloadInvalid("key=(…) names fields, and the message is no JSON object")
        missing = [name for name in self.key if name not in payload]
        if missing:
            raise PayloadInvalid(f"the message has no field {', '.join(missing)} for its key")
        empty = [name for name in self.key if payload[name] is None]
        if empty:
            # All messages without a value would have one key, and only the first would run.
            raise PayloadInvalid(f"the message has null in {', '.join(empty)}, which is its key")
        return tuple(part for name in self.key for part in (name, payload[name]))


def _check_alias(alias: str) -> None:
    """Raises `InvalidInput` for a text that no consumer's keys are stored under."""
    parts = alias.split("/")
    if len(parts) > 2 or not all(parts) or consumer_name(*map(unquote, parts)) != alias:
        raise InvalidInput(
            f"no consumer is stored as {alias!r}: write consumer_name('sqs:payments') or "
            "consumer_name('nats:PAYMENTS', 'billing'), or copy the caller that "
            "`retrysafe keys list` shows"
        )


def _own_key(text: str) -> str:
    """The text itself; raises `KeyInvalid` for one that only a consumer makes.

    Whoever may publish could else take the key of another message in advance.
    """
    if text.startswith(_MADE_HERE) or looks_derived(text):
        raise KeyInvalid(
            f"the header {KEY_HEADER} has a key that is made from a message or its fields: "
            "publish it with a key of your own, such as 'payout-42'"
        )
    return text


def unquoted(value: str) -> str:
    """The key in a header: as HTTP clients write it, in quotes, or bare."""
    if len(value) >= 2 and value[0] == value[-1] == '"':
        inner = value[1:-1]
        return inner.replace('\\"', '"').replace("\\\\", "\\")
    return value

"""FastStream subscribers whose messages are handled once, however often they are delivered.

Owns what becomes of a delivery: when it is settled, how it waits, what is published for a replay.
What differs between brokers is in `faststream_brokers`, what an ending means in the consumers'
table.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, NoReturn, TypedDict, Unpack
from weakref import WeakSet

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.consumers.consumer import checked_policy
from retrysafe.consumers.engine import FingerprintRule, Policy, engine_of
from retrysafe.consumers.handler import KEY_HEADER, Handler, MessageKey, consumer_name
from retrysafe.consumers.judge import Judge
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, BackOff, Verdict
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra

try:
    from faststream import BaseMiddleware
    from faststream.exceptions import (
        AckMessage,
        NackMessage,
        RejectMessage,
        StopConsume,
    )
    from faststream.message import encode_message
    from faststream.message.source_type import SourceType
    from faststream.response import Response
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "faststream", error) from None

from retrysafe.contrib.faststream_brokers import Broker, broker_of, refusal_of

_logger = logging.getLogger("retrysafe.consumers")

# Publishes a message that nobody can handle, with the reason.
DeadLetter = Callable[[Any, str], Awaitable[object]]

# What handlers with a transaction find their attempt under: `attempt: … = Context()`.
ATTEMPT: Final = "attempt"
# After what would else come again at once, such as a result that could not be published.
_PAUSE: Final = timedelta(seconds=1)
# How soon a message that waits sees that its subscriber stops.
_LOOK_SECONDS: Final = 0.1
# What marks a stored `Response`, whose options are stored with its body.
_RESPONSE: Final = "faststream.response"
# A handler that raised `AckMessage` is done, and publishes nothing.
_SILENT: Final = object()


class HandlerOptions(TypedDict, total=False):
    """How messages are handled: the options of `retrysafe.consumers.Handler`."""

    key: MessageKey | None
    fingerprint: FingerprintRule | None
    policy: Policy | None
    transaction: Callable[[], Any] | None
    in_flight: Action
    tries: int
    outages: tuple[type[Exception], ...]
    back_off: BackOff
    aliases: Sequence[str]
    redelivery: timedelta | None


class OnceMiddleware:
    """A middleware of a broker or a router: each message runs its handler once.

    `dead_letter` publishes a message that nobody can handle; Kafka and Redis need it. Without it,
    RabbitMQ and JetStream reject the message.
    """

    def __init__(
        self,
        idempotency: AsyncIdempotency,
        *,
        dead_letter: DeadLetter | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        """Raises `InvalidInput` and `PolicyInvalid` for options that make no sense."""
        self._handler = Handler(_run, **options)
        self._engine = engine_of(idempotency, _run)
        self._policy = _checked(self._handler, self._engine.policy)
        self.dead_letter = dead_letter
        # By the names that keys are stored under: two subscribers of one queue share theirs.
        self._judges: dict[str, Judge] = {}
        self._approved: WeakSet[Any] = WeakSet()

    def __call__(self, msg: Any, /, *, context: Any) -> _Delivery:
        """What FastStream makes for each message."""
        return _Delivery(msg, context=context, once=self)

    def check(self, broker: Any) -> None:
        """Raises `InvalidInput` for a subscriber that cannot be protected.

        Call it once all subscribers are there: a message is then never taken in vain.
        """
        mine = [each for each in broker.subscribers if self in each._broker_middlewares]
        for subscriber in mine:
            refusal = self.refusal(subscriber)
            if refusal is not None:
                raise InvalidInput(f"{_shown(subscriber)} cannot be protected: {refusal}")
            warning = broker_of(subscriber).warning(
                subscriber, broker.subscribers, has_dead_letter=self.dead_letter is not None
            )
            if warning is not None:
                _logger.warning("%s: %s", _shown(subscriber), warning)

    def refusal(self, subscriber: Any) -> str | None:
        """Why a subscriber cannot be protected; None when it can."""
        if subscriber in self._approved:
            return None
        found = refusal_of(subscriber, has_dead_letter=self.dead_letter is not None)
        if found is None:
            self._approved.add(subscriber)
        return found

    def judge(self, subscriber: Any, name: str) -> Judge:
        """Who handles the messages whose keys are stored under a name."""
        judge = self._judges.get(name)
        if judge is None:
            handler = replace(self._handler, function=_operation(subscriber))
            names = [name, *(alias for alias in handler.aliases if alias != name)]
            judge = Judge(self._engine, handler, names=names, policy=self._policy)
            self._judges[name] = judge
        return judge

    def key_text(self, message: Message) -> str:
        """The key of a message that was handled."""
        return self._handler.key_text(message)


def _checked(handler: Handler, usual: Policy) -> Policy:
    # FastStream does not tell how long a broker keeps its messages.
    policy = checked_policy(handler, usual, "the broker", None)
    return policy.with_changes(terminal=(*policy.terminal, RejectMessage))


async def _run(message: Message, attempt: Any = None) -> Any:
    """The operation of every message: what FastStream does with it."""
    delivery: _Delivery = message.receipt
    return await delivery.run(attempt)


def _operation(subscriber: Any) -> Callable[..., Any]:
    """The same, under the name of the user's handler."""

    async def run(message: Message, attempt: Any = None) -> Any:
        return await _run(message, attempt)

    own = inspect.unwrap(subscriber.calls[0].handler._original_call)
    run.__module__, run.__qualname__ = own.__module__, own.__qualname__
    return run


class _Delivery(BaseMiddleware[Any, Any]):
    """One delivery of one message."""

    def __init__(self, msg: Any, /, *, context: Any, once: OnceMiddleware) -> None:
        super().__init__(msg, context=context)
        self._once = once
        self._message: Any = None
        self._call_next: Any = None
        self._subscriber: Any = None
        self._broker = Broker()
        self._is_settled = False
        self._returned: Any = None
        self._raised: Exception | None = None
        # What keys of published results are made of; and how many were published.
        self._key: tuple[str, str] | None = None
        self._published = 0

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        """Runs the handler once; what it returned, also when that was in an earlier delivery."""
        subscriber = self.context.get_local("handler_")
        # What a program fetches by itself, or gets as a reply, has no handler here.
        if subscriber is None or msg.source_type is not SourceType.CONSUME:
            return await call_next(msg)
        self._call_next, self._message, self._subscriber = call_next, msg, subscriber
        refusal = self._once.refusal(subscriber)
        if refusal is not None:
            await self._refuse(refusal)
        self._broker = broker_of(subscriber)
        name = consumer_name(*self._broker.source(subscriber, msg))
        message = Message(
            _bytes(msg.body),
            {str(each): _text(value) for each, value in msg.headers.items()},
            self._broker.identity(msg),
            deliveries=self._broker.deliveries(msg),
            receipt=self,
        )
        verdict = await self._handled(self._once.judge(subscriber, name), message)
        if verdict.action is not Action.ACK:
            await self._not_done(verdict)
        if verdict.answer is None:
            self._tell(verdict, "is done, and nothing is published for it")
            raise AckMessage
        result = self._returned if verdict.has_run else _restored(verdict.answer.value)
        if result is _SILENT:
            raise AckMessage
        self._key = (name, self._once.key_text(message))
        return result

    async def run(self, attempt: Any) -> Any:
        """Calls the handler; returns what is stored of its result."""
        self._raised = None
        # All that may fail comes before the handler: what fails after it would run it again.
        serializer, is_published = self._publishing()
        scope = nullcontext() if attempt is None else self.context.scope(ATTEMPT, attempt)
        try:
            with scope:
                self._returned = await self._call_next(self._message)
        except AckMessage:
            # The handler's own word for: done, and nothing to publish.
            self._returned = _SILENT
            return {_RESPONSE: None}
        except Exception as error:
            self._raised = error
            raise
        return _stored(self._returned, serializer) if is_published else None

    async def _handled(self, judge: Judge, message: Message) -> Verdict:
        """The verdict on a message, which may wait here and be handled again."""
        ends = time.monotonic() + self._broker.hold_seconds(self._message)
        tries = 0
        while True:
            verdict = await judge.handle(message, None, tries)
            left = ends - time.monotonic()
            if verdict.is_final or left <= 0 or isinstance(self._raised, StopConsume):
                return verdict
            self._tell(verdict, "waits")
            wakes = time.monotonic() + min(verdict.delay.total_seconds(), left)
            while time.monotonic() < wakes:
                if not self._subscriber.running:
                    return verdict
                await asyncio.sleep(_LOOK_SECONDS)
            tries += 1

    async def _not_done(self, verdict: Verdict) -> NoReturn:
        """Settles a message that was not handled; raises what keeps FastStream from publishing."""
        raised = self._raised
        if verdict.action is Action.DROP:
            await self._ack()
            raise AckMessage
        if verdict.action is Action.DEAD_LETTER:
            self._tell(verdict, "is a dead letter")
            await self._bury(verdict)
            raise RejectMessage
        self._tell(verdict, "comes again")
        await self._nack(verdict.delay)
        if isinstance(raised, StopConsume):
            raise raised
        raise NackMessage

    async def _bury(self, verdict: Verdict) -> None:
        dead_letter = self._once.dead_letter
        if dead_letter is None:
            self._is_settled = True
            await self._message.reject()
            return
        try:
            await dead_letter(self._message, verdict.reason)
        except Exception:
            _logger.exception("the dead letter was not taken; the message comes again")
            await self._wait_and_nack(_PAUSE)
            raise NackMessage from None
        await self._ack()

    async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
        """Publishes a result; that of a replay has the same key as the first one."""
        # One key for a batch would make its second message a duplicate of the first.
        if self._key is not None and len(cmd.batch_bodies) <= 1:
            self._published += 1
            text = json.dumps([*self._key, self._published]).encode()
            key = f"published-{hashlib.sha256(text).hexdigest()}"
            cmd.add_headers({KEY_HEADER: key}, override=False)
        return await call_next(cmd)

    async def after_processed(
        self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None
    ) -> bool:
        """Settles the message when its results are published, before FastStream looks at it."""
        if self._message is None:
            if isinstance(exc_val, Exception) and self.context.get_local("handler_") is not None:
                # No parser reads it, or no filter takes it. FastStream sends it back at once.
                await asyncio.sleep(_PAUSE.total_seconds())
            return False
        if self._is_settled:
            return False
        if exc_type is None or isinstance(exc_val, AckMessage):
            await self._ack()
        elif not isinstance(exc_val, asyncio.CancelledError):
            # The outcome is stored, and its result was not published.
            await self._wait_and_nack(_PAUSE)
        return False

    async def _ack(self) -> None:
        self._is_settled = True
        try:
            await self._broker.ack(self._message)
        except Exception as problem:
            # It comes again, and is known.
            _logger.warning("message was not acknowledged: %r", problem)

    async def _wait_and_nack(self, delay: timedelta) -> None:
        if self._broker.hold_seconds(self._message):
            await asyncio.sleep(delay.total_seconds())
        await self._nack(delay)

    async def _nack(self, delay: timedelta) -> None:
        self._is_settled = True
        try:
            await self._broker.nack(self._message, delay)
        except Exception as problem:
            if self._broker.is_ordered:
                _logger.critical("the subscriber stops: its message cannot come again: %r", problem)
                raise StopConsume from problem
            # The broker has lost this connection, and delivers it to another.
            _logger.warning("message was not sent back: %r", problem)

    async def _refuse(self, refusal: str) -> NoReturn:
        """Stops a subscriber that would run unprotected."""
        _logger.critical("%s stops: %s", _shown(self._subscriber), refusal)
        self._is_settled = True
        with suppress(Exception):  # Such as one of a broker that knows no nack.
            await self._message.nack()
        raise StopConsume

    def _tell(self, verdict: Verdict, what: str) -> None:
        _logger.warning(
            "message %s of %s %s: %s",
            self._broker.identity(self._message),
            _shown(self._subscriber),
            what,
            verdict.reason,
            exc_info=self._raised,
        )

    def _publishing(self) -> tuple[Any, bool]:
        """What results are written with, and whether the result of this message is published."""
        subscriber = self._subscriber
        is_asked = bool(self._message.reply_to) and not subscriber._no_reply
        is_sent = any(each.handler._publishers for each in subscriber.calls)
        return subscriber._outer_config.fd_config._serializer, is_asked or is_sent


def _stored(value: Any, serializer: Any) -> Any:
    """What is kept of a result: as much as publishing it again needs."""
    if not isinstance(value, Response):
        return _plain(value, serializer)
    # A class of the user's may not be made again; its publishing options are FastStream's.
    kind = next(each for each in type(value).__mro__ if each.__module__.startswith("faststream."))
    kept = {name: each for name, each in vars(value).items() if not isinstance(each, type)}
    kept["body"] = _plain(value.body, serializer)
    return {_RESPONSE: [kind.__module__, kind.__name__], "attributes": kept}


def _plain(value: Any, serializer: Any) -> Any:
    """A body in a form that is published as the same bytes."""
    if value is None or isinstance(value, str | bytes):
        return value
    try:
        return json.loads(encode_message(value, serializer)[0])
    except Exception:
        # A codec of the user's writes it; the engine keeps it when it can.
        return value


def _restored(stored: Any) -> Any:
    """The result that `_stored` was given, as far as publishing goes."""
    if not isinstance(stored, Mapping) or _RESPONSE not in stored:
        return stored
    if stored[_RESPONSE] is None:
        return _SILENT
    module, name = stored[_RESPONSE]
    made = getattr(sys.modules.get(module), name, Response)(None)
    vars(made).update(stored["attributes"])
    return made


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _bytes(body: Any) -> bytes:
    """The body as it came; a parser of the user's may have made something else of it."""
    return body if isinstance(body, bytes) else encode_message(body, None)[0]


def _shown(subscriber: Any) -> str:
    return f"the subscriber {subscriber.calls.name or type(subscriber).__name__}"

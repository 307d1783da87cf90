"""From a message to its verdict: key, engine, handler, table.

Owns that order, written once for threads and event loops: a blocking engine never suspends, so
`run_sync` drives the same flow. It must not know brokers.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from retrysafe.consumers.deadlines import Deadline
from retrysafe.consumers.engine import (
    AsyncEngine,
    Call,
    Ending,
    MessageFacts,
    Policy,
    ThreadEngine,
    hold_deadline,
    make_call,
    operation_name,
)
from retrysafe.consumers.handler import Handler
from retrysafe.consumers.message import Message
from retrysafe.consumers.outages import is_away
from retrysafe.consumers.verdict import Action, Outage, Rule, Verdict, rule_of
from retrysafe.errors import Closed, OperationInFlight, RetrysafeError, StoreError

_logger = logging.getLogger("retrysafe.consumers")

# Messages whose failures are counted; beyond that, the one that failed longest ago starts over.
COUNTED_MESSAGES: Final = 100_000
# Reasons travel in headers, which brokers limit.
REASON_LIMIT_CHARACTERS: Final = 500

_AWAY: Final = Rule(Action.RETRY, "something that the handler needs is away", Outage.DOWNSTREAM)


class _Run:
    """What is known of one handling of a message."""

    __slots__ = ("attempt", "error", "has_begun", "name")

    def __init__(self, name: str | None) -> None:
        # What failures are counted under: the key, and before there is one what the broker says.
        self.name = name
        self.has_begun = False
        self.attempt = 0
        # What the handler itself raised.
        self.error: BaseException | None = None


class Judge:
    """Handles messages of one queue, and says what becomes of each.

    With `in_flight=Action.DROP`, a delivery that meets its key in flight is forgotten by the
    broker, also when it is the only one that is left: after a crash inside the handler the key is
    in flight until the lease ends, and who drops the message then has lost it. It is for messages
    that are published again anyway.
    """

    def __init__(
        self,
        engine: ThreadEngine | AsyncEngine,
        handler: Handler,
        *,
        names: Sequence[str],
        policy: Policy,
    ) -> None:
        """`names` are what this consumer was ever called, the newest first."""
        self._engine = engine
        self._handler = handler
        self._names = names
        self._policy = policy
        self._operation = operation_name(handler.function) or "message"
        # Failures of the messages' own, in the order of the last one. Neither the store's attempts
        # nor the broker's deliveries will do: both count outages, and who waited for another.
        self._failures: OrderedDict[str, int] = OrderedDict()
        # Handlers may run in threads.
        self._counting = threading.Lock()

    async def handle(
        self, message: Message, deadline: Deadline | None = None, tries: int = 0
    ) -> Verdict:
        """Handles one delivery; `tries` is how often this consumer has held it back before.

        Raises nothing but what ends the process or its task: then nobody knows how far the handler
        got, and the message is not settled.
        """
        run = _Run(message.identity)
        try:
            run.name = text = self._handler.key_text(message)
            call = make_call(
                self._engine,
                text=text,
                callers=self._names,
                body=message.body,
                operation=self._operation,
                handler=self._handler.function,
                policy=self._policy,
                rule=self._handler.fingerprint,
            )
            call.message = MessageFacts(self._names[0], message.identity, message.headers)
            answer = await self._answer(call, message, deadline, run)
        except Exception as error:
            return self._verdict(message, error, run, tries)
        self._forget(run)
        reason = "it was done before" if answer.replayed else "it is done"
        return Verdict(Action.ACK, reason, has_run=run.has_begun, answer=answer)

    async def _answer(
        self, call: Call, message: Message, deadline: Deadline | None, run: _Run
    ) -> Any:
        async def invoke(attempt: Any) -> Any:
            run.has_begun, run.attempt = True, attempt.number
            if deadline is not None:
                hold_deadline(attempt, deadline)
            try:
                given = (message,) if self._handler.transaction is None else (message, attempt)
                value = self._handler.function(*given)
                return await value if inspect.isawaitable(value) else value
            except Exception as error:
                run.error = error
                raise

        transaction = self._handler.transaction
        if transaction is None:
            return await self._engine.answer(call, invoke)
        return await self._engine.answer_atomic(call, transaction, invoke)

    def _verdict(self, message: Message, error: Exception, run: _Run, tries: int) -> Verdict:
        rule = rule_of(error)
        is_own = error is run.error
        if is_own:
            rule = self._own_rule(error, rule)
        if rule.action is Action.RETRY and rule.outage is Outage.NONE and self._is_away(error):
            rule = _AWAY
        reason = _writable(f"{rule.because}: {type(error).__name__}: {error}")
        # For the pause; before a claim, only the broker counts.
        action, count = rule.action, max(run.attempt or message.deliveries, tries + 1)
        if isinstance(error, OperationInFlight) and not is_own:
            action = self._handler.in_flight
        if action is Action.RETRY and rule.outage is Outage.NONE:
            count = self._failed(run, message)
            if count >= self._handler.tries:
                action, reason = Action.DEAD_LETTER, f"{count} tries failed; {reason}"
        delay = self._delay(action, error, count)
        return Verdict(action, reason, delay, rule.outage, has_run=run.has_begun)

    def _is_away(self, error: Exception) -> bool:
        named: tuple[type[Exception], ...] = self._handler.outages
        return isinstance(error, named) or (
            not isinstance(error, RetrysafeError) and is_away(error)
        )

    def _failed(self, run: _Run, message: Message) -> int:
        """Counts a failure of the message's own; returns how many there were."""
        if run.name is None:
            return message.deliveries
        with self._counting:
            # Kept beyond the limit: a dead letter that was not taken must not start over.
            count = self._failures[run.name] = self._failures.pop(run.name, 0) + 1
            if len(self._failures) > COUNTED_MESSAGES:
                self._failures.popitem(last=False)
        return count

    def _forget(self, run: _Run) -> None:
        if self._failures and run.name is not None:
            with self._counting:
                self._failures.pop(run.name, None)

    def _own_rule(self, error: Exception, rule: Rule) -> Rule:
        """The row for what the handler itself raised.

        The table speaks of this message's key and this process's store; the handler may have met
        the same errors with other keys and other stores.
        """
        if self._policy.judge(error) is Ending.FAILED:
            return Rule(Action.DEAD_LETTER, "the handler raised what ends a message for good")
        if rule.action is Action.ACK:
            return Rule(Action.RETRY, "the handler raised")
        if rule.outage is Outage.OURS:
            outage = Outage.DOWNSTREAM if isinstance(error, StoreError) else Outage.NONE
            return Rule(Action.RETRY, "the handler raised", outage)
        return rule

    def _delay(self, action: Action, error: Exception, count: int) -> timedelta:
        if action is Action.RETRY:
            return self._handler.back_off.after(count)
        if action is not Action.LEAVE:
            return timedelta(0)
        if isinstance(error, Closed):
            # Not at once: a consumer whose object was closed under it must not spin.
            return self._handler.back_off.first
        if isinstance(error, OperationInFlight):
            return error.retry_after
        # Until the lease ends, nobody can do anything for it.
        return self._policy.lease


def _writable(reason: str) -> str:
    """The reason as every broker takes it: errors quote payloads, which may be no text."""
    return reason[:REASON_LIMIT_CHARACTERS].encode(errors="backslashreplace").decode()

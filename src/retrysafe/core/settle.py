"""Settling: an attempt's ending becomes durable, or the caller is told exactly what is not.

Owns the last write and what happens to it when its caller is cancelled. The
operation has run by now, so nothing here may free the key or forget the outcome quietly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from retrysafe.core.call import Call
from retrysafe.core.events import ENDING_KINDS, EventKind
from retrysafe.core.handlers import is_refusal
from retrysafe.core.insist import insist
from retrysafe.core.lease import Lease
from retrysafe.core.model import (
    Decision,
    Ending,
    Payload,
    SettleAnswer,
    SettleKind,
    Settlement,
    StagedEntry,
)
from retrysafe.core.ports import Ports
from retrysafe.core.values import codec
from retrysafe.errors import ClaimLost, OutcomeNotStored, StoreError

_KINDS: Final = {
    Ending.SUCCEEDED: SettleKind.COMPLETE,
    Ending.FAILED: SettleKind.FAIL,
    Ending.RELEASED: SettleKind.RELEASE,
}


def settlement_of(
    call: Call,
    lease: Lease,
    ending: Ending,
    payload: Payload,
    entries: tuple[StagedEntry, ...] = (),
    came_to: Any = None,
) -> Settlement:
    """The row that ends an attempt, with what it staged; `came_to` is its value or exception.

    A released key will run again, so what this attempt staged goes with the one that settles it.
    """
    policy = call.policy
    settlement = Settlement(
        kind=_KINDS[ending],
        key=call.key,
        token=lease.token,
        payload=payload,
        active_ms=policy.active_ms,
        audit_ms=policy.audit_ms,
    )
    if call.nest is not None and call.nest.active_ms is not None:
        settlement.active_ms = call.nest.active_ms
    if entries and ending is not Ending.RELEASED:
        settlement.entries = entries
    if call.nothing_happened is not None and ending is not Ending.SUCCEEDED:
        settlement.nothing_happened = call.nothing_happened(came_to)
    if call.arguments is not None or call.recovers is not None:
        # A released key keeps its own: the next attempt may be abandoned too.
        settlement.drops_arguments = ending is not Ending.RELEASED
    return settlement


def _encode(call: Call, value: Any) -> None:
    """Raises what is wrong with a value."""
    if call.judge is not None:
        Ending(call.judge(value))
    call.codec.encode(value)


def _around(call: Call, settlement: Settlement) -> list[tuple[Lease, Settlement]]:
    """The same ending of the claims around, which a nested call settles after its own.

    Where its caller is gone, nobody else does: who knows only their keys would run it again.
    """
    held = () if call.nest is None else call.nest.held
    return [
        (lease, replace(settlement, key=lease.key, token=lease.token, entries=())) for lease in held
    ]


class Settler:
    """Writes endings until they stand."""

    __slots__ = ("_background", "_clock", "_monotonic", "_renewals", "_report", "_writer")

    def __init__(self, ports: Ports) -> None:
        self._writer = ports.writer
        self._clock = ports.clock
        self._monotonic = ports.clock.monotonic
        self._renewals = ports.renewals
        self._background = ports.background
        self._report = ports.report

    def payload_of(self, call: Call, value: Any, attempt: int) -> tuple[Ending, Payload]:
        """How the operation ended that returned this value, and what is stored of it."""
        ending = Ending.SUCCEEDED
        try:
            if call.judge is not None:
                ending = Ending(call.judge(value))
            payload = call.codec.encode(value)
            if len(payload.head) + len(payload.body) > call.policy.outcome_limit_bytes:
                payload = codec.bounded(payload, call.policy.outcome_limit_bytes)
        except Exception as error:
            codec.require_again(error, partial(_encode, call, value))
            # Whatever is wrong with the value, the operation has run: it must not run again.
            payload = codec.withheld(codec.message_of(error))
        if payload.form == codec.WITHHELD:
            self._tell(call, attempt, EventKind.WITHHELD, json.loads(payload.body)["reason"])
        return ending, payload

    async def settle_error(
        self, call: Call, lease: Lease, error: Exception, attempt: int
    ) -> tuple[Ending, Payload]:
        """Stores a clean exception as the policy judges it; raises as `settle` does."""
        ending, payload = self.judged(call, error)
        return await self.settle_judged(call, lease, ending, payload, attempt, error)

    @staticmethod
    def judged(call: Call, error: Exception) -> tuple[Ending, Payload]:
        """How the operation ended that raised this exception, and what is stored of it."""
        policy = call.policy
        return policy.judge(error), codec.encode_failure(error, policy.outcome_limit_bytes)

    async def settle_judged(
        self,
        call: Call,
        lease: Lease,
        ending: Ending,
        payload: Payload,
        attempt: int,
        error: Exception | None,
    ) -> tuple[Ending, Payload]:
        """Stores a failure; the exception that it is about is named as the cause of others."""
        if self.is_postponed(call, ending, attempt, error):
            return ending, payload
        try:
            stored = await self.settle(call, lease, ending, payload, attempt, came_to=error)
        except OutcomeNotStored as unstored:
            if ending is Ending.RELEASED:
                # The key is freed by its lease instead; the operation's own error matters more.
                return ending, payload
            raise unstored from error or unstored.__cause__
        except ClaimLost as lost:
            raise lost from error
        # A failure that frees the key is only told to those who waited for it. They get it as it
        # was, also when the store could not hold it: nothing is done for good.
        return ending, payload if ending is Ending.RELEASED else stored

    def is_postponed(
        self, call: Call, ending: Ending, attempt: int, error: Exception | None
    ) -> bool:
        """Whether a worker's attempt is left to its lease instead of being settled.

        Released, the key would wait for a caller who may never come back. Left to its lease it is
        abandoned again, and the next worker tries again, up to the attempt limit.
        """
        if ending is not Ending.RELEASED or call.recovers is None:
            return False
        self._report(EventKind.POSTPONED, call, attempt, str(error))
        return True

    async def settle(
        self,
        call: Call,
        lease: Lease,
        ending: Ending,
        payload: Payload,
        attempt: int,
        value: Any = None,
        entries: tuple[StagedEntry, ...] = (),
        came_to: Any = None,
    ) -> Payload:
        """Stores an ending; when it returns, the returned payload is durable.

        Raises `ClaimLost` when another owner has the key, `OutcomeNotStored` when the store could
        not be told within the policy's patience.
        """
        settlement = settlement_of(call, lease, ending, payload, entries, came_to)
        call.progress.begin_settle()
        try:
            answer = await self._write(call, settlement, attempt, value)
        except BaseException as error:
            if not is_refusal(error):
                self._hand_over(call, lease, settlement, attempt)
            raise
        if answer.decision is Decision.LOST:
            raise self._lost(call, attempt)
        call.progress.end_settle()
        self._report(ENDING_KINDS[settlement.kind], call, attempt)
        lease.is_settled = True
        assert settlement.payload is not None  # Every ending has one.
        return settlement.payload

    def _hand_over(self, call: Call, lease: Lease, settlement: Settlement, attempt: int) -> None:
        """Has an ending written without its caller, who is being cancelled.

        The operation is done: its outcome must not be lost with the caller. Writing it twice is
        harmless, the token confirms the second.
        """
        lease.is_handed_over = True
        # As far as its caller will ever know.
        call.progress.note(ENDING_KINDS[settlement.kind])
        for held, ending in [(lease, settlement), *_around(call, settlement)]:
            orphan = self._settle_orphan(call, held, ending, attempt)
            self._background.finish(orphan, self.abandoning(call, attempt))

    async def settle_orphans(
        self, call: Call, lease: Lease, settlement: Settlement, attempt: int
    ) -> None:
        """The same in one flow."""
        for held, ending in [(lease, settlement), *_around(call, settlement)]:
            await self._settle_orphan(call, held, ending, attempt)

    async def settle_around(
        self, call: Call, lease: Lease, ending: Ending, payload: Payload, attempt: int
    ) -> None:
        """Settles the claims around this one as it was settled, for a caller who is gone."""
        for held, around in _around(call, settlement_of(call, lease, ending, payload)):
            await self._settle_orphan(call, held, around, attempt)

    def abandoning(self, call: Call, attempt: int) -> Callable[[str], None]:
        """What tells of an ending that nobody can write any more."""
        return partial(self._report, EventKind.SETTLE_FAILED, call, attempt)

    async def _write(
        self, call: Call, settlement: Settlement, attempt: int, value: Any = None
    ) -> SettleAnswer:
        """Writes until it stands, within the policy's patience; else `OutcomeNotStored`."""
        try:
            return await self._writer.settle(settlement)
        except StoreError as error:
            return await insist(
                partial(self._writer.settle, settlement),
                settlement,
                error,
                patience_seconds=call.policy.settle_patience.total_seconds(),
                clock=self._clock,
                tell=partial(self._tell, call, attempt),
                not_stored=partial(self._not_stored, call, attempt, value),
            )

    async def _settle_orphan(
        self, call: Call, lease: Lease, settlement: Settlement, attempt: int
    ) -> None:
        """The same for an ending whose caller is gone; observers alone hear of it.

        The lease must not run out while the store is still being asked. Its renewal is this flow's
        own affair: one that is cancelled before it begins must not leave a lease behind.
        """
        try:
            lease.is_held = True
            self._renewals.add(lease)
            answer = await self._write(call, settlement, attempt)
        except OutcomeNotStored:
            return  # Reported where it was raised.
        finally:
            lease.is_held = False
            self._renewals.remove(lease)
        if answer.decision is Decision.LOST:
            self._lost(call, attempt)
            return
        lease.is_settled = True
        if settlement.key == call.key:
            # Not for the claims around: observers hear of a call once, from where it ended.
            self._report(ENDING_KINDS[settlement.kind], call, attempt)

    def _lost(self, call: Call, attempt: int) -> ClaimLost:
        self._report(EventKind.LOST, call, attempt)
        return ClaimLost(
            f"the claim on {call.key.text!r} was taken over, or released by an operator; this "
            "outcome was not stored",
            key=call.key.text,
        )

    def _tell(self, call: Call, attempt: int, kind: EventKind, detail: str) -> None:
        self._report(kind, call, attempt, detail)

    def _not_stored(
        self, call: Call, attempt: int, value: Any, error: Exception
    ) -> OutcomeNotStored:
        self._tell(call, attempt, EventKind.SETTLE_FAILED, str(error))
        return OutcomeNotStored(
            f"the operation for {call.key.text!r} ran, but its ending could not be stored: "
            f"{error}. The key is blocked until its lease ends; a retry after that runs again",
            key=call.key.text,
            value=value,
        )

"""Settling: an attempt's ending becomes durable, or the caller is told exactly what is not.

Owns the retries of the last write and what happens to it when its caller is cancelled. The
operation has run by now, so nothing here may free the key or forget the outcome quietly.
"""

from __future__ import annotations

from typing import Any, Final

from retrysafe.core import codec
from retrysafe.core.call import Call
from retrysafe.core.events import EventKind, Reporter
from retrysafe.core.model import Decision, Ending, Payload, SettleKind, Settlement
from retrysafe.core.ports import Orphanage, Waiting, Writer
from retrysafe.errors import (
    ClaimLost,
    OutcomeNotStored,
    RetrysafeError,
    StoreError,
    StoreRejected,
    StoreUnavailable,
)

RETRY_PAUSE_SECONDS: Final = 0.05
RETRY_PAUSE_MAXIMUM_SECONDS: Final = 1.0

_KINDS: Final = {
    Ending.SUCCEEDED: (SettleKind.COMPLETE, EventKind.COMPLETED),
    Ending.FAILED: (SettleKind.FAIL, EventKind.FAILED),
    Ending.RELEASED: (SettleKind.RELEASE, EventKind.RELEASED),
}


class Settler:
    """Writes endings until they stand."""

    __slots__ = ("_monotonic", "_orphanage", "_report", "_waiting", "_writer")

    def __init__(
        self, *, writer: Writer, waiting: Waiting, orphanage: Orphanage, report: Reporter
    ) -> None:
        self._writer = writer
        self._waiting = waiting
        self._monotonic = waiting.monotonic
        self._orphanage = orphanage
        self._report = report

    async def settle_value(
        self, call: Call, token: bytes, value: Any, attempt: int
    ) -> tuple[Ending, Payload]:
        """Stores what the operation returned; raises `ClaimLost` or `OutcomeNotStored`."""
        ending = Ending.SUCCEEDED
        try:
            if call.judge is not None:
                ending = Ending(call.judge(value))
            payload = codec.bounded(call.codec.encode(value), call.policy.outcome_limit_bytes)
        except Exception as error:
            # Whatever is wrong with the value, the operation has run: it must not run again.
            payload = codec.withheld(codec.message_of(error))
        if payload.form == codec.WITHHELD:
            self._withheld(call, attempt, payload.body.decode())
        return ending, await self.settle(call, token, ending, payload, attempt, value)

    async def settle_error(
        self, call: Call, token: bytes, error: Exception, attempt: int
    ) -> tuple[Ending, Payload]:
        """Stores a clean exception as the policy judges it; raises as `settle_value` does."""
        ending = call.policy.judge(error)
        payload = codec.encode_failure(error, call.policy.outcome_limit_bytes)
        try:
            return ending, await self.settle(call, token, ending, payload, attempt)
        except OutcomeNotStored as unstored:
            if ending is Ending.RELEASED:
                # The key is freed by its lease instead; the operation's own error matters more.
                return ending, payload
            raise unstored from error
        except ClaimLost as lost:
            raise lost from error

    async def settle(
        self,
        call: Call,
        token: bytes,
        ending: Ending,
        payload: Payload,
        attempt: int,
        value: Any = None,
    ) -> Payload:
        """Stores an ending; when it returns, the returned payload is durable."""
        kind, event_kind = _KINDS[ending]
        policy = call.policy
        settlement = Settlement(
            kind, call.key, token, payload, 0, policy.active_ms, policy.audit_ms
        )
        try:
            stored = await self._persist(call, settlement, payload, attempt, value)
        except RetrysafeError:
            raise
        except BaseException:
            # The caller is being cancelled, and the operation is done: its outcome must not be
            # lost with the caller. Writing it twice is harmless, the token confirms the second.
            self._orphanage.adopt(self._persist_orphan(call, settlement, payload, attempt))
            raise
        self._report(event_kind, call.key, call.operation, attempt)
        return stored

    async def _persist(
        self, call: Call, settlement: Settlement, payload: Payload, attempt: int, value: Any
    ) -> Payload:
        pause = RETRY_PAUSE_SECONDS
        give_up = self._monotonic() + call.policy.settle_patience.total_seconds()
        while True:
            try:
                answer = await self._writer.settle(settlement)
                break
            except StoreRejected as error:
                if payload.form == codec.WITHHELD:
                    raise self._not_stored(call, attempt, value, error) from error
                # The store cannot hold this outcome; that it is done can still be remembered.
                payload = settlement.payload = codec.withheld(f"the store refused it: {error}")
                self._withheld(call, attempt, str(error))
            except StoreUnavailable as error:
                self._report(
                    EventKind.STORE_UNAVAILABLE, call.key, call.operation, attempt, str(error)
                )
                if self._monotonic() + pause > give_up:
                    raise self._not_stored(call, attempt, value, error) from error
                await self._waiting.sleep(pause)
                pause = min(pause * 2, RETRY_PAUSE_MAXIMUM_SECONDS)
            except StoreError as error:
                # A broken database, say: asking again is no use, and the caller must still learn
                # that the operation ran.
                raise self._not_stored(call, attempt, value, error) from error
        if answer.decision is Decision.LOST:
            self._report(EventKind.CLAIM_LOST, call.key, call.operation, attempt)
            raise ClaimLost(
                f"another owner took over {call.key.text!r}; this outcome was not stored",
                key=call.key.text,
            )
        return payload

    async def _persist_orphan(
        self, call: Call, settlement: Settlement, payload: Payload, attempt: int
    ) -> None:
        try:
            await self._persist(call, settlement, payload, attempt, None)
        except (ClaimLost, OutcomeNotStored):
            return  # Reported where it was raised; there is no caller left to tell.

    def _withheld(self, call: Call, attempt: int, detail: str) -> None:
        self._report(EventKind.WITHHELD, call.key, call.operation, attempt, detail)

    def _not_stored(
        self, call: Call, attempt: int, value: Any, error: Exception
    ) -> OutcomeNotStored:
        self._report(EventKind.SETTLE_FAILED, call.key, call.operation, attempt, str(error))
        return OutcomeNotStored(
            f"the operation for {call.key.text!r} ran, but its ending could not be stored: "
            f"{error}. The key is blocked until its lease ends; a retry after that runs again",
            key=call.key.text,
            value=value,
        )

"""Settling a leased attempt inside the user's transaction.

Owns what the engine has to know about an outcome that it did not write itself: whether it stands,
still depends on the user's commit, or was rolled back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from retrysafe.core.atomic.block import settlement_of, storable
from retrysafe.core.call import Call
from retrysafe.core.handlers import is_of_handler
from retrysafe.core.lease import Lease
from retrysafe.core.model import Decision, Ending, Payload, SettleKind, Settlement, StagedEntry
from retrysafe.core.ports import Executor, Fate, Transaction
from retrysafe.core.values import codec
from retrysafe.errors import ClaimLost, InvalidInput


class JoinedOutcome:
    """An outcome that was written in the user's transaction."""

    __slots__ = ("_settlement", "_transaction", "payload", "value")

    def __init__(
        self, transaction: Transaction, settlement: Settlement, payload: Payload, value: Any
    ) -> None:
        self._transaction = transaction
        self._settlement = settlement
        self.payload = payload
        self.value = value

    @property
    def kind(self) -> SettleKind:
        """How it ends the attempt, once it stands."""
        return self._settlement.kind

    async def fate(self) -> Fate:
        """What became of it; raises `StoreError` when the store cannot tell."""
        return await self._transaction.fate(self._settlement)

    async def settle(self, call: Call, lease: Lease) -> None:
        """Writes it, under all keys of the request; raises `ClaimLost` and `InvalidInput`."""
        transaction, settlement = self._transaction, self._settlement
        await transaction.begin()
        # Before the record is written: the next renewal comes at any moment.
        leases = (lease,) if call.nest is None else (*call.nest.held, lease)
        for each in leases:
            each.is_joined = each.may_be_settled = True
        try:
            # The entries go with the operation's own key, once.
            for each in leases[:-1]:
                around = replace(settlement, key=each.key, token=each.token, entries=())
                decision = await transaction.settle(around)
                if decision is Decision.LOST:
                    break
            else:
                decision = await transaction.settle(settlement)
            if decision is Decision.LOST:
                lease.revoke()
                raise ClaimLost(
                    f"the claim on {call.key.text!r} was taken over, or released by an operator: "
                    "this transaction must not commit",
                    key=call.key.text,
                )
            if decision is Decision.CONFIRM:
                raise InvalidInput(f"{call.key.text!r} is completed already", key=call.key.text)
        except BaseException:
            await undo_quietly(transaction)
            raise
        await transaction.keep()


def complete_in(
    executor: Executor,
    call: Call,
    lease: Lease,
    connection: object,
    value: Any,
    *,
    entries: tuple[StagedEntry, ...],
    check: Callable[[], Awaitable[None]],
    keep: Callable[[JoinedOutcome], None],
) -> Any:
    """Writes the outcome in the user's transaction; to be awaited where flows suspend.

    `check` raises when the attempt must not be completed; `keep` is given what was written.
    """
    value = _outcome_of(call, value)
    kind = _kind_of(call, value)
    payload = storable(call, value)
    transaction = executor.join(connection)
    settlement = settlement_of(call, lease.token, kind, payload, entries)
    joined = JoinedOutcome(transaction, settlement, payload, value)

    async def settle() -> None:
        await check()
        await joined.settle(call, lease)
        keep(joined)

    return executor.drive(settle(), transaction.waits)


def _outcome_of(call: Call, value: Any) -> Any:
    if call.outcome_of is None:
        return value
    try:
        return call.outcome_of(value)
    except Exception as error:
        raise InvalidInput(
            f"the outcome of {call.key.text!r} cannot be stored: {codec.message_of(error)}",
            key=call.key.text,
        ) from error


def _kind_of(call: Call, value: Any) -> SettleKind:
    """How the attempt ends with this value; raises `InvalidInput` when it would free the key."""
    ending = Ending.SUCCEEDED if call.judge is None else call.judge(value)
    if ending is Ending.RELEASED:
        # The business write would stand and a retry would write again.
        raise InvalidInput(
            f"this outcome of {call.key.text!r} frees the key, so it cannot be committed with your "
            "writes: roll back and return it instead",
            key=call.key.text,
        )
    return SettleKind.FAIL if ending is Ending.FAILED else SettleKind.COMPLETE


async def stage_in(transaction: Transaction, entry: StagedEntry) -> str:
    """Writes an entry of no operation in the user's transaction; returns its key."""
    await transaction.begin()
    try:
        await transaction.stage([entry])
    except BaseException:
        await undo_quietly(transaction)
        raise
    await transaction.keep()
    return entry.key


async def undo_quietly(transaction: Transaction) -> None:
    """Undoes what was done in the user's transaction, for a reason that matters more."""
    try:
        await transaction.undo()
    except Exception as error:
        if is_of_handler(error):
            raise  # What was written may still be there: nothing more is tried in it.
        # The connection is gone, which undoes more; the reason for undoing matters more.
        return

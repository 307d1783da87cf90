"""A store that breaks for good after the operation ran: the caller hears that it ran."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from retrysafe import Idempotency, OutcomeNotStored, Policy
from retrysafe.errors import StoreMissing
from retrysafe.stores import MemoryStore

PATIENT = Policy(settle_patience=timedelta(seconds=30))


class Vanishing(MemoryStore):
    """A store whose database is gone when an outcome is to be written."""

    def __init__(self, *errors: BaseException) -> None:
        super().__init__()
        self.errors = list(errors)

    async def commit(self, claims: Sequence[Any], settlements: Sequence[Any]) -> Any:
        if settlements and self.errors:
            raise self.errors.pop(0)
        return await super().commit(claims, settlements)


def open_over(store: MemoryStore) -> Idempotency:
    return Idempotency(store, caller="tenant", policy=PATIENT)


def test_the_caller_is_told_that_the_operation_ran():
    """Not a bare store error: `OutcomeNotStored` carries the value, and comes without a wait."""
    store = Vanishing(StoreMissing("the file is gone"))
    with open_over(store) as idempotency, pytest.raises(OutcomeNotStored) as told:
        idempotency.run("k", lambda: "paid", request=None)
    assert told.value.value == "paid"
    assert isinstance(told.value.__cause__, StoreMissing)


def test_a_failed_operation_still_raises_its_own_error():
    """A retryable failure that cannot be stored is freed by the lease; its error is shown."""

    def operation() -> None:
        raise OSError("unreachable")

    store = Vanishing(StoreMissing("the file is gone"))
    with open_over(store) as idempotency, pytest.raises(OSError, match="unreachable"):
        idempotency.run("k", operation)


def test_an_interrupt_is_not_replaced_by_the_store_error():
    """The interrupted thread's last try fails as well, and the interrupt goes on all the same."""
    store = Vanishing(KeyboardInterrupt(), StoreMissing("the file is gone"))
    with open_over(store) as idempotency, pytest.raises(KeyboardInterrupt):
        idempotency.run("k", lambda: "paid", request=None)
    assert not store.errors

"""Conflicts that trying again did not help, and which statements may take long."""

from __future__ import annotations

from typing import Any

import pytest

from retrysafe.core.keys.key import Key
from retrysafe.core.model import Extension
from retrysafe.core.ports import Waits
from retrysafe.errors import StoreNotWritable, StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres import schema
from retrysafe.stores.postgres.drivers.port import Conflict
from retrysafe.stores.postgres.store import PostgresStore

KEY = Key("the key", caller="tester")


class Conflicting:
    """A connector whose statements all fail, first with what it was given."""

    waits = Waits.BLOCKING

    def __init__(self, *first: Exception) -> None:
        self._errors = list(first)

    async def fetch(self, *_: Any) -> Any:
        raise self._errors.pop(0) if self._errors else Conflict("could not serialize access")

    fetch_renewal = transact = fetch

    def after_fork_in_child(self) -> None:
        """Has nothing that a child could inherit."""


def made_store(*first: Exception) -> PostgresStore:
    connector: Any = Conflicting(*first)
    store = PostgresStore(connector, location="here")
    store._statements._is_current = True
    return store


async def nothing(_: Any) -> Any:
    raise AssertionError("no transaction is open")


@pytest.mark.parametrize(
    ("flow", "first", "message"),
    [
        (
            lambda store: store._statements.fetch("now_ms"),
            (),
            "after 10 serialization conflicts: could",
        ),
        (
            lambda store: store._statements.fetch("now_ms"),
            (StoreNotWritable("demoted"),),
            "after 9 serialization conflicts: could",
        ),
        (
            lambda store: store._statements.transact(nothing),
            (),
            "after 10 serialization conflicts: could",
        ),
        (
            lambda store: store.extend([Extension(KEY, b"t" * 16, 1000)], 5.0),
            (),
            "after 1 serialization conflict: could",
        ),
    ],
    ids=["statement", "statement after a demotion", "transaction", "renewal"],
)
def test_the_number_of_conflicts_is_true(flow, first, message):
    """An operator reads it to tell a busy server from one that refuses once."""
    with pytest.raises(StoreUnavailable, match=message):
        run_sync(flow(made_store(*first)))


def test_every_part_of_a_sweep_may_take_long():
    """A table that was never swept is read for longer than a commit may take."""
    sweeps = {name for name in schema.statements("retrysafe") if name.startswith("sweep_")}
    assert sweeps <= schema.PATIENT

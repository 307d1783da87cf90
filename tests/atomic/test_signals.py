"""Signals that raise where an atomic run enters or leaves the gate leave nobody inside it.

They strike at every place of the gate and of `threading`. What a signal leaves that strikes
elsewhere in a block is not looked at here, but for one that strikes before the first step.
"""

from __future__ import annotations

import gc
import sqlite3
import warnings
from contextlib import closing, contextmanager

import pytest

from retrysafe import Idempotency, Key, OperationFailed
from retrysafe.runtime import calls
from retrysafe.runtime.calls import calls_of
from tests.core.building import call
from tests.interrupting import at_every_place_at_once


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shop.db"


@pytest.fixture
def idem(path):
    with Idempotency(f"sqlite:///{path}", caller="shop") as made:
        made.read("nothing")  # Makes the schema.
        yield made


@pytest.fixture
def transaction(path):
    """Opens transactions as a service does: committed at the end, rolled back by an exception."""

    @contextmanager
    def transact():
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection

    return transact


def test_a_signal_anywhere_in_the_gate_of_a_block_leaves_nobody_inside(idem, transaction):
    """Closing would wait for a block that is over until its time is up."""
    numbers = iter(range(10_000))

    def act():
        with transaction() as connection, idem.atomic(connection, f"k{next(numbers)}") as run:
            run.complete(1)

    for place in at_every_place_at_once(3, act, calls):
        assert not idem._calls._gate.inside, f"somebody is inside after signals at place {place}"
    assert next(numbers) >= 3


def test_a_signal_anywhere_in_the_gate_of_a_refused_block_leaves_nobody_inside(idem, transaction):
    """The same where entering it fails."""
    refusals = 0

    def act():
        nonlocal refusals
        with transaction() as connection:
            try:
                # The outcome that it would replay is a failure.
                with idem.atomic(connection, "k"):
                    pytest.fail("it was entered")
            except OperationFailed:
                refusals += 1

    with transaction() as connection, idem.atomic(connection, "k") as run:
        run.fail(LookupError("gone"))
    for place in at_every_place_at_once(3, act, calls):
        assert not idem._calls._gate.inside, f"somebody is inside after signals at place {place}"
    assert refusals == 1


def test_a_signal_anywhere_in_the_gate_of_an_adapters_call_leaves_nobody_inside(idem, transaction):
    """The same for requests that run in a transaction."""
    numbers = iter(range(10_000))

    def act():
        made = call(key=Key(f"k{next(numbers)}", caller="shop"))
        calls_of(idem).answer_atomic(made, transaction, lambda attempt: 1)

    for place in at_every_place_at_once(3, act, calls):
        assert not idem._calls._gate.inside, f"somebody is inside after signals at place {place}"
    assert next(numbers) > 3


def test_a_signal_before_the_first_step_leaves_no_flow_that_was_never_begun(
    idem, transaction, monkeypatch
):
    """It may raise in the driver's first line; nothing has run then, and nobody complains."""

    def interrupted(flow):
        raise KeyboardInterrupt

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as patch:
            patch.setattr(calls, "run_sync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                calls_of(idem).answer_atomic(call(), transaction, lambda attempt: 1)
        gc.collect()
        assert [str(item.message) for item in caught] == []
    assert calls_of(idem).answer_atomic(call(), transaction, lambda attempt: 1).value == 1

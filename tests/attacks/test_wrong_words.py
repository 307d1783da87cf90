"""Attack: an attempt is told that it made a mistake, or lost its key, when it did neither.

A step whose commit was answered by silence is the attempt's own, and asking for it again is no
reuse of its name. An attempt that has ended holds nothing, and nobody has taken anything from it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from retrysafe import Attempt, ClaimLost, Idempotency, InvalidInput, Policy, current_attempt
from retrysafe.errors import StepNotStored, StepReused
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from retrysafe.testing.faults import FaultyStore, Moment

IMPATIENT = Policy(settle_patience=timedelta(0))


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request, tmp_path: Path) -> Iterator[FaultyStore]:
    url = "memory://"
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'keys.db'}"
    elif request.param == "postgresql":
        url = request.getfixturevalue("migrated_url")
    made = FaultyStore(open_store(url))
    yield made
    run_sync(made.close())


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
def test_a_step_whose_answer_was_lost_may_be_asked_for_again(store: FaultyStore, moment: Moment):
    """It ran, and its write is made again, whether it stands or not; it does not run again."""
    ran: list[str] = []

    def charge() -> str:
        ran.append("charge")
        return "charged"

    def operation() -> str:
        attempt = current_attempt()
        store.fail(moment, method="record_step", times=2)
        for _ in range(2):
            with pytest.raises(StepNotStored):
                attempt.step("charge", charge)
        value = attempt.step("charge", charge)
        attempt.step("mail", ran.append, "mail")
        with pytest.raises(StepReused, match="two steps named 'charge'"):
            attempt.step("charge", charge)
        return value

    with Idempotency(store, caller="tester", policy=IMPATIENT, cache=False) as idem:
        assert idem.run("k", operation, request=None) == "charged"
        steps = [(step.name, step.position) for step in idem.read("k").steps]
    assert ran == ["charge", "mail"]
    assert steps == [("charge", 1), ("mail", 2)]


@pytest.mark.parametrize("error", [None, LookupError("later"), ValueError("for good")])
def test_an_attempt_that_has_ended_says_so(store: FaultyStore, error: Exception | None):
    """However it ended; nothing runs in it any more, and nobody is said to have taken it over."""
    kept: list[Attempt] = []

    def operation() -> None:
        kept.append(current_attempt())
        if error is not None:
            raise error

    policy = Policy(terminal=ValueError)
    with Idempotency(store, caller="tester", policy=policy, cache=False) as idem:
        if error is None:
            idem.run("k", operation, request=None)
        else:
            with pytest.raises(type(error)):
                idem.run("k", operation, request=None)
        (attempt,) = kept
        assert attempt.is_lost
        assert attempt.time_left == timedelta()
        ended = r"attempt 1 of 'k' has ended"
        with pytest.raises(ClaimLost, match=ended):
            attempt.raise_if_lost()
        with pytest.raises(InvalidInput, match=ended):
            attempt.step("charge", pytest.fail, "it ran")
        with pytest.raises(InvalidInput, match=ended):
            attempt.complete_in("a connection", 1)
        with pytest.raises((ClaimLost, InvalidInput), match=f"{ended}|no outbox"):
            attempt.outbox.stage("mail", "hello")


def test_a_step_after_a_completion_that_stands_is_refused_before_it_runs(tmp_path: Path):
    """The attempt has ended by the user's own commit, and the step would be told of a rival."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"

    def operation() -> None:
        attempt = current_attempt()
        with closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as connection:
            connection.execute("BEGIN")
            attempt.complete_in(connection, "done")
            connection.execute("COMMIT")
        with pytest.raises(InvalidInput, match="step 'mail' comes too late"):
            attempt.step("mail", pytest.fail, "it ran")

    with Idempotency(url, caller="tester") as idem:
        assert idem.run("k", operation, request=None) == "done"


def test_a_step_whose_transaction_has_committed_is_not_called_another_one(tmp_path: Path):
    """Perhaps the answer to that commit was lost; the next attempt gets its result."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    ran: list[str] = []

    def operation() -> None:
        attempt = current_attempt()
        for _ in range(2):
            with closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as shop:
                shop.execute("BEGIN")
                attempt.step("book", ran.append, "book", in_transaction=shop)
                shop.execute("COMMIT")
            if attempt.number == 2:
                return

    with Idempotency(url, caller="tester") as idem:
        with pytest.raises(StepReused, match=r"is done: the transaction .* has committed"):
            idem.run("k", operation, name="pay", request=None)
        idem.run("k", operation, name="pay", request=None)
    assert ran == ["book"]

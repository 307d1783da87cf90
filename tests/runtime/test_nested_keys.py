"""Body keys while secrets are replaced: each process knows its list, and all share one store."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from datetime import timedelta

import pytest

from retrysafe import (
    BodyKey,
    Idempotency,
    OperationFailed,
    OperationInFlight,
    OutcomeUnavailable,
    Policy,
    current_attempt,
)
from retrysafe.errors import SecretMissing
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock

OLD, NEW = "the old secret, 16 or more", "the new secret, 16 or more"
# Two processes of which both run at some time of a rotation, in either direction.
SIDE_BY_SIDE = [
    pytest.param(first, second, id=f"{len(first)}{len(second)}-{number}")
    for number, pair in enumerate(
        [
            ([OLD], [OLD, NEW]),
            ([OLD], [NEW, OLD]),
            ([OLD, NEW], [NEW, OLD]),
            ([NEW, OLD], [NEW]),
        ]
    )
    for first, second in (pair, pair[::-1])
]
POLICY = Policy(lease=timedelta(seconds=60))


class Died(BaseException):
    """Ends an attempt as the death of its process does: nothing is settled."""


class Declined(Exception):
    """A terminal failure."""


class Process:
    """One process with its own list of secrets; what it pays is on the shared list of payments."""

    def __init__(self, store, secret, payments, **policy):
        policy = POLICY.with_changes(**policy)
        self.idem = Idempotency(store, caller="acme", secret=secret, policy=policy, cache=False)
        self.act = lambda: None

        def pay(invoice: int) -> str:
            payments.append(invoice)
            return self.act() or "paid"

        self.pay = self.idem.once(key=BodyKey(), name="pay")(pay)

    def answer(self, invoice):
        return self.idem.answer_of(self.pay, invoice)


@pytest.fixture
def make(shared):
    payments, processes = [], []

    def made(secret, **policy):
        processes.append(Process(shared, secret, payments, **policy))
        return processes[-1]

    made.payments = payments
    yield made
    for process in processes:
        process.idem.close()


@pytest.mark.parametrize(("first", "second"), SIDE_BY_SIDE)
def test_a_retry_on_the_other_process_is_a_replay(make, first, second):
    """In both forms of the key the outcome is the same, and a third time as well."""
    one, other = make(first), make(second)
    assert one.pay(7) == "paid"
    assert other.pay(7) == "paid"
    assert one.answer(7).replayed
    assert other.answer(7).replayed
    assert make.payments == [7]
    assert other.pay(8) == "paid"
    assert make.payments == [7, 8]


@pytest.mark.parametrize(("first", "second"), SIDE_BY_SIDE)
def test_a_duplicate_beside_a_running_operation_is_in_flight(make, first, second):
    """Neither process starts what the other one runs; afterwards it is replayed."""
    one, other = make(first), make(second)
    seen = []

    def ask_the_other():
        with pytest.raises(OperationInFlight) as caught:
            other.pay(7)
        seen.append(caught.value)

    one.act = ask_the_other
    assert one.pay(7) == "paid"
    assert len(seen) == 1
    assert other.pay(7) == "paid"
    assert make.payments == [7]


@pytest.mark.parametrize(("first", "second"), SIDE_BY_SIDE)
def test_a_failure_for_good_is_the_same_failure_everywhere(make, first, second):
    one, other = (make(item, terminal=(Declined,)) for item in (first, second))

    def decline():
        raise Declined("no credit")

    one.act = other.act = decline
    for process in (one, other, one):
        with pytest.raises((Declined, OperationFailed), match="no credit"):
            process.pay(7)
    assert make.payments == [7]


@pytest.mark.parametrize(("first", "second"), SIDE_BY_SIDE)
def test_a_failure_that_frees_the_key_frees_all_its_forms(make, first, second):
    one, other = make(first), make(second)

    def fail():
        raise ConnectionError("again")

    one.act = fail
    with pytest.raises(ConnectionError):
        one.pay(7)
    assert other.pay(7) == "paid"
    assert one.answer(7).replayed
    assert make.payments == [7, 7]


@pytest.mark.parametrize(("first", "second"), SIDE_BY_SIDE)
def test_a_result_that_cannot_be_stored_is_done_everywhere(make, first, second):
    """Freed in one form only, it would run again."""
    one, other = make(first), make(second)
    one.act = threading.Lock
    one.pay(7)
    for process in (other, one):
        with pytest.raises(OutcomeUnavailable):
            process.pay(7)
    assert make.payments == [7]


@pytest.mark.parametrize(("first", "second"), SIDE_BY_SIDE)
def test_a_recorded_step_is_not_run_again_by_the_other_process(first, second):
    """After a crash, whichever form of the key the next attempt finds; with the same child key."""
    clock = ManualClock()
    store, steps, keys = MemoryStore(now_ms=clock), [], []

    def process(secret, *, dies):
        idem = Idempotency(store, caller="acme", secret=secret, policy=POLICY, cache=False)

        def pay(invoice: int) -> str:
            attempt = current_attempt()
            keys.append(attempt.child_key("charge"))
            value = attempt.step("charge", charge)
            if dies:
                raise Died
            return value

        def charge() -> str:
            steps.append("charge")
            return "charged"

        return idem, idem.once(key=BodyKey(), name="pay")(pay)

    idem, pay = process(first, dies=True)
    with idem, pytest.raises(Died):
        pay(7)
    clock.advance(timedelta(seconds=61))
    idem, pay = process(second, dies=False)
    with idem:
        if first[0] in second:
            assert pay(7) == "charged"
        else:
            # It does not know the secret that the first attempt made its child key with.
            with pytest.raises(SecretMissing):
                pay(7)
    assert steps == ["charge"]
    assert len(set(keys)) == 1


@pytest.mark.parametrize("commits", [True, False])
def test_a_business_write_is_one_commit_with_every_form_of_the_key(tmp_path, commits):
    """An outcome and a step in the user's transaction stand with it, or fall in all forms."""
    path, reserved = tmp_path / "shop.db", []
    lists = [[NEW, OLD], [OLD], [NEW]]
    processes = [Process(f"sqlite:///{path}", listed, []) for listed in lists]
    both, old, new = processes

    def write():
        attempt = current_attempt()
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER)")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO orders VALUES (1)")
            attempt.step("reserve", reserved.append, 1, in_transaction=connection)
            attempt.complete_in(connection, "paid")
            connection.execute("COMMIT" if commits else "ROLLBACK")
        if not commits:
            raise ConnectionError("again")

    both.act = write
    try:
        if commits:
            both.pay(7)
            assert [process.answer(7).replayed for process in processes] == [True, True, True]
        else:
            with pytest.raises(ConnectionError):
                both.pay(7)
            old.act = lambda: "paid by the old one"
            assert old.pay(7) == "paid by the old one"
            assert both.answer(7).replayed
            assert new.pay(8) == "paid"
    finally:
        for process in processes:
            process.idem.close()
    assert reserved == [1]

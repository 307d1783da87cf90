"""The atomic block: what is claimed, kept and undone, and in which order."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import pytest

from retrysafe.core.atomic.block import AtomicBlock
from retrysafe.core.events import Reporter
from retrysafe.core.keys.key import child_key
from retrysafe.core.keys.secret import NO_SECRETS, Secrets
from retrysafe.core.model import State
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.run_times import UNKNOWN_SECONDS
from retrysafe.core.settings import Settings
from retrysafe.core.values import codec
from retrysafe.errors import (
    AttemptsExhausted,
    ClaimLost,
    InvalidInput,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OutcomeMissing,
    OutcomeUnavailable,
    SecretMissing,
)
from retrysafe.stores.memory.store import MemoryStore
from tests.core.building import KEY, LEASE_MS, OTHER_MARK, TOKEN, call, record
from tests.core.driving import Heard, ManualClock, drive, ports_over
from tests.core.sample_types import Declined
from tests.core.transacting import FakeTransaction

WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=10))
SECRET = b"0123456789abcdef"


class Made:
    """A block with everything around it."""

    def __init__(self, transaction=None, made_call=None, secrets=NO_SECRETS):
        self.transaction = transaction or FakeTransaction()
        self.clock = ManualClock(self.transaction.database.clock)
        self.heard = Heard()
        ports = ports_over(
            None,
            self.clock,
            store=MemoryStore(),
            mint_token=lambda: TOKEN,
            report=Reporter(self.heard.hear),
        )
        settings = Settings(secrets=secrets)
        self.block = AtomicBlock(made_call or call(), self.transaction, ports, settings)

    def enter(self):
        drive(self.block.enter())
        return self

    def leave(self, error=None):
        drive(self.block.leave(error))
        return self

    def complete(self, value):
        drive(self.block.complete(value))
        return self

    @property
    def kinds(self):
        return [event.kind.value for event in self.heard]


def settled_transaction(value=7):
    """A transaction on a database where the first run is over."""
    made = Made().enter().complete(value).leave()
    return FakeTransaction(made.transaction.database)


def pending(transaction, **changes):
    """Puts a leased owner's record into the database."""
    now_ms = transaction.database.clock.now_ms()
    fields = {"token": b"L" * 16, "lease_ends_at_ms": now_ms + LEASE_MS, **changes}
    transaction.database.record = record(**fields)
    return transaction


def test_a_block_claims_settles_and_keeps():
    """One run: locked before it claims, settled before it is kept, and never undone."""
    made = Made().enter()
    assert made.block.replayed is False
    assert made.block.attempt == 1
    made.complete({"id": 1})
    assert made.block.value == {"id": 1}
    made.leave()
    assert made.transaction.calls == ["begin", "lock", "claim", "settle", "keep"]
    assert made.transaction.database.record.state is State.SUCCEEDED
    assert made.block.value == {"id": 1}
    assert made.kinds == ["claimed", "completed"]


@pytest.mark.parametrize("value", [7, None, False, {}, b""])
def test_a_settled_key_is_replayed_and_its_lock_is_given_back_at_once(value):
    """A reader of an outcome must not look like a running owner while its transaction lasts."""
    transaction = settled_transaction(value)
    made = Made(transaction).enter()
    assert made.block.replayed is True
    assert made.block.value == value
    assert made.block.attempt == 1
    assert transaction.calls == ["begin", "lock", "claim", "undo"]
    made.leave()
    assert transaction.calls == ["begin", "lock", "claim", "undo"]
    assert made.kinds == ["replayed"]


def test_a_settled_key_is_replayed_although_somebody_holds_the_lock():
    """Two readers at once: the second does not call the first an owner."""
    transaction = settled_transaction()
    transaction.locks = deque([False])
    made = Made(transaction).enter()
    assert made.block.value == 7
    assert transaction.calls == ["begin", "lock", "look", "undo"]


@pytest.mark.parametrize("locks", [[True], [False]])
def test_another_request_is_refused_before_anything_is_written(locks):
    """Whoever holds the lock, the stored outcome is not shown to a different request."""
    transaction = settled_transaction()
    transaction.locks = deque(locks)
    made = Made(transaction, call(OTHER_MARK, operation="shop.refund"))
    with pytest.raises(KeyReused, match=r"first used for the operation 'shop\.pay'") as caught:
        made.enter()
    assert caught.value.key == KEY.text
    assert transaction.calls[-1] == "undo"
    assert made.kinds == ["mismatched"]


def test_a_rival_transaction_is_refused_at_once():
    """Without a wait the lock is asked for once, and the caller is told when to come back."""
    transaction = FakeTransaction(locks=deque([False]))
    made = Made(transaction)
    with pytest.raises(OperationInFlight) as caught:
        made.enter()
    assert caught.value.retry_after == timedelta(seconds=UNKNOWN_SECONDS)
    assert transaction.calls == ["begin", "lock", "look", "undo"]
    assert made.kinds == ["in flight"]


def test_a_waiting_rival_claims_when_the_lock_is_free():
    """The wait is for the lock; what the rival committed is read after it."""
    transaction = FakeTransaction(locks=deque([False, True]))
    Made(transaction, call(policy=WAITING)).enter()
    assert transaction.calls == ["begin", "lock", "lock 10", "claim"]


def test_a_wait_for_a_rival_that_runs_out():
    """The wait is bounded by the policy, and nothing but the undoing follows it."""
    transaction = FakeTransaction(locks=deque([False, False]))
    made = Made(transaction, call(policy=WAITING))
    with pytest.raises(OperationInFlight):
        made.enter()
    assert transaction.calls == ["begin", "lock", "lock 10", "undo"]
    assert made.kinds == ["wait timed out"]


def test_a_leased_owner_is_in_flight():
    """As long as nothing is known of the operation, its duplicate comes back in a second."""
    transaction = pending(FakeTransaction())
    with pytest.raises(OperationInFlight) as caught:
        Made(transaction).enter()
    assert caught.value.retry_after == timedelta(seconds=UNKNOWN_SECONDS)


def test_a_leased_owner_is_polled_until_it_ends():
    """Under READ COMMITTED the end of a leased run shows in the next read."""
    transaction = pending(FakeTransaction())
    made = Made(transaction, call(policy=WAITING))
    done = settled_transaction("leased").database
    made.clock.meanwhile.append(lambda: None)
    made.clock.meanwhile.append(lambda: vars(transaction.database).update(vars(done)))
    made.enter()
    assert made.block.value == "leased"
    assert made.clock.slept == [0.02, 0.03]


def test_a_wait_for_a_leased_owner_runs_out():
    """No longer than the policy's limit in all."""
    made = Made(pending(FakeTransaction()), call(policy=WAITING))
    with pytest.raises(OperationInFlight):
        made.enter()
    assert sum(made.clock.slept) == pytest.approx(10)
    assert made.kinds == ["wait timed out"]


def test_a_leased_owner_is_not_waited_for_where_its_end_cannot_be_seen():
    """A snapshot that stays the same would show a running owner for ever."""
    made = Made(pending(FakeTransaction(sees=False)), call(policy=WAITING))
    with pytest.raises(OperationInFlight):
        made.enter()
    assert made.clock.slept == []


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"lease_ends_at_ms": 0}, "taken over"),
        ({"state": State.RELEASED, "expires_at_ms": 10**12}, "claimed"),
    ],
)
def test_a_free_record_is_taken_over(changes, kind):
    """An abandoned and a released key go on with the next attempt."""
    made = Made(pending(FakeTransaction(), **changes)).enter()
    assert made.block.attempt == 2
    assert made.kinds == [kind]


def test_used_up_attempts_are_told_and_nothing_is_written():
    """What killed its workers does not kill this one, and the record stays as it was."""
    transaction = pending(FakeTransaction(), attempt=10, lease_ends_at_ms=0)
    made = Made(transaction)
    with pytest.raises(AttemptsExhausted):
        made.enter()
    assert transaction.database.record.attempt == 10
    assert made.kinds == ["exhausted"]


def test_attempts_that_freed_the_key_are_not_used_up():
    """They ended with a word, so the block runs after any number of them."""
    changes = {"attempt": 10, "releases": 9, "state": State.RELEASED, "expires_at_ms": 10**12}
    made = Made(pending(FakeTransaction(), **changes)).enter()
    assert made.block.attempt == 11


def test_a_block_without_an_outcome_is_undone():
    """A forgotten complete() must not commit the business write without its outcome."""
    made = Made().enter()
    with pytest.raises(OutcomeMissing, match="complete"):
        made.leave()
    assert made.transaction.calls[-1] == "undo"
    assert made.transaction.database.record is None


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_exception_undoes_the_block(is_complete):
    """Also when the outcome was given already: the block is all or nothing."""
    made = Made().enter()
    if is_complete:
        made.complete(1)
    made.leave(Declined("no"))
    assert made.transaction.calls[-1] == "undo"
    assert made.transaction.database.record is None


def test_an_undoing_that_fails_does_not_hide_the_reason():
    """The connection may be gone, which is why the block is undone in the first place."""
    transaction = FakeTransaction(undo_error=OSError("gone"))
    made = Made(transaction).enter()
    with pytest.raises(OutcomeMissing):
        made.leave()


def test_a_stored_failure_is_raised_on_entering():
    """fail() stores it for good; every later block raises it as the type that it was."""
    made = Made().enter()
    drive(made.block.fail(Declined("no funds")))
    made.leave()
    assert made.kinds == ["claimed", "failed"]
    with pytest.raises(OutcomeMissing):
        Made().enter().block.value  # noqa: B018 — asking is the point.
    again = Made(FakeTransaction(made.transaction.database), call(policy=Policy(terminal=Declined)))
    with pytest.raises(Declined, match="no funds"):
        again.enter()
    assert again.transaction.calls[-1] == "undo"


def test_an_outcome_that_is_no_longer_stored_is_not_run_again():
    transaction = settled_transaction()
    transaction.database.payload = None
    with pytest.raises(OutcomeUnavailable):
        Made(transaction).enter()
    transaction.database.record.state = State.FAILED
    with pytest.raises(OperationFailed, match="its failure is no longer stored"):
        Made(transaction).enter()


def test_a_withheld_outcome_is_not_run_again():
    transaction = settled_transaction()
    transaction.database.payload = codec.withheld("too large")
    with pytest.raises(OutcomeUnavailable, match="too large"):
        Made(transaction).enter()


def test_a_claim_that_was_rolled_back_inside_the_block_is_lost():
    """Completing after a rollback would store an outcome whose business write is gone."""
    made = Made().enter()
    made.transaction.database.record = None
    with pytest.raises(ClaimLost):
        made.complete(1)
    assert made.kinds == ["claimed", "lost"]


@pytest.mark.parametrize("value", [object(), "x" * 2_000_000])
def test_an_outcome_that_cannot_be_stored_is_refused(value):
    """The transaction can still be undone, so the caller is told instead of a withheld outcome."""
    made = Made().enter()
    with pytest.raises(InvalidInput):
        made.complete(value)
    assert "settle" not in made.transaction.calls


def test_an_outcome_is_given_once_and_inside():
    """Twice, on a replay, or after the block: each is a mistake that is told."""
    made = Made()
    with pytest.raises(InvalidInput):
        made.complete(1)
    made.enter().complete(1)
    with pytest.raises(InvalidInput):
        made.complete(2)
    with pytest.raises(InvalidInput):
        made.enter()
    replay = Made(settled_transaction()).enter()
    with pytest.raises(InvalidInput, match="replay"):
        replay.complete(1)


def test_child_keys_are_those_of_the_key():
    made = Made(secrets=Secrets(SECRET))
    assert made.block.child_key("receipt") == child_key(SECRET, KEY, "receipt")
    with pytest.raises(SecretMissing):
        Made().block.child_key("receipt")

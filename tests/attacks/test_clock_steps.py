"""The clock of the store is stepped, back and forward, under crashed and running operations.

Attacked with steps of hours and of seconds. What must hold: a step back takes no key from a running
operation, and nobody is sent away for longer than a lease; a step forward past the lease runs the
operation twice at most, with one outcome, and the first owner is told.
"""

from __future__ import annotations

import re
from datetime import timedelta

import psycopg
import pytest

from retrysafe import ClaimLost, Idempotency, OperationInFlight, Policy
from retrysafe.core.model import Decision
from retrysafe.errors import OperatorRefused
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.sqlite import SqliteStore
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import request

LEASE = timedelta(seconds=30)
STEP = timedelta(hours=3)
KEY = "k"


class Local:
    """Memory, or a file of SQLite, with a clock of the test's."""

    def __init__(self, path):
        self._clock = ManualClock()
        self._path = path
        self._memory = MemoryStore(now_ms=self._clock)

    def open(self):
        if self._path is None:
            return self._memory
        return SqliteStore(self._path, now_ms=self._clock)

    def back(self, by):
        self._clock.jump_back(by)

    def forward(self, by):
        self._clock.advance(by)


class Postgres:
    """A server's clock stays; instead, all that it has written moves the other way."""

    def __init__(self, url):
        self._url = url

    def open(self):
        return self._url

    def back(self, by):
        self._move(by)

    def forward(self, by):
        self._move(-by)

    def _move(self, by):
        schema = re.search(r"schema=(\w+)", self._url)[1]
        ms = int(by.total_seconds() * 1000)
        with psycopg.connect(self._url.partition("?")[0], autocommit=True) as connection:
            connection.execute(
                f"UPDATE {schema}.keys SET lease_ends_at_ms = lease_ends_at_ms + {ms},"
                f" claimed_at_ms = claimed_at_ms + {ms}, expires_at_ms = expires_at_ms + {ms}"
            )
            connection.execute(
                f"UPDATE {schema}.renewals SET lease_ends_at_ms = lease_ends_at_ms + {ms}"
            )


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def stores(request, tmp_path):
    if request.param == "postgres":
        return Postgres(request.getfixturevalue("migrated_url"))
    return Local(tmp_path / "keys.db" if request.param == "sqlite" else None)


def process(stores):
    return Idempotency(stores.open(), caller="a", policy=Policy(lease=LEASE), cache=False)


def run(idem, operation):
    return idem.run(KEY, operation, request=None, name="charge")


def crash(idem):
    """Leaves a claim behind, as a process does that is killed in the middle."""

    class Killed(BaseException):
        pass

    def die():
        raise Killed

    with pytest.raises(Killed):
        run(idem, die)


def test_nobody_is_sent_away_for_longer_than_a_lease(stores):
    """However far the clock was set back under the claim of a crashed owner."""
    with process(stores) as idem:
        crash(idem)
        stores.back(STEP)
        with pytest.raises(OperationInFlight) as told:
            run(idem, lambda: 2)
        assert told.value.retry_after <= LEASE
        seconds = float(re.search(r"its lease ends in ([\d.]+) s", str(told.value))[1])
        assert seconds <= LEASE.total_seconds()


def test_a_crashed_key_is_free_when_the_clock_is_right_again(stores):
    """By itself, a lease after the crash; until then it seems to run."""
    with process(stores) as idem:
        crash(idem)
        stores.back(STEP)
        with pytest.raises(OperatorRefused):
            idem.release(KEY)
        stores.forward(STEP + LEASE)
        assert run(idem, lambda: 2) == 2


def test_an_operator_frees_a_crashed_key_before_that(stores):
    """By force, because the lease seems to hold."""
    with process(stores) as idem:
        crash(idem)
        stores.back(STEP)
        idem.release(KEY, force=True)
        assert run(idem, lambda: 2) == 2


def test_a_running_operation_keeps_its_key_over_a_step_back(stores):
    """Its rivals are refused, and its outcome is what they get afterwards."""
    with process(stores) as idem, process(stores) as other:

        def operation():
            stores.back(STEP)
            with pytest.raises(OperationInFlight):
                run(other, lambda: 2)
            return 1

        assert run(idem, operation) == 1
        assert run(other, lambda: 2) == 1


def test_a_short_step_forward_changes_nothing(stores):
    """What is left of the lease covers it."""
    with process(stores) as idem, process(stores) as other:

        def operation():
            stores.forward(LEASE / 2)
            with pytest.raises(OperationInFlight):
                run(other, lambda: 2)
            return 1

        assert run(idem, operation) == 1
        assert run(other, lambda: 2) == 1


def test_a_step_forward_past_the_lease_has_one_outcome(stores):
    """Both run, which nobody can prevent; the first owner is told, and one outcome stands."""
    with process(stores) as idem, process(stores) as other:

        def operation():
            stores.forward(STEP)
            assert run(other, lambda: 2) == 2
            return 1

        with pytest.raises(ClaimLost):
            run(idem, operation)
        assert run(idem, lambda: 3) == 2


def test_a_repeated_claim_counts_on_no_more_than_a_lease():
    """The owner whose first answer was lost renews in time, whatever the clock says."""
    stores = Local(None)
    store = stores.open()
    wish = request(token=b"a token of a try", lease_ms=1_000)
    run_sync(store.commit([wish], []))
    stores.back(STEP)
    ((answer,), _) = run_sync(store.commit([wish], []))
    assert (answer.decision, answer.remaining_ms) == (Decision.CONFIRM, 1_000)

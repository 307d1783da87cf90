"""One property per guard of recovery; as `test_properties`, plain and short."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from retrysafe import Idempotency, Policy
from retrysafe.core.recovery import PAGE_LIMIT
from retrysafe.errors import ArgumentsNotStorable
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition, MemoryStore, SqliteStore
from retrysafe.testing import ManualClock
from retrysafe.workers import WorkerPolicy

POLICY = Policy(lease=timedelta(seconds=30), arguments_limit_bytes=100)
LEASE = timedelta(seconds=30)
NO_BACK_OFF = WorkerPolicy(back_off=timedelta(0))


class Stop(BaseException):
    """The end of the process."""


class Desk:
    """A face whose store has a clock that stands still, and what its operation really did."""

    def __init__(self, store, clock: ManualClock) -> None:
        self.clock = clock
        self.store = store
        self.ran: list[object] = []
        self.endings: list[object] = []
        self.idem = Idempotency(store, caller="shop", policy=POLICY, cache=False)

        @self.idem.resumable("pay")
        def pay(*args):
            self.ran.append(args)
            ending = self.endings.pop(0) if self.endings else None
            if isinstance(ending, BaseException):
                raise ending
            if callable(ending):
                ending()
            return "paid"

        self.pay = pay

    def abandon(self, key: str = "order", *args: object) -> None:
        """A first run that ends with its process; its lease runs out."""
        self.endings.append(Stop())
        with pytest.raises(Stop):
            self.idem.run(key, self.pay, *args, request=list(args))
        self.clock.advance(LEASE)
        self.ran.clear()

    def work(self):
        return self.idem.worker(NO_BACK_OFF).run_once()["recovery"]


@contextmanager
def desk() -> Iterator[Desk]:
    clock = ManualClock()
    made = Desk(MemoryStore(now_ms=clock), clock)
    with made.idem:
        yield made


@contextmanager
def durable_desk() -> Iterator[Desk]:
    clock = ManualClock()
    with tempfile.TemporaryDirectory(prefix="retrysafe-") as folder:
        made = Desk(SqliteStore(Path(folder) / "keys.db", now_ms=clock), clock)
        with made.idem:
            yield made
        run_sync(made.store.close())


def test_a_worker_never_takes_over_from_a_successor():
    """Between its look and its claim somebody else has taken over, and was abandoned in turn."""
    with desk() as made:
        made.abandon()
        (seen,) = run_sync(made.store.list_resumable(10, b"", ("pay",)))
        made.abandon()
        run = made.idem._calls.operations.resumables.by_name["pay"].prepare(seen)
        with pytest.raises(Exception, match="nothing was run"):
            run_sync(run())
        assert made.ran == []


def test_a_worker_never_starts_a_new_life():
    """The key is gone by now: what it stood for was done, and forgotten."""
    with desk() as made:
        made.abandon()
        (seen,) = run_sync(made.store.list_resumable(10, b"", ("pay",)))
        made.idem.run("order", made.pay, request=[])
        made.clock.advance(timedelta(days=2))
        assert made.idem.sweep().keys == 1
        made.ran.clear()
        run = made.idem._calls.operations.resumables.by_name["pay"].prepare(seen)
        with pytest.raises(Exception, match="nothing was run"):
            run_sync(run())
        assert made.ran == []


def test_a_failure_in_a_worker_is_tried_again():
    """Nobody heard of it, so nobody but the next worker would."""
    with desk() as made:
        made.abandon()
        made.endings.append(ConnectionError("down"))
        assert made.work().failed == 1
        made.clock.advance(LEASE)
        assert made.work().resumed == 1


def test_arguments_over_the_limit_are_refused():
    with desk() as made:
        with pytest.raises(ArgumentsNotStorable):
            made.idem.run("order", made.pay, "x" * 100)
        assert (made.ran, made.idem.read("order")) == ([], None)


def test_a_new_life_has_no_old_arguments():
    """What another request was called with must never be run for this one."""
    with durable_desk() as made:
        made.endings.append(ConnectionError("down"))
        with pytest.raises(ConnectionError):
            made.idem.run("order", made.pay, "old")
        made.clock.advance(timedelta(days=2))
        with pytest.raises(Stop):
            made.idem.run("order", _dying, name="other", request="new")
        assert made.idem.read("order").arguments is None


def _dying():
    raise Stop


def test_arguments_go_with_their_key():
    with durable_desk() as made:
        made.endings.append(ConnectionError("down"))
        with pytest.raises(ConnectionError):
            made.idem.run("order", made.pay, "personal")
        made.clock.advance(timedelta(days=2))
        made.idem.sweep()
        connection = made.store._connections.writer
        assert connection.execute("SELECT count(*) FROM retrysafe_arguments").fetchone() == (0,)


def test_arguments_of_an_earlier_life_are_not_used():
    """Left behind by a release that does not know them, they belong to no key."""
    with durable_desk() as made:
        made.abandon("order", "old")
        # As a release of before would sweep, and claim the key for another request.
        made.store._connections.writer.execute("DELETE FROM retrysafe_keys")
        made.clock.advance(LEASE)
        with pytest.raises(Stop):
            made.idem.run("order", _dying, name="pay-later", request="new")
        made.clock.advance(LEASE)
        assert run_sync(made.store.list_resumable(10, b"", ("pay", "pay-later"))) == []
        assert made.idem.read("order").arguments is None


def test_what_cannot_be_resumed_holds_up_nobody():
    """Pages full of keys whose arguments cannot be used any more lie before ours."""
    with desk() as made:
        made.idem.resumable("changed")(_dying)
        for number in range(2 * PAGE_LIMIT):
            with pytest.raises(Stop):
                made.idem.run(f"k-{number}", _dying)
        changed = made.idem._calls.operations.resumables.by_name["changed"]
        changed._signature = inspect.signature(len)
        for number in range(5):
            made.abandon(f"order-{number}")
        assert made.work().resumed == 5


def test_unreadable_arguments_use_up_no_attempt():
    """Nothing is claimed before it is clear that the operation can be called."""
    with desk() as made:
        made.abandon("order", 1, 2)
        resumable = made.idem._calls.operations.resumables.by_name["pay"]
        resumable._signature = resumable._signature.replace(parameters=[])
        made.work()
        stored = made.idem.read("order")
        assert (stored.condition, stored.record.attempt) == (Condition.ABANDONED, 1)


def test_attempts_of_an_operation_that_fails_are_spaced():
    """Else a provider that is down would use them up within minutes."""
    with desk() as made:
        made.abandon()
        made.endings += [ConnectionError("down")] * 3
        assert made.work().failed == 1
        made.clock.advance(LEASE)
        default = made.idem.worker()
        assert default.run_once()["recovery"].failed == 0
        made.clock.advance(timedelta(seconds=30))
        assert default.run_once()["recovery"].failed == 1

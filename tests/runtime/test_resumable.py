"""Operations that a worker can finish without their caller, as users declare them; both faces."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal

import pytest

from retrysafe import (
    GLOBAL,
    AsyncIdempotency,
    FingerprintRule,
    Idempotency,
    InFlight,
    InvalidInput,
    Key,
    KeyReused,
    Policy,
    current_attempt,
)
from retrysafe.core.model import Payload
from retrysafe.errors import ArgumentsNotStorable
from retrysafe.observe import Event, EventKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition, MemoryStore, SqliteStore
from retrysafe.testing import ManualClock

LEASE = timedelta(seconds=30)


class Stop(BaseException):
    """The end of a process."""


@dataclass(frozen=True)
class Order:
    number: int
    price: Decimal


class Shop:
    """One face over a store whose clock stands still, and what the operations really did."""

    def __init__(self, subject, store=None, **options) -> None:
        self.clock = ManualClock()
        self.store = store(self.clock) if store else MemoryStore(now_ms=self.clock)
        self.heard: list[Event] = []
        options = {"caller": "shop", "cache": False, **options}
        self.subject = subject(self.store, observers=[self.heard.append], **options)
        self.ran: list[object] = []

    def operation(self, function):
        """The function as this face takes it."""
        as_async = getattr(self.subject, "_as_async", None)
        return function if as_async is None else as_async(function)

    def declare(self, function, name=None, **options):
        return self.subject.idem.resumable(name, **options)(self.operation(function))

    def crash(self, *args, **options) -> None:
        with pytest.raises(Stop):
            self.subject.run(*args, **options)

    def wait(self, by: timedelta = LEASE) -> None:
        self.clock.advance(by)

    def work(self):
        """What a worker does now."""
        runner = getattr(self.subject, "_runner", None)
        if runner is None:
            return self.subject.idem.worker().run_once()

        async def work():
            return await self.subject.idem.worker().run_once()

        return runner.run(work())

    def read(self, key="order"):
        return self.subject.call("read", key)


@pytest.fixture
def shop(subject):
    return lambda *args, **options: Shop(subject, *args, **options)


def dying(shop, times: int = 1):
    """An operation whose process ends in its first runs."""

    def pay(*args, **kwargs):
        shop.ran.append((args, kwargs))
        if len(shop.ran) <= times:
            raise Stop
        return {"attempt": current_attempt().number}

    return pay


def stored_arguments(store: MemoryStore) -> dict[bytes, Payload]:
    return store._arguments


# Finished by a worker.


def test_an_operation_is_finished_without_its_caller(shop, tmp_path):
    """On a durable store: the arguments are stored, and whoever comes later gets the outcome."""
    made = shop(lambda clock: SqliteStore(tmp_path / "keys.db", now_ms=clock))
    pay = made.declare(dying(made), "pay")
    made.crash("order", pay, 7, "eur")
    made.wait(LEASE - timedelta(milliseconds=1))
    assert made.work()["recovery"].resumed == 0
    made.wait(timedelta(milliseconds=1))
    assert made.work()["recovery"].resumed == 1
    assert made.ran == [((7, "eur"), {})] * 2
    answer = made.subject.answer("order", pay, 7, "eur")
    assert (answer.value, answer.replayed) == ({"attempt": 2}, True)
    assert made.work()["recovery"].resumed == 0
    run_sync(made.store.close())


def test_what_a_decorated_function_was_called_with_is_what_it_is_resumed_with(shop):
    """Positional, by name, left out of the request; defaults are the function's own."""
    made = shop()

    def pay(order, amount=5, *parts, currency="eur", trace=None):
        made.ran.append((order, amount, parts, currency, trace))
        if len(made.ran) == 1:
            raise Stop
        return "paid"

    once = made.subject.once(pay, key="order", ignore=["trace"], resumable=True)
    with pytest.raises(Stop):
        once("o-1", 7, "a", "b", trace="t-1")
    made.wait()
    assert made.work()["recovery"].resumed == 1
    assert made.ran == [("o-1", 7, ("a", "b"), "eur", "t-1")] * 2
    assert once("o-1", 7, "a", "b", trace="t-2") == "paid"
    with pytest.raises(KeyReused):
        once("o-1", 8)


def test_arguments_keep_their_types(shop):
    """Values come back equal and of the same types, dataclasses of the annotations included."""
    made = shop()

    def pay(order: Order, parts: tuple[int, ...], *, at: timedelta):
        made.ran.append((order, parts, at))
        if len(made.ran) == 1:
            raise Stop

    once = made.subject.once(pay, key=lambda order, *_, **__: str(order.number), resumable=True)
    with pytest.raises(Stop):
        once(Order(7, Decimal("1.50")), (1, 2), at=timedelta(hours=1))
    made.wait()
    made.work()
    assert made.ran == [(Order(7, Decimal("1.50")), (1, 2), timedelta(hours=1))] * 2


def test_a_partial_of_a_resumable_function_is_resumable(shop):
    """With everything that it is called with."""
    made = shop()
    pay = made.declare(dying(made), "pay")
    made.crash("order", functools.partial(pay, 1, c=3), 2)
    made.wait()
    made.work()
    assert made.ran == [((1, 2), {"c": 3})] * 2


def test_a_retry_uses_its_own_arguments(shop):
    """What is stored is for workers only."""
    made = shop()

    def pay(order, trace):
        made.ran.append(trace)
        if len(made.ran) == 1:
            raise Stop

    once = made.subject.once(pay, key="order", ignore=["trace"], resumable=True)
    with pytest.raises(Stop):
        once("o-1", "first")
    made.wait()
    once("o-1", "second")
    assert made.ran == ["first", "second"]


def test_an_operation_of_another_rule_is_resumed_and_still_guarded(shop):
    """The fingerprint is the record's own, under the rule that it was made with."""
    made = shop(fingerprint=FingerprintRule(version=1))
    pay = made.declare(dying(made), "pay")
    made.crash("order", pay, {"amount": 7, "at": "now"})
    made.wait()
    newer = FingerprintRule(version=2, exclude=["/0/at"], previous=[FingerprintRule(version=1)])
    idem = made.subject.idem
    idem._calls.settings = replace(idem._calls.settings, fingerprint=newer)
    made.work()
    stored = made.read()
    assert (stored.condition, stored.record.rule) == (Condition.SUCCEEDED, 1)
    assert made.subject.answer("order", pay, {"amount": 7, "at": "now"}).replayed
    with pytest.raises(KeyReused):
        made.subject.run("order", pay, {"amount": 8, "at": "now"})


def test_policy_and_types_of_the_declaration_count_for_run(shop):
    """Unless the call brings its own."""
    made = shop()
    short = Policy(lease=timedelta(seconds=1), in_flight=InFlight.WAIT)
    pay = made.declare(lambda: Order(1, Decimal(2)), "pay", policy=short, returns=Order)
    assert made.subject.run("a", pay) == Order(1, Decimal(2))
    record = made.read("a").record
    assert record.lease_ends_at_ms - record.claimed_at_ms == 1_000
    assert record.operation == "pay"
    made.subject.run("b", pay, policy=Policy(), returns=Order)
    record = made.read("b").record
    assert record.lease_ends_at_ms - record.claimed_at_ms == 30_000


def test_a_function_is_declared_under_its_own_name(shop):
    made = shop()
    pay = made.declare(dying(made, 0))
    made.subject.run("order", pay)
    assert made.read().record.operation.endswith("dying.<locals>.pay")
    assert made.subject.idem._calls.operations.resumables.by_name.keys() == {
        made.read().record.operation
    }


def test_global_keys_are_resumed_as_such(shop):
    made = shop(caller=GLOBAL)
    pay = made.declare(dying(made), "pay")
    made.crash("order", pay)
    made.wait()
    made.work()
    assert made.read(Key("order", caller=GLOBAL)).condition is Condition.SUCCEEDED


# Not resumed.


def test_what_is_not_resumable_is_reported_once_and_stays_claimable(shop):
    made = shop()
    made.crash("order", dying(made), name="plain")
    made.wait()
    for _ in range(3):
        assert made.work()["abandoned"].reported in (0, 1)
    told = [item for item in made.heard if item.kind is EventKind.ABANDONED]
    # Each of these workers is a new one and reports for itself.
    assert [(item.key.text, item.operation) for item in told] == [("order", "plain")] * 3
    assert made.read().condition is Condition.ABANDONED
    assert made.subject.run("order", dying(made), name="plain") == {"attempt": 2}


def test_arguments_that_no_longer_fit_are_reported_and_use_up_no_attempt(shop):
    """A deploy changed the function; the old release, or a retry, may still finish."""
    made = shop()
    pay = made.declare(dying(made), "pay")
    made.crash("order", pay, 1, 2)
    made.wait()
    del made.subject.idem._calls.operations.resumables.by_name["pay"]
    made.declare(lambda only: None, "pay")
    assert made.work()["recovery"].resumed == 0
    (told,) = [item for item in made.heard if item.kind is EventKind.ABANDONED]
    assert "no longer fit" in told.detail
    assert (made.read().condition, made.read().record.attempt) == (Condition.ABANDONED, 1)


def test_a_failure_in_a_worker_is_logged_and_tried_again(shop, caplog):
    """Nobody called, so nobody else would hear of it; and nobody else would try again."""
    made = shop()

    def pay():
        made.ran.append("run")
        if len(made.ran) == 1:
            raise Stop
        if len(made.ran) == 2:
            raise ConnectionError("the provider is down")
        return "paid"

    made.crash("order", made.declare(pay, "pay"))
    made.wait()
    assert made.work()["recovery"].failed == 1
    (logged,) = [item for item in caplog.records if item.exc_info]
    assert "resuming key 'order' of caller 'shop' failed" in logged.message
    assert "the provider is down" in caplog.text
    assert made.read().condition is Condition.RUNNING
    made.wait(2 * LEASE - timedelta(milliseconds=1))
    assert made.work()["recovery"].resumed == 0
    made.wait(timedelta(milliseconds=1))
    assert made.work()["recovery"].resumed == 1
    assert made.read().outcomes[-1].attempt == 3


# Nothing is stored that was not asked for.


def test_only_resumable_operations_store_their_arguments(shop):
    made = shop()
    made.declare(dying(made, 0), "pay")
    made.subject.run("a", dying(made, 0), "secret", name="other")
    made.subject.once(lambda number: number, key="number", name="third")(1)
    assert stored_arguments(made.store) == {}


def test_arguments_go_when_the_operation_has_ended(shop):
    """With its outcome, in one transaction."""
    made = shop()
    pay = made.declare(dying(made, 0), "pay")
    made.subject.run("order", pay, 7)
    assert made.read().arguments is None
    assert stored_arguments(made.store) == {}


# Refused before anything runs.


def _is_untouched(made) -> bool:
    return made.ran == [] and made.read() is None


def test_arguments_over_the_limit_are_refused(shop):
    """To the byte, and before anything is claimed; the limit is the policy's."""
    made = shop(policy=Policy(arguments_limit_bytes=20))
    pay = made.declare(dying(made, 0), "pay")
    fitting = "x" * (20 - len('[[""],{}]'))
    with pytest.raises(ArgumentsNotStorable, match="21 bytes where the limit is 20"):
        made.subject.run("order", pay, fitting + "x")
    assert _is_untouched(made)
    made.subject.run("order", pay, fitting)
    assert len(made.ran) == 1
    once = made.subject.once(lambda x: x, key="x", name="other", resumable=True)
    with pytest.raises(ArgumentsNotStorable):
        once("x" * 20)


def test_arguments_without_a_stored_form_are_refused(shop):
    """Also those that are not part of the request: the operation could not be called."""
    made = shop()
    pay = made.declare(dying(made, 0), "pay")
    with pytest.raises(ArgumentsNotStorable, match="inside the operation"):
        made.subject.run("order", pay, object(), request="order")
    assert _is_untouched(made)
    once = made.subject.once(
        lambda number, client: made.ran.append(number),
        key="number",
        name="other",
        ignore=["client"],
        resumable=True,
    )
    with pytest.raises(ArgumentsNotStorable):
        once(1, object())
    assert made.ran == []


def test_declarations_that_no_worker_could_use_are_refused(shop):
    made = shop()
    declare = made.subject.idem.resumable
    pay = made.declare(dying(made, 0), "pay")
    with pytest.raises(InvalidInput, match="another resumable operation is called 'pay'"):
        made.declare(dying(made, 0), "pay")
    with pytest.raises(InvalidInput, match="found by its name"):
        made.declare(lambda: None)
    with pytest.raises(InvalidInput, match="found by its name"):
        made.declare(dying(made, 0), "")
    for name in ("pay\x00later", "pay\udc80"):
        with pytest.raises(InvalidInput, match="not every store can keep"):
            made.declare(dying(made, 0), name)
    with pytest.raises(InvalidInput, match=r"write @idem\.resumable"):
        declare(pay)

    def method(self):
        """Would need an object."""

    with pytest.raises(InvalidInput, match="no object to call it on"):
        made.declare(method, "method")
    with pytest.raises(InvalidInput, match="no object to call it on"):
        made.subject.once(method, key=lambda self: "x", resumable=True)
    with pytest.raises(InvalidInput, match="would not find it as 'other'"):
        made.subject.run("order", pay, name="other")
    made.subject.run("order", pay, name="pay")
    assert made.subject.idem._calls.operations.resumables.by_name.keys() == {"pay"}


def test_generators_and_functions_of_the_other_kind_are_refused():
    def generator():
        yield

    async def suspending():
        """For event loops."""

    with Idempotency(MemoryStore(), caller="shop") as idem:
        with pytest.raises(InvalidInput, match="generator"):
            idem.resumable("g")(generator)
        with pytest.raises(InvalidInput, match="use AsyncIdempotency"):
            idem.resumable("s")(suspending)
    with pytest.raises(InvalidInput, match="write async def"):
        AsyncIdempotency(MemoryStore(), caller="shop").resumable("p")(lambda: None)


def test_objects_that_cannot_be_looked_up_are_simply_not_resumable(shop):
    """A callable without a hash cannot have been declared."""

    class Callable:
        __hash__ = None

        def __call__(self):
            return 1

    made = shop()
    made.declare(dying(made, 0), "pay")
    assert made.subject.idem._calls.operations.resumables.of(Callable(), ()) is None

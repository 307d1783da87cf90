"""Faults happen where they were asked for, with the effect that was asked for, and are logged."""

from types import SimpleNamespace

import pytest

from retrysafe import StoreUnavailable
from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import Decision, OperatorCommand, SettleKind, Step, StepWrite
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.threaded import ThreadedStore
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, ManualClock, Moment
from retrysafe.testing.faults import METHODS
from retrysafe.testing.suite.probe import ACTIVE_MS, KEY, RESULT, Probe, key_of, request


@pytest.fixture
def faulty():
    clock = ManualClock()
    return FaultyStore(MemoryStore(now_ms=clock))


@pytest.fixture
def probe(faulty):
    return Probe(faulty, faulty._store._now_ms, run_sync)


@pytest.fixture
def beneath(faulty):
    """The wrapped store, to look at effects without faults and without the log."""
    return Probe(faulty._store, faulty._store._now_ms, run_sync)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_ports_can_fail(method):
    """Also one that a port gets later: nobody lists them."""
    transaction = SimpleNamespace(**{name.rpartition(".")[2]: None for name in METHODS})
    store = MemoryStore()
    store.join = lambda _: transaction
    faulty = FaultyStore(store)
    ports = {"": faulty, "outbox": faulty.outbox, "transaction": faulty.join(None)}
    faulty.fail(Moment.BEFORE, method=method)
    owner, _, name = method.rpartition(".")
    with pytest.raises(StoreUnavailable, match=f"injected fault: call 1 .{method}. failed"):
        run_sync(getattr(ports[owner], name)())


def test_the_ports_are_those_of_the_stores():
    """Each kind of port has its methods in the list, and what is no method has none."""
    assert {"commit", "close", "outbox.claim", "transaction.settle"} < set(METHODS)
    assert not {"capabilities", "outbox.hints", "transaction.waits"} & set(METHODS)


def calls_of(probe, beneath):
    """One write of each method that can have an effect, and how its effect shows."""
    token = beneath.hold()
    step = StepWrite(KEY, token, Step("charge", 1, RESULT))
    gone = key_of("outlived")
    beneath.end(SettleKind.COMPLETE, beneath.hold(gone), gone, active_ms=0)
    store = probe.store
    return {
        "commit": (
            lambda: store.commit([request(key_of("new"))], []),
            lambda: beneath.find(key_of("new")) is not None,
        ),
        "record_step": (
            lambda: store.record_step(step),
            lambda: beneath.read().steps != [],
        ),
        "operate": (
            lambda: store.operate(KEY, OperatorCommand.FORCE_RELEASE),
            lambda: beneath.read().record.attempt == 0,
        ),
        "sweep": (lambda: store.sweep(10), lambda: beneath.find(gone) is None),
    }


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("method", ["commit", "record_step", "operate", "sweep"])
def test_a_write_fails_before_or_after_its_effect(probe, beneath, faulty, method, moment):
    """Before: nothing was written. After: it was, and only the answer is lost."""
    call, has_effect = calls_of(probe, beneath)[method]
    faulty.fail(moment, method=method)
    with pytest.raises(StoreUnavailable, match=f"injected fault: call 1 .{method}. failed"):
        run_sync(call())
    assert has_effect() is (moment is Moment.AFTER)
    run_sync(call())
    assert has_effect()


@pytest.mark.parametrize("moment", Moment)
def test_reads_and_close_fail_too(faulty, moment):
    """Faults reach every call of the port."""
    for method, call in {
        "read": lambda: faulty.read(KEY),
        "list_records": lambda: faulty.list_records(RecordQuery()),
        "close": faulty.close,
    }.items():
        faulty.fail(moment, method=method)
        with pytest.raises(StoreUnavailable):
            run_sync(call())
        run_sync(call())
    assert [logged.fault for logged in faulty.log] == [moment, None] * 3


def test_an_ambiguous_claim_is_confirmed_when_it_is_repeated(probe, faulty):
    """The scene that the fault after the effect exists for."""
    wish = request()
    faulty.fail(Moment.AFTER)
    with pytest.raises(StoreUnavailable):
        probe.ask(wish)
    assert probe.ask(wish).decision is Decision.CONFIRM


def test_a_fault_by_number_counts_all_calls(probe, faulty):
    """The third call of the store fails, whichever method it is."""
    faulty.fail(Moment.BEFORE, number=3)
    probe.find()
    token = probe.hold()
    with pytest.raises(StoreUnavailable, match=r"call 3 \(record_step\)"):
        probe.record(token)
    assert probe.record(token) is Decision.APPLY


def test_a_fault_by_method_and_number_counts_that_method(probe, faulty):
    """The second commit fails, however many reads came before."""
    faulty.fail(Moment.BEFORE, method="commit", number=2)
    probe.find()
    probe.find()
    probe.hold()
    with pytest.raises(StoreUnavailable):
        probe.claim()
    assert [call.method_number for call in faulty.calls] == [1, 2, 1, 2]
    assert [call.number for call in faulty.calls] == [1, 2, 3, 4]


def test_a_fault_by_predicate_sees_the_arguments(probe, faulty):
    """Only the batches that carry one key fail."""
    faulty.fail(
        Moment.BEFORE,
        method="commit",
        when=lambda call: any(wish.key == KEY for wish in call.arguments[0]),
    )
    assert probe.claim(key_of("key-2")).decision is Decision.ADMIT
    with pytest.raises(StoreUnavailable):
        probe.claim(KEY)
    assert probe.claim(KEY).decision is Decision.ADMIT


def test_a_fault_ends_after_its_times(probe, faulty):
    """Two failures, then it works."""
    faulty.fail(Moment.BEFORE, times=2)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            probe.claim()
    assert probe.claim().decision is Decision.ADMIT


def test_a_store_can_be_down_until_it_is_healed(probe, faulty):
    """A fault for ever is a crash: every later call raises."""
    probe.hold()
    faulty.fail(Moment.BEFORE, times=None)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            probe.find()
    faulty.heal()
    assert probe.read().record.attempt == 1


def test_the_earliest_fault_that_agrees_is_used(probe, faulty):
    """Faults are used one per call, in the order in which they were asked for."""
    faulty.fail(Moment.AFTER)
    faulty.fail(Moment.BEFORE)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            probe.find()
    assert [logged.fault for logged in faulty.log] == [Moment.AFTER, Moment.BEFORE]


def test_a_fault_raises_what_it_is_told_to(probe, faulty):
    """Also what is no Exception: a cancellation or an exit in the middle of a call."""
    faulty.fail(Moment.AFTER, error=lambda call: KeyboardInterrupt(call.method))
    with pytest.raises(KeyboardInterrupt, match="commit"):
        probe.claim()
    assert isinstance(faulty.log[0].error, KeyboardInterrupt)


def test_an_unknown_method_is_refused(faulty):
    """A fault that can never happen would let a test pass that proves nothing."""
    with pytest.raises(ValueError, match="no method 'claim', only commit, "):
        faulty.fail(Moment.BEFORE, method="claim")


def test_the_log_tells_what_became_of_each_call(probe, faulty):
    """Calls in order with their arguments, faults with their moment and error."""
    wish = request()
    probe.ask(wish)
    faulty.fail(Moment.AFTER, method="read")
    with pytest.raises(StoreUnavailable) as raised:
        probe.find()
    first, second = faulty.log
    assert (first.call.method, first.call.arguments) == ("commit", ([wish], ()))
    assert (first.fault, first.error) == (None, None)
    assert (second.call.arguments, second.fault) == ((KEY,), Moment.AFTER)
    assert second.error is raised.value


def test_an_error_of_the_store_itself_is_logged(faulty):
    """The log tells it apart from an injected one: it has no moment."""
    with pytest.raises(AttributeError):
        run_sync(faulty.read(None))
    (logged,) = faulty.log
    assert logged.fault is None
    assert isinstance(logged.error, AttributeError)


def test_capabilities_are_those_of_the_store(faulty):
    """The layers above merge and drive it as they would the store itself."""
    assert faulty.capabilities == faulty._store.capabilities
    suspending = ThreadedStore(faulty)
    assert FaultyStore(suspending).capabilities == suspending.capabilities
    suspending.end_workers()


def test_the_active_window_is_not_touched(probe, faulty, beneath):
    """A fault changes no instant: the wrapped store's clock is the only one."""
    token = probe.hold()
    faulty.fail(Moment.AFTER)
    with pytest.raises(StoreUnavailable):
        probe.end(SettleKind.COMPLETE, token)
    assert beneath.read().record.expires_at_ms == faulty._store._now_ms() + ACTIVE_MS

"""run, answer and once: from functions and their arguments to keys, callers and requests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from datetime import timedelta
from functools import partial

import pytest

from retrysafe import (
    FOREVER,
    GLOBAL,
    AsyncIdempotency,
    BodyKey,
    FingerprintRule,
    Idempotency,
    InvalidInput,
    Key,
    KeyReused,
    OperationFailed,
    Policy,
    current_attempt,
    natural_key,
)
from retrysafe.errors import (
    AwaitForgotten,
    CallerMissing,
    FingerprintImpossible,
    KeyInvalid,
    PolicyInvalid,
    SecretMissing,
    StoreUrlInvalid,
)
from retrysafe.runtime.describe import UNSET
from retrysafe.stores import MemoryStore, open_store
from tests.runtime.staged import Clock, StagedStore, drive

SECRET = "0123456789abcdef"


class Ledger:
    """Counts the executions of a function and returns which one it was."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def pay(self, invoice: str, amount: int = 10, note: str = "") -> int:
        self.calls.append((invoice, amount, note))
        return len(self.calls)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_run_runs_once(subject, url, ledger):
    """The second run of a key returns the first outcome; `answer` tells that it is a replay."""
    face = subject(url, caller="tester")
    first = face.answer("key", ledger.pay, "42")
    second = face.answer("key", ledger.pay, "42")
    assert (first.value, first.replayed, first.attempt) == (1, False, 1)
    assert (second.value, second.replayed, second.attempt) == (1, True, 1)
    assert face.run("key", ledger.pay, "42") == 1
    assert ledger.calls == [("42", 10, "")]


def test_request_of_run_is_name_and_arguments(subject, ledger):
    """Other arguments or another operation under the same key are another request."""
    face = subject(MemoryStore(), caller="tester")
    face.run("key", ledger.pay, "42")
    with pytest.raises(KeyReused):
        face.run("key", ledger.pay, "43")
    with pytest.raises(KeyReused):
        face.run("key", str, "42")
    assert face.run("key", str, "42", name="tests.runtime.test_functions.Ledger.pay") == 1


@pytest.mark.parametrize("face", [Idempotency, AsyncIdempotency])
@pytest.mark.parametrize("store", [None, 5])
def test_what_is_no_store_is_refused(face, store):
    """A variable that is not set in the environment gives None: say what a store is."""
    with pytest.raises(StoreUrlInvalid, match=r"sqlite:///app\.db"):
        face(store, caller="tester")
    with pytest.raises(StoreUrlInvalid, match=rf"open_store takes a URL .*, got {store}$"):
        open_store(store)


def test_values_in_a_partial_are_part_of_the_request():
    """What a partial holds is asked for as well: with another amount it is another request."""
    ledger = Ledger()
    with Idempotency(MemoryStore(), caller="tester") as face:
        assert face.run("key", partial(ledger.pay, "42", amount=10)) == 1
        assert face.run("key", partial(ledger.pay, "42", amount=10)) == 1
        with pytest.raises(KeyReused):
            face.run("key", partial(ledger.pay, "42", amount=11))


class Account:
    def __init__(self, number: int) -> None:
        self.number = number

    def pay(self, amount: int) -> tuple[int, int]:
        return self.number, amount

    def __call__(self, amount: int) -> tuple[int, int]:
        return self.number, amount


@pytest.mark.parametrize("operation_of", [lambda account: account.pay, lambda account: account])
def test_the_object_behind_an_operation_is_not_part_of_the_request(subject, operation_of):
    """As the guide says: only `request=` tells that another object is asked."""
    face = subject(MemoryStore(), caller="tester")
    first, second = operation_of(Account(1)), operation_of(Account(2))
    assert face.run("key", first, 5) == (1, 5)
    assert face.run("key", second, 5) == (1, 5)
    assert face.run("told", first, 5, request=[1, 5]) == (1, 5)
    with pytest.raises(KeyReused):
        face.run("told", second, 5, request=[2, 5])


def test_request_can_be_given(subject, ledger):
    """`request=` says what is compared, instead of the arguments; None is a request too."""
    face = subject(MemoryStore(), caller="tester")
    face.run("key", ledger.pay, "42", request=None)
    assert face.run("key", ledger.pay, "43", request=None) == 1
    with pytest.raises(KeyReused):
        face.run("key", ledger.pay, "42", request={"invoice": "42"})


def test_request_fields_can_be_left_out_by_a_rule(subject, ledger):
    """A rule that excludes a field makes retries that differ in it the same request."""
    face = subject(
        MemoryStore(), caller="tester", fingerprint=FingerprintRule(exclude=("/sent_at",))
    )
    face.run("key", ledger.pay, "42", request={"invoice": "42", "sent_at": 1})
    assert face.run("key", ledger.pay, "42", request={"invoice": "42", "sent_at": 2}) == 1
    with pytest.raises(KeyReused):
        face.run("key", ledger.pay, "42", request={"invoice": "43", "sent_at": 1})


def test_request_without_stable_form_is_refused(subject, ledger):
    """Two objects cannot be compared by their address; nothing ran."""
    face = subject(MemoryStore(), caller="tester")
    with pytest.raises(FingerprintImpossible, match="request="):
        face.run("key", ledger.pay, object())
    assert ledger.calls == []


# Whose key it is.


def test_caller_is_required(subject, ledger):
    """Without a caller nothing is claimed: a global namespace is never the silent default."""
    face = subject(MemoryStore())
    with pytest.raises(CallerMissing, match="GLOBAL"):
        face.run("key", ledger.pay, "42")
    assert ledger.calls == []


def test_callers_do_not_share_keys(subject, ledger):
    """The same key of two callers is two keys; a Key carries its own caller."""
    face = subject(MemoryStore(), caller="alice")
    assert face.run("key", ledger.pay, "42") == 1
    assert face.run("key", ledger.pay, "42", caller="bob") == 2
    assert face.run(Key("key", caller="bob"), ledger.pay, "42") == 2
    assert face.run("key", ledger.pay, "42", caller=GLOBAL) == 3
    with pytest.raises(InvalidInput, match="not both"):
        face.run(Key("key", caller="bob"), ledger.pay, "42", caller="alice")


def test_caller_can_be_a_function(subject, ledger):
    """It is asked for every call; a nobody that it returns is refused."""
    account = ["alice"]
    face = subject(MemoryStore(), caller=lambda: account[0])
    assert face.run("key", ledger.pay, "42") == 1
    account[0] = "bob"
    assert face.run("key", ledger.pay, "42") == 2
    for nobody in ("", None):
        account[0] = nobody
        with pytest.raises(CallerMissing):
            face.run("key", ledger.pay, "42")


def test_global_caller_is_for_those_who_ask(subject, ledger):
    """GLOBAL as the object's caller is one namespace for everybody."""
    face = subject(MemoryStore(), caller=GLOBAL)
    assert face.run("key", ledger.pay, "42") == 1
    assert face.run(Key("key", caller=GLOBAL), ledger.pay, "42") == 1


@pytest.mark.parametrize("key", ["", "x" * 256, None, 42, b"key", "nul\x00"])
def test_unusable_keys_are_refused(subject, ledger, key):
    """An empty, overlong or binary key is an error, and nothing ran."""
    face = subject(MemoryStore(), caller="tester")
    with pytest.raises(KeyInvalid):
        face.run(key, ledger.pay, "42")
    assert ledger.calls == []


# once: keys from the arguments.


def _pay(ledger: Ledger):
    def pay(invoice: str, amount: int = 10, *, note: str = "") -> int:
        """Pays an invoice."""
        return ledger.pay(invoice, amount, note)

    return pay


def test_once_by_parameter_name(subject, ledger):
    """One parameter identifies the operation, however it is passed."""
    face = subject(MemoryStore(), caller="tester")
    pay = face.once(_pay(ledger), key="invoice")
    assert [pay("42"), pay(invoice="42"), pay("42", 10), pay("43")] == [1, 1, 1, 2]
    with pytest.raises(KeyReused):
        pay("42", 11)


def test_once_by_several_parameters(subject, ledger):
    """A tuple of names: the values are framed, so that no two pairs meet."""
    face = subject(MemoryStore(), caller="tester")
    pay = face.once(_pay(ledger), key=("invoice", "note"))
    assert pay("a", note="bc") == 1
    assert pay("ab", note="c") == 2
    assert pay("a", note="bc") == 1


def test_once_by_function(subject, ledger):
    """A function of the arguments makes the key: a text, a tuple of parts, or a Key."""
    face = subject(MemoryStore(), caller="tester")
    by_text = face.once(_pay(ledger), key=lambda invoice, **_: f"pay-{invoice}", name="text")
    assert [by_text("42"), by_text("42")] == [1, 1]
    by_parts = face.once(_pay(ledger), key=lambda invoice, **_: (invoice, 1), name="parts")
    assert [by_parts("42"), by_parts("42")] == [2, 2]
    assert face.call("read", natural_key("parts", "42", 1)) is not None
    by_key = face.once(
        _pay(ledger), key=lambda invoice, **_: Key(invoice, caller="own"), name="key"
    )
    assert [by_key("42"), by_key("42")] == [3, 3]
    assert face.call("read", Key("42", caller="own")) is not None


def test_once_by_body_needs_a_secret(subject, ledger, monkeypatch):
    """A keyed hash without a secret is refused when the function is decorated."""
    monkeypatch.delenv("RETRYSAFE_SECRET", raising=False)
    face = subject(MemoryStore(), caller="tester")
    with pytest.raises(SecretMissing, match="RETRYSAFE_SECRET"):
        face.once(_pay(ledger), key=BodyKey())
    with pytest.raises(SecretMissing):
        Idempotency(MemoryStore(), secret="short")


def test_once_by_body(subject, ledger):
    """Equal calls within the window are one; after it they are new."""
    clock = Clock()
    face = subject(MemoryStore(now_ms=clock), caller="tester", secret=SECRET, cache=False)
    pay = face.once(_pay(ledger), key=BodyKey(window=timedelta(minutes=5)), ignore=["note"])
    assert [pay("42"), pay("42", note="retry"), pay("42", 11)] == [1, 1, 2]
    clock.advance(4 * 60)
    assert pay("42") == 1
    clock.advance(60)
    assert pay("42") == 3


@pytest.mark.parametrize(
    "rule",
    [FingerprintRule(exclude=("/order/sent_at",)), FingerprintRule(include=("/order/id",))],
)
@pytest.mark.parametrize("is_of_the_object", [True, False])
def test_what_a_rule_leaves_out_is_left_out_of_a_body_key(subject, rule, is_of_the_object):
    """A retry that was sent at another time is a retry, and does not run again."""
    ran = []

    def place(order):
        ran.append(order)
        return len(ran)

    options = {"fingerprint": rule} if is_of_the_object else {}
    face = subject(MemoryStore(), caller="tester", secret=SECRET, **options)
    options = {} if is_of_the_object else {"fingerprint": rule}
    once = face.once(place, key=BodyKey(), name="place", **options)
    sent = [{"id": 1, "sent_at": 1}, {"sent_at": 2, "id": 1}, {"id": 2, "sent_at": 1}]
    assert [once(order) for order in sent] == [1, 1, 2]
    assert len(ran) == 2


def test_an_intent_tells_equal_calls_apart(subject, ledger):
    """Whatever the fingerprint leaves out; a call without one keeps the key that it has anyway."""
    store = MemoryStore()

    def paying(secret, **options):
        face = subject(store, caller="tester", secret=secret)
        return face.once(_pay(ledger), name="pay", ignore=["note"], **options)

    plain = paying(SECRET, key=BodyKey())
    pay = paying(SECRET, key=BodyKey(intent="note"))
    assert [plain("42"), pay("42", note=None), plain("42")] == [1, 1, 1]
    assert [pay("42", note="a"), pay("42", note="b"), pay("42", note="a")] == [2, 3, 2]
    assert [pay("42", note=1), pay("42", note="1"), pay("43", note="a")] == [4, 5, 6]
    # While secrets are replaced, every form of the key has the intent.
    rotating = paying(["another secret, long enough", SECRET], key=BodyKey(intent="note"))
    assert [rotating("42", note="a"), rotating("42", note="b")] == [2, 3]
    assert [rotating("42", note="c"), rotating("42", note="d")] == [7, 8]
    with pytest.raises(FingerprintImpossible, match="float"):
        pay("42", note=0.5)


def test_an_intent_of_a_function_is_one_of_its_parameters(subject, ledger):
    face = subject(MemoryStore(), caller="tester", secret=SECRET)
    for name in ("X-Order-Number", "/order"):
        with pytest.raises(KeyInvalid, match=r"intent of a BodyKey .*invoice"):
            face.once(_pay(ledger), key=BodyKey(intent=name))


def test_a_rule_of_the_call_goes_before_the_object_s_in_a_body_key(subject, ledger):
    """As it does in the fingerprint: what counts is said in one place."""
    rule = FingerprintRule(exclude=("/amount",))
    face = subject(MemoryStore(), caller="tester", secret=SECRET, fingerprint=rule)
    pay = face.once(_pay(ledger), key=BodyKey(), fingerprint=FingerprintRule(exclude=("/note",)))
    assert [pay("42", 1, note="a"), pay("42", 1, note="b"), pay("42", 2, note="a")] == [1, 1, 2]


def test_secret_from_the_environment(subject, ledger, monkeypatch):
    """RETRYSAFE_SECRET is the secret of objects that were given none."""
    monkeypatch.setenv("RETRYSAFE_SECRET", SECRET)
    face = subject(MemoryStore(), caller="tester")
    pay = face.once(_pay(ledger), key=BodyKey())
    assert [pay("42"), pay("42")] == [1, 1]


def test_once_ignores_what_it_is_told_to(subject, ledger):
    """Parameters in `ignore` are not part of the request, and need no stable form."""
    face = subject(MemoryStore(), caller="tester")
    pay = face.once(_pay(ledger), key="invoice", ignore=["note", "amount"])
    assert [pay("42", note=object()), pay("42", 11, note=object())] == [1, 1]


@pytest.mark.parametrize("options", [{"key": "invoyce"}, {"key": "invoice", "ignore": ["x"]}])
def test_once_refuses_unknown_parameters(subject, ledger, options):
    """A misspelt name is found when the function is decorated."""
    face = subject(MemoryStore(), caller="tester")
    with pytest.raises(KeyInvalid, match="has no parameter"):
        face.once(_pay(ledger), **options)


@pytest.mark.parametrize("key", [["invoice"], {"invoice"}, (), ("invoice", 5), 5, None])
def test_once_refuses_what_makes_no_key(subject, ledger, key):
    """At its first call it would only say that a list cannot be called."""
    face = subject(MemoryStore(), caller="tester")
    with pytest.raises(KeyInvalid, match=r"a tuple of names as in key=\('invoice_id',\)"):
        face.once(_pay(ledger), key=key)


def test_once_refuses_a_text_as_ignore(subject, ledger):
    """ignore="note" would mean four parameters of one letter."""
    face = subject(MemoryStore(), caller="tester")
    with pytest.raises(InvalidInput, match="list of parameter names"):
        face.once(_pay(ledger), key="invoice", ignore="note")


def test_once_wrong_arguments_are_a_type_error(subject, ledger):
    """As without the decorator; nothing is claimed."""
    store = StagedStore()
    pay = subject(store, caller="tester").once(_pay(ledger), key="invoice")
    with pytest.raises(TypeError):
        pay()
    with pytest.raises(TypeError):
        pay("42", colour="red")
    assert store.calls_count == 0


def test_once_keeps_name_and_signature(ledger):
    """The decorated function looks like the function."""
    with Idempotency(MemoryStore(), caller="tester") as idem:
        function = _pay(ledger)
        pay = idem.once(window=FOREVER, key="invoice")(function)
        assert (pay.__name__, pay.__doc__) == (function.__name__, "Pays an invoice.")
        assert inspect.signature(pay) == inspect.signature(function)


def test_once_of_two_functions_do_not_share_keys(subject):
    """Equal arguments of two functions are two operations; equal names would be one."""
    face = subject(MemoryStore(), caller="tester")
    first = face.once(lambda order: "first", key="order", name="ship")
    second = face.once(lambda order: "second", key="order", name="bill")
    third = face.once(lambda order: "third", key="order", name="ship")
    assert [first(1), second(1), third(1)] == ["first", "second", "first"]


def test_answer_of_tells_about_replays(subject, ledger):
    """`answer_of` is `answer` for decorated functions; others are refused."""
    face = subject(MemoryStore(), caller="tester")
    pay = face.once(_pay(ledger), key="invoice")
    assert [face.answer_of(pay, "42").replayed for _ in range(2)] == [False, True]
    assert face.answer_of(pay, invoice="42").value == 1
    with pytest.raises(InvalidInput, match="not decorated"):
        face.answer_of(len, "42")


def test_policy_per_operation(subject):
    """A policy of the call or of the decorator replaces the object's."""
    face = subject(MemoryStore(), caller="tester", policy=Policy(lease=timedelta(seconds=7)))
    seen = []

    def lease() -> None:
        seen.append(round(current_attempt().time_left.total_seconds()))

    face.run("a", lease)
    face.run("b", lease, policy=Policy(lease=timedelta(seconds=90)))
    forty = Policy(lease=timedelta(seconds=40))
    face.once(lambda key: lease(), key="key", name="lease", policy=forty)("c")
    assert seen == [7, 90, 40]
    assert face.idem.policy.lease == timedelta(seconds=7)
    with pytest.raises(PolicyInvalid):
        face.idem.policy.with_changes(leese=1)


# Methods.


def test_once_on_methods():
    """self and cls are where a method lives, not part of the request."""
    with Idempotency(MemoryStore(), caller="tester") as idem:
        ran = []

        class Shop:
            @idem.once(window=FOREVER, key="order")
            def ship(self, order: int) -> str:
                ran.append(("ship", order))
                return f"shipped {order}"

            @classmethod
            @idem.once(window=FOREVER, key="order")
            def bill(cls, order: int) -> str:
                ran.append(("bill", order, cls.__name__))
                return f"billed {order}"

            @staticmethod
            @idem.once(window=FOREVER, key="order")
            def pack(order: int) -> str:
                ran.append(("pack", order))
                return f"packed {order}"

        for _ in range(2):
            assert Shop().ship(1) == "shipped 1"
            assert Shop.bill(1) == "billed 1"
            assert Shop().bill(order=1) == "billed 1"
            assert Shop.pack(1) == "packed 1"
        assert ran == [("ship", 1), ("bill", 1, "Shop"), ("pack", 1)]
        assert idem.answer_of(Shop().ship, 1).replayed
        assert idem.answer_of(Shop.bill, 1).replayed
        assert idem.answer_of(Shop.pack, 2).replayed is False


def test_once_on_async_methods():
    """The same for coroutines."""

    async def main() -> None:
        async with AsyncIdempotency(MemoryStore(), caller="tester") as idem:
            ran = []

            class Shop:
                @idem.once(window=FOREVER, key="order")
                async def ship(self, order: int) -> str:
                    ran.append(order)
                    return f"shipped {order}"

                @classmethod
                @idem.once(window=FOREVER, key="order")
                async def bill(cls, order: int) -> str:
                    ran.append(order)
                    return f"billed {order}"

            assert inspect.iscoroutinefunction(Shop.ship)
            both = asyncio.gather(Shop().ship(1), Shop.bill(2))
            assert await both == ["shipped 1", "billed 2"]
            assert await Shop().ship(1) == "shipped 1"
            assert (await idem.answer_of(Shop().ship, 1)).replayed
            assert (await idem.answer_of(Shop.bill, 2)).replayed
            assert ran == [1, 2]

    drive(main())


# Wrong use.


def test_async_operation_on_the_blocking_object_is_refused():
    """Found before anything is claimed; disguised, it counts as run, for nobody knows what did."""
    store = StagedStore()
    with Idempotency(store, caller="tester") as idem:

        async def operation() -> None:
            raise AssertionError("never runs")

        def disguised() -> object:
            return operation()

        with pytest.raises(InvalidInput, match="use AsyncIdempotency"):
            idem.run("key", operation)
        with pytest.raises(InvalidInput, match="use AsyncIdempotency"):
            idem.once(window=FOREVER, key="order")(operation)
        assert store.calls_count == 0
        with pytest.raises(AwaitForgotten, match="use AsyncIdempotency"):
            idem.run("key", disguised, name="", request=None)
        with pytest.raises(OperationFailed, match="use AsyncIdempotency"):
            idem.run("key", lambda: "again", name="", request=None)


def test_blocking_function_on_the_async_object():
    """once() refuses it; run() takes what it returned, because it has run by then."""

    async def main() -> None:
        async with AsyncIdempotency(MemoryStore(), caller="tester") as idem:
            with pytest.raises(InvalidInput, match="write async def"):
                idem.once(window=FOREVER, key="order")(lambda order: order)
            assert await idem.run("key", lambda: "plain", request=None) == "plain"
            assert (await idem.answer("key", lambda: "again", request=None)).replayed

    drive(main())


def test_arguments_that_do_not_fit_a_decorated_function_name_it(subject, ledger):
    """As Python does for a plain function: the reader of a traceback knows which one it was."""
    face = subject(MemoryStore(), caller="tester")

    def charge(customer, amount):
        """Never called."""

    charge.__qualname__ = "Shop.charge"
    decorated = face.once(charge, key="customer")
    with pytest.raises(
        TypeError, match=r"^Shop\.charge\(\) missing a required argument: 'amount'$"
    ):
        decorated("c1")
    with pytest.raises(TypeError, match=r"^Shop\.charge\(\) got an unexpected keyword argument"):
        decorated("c1", 500, currency="eur")


def test_a_decorated_partial_is_named_by_its_operation():
    """A partial has no name of its own."""
    with Idempotency(MemoryStore(), caller="tester") as face:
        decorated = face.once(window=FOREVER, key="invoice", name="pay")(
            partial(Ledger().pay, amount=10)
        )
        with pytest.raises(TypeError, match=r"^pay\(\) missing a required argument: 'invoice'$"):
            decorated()


def test_unknown_parameters_of_run_are_refused(subject, ledger):
    """Arguments for the operation go by position; a misspelt option is no argument."""
    face = subject(MemoryStore(), caller="tester")
    with pytest.raises(TypeError):
        face.run("key", ledger.pay, invoice="42")
    assert ledger.calls == []


# What calls of one function have in common is put together once.


def plain() -> int:
    """An operation of a module: it brings neither arguments nor anything else."""
    return 7


class Mark:
    """Something that an operation holds."""


def pay(account, invoice, *, currency="EUR"):
    return f"paid {invoice} {currency} from {account}"


HELD = {
    "by place": (partial(pay, "A"), partial(pay, "B")),
    "by name": (partial(pay, account="A"), partial(pay, account="B")),
    "in a partial": (partial(partial(pay, "A"), currency="A"), partial(partial(pay, "A"))),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_what_a_decorated_partial_holds_is_part_of_the_request(held):
    """Else the second account gets the outcome of the first one."""
    with Idempotency(MemoryStore(), caller="c", secret="at least sixteen bytes") as idem:
        once = idem.once(key="invoice", window=FOREVER)
        first, second = map(once, held)
        assert first(invoice=1) == first(invoice=1) == held[0](invoice=1)
        with pytest.raises(KeyReused):
            second(invoice=1)
        everything = idem.once(key=("account", "invoice", "currency"), window=FOREVER)
        hashed = idem.once(key=BodyKey())
        for decorate in (everything, hashed):
            assert [decorate(item)(invoice=2) for item in held] == [
                item(invoice=2) for item in held
            ]


def test_what_a_call_brings_counts_for_a_function_that_is_known():
    """Each option of a call makes its request, its name or its outcome another one than usual."""
    with Idempotency(MemoryStore(), caller="tester") as idem:
        usual = idem._calls.operations.call("k", plain, (), None, None, UNSET, None, None, None)
        for options in (
            ("other", UNSET, None, None, None),
            (None, 1, None, None, None),
            (None, UNSET, Policy(lease=timedelta(minutes=5)), None, None),
            (None, UNSET, None, FingerprintRule(version=2), None),
            (None, UNSET, None, None, Mark),
        ):
            call = idem._calls.operations.call("k", plain, (), None, *options)
            assert call != usual
        assert (
            idem._calls.operations.call("k", plain, (), None, None, UNSET, None, None, None)
            == usual
        )
        assert (
            idem._calls.operations.call("k", plain, (), "else", None, UNSET, None, None, None).key
            != usual.key
        )


def test_a_function_that_is_known_can_still_be_declared_resumable():
    """From then on its arguments are stored, whatever calls of it had in common before."""
    with Idempotency(MemoryStore(), caller="tester") as idem:

        def arguments(caller) -> object:
            return idem._calls.operations.call(
                "k", plain, (), caller, None, UNSET, None, None, None
            ).arguments

        def declaring() -> str:
            # While another call is being put together.
            idem.resumable("plain")(plain)
            return "tester"

        assert arguments(None) is None
        assert arguments(declaring) is None
        assert arguments(None) is not None


def test_a_function_that_was_run_before_it_was_declared_resumable_is_so():
    with Idempotency(MemoryStore(), caller="tester") as idem:
        idem.run("first", plain)
        idem.resumable("plain")(plain)
        call = idem._calls.operations.call("k", plain, (), None, None, UNSET, None, None, None)
        assert (call.operation, call.arguments is None) == ("plain", False)


@pytest.mark.parametrize(
    "holding",
    [
        lambda mark: lambda: mark is not None,
        lambda mark: lambda held=mark: held is not None,
        lambda mark: lambda *, held=mark: held is not None,
    ],
    ids=["closure", "default", "keyword"],
)
def test_what_an_operation_holds_is_not_kept_alive(holding):
    """Else a thousand requests would stay in memory for ever, each with what its lambda binds."""
    mark = Mark()
    gone = weakref.ref(mark)
    with Idempotency(MemoryStore(), caller="tester", cache=False) as idem:
        assert idem.run("k", holding(mark), request=None)
        del mark
        gc.collect()
        assert gone() is None

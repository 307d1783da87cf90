"""Slips in a call are refused before anything is claimed, so that the corrected call just works."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import uuid

import pytest

from retrysafe import (
    FOREVER,
    AsyncIdempotency,
    BodyKey,
    Idempotency,
    InvalidInput,
    current_attempt,
    step,
)
from retrysafe.errors import (
    CallerMissing,
    FingerprintImpossible,
    KeyInvalid,
    KeyReused,
    PolicyInvalid,
)
from retrysafe.runtime.checks import require_call


def charge(customer, amount):
    return {"customer": customer, "amount": amount}


async def charge_later(customer, amount):
    return {"customer": customer, "amount": amount}


class Shop:
    """What else can be called: methods, classes and objects."""

    def charge(self, customer, amount):
        return customer, amount

    def charge_all(self):
        return "all"

    def __call__(self, customer="c1"):
        return customer


# The result of a function in the place of the function.


@pytest.mark.parametrize("method", ["run", "answer"])
@pytest.mark.parametrize("result", [{"amount": 2}, None, 5, "charge"])
def test_the_result_of_a_function_is_refused_before_anything_is_claimed(subject, method, result):
    """Nothing is claimed: the corrected call is the first one that the key sees."""
    shop = subject("memory://", caller="c")
    with pytest.raises(InvalidInput, match=r"pass the function and its arguments, run\(key, ch"):
        shop.call(method, "k", result, "c1", 500)
    assert shop.call("read", "k") is None
    answer = shop.answer("k", charge, "c1", 500)
    assert (answer.value["amount"], answer.attempt, answer.replayed) == (500, 1, False)


def test_the_result_is_named_by_its_type_and_not_by_what_is_in_it(subject):
    """What a function returned may be a secret, and messages end up in logs."""
    shop = subject("memory://", caller="c")
    with pytest.raises(InvalidInput, match=r"not its result; got a value of type 'dict'$"):
        shop.call("run", "k", {"card": "4111"})


def test_a_coroutine_in_the_place_of_its_function_is_closed(subject):
    """Python has nothing to warn of: what was made by mistake will never run."""
    shop = subject("memory://", caller="c")
    made = charge_later("c1", 500)
    with pytest.raises(InvalidInput, match=r"not its result; got a value of type 'coroutine'$"):
        shop.call("run", "k", made)
    with pytest.raises(RuntimeError, match="cannot reuse"):
        made.send(None)
    assert shop.call("read", "k") is None


@pytest.mark.parametrize("kind", [Idempotency, AsyncIdempotency])
def test_decorators_refuse_what_is_no_function(kind):
    """Where the function is declared, not where it is first called."""
    idem = kind("memory://", caller="c")
    for misuse in (idem.once(window=FOREVER, key="customer"), idem.resumable()):
        with pytest.raises(InvalidInput, match=r"pass the function.*got a value of type 'int'"):
            misuse(5)


def test_answer_of_the_result_is_refused_and_its_coroutine_closed():
    """`answer_of(pay(1))` is the slip; it is told from a function that is not decorated."""

    async def scenario():
        async with AsyncIdempotency("memory://", caller="c") as idem:
            pay = idem.once(window=FOREVER, key="customer")(charge_later)
            made = pay("c1", 500)
            with pytest.raises(InvalidInput, match="not its result; got a value of type 'corou"):
                await idem.answer_of(made)
            assert (await idem.answer_of(pay, "c1", 500)).replayed is False

    asyncio.run(scenario())


# Arguments that do not fit.


@pytest.mark.parametrize(
    ("operation", "args", "words"),
    [
        (charge, ("c1",), "missing a required argument: 'amount'"),
        (charge, ("c1", 500, "eur"), "too many positional arguments"),
        (Shop().charge, ("c1",), "missing a required argument: 'amount'"),
        (functools.partial(charge, amonut=500), ("c1",), "amonut"),
        (functools.partial(Shop().charge, amount=500), ("c1", 500), "multiple values|too many"),
    ],
    ids=["missing", "too many", "method", "misspelled", "twice"],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_claimed(
    operation, args, words, url
):
    """The call would fail before the first line of the operation, so it costs no attempt."""
    with Idempotency(url, caller="c") as idem:
        with pytest.raises(InvalidInput, match=rf"the operation .*charge cannot.*({words})"):
            idem.run("k", operation, *args)
        assert idem.read("k") is None
        assert idem.answer("k", charge, "c1", 500).attempt == 1


def test_arguments_of_async_functions_are_checked_too():
    """The corrected call is the first one that the key sees."""

    async def scenario():
        async with AsyncIdempotency("memory://", caller="c") as idem:
            with pytest.raises(InvalidInput, match="missing a required argument: 'amount'"):
                await idem.run("k", charge_later, "c1")
            return await idem.answer("k", charge_later, "c1", 500)

    assert asyncio.run(scenario()).attempt == 1


def test_a_type_error_from_inside_the_operation_is_its_own(url):
    """Something has run then: it costs an attempt, and reaches the caller as it is."""

    def broken(amount):
        return amount + "eur"

    with Idempotency(url, caller="c") as idem:
        with pytest.raises(TypeError, match="unsupported operand"):
            idem.run("k", broken, 5)
        assert idem.read("k").record.attempt == 1


def none():
    """No parameters."""


def with_default(a, b=2):
    """One may be left out."""


def positional_only(a, /, b):
    """The first has no name for callers."""


def any_positional(a, *rest):
    """As many as wanted."""


def any_keyword(a, /, b, **others):
    """Swallows keywords, also one that is called as the parameter before the slash."""


def keyword_only(a, *, b):
    """The second has to be named."""


def keyword_default(a, *, b=2):
    """The second may be named."""


def anything(*args, **kwargs):
    """What decorators look like."""


@pytest.mark.parametrize(
    "function",
    [
        none,
        charge,
        with_default,
        positional_only,
        any_positional,
        any_keyword,
        keyword_only,
        keyword_default,
        anything,
    ],
    ids=lambda function: function.__name__,
)
def test_exactly_those_calls_are_refused_that_python_refuses(function):
    """For every number of arguments and every set of keywords, held by partials and not."""
    names = ("a", "b", "customer", "other")
    keywords = [set(), *({name} for name in names), {"a", "b"}, {"customer", "amount"}]
    refused, taken = 0, 0
    for held, count, named in itertools.product(range(3), range(4), keywords):
        operation = functools.partial(function, *range(held), **dict.fromkeys(named, 0))
        if not held and not named:
            operation = function
        args = tuple(range(count))
        try:
            operation(*args)
        except TypeError:
            refused += 1
            with pytest.raises(InvalidInput):
                require_call(operation, args)
        else:
            taken += 1
            require_call(operation, args)
    assert taken > 0
    assert (refused > 0) is (function is not anything)


def test_what_cannot_be_read_off_is_left_to_the_call_itself():
    """Classes and objects with a call of their own, and builtins."""
    for operation in (Shop, Shop(), dict, functools.partial(int, base=2)):
        require_call(operation, ("1", "2", "3"))


# Steps.


@pytest.mark.parametrize("field", ["call", "compensate"])
def test_a_step_refuses_what_is_no_function(subject, field):
    """Before the step is begun: nothing of it is recorded, and the operation may go on."""
    shop = subject("memory://", caller="c")

    def operation():
        attempt = current_attempt()
        with pytest.raises(InvalidInput, match=r"not its result; got a value of type 'int'"):
            if field == "call":
                attempt.step("charge", 5)
            else:
                attempt.step("charge", charge, "c1", 500, compensate=5)
        return "went on"

    assert shop.run("k", operation) == "went on"
    assert shop.call("read", "k").steps == []


def test_a_compensation_is_checked_where_the_step_is_declared():
    """A compensation that cannot be called would be found out when it is needed."""
    with pytest.raises(InvalidInput, match="compensate takes the function that undoes the step"):
        step("charge", compensate=charge("c1", 500))


# Settings.


async def later():
    """Never called: nobody would await it."""


@pytest.mark.parametrize(
    ("place", "caller"),
    [
        *itertools.product(["constructor", "call", "once", "read"], [7, uuid.UUID(int=7)]),
        ("constructor", later),
        ("once", later),
    ],
)
def test_what_is_no_caller_is_refused_where_it_is_given(subject, caller, place):
    """A user's id is the likely one, and the message says what to write around it."""
    words = r"caller is a text, a plain function .*: write str\(…\) around a number such as the use"
    with pytest.raises(InvalidInput, match=words):
        if place == "constructor":
            subject("memory://", caller=caller)
        elif place == "once":
            subject("memory://").once(charge, key="customer", caller=caller)
        elif place == "read":
            subject("memory://", caller="c").call("read", "k", caller=caller)
        else:
            subject("memory://", caller="c").run("k", charge, "c1", 500, caller=caller)


def test_a_caller_that_a_function_tells_wrongly_is_told_the_same(subject):
    """It is seen with the first call, before anything is claimed."""
    shop = subject("memory://", caller=lambda: 7)
    with pytest.raises(CallerMissing, match=r"got 7: .* str\(…\) around a number"):
        shop.run("k", charge, "c1", 500)
    assert shop.call("read", "k", caller="7") is None
    assert shop.run("k", charge, "c1", 500, caller=lambda: "7")["amount"] == 500


@pytest.mark.parametrize("place", ["constructor", "call", "once", "resumable"])
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("policy", {"lease": 5}, r"policy takes a Policy, .* got \{'lease': 5\}"),
        ("policy", {}, r"policy takes a Policy"),
        (
            "fingerprint",
            ["/sent_at"],
            r"fingerprint takes a FingerprintRule, .* got \['/sent_at'\]",
        ),
    ],
)
def test_what_is_no_policy_or_rule_is_refused_where_it_is_given(
    subject, place, field, value, words
):
    """An empty one too: it does not stand for the defaults."""
    options = {field: value}
    if place == "constructor":
        with pytest.raises(PolicyInvalid, match=words):
            subject("memory://", **options)
        return
    shop = subject("memory://", caller="c")
    if place == "resumable":
        shop.idem.resumable("charge")(shop.plain_or_async(charge, charge_later))
        with pytest.raises(PolicyInvalid, match=words):
            shop.call("run", "k", shop.plain_or_async(charge, charge_later), "c1", 500, **options)
    elif place == "once":
        with pytest.raises(PolicyInvalid, match=words):
            shop.once(charge, key="customer", **options)
    else:
        with pytest.raises(PolicyInvalid, match=words):
            shop.run("k", charge, "c1", 500, **options)
    assert shop.call("read", "k") is None


@pytest.mark.parametrize("kind", [Idempotency, AsyncIdempotency])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observers": print}, r"write observers=\[…\], got <built-in function print>"),
        ({"observers": [print, 5]}, "and 5 is none"),
        ({"secret": 4711}, "secret takes text, bytes or a list of them, got a value of type 'int'"),
        ({"secret": "short"}, "at least 16 bytes"),
    ],
)
def test_the_constructor_refuses_what_would_fail_later(kind, options, words):
    """With the first event, the first child key; and no secret is shown."""
    with pytest.raises(InvalidInput, match=words):
        kind("memory://", caller="c", **options)


@pytest.mark.parametrize("method", ["run", "answer"])
def test_keyword_arguments_of_the_operation_are_told_where_they_belong(subject, method):
    """Before anything is claimed."""
    shop = subject("memory://", caller="c")
    operation = shop.plain_or_async(charge, charge_later)
    words = (
        rf"^{method}\(\) has no option amount, currency: .* "
        rf"functools.partial\({operation.__name__}, amount=…, currency=…\)$"
    )
    with pytest.raises(TypeError, match=words):
        shop.call(method, "k", operation, "c1", amount=500, currency="eur")
    assert shop.call("read", "k") is None
    assert shop.run("k", functools.partial(charge, amount=500), "c1")["amount"] == 500


# Operations that hide what is asked for.


def nightly():
    return "done"


def _logged(function):
    @functools.wraps(function)
    def logged(*args):
        return function(*args)

    return logged


@_logged
def weekly():
    return "done"


def _bound(function, amount):
    """What people write who do not know `functools.partial`."""

    @functools.wraps(function)
    def bound():
        return function("c1", amount)

    return bound


def _charging(amount):
    """Nested functions: two that hold the amount, and one that holds nothing."""

    def captured():
        return charge("c1", amount)

    def by_default(amount=amount):
        return charge("c1", amount)

    def free():
        return charge("c1", 500)

    class Captured:
        """It has the amount from around it."""

        def __init__(self):
            charge("c1", amount)

    class Attribute:
        def __init__(self):
            charge("c1", self.amount)

    Attribute.amount = amount
    captured.cached = functools.cache(captured)
    return captured, by_default, free, Captured, Attribute


class Bound:
    """A wrapper with the name of what it wraps."""

    def __init__(self, function, amount):
        functools.update_wrapper(self, function)
        self.amount = amount

    def __call__(self):
        return self.__wrapped__("c1", self.amount)


def _named(made):
    """A partial that Python does not unpack."""
    return functools.update_wrapper(made, charge)


_CAPTURED, _BY_DEFAULT, _FREE, _CLASS, _CLASS_WITH_ATTRIBUTE = _charging(900)
_HIDDEN = {
    "lambda": (lambda: charge("c1", 900), "run(key, charge, 'c1', 900)"),
    "lambda with keywords": (
        lambda: charge("c1", amount=900),
        "run(key, partial(charge, amount=900), 'c1')",
    ),
    "lambda over lines": (
        lambda: Shop().charge(
            "Zoë",
            900,
        ),
        "run(key, Shop().charge, 'Zoë', 900)",
    ),
    "lambda without a call": (lambda: 900, 'run(key, charge, "c1", 500)'),
    "lambda without source": (eval("lambda: charge('c1', 900)"), 'run(key, charge, "c1", 500)'),
    "lambda in a cache": (
        functools.cache(lambda: charge("c1", 900)),
        'run(key, charge, "c1", 500)',
    ),
    "lambda in a partial": (functools.partial(lambda: charge("c1", 900)), "run(key, charge, 'c1'"),
    "closure": (_CAPTURED, "takes amount from the code around it"),
    "closure in a cache": (_CAPTURED.cached, "run(key, captured, amount)"),
    "closure with the name of a function": (_bound(charge, 900), "takes amount, function from"),
    "default value": (_BY_DEFAULT, "run(key, by_default, amount)"),
    "method": (Shop().charge_all, "run(key, service.charge_all, …)"),
    "method of a built-in class": (b"900".decode, "run(key, service.decode, …)"),
    "object": (Shop(), "the operation Shop is an object"),
    "class of a function": (_CLASS, "_charging.<locals>.Captured is a class that was made in a"),
    "class with an attribute": (_CLASS_WITH_ATTRIBUTE, "Attribute is a class that was made in a"),
    "object with the name of a function": (Bound(charge, 900), "is a wrapper that was made in a"),
    "partial of such an object": (functools.partial(Bound(charge, 900)), "is a wrapper that was"),
}
_VISIBLE = {
    "function of a module": (nightly,),
    "decorated function": (weekly,),
    "built-in function": (os.getpid,),
    "class": (dict,),
    "nested function that captures nothing": (_FREE,),
    "partial": (functools.partial(charge, "c1", amount=900),),
    "partial of a partial": (functools.partial(_named(functools.partial(charge, "c1", 900))),),
    "method with arguments": (Shop().charge, "c1", 900),
    "lambda with arguments": (lambda amount: charge("c1", amount), 900),
    "closure with arguments": (_logged(lambda amount: amount), 900),
}


@pytest.mark.parametrize("method", ["run", "answer"])
@pytest.mark.parametrize(("operation", "shown"), _HIDDEN.values(), ids=_HIDDEN)
def test_hidden_values_are_refused_unless_the_request_is_given(subject, method, operation, shown):
    """Nothing is claimed, and the message shows the call to write instead, in the user's names."""
    shop = subject("memory://", caller="c")
    with pytest.raises(FingerprintImpossible) as refused:
        shop.call(method, "k", operation)
    assert shown in str(refused.value)
    assert shop.call("read", "k") is None
    shop.call(method, "k", operation, request=None)
    assert shop.call("read", "k").condition.value == "succeeded"


@pytest.mark.parametrize("call", _VISIBLE.values(), ids=_VISIBLE)
def test_visible_values_need_no_request(subject, call):
    shop = subject("memory://", caller="c")
    shop.call("run", "k", *call)
    assert shop.call("answer", "k", *call).replayed


def test_what_a_partial_in_a_partial_holds_is_asked_for():
    """Else another amount gets the outcome of the first."""

    def paying(amount):
        return functools.partial(_named(functools.partial(charge, amount=amount)), "c1")

    with Idempotency("memory://", caller="c") as idem:
        assert idem.run("k", paying(500)) == idem.run("k", paying(500))
        with pytest.raises(KeyReused):
            idem.run("k", paying(900))


class Till:
    """An object that can be called, and does what it was made for."""

    def __init__(self, does):
        self.does = does

    def __call__(self, order):
        return f"{self.does} {order}"


@pytest.mark.parametrize("key", ["order", BodyKey()])
def test_once_needs_a_name_for_what_has_none(key):
    """Else all of these are one operation, and a refund gets the outcome of a charge."""
    window = FOREVER if isinstance(key, str) else None
    with Idempotency("memory://", caller="c", secret="a secret of these tests") as idem:
        for nameless in (Till("charge"), lambda order: order, functools.partial(Till("charge"))):
            with pytest.raises(InvalidInput, match=r"pass name=… to once\(\)"):
                idem.once(key=key, window=window)(nameless)
        done = [
            idem.once(key=key, window=window, name=name)(Till(name))(7)
            for name in ("charge", "refund")
        ]
    assert done == ["charge 7", "refund 7"]


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("order", (None,)),
        ("order", ("",)),
        (("order", "shop"), (None, "")),
        (lambda order: (), (7,)),
        (lambda order: (None, b""), (7,)),
    ],
)
def test_a_natural_key_that_identifies_nothing_is_refused(key, call):
    """Two orders that are not saved yet would be one, and the second would be lost."""
    with Idempotency("memory://", caller="c") as idem:

        @idem.once(key=key, window=FOREVER)
        def pay(order, shop=None):
            return order

        with pytest.raises(KeyInvalid, match="are None or empty"):
            pay(*call)


@pytest.mark.parametrize("order", [0, False, "0"])
def test_a_natural_key_of_one_value_is_taken(order):
    """A zero is a value, and one value of several is enough."""
    with Idempotency("memory://", caller="c") as idem:

        @idem.once(key=("order", "shop"), window=FOREVER)
        def pay(order, shop=None):
            return order

        assert pay(order) == order


def test_a_lambda_is_refused_where_python_keeps_no_positions():
    """`python -X no_debug_ranges` leaves nothing to read the call from."""
    bare = (lambda: charge("c1", 900)).__code__.replace(co_linetable=b"")
    operation = type(charge)(bare, globals())
    refused = pytest.raises(FingerprintImpossible, match=r'run\(key, charge, "c1", 500\)')
    with Idempotency("memory://", caller="c") as idem, refused:
        idem.run("k", operation)

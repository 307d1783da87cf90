"""Messages name what their reader wrote, and say what to do."""

from __future__ import annotations

import asyncio
import sqlite3
import traceback
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from retrysafe import FOREVER, GLOBAL, AsyncIdempotency, BodyKey, Idempotency, InvalidInput
from retrysafe.errors import FingerprintImpossible, OperatorRefused, PolicyInvalid, StoreMissing
from retrysafe.observe import Event, EventKind

SECRET = "sixteen bytes or more"


def test_a_short_window_is_refused_by_the_name_that_the_user_gave_it():
    """Who writes BodyKey(window=…) is told about that window, not about a derived setting."""
    with Idempotency("memory://", caller="c", secret=SECRET) as idem:
        with pytest.raises(PolicyInvalid, match=r"the window of a BodyKey .* the lease"):
            idem.once(key=BodyKey(window=timedelta(seconds=5)))(lambda text: text)
        idem.once(key=BodyKey(window=idem.policy.lease), name="echo")(lambda text: text)


@pytest.mark.parametrize("window", [5, None, "5m"])
def test_a_window_that_is_no_time_is_refused(window):
    with (
        Idempotency("memory://", caller="c", secret=SECRET) as idem,
        pytest.raises(
            PolicyInvalid, match=r"window of a BodyKey .*timedelta\(minutes=5\), or FOREVER, got"
        ),
    ):
        idem.once(key=BodyKey(window=window))(lambda text: text)


@pytest.mark.parametrize("source", [BodyKey(), "amount"])
def test_numbers_too_long_for_a_key_are_told_as_such(source):
    """As in `run`, and not in words about a setting of Python alone."""
    with Idempotency("memory://", caller="c", secret=SECRET) as idem:
        window = None if isinstance(source, BodyKey) else FOREVER

        @idem.once(key=source, name="pay", window=window)
        def pay(amount):
            return amount

        for call in (pay, lambda amount: idem.run("k", len, amount)):
            with pytest.raises(FingerprintImpossible, match=r"pass|request="):
                call(10**5000)


def test_numbers_too_long_for_an_atomic_run_are_told_as_such():
    connection = sqlite3.connect(":memory:")
    with (
        closing(connection),
        Idempotency("memory://", caller="c") as idem,
        pytest.raises(FingerprintImpossible, match="request="),
        idem.atomic(connection, "k", request=10**5000),
    ):
        pytest.fail("it must not begin")


def test_a_withheld_outcome_is_reported_by_its_reason():
    """Observers and the log get a sentence, not the stored JSON around it."""
    heard: list[Event] = []
    with Idempotency("memory://", caller="c", observers=[heard.append]) as idem:
        idem.run("k", object)
    (withheld,) = [event for event in heard if event.kind is EventKind.WITHHELD]
    assert withheld.detail.startswith("the value is a builtins:object, which has no stored form")


def test_a_request_without_a_stable_form_is_not_told_to_return_something():
    """The advice fits a request as well as a result."""
    with (
        Idempotency("memory://", caller="c") as idem,
        pytest.raises(FingerprintImpossible, match=r"the request.0. is a builtins:object.*: use"),
    ):
        idem.run("k", lambda value: value, object())


def test_a_request_with_a_field_that_was_never_set_is_refused_in_words():
    """Not by an AttributeError out of the library's own code."""

    @dataclass
    class Order:
        item: str
        price: int = field(init=False)

    with (
        Idempotency("memory://", caller="c") as idem,
        pytest.raises(FingerprintImpossible, match=r"was never set: .*price.*pass request="),
    ):
        idem.run("k", lambda order: order.item, Order("pen"))


def stream():
    yield 1


async def charge_later():
    """Never called: it is refused before."""


def test_operations_are_named_and_never_shown_by_their_address():
    """A message can be searched for; an address in memory means nothing to its reader."""
    module = __name__
    with Idempotency("memory://", caller="c") as idem:
        for misuse, words in (
            (lambda: idem.run("k", stream), f"the operation {module}.stream is a generator"),
            (lambda: idem.run("k", charge_later), f"the operation {module}.charge_later is async"),
            (lambda: idem.answer_of(stream), f"the operation {module}.stream is not decorated"),
            (
                lambda: idem.once(window=FOREVER, key="y")(lambda x: x),
                "the operation (unnamed) has no parameter 'y'",
            ),
        ):
            with pytest.raises(InvalidInput) as caught:
                misuse()
            assert str(caught.value).startswith(words)
            assert " at 0x" not in str(caught.value)


def test_a_plain_function_under_async_decorators_is_told_what_takes_it():
    """By its name, and with the way out: the same object runs it as it is."""

    def charge(amount):
        return amount

    async def scenario():
        async with AsyncIdempotency("memory://", caller="c") as idem:
            words = r"the operation .*\.charge is not async: write async def"
            with pytest.raises(InvalidInput, match=f"{words}, or call it with run$"):
                idem.once(window=FOREVER, key="amount")(charge)
            for decorate in (
                idem.resumable(),
                idem.atomic_once(window=FOREVER, key="amount", connection="amount"),
            ):
                with pytest.raises(InvalidInput, match=f"{words}$"):
                    decorate(charge)
            return await idem.run("k", charge, 5)

    assert asyncio.run(scenario()) == 5


@pytest.mark.parametrize("kind", [Idempotency, AsyncIdempotency])
def test_once_without_a_key_is_told_about_the_key(kind):
    """The bare decorator is the likely slip, and the number of arguments is not what is wrong."""
    idem = kind("memory://", caller="c")
    with pytest.raises(TypeError, match="required keyword-only argument: 'key'"):

        @idem.once
        def pay(invoice_id):
            """Never decorated."""

    with pytest.raises(InvalidInput, match=r"write @idem.once\(key=…\) above the function"):
        idem.once(stream, key="k")


def test_an_operator_reads_whose_key_it_is_in_words():
    """No Python in what is told to people: the caller is named, or the key is global."""
    with Idempotency("memory://") as idem:
        idem.run("w1", lambda: 1, caller="acme", request=None)
        idem.run("w1", lambda: 1, caller=GLOBAL, request=None)
        with pytest.raises(OperatorRefused, match="cannot release key 'w1' of caller 'acme' while"):
            idem.release("w1", caller="acme")
        with pytest.raises(OperatorRefused, match=r"cannot release key 'w1' \(global\) while"):
            idem.release("w1", caller=GLOBAL)
        with pytest.raises(OperatorRefused, match="no record of key 'w2' of caller 'acme':"):
            idem.release("w2", caller="acme")


def test_a_store_that_is_not_there_is_told_once(tmp_path):
    """One problem is one traceback: no copy of the error chained to itself."""
    with Idempotency(f"sqlite:///{tmp_path}/nowhere/app.db", caller="c") as idem:
        with pytest.raises(StoreMissing, match="there is no folder") as caught:
            idem.run("k", lambda: 1, request=None)
        told = "".join(traceback.format_exception(caught.value))
    assert told.count("Traceback (most recent call last)") == 1
    assert told.count(str(caught.value)) == 1
    assert "in connect" in told

"""Models count by what they hold, and never come back as less than that."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pydantic
import pytest

from retrysafe import BodyKey, KeyReused, OutcomeUnavailable, current_attempt
from retrysafe.errors import ArgumentsNotStorable, StepUnavailable
from retrysafe.observe import EventKind
from retrysafe.stores import MemoryStore

SECRET = "0123456789abcdef"


class Card(pydantic.BaseModel):
    number: pydantic.SecretStr
    code: str = pydantic.Field(default="", exclude=True)


class Item(pydantic.BaseModel):
    name: str


class Engraved(Item):
    words: str


class Order(pydantic.BaseModel):
    item: Item


class Part(msgspec.Struct):
    name: str


class Spare(Part):
    number: int


class Repair(msgspec.Struct):
    part: Part


# As arguments.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Card(number="4111"), Card(number="4222")),
        (Card(number="4111", code="1"), Card(number="4111", code="2")),
        (
            Order(item=Engraved(name="ring", words="A")),
            Order(item=Engraved(name="ring", words="B")),
        ),
        (Repair(Spare("wheel", 1)), Repair(Spare("wheel", 2))),
        (pydantic.SecretStr("a"), pydantic.SecretStr("b")),
    ],
)
def test_another_model_under_the_same_key_is_refused(subject, first, second):
    """Although the two print alike: what is masked or left out there was asked for as well."""
    face = subject(MemoryStore(), caller="tester")
    face.run("key", lambda model: "paid", first)
    assert face.answer("key", lambda model: "paid", first).replayed
    with pytest.raises(KeyReused):
        face.run("key", lambda model: "paid", second)


def test_two_cards_are_charged_twice_under_body_keys(subject):
    """A key made of the call itself must not make one of two charges."""
    face = subject(MemoryStore(), caller="tester", secret=SECRET)
    charged = []

    def charge(card):
        charged.append(card.number.get_secret_value())
        return len(charged)

    once = face.once(charge, key=BodyKey(), name="charge")
    assert [once(Card(number=number)) for number in ("4111", "4222", "4111")] == [1, 2, 1]
    assert charged == ["4111", "4222"]


def test_a_resumable_operation_is_refused_rather_than_stored_with_a_mask(subject):
    """A worker would run it with the mask for a card number; nothing ran, nothing is claimed."""
    face = subject(MemoryStore(), caller="tester")
    ran = []

    def pay(card: Card) -> str:
        ran.append(card)
        return "paid"

    as_taken = getattr(face, "_as_async", lambda function: function)(pay)
    resumable = face.idem.resumable("pay")(as_taken)
    for card in (Card(number="4111"), Card(number="", code="1")):
        with pytest.raises(ArgumentsNotStorable, match=r"\.(number|code) would come back"):
            face.run("key", resumable, card)
    assert ran == []
    assert face.call("read", "key") is None
    assert face.run("key", resumable, Card(number="")) == "paid"


# As results.


class Report(pydantic.BaseModel):
    meta: dict[str, Any]


@pytest.mark.parametrize(
    ("result", "field"),
    [
        (Card(number="4111"), "number"),
        (Card(number="", code="1"), "code"),
        (Order(item=Engraved(name="ring", words="A")), "item"),
        (Report(meta={"at": datetime(2024, 1, 1, tzinfo=UTC)}), "meta"),
        (Repair(Spare("wheel", 1)), "part"),
    ],
)
def test_a_result_that_would_come_back_changed_is_withheld(subject, url, result, field):
    """The first caller has it; later ones are told, and the operation does not run again."""
    heard = []
    face = subject(url, caller="tester", cache=False, observers=[heard.append])
    ran = []

    def operation():
        ran.append(1)
        return result

    assert face.run("key", operation) is result
    with pytest.raises(OutcomeUnavailable, match=rf"the value\.{field}"):
        face.run("key", operation)
    assert ran == [1]
    (withheld,) = [event for event in heard if event.kind is EventKind.WITHHELD]
    assert "4111" not in withheld.detail


def test_the_mask_of_a_secret_is_never_in_the_store(subject):
    face = subject(MemoryStore(), caller="tester")
    face.run("key", lambda: [Card(number="4111")])
    (outcome,) = face.call("read", "key").outcomes
    assert b"**" not in outcome.payload.body
    assert b"4111" not in outcome.payload.body


def test_a_result_that_comes_back_equal_is_replayed(subject, url):
    face = subject(url, caller="tester", cache=False)
    result = Order(item=Item(name="ring"))
    assert face.run("key", lambda: result) is result
    answer = face.answer("key", lambda: result)
    assert answer.replayed
    assert answer.value == result
    assert answer.value is not result


# As results of steps.


def test_a_step_whose_result_would_change_does_not_run_again(subject):
    """The next attempt is told that the result is not there; it does not get a mask for it."""
    face = subject(MemoryStore(), caller="tester")
    made, got = [], []

    def token() -> Card:
        made.append(1)
        return Card(number="token-1")

    def sync_operation():
        got.append(current_attempt().step("token", token).number.get_secret_value())
        raise ConnectionError

    async def async_operation():
        card = await current_attempt().step("token", face._as_async(token))
        got.append(card.number.get_secret_value())
        raise ConnectionError

    operation = async_operation if hasattr(face, "_as_async") else sync_operation
    with pytest.raises(ConnectionError):
        face.run("key", operation)
    with pytest.raises(StepUnavailable, match=r"the value\.number"):
        face.run("key", operation)
    assert (made, got) == ([1], ["token-1"])

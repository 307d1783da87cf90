"""Models count by what they hold, and never come back as less than that."""

from __future__ import annotations

import msgspec
import pydantic
import pytest

from retrysafe import BodyKey, KeyReused, MemoryStore

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

"""Outcomes as bytes: forms, limits, failures, and what happens to bytes that nobody can read."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core.model import Payload
from retrysafe.core.values import codec
from retrysafe.core.values.codec import ValueCodec
from retrysafe.core.values.compare import difference
from retrysafe.core.values.trees import NotReadable, NotStorable, type_name
from retrysafe.errors import AttemptsExhausted, OperationFailed, OutcomeUnavailable
from tests.core import sample_types
from tests.core.sample_types import (
    Aliased,
    CardExpired,
    Colour,
    Computed,
    Declined,
    Frozen,
    Model,
    Mute,
    OneSlot,
    Picky,
    PickyNew,
    Plain,
    Point,
    Right,
    Shape,
    Slotted,
    Struct,
    Text,
    WithInitVar,
)

CODEC = ValueCodec()
ROOMY = 100_000


@pytest.mark.parametrize(
    ("value", "form", "head", "body"),
    [
        ({"a": [1, None]}, "json.1", b"", b'{"a":[1,null]}'),
        ("é", "json.1", b"", '"é"'.encode()),
        (None, "json.1", b"", b"null"),
        (b"\x00\xff", "bytes.1", b"", b"\x00\xff"),
        (b"", "bytes.1", b"", b""),
        ((1,), "tagged.1", b"", b'{"$":"tuple","v":[1]}'),
        ({"$": 1}, "tagged.1", b"", b'{"$":"dict","v":[["$",1]]}'),
        ([b"x"], "tagged.1", b"", b'[{"$":"bytes","v":"eA=="}]'),
        (
            Right(3),
            "tagged.1",
            b"",
            b'{"$":"flag","t":"tests.core.sample_types:Right","v":3}',
        ),
        (
            Colour.RED,
            "tagged.1",
            b"",
            b'{"$":"enum","t":"tests.core.sample_types:Colour","v":"RED"}',
        ),
        (
            Plain(1, (2,)),
            "dataclass.1",
            b"tests.core.sample_types:Plain",
            b'{"a":1,"b":{"$":"tuple","v":[2]}}',
        ),
        (Struct(1), "msgspec.1", b"tests.core.sample_types:Struct", b'{"a":1,"b":[]}'),
        (Model(a=1), "pydantic.1", b"tests.core.sample_types:Model", b'{"a":1,"b":[]}'),
    ],
)
def test_stored_forms_are_frozen(value, form, head, body):
    """These bytes are in databases: this release writes them so, and every later one reads them."""
    payload = CODEC.encode(value)
    assert (payload.form, payload.head, payload.body) == (form, head, body)
    back = CODEC.decode(payload)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    "value",
    [
        Frozen((1, {2}), Frozen(Decimal("1.10"))),
        Computed(amount=3),
        Aliased(cardNumber="4242", sum=7),
        Shape.SMALL,
        Point(1, Point(2)),
        [Struct(1), Model(a=2)],
        {1: "a", "$": "b"},
    ],
)
def test_values_come_back_as_they_were(value):
    back = CODEC.decode(CODEC.encode(value))
    assert type(back) is type(value)
    assert back == value


def test_bodies_that_claim_to_be_json_are_json():
    """A store that shows outcomes as JSON may rely on the list of forms."""
    for payload in (
        *(CODEC.encode(value) for value in ({}, (1,), Plain(1), Struct(1), Model(a=1))),
        codec.encode_failure(Declined("x"), ROOMY),
        codec.exhausted("attempt_limit", 3),
        codec.withheld("reason"),
    ):
        assert payload.form in codec.JSON_FORMS
        json.loads(payload.body)
    assert codec.BYTES not in codec.JSON_FORMS


class Hostile:
    """A value that fails in a way of its own as soon as it is looked at."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def __class__(self) -> type:
        raise self._error


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Text("a"),
        Plain,
        Plain(object()),
        [10**5000],
        Struct("\ud800"),
        Model.model_construct(a="\ud800"),
    ],
)
def test_what_cannot_be_stored_is_told_as_such(value):
    """Whatever goes wrong while encoding, there is one exception for it, and it has a message."""
    with pytest.raises(NotStorable) as caught:
        CODEC.encode(value)
    assert str(caught.value)


@pytest.mark.parametrize("error", [LookupError("gone"), Mute()])
def test_values_that_fail_when_looked_at_are_told_as_such(error):
    with pytest.raises(NotStorable, match="could not be encoded"):
        CODEC.encode(Hostile(error))


@pytest.mark.parametrize("form", ["json.2", "failure.2", "protobuf.1", ""])
def test_forms_of_a_newer_release_are_reported(form):
    with pytest.raises(NotReadable, match="which this release does not know"):
        CODEC.decode(Payload(form, b"", b"{}"))


@pytest.mark.parametrize(
    ("form", "head", "body"),
    [
        (codec.JSON, b"", b"{"),
        (codec.JSON, b"", b"\xff"),
        (codec.JSON, b"", b'"'),
        (codec.JSON, b"", b'"\xff"'),
        (codec.JSON, b"", b'"a"b"'),
        (codec.JSON, b"", b'"a\\"'),
        (codec.JSON, b"", b'"a\x00b"'),
        (codec.JSON, b"", b'"a\nb"'),
        (codec.TAGGED, b"", b""),
        (codec.TAGGED, b"", b'{"$":[]}'),
        (codec.TAGGED, b"", b'{"$":"tuple"}'),
        (codec.TAGGED, b"", b'{"$":"decimal","v":"x"}'),
        (codec.TAGGED, b"", b'{"$":"uuid","v":5}'),
        (codec.TAGGED, b"", b'{"$":"bytes","v":"\xc3\xa9"}'),
        (codec.TAGGED, b"", b'{"$":"set","v":[[]]}'),
        (codec.TAGGED, b"", b'{"$":"datetime","v":"yesterday"}'),
        (codec.TAGGED, b"", b'{"$":"enum","v":"RED"}'),
        (codec.DATACLASS, b"tests.core.sample_types:Plain", b"[]"),
        (codec.DATACLASS, b"\xff", b"{}"),
        (codec.DATACLASS, b"this:Zen", b"{}"),
        (codec.PYDANTIC, b"tests.core.sample_types:Model", b"{"),
        (codec.PYDANTIC, b"tests.core.sample_types:Plain", b"{}"),
        (codec.MSGSPEC, b"tests.core.sample_types:Struct", b"{"),
        (codec.MSGSPEC, b"", b"{}"),
    ],
)
def test_damaged_bytes_are_told_and_nothing_else_is_raised(form, head, body):
    with pytest.raises(NotReadable):
        CODEC.decode(Payload(form, head, body))


def test_blanks_that_somebody_put_around_a_value_do_not_count():
    """A row that was mended by hand is still read."""
    assert CODEC.decode(Payload(codec.JSON, b"", b' {"n": 1}\n')) == {"n": 1}
    with pytest.raises(NotReadable, match="Extra data"):
        CODEC.decode(Payload(codec.JSON, b"", b'{"n": 1} 2'))


@given(st.sampled_from(codec.JSON_FORMS), st.binary(max_size=30), st.binary(max_size=30))
def test_random_bytes_are_read_or_told(form, head, body):
    """No bytes in a database can make a replay raise anything but its own errors."""
    with contextlib.suppress(NotReadable):
        CODEC.decode(Payload(form, head, body))


def test_a_class_that_refuses_today_what_it_returned_then_is_reported():
    """What the class raises while it is rebuilt is not the outcome of the operation."""
    payload = CODEC.encode(Picky(1))
    payload.body = b'{"a":-1}'
    with pytest.raises(NotReadable, match="too late"):
        CODEC.decode(payload)


def test_types_without_a_global_name_come_back_when_declared():
    local = type("Local", (Plain,), {"__qualname__": "f.<locals>.Local"})
    payload = CODEC.encode(local(1))
    with pytest.raises(NotReadable, match="returns="):
        CODEC.decode(payload)
    back = ValueCodec((local,)).decode(payload)
    assert type(back) is local
    assert back.a == 1


def test_a_stored_outcome_never_imports_a_module():
    for form in (codec.DATACLASS, codec.PYDANTIC, codec.MSGSPEC):
        with pytest.raises(NotReadable, match="not loaded here"):
            CODEC.decode(Payload(form, b"this:Zen", b"{}"))
    assert "this" not in sys.modules


@pytest.mark.parametrize("package", ["msgspec", "pydantic"])
def test_plain_values_need_no_optional_package(monkeypatch, package):
    monkeypatch.delitem(sys.modules, package)
    for value in ({"a": 1}, (1,), Plain(1)):
        assert CODEC.decode(CODEC.encode(value)) == value
    assert package not in sys.modules


def test_structs_and_models_need_their_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "msgspec")
    with pytest.raises(NotStorable, match="no stored form"):
        CODEC.encode(Struct(1))


# Models that would come back as something else.


class Secretive(pydantic.BaseModel):
    token: pydantic.SecretStr = pydantic.SecretStr("abc")


class Revealing(Secretive):
    """Says itself that its secret is written out."""

    @pydantic.field_serializer("token")
    def reveal(self, token: pydantic.SecretStr) -> str:
        return token.get_secret_value()


class Excluding(pydantic.BaseModel):
    a: int
    b: int = pydantic.Field(default=0, exclude=True)


class Demanding(pydantic.BaseModel):
    a: int = pydantic.Field(exclude=True)


class Loose(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    x: Any = None


class Engraved(Model):
    words: str


class Box(pydantic.BaseModel):
    inner: Model


class Measured(pydantic.BaseModel):
    x: float


class LooseStruct(msgspec.Struct):
    x: Any


class SubStruct(Struct):
    c: int = 0


class StructBox(msgspec.Struct):
    inner: Struct


class Doubling(msgspec.Struct):
    """Changes a field whenever it is made."""

    a: int

    def __post_init__(self) -> None:
        self.a *= 2


class ByIdentity(msgspec.Struct, eq=False, omit_defaults=True, rename="camel", tag=True):
    long_name: int = 1
    raw: msgspec.Raw = msgspec.Raw(b'{"a": 1}')


@dataclass
class Growing:
    """Changes what it was given as soon as it is made."""

    items: list

    def __post_init__(self) -> None:
        self.items.append(len(self.items))


NOON = datetime(2024, 2, 29, 12, 0, tzinfo=UTC)
CHANGING = [
    (Secretive(), r"\.token would come back as another value"),
    (Excluding(a=1, b=5), r"\.b would come back as another value"),
    (Demanding(a=1), "could not be made again.* a: Field required"),
    (Loose(x={"at": NOON}), r"\.x\['at'\] is a datetime:datetime and .* a builtins:str"),
    (Loose(x=[Decimal("1.5")]), r"\.x\[0\] is a decimal:Decimal and .* a builtins:str"),
    (Loose(x=(1, 2)), r"\.x is a builtins:tuple and .* a builtins:list"),
    (Loose(y=NOON), r"\.y is a datetime:datetime"),
    (Box(inner=Engraved(a=1, words="w")), r"\.inner is a .*:Engraved and .* a .*:Model"),
    (Measured(x=float("nan")), "x: Input should be a valid number|not JSON compliant"),
    (Measured(x=float("inf")), "x: Input should be a valid number|not JSON compliant"),
    (LooseStruct((1, NOON)), r"\.x is a builtins:tuple"),
    (LooseStruct([NOON]), r"\.x\[0\] is a datetime:datetime and .* a builtins:str"),
    (StructBox(SubStruct(1)), r"\.inner is a .*:SubStruct and .* a .*:Struct"),
    (Doubling(1), r"\.a would come back as another value"),
    (WithInitVar(1, 2), "missing 1 required positional argument: 'seed'"),
    (Plain(Secretive()), r"\.a\.token would come back as another value"),
]


@pytest.mark.parametrize(("value", "words"), CHANGING)
@pytest.mark.parametrize(
    ("wrap", "where"), [(lambda item: item, ""), (lambda item: {"in": (item,)}, r"\['in'\]\[0\]")]
)
def test_what_would_come_back_changed_is_not_stored(value, words, wrap, where):
    """A replay that differs from the first answer is worse than none; the field is named."""
    words = f"the value{where}{words}" if words.startswith(r"\.") else words
    with pytest.raises(NotStorable, match=words):
        CODEC.encode(wrap(value))


@pytest.mark.parametrize(
    "value",
    [
        Revealing(),
        Excluding(a=1),
        Loose(x={"n": [1, 2.5, None, "t", True]}, y="extra"),
        Box(inner=Model(a=1)),
        Measured(x=-0.0),
        LooseStruct({"n": [1, 2.5, None, "t", True]}),
        SubStruct(1, c=2),
        Plain(float("nan"), {float("inf")}),
        [Plain(Box(inner=Model(a=1))), StructBox(Struct(1))],
        ByIdentity(),
        ByIdentity(2, msgspec.Raw(b"[1,  2]")),
    ],
)
def test_what_comes_back_the_same_is_stored(value):
    assert difference(value, CODEC.decode(CODEC.encode(value))) is None


def test_trying_a_value_leaves_it_as_it_is():
    """Code of the class that runs again while the value is tried gets parts of its own."""
    value = Growing([3])
    with pytest.raises(NotStorable, match=r"\.items would come back with other parts"):
        CODEC.encode(value)
    assert value.items == [3, 1]


def test_a_reason_holds_nothing_of_the_values():
    """It is logged, and shown to operators; what a model holds is for neither."""
    with pytest.raises(NotStorable) as caught:
        CODEC.encode(Talkative(a=1, note="4111"))
    assert "a: Field required" in str(caught.value)
    assert "4111" not in str(caught.value)


class Talkative(Demanding):
    note: str


def test_a_failure_never_comes_back_with_a_mask():
    """What would change is left out: name and message remain."""
    back = replayed(Declined("no", Secretive()), Declined)
    assert type(back) is OperationFailed
    assert str(back).startswith("Declined: ")
    back = replayed(Declined("no", Model(a=1)), Declined)
    assert type(back) is Declined
    assert back.args == ("no", Model(a=1))


# Limits.


@given(st.binary(max_size=50), st.integers(1, 60))
def test_bounded_keeps_what_fits_and_withholds_the_rest(body, limit):
    payload = Payload(codec.BYTES, b"hh", body)
    kept = codec.bounded(payload, limit)
    if len(body) + 2 <= limit:
        assert kept is payload
    else:
        assert kept.form == codec.WITHHELD
        assert "outcome_limit_bytes" in str(codec.unavailable(kept, "k"))


def test_withheld_outcomes_say_why():
    error = codec.unavailable(codec.withheld("no form for it"), "k-1")
    assert isinstance(error, OutcomeUnavailable)
    assert "will not run again" in str(error)
    assert "no form for it" in str(error)
    assert error.key == "k-1"


def test_reasons_are_bounded():
    assert codec.withheld("x" * 1_000_000).size_bytes < 2_100


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_reason_still_says_that_it_is_done(body):
    error = codec.unavailable(Payload(codec.WITHHELD, b"", body), "k-1")
    assert "will not run again" in str(error)


# Failures.


def replayed(error: Exception, *declared: type[Exception], limit: int = ROOMY) -> Exception:
    return codec.decode_failure(codec.encode_failure(error, limit), declared, "k-1")


@pytest.mark.parametrize(
    "error",
    [
        Declined(),
        Declined("no funds"),
        Declined("two", {"args": (1,)}),
        Declined("clé 😀"),
        KeyError("k"),
        FileNotFoundError(2, "No such file"),
        ValueError(Decimal("1.50")),
    ],
)
def test_declared_exceptions_come_back_as_they_were(error):
    back = replayed(error, type(error))
    assert type(back) is type(error)
    assert back.args == error.args
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_system_errors_keep_their_number():
    assert replayed(FileNotFoundError(2, "No such file"), OSError).errno == 2


def test_exceptions_with_parameters_of_their_own_come_back():
    """`__init__` is not called again: its parameters are not the args that it passed on."""
    back = replayed(CardExpired("4242", month=5), Declined)
    assert type(back) is CardExpired
    assert (back.card, back.month, str(back)) == ("4242", 5, "card 4242 expired")


def test_attributes_in_slots_come_back():
    back = replayed(Slotted(7), Declined)
    assert type(back) is Slotted
    assert back.code == 7
    assert not hasattr(back, "unset")
    assert replayed(OneSlot(3), Declined).only == 3


def test_notes_and_attributes_come_back():
    error = Declined("x")
    error.add_note("ask support")
    error.codes = (1, 2)
    back = replayed(error, Declined)
    assert back.__notes__ == ["ask support"]
    assert back.codes == (1, 2)


def test_exceptions_that_were_not_declared_become_operation_failed():
    back = replayed(CardExpired("4242", month=5), LookupError)
    assert type(back) is OperationFailed
    assert str(back) == "CardExpired: card 4242 expired"
    assert back.type_name == "tests.core.sample_types:CardExpired"
    assert back.key == "k-1"


def test_a_subclass_of_a_declared_type_is_found_wherever_it_hangs():
    assert type(replayed(Slotted(1), Exception)) is Slotted
    assert type(replayed(Slotted(1), LookupError, Declined)) is Slotted


def test_a_diamond_of_declared_types_is_walked_once():
    left = type("Left", (Declined,), {})
    right = type("Right", (Declined,), {})
    both = type("Both", (left, right), {"__module__": "nowhere"})
    assert type(replayed(both("x"), Declined)) is both


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Declined(object()), "Declined: <object object at"),
        (Mute(), "Mute: (the exception has no readable message)"),
        (PickyNew("a", "b"), "PickyNew: one"),
        (FileNotFoundError(2, "No such file", "/etc/x"), "No such file: '/etc/x'"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "can't decode byte 0xff"),
    ],
)
def test_what_cannot_be_rebuilt_keeps_its_name_and_message(error, words):
    """Better the right words in another type than the right type without its words."""
    declared = () if isinstance(error, Mute) else (type(error),)
    back = replayed(error, *declared)
    assert type(back) is OperationFailed
    assert words in str(back)


def test_a_mute_exception_comes_back_mute():
    assert type(replayed(Mute(), Declined)) is Mute


def test_hostile_attributes_do_not_stop_a_failure_from_being_stored():
    error = Declined("x")
    error.broken = Hostile(LookupError("gone"))
    assert str(replayed(error, Declined)) == "Declined: x"


def test_a_large_failure_keeps_its_name_and_message():
    """Over the limit the rebuilding parts go; the failure itself is always stored."""
    error = Declined("short", "y" * 5_000)
    payload = codec.encode_failure(error, 3_000)
    assert payload.size_bytes < 3_000
    assert type(codec.decode_failure(payload, (Declined,), "k")) is OperationFailed


def test_messages_are_bounded():
    back = replayed(Declined("x" * 1_000_000))
    assert len(str(back)) < 2_100


def test_a_class_that_is_gone_becomes_operation_failed():
    payload = codec.encode_failure(Declined("x"), ROOMY)
    payload.head = b"shop.errors:Gone"
    back = codec.decode_failure(payload, (Declined,), "k")
    assert str(back) == "Gone: x"


def test_a_failure_that_holds_an_unknown_type_becomes_operation_failed():
    payload = codec.encode_failure(Declined(Colour.RED), ROOMY)
    payload.body = payload.body.replace(b"Colour", b"Colourless")
    assert type(codec.decode_failure(payload, (Declined,), "k")) is OperationFailed


@pytest.mark.parametrize("form", [codec.FAILURE, codec.EXHAUSTED])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_failure_is_still_a_failure_that_does_not_run_again(form, body):
    error = codec.decode_failure(Payload(form, b"a:B", body), (Declined,), "k-1")
    assert type(error) is OutcomeUnavailable
    assert "will not run again" in str(error)
    assert error.key == "k-1"


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (
            codec.encode_failure(TimeoutError("read timed out"), 10_000),
            "TimeoutError: read timed out",
        ),
        (codec.encode_failure(KeyError(), 10_000), "KeyError: "),
        (Payload(codec.FAILURE, b"builtins:KeyError", b"{}"), "its failure cannot be read"),
        (codec.withheld("too large"), "not kept: too large"),
        (Payload("http.1", b"503", b"busy"), "a result in the form 'http.1'"),
    ],
)
def test_what_freed_a_key_is_told_in_words(payload, told):
    """Whatever form it is stored in, somebody who reads of it learns what is known."""
    assert told in codec.freed_by(payload)


def test_how_the_attempts_ended_is_part_of_the_stored_failure():
    """Bounded like every message, however long the last failure was."""
    payload = codec.exhausted("attempt_limit", 5, "the last failure: OSError: no")
    message = str(codec.decode_failure(payload, (), "k-1"))
    assert message.startswith("attempt_limit=5 is reached")
    assert message.endswith("; the last failure: OSError: no")
    endless = codec.exhausted("attempt_limit", 5, "x" * 1_000_000)
    message = str(codec.decode_failure(endless, (), "k-1"))
    assert len(message) == codec.MESSAGE_LIMIT_CHARACTERS
    assert message.startswith("attempt_limit=5 is reached")


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("attempt_limit", "attempt_limit=5 is reached: so many attempts crashed;"),
        ("release_limit", "release_limit=5 is reached: so many attempts failed and freed the key;"),
    ],
)
def test_exhausted_operations_say_which_limit_they_reached(limit, told):
    """Who reads it knows which setting to look at, and what the attempts did."""
    error = codec.decode_failure(codec.exhausted(limit, 5), (), "k-1")
    assert type(error) is AttemptsExhausted
    assert str(error).startswith(told)
    assert error.key == "k-1"


def test_withheld_failures_are_unavailable():
    assert type(codec.decode_failure(codec.withheld("x"), (), "k")) is OutcomeUnavailable


def test_failures_have_this_frozen_form():
    payload = codec.encode_failure(CardExpired("4242", month=5), ROOMY)
    assert (payload.form, payload.head) == ("failure.1", b"tests.core.sample_types:CardExpired")
    assert payload.body == (
        b'{"message":"card 4242 expired","args":["card 4242 expired"],'
        b'"state":{"card":"4242","month":5}}'
    )
    assert type_name(sample_types.CardExpired).encode() == payload.head


@given(st.text())
def test_texts_come_back(text):
    assert CODEC.decode(CODEC.encode(text)) == text

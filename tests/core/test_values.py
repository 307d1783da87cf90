"""Values come back equal and of the same types, or are refused with a reason."""

from __future__ import annotations

import json
import math
import sys
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrysafe.core.values import trees
from retrysafe.core.values.trees import (
    DEPTH_LIMIT,
    NotReadable,
    NotStorable,
    Types,
    from_tree,
    is_plain,
    json_bytes,
    sorted_json_bytes,
    to_tree,
    type_name,
)
from tests.core.sample_types import (
    Aliased,
    Colour,
    Computed,
    Counting,
    Frozen,
    Level,
    Model,
    Number,
    Picky,
    Plain,
    Point,
    Right,
    Shape,
    Struct,
    Text,
    WithInitVar,
    Word,
)

ZONES = st.sampled_from(
    [UTC, timezone(timedelta(hours=-5, minutes=-30)), None, ZoneInfo("Europe/Berlin")]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.decimals(),
    st.uuids(),
    st.dates(),
    st.times(timezones=ZONES),
    st.datetimes(timezones=ZONES),
    st.timedeltas(),
    st.sampled_from([*Colour, *Level, *Word, *Shape, *Right, Right(0), Right(3)]),
)
# What can be a key or a member of a set; signalling NaN cannot be hashed.
KEYS = st.recursive(
    SCALARS.filter(lambda item: not (isinstance(item, Decimal) and item.is_snan())),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
        st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner, inner),
    ),
    max_leaves=8,
)


def spelled(value: object) -> object:
    """A form in which two values are equal exactly when they are the same, types included."""
    kind = type(value).__name__
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(spelled(item)) for item in value)
    if isinstance(value, dict):
        return kind, [(spelled(name), spelled(item)) for name, item in value.items()]
    if isinstance(value, list | tuple):
        return kind, [spelled(item) for item in value]
    if isinstance(value, Plain):
        return kind, spelled([value.a, value.b])
    if isinstance(value, Frozen):
        return kind, spelled([value.a, value.inner])
    return kind, repr(value)


def through(value: object, *declared: type) -> object:
    return from_tree(json.loads(json_bytes(to_tree(value))), Types(declared))


@given(VALUES)
@example({"$": "tuple", "v": [1]})
@example({"$": None})
@example([{"$": 1}, {1: 2}, {"1": 2}])
@example({(1, "a"): {2}, None: 0, True: 1})
@example([float("nan"), float("inf"), -float("inf"), -0.0])
@example([Decimal("NaN"), Decimal("sNaN"), Decimal("-0"), Decimal("1.10"), Decimal("1E+5")])
@example(Frozen((1, Plain({"$": 2})), Frozen(frozenset({1}))))
@example(Point(Point(1, ()), [b""]))
@example(())
@example(set())
def test_values_come_back_equal_and_of_the_same_types(value):
    assert spelled(through(value)) == spelled(value)


@given(VALUES)
def test_plain_means_that_json_alone_brings_it_back(value):
    """`is_plain` says yes exactly when the tree is the value itself."""
    if is_plain(value):
        assert spelled(json.loads(json_bytes(value))) == spelled(value)
        assert to_tree(value) is value
    else:
        assert spelled(to_tree(value)) != spelled(value)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", b"", [], {}, (), set(), Decimal(0)])
def test_falsy_values_are_values(value):
    assert spelled(through(value)) == spelled(value)


@given(st.sets(st.text(max_size=4) | st.integers(), max_size=8))
def test_equal_sets_have_equal_texts(items):
    """The order in which a set happens to hold its members is not stored."""
    backwards = set()
    for item in sorted(items, key=repr, reverse=True):
        backwards.add(item)
    assert json_bytes(to_tree(items)) == json_bytes(to_tree(backwards))


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "😀", "\x00", "\u2028"])
def test_any_text_survives(text):
    """Python text may hold what UTF-8 cannot; it is stored escaped."""
    assert through([text]) == [text]
    json_bytes([text]).decode()  # What is stored is always valid UTF-8.


def test_sorted_json_ignores_the_order_of_names():
    assert sorted_json_bytes({"b": 1, "a": [2]}) == sorted_json_bytes({"a": [2], "b": 1})
    assert sorted_json_bytes({"b": 1}) != sorted_json_bytes({"b": 2})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Text("a"), "Text"),
        (Number(1), "Number"),
        (object(), "builtins:object"),
        (1j, "complex"),
        (bytearray(b""), "bytearray"),
        (Plain, "the value is a builtins:type"),
        (len, "builtin_function"),
        (iter([]), "list_iterator"),
    ],
)
def test_values_that_would_change_are_refused_by_name(value, words):
    """A subclass of str would come back as str; that is refused rather than done silently."""
    with pytest.raises(NotStorable, match=words):
        to_tree(value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([1, object()], r"the value\[1\] is"),
        ({"a": {"b": object()}}, r"the value\['a'\]\['b'\] is"),
        ({1: object()}, r"the value\[1\] is"),
        ({object(): 1}, "a key of the value is"),
        ((0, [object()]), r"the value\[1\]\[0\] is"),
        (Plain(1, [object()]), r"the value\.b\[0\] is"),
        (Point(object()), r"the value\[0\] is"),
    ],
)
def test_the_refused_part_is_named_by_its_path(value, path):
    with pytest.raises(NotStorable, match=path):
        to_tree(value)


def circular(kind: str) -> object:
    items: list = []
    if kind == "list":
        items.append(items)
        return items
    if kind == "dict":
        table: dict = {}
        table["self"] = table
        return table
    if kind == "tuple":
        items.append((items, Decimal(1)))
        return (items,)
    plain = Plain(1)
    plain.b = plain
    return plain


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "dataclass"])
def test_circular_values_are_refused(kind):
    with pytest.raises(NotStorable, match="nested deeper than 100 levels, or in a circle"):
        to_tree(circular(kind))


@pytest.mark.parametrize("wrap", [lambda item: [item], lambda item: (item,), Plain])
def test_depth_has_a_limit_and_the_limit_is_allowed(wrap):
    value: object = 1
    for _ in range(DEPTH_LIMIT):
        value = wrap(value)
    assert spelled(through(value)) == spelled(value)
    with pytest.raises(NotStorable, match="deeper than 100"):
        to_tree(wrap(value))


def test_fields_that_are_no_parameters_come_back():
    made = Computed(amount=4)
    made.total = 9
    assert through(made) == made


def test_post_init_does_not_change_a_value_a_second_time():
    """A replay shows the fields as they were, although making the object runs its code again."""
    assert through(Counting("a")) == Counting("a")
    assert through([Counting("a")])[0].name == "a!"


@pytest.mark.parametrize("kind", [Right.READ | Right.WRITE, Right(0), Right.READ])
def test_flags_come_back_combined(kind):
    assert through([kind]) == [kind]


@pytest.mark.parametrize(
    "model", [Struct(1, ["x"]), Model(a=1, b=["x"]), Aliased(cardNumber="4", sum=5)]
)
def test_models_inside_other_values_come_back(model):
    (back, _) = through((model, Decimal(1)))
    assert type(back) is type(model)
    assert back == model


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"$": "quaternion", "v": 1}, "'quaternion', which this release does not know"),
        ({"$": "enum", "t": type_name(Colour), "v": "GREEN"}, "no member 'GREEN'"),
        ({"$": "enum", "t": type_name(Plain), "v": "RED"}, "no member 'RED'"),
        ({"$": "flag", "t": type_name(Right), "v": 64}, "no member 64"),
        ({"$": "dataclass", "t": type_name(Plain), "v": {"c": 1}}, "fields .* have changed"),
        ({"$": "dataclass", "t": type_name(Frozen), "v": {}}, "fields .* have changed"),
        ({"$": "dataclass", "t": type_name(Point), "v": {}}, "not a dataclass any more"),
        ({"$": "dataclass", "t": type_name(WithInitVar), "v": {"a": 1}}, "have changed"),
        ({"$": "namedtuple", "t": type_name(Point), "v": [1, 2, 3]}, "have changed"),
        ({"$": "namedtuple", "t": type_name(Plain), "v": [1]}, "have changed"),
        ({"$": "pydantic", "t": type_name(Model), "v": {"a": "x"}}, "no longer fits"),
        ({"$": "pydantic", "t": type_name(Plain), "v": {}}, "no longer fits"),
        ({"$": "msgspec", "t": type_name(Struct), "v": {"a": "x"}}, "no longer fits"),
    ],
)
def test_types_that_changed_since_are_reported(tree, words):
    with pytest.raises(NotReadable, match=words):
        from_tree(tree, Types())


def test_a_new_field_with_a_default_is_no_obstacle():
    tree = {"$": "dataclass", "t": type_name(Plain), "v": {"a": 1}}
    assert from_tree(tree, Types()) == Plain(1)


@pytest.mark.parametrize(
    "name",
    ["tests.core.sample_types:Gone", "tests.core.sample_types:Plain.x", "", "nowhere", ":", "a:b"],
)
def test_unknown_types_are_told_with_what_to_do(name):
    with pytest.raises(NotReadable, match="annotate the operation's"):
        Types().find(name)


def test_a_stored_name_never_imports_a_module():
    """Whoever can write to the store must not be able to load code by it."""
    assert "this" not in sys.modules
    for tag in ("enum", "dataclass", "namedtuple", "pydantic", "msgspec"):
        with pytest.raises(NotReadable, match="not loaded here"):
            from_tree({"$": tag, "t": "this:Zen", "v": {}}, Types())
    assert "this" not in sys.modules


def test_declared_types_are_found_first_and_by_name():
    """A type in no module's namespace can still be declared."""

    class Local(Exception):
        pass

    with pytest.raises(NotReadable):
        Types().find(type_name(Local))
    assert Types((Local,)).find(type_name(Local)) is Local


def test_nested_names_are_found():
    assert Types().find("tests.core.test_values:Outer.Inner") is Outer.Inner


class Outer:
    class Inner:
        pass


class OldPydantic:
    """A model of a pydantic that does not know `by_name` yet."""

    @staticmethod
    def model_validate_json(body: bytes) -> object:
        return json.loads(body)


def test_older_pydantic_is_asked_in_its_own_way():
    assert trees.read_pydantic(OldPydantic, b'{"a":1}') == {"a": 1}


@pytest.mark.parametrize(("package", "model"), [("msgspec", Struct(1)), ("pydantic", Model(a=1))])
def test_without_the_package_its_models_are_unknown_values(monkeypatch, package, model):
    """Neither package is imported to find out: who has not loaded it has no model of it."""
    monkeypatch.delitem(sys.modules, package)
    with pytest.raises(NotStorable, match="has no stored form"):
        to_tree(model)
    assert package not in sys.modules


def test_a_struct_cannot_be_read_without_msgspec(monkeypatch):
    tree = to_tree(Struct(1))
    monkeypatch.delitem(sys.modules, "msgspec")
    with pytest.raises(NotReadable, match="needs msgspec, which is not loaded"):
        from_tree(tree, Types((Struct,)))


def test_numbers_json_has_no_word_for_are_tagged():
    tree = to_tree([float("nan"), float("inf")])
    assert "NaN" not in json_bytes(tree).decode()
    back = from_tree(tree, Types())
    assert math.isnan(back[0])
    assert back[1] == math.inf


def test_picky_classes_do_not_hide_what_they_raised():
    """An exception of the class's own code passes; the codec above turns it into words."""
    tree = to_tree(Picky(1))
    tree["v"]["a"] = -1
    with pytest.raises(RuntimeError, match="too late"):
        from_tree(tree, Types())


def test_uuid_and_bytes_are_stored_as_text():
    """Stored values can be read by people and queried as JSON."""
    assert to_tree([UUID(int=1), b"\xff"]) == [
        {"$": "uuid", "v": "00000000-0000-0000-0000-000000000001"},
        {"$": "bytes", "v": "/w=="},
    ]


def test_instants_keep_their_offset():
    zone = timezone(timedelta(hours=5, minutes=45))
    back = through([datetime(2024, 1, 1, tzinfo=zone)])[0]
    assert back.utcoffset() == timedelta(hours=5, minutes=45)


@given(st.text())
@example('"')
@example("a\\b")
@example("\x00\x1f\x7f\n")
@example("ä€😀")
@example("\ud800")
def test_a_text_is_written_as_the_encoder_writes_it(text):
    written = json_bytes(text)
    assert json_bytes([text]) == b"[%b]" % written
    assert json.loads(written) == text

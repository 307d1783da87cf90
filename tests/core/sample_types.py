"""Types that operations return in these tests; at module level, so that they have a stable name."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import Enum, Flag, IntEnum, StrEnum
from typing import Any, NamedTuple

import msgspec
import pydantic


class Colour(Enum):
    RED = "r"
    BLUE = ("b", 2)


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Word(StrEnum):
    YES = "yes"


class Right(Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclass
class Plain:
    a: Any
    b: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    inner: Any = None


@dataclass(kw_only=True)
class Computed:
    """A field that is not a parameter, set by `__post_init__`."""

    amount: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.amount * 2


@dataclass
class Counting:
    """`__post_init__` changes a parameter, so running it twice would change it twice."""

    name: str

    def __post_init__(self) -> None:
        self.name += "!"


@dataclass
class Picky:
    """Refuses to be made again, with an exception that is no ValueError."""

    a: int

    def __post_init__(self) -> None:
        if self.a < 0:
            raise RuntimeError("too late")


@dataclass
class WithInitVar:
    a: int
    seed: InitVar[int]


@dataclass(frozen=True)
class Mixed:
    side: float


class Shape(Mixed, Enum):
    """An enum whose members are dataclasses as well."""

    SMALL = 0.1


class Struct(msgspec.Struct):
    a: int
    b: list[str] = []


class Model(pydantic.BaseModel):
    a: int
    b: list[str] = []


class Aliased(pydantic.BaseModel):
    """Other names on the wire than in Python, a computed field, and no unknown fields."""

    model_config = pydantic.ConfigDict(extra="forbid")

    card_number: str = pydantic.Field(alias="cardNumber")
    total: int = pydantic.Field(validation_alias="sum", serialization_alias="amount")

    @pydantic.computed_field
    @property
    def doubled(self) -> int:
        return self.total * 2


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Declined(Exception):
    """Declared as terminal in these tests."""


class CardExpired(Declined):
    def __init__(self, card: str, *, month: int) -> None:
        super().__init__(f"card {card} expired")
        self.card = card
        self.month = month


class Slotted(Declined):
    __slots__ = ("code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OneSlot(Declined):
    __slots__ = "only"  # noqa: PLC0205 — one name alone is legal, and read as such.

    def __init__(self, only: int) -> None:
        super().__init__()
        self.only = only

    def __str__(self) -> str:
        return f"only {self.only}"


class Mute(Declined):
    """Cannot be turned into text."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class PickyNew(Declined):
    """Cannot be made from its args."""

    def __new__(cls, *args: Any) -> PickyNew:
        if len(args) != 2:
            raise LookupError("needs two")
        return super().__new__(cls, "one")

    def __init__(self, *args: Any) -> None:
        pass

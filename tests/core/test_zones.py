"""Dates and times come back in their time zone, equal also in the hour that a clock repeats."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, timezone, tzinfo
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest

from retrysafe.core.keys.canonical import of_tree
from retrysafe.core.keys.fingerprint import fingerprint_tree
from retrysafe.core.model import Payload
from retrysafe.core.values.codec import PYDANTIC, TAGGED, ValueCodec
from retrysafe.core.values.trees import NotReadable, NotStorable
from retrysafe.core.values.zones import zone_name
from tests.core.test_fingerprint_of_values import ZONE

BERLIN = ZoneInfo("Europe/Berlin")
# On that night the clock of Berlin shows half past two twice.
FIRST = datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN)
SECOND = FIRST.replace(fold=1)
SUMMER = datetime(2024, 7, 1, 12, tzinfo=BERLIN)


class Slot(NamedTuple):
    at: datetime


class Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="allow")

    at: datetime
    listed: list[datetime] = []
    paired: tuple[datetime, ...] = ()
    named: dict[str, datetime] = {}
    slot: Slot | None = None
    daily: time | None = None
    inner: Frozen | None = None


class Struct(msgspec.Struct, frozen=True):
    at: datetime
    listed: list[datetime] = []


@dataclass
class Booking:
    at: datetime
    model: Frozen | None = None


class Holding(msgspec.Struct):
    booking: Booking


class Instants(pydantic.BaseModel):
    found: set[datetime]


class Loose(pydantic.BaseModel):
    at: Any


class Foreign(tzinfo):
    """A zone of another library, which knows of the hour that its clock repeats."""

    def utcoffset(self, moment: datetime | None) -> timedelta | None:
        return None if moment is None else moment.replace(tzinfo=BERLIN).utcoffset()

    def dst(self, moment: datetime | None) -> timedelta | None:
        return None

    def tzname(self, moment: datetime | None) -> str | None:
        return "Foreign"


class Fixed(Foreign):
    """An offset of another library."""

    def utcoffset(self, moment: datetime | None) -> timedelta | None:
        return timedelta(hours=2)


def through(value: Any) -> Any:
    codec = ValueCodec((type(value),))
    return codec.decode(codec.encode(value))


def shown(moment: datetime | time) -> tuple[str, str | None, int]:
    return moment.isoformat(), zone_name(moment.tzinfo), moment.fold


@pytest.mark.parametrize("moment", [FIRST, SECOND, SUMMER, datetime.min.replace(tzinfo=BERLIN)])
def test_a_moment_keeps_its_zone(moment):
    """It is equal, shows the same text, and is the same moment a day later."""
    back = through(moment)
    assert back == moment
    assert shown(back) == shown(moment)
    assert through(moment) + timedelta(days=200) == moment + timedelta(days=200)


@pytest.mark.parametrize("moment", [time(2, 30, tzinfo=BERLIN), time(2, 30, fold=1)])
def test_a_time_of_day_keeps_its_zone_and_its_fold(moment):
    """Its offset is not known without a day, so its text says nothing of the zone."""
    assert shown(through(moment)) == shown(moment)


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2024, 7, 1, 12, tzinfo=UTC),
        datetime(2024, 7, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=45))),
        datetime(2024, 7, 1, 12),  # noqa: DTZ001 — a wall clock, without a zone.
        time(12),
        time(12, tzinfo=UTC),
    ],
)
def test_what_has_no_zone_with_a_name_is_stored_as_ever(moment):
    """Releases before this one read it."""
    payload = ValueCodec().encode(moment)
    assert json.loads(payload.body) == {"$": type(moment).__name__, "v": moment.isoformat()}
    assert through(moment) == moment


def test_records_of_earlier_releases_are_read():
    """They hold the offset alone, and that is what comes back."""
    old = Payload(TAGGED, b"", b'{"$":"datetime","v":"2024-10-27T02:30:00+01:00"}')
    assert ValueCodec().decode(old).utcoffset() == timedelta(hours=1)
    model = Payload(PYDANTIC, f"{__name__}:Loose".encode(), b'{"at":1}')
    assert ValueCodec((Loose,)).decode(model) == Loose(at=1)


@pytest.mark.parametrize(
    "model",
    [
        Frozen(at=SECOND),
        Frozen(
            at=SUMMER,
            listed=[FIRST, SECOND],
            paired=(SECOND, SUMMER),
            named={"second": SECOND},
            slot=Slot(SECOND),
            daily=time(2, 30, tzinfo=BERLIN),
            inner=Frozen(at=SECOND),
        ),
        Struct(SECOND, [FIRST, SECOND]),
    ],
)
@pytest.mark.parametrize("wrap", [lambda item: item, lambda item: {"done": [item]}])
def test_models_keep_the_zones_that_they_hold(model, wrap):
    """Their libraries write the offset alone."""
    back = through(wrap(model))
    assert back == wrap(model)
    assert repr(back) == repr(wrap(model))


def test_an_extra_field_of_a_model_keeps_its_zone():
    """Where its value is a moment at all: pydantic reads an undeclared one as a text."""
    with pytest.raises(NotStorable, match=r"\.when is a datetime:datetime"):
        ValueCodec((Frozen,)).encode(Frozen(at=SUMMER, when=SECOND))
    with pytest.raises(NotStorable, match=r"\.at is a datetime:datetime"):
        ValueCodec((Loose,)).encode(Loose(at=SECOND))


class Extended(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, datetime]


def test_a_declared_extra_keeps_its_zone():
    model = Extended(when=SECOND)
    assert shown(through(model).when) == shown(SECOND)


def test_a_dataclass_keeps_the_zones_that_it_holds():
    booking = Booking(SECOND, Frozen(at=SECOND))
    assert through(booking) == booking
    assert shown(through(booking).model.at) == shown(SECOND)


def test_a_dataclass_inside_of_a_model_keeps_its_zone():
    assert shown(through(Holding(Booking(SECOND))).booking.at) == shown(SECOND)


def test_what_would_lose_its_zone_is_withheld():
    """A model's set, whose members have no place of their own."""
    with pytest.raises(NotStorable, match="found"):
        ValueCodec((Instants,)).encode(Instants(found={SECOND}))


def test_a_zone_of_another_library_comes_back_as_its_offset_where_that_is_equal():
    """boto3 and drivers give such; a result that is equal is worth more than none."""
    moment = SUMMER.replace(tzinfo=Foreign())
    assert through(moment) == moment
    assert through(time(2, tzinfo=Fixed())).utcoffset() == timedelta(hours=2)


@pytest.mark.parametrize(
    "moment", [SECOND.replace(tzinfo=Foreign()), FIRST.replace(tzinfo=Foreign()), time(2, 30)]
)
def test_a_zone_of_another_library_is_withheld_where_its_offset_is_not_equal(moment):
    """In the hour that its clock repeats, and where a time of day has none."""
    with pytest.raises(NotStorable, match=r"use zoneinfo\.ZoneInfo"):
        ValueCodec().encode([moment.replace(tzinfo=Foreign())])


def test_a_zone_without_a_name_is_one_of_another_library():
    """It was read from a file, and nobody could find it by its key."""
    nameless = ZoneInfo.from_file(io.BytesIO(ZONE))
    assert zone_name(nameless) is None
    moment = SUMMER.replace(tzinfo=nameless)
    assert through(moment) == moment


def test_a_zone_that_is_not_known_here_is_reported():
    """The outcome stands; a replay says what is missing, and nothing runs."""
    stored = b'{"$":"datetime","v":"2024-07-01T12:00:00+03:00","z":"Nowhere/Atlantis"}'
    with pytest.raises(NotReadable, match="install tzdata"):
        ValueCodec().decode(Payload(TAGGED, b"", stored))


def test_a_zone_whose_rules_have_changed_keeps_the_instant():
    """What happened at an instant happened then, whatever the clocks there show today."""
    stored = b'{"$":"datetime","v":"2024-07-01T12:00:00+05:00","z":"Europe/Berlin"}'
    back = ValueCodec().decode(Payload(TAGGED, b"", stored))
    assert back == datetime(2024, 7, 1, 7, tzinfo=UTC)
    assert zone_name(back.tzinfo) == "Europe/Berlin"


def test_a_model_is_not_searched_for_zones_where_none_was_ever_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "zoneinfo")
    assert ValueCodec((Frozen,)).encode(Frozen(at=SUMMER)).form == PYDANTIC
    assert zone_name(BERLIN) is None


@pytest.mark.parametrize("moment", [SECOND, time(2, 30, tzinfo=BERLIN)])
def test_requests_count_as_ever(moment):
    """A moment counts by its instant: a deploy turns no honest retry into another request."""
    assert of_tree(fingerprint_tree(moment)) == of_tree(
        fingerprint_tree(moment.replace(tzinfo=Foreign()))
    )

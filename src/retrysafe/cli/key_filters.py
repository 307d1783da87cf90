"""Filters of keys, which every command on many keys shares; they combine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import typer

from retrysafe.cli import options
from retrysafe.cli.problems import usage
from retrysafe.core.listing import Position, RecordQuery
from retrysafe.core.model import Condition

_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"([0-9]{1,9})(s|m|h|d)")


class ListedCondition(StrEnum):
    """The conditions that a stored record can be in."""

    RUNNING = Condition.RUNNING.value
    ABANDONED = Condition.ABANDONED.value
    SUCCEEDED = Condition.SUCCEEDED.value
    FAILED = Condition.FAILED.value
    RELEASED = Condition.RELEASED.value
    OUTLIVED = Condition.OUTLIVED.value


CallerFilter = Annotated[
    str | None,
    typer.Option(
        "--caller", metavar="CALLER", help="Only keys of this caller.", show_default=False
    ),
]
BearerFilter = Annotated[
    str | None,
    typer.Option(
        "--bearer",
        metavar="TOKEN",
        help="Only keys of HTTP clients with this bearer token.",
        show_default=False,
    ),
]
ApiKeyFilter = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="APIKEY",
        help="Only keys of HTTP clients with this API key.",
        show_default=False,
    ),
]
GlobalFilter = Annotated[
    bool, typer.Option("--global", help="Only keys in the namespace shared by all callers.")
]
PrefixFilter = Annotated[
    str, typer.Option("--prefix", metavar="TEXT", help="Only keys that start so.")
]
OperationFilter = Annotated[
    str | None,
    typer.Option(
        "--operation", metavar="NAME", help="Only keys of this operation.", show_default=False
    ),
]
ConditionFilter = Annotated[
    list[ListedCondition] | None,
    typer.Option(
        "--condition",
        metavar="CONDITION",
        help=f"Only keys that are {', '.join(ListedCondition)}; may be repeated.",
    ),
]
OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="AGE",
        help="Only keys whose last claim is older, such as 30s, 5m, 2h or 7d.",
        show_default=False,
    ),
]
NewerThan = Annotated[
    str | None,
    typer.Option(
        "--newer-than",
        metavar="AGE",
        help="Only keys whose last claim is newer.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Filters:
    """What was asked for, as it was typed."""

    caller: str | None
    bearer: str | None
    api_key: str | None
    is_global: bool
    prefix: str
    operation: str | None
    conditions: list[ListedCondition] | None
    older_than: str | None
    newer_than: str | None

    @property
    def is_empty(self) -> bool:
        """Whether every key passes."""
        return not (
            self.caller
            or self.bearer
            or self.api_key
            or self.is_global
            or self.prefix
            or self.operation is not None
            or self.conditions
            or self.older_than
            or self.newer_than
        )

    def queries(
        self, limit: int, after: Position | None = None, seconds: float | None = None
    ) -> list[RecordQuery]:
        """One query for each form that the caller is stored in; raises a usage problem."""
        if self.caller == "":
            raise usage("--caller must not be empty: use --global for the shared namespace")
        callers: list[str | None] = [
            options.checked_text("--caller", each)
            for each in options.chosen_callers(
                self.caller, self.bearer, self.api_key, self.is_global
            )
        ]
        return [
            RecordQuery(
                caller=caller,
                text_prefix=options.checked_text("--prefix", self.prefix),
                conditions=frozenset(Condition(item.value) for item in self.conditions or ()),
                limit=limit,
                operation=self.operation and options.checked_text("--operation", self.operation),
                older_than_ms=_duration_ms("--older-than", self.older_than),
                newer_than_ms=_duration_ms("--newer-than", self.newer_than),
                after=after,
                seconds=seconds,
            )
            for caller in callers or ["" if self.is_global else None]
        ]


def _duration_ms(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    found = _DURATION.fullmatch(text)
    if found is None:
        raise usage(f"{option} takes a number and a unit, such as 30s, 5m, 2h or 7d")
    return int(found[1]) * _UNITS_MS[found[2]]


def chosen_position(text: str | None) -> Position | None:
    """Where a list goes on; raises a usage problem."""
    if text is None:
        return None
    found = Position.of(text)
    if found is None:
        raise usage("--after takes the position that the page before ended with")
    return found

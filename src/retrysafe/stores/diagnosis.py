"""What a look at a store's settings found, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about a store; a problem is something that can break a promise."""

    text: str
    is_problem: bool = True
    # What mends it: a command, or SQL to run as an administrator; empty where only you can know.
    mend: str = ""
    # The check that found it.
    check: str = ""


@dataclass(slots=True)
class Checkup:
    """What was looked at, and what was found there."""

    checked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, check: str, findings: Iterable[Finding]) -> bool:
        """Notes a check with what it found; says whether that is anything."""
        self.checked.append(check)
        found = [replace(item, check=check) for item in findings]
        self.findings += found
        return bool(found)


@runtime_checkable
class Diagnosable(Protocol):
    """A store that can look at its own settings."""

    async def check_up(self) -> Checkup:
        """What was looked at and what was found there; changes nothing."""

    async def diagnose(self) -> list[Finding]:
        """What is wrong, and what is worth knowing; changes nothing."""

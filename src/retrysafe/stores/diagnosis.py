"""What a look at a store's settings found, in plain sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about a store; a problem is something that can break a promise."""

    text: str
    is_problem: bool = True


@runtime_checkable
class Diagnosable(Protocol):
    """A store that can look at its own settings."""

    async def diagnose(self) -> list[Finding]:
        """What is wrong, and what is worth knowing; changes nothing."""

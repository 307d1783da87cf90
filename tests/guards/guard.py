"""A guard: a line of code, what breaks without it, and the test that notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.guards.mutation import Mutation
from tests.simulation.invariants import Invariant


@dataclass(frozen=True)
class Guard:
    """A line of code without which a promise breaks."""

    name: str
    prevents: str
    mutations: tuple[Mutation, ...]
    check: Callable[[], None]
    # What the simulation finds broken as well; nothing when the guard lies outside its reach.
    breaks: tuple[Invariant, ...] = ()

    @property
    def where(self) -> str:
        """The places that are changed to remove the guard."""
        return "; ".join(mutation.where for mutation in self.mutations)

"""Operations as labels of metrics: few, whatever names an application makes up."""

from __future__ import annotations

from typing import Final

# Names come from code and routes, so there are few; past this they share one label.
OPERATIONS_LIMIT: Final = 500
_OTHER: Final = "(other)"


class OperationNames:
    """Operations as labels; those past the limit share one."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def label(self, operation: str) -> str:
        """The name itself, or that of all others."""
        if operation not in self._known:
            if len(self._known) >= OPERATIONS_LIMIT:
                return _OTHER
            self._known.add(operation)
        return operation

"""A process that kills itself at the n-th boundary between claim and settle.

The boundaries are not chosen by hand: every SQL statement and every port call counts as one, on
both sides, and so does every line of the operation that has an effect.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from retrysafe.core.model import ClaimRequest, Settlement
from retrysafe.core.ports import ClaimResult, SettleResult
from retrysafe.stores.sqlite import SqliteStore
from tests.processes.ledger import note


class Boundaries:
    """Counts the boundaries and kills this process at the chosen one."""

    def __init__(self, log: str, fatal: int) -> None:
        self._log = log
        self._fatal = fatal
        self._passed = 0

    def cross(self, name: str) -> None:
        self._passed += 1
        if self._passed == self._fatal:
            note(self._log, name)
            os.kill(os.getpid(), signal.SIGKILL)


class MortalStore(SqliteStore):
    """The SQLite store, with a boundary around each commit and before each of its statements."""

    def __init__(self, path: str, boundaries: Boundaries) -> None:
        super().__init__(path)
        self._boundaries = boundaries

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        kind = "claim" if claims else f"settle-{settlements[0].kind.name.lower()}"
        connection = self._connected()
        # Called by SQLite right before it runs a statement.
        connection.set_trace_callback(
            lambda statement: self._boundaries.cross(f"{kind}:{'-'.join(statement.split()[:3])}")
        )
        self._boundaries.cross(f"{kind}:before")
        answers = await super().commit(claims, settlements)
        self._boundaries.cross(f"{kind}:after")
        return answers

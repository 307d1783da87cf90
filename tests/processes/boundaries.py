"""A process that kills itself at the n-th boundary between claim and settle.

The boundaries are not chosen by hand: every SQL statement and every port call counts as one, on
both sides, and so does every line of the operation that has an effect.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    Settlement,
    StepWrite,
)
from retrysafe.core.ports import ClaimResult, ExtendResult, SettleResult
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import PostgresStore
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
    """The SQLite store, with a boundary around each commit and before each of its statements.

    Renewals are left out: whether one comes at all depends on how busy the machine is, and one
    more or less would move every later boundary.
    """

    def __init__(self, path: str, boundaries: Boundaries) -> None:
        super().__init__(path)
        self._boundaries = boundaries
        # One at a time, so that statements are counted for whom they belong to.
        self._counting = threading.Lock()

    @contextmanager
    def _counted(self, kind: str | None) -> Iterator[None]:
        """Counts both sides, and every statement in between right before SQLite runs it."""
        with self._counting:
            self._connections.prepare()
            connection = self._connections.writer
            assert connection is not None
            if kind is None:
                connection.set_trace_callback(None)
                yield
                return
            connection.set_trace_callback(
                lambda sql: self._boundaries.cross(f"{kind}:{'-'.join(sql.split()[:3])}")
            )
            self._boundaries.cross(f"{kind}:before")
            yield
            self._boundaries.cross(f"{kind}:after")
            connection.set_trace_callback(None)

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        kind = "claim" if claims else f"settle-{settlements[0].kind.name.lower()}"
        with self._counted(kind):
            return await super().commit(claims, settlements)

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        with self._counted(None):
            return await super().extend(extensions, timeout_seconds)

    async def record_step(self, write: StepWrite) -> Decision:
        with self._counted(f"step-{write.step.name}".replace(" ", "-")):
            return await super().record_step(write)

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        with self._counted("take-over"):
            return await super().take_over(request, held)


class MortalPostgresStore(PostgresStore):
    """The PostgreSQL store, with a boundary around each commit and around each statement.

    Renewals are left out: whether one comes at all depends on how busy the machine is.
    """

    def __init__(self, url: str, boundaries: Boundaries, *, is_async: bool) -> None:
        made = postgres_store(url, is_async=is_async)
        super().__init__(made._connector, location=made.location, schema_name=made.schema_name)
        self._boundaries = boundaries
        self._kind = ""
        fetch = self._statements.fetch

        async def crossing(name, *params):
            self._boundaries.cross(f"{self._kind}:{name}:before")
            rows = await fetch(name, *params)
            self._boundaries.cross(f"{self._kind}:{name}:after")
            return rows

        self._statements.fetch = crossing

    async def commit(self, claims, settlements):
        self._kind = "claim" if claims else f"settle-{settlements[0].kind.name.lower()}"
        self._boundaries.cross(f"{self._kind}:before")
        answers = await super().commit(claims, settlements)
        self._boundaries.cross(f"{self._kind}:after")
        return answers

    async def record_step(self, write):
        self._kind = f"step-{write.step.name}".replace(" ", "-")
        self._boundaries.cross(f"{self._kind}:before")
        decision = await super().record_step(write)
        self._boundaries.cross(f"{self._kind}:after")
        return decision

    async def take_over(self, request, held):
        self._kind = "take-over"
        self._boundaries.cross("take-over:before")
        answer = await super().take_over(request, held)
        self._boundaries.cross("take-over:after")
        return answer

"""The store's statements by their names, on its own connections.

Owns what surrounds every statement: the schema that must be there first, and the next try after a
conflict. Knows nothing of what a statement says.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from retrysafe.errors import StoreNotWritable, StoreRejected, StoreUnavailable
from retrysafe.stores.diagnosis import Finding
from retrysafe.stores.postgres import diagnosis, schema
from retrysafe.stores.postgres.drivers.port import Conflict, Connector, RowRefused, Session
from retrysafe.stores.postgres.same_database import SameDatabase

T = TypeVar("T")

# Runs a statement by its name.
Fetch = Callable[..., Awaitable[Sequence[Sequence[Any]]]]

_logger = logging.getLogger("retrysafe")

# A deadlock or serialization failure means that nothing happened; the next try usually goes well.
_CONFLICT_TRIES: Final = 10


def given_up(conflicts: int, error: Conflict) -> StoreUnavailable:
    """The error for a statement whose rivals kept winning."""
    noun = "conflict" if conflicts == 1 else "conflicts"
    return StoreUnavailable(f"gave up after {conflicts} serialization {noun}: {error}")


class Statements:
    """The statements of one schema over one connector."""

    def __init__(self, connector: Connector, *, schema_name: str, location: str) -> None:
        self.connector = connector
        self.schema_name = schema_name
        self.location = location
        self.texts = schema.statements(schema_name)
        self.same_database = SameDatabase(
            connector, statements=self.texts, location=location, doubt=self._doubt
        )
        self._is_current = False

    def text(self, name: str) -> str:
        """The statement of a name."""
        return self.texts[name]

    async def fetch(self, name: str, *params: Any) -> Sequence[Sequence[Any]]:
        """Runs a statement, again after a deadlock or a serialization failure."""
        await self.require_current()
        connector = self.connector
        run = connector.fetch_patiently if name in schema.PATIENT else connector.fetch
        return await self._tried(lambda: run(self.text(name), params))

    async def fetch_text(self, text: str, params: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Runs a statement that has no name of its own, and may take long."""
        await self.require_current()
        return await self._tried(lambda: self.connector.fetch_patiently(text, params))

    async def transact(self, flow: Callable[[Fetch], Awaitable[T]]) -> T:
        """Runs statements in one transaction, which waits for locks; again as `fetch` does."""

        async def work(session: Session) -> T:
            async def fetch(name: str, *params: Any) -> Sequence[Sequence[Any]]:
                patient = name if name == "skip_locked" else f"{name}_patiently"
                return await session.fetch(self.text(patient), params)

            return await flow(fetch)

        return await self._tried(lambda: self.connector.transact(work))

    async def transacted(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Runs the work in one transaction; again as `fetch` does."""
        await self.require_current()
        return await self._tried(lambda: self.connector.transact(work))

    async def _tried(self, run: Callable[[], Awaitable[T]]) -> T:
        conflicts = 0
        for tries_left in range(_CONFLICT_TRIES - 1, -1, -1):
            try:
                return await run()
            except StoreNotWritable:
                # Nothing happened, and the connection is discarded. A new one may lead to a
                # primary already; if not, it is for the caller to be patient.
                if tries_left < _CONFLICT_TRIES - 1:
                    raise
            except RowRefused as error:
                raise StoreRejected(f"PostgreSQL refuses this row: {error}") from error
            except Conflict as error:
                conflicts += 1
                if not tries_left:
                    raise given_up(conflicts, error) from error
        raise AssertionError("unreachable: the last try returns or raises")

    async def require_current(self) -> None:
        """Raises once, and until somebody migrates, when the schema is not this release's.

        The first use also warns of settings that would break a promise. They are not refused: a
        pooler that keeps prepared statements looks just like one that loses them.
        """
        if self._is_current:
            return
        findings = await self.pooler_findings()
        for finding in findings:
            _logger.warning("%s: %s", self.location, finding.text)
        await schema.require_current(self.connector, self.schema_name, self.location)
        await self.same_database.learn()
        if not findings:
            settings = await self.connector.fetch(self.text("read_settings"))
            for finding in diagnosis.settings_findings(settings[0]):
                _logger.warning("%s: %s", self.location, finding.text)
        self._is_current = True

    async def pooler_findings(self) -> list[Finding]:
        """Whether a pooler is in between that forgets prepared statements."""
        return [diagnosis.POOLER] if await self.connector.has_forgetful_pooler() else []

    def _doubt(self) -> None:
        """Has the next use look again where the store is: its server may have been replaced."""
        self._is_current = False

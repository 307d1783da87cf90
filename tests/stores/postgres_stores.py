"""The PostgreSQL store on a clock that a test moves, over any driver."""

from __future__ import annotations

from typing import Any

import psycopg

from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import PostgresStore, schema
from retrysafe.stores.postgres.claims import Claims
from retrysafe.stores.postgres.drivers.port import Connector
from retrysafe.testing import ManualClock


class ReadingFirst(Claims):
    """Claims that expect every key to have a row, whatever they meet."""

    mostly_meet_rows = True


class ClockedStore(PostgresStore):
    """The store with a test's clock where its statements ask for the server's.

    With a connector of somebody else it leaves that one's connections open: a backend that knows
    the tables already answers in a fraction of the time.
    """

    def __init__(
        self,
        url: str,
        clock: ManualClock,
        *,
        is_async: bool,
        reads_first: bool = False,
        connector: Connector | None = None,
    ) -> None:
        made = postgres_store(url, is_async=is_async)
        super().__init__(
            connector or made._connector, location=made.location, schema_name=made.schema_name
        )
        self._clock = clock
        self._is_guest = connector is not None
        self._statements.text = self._text_at_the_clock
        if reads_first:
            self._claims = ReadingFirst(self._statements, self._reader, self._contended)

    def _text_at_the_clock(self, name: str) -> str:
        return schema.statements(self.schema_name, f"{self._clock()}::bigint")[name]

    async def close(self) -> None:
        if not self._is_guest:
            await super().close()

    async def tend_partitions(self) -> list[str]:
        """No days: the sweep is exact to the millisecond in the default partition only.

        An outcome in a partition of its day stays until the day is over, and the clock of these
        tests would make and drop dozens of partitions at every sweep.
        """
        return []


class Table:
    """A migrated schema that is emptied between tests, which is quicker than making another."""

    def __init__(self, url: str, direct_url: str) -> None:
        self.url = url
        store = ClockedStore(url, ManualClock(), is_async=False)
        run_sync(store.migrate())
        run_sync(store.close())
        # The clock of the tests is years behind, so every outcome is in the default partition.
        names = ("keys", "outcomes_default", "steps", "arguments", "renewals", "outbox")
        self._empty = "; ".join(f"DELETE FROM {store.schema_name}.{name}" for name in names)
        self._connection: psycopg.Connection[Any] = psycopg.connect(direct_url, autocommit=True)

    def empty(self) -> None:
        self._connection.execute(self._empty)

    def close(self) -> None:
        self._connection.close()

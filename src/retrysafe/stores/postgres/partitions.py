"""The daily partitions of the outcomes: made ahead of time, dropped when their audit is over.

Owns which days have a partition. Outcomes are stored and replayed with or without one, so whatever
cannot be done now is left for the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from retrysafe.stores.postgres.drivers.port import Conflict, Connector, Locked, RowRefused, Session

DAY_MS: Final = 24 * 60 * 60 * 1000
# The default audit window of 30 days, with days to spare for a sweep that does not run.
HORIZON_DAYS: Final = 40
# Longer audit windows move the horizon: it stays this far ahead of the last day that is in use.
SPARE_DAYS: Final = 10
# Every partition makes every replay a little dearer to plan. Windows that end later than this are
# kept in the default partition and removed by bounded deletes.
HORIZON_LIMIT_DAYS: Final = 110
_NAME_FORMAT: Final = "outcomes_%Y%m%d"
# Making and dropping a partition needs a short exclusive lock. While we wait for it behind a long
# transaction others queue behind us, so we give up soon and come back at the next sweep.
_LOCK_TIMEOUT: Final = "SET LOCAL lock_timeout = '100ms'"


@dataclass(slots=True)
class Tended:
    """What was done to the partitions."""

    made: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    # Somebody held a lock: the rest is left for the next time.
    is_complete: bool = True


def day_start_ms(instant_ms: int) -> int:
    """The first millisecond of the instant's day in UTC."""
    return instant_ms - instant_ms % DAY_MS


def partition_name(instant_ms: int) -> str:
    """The partition of the outcomes whose audit ends on the instant's day."""
    return datetime.fromtimestamp(instant_ms / 1000, UTC).strftime(_NAME_FORMAT)


def _start_of(name: str) -> int:
    return int(datetime.strptime(name, _NAME_FORMAT).replace(tzinfo=UTC).timestamp() * 1000)


class Partitions:
    """The partitions of one schema."""

    def __init__(self, connector: Connector, schema: str, statement: Callable[[str], str]) -> None:
        self._connector = connector
        self._schema = schema
        self._statement = statement

    async def tend(self) -> Tended:
        """Makes the partitions of the coming days and drops those of days that are over.

        Raises `StoreError` when this role may not: partitions belong to the owner of the schema.
        """
        ((now_ms,),) = await self._connector.fetch_patiently(self._statement("now_ms"))
        rows = await self._connector.fetch_patiently(self._statement("list_partitions"))
        existing = {row[0] for row in rows}
        today_ms = day_start_ms(now_ms)
        today = partition_name(today_ms)
        tended = Tended()
        try:
            # First what is more urgent and needs the smaller lock.
            for start_ms in await self._missing(existing, today_ms):
                if await self._make(start_ms):
                    tended.made.append(partition_name(start_ms))
            for name in sorted(item for item in existing if item < today):
                if await self._drop(name):
                    tended.dropped.append(name)
        except (Locked, Conflict):
            # One wait a time: each of them makes others wait as well.
            tended.is_complete = False
        return tended

    async def _missing(self, existing: set[str], today_ms: int) -> list[int]:
        """The days that should have a partition, can have one, and have none."""
        last_ms = max((_start_of(name) for name in existing), default=today_ms)
        limit_ms = today_ms + HORIZON_LIMIT_DAYS * DAY_MS
        ((default_ms, is_last_in_use),) = await self._connector.fetch_patiently(
            self._statement("last_audit_day"), (last_ms - (SPARE_DAYS - 1) * DAY_MS, limit_ms)
        )
        wanted_ms = today_ms + HORIZON_DAYS * DAY_MS
        if default_ms:
            wanted_ms = max(wanted_ms, day_start_ms(default_ms) + SPARE_DAYS * DAY_MS)
        if is_last_in_use:
            wanted_ms = max(wanted_ms, last_ms + SPARE_DAYS * DAY_MS)
        days = [
            start_ms
            for start_ms in range(today_ms, min(wanted_ms, limit_ms) + 1, DAY_MS)
            if partition_name(start_ms) not in existing
        ]
        if not days:
            return []
        rows = await self._connector.fetch_patiently(self._statement("days_in_default"), (days,))
        blocked = {row[0] for row in rows}
        return [start_ms for start_ms in days if start_ms not in blocked]

    async def _make(self, start_ms: int) -> bool:
        name = f"{self._schema}.{partition_name(start_ms)}"

        async def make(session: Session) -> bool:
            if not await self._may_start(session) or await self._is_there(session, name):
                return False
            # Attached rather than made as a partition: that would lock the whole table against
            # settlements, this locks the default partition only.
            await session.script(
                f"CREATE TABLE {name} (LIKE {self._schema}.outcomes INCLUDING ALL);"
                f"ALTER TABLE {self._schema}.outcomes ATTACH PARTITION {name} "
                f"FOR VALUES FROM ({start_ms}) TO ({start_ms + DAY_MS})"
            )
            return True

        try:
            return await self._connector.transact(make)
        except RowRefused:
            # An outcome of that day went to the default partition since we looked. It is replayed
            # from there just as well.
            return False

    async def _drop(self, name: str) -> bool:
        name = f"{self._schema}.{name}"

        async def drop(session: Session) -> bool:
            if not await self._may_start(session) or not await self._is_there(session, name):
                return False
            await session.script(f"DROP TABLE {name}")
            return True

        return await self._connector.transact(drop)

    async def _may_start(self, session: Session) -> bool:
        await session.script(_LOCK_TIMEOUT)
        ((has_lock,),) = await session.fetch(self._statement("try_tending"))
        return bool(has_lock)

    async def _is_there(self, session: Session, name: str) -> bool:
        ((is_there,),) = await session.fetch(self._statement("has_partition"), (name,))
        return bool(is_there)

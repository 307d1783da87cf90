"""The daily partitions of the outcomes: made ahead of time, dropped when their audit is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from retrysafe.errors import StoreError
from retrysafe.stores.postgres.connector import Connector, RowRefused

DAY_MS: Final = 24 * 60 * 60 * 1000
_NAME_FORMAT: Final = "outcomes_%Y%m%d"
# Making and dropping a partition needs a short exclusive lock. Waiting for it behind a long
# transaction would make every statement queue behind us, so we give up and come back.
_LOCK_TIMEOUT: Final = "SET LOCAL lock_timeout = '250ms'"


def _day(now_ms: int) -> datetime:
    moment = datetime.fromtimestamp(now_ms / 1000, UTC)
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def partition_name(day: datetime) -> str:
    """The partition of the outcomes whose audit ends on that day."""
    return day.strftime(_NAME_FORMAT)


def wanted_days(now_ms: int, horizon_days: int) -> list[datetime]:
    """The days whose partitions should exist now."""
    today = _day(now_ms)
    return [today + timedelta(days=number) for number in range(horizon_days + 1)]


async def make_ahead(
    connector: Connector, schema: str, existing: set[str], now_ms: int, horizon_days: int
) -> list[str]:
    """Makes the partitions that are missing; one that cannot be made now is left for later."""
    made = []
    for day in wanted_days(now_ms, horizon_days):
        name = partition_name(day)
        if name in existing:
            continue
        starts_at_ms = int(day.timestamp() * 1000)
        try:
            async with connector.transaction() as session:
                await session.script(_LOCK_TIMEOUT)
                await session.script(
                    f"CREATE TABLE IF NOT EXISTS {schema}.{name} PARTITION OF {schema}.outcomes "
                    f"FOR VALUES FROM ({starts_at_ms}) TO ({starts_at_ms + DAY_MS})"
                )
        except (StoreError, RowRefused):
            # Locked for too long, or the default partition holds rows of that day already: they
            # are replayed from there just as well, and swept by bounded deletes.
            continue
        made.append(name)
    return made


async def drop_past(
    connector: Connector, schema: str, existing: set[str], now_ms: int
) -> list[str]:
    """Drops the partitions of days that are over; one that is in use is left for later."""
    today = partition_name(_day(now_ms))
    dropped = []
    for name in sorted(existing):
        if name >= today:
            break
        try:
            async with connector.transaction() as session:
                await session.script(_LOCK_TIMEOUT)
                await session.script(f"DROP TABLE IF EXISTS {schema}.{name}")
        except (StoreError, RowRefused):
            continue
        dropped.append(name)
    return dropped

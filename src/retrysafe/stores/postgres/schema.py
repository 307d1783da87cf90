"""The PostgreSQL schema: its statements, whether it is there, and how it gets there."""

from __future__ import annotations

import re
from typing import Final

from retrysafe.errors import InvalidInput
from retrysafe.stores.migrations import Applied, Migration, load_migrations, pending
from retrysafe.stores.postgres.connector import Connector, Session
from retrysafe.stores.sql import load_blocks

BLOCKS: Final = {
    **load_blocks("retrysafe.stores.postgres.sql", "queries.sql"),
    **load_blocks("retrysafe.stores.postgres.sql", "atomic.sql"),
}
MIGRATIONS: Final = load_migrations("retrysafe.stores.postgres.migrations")
NOW_MS: Final = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"

# Any constant will do, as long as every release takes the same one: it is the lock that makes ten
# processes that start at once migrate one after the other.
_MIGRATION_LOCK: Final = 0x7265747279
_SCHEMA_NAME: Final = re.compile(r"^[a-z_][a-z0-9_]{0,47}$")


def checked_schema_name(name: str) -> str:
    """The name itself; raises `InvalidInput`, because it becomes part of statements."""
    if not _SCHEMA_NAME.match(name):
        raise InvalidInput(
            f"{name!r} cannot be a schema name: use up to 48 lower-case letters, digits and _"
        )
    return name


def statements(schema: str, now_ms: str = NOW_MS) -> dict[str, str]:
    """The store's statements for one schema."""
    return {
        name: block.replace("{schema}", schema).replace("{now_ms}", now_ms)
        for name, block in BLOCKS.items()
    }


def migration_sql(migration: Migration, schema: str) -> str:
    """The migration as it runs in one schema."""
    return migration.sql.replace("{schema}", schema)


def script(schema: str) -> str:
    """Everything that `migrate` would do to an empty database, for people who run their own SQL."""
    parts = [f"CREATE SCHEMA IF NOT EXISTS {schema};", f"{_sql(schema)['create_schema_table']};"]
    for migration in MIGRATIONS:
        parts.append(f"-- Migration {migration.version}: {migration.name}")
        parts.append(migration_sql(migration, schema).strip())
        parts.append(
            f"INSERT INTO {schema}.schema_versions "  # noqa: S608 — the name was checked.
            f"(version, name, checksum, oldest_schema) VALUES "
            f"({migration.version}, '{migration.name}', '{migration.checksum}', "
            f"{migration.oldest_schema});"
        )
    return "\n\n".join(parts) + "\n"


def _sql(schema: str) -> dict[str, str]:
    return statements(schema)


async def applied(connector: Connector | Session, schema: str) -> list[Applied]:
    """What the database remembers; nothing for a database that never had the schema."""
    sql = _sql(schema)
    ((count,),) = await connector.fetch(sql["has_schema_table"], (schema,))
    if not count:
        return []
    return [Applied(*row) for row in await connector.fetch(sql["select_schema"])]


async def pending_migrations(connector: Connector | Session, schema: str) -> list[Migration]:
    """What this release would apply; raises `SchemaTooNew` or `SchemaChanged`."""
    return pending(MIGRATIONS, await applied(connector, schema))


async def migrate(connector: Connector, schema: str) -> list[Migration]:
    """Applies what is missing, in one transaction under one lock."""
    if not await pending_migrations(connector, schema):
        return []
    sql = _sql(schema)
    async with connector.transaction() as session:
        # A lock of the transaction, not of the session: it works behind PgBouncer, and a process
        # that dies gives it back.
        await session.fetch("SELECT pg_advisory_xact_lock($1)", (_MIGRATION_LOCK,))
        await session.script(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        await session.script(sql["create_schema_table"])
        # Looked up again under the lock: a rival may have migrated while this one waited for it.
        missing = await pending_migrations(session, schema)
        for migration in missing:
            await session.script(migration_sql(migration, schema))
            await session.fetch(
                sql["insert_schema"],
                (
                    migration.version,
                    migration.name,
                    migration.checksum,
                    migration.oldest_schema,
                ),
            )
    return missing

"""The PostgreSQL schema: its statements, whether it is there, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from retrysafe.errors import InvalidInput, SchemaMissing, StoreUnavailable
from retrysafe.stores.migrations import Applied, Migration, load_migrations, pending
from retrysafe.stores.postgres.drivers.port import Connector, Locked, Rows, Session
from retrysafe.stores.postgres.naming import checked_schema_name, migrate_command
from retrysafe.stores.postgres.partitions import HORIZON_DAYS
from retrysafe.stores.sql import load_blocks

# One file for each subject, by the name of the module that runs its statements; reading them is
# `records.sql`, as in SQLite.
_FILES: Final = (
    "claims.sql",
    "settlements.sql",
    "contended.sql",
    "leases.sql",
    "records.sql",
    "listing.sql",
    "audit.sql",
    "operators.sql",
    "steps.sql",
    "atomic.sql",
    "outbox.sql",
    "recovery.sql",
    "sweep.sql",
    "partitions.sql",
    "diagnosis.sql",
    "size.sql",
    "schema.sql",
    "migrating.sql",
)
BLOCKS: Final = {
    name: block
    for file_name in _FILES
    for name, block in load_blocks("retrysafe.stores.postgres.sql", file_name).items()
}
MIGRATIONS: Final = load_migrations("retrysafe.stores.postgres.migrations")
NOW_MS: Final = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
# When the lease of a key `k` ends: as its row says, or as was renewed beside it.
_LEASE_ENDS_AT_MS: Final = (
    "CASE WHEN k.state = 1 THEN greatest(k.lease_ends_at_ms, (SELECT r.lease_ends_at_ms "
    "FROM {schema}.renewals AS r WHERE r.digest = k.digest AND r.token = k.token)) "
    "ELSE k.lease_ends_at_ms END"
)
# Whether nothing happened in the life of a key `k`, by the word of its last claim's owner, and no
# step is stored. Steps are written by the owner of a pending record alone, so none comes later.
_NOTHING_HAPPENED: Final = (
    "(CASE WHEN k.nothing_happened_token = k.token THEN NOT EXISTS ("
    "SELECT 1 FROM {schema}.steps AS s WHERE s.digest = k.digest) ELSE false END)"
)
# How long a batch waits for the rows of others. Rivals among batches need one flush of the WAL,
# which is mostly shorter; a user's transaction may last for ever. Below the second after which the
# server looks for deadlocks: the batch gives way, and not the user's transaction.
LOCK_WAIT: Final = "50ms"

# What reads much, for operators and sweeps, and may take longer than a commit.
PATIENT: Final = frozenset(
    {
        "audit_in_pages",
        "audit_tables",
        "list_claimed",
        "list_entries",
        "list_partitions",
        "list_resumable",
        "pending_in_pages",
        "pending_of",
        "pending_since",
        "read_outcomes",
        "read_table_options",
        "sample_records",
        "sweep_actions",
        "sweep_arguments",
        "sweep_default_outcomes",
        "sweep_entries",
        "sweep_pages",
        "sweep_renewals",
        "table_pages",
    }
)
_NO_LIMIT: Final = "0"

# Any constant will do, as long as every release takes the same one: it is the lock that makes ten
# processes that start at once migrate one after the other.
_MIGRATION_LOCK: Final = 0x7265747279
# The lock of the transaction, not of the session: it works behind PgBouncer, and a process that
# dies gives it back.
LOCK_SQL: Final = f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"
# A deploy waits this long for another one that is migrating.
_RIVAL_TIMEOUT: Final = "SET LOCAL lock_timeout = '60s'"
# A migration that waits for a table makes everybody else wait for it too, so it gives up soon.
_TABLE_TIMEOUT: Final = "SET LOCAL lock_timeout = '5s'"
# The lock is worth nothing to a transaction that took its snapshot before it got the lock.
_READ_COMMITTED: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"


def statements(schema: str, now_ms: str = NOW_MS) -> dict[str, str]:
    """The store's statements for one schema; those of a batch also in other manners.

    `…_patiently` waits for any lock, and `…_unlocked` leaves the rows out that somebody has.
    """
    made = {
        name: block.replace("{lease_ends_at_ms}", _LEASE_ENDS_AT_MS)
        .replace("{nothing_happened}", _NOTHING_HAPPENED)
        .replace("{schema}", schema)
        .replace("{now_ms}", now_ms)
        .replace("{horizon_days}", str(HORIZON_DAYS))
        for name, block in BLOCKS.items()
    }
    limited = {name: text for name, text in made.items() if "{lock_wait}" in text}
    for name, text in limited.items():
        made[name] = text.replace("{lock_wait}", LOCK_WAIT)
        made[f"{name}_patiently"] = text.replace("{lock_wait}", _NO_LIMIT)
    waiting = {name: text for name, text in made.items() if "{skip_locked}" in text}
    for name, text in waiting.items():
        made[name] = text.replace("{skip_locked}", "")
        made[f"{name}_unlocked"] = text.replace("{skip_locked}", " SKIP LOCKED")
    return made


def migration_script(version: int, schema: str) -> str:
    """One migration with its note in `schema_versions`, as one statement.

    It leaves a database alone that has it already, and stops where an earlier one is missing.
    Raises `InvalidInput` for a version that this release does not have.
    """
    schema = checked_schema_name(schema)
    if not 1 <= version <= len(MIGRATIONS):
        raise InvalidInput(
            f"there is no migration {version}: this release knows 1 to {len(MIGRATIONS)}"
        )
    migration = MIGRATIONS[version - 1]
    sql = statements(schema)
    values = {
        "lock": str(_MIGRATION_LOCK),
        "version": str(version),
        "name": migration.name,
        "checksum": migration.checksum,
        "oldest_schema": str(migration.oldest_schema),
        "preparation": "",
        "conclusion": "",
        "statements": _migration_sql(migration, schema).strip(),
    }
    if version == 1:
        create = sql["create_schema_table"]
        values["preparation"] = sql["preparation"].replace("{create_schema_table}", create) + ";"
        values["conclusion"] = f"{sql['first_partitions']};"
    made = sql["migration"]
    for name, value in values.items():
        made = made.replace(f"{{{name}}}", value)
    return f"-- Migration {version}: {migration.name}\n{made};\n"


def is_due(version: int, schema: str, query: Callable[[str], Rows]) -> bool:
    """Whether a migration is still to be applied, for tools that bring their own connection.

    `query` runs a statement without parameters, in the transaction that is to migrate. Raises
    `SchemaTooNew` or `SchemaChanged`, and `InvalidInput` when an earlier one must be applied first.
    """
    query(LOCK_SQL)
    sql = statements(checked_schema_name(schema))
    ((has_table,),) = query(sql["has_schema_table"].replace("$1", f"'{schema}'"))
    rows = query(sql["select_schema"]) if has_table else []
    missing = [item.version for item in pending(MIGRATIONS, [Applied(*row) for row in rows])]
    if version in missing and missing[0] != version:
        raise InvalidInput(f"migration {missing[0]} comes before {version}: apply that first")
    return version in missing


def script(schema: str) -> str:
    """Everything that `migrate` would do, for people who run their own SQL.

    One transaction per migration. Each leaves a database alone that has it, so the same script
    serves an empty database and one of an earlier release.
    """
    parts = [migration_script(migration.version, schema) for migration in MIGRATIONS]
    return "\n".join(f"{_BEGIN};\n\n{part}\nCOMMIT;\n" for part in parts)


def _migration_sql(migration: Migration, schema: str) -> str:
    return migration.sql.replace("{schema}", schema)


async def applied(connector: Connector | Session, schema: str) -> list[Applied]:
    """What the database remembers; nothing for a database that never had the schema."""
    sql = statements(schema)
    ((count,),) = await connector.fetch(sql["has_schema_table"], (schema,))
    if not count:
        return []
    return [Applied(*row) for row in await connector.fetch(sql["select_schema"])]


async def pending_migrations(connector: Connector | Session, schema: str) -> list[Migration]:
    """What this release would apply; raises `SchemaTooNew` or `SchemaChanged`."""
    return pending(MIGRATIONS, await applied(connector, schema))


async def require_current(connector: Connector, schema: str, location: str) -> None:
    """Raises `SchemaMissing` when something is to be applied, or what `pending_migrations` does."""
    missing = await pending_migrations(connector, schema)
    if missing:
        names = ", ".join(f"{item.version:04d} {item.name}" for item in missing)
        command = migrate_command(location, schema)
        raise SchemaMissing(f"schema {schema!r} of {location} lacks {names}: run {command}")


async def migrate(connector: Connector, schema: str) -> list[Migration]:
    """Applies what is missing, in one transaction under one lock."""
    if not await pending_migrations(connector, schema):
        return []
    try:
        return await connector.transact(lambda session: _migrate_locked(session, schema))
    except Locked as error:
        raise StoreUnavailable(
            f"cannot migrate schema {schema!r} now, try again: {error}"
        ) from error


async def _migrate_locked(session: Session, schema: str) -> list[Migration]:
    sql = statements(schema)
    await session.script(_READ_COMMITTED)
    await session.script(_RIVAL_TIMEOUT)
    await session.script(LOCK_SQL)
    await session.script(_TABLE_TIMEOUT)
    ((has_schema,),) = await session.fetch(sql["has_schema"], (schema,))
    if not has_schema:
        await session.script(f"CREATE SCHEMA {schema}")
    await session.script(sql["create_schema_table"])
    # Looked up again under the lock: a rival may have migrated while this one waited for it.
    missing = await pending_migrations(session, schema)
    for migration in missing:
        await session.script(_migration_sql(migration, schema))
        await session.fetch(
            sql["insert_schema"],
            (migration.version, migration.name, migration.checksum, migration.oldest_schema),
        )
        if migration.version == 1:
            await session.script(sql["first_partitions"])
    return missing

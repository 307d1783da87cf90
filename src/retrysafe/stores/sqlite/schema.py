"""The SQLite schema: is it there, is it ours, and how it gets there."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Final

from retrysafe.errors import SchemaMissing
from retrysafe.stores.migrations import Applied, Migration, load_migrations, pending
from retrysafe.stores.sql import load_blocks

# Whether nothing happened in the life of a key `k`, by the word of its last claim's owner, and no
# step is stored. Steps are written by the owner of a pending record alone, so none comes later.
_NOTHING_HAPPENED: Final = (
    "CASE WHEN k.nothing_happened_token = k.token THEN NOT EXISTS ("
    "SELECT 1 FROM retrysafe_steps AS s WHERE s.digest = k.digest) ELSE 0 END"
)
# One file for each module, and by its name; records and their outcomes belong to several.
_FILES: Final = (
    "claims.sql",
    "settlements.sql",
    "records.sql",
    "steps.sql",
    "atomic.sql",
    "outbox.sql",
    "recovery.sql",
    "operators.sql",
    "sweep.sql",
    "size.sql",
    "schema.sql",
)
_BLOCKS: Final = {
    name: block
    for file_name in _FILES
    for name, block in load_blocks("retrysafe.stores.sqlite.sql", file_name).items()
}
SQL: Final = {
    name: block.replace("{nothing_happened}", _NOTHING_HAPPENED) for name, block in _BLOCKS.items()
}
MIGRATIONS: Final = load_migrations("retrysafe.stores.sqlite.migrations")


def applied_migrations(connection: sqlite3.Connection) -> list[Applied]:
    """What the database remembers; nothing for a database that never had the schema."""
    (count,) = connection.execute(SQL["has_schema_table"]).fetchone()
    if not count:
        return []
    return [Applied(*row) for row in connection.execute(SQL["select_schema"]).fetchall()]


def pending_migrations(connection: sqlite3.Connection) -> list[Migration]:
    """What this release would apply; raises `SchemaTooNew` or `SchemaChanged`."""
    return pending(MIGRATIONS, applied_migrations(connection))


def require_current(connection: sqlite3.Connection, location: str) -> None:
    """Raises `SchemaMissing` when the schema is not there or not up to date."""
    if pending_migrations(connection):
        raise SchemaMissing(
            f"{location} has no current retrysafe schema: run "
            f"'retrysafe migrate --store {location}'"
        )


def migrate(connection: sqlite3.Connection, now_ms: Callable[[], int]) -> list[Migration]:
    """Applies what is missing; safe when many processes start at once, and when one dies."""
    if not pending_migrations(connection):
        return []  # The common case takes no write lock.
    try:
        # Inside the try, as in `Connections.write`.
        connection.execute("BEGIN IMMEDIATE")
        # Looked up again under the lock: a rival may have migrated while this one waited for it.
        missing = apply_pending(connection, now_ms)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return missing


def apply_pending(connection: sqlite3.Connection, now_ms: Callable[[], int]) -> list[Migration]:
    """Applies what is missing in the open transaction."""
    connection.execute(SQL["create_schema_table"])
    missing = pending_migrations(connection)
    for migration in missing:
        for statement in split_statements(migration.sql):
            connection.execute(statement)
        connection.execute(
            SQL["insert_schema"],
            (
                migration.version,
                migration.name,
                migration.checksum,
                migration.oldest_schema,
                now_ms(),
            ),
        )
    return missing


def script() -> str:
    """The migrations as a script for SQLite's shell; it leaves a database as `migrate` does."""
    parts = [SQL["create_schema_table"] + ";\n"]
    for migration in MIGRATIONS:
        note = (
            "INSERT INTO retrysafe_schema (version, name, checksum, oldest_schema, applied_at_ms)\n"
            f"VALUES ({migration.version}, '{migration.name}', '{migration.checksum}', "
            f"{migration.oldest_schema}, strftime('%s', 'now') * 1000);\n"
        )
        title = f"-- Migration {migration.version}: {migration.name}\n"
        parts.append(f"{title}BEGIN IMMEDIATE;\n{migration.sql.rstrip()}\n\n{note}COMMIT;\n")
    return "\n".join(parts)


def split_statements(script: str) -> Iterator[str]:
    """The statements of a script; `executescript` would commit the open transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        if not statement and (not line.strip() or line.startswith("--")):
            continue
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement.strip()
            statement = ""

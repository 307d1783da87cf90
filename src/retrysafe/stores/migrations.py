"""Migrations: ordered, append-only, checksummed files that make and change a store's schema.

Owns reading the files and comparing them with what a database says was applied. Running them,
under that database's own lock, is the store's part.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Protocol, runtime_checkable

from retrysafe.errors import SchemaChanged, SchemaTooNew

_FILE_NAME = re.compile(r"^(\d{4})_(\w+)\.sql$")
# The first line of every file: releases that know at least this version keep working after it.
_OLDEST = re.compile(r"^-- oldest schema that still works: (\d+)\n")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema."""

    version: int
    name: str
    sql: str
    oldest_schema: int

    @property
    def checksum(self) -> str:
        """Changes when anything in the file does."""
        return hashlib.sha256(self.sql.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Applied:
    """A migration as the database remembers it."""

    version: int
    checksum: str
    oldest_schema: int


@runtime_checkable
class Migratable(Protocol):
    """A store that has a schema."""

    async def migrate(self) -> list[Migration]:
        """Applies what is missing and says what it was; safe to run from many places at once."""

    async def pending_migrations(self) -> list[Migration]:
        """What `migrate` would apply; changes nothing."""

    def migration_script(self) -> str:
        """All migrations as one SQL script, for people who run their own; opens no connection."""


def load_migrations(package: str) -> list[Migration]:
    """The migrations of a store in order; raises `ValueError` when their numbers have a gap."""
    found = []
    for entry in files(package).iterdir():
        match = _FILE_NAME.match(entry.name)
        if match:
            sql = entry.read_text(encoding="utf-8")
            oldest = _OLDEST.match(sql)
            if oldest is None:
                raise ValueError(f"{entry.name} does not say which releases still work after it")
            number = int(match.group(1))
            found.append(Migration(number, match.group(2), sql, int(oldest.group(1))))
    found.sort(key=lambda migration: migration.version)
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"the migrations of {package} are not numbered 1, 2, 3 …")
    return found


def pending(known: Sequence[Migration], applied: Sequence[Applied]) -> list[Migration]:
    """What is still to be applied.

    A newer schema is fine as long as it says that this release still works on it. Raises
    `SchemaTooNew` when it does not, `SchemaChanged` when the database went another way.
    """
    by_version = {migration.version: migration for migration in known}
    for row in sorted(applied, key=lambda row: row.version):
        migration = by_version.get(row.version)
        if row.oldest_schema > len(known):
            raise SchemaTooNew(
                f"the database has schema version {row.version}, and this release knows up to "
                f"{len(known)}: upgrade retrysafe before using this database"
            )
        if migration is not None and migration.checksum != row.checksum:
            raise SchemaChanged(
                f"migration {row.version} ({migration.name}) was applied with other content than "
                "this release has: restore the original release, or a backup of the database"
            )
    done = {row.version for row in applied}
    return [migration for migration in known if migration.version not in done]

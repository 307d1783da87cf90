"""One migration of retrysafe as an operation of a Django migration."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import router
from django.db.migrations.operations.base import Operation

from retrysafe.stores.postgres import schema as postgres_schema


class ApplyMigration(Operation):
    """Applies one migration; irreversible, as going back would forget which operations ran."""

    reduces_to_sql = True
    reversible = False

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """There are no models."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Runs it in the migration's transaction; `sqlmigrate` prints it.

        A migration that is noted as applied is left alone, and so is a database that is not
        PostgreSQL or that the project's routers keep for others.
        """
        connection = schema_editor.connection
        if connection.vendor != "postgresql":
            return
        if not router.allow_migrate(connection.alias, app_label):
            return
        schema = getattr(settings, "RETRYSAFE_SCHEMA", "retrysafe")
        script = postgres_schema.migration_script(self.version, schema)
        if schema_editor.collect_sql or self._is_due(connection, schema):
            schema_editor.execute(script, params=None)

    def _is_due(self, connection: Any, schema: str) -> bool:
        with connection.cursor() as cursor:

            def query(sql: str) -> list[tuple[Any, ...]]:
                cursor.execute(sql)
                rows: list[tuple[Any, ...]] = cursor.fetchall()
                return rows

            return postgres_schema.is_due(self.version, schema, query)

    def describe(self) -> str:
        """What `migrate --plan` shows."""
        return f"Apply migration {self.version} of retrysafe"

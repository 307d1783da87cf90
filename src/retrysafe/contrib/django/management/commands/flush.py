"""Django's `flush`, which empties retrysafe's tables too; tests use it between two tests.

They have no models, so that Django does not know them.
"""

from __future__ import annotations

from typing import Any

from django.core.management.commands import flush
from django.db import connections, transaction

from retrysafe.contrib.django.databases import schema_name

_TABLES = (
    "keys",
    "outcomes",
    "steps",
    "arguments",
    "renewals",
    "outbox",
    "operator_actions",
)


class Command(flush.Command):
    """Removes all data from the database, retrysafe's among them."""

    def handle(self, **options: Any) -> None:
        """Empties what Django knows, then what is retrysafe's, if that is there."""
        super().handle(**options)
        alias = options["database"]
        connection = connections[alias]
        if connection.vendor == "postgresql":
            prefix = f"{schema_name()}."
            listed = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
            parameters = [schema_name()]
        elif connection.vendor == "sqlite":
            prefix = "retrysafe_"
            listed = "SELECT substr(name, 11) FROM sqlite_master WHERE name LIKE %s"
            parameters = ["retrysafe\\_%"]
            listed += " ESCAPE '\\'"
        else:
            return
        with transaction.atomic(using=alias), connection.cursor() as cursor:
            cursor.execute(listed, parameters)
            found = {row[0] for row in cursor.fetchall()}
            for table in _TABLES:
                if table in found:
                    cursor.execute(f"DELETE FROM {prefix}{table}")  # noqa: S608 — names of ours.

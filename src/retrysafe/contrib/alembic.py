"""retrysafe's schema as part of your Alembic history.

A revision of yours calls `upgrade(op)`, which applies all migrations of retrysafe that the database
lacks. When a release brings another, write a new revision with the same line. The same SQL runs as
in `retrysafe migrate`, and it is noted in the same place, so `retrysafe migrate --check` agrees.
"""

from __future__ import annotations

from typing import Any

from retrysafe.stores.postgres import schema as postgres_schema


def upgrade(op: Any, *, version: int | None = None, schema: str = "retrysafe") -> None:
    """Applies what is missing in the revision's transaction, or prints all of it in offline mode.

    With a `version` it is that migration alone, for histories with a revision for each.
    A migration that is noted as applied is left alone, so a database that was made by `retrysafe
    migrate` can join. There is no downgrade: it would forget which operations have run. Raises
    `InvalidInput` for a version that this release does not have.
    """
    if version is None:
        for known in range(1, len(postgres_schema.MIGRATIONS) + 1):
            upgrade(op, version=known, schema=schema)
        return
    script = postgres_schema.migration_script(version, schema)
    context = op.get_context()
    if context.as_sql:
        # Not through `op.execute`, which would look for parameters in it.
        context.impl.static_output(script)
        return
    # Without parameters the driver sends the text as it is, with no escapes; one statement, because
    # asyncpg takes no more at a time.
    connection = op.get_bind().execution_options(no_parameters=True)
    if postgres_schema.is_due(version, schema, lambda sql: connection.exec_driver_sql(sql).all()):
        connection.exec_driver_sql(script)

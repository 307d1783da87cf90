"""retrysafe's schema as part of your Alembic history.

One revision per migration of retrysafe. Its `upgrade` calls `upgrade(op, version=1)`; when a
release brings migration 2, a new revision of yours calls `upgrade(op, version=2)`. The same SQL
runs as in `retrysafe migrate`, and it is noted in the same place, so `retrysafe migrate --check`
agrees.
"""

from __future__ import annotations

from typing import Any

from retrysafe.stores.postgres import schema as postgres_schema


def upgrade(op: Any, *, version: int, schema: str = "retrysafe") -> None:
    """Applies one migration in the revision's transaction, or prints it in offline mode.

    A migration that is noted as applied is left alone, so a database that was made by `retrysafe
    migrate` can join. There is no downgrade: it would forget which operations have run. Raises
    `InvalidInput` for a version that this release does not have.
    """
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

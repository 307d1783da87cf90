"""Django's connections to PostgreSQL.

Savepoints are Django's own, so that a failed query inside a block that is undone does not leave
the surrounding transaction marked as broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import transaction

from retrysafe.core.ports import Waits
from retrysafe.errors import TransactionMissing
from retrysafe.stores.postgres.drivers.port import Rows
from retrysafe.stores.postgres.user_connections import UserConnection, unknown, with_percent_signs


def adapted(connection: object) -> UserConnection:
    """The port over `django.db.connection`, or one of `django.db.connections`."""
    if getattr(connection, "vendor", None) != "postgresql":
        raise unknown(connection)
    return _Django(connection)


class _Undone(Exception):
    """Tells Django's block to roll back."""


class _Django:
    waits = Waits.BLOCKING

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._block: Any = None

    async def lasting(self) -> object:
        # Django's own stays when it connects anew.
        return self._connection.connection

    async def catch_up(self) -> None:
        return

    async def fetch(self, sql: str, params: Sequence[Any]) -> Rows:
        with self._connection.cursor() as cursor:
            cursor.execute(*with_percent_signs(sql, params))
            rows: Rows = cursor.fetchall() if cursor.description else []
            return rows

    async def begin_savepoint(self) -> None:
        if not self._connection.in_atomic_block and self._connection.get_autocommit():
            # Django would open a transaction of its own and commit it without the user's writes.
            raise TransactionMissing(
                "Django has no open transaction here: put the block into "
                "'with django.db.transaction.atomic():'"
            )
        self._block = transaction.atomic(using=self._connection.alias)
        self._block.__enter__()

    async def release_savepoint(self) -> None:
        block, self._block = self._block, None
        block.__exit__(None, None, None)

    async def roll_back_savepoint(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(_Undone, _Undone(), None)

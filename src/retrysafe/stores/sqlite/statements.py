"""Statements for many rows at once.

Owns how a batch is merged. Python's binding gives up the interpreter lock around every statement,
and every other thread may take it: a batch of 64 rows in 192 statements spends more time getting
the lock back than working. Merged, the same batch is a handful of statements.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from retrysafe.stores.sql import repeated
from retrysafe.stores.sqlite.schema import SQL

# A statement is prepared per number of rows, and filled up with rows of zeros to the next of these
# sizes: no digest is a number. So few keep all of them in the connection's statement cache.
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)


class BatchStatement:
    """One statement in all its sizes."""

    __slots__ = ("columns", "statements")

    def __init__(self, name: str, columns: int) -> None:
        self.statements = {size: repeated(SQL[name], size) for size in _SIZES}
        self.columns = columns

    def run(self, connection: sqlite3.Connection, values: list[Any]) -> sqlite3.Cursor:
        """Executes it once for all rows, whose values are in one list; at most 128 rows."""
        count = len(values) // self.columns
        # The next power of two.
        size = 1 << (count - 1).bit_length()
        values += [0] * ((size - count) * self.columns)
        return connection.execute(self.statements[size], values)

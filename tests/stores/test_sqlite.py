"""The SQLite store is a store, alone and with a second object on the same file."""

import pytest

from retrysafe import SqliteStore
from retrysafe.testing import StoreSuite


class TestSqliteStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = tmp_path / "records.db"

    def make_store(self, clock):
        return SqliteStore(self.path, now_ms=clock)

    def join_store(self, store, clock):
        return SqliteStore(self.path, now_ms=clock)

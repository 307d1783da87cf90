"""The SQLite store is a store, alone and with a second object on the same file."""

import pytest

from retrysafe.testing import StoreSuite
from tests.stores.sqlite_stores import calm_store


class TestSqliteStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = tmp_path / "records.db"

    def make_store(self, clock):
        return calm_store(self.path, clock)

    def join_store(self, store, clock):
        return calm_store(self.path, clock)

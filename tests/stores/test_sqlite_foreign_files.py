"""A store that is opened without `create` and `migrate` leaves other people's files alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from retrysafe.core.listing import RecordQuery
from retrysafe.errors import SchemaMissing, StoreMissing
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.sqlite import SqliteStore


def test_a_database_without_the_schema_is_not_changed(tmp_path):
    """Looking into somebody else's database must not switch it to WAL for ever."""
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (id INTEGER)")
        connection.commit()
    before = path.read_bytes()
    store = SqliteStore(path, create=False, migrate=False)
    with pytest.raises(SchemaMissing):
        run_sync(store.list_records(RecordQuery()))
    assert run_sync(store.pending_migrations()) != []
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["theirs.db"]


def test_an_empty_file_stays_empty(tmp_path):
    """An empty file is a valid SQLite database, and not ours to fill."""
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(SchemaMissing):
        run_sync(SqliteStore(path, create=False, migrate=False).list_records(RecordQuery()))
    assert path.stat().st_size == 0


def test_a_migrated_file_is_durable_whoever_opens_it(tmp_path):
    """Opening without `migrate` still uses WAL and reaches the disk with every commit."""
    path = tmp_path / "ours.db"
    run_sync(SqliteStore(path).migrate())
    store = SqliteStore(path, create=False, migrate=False)
    run_sync(store.list_records(RecordQuery()))
    assert store._connections.writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._connections.writer.execute("PRAGMA synchronous").fetchone() == (2,)
    run_sync(store.close())


def test_a_name_that_is_too_long_is_a_missing_store(tmp_path):
    """The file system's own refusals are told in retrysafe's words."""
    store = SqliteStore(tmp_path / ("x" * 300), create=False, migrate=False)
    with pytest.raises(StoreMissing, match="File name too long"):
        run_sync(store.list_records(RecordQuery()))

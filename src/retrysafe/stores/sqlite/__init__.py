"""Durable records in one SQLite file: the embedded default."""

from retrysafe.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]

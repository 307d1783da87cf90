"""Durable records in PostgreSQL: the production store."""

from retrysafe.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]

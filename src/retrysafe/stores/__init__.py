"""Stores: where records live. Each makes the core's decisions atomic and durable.

Importing this needs no driver: `open_store` looks for one when a URL asks for it.
"""

from retrysafe.core.model import Condition
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.opening import open_store
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.sqlite import SqliteStore

__all__ = ["Condition", "MemoryStore", "PostgresStore", "SqliteStore", "open_store"]

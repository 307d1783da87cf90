"""Migrations are append-only: databases exist that were made by exactly these files.

An edited one would be refused by every database that has applied it, with `SchemaChanged`, and new
databases would differ from old ones. Change a schema by a new file, and add its line here.
"""

from __future__ import annotations

import pytest

from retrysafe.stores.postgres import schema as postgres_schema
from retrysafe.stores.sqlite import schema as sqlite_schema

SHIPPED = {
    "postgres": [
        (1, "initial", "0a538e8b831b69e9", 1),
        (2, "outbox", "4acb053c7802aa13", 1),
        (3, "arguments", "d723e922d819b14b", 1),
        (4, "audit", "e7bf85a526b01434", 1),
        (5, "open_tries", "9d0ea6c4cf5277bc", 1),
        (6, "renewals", "353c601750674069", 1),
        (7, "endings", "ab2fbecdfd8f5481", 1),
        (8, "operators", "5260cec803e6eaf6", 1),
        (9, "views", "afbbe78ab60e3cc2", 1),
        (10, "dead_entries", "279bcc58dff826bd", 1),
    ],
    "sqlite": [
        (1, "initial", "3df313ba5777f85e", 1),
        (2, "outbox", "1df19f7e99029a06", 1),
        (3, "arguments", "832c41ce12713694", 1),
        (4, "no_sweep_indexes", "64fa692efb759bd8", 1),
        (5, "open_tries", "7be45aaec8ed56f8", 1),
        (6, "endings", "05469a9663daf858", 1),
        (7, "operators", "8594323ea7453d0c", 1),
        (8, "views", "e8afd0bf9fd7995a", 1),
        (9, "dead_entries", "16e2ae41f1907aa7", 1),
    ],
}


@pytest.mark.parametrize(
    ("store", "migrations"),
    [("postgres", postgres_schema.MIGRATIONS), ("sqlite", sqlite_schema.MIGRATIONS)],
)
def test_a_shipped_migration_never_changes(store, migrations):
    """Neither its text, nor its name, nor its place, nor what it asks of older releases."""
    found = [(item.version, item.name, item.checksum, item.oldest_schema) for item in migrations]
    assert found == SHIPPED[store], "never edit a shipped migration: add a new one"

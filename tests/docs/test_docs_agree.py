"""Numbers and lists that are written in documents are those of the code."""

from __future__ import annotations

import re

from retrysafe.stores.postgres import schema
from retrysafe.stores.postgres.diagnosis import OLDEST_VERSION
from retrysafe.stores.postgres.drivers.port import PoolOptions
from tests.docs.documents import ROOT

GUIDE = (ROOT / "docs" / "postgresql.md").read_text()


def number_in(pattern):
    """The one number that the guide gives for it."""
    (found,) = re.findall(pattern, GUIDE)
    return int(found)


def test_the_guide_names_the_numbers_of_postgresql():
    """Of connections, of the free space in pages, and of the oldest server."""
    assert number_in(r"\| `pool` \|[^|]*\| `(\d+)` \|") == PoolOptions().size_limit
    (fillfactor,) = re.findall(r"fillfactor = (\d+)", schema.MIGRATIONS[0].sql)
    assert number_in(r"pages are filled to (\d+) %") == int(fillfactor)
    assert number_in(r"PostgreSQL (\d+) or newer") == OLDEST_VERSION


def test_the_guide_names_every_table_and_view():
    """Whoever grants rights or looks inside finds all of them."""
    sql = "".join(migration.sql for migration in schema.MIGRATIONS)
    made = set(re.findall(r"CREATE (?:TABLE|VIEW) \{schema\}\.(\w+)", sql))
    assert {"keys", "audit"} < made
    assert {name for name in made if f"`{name}`" not in GUIDE} == set()


def test_contributors_find_every_package():
    """The layout has a row for each part of the library, and none for what is gone."""
    source = ROOT / "src" / "retrysafe"
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `src/retrysafe/(\w+)(?:\.py)?` \|", text, re.MULTILINE)
    assert set(rows) == packages
    assert len(rows) == len(set(rows))
    (stores,) = re.findall(r"^\| `src/retrysafe/stores` \| ([^;]*);", text, re.MULTILINE)
    assert stores == "memory, SQLite and PostgreSQL"

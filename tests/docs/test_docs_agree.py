"""Numbers, lists and names that are written in documents are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from retrysafe.stores.postgres import schema
from retrysafe.stores.postgres.diagnosis import OLDEST_VERSION
from retrysafe.stores.postgres.drivers.port import PoolOptions
from tests.docs.documents import ROOT, name_of, prose

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


MAPS = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
SOURCE = ROOT / "src" / "retrysafe"
# A file, linked or by its path in the source, with what is said to be in it.
_PLACES = re.compile(
    r"(?:\[`[^`]+`\]\(([^)]+)\)|`([\w/]+\.(?:py|sql))`): (`[\w.]+`(?:, `[\w.]+`)*)"
)
_MEMBERS = re.compile(r"`([A-Z]\w+)\.(\w+)`")
_PATHS = re.compile(r"`((?:\w+/)+\w+\.\w+)`")


@cache
def names_in(file):
    """What a file defines: statements of SQL; functions, classes and, as `Class.name`, members."""
    text = file.read_text()
    if file.suffix == ".sql":
        return set(re.findall(r"^-- name: (\w+)$", text, re.MULTILINE))
    found = set()
    for node in ast.parse(text).body:
        found |= _targets(node)
        if isinstance(node, ast.ClassDef):
            members = {name for item in node.body for name in _targets(item)}
            found |= members | {f"{node.name}.{name}" for name in members}
    return found


def _targets(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    assigned = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in assigned if isinstance(target, ast.Name)}


@pytest.mark.parametrize("path", MAPS, ids=name_of)
def test_every_stop_on_the_map_is_where_the_map_says(path):
    """Whoever follows a call with the page in hand finds each function in the file beside it."""
    lost = []
    for target, name, told in _PLACES.findall("\n".join(prose(path))):
        file = path.parent / target if target else SOURCE / name
        known = names_in(file)
        lost += [f"{file}: {item}" for item in re.findall(r"[\w.]+", told) if item not in known]
    assert lost == []


@pytest.mark.parametrize("path", MAPS, ids=name_of)
def test_every_member_and_file_on_the_map_is_there(path):
    """A method that was renamed, and a module that was merged, leave no name behind."""
    text = "\n".join(prose(path))
    members = {name for file in SOURCE.rglob("*.py") for name in names_in(file) if "." in name}
    classes = {name.partition(".")[0] for name in members}
    named = {f"{owner}.{name}" for owner, name in _MEMBERS.findall(text) if owner in classes}
    assert named - members == set()
    files = set(_PATHS.findall(text))
    assert {
        name for name in files if not any((at / name).exists() for at in (ROOT, SOURCE))
    } == set()

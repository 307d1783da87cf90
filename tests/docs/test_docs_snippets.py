"""Every Python snippet of the documents runs, and prints what its comments say."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing

import psycopg
import pytest

from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from tests.docs.documents import DOCUMENTS, ROOT, blocks, name_of

# A snippet that cannot be run is a claim that nobody checks; each one needs a reason.
NO_RUN_LIMIT = 0

# What the documents call the reader's PostgreSQL; a test has its own.
DOCUMENTED_URL = "postgresql://app@db.internal/payments"

_EXPECTED = re.compile(r"^\s*print\(.*\)  # (.+)$")
_WITH_PYTHON = [path for path in DOCUMENTS if any(b.info == "python" for b in blocks(path))]


def _script(path):
    """The document with everything but Python blanked, so that line numbers stay the document's."""
    lines = [""] * len(path.read_text(encoding="utf-8").splitlines())
    for block in blocks(path):
        if block.info == "python":
            start = block.first_line - 1
            lines[start : start + len(block.lines)] = block.lines
    return "\n".join(lines) + "\n"


def _python(folder, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "RETRYSAFE_SECRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def documented_database(postgres_server):
    """The database of the documents: migrated, with the role that they grant rights to."""
    url = postgres_server.url("documented")
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE documented")
        connection.execute("CREATE ROLE app_role")
        store = open_store(url)
        run_sync(store.migrate())
        run_sync(store.close())
        yield url
        connection.execute("DROP DATABASE documented")
        connection.execute("DROP ROLE app_role")


@pytest.mark.parametrize("path", _WITH_PYTHON, ids=name_of)
def test_snippets_of_a_document_run_in_order_and_print_what_they_say(path, tmp_path, request):
    """A reader who types a document's snippets from top to bottom gets what the document shows."""
    # Not the page's own name: one about FastAPI must not be what `import fastapi` finds.
    script = tmp_path / f"page_{path.stem.replace('-', '_')}.py"
    text = _script(path)
    if DOCUMENTED_URL in text:
        text = text.replace(DOCUMENTED_URL, request.getfixturevalue("documented_database"))
    script.write_text(text, encoding="utf-8")
    expected = [match.group(1) for line in text.splitlines() if (match := _EXPECTED.match(line))]
    ended = _python(tmp_path, script.name)
    assert ended.returncode == 0, f"{name_of(path)} (line numbers fit):\n{ended.stderr}"
    assert ended.stdout.splitlines() == expected
    if "\ndef test_" in text:
        tested = _python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", script.name)
        assert tested.returncode == 0, f"{name_of(path)} (line numbers fit):\n{tested.stdout}"


def test_sql_in_the_documents_runs(documented_database, tmp_path):
    """Every statement that a document shows is one that the schema understands."""
    shown = [block for path in DOCUMENTS for block in blocks(path)]
    assert {block.info for block in shown} >= {"sql", "sqlite"}
    file = tmp_path / "documented.db"
    store = open_store(f"sqlite:///{file}")
    run_sync(store.migrate())
    run_sync(store.close())
    with (
        psycopg.connect(documented_database, autocommit=True) as server,
        closing(sqlite3.connect(file)) as embedded,
    ):
        for block in shown:
            if block.info in ("sql", "sqlite"):
                (server if block.info == "sql" else embedded).execute("\n".join(block.lines))


@pytest.mark.parametrize("path", _WITH_PYTHON, ids=name_of)
def test_every_print_in_a_snippet_says_what_it_prints(path):
    """Output that the document does not show could be anything."""
    bare = [
        line
        for block in blocks(path)
        if block.info == "python"
        for line in block.lines
        if line.lstrip().startswith("print(") and not _EXPECTED.match(line)
    ]
    assert bare == []


def test_the_readme_has_a_snippet_that_runs():
    """The checks above are not empty: the first example that people try is among them."""
    assert ROOT / "README.md" in _WITH_PYTHON
    assert ROOT / "docs" / "functions.md" in _WITH_PYTHON
    assert ROOT / "docs" / "atomic.md" in _WITH_PYTHON
    assert ROOT / "docs" / "client.md" in _WITH_PYTHON
    assert ROOT / "docs" / "frameworks" / "fastapi.md" in _WITH_PYTHON


def test_hardly_any_snippet_is_left_out():
    """`python no-run` is the only way to leave a snippet out, and it is counted."""
    infos = [block.info for path in DOCUMENTS for block in blocks(path)]
    assert set(infos) <= {
        "",
        "python",
        "python no-run",
        "sh",
        "sql",
        "sqlite",
        "text",
        "json",
        "mermaid",
    }
    assert infos.count("python no-run") <= NO_RUN_LIMIT


def test_the_store_of_the_guide_passes_the_suite_as_the_guide_says(tmp_path):
    """Who follows the guide to a store ends with a green suite that ran many cases."""
    script = tmp_path / "test_my_store.py"
    script.write_text(_script(ROOT / "docs" / "writing-a-store.md"), encoding="utf-8")
    ended = _python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", script.name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None
    assert int(passed.group(1)) > 20

"""The generated documents are current, and the check that says so can fail."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from retrysafe.core.machine import CONDITIONS, TABLE, Trigger
from tests.docs.documents import ROOT, table_rows


@pytest.fixture
def generate_docs():
    """The generator as a module."""
    spec = importlib.util.spec_from_file_location(
        "generate_docs", ROOT / "scripts" / "generate_docs.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_documents_are_current(generate_docs):
    """Nobody reads a table that the code has left behind."""
    assert generate_docs.stale() == []


def test_the_check_names_a_stale_document(generate_docs, tmp_path, monkeypatch, capsys):
    """`--check` exits with 1 and says which file is to be generated again, also a missing one."""
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_docs.py"])
    assert generate_docs.main() == 0
    (tmp_path / "docs" / "errors.md").write_text("old\n", encoding="utf-8")
    (tmp_path / "docs" / "state-machine.md").unlink()
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check"])
    assert generate_docs.main() == 1
    told = capsys.readouterr().out
    assert "docs/errors.md is stale" in told
    assert "docs/state-machine.md is stale" in told
    assert (tmp_path / "docs" / "errors.md").read_text(encoding="utf-8") == "old\n"


def test_the_grid_in_the_document_is_the_table():
    """Every cell of the state machine is shown as the code has it."""
    rows = table_rows(ROOT / "docs" / "state-machine.md", "trigger")
    assert rows == [
        [event.value, *(TABLE[event, condition].value for condition in CONDITIONS)]
        for event in Trigger
    ]


def test_the_diagram_shows_takeover_and_the_end_of_lease_and_window(generate_docs):
    """Arrows come from applying the transitions, so time and operators are drawn too."""
    text = generate_docs.diagram()
    assert "absent --> running: claim\n" in text
    assert "abandoned --> running: claim, extend\n" in text
    assert "running --> abandoned: the lease ends\n" in text
    assert "succeeded --> outlived: operator expire, the active window ends\n" in text
    assert "succeeded --> running" not in text
    assert "running --> absent" not in text

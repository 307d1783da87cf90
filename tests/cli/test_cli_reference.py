"""The reference of the command line is generated, complete and the same everywhere."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reference():
    return runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))["cli_reference"]


def test_the_document_is_the_generated_one(reference):
    """After a change of a command: python scripts/cli_reference.py > docs/cli.md."""
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == reference()


def test_the_environment_does_not_show_through(reference, monkeypatch):
    before = reference()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("RETRYSAFE_STORE", "sqlite:///secret.db")
    assert reference() == before


@pytest.mark.parametrize(
    "command",
    [
        "migrate",
        "sweep",
        "demo",
        "keys list",
        "keys show",
        "keys release",
        "keys expire",
        "keys natural",
    ],
)
def test_every_command_has_help_and_examples(reference, invoke, command):
    text = reference()
    section = text.partition(f"## `retrysafe {command}`\n")[2].partition("\n## ")[0]
    assert "For example:" in section
    assert "`--json`" in section
    # A natural key is made of its values alone.
    assert ("`--store` `URL`" in section) == (command != "keys natural")
    shown = invoke(*command.split(), "--help")
    assert shown.code == 0
    assert f"retrysafe {command}" in shown.stdout
    assert "For example:" in shown.stdout


@pytest.mark.parametrize("command", ["", "keys list", "keys release", "migrate", "demo"])
def test_flags_are_shown_without_a_value(invoke, command):
    """They take none: whoever reads `--json <bool>` tries `--json true`, which is refused."""
    shown = invoke(*command.split(), "--help")
    assert shown.code == 0
    assert "--json" in shown.stdout
    assert "<bool>" not in shown.stdout

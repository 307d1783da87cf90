"""What the documents say about links, commands, words and defaults is so."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import fields
from datetime import timedelta
from functools import cache

import pytest
from typer.testing import CliRunner

from retrysafe import Ending, InFlight, Policy
from retrysafe.cli.app import app
from retrysafe.client import RetryPolicy
from retrysafe.stores import Condition
from tests.docs.documents import (
    DOCUMENTS,
    ROOT,
    anchors,
    blocks,
    links,
    name_of,
    prose,
    table_rows,
)

# What a shell snippet may call besides this repository's own commands.
_FOREIGN_COMMANDS = {"sqlite3", "psql", "pip", "git", "cd", "curl"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_internal_links_resolve(path):
    """No link inside the repository leads nowhere, anchors included."""
    broken = []
    for target in links(path):
        if re.match(r"[a-z]+:", target):
            continue
        file_part, _, anchor = target.partition("#")
        file = (path.parent / file_part).resolve() if file_part else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_every_document_can_be_reached_from_the_index():
    """A document that nothing links to is not found by anybody."""
    start = ROOT / "docs" / "index.md"
    reached, waiting = {start}, [start]
    while waiting:
        path = waiting.pop()
        for target in links(path):
            if re.match(r"[a-z]+:", target):
                continue
            file = (path.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file.exists() and file not in reached:
                reached.add(file)
                waiting.append(file)
    assert {name_of(path) for path in DOCUMENTS if path.parent != ROOT} <= {
        name_of(path) for path in reached
    }


def test_the_tests_of_consumers_that_a_document_names_are_there():
    """A renamed test leaves no promise behind that nobody keeps."""
    text = (ROOT / "docs" / "consumers" / "proof.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 10
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / "consumers" / file).read_text(encoding="utf-8")


def _commands():
    """Every command line in the shell snippets, with its document."""
    for path in DOCUMENTS:
        for block in blocks(path):
            if block.info == "sh":
                for line in block.lines:
                    words = shlex.split(line, comments=True)
                    if words:
                        yield name_of(path), words


def test_lines_for_a_shell_can_be_pasted_into_any():
    """No comments: in zsh, `#` at the prompt is a word like any other."""
    commented = [
        f"{name_of(path)}: {line}"
        for path in DOCUMENTS
        for block in blocks(path)
        if block.info == "sh"
        for line in block.lines
        if shlex.split(line) != shlex.split(line, comments=True)
    ]
    assert commented == []


def _make_targets():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z]+):", text, re.MULTILINE))


@cache
def _help(*commands):
    """The help of a subcommand, or None when there is no such subcommand."""
    plain = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    ended = CliRunner().invoke(app, [*commands, "--help"], env=plain)
    return ended.stdout if ended.exit_code == 0 else None


def test_make_commands_in_the_documents_exist():
    """Nobody is sent to a target that the Makefile does not have."""
    targets = _make_targets()
    wanted = {words[1] for _, words in _commands() if words[0] == "make"}
    for path in DOCUMENTS:
        wanted |= set(re.findall(r"`make ([a-z]+)`", "\n".join(prose(path))))
    assert {"run", "test"} <= wanted
    assert wanted <= targets


def test_retrysafe_commands_in_the_documents_exist():
    """Subcommands and options in shell snippets are those of the command line."""
    wrong = []
    for document, words in _commands():
        if words[0].rpartition("/")[2] != "retrysafe":
            continue
        plain = [word for word in words[1:] if re.fullmatch(r"[a-z]+", word)]
        text = _help(*plain)
        options = [word for word in words if word.startswith("--")]
        if text is None or any(option not in text for option in options):
            wrong.append((document, words))
    assert wrong == []


def test_no_subcommand_is_taken_for_granted():
    """The check above can fail: a subcommand that does not exist has no help."""
    assert _help("migrate") is not None
    assert _help("levitate") is None


def test_shell_snippets_call_known_commands_only():
    """A command that is neither ours nor common needs an explanation, not a snippet."""
    unknown = [
        (document, words[0])
        for document, words in _commands()
        if words[0] not in {"make", "retrysafe"} | _FOREIGN_COMMANDS
        and not (ROOT / words[0]).name.startswith("python")
    ]
    assert unknown == []


def test_the_readme_names_every_extra_and_no_registry():
    """What can be installed is said before it is needed, and nobody is sent to a registry."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    rows = table_rows(ROOT / "README.md", "needed for")
    assert {name for row in rows for name in re.findall(r"`([a-z]+)`", row[1])} == extras
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("\n## Install\n") < text.index("\n## Example\n")
    told = [name_of(path) for path in DOCUMENTS if "install 'retrysafe[" in path.read_text()]
    assert told == []


def test_the_policy_table_is_the_policy():
    """Names, order and defaults in the guide are those of the class."""
    names = {"timedelta": timedelta, "InFlight": InFlight, "Ending": Ending}
    told = [
        (name.strip("`"), eval(default.strip("`"), names))
        for name, default, *_ in table_rows(ROOT / "docs" / "functions.md", "setting")
    ]
    assert told == [
        (item.name, getattr(Policy(), item.name)) for item in fields(Policy) if item.init
    ]


def test_the_table_of_the_clients_policy_is_that_policy():
    """Names, order and defaults on the client's page are those of the class."""
    names = {"timedelta": timedelta, "frozenset": frozenset}
    told = [
        (name.strip("`"), eval(default.strip("`"), names))
        for name, default, *_ in table_rows(ROOT / "docs" / "client.md", "setting")
    ]
    assert told == [
        (item.name, getattr(RetryPolicy(), item.name)) for item in fields(RetryPolicy) if item.init
    ]


def test_the_glossary_has_every_word():
    """The words that code, SQL and documents share are all explained, conditions included."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"\*\*([a-z ]+)\*\*", text))
    words = "key caller fingerprint claim fence token lease record outcome replay attempt step"
    wanted = {*words.split(), "outbox entry", *(item.value for item in Condition)}
    assert wanted - explained == set()


def test_every_decision_is_listed_and_numbered_without_a_gap():
    """The list of decisions is complete."""
    folder = ROOT / "docs" / "decisions"
    files = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert [int(name[:4]) for name in files] == list(range(1, len(files) + 1))
    assert links(folder / "README.md") == files

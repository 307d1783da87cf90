"""The `curl` lines of the documents, pasted from top to bottom, get the answers below them."""

from __future__ import annotations

import subprocess

import pytest

from tests.demo.server import PATIENCE_SECONDS, DemoServer
from tests.docs.documents import DOCUMENTS, ROOT, blocks, name_of

DOCUMENTED_ADDRESS = "127.0.0.1:8000"
REPLAYED = "idempotent-replayed: true"


def pasted(path):
    """The `curl` lines, each with the answer in the block of text below their own block."""
    found = blocks(path)
    pairs = []
    for block, below in zip(found, [*found[1:], None], strict=True):
        if block.info == "sh" and any(line.startswith("curl ") for line in block.lines):
            where = f"{name_of(path)}:{block.first_line}"
            assert below is not None, f"{where}: there are no answers below these lines"
            assert below.info == "text", f"{where}: what is below these lines are no answers"
            pairs += zip(block.lines, below.lines, strict=True)
    return pairs


_WITH_CURL = [path for path in DOCUMENTS if "\ncurl " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", _WITH_CURL, ids=name_of)
def test_pasted_lines_get_the_answers_below_them(path, tmp_path):
    """The status line, and whether it is a replay, are those of a new demo on SQLite."""
    server = DemoServer(f"sqlite:///{tmp_path / 'demo.db'}")
    told, got = [], []
    try:
        for line, answer in pasted(path):
            done = subprocess.run(
                ["bash", "-c", line.replace(DOCUMENTED_ADDRESS, server.url.rpartition("/")[2])],
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
                check=True,
            )
            head = done.stdout.partition("\n\n")[0].splitlines()
            status = head[0].partition(" ")[2]
            got.append(f"{status}, {REPLAYED}" if REPLAYED in head else status)
            told.append(answer)
    finally:
        server.end()
    assert got == told


def test_the_readme_shows_first_call_replay_and_mismatch():
    """The three lines that a newcomer pastes are there, and every curl line goes to the demo."""
    readme = ROOT / "README.md"
    assert [answer[:3] for _, answer in pasted(readme)] == ["201", "201", "422"]
    assert {name_of(path) for path in _WITH_CURL} >= {"README.md", "docs/demo.md"}
    for path in _WITH_CURL:
        assert all(f"{DOCUMENTED_ADDRESS}/" in line for line, _ in pasted(path))

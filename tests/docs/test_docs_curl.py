"""The `curl` lines of the documents, pasted from top to bottom, get what their comments say."""

from __future__ import annotations

import subprocess

import pytest

from tests.demo.server import PATIENCE_SECONDS, DemoServer
from tests.docs.documents import DOCUMENTS, ROOT, blocks, name_of

DOCUMENTED_ADDRESS = "127.0.0.1:8000"
REPLAYED = "idempotent-replayed: true"


def curl_lines(path):
    return [
        line
        for block in blocks(path)
        if block.info == "sh"
        for line in block.lines
        if line.startswith("curl ")
    ]


_WITH_CURL = [path for path in DOCUMENTS if curl_lines(path)]


@pytest.mark.parametrize("path", _WITH_CURL, ids=name_of)
def test_pasted_lines_get_what_their_comments_say(path, tmp_path):
    """The status line, and whether it is a replay, are those of a new demo on SQLite."""
    server = DemoServer(f"sqlite:///{tmp_path / 'demo.db'}")
    told, got = [], []
    try:
        for line in curl_lines(path):
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
            told.append(line.rpartition("  # ")[2])
    finally:
        server.end()
    assert got == told


def test_the_readme_shows_first_call_replay_and_mismatch():
    """The three lines that a newcomer pastes are there, and every curl line goes to the demo."""
    assert [line.rpartition("  # ")[2][:3] for line in curl_lines(ROOT / "README.md")] == [
        "201",
        "201",
        "422",
    ]
    for path in _WITH_CURL:
        assert all(f"{DOCUMENTED_ADDRESS}/" in line for line in curl_lines(path))

"""The documents as the tests see them: files, code blocks, headings, links, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^```(.*)$")
_HEADING = re.compile(r"^#{1,6} (.+)$")
# A link's text may hold code; images and reference links are not used here.
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block; `first_line` counts from 1 and is the line below the fence."""

    info: str
    first_line: int
    lines: tuple[str, ...]


def name_of(path: Path) -> str:
    """The document's name in test ids and messages."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document."""
    found: list[Block] = []
    info: str | None = None
    start = 0
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if info is None:
            info, start = fence.group(1).strip(), number + 1
        else:
            found.append(Block(info, start, tuple(lines[start - 1 : number - 1])))
            info = None
    assert info is None, f"{name_of(path)}: a fenced block is not closed"
    return found


def prose(path: Path) -> Iterator[str]:
    """The lines of a document outside fenced blocks."""
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            yield line


def links(path: Path) -> list[str]:
    """The targets of the document's links."""
    return [target for line in prose(path) for target in _LINK.findall(line)]


def anchors(path: Path) -> set[str]:
    """The anchors that a forge makes of the document's headings."""
    found = set()
    for line in prose(path):
        heading = _HEADING.match(line)
        if heading:
            text = re.sub(r"[^\w\- ]", "", heading.group(1).lower())
            found.add(text.replace(" ", "-"))
    return found


def table_rows(path: Path, first_heading: str) -> list[list[str]]:
    """The rows of the table whose first column has that heading."""
    rows: list[list[str]] = []
    is_inside = False
    for line in prose(path):
        if not line.startswith("|"):
            is_inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == first_heading:
            is_inside = True
        elif is_inside and not set(cells[0]) <= {"-", " "}:
            rows.append(cells)
    return rows

"""How results are written: tables for people, JSON for programs, always safe for a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Wider than any row: what is piped is searched by line, so no row may be wrapped or cut.
_PIPED_WIDTH: Final = 4_000


def console(*, stderr: bool = False) -> Console:
    """A console of today's stdout or stderr: as wide as the terminal, unlimited in a pipe."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=False, emoji=False, markup=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PIPED_WIDTH
    return made


def show_list(screen: Console, table: Table, blocks: Iterable[Group]) -> None:
    """Shows a table where it fits; else each row as a block of lines, broken between words only.

    A table that is squeezed breaks every cell in pieces that nobody can read or copy.
    """
    needed = screen.measure(table, options=screen.options.update(width=_PIPED_WIDTH)).maximum
    if needed <= screen.width:
        screen.print(table)
        return
    for item in blocks:
        screen.print(item)


def block(title: Text, parts: Iterable[str | Text]) -> Group:
    """One row as lines: its title, and indented below it what else there is to say."""
    told = Text()
    for position, part in enumerate(parts):
        told.append(", " if position else "").append(part)
    return Group(title, Padding(told, (0, 0, 0, 2), expand=False))


def safe(text: str) -> str:
    """The text with control characters spelled out.

    Keys and messages come from clients; one that carries terminal commands must not run them on
    an operator's screen.
    """
    if text.isprintable():
        return text
    return "".join(
        item if item.isprintable() else item.encode("unicode_escape").decode() for item in text
    )


def safe_lines(text: str) -> str:
    """As `safe`, and line breaks stay."""
    return "\n".join(safe(line) for line in text.split("\n"))


def cell(text: str, style: str = "") -> Text:
    """A table cell that shows the text as it is, and never as markup."""
    return Text(safe(text), style=style)


def write_json(tree: Any) -> None:
    """Writes one JSON document to stdout; ASCII only, so that every consumer can read it."""
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")
    sys.stdout.flush()


def line(text: str) -> None:
    """Writes a line to stdout at once, for whoever watches."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Tells a person something that is not part of the result."""
    sys.stderr.write(safe(text) + "\n")
    sys.stderr.flush()

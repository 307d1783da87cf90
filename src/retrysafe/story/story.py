"""The narrator: plain words on the screen, and a list of what was expected and what came."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Expectation:
    """What should be, and what is."""

    act: str
    what: str
    expected: Any
    actual: Any

    @property
    def is_met(self) -> bool:
        """Whether it came as expected."""
        return bool(self.expected == self.actual)


@dataclass(slots=True)
class Story:
    """Tells the demonstration act by act."""

    console: Console
    pause_seconds: float
    expectations: list[Expectation] = field(default_factory=list)
    _act: str = ""

    def act(self, title: str, name: str) -> None:
        """Opens an act."""
        self._act = name
        self.console.print()
        self.console.print(Rule(Text(title, style="bold"), align="left", style="dim"))

    def say(self, text: str) -> None:
        """Explains what is about to happen, and gives time to read it."""
        self.console.print(Text(text))
        time.sleep(self.pause_seconds)

    def see(self, text: str, style: str = "cyan") -> None:
        """Shows a fact that was read from a store, a ledger or an answer."""
        self.console.print(Padding(Text(f"> {text}", style=style), (0, 0, 0, 2), expand=False))

    def show(self, table: Table) -> None:
        """Shows a table of facts."""
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def expect(self, what: str, *, expected: Any, actual: Any) -> None:
        """Notes what should be and what is; the summary shows all of them."""
        self.expectations.append(Expectation(self._act, what, expected, actual))

    def summarise(self) -> None:
        """Shows every expectation and the result."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("act", "what"):
            table.add_column(title)
        for title in ("expected", "actual"):
            table.add_column(title, justify="right")
        table.add_column("")
        for item in self.expectations:
            mark = Text("ok", style="green") if item.is_met else Text("FAILED", style="bold red")
            table.add_row(item.act, item.what, _text(item.expected), _text(item.actual), mark)
        self.show(table)
        failed = [item for item in self.expectations if not item.is_met]
        total = len(self.expectations)
        self.console.print()
        if failed:
            line = f"RESULT: {len(failed)} of {total} expectations FAILED"
            self.console.print(Text(line, style="bold red"))
        else:
            line = f"RESULT: all {total} expectations hold"
            self.console.print(Text(line, style="bold green"))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)

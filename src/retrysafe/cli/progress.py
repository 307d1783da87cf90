"""Progress of long work: a bar that moves, or fills up where the end is known, and its counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from retrysafe.cli import output


@contextmanager
def shown_progress(
    doing: str,
    counted: Mapping[str, str],
    *,
    is_quiet: bool,
    is_service: bool = False,
    total: int | None = None,
) -> Iterator[Callable[[Any], None]]:
    """Gives what shows a report; `counted` has the word for each of its numbers."""
    screen = output.console(stderr=True)
    if is_service and not (is_quiet or screen.is_terminal):
        # Where no bar can move, a service says at least that it is at work.
        output.note(f"{doing}; stop with Ctrl-C or SIGTERM")
    counts = ", ".join(f"{{task.fields[{name}]}} {word}" for name, word in counted.items())
    progress = Progress(
        TextColumn(doing),
        BarColumn(),
        TextColumn(counts),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=is_quiet or not screen.is_terminal,
    )
    with progress:
        fields: dict[str, Any] = dict.fromkeys(counted, 0)
        task = progress.add_task("", total=total, **fields)

        def show(report: Any) -> None:
            now = {name: getattr(report, name) for name in counted}
            done = sum(now.values()) if total is not None else None
            progress.update(task, completed=done, **now)

        yield show

"""The command line: for operators who look after keys, and for deployments that migrate.

Typer and Rich come with the extra `cli`, so nothing here imports them before `main`
has seen that they are there.
"""

from __future__ import annotations

import sys
from typing import Final

# What the extra brings; anything else that is missing is a fault that must show.
_EXTRA: Final = frozenset({"typer", "click", "rich"})
_USAGE: Final = 2


def main() -> int:
    """Runs the command of this process's arguments; returns its exit code."""
    try:
        from retrysafe.cli.app import run  # noqa: PLC0415 — needs the extra.
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(
            f"retrysafe: the command line needs {error.name}: install retrysafe with its extra "
            "cli, from a clone with pip install '/path/to/clone[cli]'\n"
        )
        return _USAGE
    return run()

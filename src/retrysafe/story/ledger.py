"""The ledger: the card network of the demonstration, where a double execution would show.

It knows nothing of keys that were seen before: every execution adds lines, whoever runs it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

STARTED = "started"
CHARGED = "charged"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that an execution did."""

    what: str
    key: str
    attempt: int
    process: int
    amount: int
    receipt: str = ""


class Ledger:
    """Lines in one file, added by many processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, entry: Entry) -> None:
        """Adds a line that survives the writer's death."""
        line = json.dumps(asdict(entry)).encode() + b"\n"
        # One write to a file opened for appending: lines of many processes never mix.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)

    def entries(self, what: str, key: str | None = None) -> list[Entry]:
        """The lines of one kind, of one key or of all."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        found = [Entry(**json.loads(line)) for line in lines]
        return [item for item in found if item.what == what and key in (None, item.key)]

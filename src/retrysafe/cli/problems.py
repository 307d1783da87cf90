"""What can go wrong in a command, as one line and an exit code. No command prints a traceback.

| code | meaning |
|---|---|
| 0 | done |
| 1 | refused, pending or not found: the store is fine, the answer is no |
| 2 | usage: the command cannot be understood, a wrong URL included |
| 3 | a problem with the store: missing, locked, without schema, not a database |
| 130 | interrupted |
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from retrysafe.cli.output import safe
from retrysafe.core.model import Condition
from retrysafe.core.outbox.entries import EntryCondition
from retrysafe.errors import InvalidInput, RetrysafeError, StoreError

# In people's words; the limits themselves are where the options are declared.
TAKES: Final = {
    "NUMBER": "an entry's number, not its key: retrysafe outbox list shows both with --json",
    "--limit": "a whole number from 1 to 100,000",
    "--interval": "a number of seconds from 0.1 to 86,400",
    "--report-interval": "a number of seconds from 1 to 86,400",
    "--back-off": "a number of seconds from 0 to 86,400",
    "--port": "a whole number from 0 to 65,535",
    "--rounds": "a whole number from 1 to 1,000,000",
    "--pause-ms": "a whole number of milliseconds from 0 to 60,000",
    "--within": "a number of seconds from 0 to 3,600",
    "--busy-timeout": "a number of seconds, 0 or more",
    "--condition": f"one of {', '.join(item for item in Condition if item != Condition.ABSENT)}",
    "--state": f"one of {', '.join(EntryCondition)}",
    "--concurrency": "a whole number from 1 to 1,000",
    "--attempts": "a whole number from 1 to 1,000,000",
    "--tries": "a whole number from 1 to 1,000,000",
    "--stop-limit": "a number of seconds from 0 to 86,400",
    "--lease": "a number of seconds from 1 to 86,400",
    "--timeout": "a number of seconds from 0.1 to 86,400",
    "--poll": "a number of seconds from 0.01 to 3,600",
}


class ExitCode(IntEnum):
    """What a command's exit tells a script."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    STORE = 3
    INTERRUPTED = 130


@dataclass(slots=True)
class Problem(Exception):
    """A reason to end a command that no other part of retrysafe has an error for."""

    kind: str
    message: str
    code: ExitCode
    retryable: bool = False


def usage(message: str) -> Problem:
    """The command cannot be understood."""
    return Problem("UsageError", message, ExitCode.USAGE)


def problem_of(error: Exception) -> Problem | None:
    """The error as a problem; None for a fault of the program itself, which must show."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RetrysafeError):
        code = ExitCode.REFUSED
        if isinstance(error, InvalidInput):
            code = ExitCode.USAGE
        elif isinstance(error, StoreError):
            code = ExitCode.STORE
        return Problem(type(error).__name__, str(error), code, error.retryable)
    # New releases of Typer carry their own copy of Click, old ones import it; both know how to
    # word what was wrong with the arguments.
    wording = getattr(error, "format_message", None)
    if wording is not None:
        return usage(_value_refused(error) or str(wording()))
    return None


def _value_refused(error: Exception) -> str | None:
    """What an option takes, when its value was refused: the library's words name its own types."""
    if type(error).__name__ != "BadParameter":
        return None
    parameter = getattr(error, "param", None)
    for option in (*getattr(parameter, "opts", ()), getattr(parameter, "metavar", None)):
        if option in TAKES:
            return f"{option} takes {TAKES[option]}"
    return None


def report(problem: Problem, *, as_json: bool) -> None:
    """Writes the problem to stderr as one line, or as one JSON object."""
    if as_json:
        line = json.dumps(
            {
                "error": problem.kind,
                "message": problem.message,
                "exit_code": int(problem.code),
                "retryable": problem.retryable,
            }
        )
    else:
        line = f"retrysafe: {safe(' '.join(problem.message.split()))}"
    sys.stderr.write(line + "\n")
    sys.stderr.flush()

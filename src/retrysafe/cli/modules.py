"""Modules that commands are given by name: how they are found, and what is wrong with a name."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from retrysafe.cli.problems import Problem, usage


def imported(name: str) -> ModuleType:
    """The module; those of the working folder are found, as other servers do it.

    Raises a usage problem when there is none, or when it fails while it is imported.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error
        stem = name.removesuffix(".py").replace("/", ".")
        hint = "" if stem == name else f": modules are named without .py, as in {stem}"
        raise usage(f"there is no module {name}{hint}") from error
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> Problem:
    """What a module raised and where; it is the user's own program."""
    frames = traceback.extract_tb(error.__traceback__)
    # The machinery of imports is in every traceback and tells nobody anything.
    own = [frame for frame in frames if "importlib" not in frame.filename]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own[1:] else ""
    text = f": {error}" if str(error) else ""
    return usage(f"importing {name} failed: {type(error).__name__}{text}{place}")

"""Modules that commands are given by name: how they are found, and what is wrong with a name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from retrysafe.cli.problems import usage


def imported(name: str) -> ModuleType:
    """The module; those of the working folder are found, as other servers do it.

    Raises a usage problem when there is none; what the module itself raises, passes through.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise usage(f"there is no module {name}") from error

"""What importing costs: nothing but the standard library, and a core without clock or thread."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import retrysafe

PACKAGE = Path(retrysafe.__file__).parent
CORE_FILES = sorted((PACKAGE / "core").rglob("*.py"))
FORBIDDEN_IN_CORE = {"asyncio", "time", "threading", "concurrent", "multiprocessing", "socket"}

IMPORT_AND_LIST = """
import json, sys
before = set(sys.modules)
import retrysafe
from retrysafe import errors, observe, stores, transactions, workers
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported_modules(path: Path) -> set[str]:
    """The top-level names of all modules that a file imports, wherever it does so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
    return found


def test_importing_retrysafe_pulls_in_only_the_standard_library():
    """A fresh interpreter that imports what is public has loaded no third-party module for it.

    There is no driver of PostgreSQL either, and its store can be imported.
    """
    listed = subprocess.run(
        # -S -E: neither the environment's .pth files nor its variables may load anything.
        [
            sys.executable,
            "-S",
            "-E",
            "-c",
            f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{IMPORT_AND_LIST}",
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded = {name.partition(".")[0] for name in json.loads(listed.stdout)}
    assert "retrysafe" in loaded
    assert loaded - {"retrysafe"} <= sys.stdlib_module_names


def test_core_has_files_to_check():
    assert {"engine.py", "machine.py", "codec.py"} <= {path.name for path in CORE_FILES}


def test_core_imports_no_clock_no_thread_and_no_loop():
    """The core's files import neither asyncio, time nor threading, not even inside a function."""
    guilty = {
        path.name: sorted(imported_modules(path) & FORBIDDEN_IN_CORE)
        for path in CORE_FILES
        if imported_modules(path) & FORBIDDEN_IN_CORE
    }
    assert guilty == {}


def test_core_imports_only_the_standard_library_and_itself():
    """Optional packages are looked up among the loaded modules, never imported."""
    for path in CORE_FILES:
        assert imported_modules(path) <= {"retrysafe", *sys.stdlib_module_names}, path.name

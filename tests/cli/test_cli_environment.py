"""Commands in a hard place: with one driver alone, with a full disk, asked by a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrysafe.cli.problems import ExitCode

COMMANDS = (
    ("migrate",),
    ("doctor",),
    ("stats",),
    ("keys", "list"),
    ("keys", "list", "--condition", "abandoned"),
    ("keys", "show", "k", "--caller", "c"),
    ("keys", "release", "k", "--caller", "c", "--yes", "--reason", "x"),
    ("keys", "expire", "--all", "--caller", "c", "--yes", "--reason", "x"),
    ("outbox", "list"),
    ("export",),
    ("sweep",),
    ("worker", "--once"),
)
# Runs all commands in one process: starting one takes longer than what it does.
SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.machinery import PathFinder
from importlib.util import find_spec
missing = sys.argv[1].split(",")
class Without:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in missing:
            return PathFinder.find_spec(name, path, target)
sys.meta_path = [Without if item is PathFinder else item for item in sys.meta_path]
assert not any(map(find_spec, missing))
from retrysafe.cli.app import app
found = []
for arguments in json.loads(sys.argv[2]):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = app([*arguments, "--json", "--store", sys.argv[3]], standalone_mode=False)
    found.append([arguments, code, err.getvalue()])
print(json.dumps(found))
"""
ENTRY = "import sys; from retrysafe.cli import main; sys.exit(main())"


@pytest.mark.parametrize("missing", ["asyncpg", "psycopg,psycopg_pool"])
def test_every_command_works_with_one_driver_alone(migrated_url, missing):
    """Either of the two is enough; what is not found is said as ever."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, missing, json.dumps(COMMANDS), migrated_url],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for arguments, code, errors in json.loads(done.stdout):
        if arguments[:2] in (["keys", "show"], ["keys", "release"]):
            # The server of the tests writes without fsync, of which the log warns.
            assert json.loads(errors.splitlines()[-1])["error"] == "KeyUnknown"
        elif arguments != ["doctor"]:
            assert code == 0, (arguments, errors)
        assert "Traceback" not in errors


@pytest.mark.parametrize("command", [("keys", "list"), ("export",), ("keys", "list", "--json")])
def test_a_full_output_is_one_line(real_store, command):
    """Whatever is buffered by then, nothing is said twice."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "retrysafe", *command, "--store", real_store],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == ExitCode.REFUSED
    (line,) = done.stderr.splitlines()
    assert "the output cannot be written: No space left on device" in line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_what_could_come_next(invoke, shell):
    """The script asks the program itself, which answers with commands and options."""
    script = invoke("completion", shell)
    assert script.code == 0
    assert "_RETRYSAFE_COMPLETE" in script.stdout
    asked = {
        "_RETRYSAFE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "retrysafe keys l",
        "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": "retrysafe keys l",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", ENTRY],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | asked,
    )
    assert "list" in done.stdout
    assert "release" not in done.stdout.replace("released", "")

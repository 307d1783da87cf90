"""The command as users run it: a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import retrysafe
from retrysafe.cli.problems import ExitCode

SCRIPT = "import sys; from retrysafe.cli import main; sys.exit(main())"


def test_both_ways_to_start_are_the_same(spawn, real_store):
    """The installed script calls `retrysafe.cli:main`; `python -m retrysafe` does as well."""
    module = spawn("keys", "list", "--store", real_store)
    script = spawn("keys", "list", "--store", real_store, command=("-c", SCRIPT))
    assert module.code == script.code == 0
    keys = [line.split()[:2] for line in module.stdout.splitlines()[1:]]
    assert sorted(keys) == [["GLOBAL", "report"], ["acme", "charge:1"]]
    assert [line.split()[:2] for line in script.stdout.splitlines()[1:]] == keys


def test_show_tells_what_a_worker_stored(spawn, real_store):
    outcome = spawn("keys", "show", "charge:1", "--caller", "acme", RETRYSAFE_STORE=real_store)
    assert outcome.code == 0
    assert '"paid": 5' in outcome.stdout


def test_an_expired_key_runs_again(spawn, real_store):
    """What an operator does on the command line is what a worker sees next."""
    outcome = spawn(
        "keys",
        "expire",
        "charge:1",
        "--caller",
        "acme",
        "--yes",
        "--reason",
        "why",
        "--store",
        real_store,
    )
    assert outcome.code == 0
    with retrysafe.Idempotency(real_store, caller="acme") as idempotency:
        answer = idempotency.answer("charge:1", lambda: {"paid": 6}, name="charge", request=5)
    assert (answer.value, answer.replayed) == ({"paid": 6}, False)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_problem_is_one_line_and_a_code(spawn, tmp_path, flags):
    outcome = spawn("keys", "list", "--store", f"sqlite:///{tmp_path}/no.db", *flags)
    assert outcome.code == ExitCode.STORE
    line = outcome.line
    if flags:
        assert json.loads(line)["error"] == "StoreMissing"
    else:
        assert line.startswith("retrysafe: there is no database at")


def test_version(spawn):
    assert spawn("--version").stdout == f"retrysafe {retrysafe.__version__}\n"
    assert spawn("--version", "--json").json == {"version": retrysafe.__version__}


def test_without_a_command_the_help_is_shown(spawn):
    outcome = spawn()
    assert outcome.code == ExitCode.USAGE
    assert "Usage: retrysafe" in outcome.stdout


def test_json_may_come_before_the_command(spawn, real_store):
    outcome = spawn("--json", "keys", "list", "--store", real_store)
    assert len(outcome.json["keys"]) == 2


def test_a_reader_that_leaves_early_is_no_fault(real_store):
    """`retrysafe keys list | head -0`: the pipe is closed before anything is written."""
    with subprocess.Popen(
        [sys.executable, "-m", "retrysafe", "keys", "list", "--store", real_store],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 1


def test_a_terminal_without_unicode_gets_no_traceback(spawn, real_store):
    with retrysafe.Idempotency(real_store, caller="ácme") as idempotency:
        idempotency.run("schlüssel→1", lambda: "ü", name="n", request=None)
    outcome = spawn("keys", "list", "--store", real_store, PYTHONIOENCODING="ascii")
    assert outcome.code == 0
    assert "schl\\xfcssel\\u21921" in outcome.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_named(spawn, tmp_path, missing):
    """Without the extra the library works, and the command says in one line what to install."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    path = ":".join([str(tmp_path), str(Path(retrysafe.__file__).parents[1])])
    outcome = spawn("keys", "list", PYTHONPATH=path)
    assert outcome.code == ExitCode.USAGE
    assert "with its extra cli, from a clone with pip install '/path/to/clone[cli]'" in outcome.line
    works = spawn(command=("-c", "import retrysafe; print(retrysafe.Idempotency)"), PYTHONPATH=path)
    assert works.code == 0


def test_the_library_never_imports_the_extra():
    """Importing retrysafe brings in neither Typer nor Rich, and not even the command line."""
    code = (
        "import sys, retrysafe\n"
        "print([n for n in ('typer', 'rich', 'click', 'retrysafe.cli') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n"

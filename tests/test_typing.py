"""Type checkers follow an operation's parameters and result through every public call."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "tests" / "typed_calls.py"


def _run(*command: str) -> str:
    result = subprocess.run(
        (sys.executable, "-m", *command), cwd=ROOT, capture_output=True, text=True, check=False
    )
    # 1 is "found errors"; anything above means that the checker itself did not work.
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


def mypy(_: Path) -> dict[int, str]:
    """The errors by their lines, in the mode of this repository: strict."""
    output = _run("mypy", "--config-file", "pyproject.toml", str(SAMPLE))
    found = re.findall(rf"^tests/{SAMPLE.name}:(\d+): error: (.*)$", output, re.MULTILINE)
    return {int(line): message for line, message in found}


def basedpyright(folder: Path) -> dict[int, str]:
    """The same in its standard mode: the strict one is also about the style of the sample."""
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps({"include": [str(SAMPLE)], "typeCheckingMode": "standard"}))
    options = ("--project", str(config), "--pythonpath", sys.executable, "--outputjson")
    return {
        found["range"]["start"]["line"] + 1: found["message"]
        for found in json.loads(_run("basedpyright", *options))["generalDiagnostics"]
        if found["severity"] == "error"
    }


@pytest.mark.parametrize("check", [mypy, basedpyright])
def test_checkers_find_wrong_calls_and_no_others(check, tmp_path: Path) -> None:
    """Swapped, missing and surplus arguments and wrong results are errors; the rest passes.

    `assert_type` fails where a result is known as Any only, so no signature can be loosened.
    """
    lines = SAMPLE.read_text().splitlines()
    expected = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    found = check(tmp_path)

    accepted = [f"{number}: {lines[number - 1].strip()}" for number in expected - found.keys()]
    refused = [f"{number}: {found[number]}" for number in found.keys() - expected]

    assert not accepted, "wrong calls that pass: " + "; ".join(sorted(accepted))
    assert not refused, "right calls that do not: " + "; ".join(sorted(refused))

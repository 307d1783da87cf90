"""An integration without its framework says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import retrysafe

SOURCE = Path(retrysafe.__file__).parents[1]


@pytest.mark.parametrize("framework", ["starlette", "fastapi", "litestar", "flask"])
def test_a_missing_framework_says_which_extra_has_it(framework):
    """In an environment that has retrysafe alone, by the name of the extra."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import retrysafe.contrib.{framework}"
    ended = subprocess.run(
        # -S -E: nothing of the environment that the tests run in.
        [sys.executable, "-S", "-E", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ModuleNotFoundError: retrysafe.contrib.{framework} needs {framework}: install retrysafe "
        f"with its extra {framework},"
    )

"""The built wheel is what users get, so the built wheel is what is tested here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import retrysafe

ROOT = Path(__file__).resolve().parent.parent

ROUND_TRIP = """
import sys
import retrysafe
assert retrysafe.__file__.startswith(sys.argv[1]), retrysafe.__file__
runs = []
def charge(amount):
    runs.append(amount)
    return {"charged": amount}
url = "sqlite:///" + sys.argv[2]
for _ in range(2):
    with retrysafe.Idempotency(url, caller="tenant-1") as idem:
        answers = [idem.run("order-1", charge, 5) for _ in range(2)]
        assert answers == [{"charged": 5}] * 2, answers
assert runs == [5], runs
print("ran once")
"""


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy without network access, so that no build leaves traces here."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.db*")
    )
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=source)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_file_of_the_package(wheel):
    """The SQL files, the typing mark and all modules are in the wheel, byte for byte."""
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted((ROOT / "src" / "retrysafe").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT / "src").as_posix()
                assert archive.read(name) == path.read_bytes(), name


def test_wheel_carries_what_is_not_python(wheel):
    """Without these an installed package cannot migrate, type-check or be redistributed."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"retrysafe-{retrysafe.__version__}.dist-info"
    assert {
        "retrysafe/py.typed",
        "retrysafe/stores/sqlite/sql/claims.sql",
        "retrysafe/stores/sqlite/migrations/0001_initial.sql",
        f"{info}/licenses/LICENSE",
    } <= names
    assert not [name for name in names if not name.startswith(("retrysafe/", info))]


def test_wheel_states_version_licence_and_no_requirement(wheel):
    """The metadata agrees with the code, and a plain install brings nothing else along."""
    with zipfile.ZipFile(wheel) as archive:
        name = f"retrysafe-{retrysafe.__version__}.dist-info/METADATA"
        metadata = archive.read(name).decode().splitlines()
    assert f"Version: {retrysafe.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    needed = [line for line in metadata if line.startswith("Requires-Dist:")]
    assert [line for line in needed if "extra ==" not in line] == []


def test_installed_wheel_runs_an_operation_once(wheel, tmp_path):
    """Installed alone, the wheel makes a SQLite database and replays from it in a new object."""
    target = tmp_path / "site"
    run(
        sys.executable,
        *("-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
        *("--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel)),
        cwd=tmp_path,
    )
    # -S leaves out the environment's own packages, among them the editable retrysafe.
    printed = run(
        sys.executable,
        *("-S", "-c", ROUND_TRIP, str(target), str(tmp_path / "once.db")),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert printed == "ran once\n"

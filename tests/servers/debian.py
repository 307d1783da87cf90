"""Programs from Debian's packages, installed where this process may do that."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path


def from_debian(package: str, find: Callable[[], Path | None]) -> Path | None:
    """What `find` finds, after the package was installed if that was needed and possible."""
    found = find()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "--no-install-recommends", package]
        if subprocess.run(install, env=environment, capture_output=True, check=False).returncode:
            subprocess.run(["apt-get", "update"], env=environment, capture_output=True, check=False)
            subprocess.run(install, env=environment, capture_output=True, check=False)
        found = find()
    return found

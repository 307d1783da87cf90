"""SQS as Moto imitates it, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.servers.process import ServerProcess


class MotoServer(ServerProcess):
    """One server on a free port; its queues end with it."""

    name = "Moto"
    look_seconds = 0.05

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self, log):
        # Without the script's folder on the path, where this module has moto's name.
        script = (sys.executable, "-P", Path(__file__).with_name("moto_locked.py"))
        environment = os.environ | {"PYTHONWARNINGS": "ignore"}
        return self.begin(log, (*script, "-H", "127.0.0.1", "-p", self.port), env=environment)

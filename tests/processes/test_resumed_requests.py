"""SIGKILL of a web server behind its 202: a worker alone finishes the request, once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from retrysafe import Idempotency
from retrysafe.core.keys.key import Key
from retrysafe.stores import Condition
from tests.processes.ledger import noted

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60
APPS = "tests.processes.resumable_apps"
HEADERS = {"Authorization": "Bearer t0ken", "Idempotency-Key": '"k-1"'}
SERVERS = {
    "app": ["uvicorn", "--log-level", "warning", f"{APPS}:app", "--fd"],
    "threads": [
        *("gunicorn", "--threads", "4", "--log-level", "warning", f"{APPS}:threads", "--bind"),
    ],
}


class Shop:
    """The processes of one shop; the listening socket outlives its servers."""

    def __init__(
        self, kind: str, url: str, folder: Path, processes: ExitStack, *, has_pipe: bool = True
    ) -> None:
        self._kind = kind
        self._processes = processes
        self.pipe = folder / "pipe"
        os.mkfifo(self.pipe)
        self.ledger = str(folder / "ledger")
        self._environment = {
            **os.environ,
            # Where gunicorn puts a socket of its own.
            "HOME": str(folder),
            "SHOP_STORE": url,
            "SHOP_LEDGER": self.ledger,
            "SHOP_PIPE": str(self.pipe) if has_pipe else "",
        }
        self._socket = processes.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._socket.set_inheritable(True)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def serve(self) -> subprocess.Popen:
        number = self._socket.fileno()
        given = [str(number)] if self._kind == "app" else [f"fd://{number}"]
        return self._started(["-m", *SERVERS[self._kind], *given], pass_fds=[number])

    def work(self) -> subprocess.Popen:
        command = ["-m", "retrysafe", "worker", "--app", f"{APPS}:{self._kind}", "--json"]
        return self._started([*command, "--interval", "0.1", "--back-off", "0"])

    def _started(self, command: list[str], **options) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        self._processes.callback(ended, process)
        return process


def ended(process: subprocess.Popen, number: int = signal.SIGKILL) -> str:
    """Ends a process with those that it has started, in their own session; gives its output."""
    if process.poll() is None:
        os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    return output


@contextmanager
def opened(kind: str, url: str, folder: Path):
    with ExitStack() as processes:
        yield Shop(kind, url, folder, processes)


def wait_for(reader: Idempotency, condition: Condition) -> None:
    """Until the key is in that condition."""
    for _ in range(LIMIT_SECONDS * 50):
        found = reader.read(Key("k-1", caller="acme"))
        if found.condition is condition:
            return
        # The processes need the time: nothing in here could tell it.
        signal.sigtimedwait([], 0.02)
    pytest.fail(f"the key is {found.condition}")


@pytest.mark.parametrize("kind", ["app", "threads"])
def test_a_worker_alone_finishes_what_a_killed_server_has_accepted(tmp_path, url, kind):
    """The step that ran does not run again, and the revived server shows the response."""
    with opened(kind, url, tmp_path) as shop, Idempotency(url, caller="acme") as reader:
        server = shop.serve()
        accepted = httpx.post(f"{shop.url}/charges/7", headers=HEADERS, json={}, timeout=60)
        assert (accepted.status_code, accepted.json()["state"]) == (202, "running")
        assert shop.pipe.read_text() == "stepped"
        ended(server)
        worker = shop.work()
        wait_for(reader, Condition.SUCCEEDED)
        stored = reader.read(Key("k-1", caller="acme"))
        assert stored.arguments is None
        report = json.loads(ended(worker, signal.SIGTERM))["recovery"]
        assert (report["resumed"], report["failed"]) == (1, 0)
        shop.serve()
        status = httpx.get(shop.url + accepted.headers["location"], headers=HEADERS, timeout=60)
        assert status.status_code == 201
        assert status.json() == {"charge": "charge-7", "who": "acme", "till": "till-1"}
        replay = httpx.post(f"{shop.url}/charges/7", headers=HEADERS, json={}, timeout=60)
        assert (replay.headers["idempotent-replayed"], replay.json()) == ("true", status.json())
        assert noted(shop.ledger) == [["charge", "7"]]

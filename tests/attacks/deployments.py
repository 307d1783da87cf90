"""The deployment shapes that are tested: how each server is started, and what a SIGTERM does there.

Owns the list that docs/deployment.md shows as a table; a test compares the two.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.attacks.apps.ledger import LEDGER_VARIABLE, STORE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 20
# Longer than anything here takes: what has not been answered by then hangs.
ANSWER_SECONDS = 30

FINISHED = "finishes"
CUT_OFF = "is cut off"


@dataclass(frozen=True)
class Deployment:
    """A server with its options."""

    # As people type it, and as the page shows it.
    options: str
    application: str
    # What an operation does that is under way when the server gets a SIGTERM.
    at_sigterm: str = FINISHED
    # Tested in every run; the others in the long one.
    is_quick: bool = False
    # What each of its workers says once it is up, where one that is not takes no notice of a
    # SIGTERM and keeps its server from ending.
    ready: str = ""
    workers: int = 1

    @property
    def name(self) -> str:
        """For the names of tests."""
        return self.options.replace(" --", "-").replace(" ", "-")

    def command(self, port: int) -> list[str]:
        """What starts it on loopback."""
        server, *options = self.options.split(" ")
        address = f"127.0.0.1:{port}"
        target = f"tests.attacks.apps.{self.application}:application"
        python = (sys.executable, "-m")
        return {
            "gunicorn": [*python, "gunicorn", target, "-b", address, *_GUNICORN, *options],
            "uvicorn": [*python, "uvicorn", target, "--port", str(port), *options],
            "granian": [
                *(*python, "granian", target, "--port", str(port)),
                *("--interface", self.application[:4], *options),
            ],
            "hypercorn": [*python, "hypercorn", target, "-b", address, *options],
            "uwsgi": [
                *(str(Path(sys.executable).parent / "uwsgi"), "--http-socket", address),
                *("--module", target, *_UWSGI, *options),
            ],
        }[server]


# Its control socket has one path for all servers of a user.
_GUNICORN = ("--no-control-socket", "--graceful-timeout", "3")
# A SIGTERM makes uWSGI start again by default.
_UWSGI = (
    *("--master", "--need-app"),
    *("--hook-master-start", "unix_signal:15 gracefully_kill_them_all"),
)

DEPLOYMENTS = (
    Deployment("gunicorn --workers 2", "wsgi_app"),
    Deployment("gunicorn --workers 2 --preload", "wsgi_app"),
    Deployment("gunicorn -k gthread --threads 16", "wsgi_app"),
    Deployment("gunicorn -k gthread --threads 16 --workers 2 --preload", "wsgi_app"),
    Deployment("gunicorn -k gevent", "wsgi_app"),
    Deployment("gunicorn -k gevent --workers 2 --preload", "wsgi_app", is_quick=True),
    Deployment("uwsgi --processes 2", "wsgi_app"),
    Deployment("uwsgi --processes 2 --threads 8", "wsgi_app", is_quick=True),
    Deployment(
        "uwsgi --processes 2 --threads 8 --lazy-apps", "wsgi_app", ready="WSGI app 0", workers=2
    ),
    Deployment("uwsgi --gevent 50 --gevent-monkey-patch", "wsgi_app"),
    Deployment(
        "granian --workers 2 --blocking-threads 16", "wsgi_app", ready="Started worker", workers=2
    ),
    Deployment("granian --workers 2", "asgi_app", ready="Started worker", workers=2),
    Deployment("uvicorn", "asgi_app"),
    Deployment("uvicorn --workers 2", "asgi_app"),
    Deployment("uvicorn --loop asyncio", "asgi_app"),
    Deployment("hypercorn", "asgi_app"),
    Deployment("hypercorn -k uvloop", "asgi_app"),
    Deployment("hypercorn --workers 2", "asgi_app", CUT_OFF),
)


@dataclass
class Served:
    """A server that runs, and the file in which its application says what it did."""

    process: subprocess.Popen[bytes]
    port: int
    ledger: Path
    log: Path

    def counts(self) -> Counter[str]:
        """How often each line is in the ledger."""
        return Counter(self.ledger.read_text().splitlines() if self.ledger.exists() else [])

    def wait_for(self, line: str) -> None:
        """Returns when the line is in the ledger."""
        give_up = time.monotonic() + ANSWER_SECONDS
        while not self.counts()[line]:
            assert time.monotonic() < give_up, self.log.read_text()
            time.sleep(0.01)

    def post(self, key: str, seconds: float, *, wait: int = 0) -> http.client.HTTPResponse:
        """One request; the body is read and stands in `body`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        headers = {
            "Authorization": "Bearer alice",
            "Content-Type": "application/json",
            "Idempotency-Key": f'"{key}"',
        }
        if wait:
            headers["Prefer"] = f"wait={wait}"
        with contextlib.closing(connection):
            connection.request("POST", "/charges", json.dumps({"seconds": seconds}), headers)
            response = connection.getresponse()
            response.body = response.read()
        return response

    def outcome(self, key: str, seconds: float, *, wait: int = 0) -> http.client.HTTPResponse:
        """As a client does it: asks again while the answer is 409, or the server is not there."""
        give_up = time.monotonic() + ANSWER_SECONDS
        while True:
            response = self.post(key, seconds, wait=wait)
            if response.status != 409 or time.monotonic() > give_up:
                return response
            time.sleep(0.1)

    def end(self) -> str:
        """Sends the SIGTERM, waits for the end and returns what the server has said."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_SECONDS)
        return self.log.read_text(errors="replace")


def launch(command: list[str], port: int, store: str, directory: Path) -> Served:
    """Starts a server, which may not listen yet."""
    log = directory / f"server-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ
            | {
                STORE_VARIABLE: store,
                LEDGER_VARIABLE: str(directory / "ledger"),
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            # A group of its own: some servers leave processes behind when they are killed.
            start_new_session=True,
        )
    return Served(process, port, directory / "ledger", log)


@contextmanager
def serving(deployment: Deployment, store: str, directory: Path) -> Iterator[Served]:
    """The deployment, answering; killed with all of its processes at the end if it still runs."""
    port = free_port()
    served = launch(deployment.command(port), port, store, directory)
    try:
        wait_until_it_answers(served)
        while served.log.read_text(errors="replace").count(deployment.ready) < deployment.workers:
            time.sleep(0.05)
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(served.process.pid, signal.SIGKILL)
        served.process.wait(STOP_SECONDS)


def wait_until_it_answers(served: Served) -> None:
    """Returns when a request that is not protected gets an answer."""
    give_up = time.monotonic() + START_SECONDS
    while True:
        has_failed = served.process.poll() is not None or time.monotonic() > give_up
        assert not has_failed, served.log.read_text(errors="replace")
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=5)
        try:
            with contextlib.closing(connection):
                connection.request("GET", "/")
                connection.getresponse().read()
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def at_once(*calls) -> list:
    """What the calls return, made by as many threads at the same moment."""
    barrier = threading.Barrier(len(calls))
    results: list = [None] * len(calls)

    def make(place: int) -> None:
        barrier.wait(ANSWER_SECONDS)
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=make, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * ANSWER_SECONDS)
    return results

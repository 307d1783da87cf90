"""The servers: how each is started on loopback, with one of the applications, and stopped.

A framework joins the table with one line here and a module in `apps` whose `make` gives its
application, with the same routes, behind the framework's own integration.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.error import URLError
from urllib.request import urlopen

from tests.http_cases.cases import (
    ASGI,
    FRAMEWORK,
    HTTP_1,
    HTTP_2,
    ONE_PROCESS,
    PROCESSES,
    RAW_APPLICATION,
    WSGI,
    Case,
)
from tests.http_cases.configuration import (
    APPLICATION_VARIABLE,
    DIRECTORY_VARIABLE,
    MOUNTS,
    MOUNTS_VARIABLE,
    mount_of,
)

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 20
_TARGET = "tests.http_cases.apps.served:application"
# Every request of the largest crowd may be waiting at the same time.
_THREADS = "128"


@dataclass(frozen=True)
class ServerKind:
    """A server with an application, and what is special about the two."""

    name: str
    # In words, for people.
    title: str
    # The protocol and the module in `apps`.
    application: str
    command: tuple[str, ...]
    traits: frozenset[str] = field(default=frozenset())
    # Which mounts it has, and whether each needs a process of its own.
    mounts: tuple[str, ...] = tuple(mount.prefix for mount in MOUNTS)
    is_split: bool = False

    def reason_without(self, case: Case) -> str | None:
        """Why a case has no meaning here; None when it has one."""
        if mount_of(case.asks[0].path).prefix not in self.mounts:
            return "one project has one setting, and other settings are played with django"
        return case.reason_without(self.traits)


_UVICORN_ALONE = (
    *("uvicorn", _TARGET, "--host", "127.0.0.1", "--port", "{port}"),
    *("--log-level", "warning", "--ws", "wsproto", "--lifespan", "on"),
    # A play may pause between two requests on a busy machine.
    *("--timeout-keep-alive", "75"),
)
# Its parser and loop in Python, and those in C: what it is installed with decides in production.
_UVICORN = (*_UVICORN_ALONE, "--http", "h11", "--loop", "asyncio")
_UVICORN_IN_C = (*_UVICORN_ALONE, "--http", "httptools", "--loop", "uvloop")
_GRANIAN = (
    *("granian", _TARGET, "--host", "127.0.0.1", "--port", "{port}"),
    *("--interface", "asgi", "--http", "1", "--log-level", "warning"),
)
_HYPERCORN = (
    *("hypercorn", _TARGET, "--bind", "127.0.0.1:{port}", "--log-level", "warning"),
    *("--keep-alive", "75"),
)
_GUNICORN = (
    *("gunicorn", _TARGET, "--bind", "127.0.0.1:{port}", "--worker-class", "gthread"),
    *("--threads", _THREADS, "--log-level", "warning", "--keep-alive", "75"),
    *("--worker-connections", "4000", "--graceful-timeout", "1"),
)


def _kind(
    name: str,
    title: str,
    application: str,
    command: tuple[str, ...],
    *traits: str,
    **more: Any,
) -> ServerKind:
    protocol, _, module = application.partition(":")
    usual = {
        name,
        protocol,
        HTTP_1 if HTTP_2 not in traits else HTTP_2,
        ONE_PROCESS if PROCESSES not in traits else PROCESSES,
        RAW_APPLICATION if module.startswith("raw_") else FRAMEWORK,
    }
    return ServerKind(name, title, application, command, frozenset({*usual, *traits}), **more)


KINDS = (
    _kind("uvicorn", "plain ASGI, Uvicorn, HTTP/1.1", f"{ASGI}:raw_asgi", _UVICORN),
    _kind("granian", "plain ASGI, Granian, HTTP/1.1", f"{ASGI}:raw_asgi", _GRANIAN),
    _kind(
        "hypercorn-http2", "plain ASGI, Hypercorn, HTTP/2", f"{ASGI}:raw_asgi", _HYPERCORN, HTTP_2
    ),
    _kind(
        "gunicorn",
        "plain WSGI, Gunicorn with threads",
        f"{WSGI}:raw_wsgi",
        (*_GUNICORN, "--workers", "1"),
    ),
    _kind(
        "gunicorn-preloaded",
        "plain WSGI, Gunicorn with threads, preloaded, two processes",
        f"{WSGI}:raw_wsgi",
        (*_GUNICORN, "--workers", "2", "--preload"),
        PROCESSES,
    ),
    _kind(
        "starlette",
        "Starlette, a rule on every endpoint; Uvicorn with httptools and uvloop",
        f"{ASGI}:starlette_app",
        _UVICORN_IN_C,
    ),
    _kind("fastapi", "FastAPI, a rule on every endpoint; Uvicorn", f"{ASGI}:fastapi_app", _UVICORN),
    _kind(
        "litestar",
        "Litestar, a rule on every route handler; Uvicorn",
        f"{ASGI}:litestar_app",
        _UVICORN,
    ),
    _kind(
        "flask",
        "Flask, a decorator on every view; Gunicorn",
        f"{WSGI}:flask_app",
        (*_GUNICORN, "--workers", "1"),
    ),
    _kind(
        "flask-rules",
        "Flask, rules by path; Gunicorn",
        f"{WSGI}:flask_rules_app",
        (*_GUNICORN, "--workers", "1"),
    ),
    # A project has one setting, so that every mount is a project and a process of its own.
    _kind(
        "django",
        "Django, a decorator on every view; Gunicorn",
        f"{WSGI}:django_app",
        (*_GUNICORN, "--workers", "1"),
        is_split=True,
    ),
    _kind(
        "django-rules",
        "Django, the middleware with rules by path; Gunicorn",
        f"{WSGI}:django_rules_app",
        (*_GUNICORN, "--workers", "1"),
        mounts=("",),
    ),
    _kind(
        "django-async",
        "Django, a decorator on every async view; Uvicorn",
        f"{ASGI}:django_async_app",
        _UVICORN,
        mounts=("",),
    ),
    _kind(
        "drf",
        "Django REST framework, a decorator on every method; Gunicorn",
        f"{WSGI}:drf_app",
        (*_GUNICORN, "--workers", "1"),
        mounts=("",),
    ),
)
# Not in the table: what an application without protection does.
BARE = _kind("bare", "plain ASGI without protection", f"{ASGI}:bare_asgi", _UVICORN)
KINDS_BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass
class _Process:
    """A process of a server, and the mounts that it serves."""

    process: subprocess.Popen[bytes]
    port: int
    log: IO[bytes]
    prefixes: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self) -> None:
        """Returns when it answers; raises when it ends instead, with what it said."""
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended while starting: {self.said()}")
            try:
                url = f"{self.url}{self.prefixes[-1]}/idempotency-policy"
                with urlopen(url, timeout=5):
                    return
            except (URLError, ConnectionError, TimeoutError):
                time.sleep(0.05)
        raise RuntimeError(f"the server did not start in time: {self.said()}")

    def said(self) -> str:
        """What it has written so far."""
        return Path(self.log.name).read_text(errors="replace")[-4000:]

    def end(self) -> bool:
        """Whether the process ended by itself after it was told to; killed otherwise."""
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        finally:
            self.log.close()
        return True


@dataclass
class RunningServer:
    """A server: its processes, and the directory where they meet the tests."""

    kind: ServerKind
    directory: Path
    processes: list[_Process]

    @property
    def urls(self) -> dict[str, str]:
        """Where each mount is served."""
        return {prefix: each.url for each in self.processes for prefix in each.prefixes}

    def wait_until_ready(self) -> None:
        """Returns when every process answers."""
        for process in self.processes:
            process.wait_until_ready()

    def stop(self) -> None:
        """Ends the processes; one that does not end by itself is killed and reported."""
        for each in self.processes:
            each.process.terminate()
        ended = [each.end() for each in self.processes]
        said = "" if all(ended) else "\n".join(each.said() for each in self.processes)
        shutil.rmtree(self.directory)
        if not all(ended):
            raise RuntimeError(f"{self.kind.name} did not stop: {said}")


def start(kind: ServerKind) -> RunningServer:
    """Starts a server; `wait_until_ready` tells when it answers."""
    # Short, because the path of a socket has a limit.
    directory = Path(tempfile.mkdtemp(prefix="cases-"))
    groups = [(prefix,) for prefix in kind.mounts] if kind.is_split else [kind.mounts]
    return RunningServer(kind, directory, [_launch(kind, directory, group) for group in groups])


def _launch(kind: ServerKind, directory: Path, prefixes: tuple[str, ...]) -> _Process:
    port = _free_port()
    log = (directory / f"server-{port}.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", *(part.replace("{port}", str(port)) for part in kind.command)],
        env=os.environ
        | {
            DIRECTORY_VARIABLE: str(directory),
            APPLICATION_VARIABLE: kind.application,
            MOUNTS_VARIABLE: " ".join(prefix or "/" for prefix in prefixes),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        },
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    )
    return _Process(process, port, log, prefixes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

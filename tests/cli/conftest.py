from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner

from retrysafe import GLOBAL, Idempotency, Key, Policy
from retrysafe.cli.app import app
from retrysafe.core.model import (
    ClaimRequest,
    Fingerprint,
    Payload,
    SettleKind,
    Settlement,
    Step,
    StepWrite,
)
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition, SqliteStore


@dataclass
class Outcome:
    """What a command wrote and how it ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self):
        return json.loads(self.stdout)

    @property
    def line(self):
        """The one line on stderr; more or less than one is a failure."""
        assert self.stdout == ""
        assert self.stderr.endswith("\n")
        assert self.stderr.count("\n") == 1
        assert "Traceback" not in self.stderr
        return self.stderr[:-1]


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch):
    monkeypatch.delenv("RETRYSAFE_STORE", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session", autouse=True)
def _one_command_line():
    """Typer's runner makes the whole command line anew for every command: 23 ms of processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def invoke():
    """Runs a command in this process, as Typer's own runner does."""

    def run(*args, piped=None):
        result = CliRunner().invoke(app, [str(item) for item in args], input=piped)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def spawn():
    """Runs a command as users do: in a process of its own."""

    def run(*args, command=("-m", "retrysafe"), **environment):
        done = subprocess.run(
            [sys.executable, *command, *map(str, args)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


class Desk:
    """A store with a clock that stands still, and records in every condition."""

    START_MS = 1_800_000_000_000
    LEASE_MS = 30_000
    ACTIVE_MS = 3_600_000
    AUDIT_MS = 86_400_000

    def __init__(self, path):
        self.path = path
        self.url = f"sqlite:///{path}"
        self.now_ms = self.START_MS
        self.store = SqliteStore(path, now_ms=lambda: self.now_ms)
        run_sync(self.store.migrate())

    def claim(self, text, caller="acme", operation="charge", arguments=None, mark=b"f" * 16):
        """Claims a natural key, which takes corrected requests; returns the token."""
        token = os.urandom(16)
        request = ClaimRequest(
            Key(text, caller=caller),
            (Fingerprint(1, mark),),
            token,
            self.LEASE_MS,
            operation,
            "host:1",
            arguments,
            takes_corrections=True,
        )
        run_sync(self.store.commit([request], []))
        return token

    def settle(self, kind, text, token, payload, caller="acme", *, nothing_happened=False):
        """Ends a claim."""
        settlement = Settlement(
            kind,
            Key(text, caller=caller),
            token,
            payload,
            active_ms=self.ACTIVE_MS,
            audit_ms=self.AUDIT_MS,
            nothing_happened=nothing_happened,
        )
        run_sync(self.store.commit([], [settlement]))

    def put(self, text, kind=SettleKind.COMPLETE, payload=None, caller="acme", operation="charge"):
        """A settled key."""
        token = self.claim(text, caller, operation)
        self.settle(kind, text, token, payload or Payload("json.1", b"", b'{"n":1}'), caller)

    def step(self, text, token, name, position, payload, caller="acme"):
        """A finished step of a claimed key."""
        write = StepWrite(Key(text, caller=caller), token, Step(name, position, payload))
        run_sync(self.store.record_step(write))

    def condition(self, text, caller="acme"):
        """The condition by the clock of the desk."""
        return run_sync(self.store.read(Key(text, caller=caller))).condition


@pytest.fixture
def desk(tmp_path, monkeypatch):
    made = Desk(tmp_path / "keys.db")
    # The commands open the store by its URL; they must see the same clock.
    monkeypatch.setattr(
        "retrysafe.stores.opening.SqliteStore",
        lambda path, **options: SqliteStore(path, now_ms=lambda: made.now_ms, **options),
    )
    yield made
    run_sync(made.store.close())


@pytest.fixture
def real_store(tmp_path):
    """A store on the host's clock, for commands in processes of their own."""
    url = f"sqlite:///{tmp_path / 'real.db'}"
    with Idempotency(url, caller="acme", policy=Policy()) as idempotency:
        idempotency.run("charge:1", lambda: {"paid": 5}, name="charge", request=5)
        idempotency.run("report", lambda: "done", caller=GLOBAL, name="report", request=None)
        assert idempotency.read("charge:1").condition is Condition.SUCCEEDED
    return url

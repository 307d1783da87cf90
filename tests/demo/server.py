"""A demo in a process of its own, as outside checks meet it: over a real socket."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from typing import Any

import httpx

# Far beyond what a start takes on a busy machine; reaching it is a hang.
PATIENCE_SECONDS = 60.0
LEASE_SECONDS = 10

CHARGE = {"amount": 1000, "currency": "eur", "customer": "c1"}
ORDER = {"item": "widget", "quantity": 1, "customer": "c1"}
CHECKOUT = {"customer": "c1", "items": ["widget", {"sku": "gadget", "quantity": 2}]}
BODIES = {"charges": CHARGE, "orders": ORDER, "checkouts": CHECKOUT}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "retrysafe", "demo", *arguments]


def new_text(name: str) -> str:
    """A customer, a caller or a key that nobody else uses."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


class DemoServer:
    """One server process, with a client for it."""

    def __init__(self, store: str, port: int = 0, *options: str) -> None:
        self.process = subprocess.Popen(
            command("--port", str(port), "--store", store, "--json", *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self._told()["url"]
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS)

    def _told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            if not line:
                _, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
                raise AssertionError(f"the demo did not start: {errors}")
            text += line
        told: dict[str, Any] = json.loads(text)
        return told

    def post(
        self, path: str, key: str | None, body: Any, *, caller: str = "me", **headers: str
    ) -> httpx.Response:
        """One protected request; names of headers with underscores for hyphens."""
        return self.client.post(f"/{path}", headers=headers_of(key, caller, **headers), json=body)

    def entries(self, path: str, customer: str) -> list[dict[str, Any]]:
        """What was really executed."""
        response = self.client.get(f"/{path}", params={"customer": customer})
        assert response.status_code == 200
        found: list[dict[str, Any]] = response.json()
        return found

    def kill(self) -> None:
        """Ends the process as a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL

    def stop(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Ends the process as Ctrl-C does; its exit code, and what it had to say."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        # The tests' own PostgreSQL runs without fsync, and a store says so when it first looks. Of
        # keys that are sent again with another request, an operator hears.
        expected = ("fsync is off", "mismatched: ")
        said = [line for line in errors.splitlines() if not any(text in line for text in expected)]
        return self.process.returncode, "\n".join(said)

    def end(self) -> None:
        """Makes sure that nothing is left, whatever became of the test."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=PATIENCE_SECONDS)


def headers_of(key: str | None, caller: str | None = "me", **more: str) -> dict[str, str]:
    lines = {name.replace("_", "-"): value for name, value in more.items()}
    if key is not None:
        lines["Idempotency-Key"] = f'"{key}"'
    if caller is not None:
        lines["Authorization"] = f"Bearer {caller}"
    return lines


def problem_of(response: httpx.Response) -> str:
    """The slug of a problem's type; fails for anything that is no problem."""
    assert response.headers["content-type"] == "application/problem+json"
    content = response.json()
    assert content["status"] == response.status_code
    slug: str = content["type"].partition("#")[2]
    return slug

"""`retrysafe worker --app`: which application is meant, and how it lives in a worker."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from retrysafe.cli.applications import named_application
from retrysafe.cli.problems import Problem

SHOP = """
from retrysafe import GLOBAL, AsyncIdempotency, Idempotency
from retrysafe.http import IdempotencyMiddleware, Rule, WSGIIdempotencyMiddleware

store = "sqlite:///shop.db"

async def endpoint(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            print(message["type"], flush=True)
            if failing:
                await send({"type": "lifespan.startup.failed", "message": "no till"})
                return
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return

def threads(environ, start_response):
    start_response("204 Done", [])
    return []

def protected(resumable, is_async=True):
    kind = IdempotencyMiddleware if is_async else WSGIIdempotencyMiddleware
    made = (AsyncIdempotency if is_async else Idempotency)(store)
    rules = [Rule(path="/charges", resumable=resumable)]
    return kind(endpoint if is_async else threads, made, caller=GLOBAL, rules=rules)

class Factory:
    app = protected(False)

def make():
    return app

failing = False
number = 7
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Writes a module of that name and text beside the shop's, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(name: str, text: str = "") -> str:
        (tmp_path / f"{name}.py").write_text(SHOP + text)
        return name

    yield written
    for name in [name for name in sys.modules if name.startswith("wares_")]:
        del sys.modules[name]


def worked(folder, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "retrysafe", "worker", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_an_application_is_told_by_what_it_is_called_with(shop):
    """Functions and objects of both kinds, and attributes of what a module holds."""
    name = shop("wares_told", "app = protected(True)\nsync = protected(True, is_async=False)\n")
    kinds = {
        path: named_application(f"{name}:{path}").kind
        for path in ("app", "sync", "endpoint", "threads", "Factory.app")
    }
    asgi, wsgi = "an ASGI", "a WSGI"
    assert kinds == {
        "app": asgi,
        "sync": wsgi,
        "endpoint": asgi,
        "threads": wsgi,
        "Factory.app": asgi,
    }


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("", "named module:app"),
        (":", "named module:app"),
        (":nothing", "has no nothing"),
        (":number", "is no application, but a int"),
        (":make", "called with 0 values"),
        (":Factory", "not the function or the class that makes it"),
    ],
)
def test_what_is_no_application_is_refused(shop, path, told):
    """With what to name instead."""
    with pytest.raises(Problem, match=told):
        named_application(shop("wares_refused") + path)
    with pytest.raises(Problem, match="there is no module wares_missing"):
        named_application("wares_missing:app")


def test_an_asgi_application_is_started_and_stopped_around_the_work(shop, tmp_path):
    """Its lifespan runs, and its own object says where the keys are: no --store is needed."""
    shop("wares_alive", "app = protected(True)\n")
    ended = worked(tmp_path, "--app", "wares_alive:app", "--once", "--json")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[:2] == ["lifespan.startup", "lifespan.shutdown"]
    assert json.loads("".join(lines[2:]))["recovery"]["resumed"] == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("app = protected(True); failing = True\n", "the application did not start: no till"),
        ("app = protected(False)\n", "wares_bad:app has no resumable route"),
        (
            "app = protected(False); other = protected(True, is_async=False)\n",
            "its resumable routes belong to a WSGI application",
        ),
        (
            "app = protected(False, is_async=False); other = protected(True)\n",
            "its resumable routes belong to an ASGI application",
        ),
    ],
)
def test_an_application_that_cannot_be_worked_for_is_refused(shop, tmp_path, text, told):
    """In one line, with what to do."""
    shop("wares_bad", text)
    ended = worked(tmp_path, "--app", "wares_bad:app", "--once")
    assert ended.returncode == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr

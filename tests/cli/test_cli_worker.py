"""`retrysafe worker`: operations of a module are finished, and the store is looked after."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, Policy, current_attempt
from retrysafe.cli.problems import ExitCode
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition
from retrysafe.stores.opening import open_store

LIMIT_SECONDS = 60
# The shortest that a policy allows: these keys are abandoned for good by the time of a command.
LEASE = timedelta(milliseconds=100)

BLOCKING = """
import os, pathlib, sys
from datetime import timedelta
from retrysafe import Idempotency, Policy, current_attempt

idem = Idempotency(
    "sqlite:///shop.db", caller="acme", policy=Policy(lease=timedelta(milliseconds=100))
)

@idem.resumable("pay")
def pay(number, mark):
    with pathlib.Path("ran").open("a") as file:
        file.write(f"{number} {mark}\\n")
    if mark == "hang":
        import threading
        threading.Event().wait()
    if mark == "slow":
        sys.stdin.readline()
    if mark == "fail":
        raise ConnectionError("the provider is down")
    return number
"""
ASYNC = BLOCKING.replace("Idempotency", "AsyncIdempotency").replace("def pay", "async def pay")


class Stop(BaseException):
    """The end of a process."""


class Folder:
    """A working folder with a module of operations and the store that they use."""

    def __init__(self, path) -> None:
        self.path = path
        self.url = f"sqlite:///{path / 'shop.db'}"
        (path / "shop.py").write_text(BLOCKING)
        (path / "shop_async.py").write_text(ASYNC)
        run_sync(open_store(self.url).migrate())

    def abandon(self, *keys: str, mark: str = "", name: str = "pay") -> None:
        """Keys whose process ended inside the operation, long ago."""
        with Idempotency(self.url, caller="acme", policy=Policy(lease=LEASE)) as idem:

            def pay(number, mark):
                raise Stop

            if name == "pay":
                idem.resumable(name)(pay)
            for number, key in enumerate(keys):
                with pytest.raises(Stop):
                    idem.run(key, pay, number, mark, name=name)
        until = time.monotonic() + LIMIT_SECONDS
        while self.condition(keys[-1]) is not Condition.ABANDONED:
            assert time.monotonic() < until
            time.sleep(0.01)

    def condition(self, text: str) -> Condition:
        with Idempotency(self.url, caller="acme") as idem:
            return idem.read(text).condition

    @property
    def ran(self) -> list[str]:
        file = self.path / "ran"
        return file.read_text().splitlines() if file.exists() else []

    def worker(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "retrysafe", "worker", *arguments],
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def started(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "retrysafe", "worker", "--interval", "0.1", *arguments],
            cwd=self.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, count: int) -> None:
        """Until so many operations have started."""
        until = time.monotonic() + LIMIT_SECONDS
        while len(self.ran) < count:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.mark.parametrize("module", ["shop", "shop:idem", "shop_async"])
def test_operations_of_a_module_are_finished(folder, module):
    """Of both faces; the store that is named may be theirs, and is not worked on twice."""
    folder.abandon("a", "b")
    ended = folder.worker("--import", module, "--store", folder.url, "--once", "--json")
    assert ended.returncode == 0, ended.stderr
    reports = json.loads(ended.stdout)
    assert reports["recovery"] == {"resumed": 2, "failed": 0, "lost": 0}
    assert reports["abandoned"] == {"reported": 0}
    assert reports["sweep"] == {"keys": 0, "outcomes": 0, "partitions": 0, "entries": 0}
    assert sorted(folder.ran) == ["0 ", "1 "]
    assert folder.condition("a") is folder.condition("b") is Condition.SUCCEEDED


def test_several_modules_are_worked_on_at_once(folder):
    """Each key is finished by one of them; what each did is told apart."""
    folder.abandon("a", "b", "c")
    ended = folder.worker("--import", "shop", "--import", "shop_async", "--once", "--json")
    reports = json.loads(ended.stdout)
    counts = [reports[f"{name} recovery"] for name in ("shop:idem", "shop_async:idem")]
    assert sum(item["resumed"] for item in counts) == len(folder.ran) == 3


def test_a_store_alone_is_swept_and_its_abandoned_keys_are_reported(folder):
    folder.abandon("a", name="plain")
    folder.abandon("b")
    ended = folder.worker("--store", folder.url, "--once")
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == [
        "recovery: resumed 0, failed 0, lost 0",
        "abandoned: reported 2",
        "sweep: keys 0, outcomes 0, partitions 0, entries 0",
    ]
    assert "abandoned: key 'a', operation plain, attempt 1: no resumable" in ended.stderr
    assert folder.ran == []
    assert folder.condition("a") is Condition.ABANDONED


def test_another_store_is_looked_after_too(folder, tmp_path):
    other = f"sqlite:///{tmp_path / 'other.db'}"
    run_sync(open_store(other).migrate())
    folder.abandon("a")
    ended = folder.worker("--import", "shop", "--store", other, "--once", "--json")
    assert "both are tended" in ended.stderr
    reports = json.loads(ended.stdout)
    assert reports["shop:idem recovery"]["resumed"] == 1
    assert reports[f"{other} sweep"]["keys"] == 0


def test_what_an_operation_raises_is_reported(folder):
    folder.abandon("a", mark="fail")
    ended = folder.worker("--import", "shop", "--once")
    assert ended.returncode == 0
    assert "recovery: resumed 0, failed 1, lost 0" in ended.stdout
    assert "ConnectionError: the provider is down" in ended.stderr
    assert "postponed: key 'a'" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_finishes_what_is_under_way_when_told_to_stop(folder, number):
    """It says what it does while it runs, ends in order, and tells the sum."""
    folder.abandon("a", mark="slow")
    with folder.started("--import", "shop") as process:
        try:
            assert "working" in process.stderr.readline()
            folder.wait_for(1)
            process.send_signal(number)
            process.stdin.write("\n")
            process.stdin.flush()
            out, errors = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "recovery: resumed 1, failed 0, lost 0" in out
    assert folder.condition("a") is Condition.SUCCEEDED


def test_an_async_worker_ends_in_order(folder):
    folder.abandon("a")
    with folder.started("--import", "shop_async", "--json") as process:
        try:
            folder.wait_for(1)
            process.send_signal(signal.SIGTERM)
            out, errors = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert json.loads(out)["recovery"]["resumed"] == 1


def test_progress_is_told_while_it_runs(folder):
    folder.abandon("a")
    with folder.started("--import", "shop") as process:
        try:
            lines = [process.stderr.readline()]
            while not lines[-1].startswith("recovery: resumed 1"):
                assert lines[-1]
                lines.append(process.stderr.readline())
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0


def test_a_second_signal_ends_a_worker_that_hangs(folder):
    """At once; the lease frees the key."""
    folder.abandon("a", mark="hang")
    with folder.started("--import", "shop") as process:
        try:
            folder.wait_for(1)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_SECONDS) == ExitCode.INTERRUPTED
        finally:
            process.kill()


def test_a_worker_delivers_too(folder):
    """The relay is one more duty."""
    (folder.path / "messages.py").write_text(
        "def deliver(delivery):\n    print('delivered', delivery.topic, flush=True)\n"
    )

    async def stage():
        async with AsyncIdempotency(folder.url, caller="acme") as idem:

            async def pay():
                current_attempt().outbox.stage("paid", {"order": 1})

            await idem.run("order", pay)

    asyncio.run(stage())
    ended = folder.worker("--store", folder.url, "--target", "python:messages:deliver", "--once")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "delivered paid"
    assert ended.stdout.splitlines()[-1].startswith("relay: delivered 1, failed 0")


def test_a_target_of_a_running_worker_that_is_none_ends_it(folder):
    ended = folder.worker("--store", folder.url, "--target", "nonsense")
    assert ended.returncode == ExitCode.USAGE
    assert "names no target" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--import", "no_such_module_anywhere"), "there is no module no_such_module_anywhere"),
        (("--import", "shop.py"), "there is no module shop.py: modules are named without .py, as"),
        (("--import", "json"), "json holds no Idempotency or AsyncIdempotency object"),
        (("--import", "json:loads"), "json:loads is no Idempotency"),
        (("--import", "shop:nothing"), "shop:nothing is no Idempotency"),
        (("--import", "shop", "--target", "python:json:loads"), "which store?"),
        (("--target", "foo"), "'foo' names no target"),
    ],
)
def test_modules_without_operations_are_usage_errors(folder, arguments, words):
    ended = folder.worker("--once", *arguments)
    assert (ended.returncode, ended.stdout) == (ExitCode.USAGE, "")
    assert words in ended.stderr


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("\nraise ValueError('bad config')\n", "ValueError: bad config (broken.py, line 2)"),
        ("raise KeyError\n", "KeyError (broken.py, line 1)"),
        (
            "import no_such_module_inside\n",
            "ModuleNotFoundError: No module named 'no_such_module_inside' (broken.py, line 1)",
        ),
        ("def\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
    ],
)
def test_a_module_that_fails_says_how_and_where(folder, source, words):
    """It is the user's own program, and one line names the place; no traceback of ours."""
    (folder.path / "broken.py").write_text(source)
    ended = folder.worker("--import", "broken", "--once")
    line = f"importing broken failed: {words}"
    assert (ended.returncode, ended.stdout) == (ExitCode.USAGE, "")
    assert ended.stderr == f"retrysafe: {line}\n"
    ended = folder.worker("--import", "broken", "--once", "--json")
    assert json.loads(ended.stderr)["message"] == line


def test_an_object_without_resumable_operations_is_noted(folder):
    (folder.path / "plain.py").write_text(
        "from retrysafe import Idempotency\nidem = Idempotency('sqlite:///shop.db', caller='a')\n"
    )
    ended = folder.worker("--import", "plain", "--once")
    assert ended.returncode == 0
    assert "plain:idem declares no resumable operation" in ended.stderr


def test_the_arguments_of_a_key_are_shown(folder, invoke):
    folder.abandon("a", mark="m")
    shown = invoke("keys", "show", "a", "--caller", "acme", "--store", folder.url, "--json").json
    assert shown["arguments"]["body"] == [[0, "m"], {}]
    text = invoke("keys", "show", "a", "--caller", "acme", "--store", folder.url).stdout
    assert "\narguments\n  json.1, " in text
    folder.abandon("b", name="plain")
    shown = invoke("keys", "show", "b", "--caller", "acme", "--store", folder.url, "--json").json
    assert shown["arguments"] is None

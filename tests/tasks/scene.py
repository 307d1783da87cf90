"""Worker processes of a framework around one store: started, killed, looked at."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing

from retrysafe import Idempotency, Key
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from tests.tasks.work import POLICY, make_shop

LIMIT_SECONDS = 90


class Scene:
    """The files of one scene, and the processes in it."""

    def __init__(self, folder, environment):
        self.folder = folder
        self.effects = folder / "effects"
        self.effects.touch()
        self.shop = folder / "store.db"
        make_shop(self.shop)
        self.store = SqliteStore(self.shop)
        run_sync(self.store.migrate())
        self.processes = []
        self.environment = (
            os.environ
            | environment
            | {
                "RETRYSAFE_TEST_EFFECTS": str(self.effects),
                "RETRYSAFE_TEST_SHOP": str(self.shop),
            }
        )

    def set_in(self, monkeypatch):
        """Gives this process the environment of the workers, for what it imports."""
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)

    def start(self, *arguments, hangs=False):
        """Starts a worker in a process group of its own: nothing of it outlives a kill."""
        with (self.folder / f"log-{len(self.processes)}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=self.environment | ({"RETRYSAFE_TEST_TASKS_HANG": "yes"} if hangs else {}),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def kill(self, process):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self, process):
        """Ends it as an orchestrator does."""
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_SECONDS) in (0, -signal.SIGTERM), self.logs()

    def lines(self, what):
        found = [json.loads(line) for line in self.effects.read_text().splitlines()]
        return Counter(each["name"] for each in found if each["what"] == what)

    def orders(self):
        with closing(sqlite3.connect(self.shop)) as connection:
            return Counter(name for (name,) in connection.execute("SELECT name FROM orders"))

    def logs(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def until(self, is_so, what):
        end = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            if time.monotonic() > end or any(each.poll() for each in self.processes[-1:]):
                logs = self.logs()[-12_000:]
                raise AssertionError(
                    f"not in {LIMIT_SECONDS} s: {what}; {self.lines('effect')}\n{logs}"
                )
            time.sleep(0.05)

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        run_sync(self.store.close())


class Elsewhere:
    """Another owner, in this process, that is at work on one key until it is let go."""

    def __init__(self, scene, key: Key, name, request):
        self.idem = Idempotency(scene.store)
        self.begun, self.ends = threading.Event(), threading.Event()

        def work():
            self.idem.run(key, self._hold, name=name, request=request, policy=POLICY)

        self.thread = threading.Thread(target=work)
        self.thread.start()
        assert self.begun.wait(10)

    def _hold(self):
        self.begun.set()
        assert self.ends.wait(LIMIT_SECONDS)
        return {"name": "elsewhere"}

    def end(self):
        self.ends.set()
        self.thread.join()
        self.idem.close()

"""A load of operations with both drivers at once, which knows what ran and what was answered."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter

from retrysafe import AsyncIdempotency, Idempotency, Policy

CALLER = "failover"
LIMIT_SECONDS = 60.0
# The same for all: what differs is the key.
ASKED = {"request": None, "name": "load"}
_THREADS = 4
_TASKS = 8


class Load:
    """Threads over psycopg and tasks over asyncpg, each with one new key after the other."""

    def __init__(self, url: str, policy: Policy | None = None) -> None:
        self._url = url
        self._policy = policy
        self._numbers = itertools.count()
        # Appended to by all threads, which is atomic.
        self.ran: list[str] = []
        self.answered: list[str] = []
        self.errors: list[tuple[str, Exception]] = []
        self.has_replayed_wrongly = False
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._in_threads, daemon=True),
            threading.Thread(target=lambda: asyncio.run(self._in_tasks()), daemon=True),
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive(), "an operation hangs"

    def wait_for(self, count: int) -> float:
        """Waits until each driver has answered that many more; says how long the first took."""
        started = time.monotonic()
        before, first = len(self.answered), 0.0
        while True:
            drivers = Counter(key[0] for key in self.answered[before:])
            if drivers and not first:
                first = time.monotonic() - started
            if len(drivers) == 2 and min(drivers.values()) >= count:
                return first
            assert time.monotonic() - started < LIMIT_SECONDS, f"no progress: {self.errors[-3:]}"
            time.sleep(0.005)

    @property
    def runs_per_key(self) -> Counter[str]:
        return Counter(self.ran)

    def lost(self, url: str) -> list[str]:
        """Which answered keys a new process would run again."""
        with Idempotency(url, caller=CALLER) as idem:
            return [
                key
                for key in self.answered
                if idem.run(key, lambda: "again", **ASKED) != f"done {key}"
            ]

    def _operation(self, key: str) -> str:
        self.ran.append(key)
        return f"done {key}"

    def _check(self, key: str, found: str) -> None:
        if found != f"done {key}":
            self.has_replayed_wrongly = True

    def _in_threads(self) -> None:
        with Idempotency(self._url, caller=CALLER, policy=self._policy, cache=False) as idem:

            def work() -> None:
                while not self._is_over:
                    key = f"t{next(self._numbers)}"

                    def operation(key: str = key) -> str:
                        time.sleep(0.005)
                        return self._operation(key)

                    try:
                        self._check(key, idem.run(key, operation, **ASKED))
                        # A duplicate beside it, which must be a replay.
                        self._check(key, idem.run(key, operation, **ASKED))
                    except Exception as error:
                        self.errors.append((key, error))
                        continue
                    self.answered.append(key)

            workers = [threading.Thread(target=work, daemon=True) for _ in range(_THREADS)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

    async def _in_tasks(self) -> None:
        async with AsyncIdempotency(
            self._url, caller=CALLER, policy=self._policy, cache=False
        ) as idem:

            async def work() -> None:
                while not self._is_over:
                    key = f"a{next(self._numbers)}"

                    async def operation(key: str = key) -> str:
                        await asyncio.sleep(0.005)
                        return self._operation(key)

                    try:
                        self._check(key, await idem.run(key, operation, **ASKED))
                        self._check(key, await idem.run(key, operation, **ASKED))
                    except Exception as error:
                        self.errors.append((key, error))
                        continue
                    self.answered.append(key)

            await asyncio.gather(*(work() for _ in range(_TASKS)))

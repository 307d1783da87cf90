"""Hundreds of accepted requests, and servers and workers that keep dying.

    python -m tests.processes.resumed_soak --requests 300
    python -m tests.processes.resumed_soak --kinds threads --seed 42

Two servers and two workers share a store. One of them is killed (SIGKILL) at random all the time,
and started again. Clients send each request until they are answered, and read its status until it
has its response. Each order must be there exactly once: it is written in the transaction of its
outcome.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from tests.processes.test_resumed_requests import HEADERS, SERVERS, Shop, ended

# Servers first, then workers.
PLACES = 4
# Between two kills: longer than a process needs to start, or nothing would ever be done.
KILL_SECONDS = (0.5, 2.5)
CLIENTS = 8


@dataclass
class Soaked:
    """What came of it."""

    kind: str
    requests: int
    kills: int
    resumed: int
    seconds: float


def soaked(kind: str, requests: int, *, seed: int, minutes: float) -> Soaked:
    """Raises `AssertionError` when an order is missing, is there twice, or its status is wrong."""
    dice = random.Random(f"{seed} {kind}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        file = Path(folder) / "keys.db"
        store = SqliteStore(str(file))
        run_sync(store.migrate())
        run_sync(store.close())
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("CREATE TABLE orders (number INTEGER)")
        shop = Shop(kind, f"sqlite:///{file}", Path(folder), processes, has_pipe=False)
        started = time.monotonic()
        run = _Run(shop, dice, started + minutes * 60)
        answers = run.all_answered(requests)
        with closing(sqlite3.connect(file)) as connection:
            placed = Counter(number for (number,) in connection.execute("SELECT * FROM orders"))
        assert placed == Counter(range(requests)), f"{len(placed)} orders, {placed.most_common(3)}"
        assert [answer["order"] for answer in answers] == list(range(requests))
        resumed = sum(answer["attempt"] > 1 for answer in answers)
        return Soaked(kind, requests, run.kills, resumed, time.monotonic() - started)


class _Run:
    """The processes, and the clients that wait for them."""

    def __init__(self, shop: Shop, dice: random.Random, until: float) -> None:
        self._shop = shop
        self._dice = dice
        self._until = until
        self._processes = [self._start(place) for place in range(PLACES)]
        self._next_kill = time.monotonic() + 2
        self.kills = 0

    def _start(self, place: int):
        return self._shop.serve() if place < PLACES // 2 else self._shop.work()

    def _look_after(self, *, kills: bool) -> None:
        """Kills a process when it is time, and starts those again that are gone."""
        now = time.monotonic()
        assert now < self._until, "it does not come to an end"
        if kills and now >= self._next_kill:
            ended(self._processes[self._dice.randrange(PLACES)])
            self.kills += 1
            self._next_kill = now + self._dice.uniform(*KILL_SECONDS)
        for place, process in enumerate(self._processes):
            if process.poll() is not None:
                self._processes[place] = self._start(place)

    def all_answered(self, requests: int) -> list[dict]:
        """The response of every request, as its status URL tells it."""
        # What a client knows: nothing yet, the status URL, or the response.
        urls: dict[int, str] = {}
        answers: dict[int, dict] = {}
        with httpx.Client(base_url=self._shop.url, timeout=1) as client:
            while len(answers) < requests:
                open_ones = [number for number in range(requests) if number not in answers]
                # Killed until most of them are through.
                self._look_after(kills=len(answers) < requests * 9 // 10)
                for number in open_ones[:CLIENTS]:
                    with suppress(httpx.HTTPError):  # Its server was killed; it is asked again.
                        self._ask(client, number, urls, answers)
        return [answers[number] for number in range(requests)]

    @staticmethod
    def _ask(client: httpx.Client, number: int, urls: dict, answers: dict) -> None:
        headers = HEADERS | {"Idempotency-Key": f'"order-{number}"'}
        if number not in urls:
            reply = client.post(f"/orders/{number}", headers=headers, json={})
            if reply.status_code == 202:
                urls[number] = reply.headers["location"]
        else:
            reply = client.get(urls[number], headers=headers)
            if reply.status_code == 200 and reply.json()["state"] == "released":
                del urls[number]  # It is for the client to send it again.
        assert reply.status_code in (200, 201, 202, 409, 503), reply.text
        if reply.status_code == 201:
            answers[number] = reply.json()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--kinds", nargs="+", default=list(SERVERS), choices=list(SERVERS))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    for kind in given.kinds:
        sys.stdout.write(f"seed {given.seed}: ")
        sys.stdout.flush()
        done = soaked(kind, given.requests, seed=given.seed, minutes=given.minutes)
        sys.stdout.write(f"{done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

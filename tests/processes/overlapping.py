"""Random overlapping batches from many processes on one PostgreSQL schema.

    python -m tests.processes.overlapping --seconds 60

Every process keeps claiming, extending and settling batches over the same few keys, with its own
tokens, from several threads. Nothing may fail: no deadlock, no lost claim without a takeover, and
every admission of a key has at most one ending.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter

import psycopg

from retrysafe import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    ExtendAnswer,
    Extension,
    Fingerprint,
    Payload,
    SettleAnswer,
    SettleKind,
    Settlement,
)
from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.stores.opening import postgres_store

KEYS = [Key(f"key-{number}", caller="racer") for number in range(500)]
PRINTS = (Fingerprint(1, b"f" * 16),)
GRANTED = (Decision.ADMIT, Decision.TAKE_OVER)
# Short windows, so that keys get new lives and every kind of row meets every other.
ENDINGS = [(SettleKind.COMPLETE, 1), (SettleKind.COMPLETE, 300), (SettleKind.RELEASE, 100)]
THREADS = 3


class _Owner:
    """The claims of one process, shared by its threads: one renews what another settles."""

    def __init__(self, url: str, seed: int) -> None:
        self.store = postgres_store(url, is_async=False)
        self.held: dict[bytes, Key] = {}
        self.counts: Counter[str] = Counter()
        self.seed = seed

    def turn(self, dice: random.Random) -> None:
        wishes = [
            ClaimRequest(key, PRINTS, mint_token(), 30_000)
            for key in dice.sample(KEYS, dice.randint(0, 64))
        ]
        held = list(self.held.items())
        dice.shuffle(held)
        chosen = held[: dice.randint(0, 64)]
        endings = [
            Settlement(kind, key, token, Payload("json.1", b"", b"1"), active_ms, 60_000)
            for token, key in chosen
            for kind, active_ms in [dice.choice(ENDINGS)]
        ]
        claimed, settled = run_sync(self.store.commit(wishes, endings))
        for wish, claim in zip(wishes, claimed, strict=True):
            assert isinstance(claim, ClaimAnswer), claim
            self.counts[claim.decision] += 1
            if claim.decision in GRANTED:
                self.held[wish.token] = wish.key
        for ending, answer in zip(endings, settled, strict=True):
            if isinstance(answer, StoreUnavailable):
                # Whoever is at the row was kept from going on by a busy machine, for longer than
                # the wait for a row. A later turn ends it.
                self.counts["settle busy"] += 1
                continue
            assert isinstance(answer, SettleAnswer), answer
            # Another thread of this process may have ended it first; a rival cannot, as no lease
            # runs out here.
            self.counts[f"settle {answer.decision}"] += 1
            self.held.pop(ending.token, None)

    def renew(self, dice: random.Random) -> None:
        held = list(self.held.items())
        dice.shuffle(held)
        extends = [Extension(key, token, 30_000) for token, key in held[:64]]
        if extends:
            for answer in run_sync(self.store.extend(extends, 30.0)):
                is_busy = isinstance(answer, StoreUnavailable)
                assert is_busy or isinstance(answer, ExtendAnswer), answer
                self.counts["extend busy" if is_busy else f"extend {answer.decision}"] += 1

    def work(self, number: int, until: float) -> None:
        dice = random.Random(self.seed * 100 + number)
        while time.monotonic() < until:
            self.renew(dice) if number == 0 else self.turn(dice)


def overlap(url: str, seed: int, seconds: float) -> dict[str, int]:
    """One process: what it was answered; raises what went wrong in any of its threads."""
    owner = _Owner(url, seed)
    until = time.monotonic() + seconds
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            owner.work(number, until)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run_sync(owner.store.close())
    if failures:
        raise failures[0]
    return dict(owner.counts)


def deadlocks(url: str) -> int:
    """How many deadlocks the server has seen in this database."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


def double_endings(url: str, schema: str) -> int:
    """How many claims have more than one ending."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            f"SELECT count(*) FROM (SELECT 1 FROM {schema}.outcomes GROUP BY token "
            "HAVING count(*) > 1) AS twice"
        ).fetchone()
    assert row is not None
    return int(row[0])


def _child(pipe, url: str, seed: int, seconds: float) -> dict[str, int]:
    return overlap(url, seed, seconds)


def main() -> None:
    """For `make soak`: eight processes on a server of its own."""
    from tests.processes.children import Child
    from tests.servers.fixtures import migrated
    from tests.servers.postgres import PostgresServer

    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    with PostgresServer() as server:
        url = migrated(f"{server.url()}?schema=soak")
        children = [
            Child(_child, (url, seed, options.seconds)) for seed in range(options.processes)
        ]
        total: Counter[str] = Counter()
        for child in children:
            total.update(child.result(options.seconds))
            child.end()
        assert deadlocks(server.url()) == 0
        assert double_endings(server.url(), "soak") == 0
    print(f"no deadlock and no double ending in {options.seconds:g} s: {dict(total)}")


if __name__ == "__main__":
    main()

"""One shop in three frameworks: the same paths, the same rules, each said the framework's own way.

POST /charges            a key is required; async endpoint; runs a background task
POST /sync-charges       the same as a plain function, in a thread
POST /notes              a key is optional
POST /open               protected by a rule around it, taken out again
POST /v1/refunds/{…}     below a router; one window of its own
GET  /v1/refunds/{…}     reads, and is never protected
POST /stream             three chunks
POST /events             server-sent events
POST /orders             completes in its own transaction; async endpoint
POST /sync-orders        completes in its own transaction; plain function
POST /atomic-orders      a rule with a transaction; async endpoint
POST /plain              no rule at all
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from retrysafe import Policy, current_attempt
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore

REFUNDS = Policy(active_window=timedelta(days=7))


class Declined(Exception):
    """Answered with 402 by each framework's way to answer exceptions."""


@dataclass
class Till:
    """What the endpoints do, whatever framework calls them, and what they did."""

    path: Path
    runs: list[str] = field(default_factory=list)
    # The numbers of the attempts, as the request and as the context tell them.
    attempts: list[tuple[int, int]] = field(default_factory=list)
    background: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    # Whether the next order fails before its commit.
    is_failing: bool = False
    started: asyncio.Event | None = None
    go_on: asyncio.Event | None = None

    def open_for_business(self) -> None:
        """Makes the tables: the shop's, and the store's for transactions that the shop begins."""
        store = SqliteStore(self.path)
        run_sync(store.migrate())
        run_sync(store.close())
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("CREATE TABLE orders (name TEXT)")

    def orders(self) -> list[str]:
        with closing(sqlite3.connect(self.path)) as connection:
            return [name for (name,) in connection.execute("SELECT name FROM orders")]

    async def hold(self) -> None:
        """Waits where a test has asked for it."""
        if self.started is not None:
            self.started.set()
            await self.go_on.wait()

    def charge(self, attempt: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A charge with the outcome that the body asks for."""
        self.runs.append("charge")
        self.attempts.append((attempt.number, current_attempt().number))
        self.threads.add(threading.current_thread().name)
        outcome = body.get("outcome", "ok")
        if outcome == "decline":
            raise Declined
        if outcome == "crash":
            raise RuntimeError("crash")
        if outcome == "error":
            return 500, {"error": "later"}
        return 201, {"run": len(self.runs), "amount": body["amount"]}

    def order(self, attempt: Any, response: Any) -> Any:
        """An order whose row and whose response are one transaction."""
        self.runs.append("order")
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO orders VALUES ('pen')")
            attempt.complete_in(connection, response)
            if self.is_failing:
                connection.execute("ROLLBACK")
                raise RuntimeError("the transaction failed")
            connection.execute("COMMIT")
        return response

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        """A transaction for a rule: committed at the end, rolled back on errors."""
        opened = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        with closing(opened) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    def place(self, attempt: Any) -> dict[str, int]:
        """An order on the connection of the attempt."""
        self.runs.append("atomic")
        attempt.connection.execute("INSERT INTO orders VALUES ('hat')")
        if self.is_failing:
            raise RuntimeError("the order failed")
        return {"run": len(self.runs)}

    def noted(self) -> None:
        self.background.append(len(self.runs))


def parameter_of(operation: Any) -> Any:
    """The key among the parameters that an OpenAPI document shows of an operation."""
    (found,) = (item for item in operation["parameters"] if item["name"] == "Idempotency-Key")
    return found

"""What the tasks of the tests do in worker processes that the tests kill.

Every execution leaves a line in a file, as in `tests.consumers.handlers`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from retrysafe import FOREVER, Policy
from tests.consumers.handlers import note, transaction

HANGS = bool(os.environ.get("RETRYSAFE_TEST_TASKS_HANG"))
# What each task takes at least, so that a worker is mostly killed inside of one.
LEAST_SECONDS = float(os.environ.get("RETRYSAFE_TEST_TASK_SECONDS", "0"))
STORE = f"sqlite:///{os.environ.get('RETRYSAFE_TEST_SHOP', 'unused.db')}"
POLICY = Policy(lease=timedelta(seconds=2), active_window=FOREVER)
__all__ = (
    "HANGS",
    "POLICY",
    "STORE",
    "do",
    "fail_until",
    "hang",
    "must_hang",
    "order",
    "transaction",
)


def must_hang(where, name, wish):
    """Whether to stop there, in a worker that is there to be killed: once for each name.

    What a killed worker held may come to the next one at once, and must not stop that one as well.
    """
    if not HANGS or wish != where:
        return False
    lines = Path(os.environ["RETRYSAFE_TEST_EFFECTS"]).read_text().splitlines()
    return {"hangs": name} not in [{each["what"]: each["name"]} for each in map(json.loads, lines)]


def hang(where, name, wish):
    """Stops for ever where the wish says."""
    if must_hang(where, name, wish):
        note("hangs", name)
        time.sleep(1_000)


def do(name, seconds=0.0, wish=None):
    """The effect outside of any database."""
    hang("before", name, wish)
    time.sleep(seconds or LEAST_SECONDS)
    note("effect", name)
    time.sleep(LEAST_SECONDS)
    hang("after", name, wish)
    return {"name": name}


def order(connection, name, wish=None):
    """The effect inside the transaction."""
    connection.execute("INSERT INTO orders VALUES (?)", (name,))
    time.sleep(LEAST_SECONDS)
    hang("after", name, wish)


def fail_until(name, tries):
    """Raises until it was tried that often."""
    note("try", name)
    lines = Path(os.environ["RETRYSAFE_TEST_EFFECTS"]).read_text().splitlines()
    seen = sum('"try"' in line and f'"{name}"' in line for line in lines)
    if seen < tries:
        raise LookupError(f"try {seen} of {name} fails")
    note("effect", name)


def make_shop(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (name TEXT)")
        connection.commit()

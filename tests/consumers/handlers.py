"""Handlers that `retrysafe consume` runs in processes which the tests kill.

Every execution leaves a line in a file: what really happened shows there, once for each time. With
RETRYSAFE_TEST_HANGS set, handlers stop where their message says, and wait to be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module

from retrysafe import FOREVER, Policy
from retrysafe.consumers import Action, BackOff, Handler, PayloadInvalid

HANGS = bool(os.environ.get("RETRYSAFE_TEST_HANGS"))
# Short, so that what a killed process held is soon free; no shorter, for machines under load.
POLICY = Policy(lease=timedelta(seconds=2), active_window=FOREVER)
PAUSE = BackOff(timedelta(milliseconds=200), timedelta(seconds=1))


def note(what, name):
    """Appends a line; one write, so that lines of several processes never mix."""
    path = os.environ["RETRYSAFE_TEST_EFFECTS"]
    line = json.dumps({"what": what, "name": name, "process": os.getpid()}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def wish_of(message):
    wish = message.json()
    if not isinstance(wish, dict) or "name" not in wish:
        raise PayloadInvalid("this is no wish")
    return wish


def steps(wish):
    """What the handler does, with the seconds to wait in between; None is for ever."""
    hang = wish.get("hang") if HANGS else None
    if hang == "before":
        note("hangs", wish["name"])
        yield None
    yield wish.get("seconds", 0)
    if wish.get("fails"):
        raise LookupError("no such customer")
    note("effect", wish["name"])
    if hang == "after":
        note("hangs", wish["name"])
        yield None


async def work(message):
    for seconds in steps(wish_of(message)):
        await asyncio.sleep(1_000 if seconds is None else seconds)


def work_in_thread(message):
    for seconds in steps(wish_of(message)):
        time.sleep(1_000 if seconds is None else seconds)


@contextmanager
def transaction():
    connection = sqlite3.connect(
        os.environ["RETRYSAFE_TEST_SHOP"], isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA busy_timeout = 10000")
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    finally:
        connection.close()


def place(message, attempt):
    wish = wish_of(message)
    attempt.connection.execute("INSERT INTO orders VALUES (?)", (wish["name"],))
    if HANGS and wish.get("hang") == "after":
        note("hangs", wish["name"])
        time.sleep(1_000)


ASYNC = Handler(work, policy=POLICY, back_off=PAUSE, tries=3)
THREADS = Handler(work_in_thread, policy=POLICY, back_off=PAUSE, tries=3)
ATOMIC = Handler(place, policy=POLICY, back_off=PAUSE, transaction=transaction)


def hang_before_acks(module, name):
    """Has the broker of this process stop where the outcome is stored and nothing is acked."""
    broker = getattr(import_module(module), name)
    settle = broker.settle

    async def hanging(self, settled):
        for message, verdict in settled:
            if verdict.action is Action.ACK:
                note("hangs", json.loads(message.body)["name"])
                await asyncio.sleep(1_000)
        return await settle(self, settled)

    broker.settle = hanging


if HANGS:
    hang_before_acks(*os.environ["RETRYSAFE_TEST_HANGS"].split(":"))

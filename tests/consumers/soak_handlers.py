"""What the consumers of the soak do: an order in one transaction, or an effect outside of it.

No table has a constraint that would hide a second execution: each leaves a row, or a line.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta

import asyncpg
import psycopg

from retrysafe import FOREVER, Policy
from retrysafe.consumers import BackOff, Handler, PayloadInvalid

# What a killed process held is free after this; long enough that a busy machine loses none.
LEASE = timedelta(seconds=3)
POLICY = Policy(lease=LEASE, active_window=FOREVER)
PAUSE = BackOff(timedelta(milliseconds=200), timedelta(seconds=1))
# One execution of so many fails, and is tried again.
FAILS_ONE_IN = 50
INSERT = "INSERT INTO orders VALUES ({})"

dice = random.Random()


def order_of(message):
    """The name of an order, and how long it takes; fails now and then."""
    order = message.json()
    if not isinstance(order, dict):
        raise PayloadInvalid("this is no order")
    if dice.randrange(FAILS_ONE_IN) == 0:
        raise LookupError("not this time")
    return order["name"], order["seconds"]


def note(name):
    """One write, so that lines of several processes never mix."""
    file = os.open(os.environ["RETRYSAFE_SOAK_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{name}\n".encode())
    finally:
        os.close(file)


# Effects outside: between the effect and its outcome is time in which a process may die.


def charge(message):
    name, seconds = order_of(message)
    time.sleep(seconds)
    note(name)
    time.sleep(seconds)


async def charge_async(message):
    name, seconds = order_of(message)
    await asyncio.sleep(seconds)
    note(name)
    await asyncio.sleep(seconds)


# The same transaction, on a connection of the handler's own.

_threads = threading.local()


@contextmanager
def sqlite_transaction():
    connection = getattr(_threads, "connection", None)
    if connection is None:
        connection = _threads.connection = sqlite3.connect(
            os.environ["RETRYSAFE_SOAK_SHOP"], isolation_level=None, timeout=30
        )
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextmanager
def postgres_transaction():
    connection = getattr(_threads, "connection", None)
    if connection is None:
        connection = _threads.connection = psycopg.connect(
            os.environ["RETRYSAFE_SOAK_SHOP"], autocommit=True
        )
    with connection.transaction():
        yield connection


def place_on_sqlite(message, attempt):
    name, seconds = order_of(message)
    attempt.connection.execute(INSERT.format("?"), (name,))
    time.sleep(seconds)


def place_on_postgres(message, attempt):
    name, seconds = order_of(message)
    attempt.connection.execute(INSERT.format("%s"), (name,))
    time.sleep(seconds)


_pools: list[asyncpg.Pool] = []


@asynccontextmanager
async def pooled(url):
    async with asyncpg.create_pool(url, min_size=1, max_size=10) as pool:
        _pools.append(pool)
        yield


@asynccontextmanager
async def async_transaction():
    async with _pools[0].acquire() as connection, connection.transaction():
        yield connection


async def place_async(message, attempt):
    name, seconds = order_of(message)
    await attempt.connection.execute(INSERT.format("$1"), name)
    await asyncio.sleep(seconds)


_options = {"policy": POLICY, "back_off": PAUSE}
CHARGE = Handler(charge, **_options)
CHARGE_ASYNC = Handler(charge_async, **_options)
PLACE_SQLITE = Handler(place_on_sqlite, transaction=sqlite_transaction, **_options)
PLACE_POSTGRES = Handler(place_on_postgres, transaction=postgres_transaction, **_options)
PLACE_ASYNC = Handler(place_async, transaction=async_transaction, lifespan=pooled, **_options)

"""Calls as users write them, for type checkers: never run, only checked by `test_typing.py`.

A line with `# error` must be refused by every checker; all other lines must pass.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import assert_type

from retrysafe import (
    FOREVER,
    Answer,
    AsyncIdempotency,
    AtomicAttempt,
    Idempotency,
    current_attempt,
    step,
)
from retrysafe.core.call import Call
from retrysafe.runtime.calls import calls_of
from retrysafe.transactions import retry_serialization

idem = Idempotency("memory://", caller="shop")
shop = AsyncIdempotency("memory://", caller="shop")


def charge(customer: str, amount: int) -> float:
    return float(len(customer) * amount)


def greet(customer: str, greeting: str = "hello") -> str:
    return greeting + customer


def report() -> bytes:
    return b""


async def charge_later(customer: str, amount: int) -> float:
    return charge(customer, amount)


def refund(charged: float) -> None: ...


def refund_by_name(charge_name: str) -> None: ...


class Service:
    def charge(self, customer: str, amount: int) -> float:
        return charge(customer, amount)


def calls_in_threads() -> None:
    assert_type(idem.run("k", charge, "c", 500), float)
    assert_type(idem.run("k", charge, "c", 500, caller="c", request="r"), float)
    assert_type(idem.run("k", greet, "c"), str)
    assert_type(idem.run("k", greet, "c", "good day"), str)
    assert_type(idem.run("k", report), bytes)
    assert_type(idem.run("k", Service().charge, "c", 500), float)
    assert_type(idem.run("k", partial(charge, amount=500), "c"), float)
    assert_type(idem.run("k", lambda: charge("c", 500), request=500), float)
    assert_type(idem.answer("k", charge, "c", 500), Answer[float])
    assert_type(idem.answer("k", charge, "c", 500).value, float)
    idem.run("k", charge, 500, "c")  # error
    idem.run("k", charge, "c")  # error
    idem.run("k", charge, "c", 500, 1)  # error
    idem.run("k", charge, "c", 500, amount=500)  # error
    idem.run("k", report, "c")  # error
    idem.run("k", Service().charge, 500, "c")  # error
    idem.run("k", partial(charge, amount="c"), "c")  # error
    idem.run("k", charge("c", 500))  # error
    idem.answer("k", charge, 500, "c")  # error
    idem.answer("k", charge, "c")  # error
    name: str = idem.run("k", charge, "c", 500)  # error
    name = idem.answer("k", charge, "c", 500).value  # error
    print(name)


async def calls_in_tasks() -> None:
    assert_type(await shop.run("k", charge_later, "c", 500), float)
    assert_type(await shop.answer("k", charge_later, "c", 500), Answer[float])
    await shop.run("k", charge_later, 500, "c")  # error
    await shop.run("k", charge_later, "c")  # error
    await shop.run("k", charge, "c", 500)  # error
    await shop.answer("k", charge_later, 500, "c")  # error
    await shop.answer("k", charge_later, "c")  # error
    name: str = await shop.run("k", charge_later, "c", 500)  # error
    name = (await shop.answer("k", charge_later, "c", 500)).value  # error
    print(name)


@idem.once(key="order", window=FOREVER)
def place(order: str, amount: int) -> float:
    return charge(order, amount)


@shop.once(key="order", window=FOREVER)
async def place_later(order: str, amount: int) -> float:
    return await charge_later(order, amount)


@idem.resumable()
def ship(order: str, weight: int) -> float:
    return charge(order, weight)


@step("pack")
def pack(item: str, count: int) -> float:
    return charge(item, count)


@step(lambda item, count: f"wrap {item}")
def wrap(item: str, count: int) -> float:
    return charge(item, count)


@step("send")
async def send(item: str, count: int) -> float:
    return await charge_later(item, count)


async def decorated_functions() -> None:
    assert_type(place("o", amount=1), float)
    assert_type(await place_later("o", 1), float)
    assert_type(ship("o", 1), float)
    assert_type(pack("chair", 2), float)
    assert_type(wrap("chair", count=2), float)
    assert_type(await send("chair", 2), float)
    assert_type(idem.answer_of(place, "o", amount=1), Answer[float])
    assert_type(await shop.answer_of(place_later, "o", 1), Answer[float])
    place(1, "o")  # error
    place("o")  # error
    await place_later(1, "o")  # error
    ship("o")  # error
    pack("chair")  # error
    wrap(2, "chair")  # error
    await send(2, "chair")  # error
    idem.answer_of(place, "o")  # error
    await shop.answer_of(place_later, 1, "o")  # error
    name: str = pack("chair", 2)  # error
    name = idem.answer_of(place, "o", 1).value  # error
    print(name)


async def steps() -> None:
    attempt = current_attempt()
    assert_type(attempt.step("charge", charge, "c", 500), float)
    assert_type(attempt.step("greet", greet, "c"), str)
    assert_type(attempt.step("charge", charge, "c", 500, compensate=refund), float)
    assert_type(await attempt.step("charge", charge_later, "c", 500, compensate=refund), float)
    attempt.step("charge", charge, 500, "c")  # error
    attempt.step("charge", charge, "c")  # error
    attempt.step("charge", charge, "c", 500, compensate=refund_by_name)  # error
    await attempt.step("charge", charge_later, 500, "c")  # error
    await attempt.step("charge", charge_later, "c", 500, compensate=refund_by_name)  # error
    name: str = attempt.step("charge", charge, "c", 500)  # error
    name = await attempt.step("charge", charge_later, "c", 500)  # error
    print(name)


async def transactions(connection: sqlite3.Connection, call: Call) -> None:
    with idem.atomic(connection, "k", request=500) as run:
        assert_type(run.connection, sqlite3.Connection)
        run.connection.executing("SELECT 1")  # error
    async with shop.atomic(connection, "k", request=500) as later:
        assert_type(later.connection, sqlite3.Connection)
        later.connection.executing("SELECT 1")  # error
    assert_type(calls_of(idem).answer_atomic(call, opened, in_route), Answer[float])
    assert_type(
        await calls_of(shop).answer_atomic(call, opened_later, in_async_route), Answer[float]
    )
    calls_of(idem).answer_atomic(call, opened, in_other_route)  # error
    assert_type(retry_serialization(charge, "c", 500, tries=3), float)
    assert_type(await retry_serialization(charge_later, "c", 500), float)
    retry_serialization(charge, 500, "c")  # error


@contextmanager
def opened() -> Iterator[sqlite3.Connection]:
    yield sqlite3.connect("shop.db")


@asynccontextmanager
async def opened_later() -> AsyncIterator[sqlite3.Connection]:
    yield sqlite3.connect("shop.db")


def in_route(attempt: AtomicAttempt[sqlite3.Connection]) -> float:
    assert_type(attempt.connection, sqlite3.Connection)
    attempt.connection.executing("SELECT 1")  # error
    return 0.5


async def in_async_route(attempt: AtomicAttempt[sqlite3.Connection]) -> float:
    return in_route(attempt)


def in_other_route(attempt: AtomicAttempt[str]) -> float:
    return float(attempt.connection)

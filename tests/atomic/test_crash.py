"""A process that dies inside an atomic block leaves nothing behind, not even for a moment."""

from __future__ import annotations

import signal
from datetime import timedelta

import psycopg
import pytest

from retrysafe import Idempotency, InFlight, OperationInFlight, Policy, current_attempt
from tests.processes.conftest import start  # noqa: F401 — a fixture.

PATIENCE = timedelta(seconds=30)
WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=PATIENCE, lease=timedelta(minutes=10))


def insert(connection, schema, name):
    connection.execute(f"INSERT INTO {schema}.orders (name) VALUES ('{name}')")


def die_in_the_block(pipe, server_url, schema, is_complete):
    """Says that it is inside, and waits to be killed."""
    idem = Idempotency(f"{server_url}?schema={schema}", caller="shop")
    with (
        psycopg.connect(server_url) as connection,
        idem.atomic(connection, "order-1", policy=WAITING) as run,
    ):
        insert(connection, schema, "first")
        if is_complete:
            run.complete("first")
        pipe.send("inside")
        pipe.recv()


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_killed_process_frees_its_key_at_once(shop, idem, start, is_complete):  # noqa: F811
    """No lease has to run out: the server rolls back when the connection breaks."""
    child = start(die_in_the_block, shop.server_url, shop.schema, is_complete)
    assert child.receive() == "inside"
    with psycopg.connect(shop.server_url) as connection:
        with pytest.raises(OperationInFlight), idem.atomic(connection, "order-1"):
            pass
        child.kill(signal.SIGKILL)
        assert child.exit_code() == -signal.SIGKILL
        with idem.atomic(connection, "order-1", policy=WAITING) as run:
            assert run.attempt == 1
            insert(connection, shop.schema, "second")
            run.complete("second")
    assert shop.orders() == ["second"]


def die_after_completing_in(pipe, server_url, schema):
    """A leased operation that is killed between complete_in and its commit."""
    idem = Idempotency(f"{server_url}?schema={schema}", caller="shop")

    def operation():
        with psycopg.connect(server_url) as connection:
            insert(connection, schema, "first")
            current_attempt().complete_in(connection, "first")
            pipe.send("inside")
            pipe.recv()

    idem.run(
        "order-1", operation, name="place", policy=Policy(lease=timedelta(seconds=1)), request=None
    )


def test_a_process_killed_before_the_commit_is_taken_over(shop, idem, start):  # noqa: F811
    """Neither its write nor its outcome is there; its lease frees the key, and the next attempt
    writes."""
    child = start(die_after_completing_in, shop.server_url, shop.schema)
    assert child.receive() == "inside"
    child.kill(signal.SIGKILL)
    assert child.exit_code() == -signal.SIGKILL

    def operation():
        with psycopg.connect(shop.server_url) as connection:
            insert(connection, shop.schema, "second")
            current_attempt().complete_in(connection, current_attempt().number)

    assert idem.run("order-1", operation, name="place", policy=WAITING, request=None) == 2
    assert shop.orders() == ["second"]

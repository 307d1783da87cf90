"""A SQLite file that is removed under the user's own connection: nothing runs in two files."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from retrysafe import Idempotency, current_attempt
from retrysafe.errors import StoreMissing

SAID = r"(?s)shop\.db.* was removed or replaced while this process had it open"
ENDINGS = {"all": ("", "-wal", "-shm"), "what is beside it": ("-wal", "-shm")}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shop.db"


@pytest.fixture
def idem(path):
    with Idempotency(f"sqlite:///{path}", caller="shop", cache=False) as made:
        assert made.run("before", lambda: 1, request=None) == 1
        yield made


@pytest.fixture
def connection(idem, path):
    with closing(sqlite3.connect(path, isolation_level=None)) as made:
        made.execute("CREATE TABLE orders (name TEXT)")
        yield made


@pytest.fixture(params=ENDINGS)
def lose(request, path):
    """Removes the file, or only what SQLite keeps beside it."""

    def remove():
        for ending in ENDINGS[request.param]:
            Path(f"{path}{ending}").unlink()

    return remove


@pytest.fixture
def lose_later(lose, connection):
    """Removes it after everything that is looked at before the write lock is taken."""

    def arm():
        connection.set_trace_callback(
            lambda statement: lose() if statement == "SAVEPOINT retrysafe" else None
        )

    return arm


def test_a_block_is_refused_and_nothing_runs(idem, connection, lose):
    """As a leased call is; the connection is not said to be to a wrong file."""
    lose()
    connection.execute("BEGIN")
    with pytest.raises(StoreMissing, match=SAID), idem.atomic(connection, "order-1"):
        pytest.fail("it ran in a file that others do not see")


def test_a_block_does_not_run_what_ran_in_a_new_file(idem, connection, path):
    """One key, two files: it runs in the one that the path leads to."""
    for ending in ENDINGS["all"]:
        Path(f"{path}{ending}").unlink()
    with Idempotency(f"sqlite:///{path}", caller="shop") as new:
        assert new.run("order-1", lambda: "there", name="", request=None) == "there"
        connection.execute("BEGIN")
        with pytest.raises(StoreMissing, match=SAID), idem.atomic(connection, "order-1"):
            pytest.fail("it ran here, too")


def test_a_block_is_refused_under_the_lock(idem, connection, lose_later):
    """What was there before the wait for the lock need not be there after it."""
    connection.execute("BEGIN")
    lose_later()
    with pytest.raises(StoreMissing, match=SAID), idem.atomic(connection, "order-1"):
        pytest.fail("it ran in a file that others do not see")
    connection.execute("COMMIT")
    assert connection.execute("SELECT count(*) FROM retrysafe_keys").fetchone() == (1,)


def test_a_block_that_loses_its_file_has_no_outcome(idem, connection, lose):
    """It ends with an error, before anybody commits."""
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreMissing, match=SAID), idem.atomic(connection, "order-1") as run:
        connection.execute("INSERT INTO orders VALUES ('pen')")
        lose()
        run.complete(1)
    connection.execute("COMMIT")
    assert connection.execute("SELECT count(*) FROM orders").fetchone() == (0,)


def test_nothing_is_completed_in_a_transaction_on_a_lost_file(idem, connection, lose_later):
    """The operation hears of it before it commits its writes."""
    heard = []

    def operation():
        connection.execute("BEGIN")
        lose_later()
        try:
            current_attempt().complete_in(connection, 1)
        except StoreMissing as error:
            heard.append(error)
            connection.execute("ROLLBACK")
            raise

    with pytest.raises(StoreMissing, match=SAID):
        idem.run("order-1", operation, request=None)
    assert len(heard) == 1


def test_no_step_is_recorded_in_a_transaction_on_a_lost_file(idem, connection, lose_later):
    """As it is with outcomes."""
    heard = []

    def operation():
        connection.execute("BEGIN")
        lose_later()
        try:
            current_attempt().step("charge", lambda: 1, in_transaction=connection)
        except StoreMissing as error:
            heard.append(error)
            connection.execute("ROLLBACK")
            raise

    with pytest.raises(StoreMissing, match=SAID):
        idem.run("order-1", operation, request=None)
    assert len(heard) == 1


def test_nothing_is_staged_in_a_transaction_on_a_lost_file(idem, connection, lose_later):
    """Nobody would deliver it."""
    connection.execute("BEGIN")
    lose_later()
    with pytest.raises(StoreMissing, match=SAID):
        idem.stage(connection, "orders", {"order": "pen"})
    connection.execute("COMMIT")
    assert connection.execute("SELECT count(*) FROM retrysafe_outbox").fetchone() == (0,)


def test_a_file_whose_name_is_no_text(tmp_path):
    """File systems take any bytes for a name, so SQLite and the store do."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.db")
    with (
        Idempotency(f"sqlite:///{path}", caller="shop") as idem,
        closing(sqlite3.connect(path)) as connection,
    ):
        with connection, idem.atomic(connection, "order-1") as run:
            run.complete("placed")
        assert idem.run("order-1", lambda: 2, name="", request=None) == "placed"

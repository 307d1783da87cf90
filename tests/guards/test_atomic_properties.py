"""One property per guard of atomic mode; as `test_properties`, plain and short."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from retrysafe import ClaimLost, Idempotency, KeyReused, OperationInFlight
from retrysafe.core.model import Ending
from retrysafe.errors import StoreMissing
from retrysafe.runtime.calls import calls_of
from tests.core.building import OTHER_MARK, call
from tests.core.test_atomic import Made, settled_transaction
from tests.core.test_atomic_runner import judged
from tests.core.transacting import FakeTransaction


class Shop:
    """A SQLite file with orders in it, and a face whose atomic runs write them."""

    def __init__(self, idem: Idempotency, path: Path) -> None:
        self.idem = idem
        self.path = path

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    def order(self, made_call, name: str = "pen"):
        def operation(attempt):
            attempt.connection.execute("INSERT INTO orders VALUES (?)", (name,))
            return name

        return calls_of(self.idem).answer_atomic(made_call, self.transaction, operation)

    @property
    def orders(self) -> list[str]:
        with self.transaction() as connection:
            return [name for (name,) in connection.execute("SELECT name FROM orders")]


@contextmanager
def shop() -> Iterator[Shop]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shop.db"
        with Idempotency(f"sqlite:///{path}", caller="acme", cache=False) as idem:
            idem.read("nothing")  # Makes the schema.
            made = Shop(idem, path)
            with made.transaction() as connection:
                connection.execute("CREATE TABLE orders (name TEXT)")
            yield made


def test_an_answer_that_frees_the_key_takes_its_writes_back():
    """The retry finds neither the order nor an outcome, and runs."""
    with shop() as made:
        assert made.order(judged(Ending.RELEASED)).value == "pen"
        assert made.orders == []
        assert not made.order(judged(Ending.SUCCEEDED)).replayed
        assert made.orders == ["pen"]


def test_a_deleted_file_grants_no_claim_in_a_transaction():
    """Also when it is deleted while the block waits for the file's write lock."""
    with shop() as made, made.transaction() as connection:

        def delete(statement: str) -> None:
            if statement == "SAVEPOINT retrysafe":  # The last one before the lock.
                for ending in ("", "-wal", "-shm"):
                    Path(f"{made.path}{ending}").unlink()

        connection.set_trace_callback(delete)
        with pytest.raises(StoreMissing), made.idem.atomic(connection, "order-1"):
            pass


def test_another_request_in_a_transaction_is_refused():
    """It neither runs nor gets what is stored."""
    with shop() as made:
        made.order(call())
        with pytest.raises(KeyReused):
            made.order(call(OTHER_MARK), "ink")
        assert made.orders == ["pen"]


def test_another_request_is_refused_while_a_rival_has_the_lock():
    """It is told that it is another one, not that it should come back."""
    transaction = settled_transaction()
    transaction.locks = deque([False])
    with pytest.raises(KeyReused):
        Made(transaction, call(OTHER_MARK)).enter()


def test_nothing_is_claimed_beside_a_rivals_transaction():
    """Its claim is not committed, so only the lock tells of it."""
    made = Made(FakeTransaction(locks=deque([False])))
    with pytest.raises(OperationInFlight):
        made.enter()
    assert "claim" not in made.transaction.calls


def test_a_claim_that_was_rolled_back_inside_does_not_complete():
    """Somebody else may run by now; what was written since must not be committed."""

    def operation(attempt):
        attempt.connection.execute("ROLLBACK")
        attempt.connection.execute("BEGIN IMMEDIATE")
        attempt.connection.execute("INSERT INTO orders VALUES ('pen')")

    with shop() as made:
        with pytest.raises(ClaimLost):
            calls_of(made.idem).answer_atomic(call(), made.transaction, operation)
        assert made.orders == []

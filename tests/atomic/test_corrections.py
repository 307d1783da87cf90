"""Corrected requests in a user's transaction: the same row of the table, on real databases."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager

import psycopg
import pytest

from retrysafe.core.model import Decision, SettleKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.stores.opening import postgres_store
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import KEY, OTHER, Probe, request, settlement


class Place:
    """A store, and transactions of a user's on its database."""

    def __init__(self, store, connect):
        self.store = store
        self._connect = connect
        # Leases are of half a minute, and nothing here waits for one.
        self.probe = Probe(store, ManualClock(), run_sync)

    @contextmanager
    def transaction(self):
        with closing(self._connect()) as connection:
            connection.execute("BEGIN")
            joined = self.store.join(connection)
            run_sync(joined.begin())
            assert run_sync(joined.lock(KEY, None))
            yield joined
            run_sync(joined.keep())
            connection.execute("COMMIT")

    def ended(self, **changes):
        """A claim that ended with nothing done, in a transaction."""
        wish = request()
        ending = settlement(SettleKind.FAIL, KEY, wish.token, nothing_happened=True, **changes)
        with self.transaction() as joined:
            assert run_sync(joined.claim(wish)).decision is Decision.ADMIT
            assert run_sync(joined.settle(ending)) is Decision.APPLY

    def corrected(self):
        """What a corrected request is told, and what the record then is."""
        wish = request(KEY, None, OTHER, takes_corrections=True)
        with self.transaction() as joined:
            answer = run_sync(joined.claim(wish))
            if answer.decision is Decision.TAKE_OVER:
                ending = settlement(SettleKind.COMPLETE, KEY, wish.token)
                assert run_sync(joined.settle(ending)) is Decision.APPLY
        return answer


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path):
    if request.param == "sqlite":
        path = tmp_path / "keys.db"
        made = SqliteStore(path)
        run_sync(made.migrate())

        def connect():
            return sqlite3.connect(path, isolation_level=None)
    else:
        shop = request.getfixturevalue("shop")
        made = postgres_store(shop.store_url, is_async=False)

        def connect():
            return psycopg.connect(shop.server_url, autocommit=True)

    yield Place(made, connect)
    run_sync(made.close())


@pytest.mark.parametrize("is_leased", [True, False])
def test_a_corrected_request_takes_the_place_of_the_first(place, is_leased):
    """Whether the first one ended in a transaction or by itself."""
    if is_leased:
        place.probe.end(SettleKind.RELEASE, place.probe.hold(), nothing_happened=True)
    else:
        place.ended()
    answer = place.corrected()
    assert (answer.decision, answer.attempt) == (Decision.TAKE_OVER, 2)
    assert OTHER.digest in answer.correction
    record = place.probe.read().record
    assert record.fingerprint == OTHER.digest
    assert not record.nothing_happened


@pytest.mark.parametrize("has_step", [True, False])
def test_what_is_uncertain_stays_refused(place, has_step):
    """A step is stored, or an attempt before the harmless one ended in another way."""
    token = place.probe.hold()
    if has_step:
        place.probe.record(token)
    else:
        place.probe.end(SettleKind.RELEASE, token)
        token = place.probe.hold()
    place.probe.end(SettleKind.FAIL, token, nothing_happened=True)
    assert place.corrected().decision is Decision.MISMATCH

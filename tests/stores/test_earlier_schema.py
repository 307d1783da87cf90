"""A database of the schema before the last one: its records stay, and its release works on.

The release before knows neither how attempts ended nor what was corrected. It made the records
that this one finds after the upgrade; and during a deploy, or after one that was taken back, it
writes to the new schema and leaves the new columns as they are. Its statements are kept here,
shortened to what they change in the key table.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager

import psycopg
import pytest

from retrysafe.core.model import Condition, Decision, OperatorCommand, SettleKind, State
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.stores.postgres import schema as postgres_schema
from retrysafe.stores.sqlite import schema as sqlite_schema
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    ASKED,
    KEY,
    LEASE_MS,
    OTHER,
    Probe,
    request,
)
from tests.stores.postgres_stores import ClockedStore
from tests.stores.sqlite_stores import calm_store

INSERT = """
INSERT INTO {keys} (
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
) VALUES (
    {digest}, {caller}, {key}, 'charge', 1, {fingerprint}, 1, {token}, 1, {now}, {now}, {ends}, ''
)
"""
TAKE_OVER = """
UPDATE {keys} SET
    state = 1, token = {token}, attempt = attempt + 1, claimed_at_ms = {now},
    lease_ends_at_ms = {ends}, settled_at_ms = NULL, expires_at_ms = NULL
WHERE digest = {digest}
"""
SETTLE = """
UPDATE {keys} SET state = {state}, settled_at_ms = {now}, expires_at_ms = {ends}
WHERE digest = {digest} AND token = {token} AND state = 1
"""
OPERATOR_RELEASE = """
UPDATE {keys} SET state = 4, attempt = 0, settled_at_ms = {now}, expires_at_ms = {ends}
WHERE digest = {digest}
"""
NEW_LIFE = """
UPDATE {keys} SET
    state = 1, token = {token}, attempt = 1, fingerprint = {fingerprint},
    first_claimed_at_ms = {now}, claimed_at_ms = {now},
    lease_ends_at_ms = {ends}, settled_at_ms = NULL, expires_at_ms = NULL
WHERE digest = {digest}
"""


class Earlier:
    """The release before, as far as it writes keys; `probe` is this one, on the same database."""

    def __init__(self, probe, execute, keys, placeholder):
        self.probe = probe
        self._execute = execute
        self._keys = keys
        self._placeholder = placeholder

    def write(self, statement, *, token=None, fingerprint=ASKED, state=None, lasts_ms=LEASE_MS):
        """Runs a statement of its; a claim brings a token of its own."""
        token, now_ms = token or mint_token(), self.probe.clock()
        values = {
            "digest": KEY.digest,
            "caller": KEY.caller,
            "key": KEY.text,
            "fingerprint": fingerprint.digest,
            "token": token,
            "state": state,
            "now": now_ms,
            "ends": now_ms + lasts_ms,
        }
        names = {name: self._placeholder.format(name) for name in values}
        self._execute(statement.format(keys=self._keys, **names), values)
        return token

    def settle(self, token, state):
        """Ends an attempt."""
        self.write(SETTLE, token=token, state=int(state), lasts_ms=ACTIVE_MS)


@contextmanager
def sqlite_database(path):
    clock = ManualClock()
    store = calm_store(path, clock)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield Earlier(Probe(store, clock, run_sync), connection.execute, "retrysafe_keys", ":{}")
    run_sync(store.close())


@contextmanager
def postgres_database(url, direct_url):
    clock = ManualClock()
    store = ClockedStore(url, clock, is_async=False)
    with psycopg.connect(direct_url, autocommit=True) as connection:
        keys = f"{store.schema_name}.keys"
        yield Earlier(Probe(store, clock, run_sync), connection.execute, keys, "%({})s")
    run_sync(store.close())


@pytest.fixture(params=["sqlite", "postgres"])
def earlier(request, tmp_path, monkeypatch):
    """A database as the release before has made it."""
    if request.param == "sqlite":
        module, before, made = sqlite_schema, 5, sqlite_database(tmp_path / "records.db")
    else:
        url = request.getfixturevalue("postgres_url")
        direct_url = request.getfixturevalue("postgres_server").url()
        module, before, made = postgres_schema, 6, postgres_database(url, direct_url)
    with made as database:
        with monkeypatch.context() as of_before:
            of_before.setattr(module, "MIGRATIONS", module.MIGRATIONS[:before])
            run_sync(database.probe.store.migrate())
        yield database


@pytest.fixture
def deploying(earlier):
    """The same after the upgrade, with a process of the release before that goes on."""
    run_sync(earlier.probe.store.migrate())
    return earlier


@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_records_of_before_stay_readable(earlier, state):
    """Every state is what it was, and its attempts count as they did."""
    token = earlier.write(INSERT)
    if state is not State.PENDING:
        earlier.settle(token, state)
    run_sync(earlier.probe.store.migrate())
    record = earlier.probe.read().record
    assert (record.state, record.token, record.attempt) == (state, token, 1)
    assert (record.releases, record.is_uncertain) == (0, False)
    assert (record.nothing_happened, record.corrected_at_ms) == (False, None)


def test_attempts_of_before_count_as_crashes(earlier):
    """Nobody knows any more how they ended, so they count against the limit as they did."""
    for statement in (INSERT, TAKE_OVER, TAKE_OVER):
        earlier.settle(earlier.write(statement), State.RELEASED)
    run_sync(earlier.probe.store.migrate())
    answer = earlier.probe.claim()
    # All but the last: that one is seen to be released.
    assert (answer.decision, answer.attempt, answer.releases) == (Decision.TAKE_OVER, 4, 1)


def test_a_takeover_by_the_release_before_counts_as_a_crash(deploying):
    """It goes on from a released record without counting that; the next claim here goes on."""
    probe = deploying.probe
    probe.end(SettleKind.RELEASE, probe.hold())
    assert probe.end(SettleKind.RELEASE, probe.hold()) is Decision.APPLY
    deploying.settle(deploying.write(TAKE_OVER), State.RELEASED)
    answer = probe.claim()
    assert (answer.attempt, answer.releases) == (4, 2)


def test_a_release_by_an_operator_of_before_lifts_no_limit(deploying):
    """It starts the attempts over and leaves the other count; that is never more than they were."""
    probe = deploying.probe
    for _ in range(3):
        probe.end(SettleKind.RELEASE, probe.hold())
    deploying.write(OPERATOR_RELEASE)
    answer = probe.claim()
    assert (answer.attempt, answer.releases) == (1, 0)


def test_a_new_life_by_the_release_before_lifts_no_limit(deploying):
    """The count of the life before it is left over there."""
    probe = deploying.probe
    for _ in range(3):
        probe.end(SettleKind.RELEASE, probe.hold())
    probe.end(SettleKind.COMPLETE, probe.hold())
    probe.operate(OperatorCommand.EXPIRE)
    deploying.write(NEW_LIFE)
    probe.advance(LEASE_MS)
    answer = probe.claim()
    assert answer.condition is Condition.ABANDONED
    assert answer.attempt == 2
    assert answer.releases <= 1


def test_a_mark_that_the_release_before_left_behind_is_not_believed(deploying):
    """It ends an attempt and does not take the mark of an earlier one away."""
    probe = deploying.probe
    probe.end(SettleKind.RELEASE, probe.hold(), nothing_happened=True)
    assert probe.read().record.nothing_happened
    deploying.settle(deploying.write(TAKE_OVER), State.FAILED)
    assert not probe.read().record.nothing_happened
    corrected = request(KEY, None, OTHER, takes_corrections=True)
    assert probe.ask(corrected).decision is Decision.MISMATCH


def test_what_the_release_before_has_run_stays_uncertain(deploying):
    """A harmless ending here, after an attempt there, speaks for itself alone."""
    probe = deploying.probe
    probe.end(SettleKind.RELEASE, probe.hold(), nothing_happened=True)
    deploying.settle(deploying.write(TAKE_OVER), State.RELEASED)
    probe.end(SettleKind.FAIL, probe.hold(), nothing_happened=True)
    corrected = request(KEY, None, OTHER, takes_corrections=True)
    assert probe.ask(corrected).decision is Decision.MISMATCH


def test_a_correction_that_the_release_before_left_behind_is_not_believed(deploying):
    """It starts a new life and leaves the instant of the one before."""
    probe = deploying.probe
    probe.end(SettleKind.FAIL, probe.hold(), nothing_happened=True)
    corrected = request(KEY, None, OTHER, takes_corrections=True)
    assert probe.ask(corrected).correction
    probe.end(SettleKind.COMPLETE, corrected.token)
    probe.operate(OperatorCommand.EXPIRE)
    probe.advance(1)
    deploying.write(NEW_LIFE)
    probe.advance(LEASE_MS)
    answer = probe.claim()
    assert (answer.decision, answer.correction) == (Decision.TAKE_OVER, b"")

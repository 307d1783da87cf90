"""How a SQLite file is swept: in bounded looks without a lock, decided under it, nothing missed."""

import random
import sqlite3
import threading
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest

from retrysafe.core.model import Decision, SettleKind
from retrysafe.stores.sqlite import sweep
from retrysafe.testing.suite.probe import ACTIVE_MS, AUDIT_MS, key_of

LIMIT_SECONDS = 30
ROUNDS_LIMIT = 1_000
SEEDS = range(20)


@pytest.fixture
def short_looks(monkeypatch):
    """Three rows a look and two looks a call: a handful of rows is a large file."""
    monkeypatch.setattr(sweep, "KEYS_PER_LOOK", 3)
    monkeypatch.setattr(sweep, "OUTCOMES_PER_LOOK", 3)
    monkeypatch.setattr(sweep, "LOOKS_PER_CALL", 2)


def settle(probe, number, *, active_ms=ACTIVE_MS, audit_ms=AUDIT_MS):
    key = key_of(f"key-{number}")
    probe.end(SettleKind.COMPLETE, probe.hold(key), key, active_ms=active_ms, audit_ms=audit_ms)


def advance(clock, by_ms):
    clock.advance(timedelta(milliseconds=by_ms))


def walk(probe, limit=100):
    """Sweeps until nothing more is said to be there; what each round removed."""
    removed = []
    for _ in range(ROUNDS_LIMIT):
        report = probe.sweep(limit)
        removed.append((report.keys, report.outcomes))
        if not report.has_more:
            return removed
    raise AssertionError(f"{ROUNDS_LIMIT} rounds did not end the walk")


def total(removed):
    return tuple(map(sum, zip(*removed, strict=True)))


@contextmanager
def between_look_and_removal(store, monkeypatch, act):
    """Does something when the sweep has looked and does not have the write lock yet."""
    plain = store._sweeping._write

    def write(work):
        act()
        return plain(work)

    with monkeypatch.context() as patched:
        patched.setattr(store._sweeping, "_write", write)
        yield


# Without a lock.


def test_a_sweep_that_finds_nothing_takes_no_write_lock(probe, rival):
    """However large the file, whoever claims or completes is not held up by the look."""
    settle(probe, 1)
    rival.execute("BEGIN IMMEDIATE")
    report = probe.sweep()
    rival.execute("ROLLBACK")
    assert (report.keys, report.outcomes, report.has_more) == (0, 0, False)


def test_no_look_is_made_under_the_write_lock(probe, short_looks, clock):
    """What may go is known before the lock is taken, and then it takes few statements."""
    for number in range(7):
        settle(probe, number, active_ms=1, audit_ms=1)
    advance(clock, 1)
    seen = []
    probe.store._connections.writer.set_trace_callback(lambda text: seen.append(text.split()[0]))
    report = probe.sweep()
    assert (report.keys, report.outcomes) == (6, 6)
    assert seen == ["BEGIN", "SELECT", *["DELETE"] * 4, "COMMIT"]


def test_a_large_round_is_many_short_commits(probe, clock, monkeypatch):
    """Others write in between: nobody waits for the whole round."""
    monkeypatch.setattr(sweep, "REMOVALS_PER_COMMIT", 2)
    for number in range(5):
        settle(probe, number, active_ms=1, audit_ms=1)
    advance(clock, 1)
    seen = []
    probe.store._connections.writer.set_trace_callback(lambda text: seen.append(text.split()[0]))
    report = probe.sweep()
    assert (report.keys, report.outcomes, report.has_more) == (5, 5, False)
    assert seen == ["BEGIN", "SELECT", *["DELETE"] * 4, "COMMIT"] * 3


# Decided under it.


def test_a_key_that_comes_back_during_the_look_is_not_swept(probe, open_probe, clock, monkeypatch):
    """Its new life is pending: without its row a second run would start beside it."""
    other = open_probe()
    settle(probe, 1, active_ms=1)
    advance(clock, 1)
    key, tokens = key_of("key-1"), []
    with between_look_and_removal(probe.store, monkeypatch, lambda: tokens.append(other.hold(key))):
        assert probe.sweep().keys == 0
    assert other.claim(key).decision is Decision.IN_FLIGHT
    assert probe.read(key).record.token == tokens[0]


def test_a_key_that_is_settled_anew_during_the_look_is_not_swept(
    probe, open_probe, clock, monkeypatch
):
    """Its new outcome is replayed until its own window ends."""
    other = open_probe()
    settle(probe, 1, active_ms=1)
    advance(clock, 1)
    with between_look_and_removal(probe.store, monkeypatch, lambda: settle(other, 1)):
        assert probe.sweep().keys == 0
    assert other.claim(key_of("key-1")).decision is Decision.REPLAY


def test_a_row_that_became_another_keys_is_not_swept(probe, open_probe, clock, monkeypatch):
    """Ids are used again once the last row is gone; the row is judged, not its id."""
    other = open_probe()
    settle(probe, 1, active_ms=1)
    advance(clock, 1)

    def replace():
        assert other.sweep().keys == 1
        settle(other, 2)

    with between_look_and_removal(probe.store, monkeypatch, replace):
        assert probe.sweep().keys == 0
    assert other.claim(key_of("key-2")).decision is Decision.REPLAY


def test_an_outcome_that_took_the_id_of_another_is_not_swept(probe, open_probe, clock, monkeypatch):
    """The same for outcomes."""
    other = open_probe()
    settle(probe, 1, audit_ms=1)
    advance(clock, 1)

    def replace():
        assert other.sweep().outcomes == 1
        settle(other, 2)

    with between_look_and_removal(probe.store, monkeypatch, replace):
        assert probe.sweep().outcomes == 0
    assert len(other.read(key_of("key-2")).outcomes) == 1


def test_a_sweep_that_could_not_write_finds_the_same_again(probe, short_looks, clock, monkeypatch):
    """What was found and not removed is not behind the walk."""
    for number in range(7):
        settle(probe, number, active_ms=1, audit_ms=1)
    advance(clock, 1)

    def fail():
        raise OSError("no")

    with (
        between_look_and_removal(probe.store, monkeypatch, fail),
        pytest.raises(OSError, match="no"),
    ):
        probe.sweep()
    assert total(walk(probe)) == (7, 7)


# Nothing missed.


def test_a_call_looks_at_a_bounded_number_of_rows(probe, short_looks, clock):
    """A large file is walked over in several calls, and `has_more` says so."""
    for number in range(20):
        settle(probe, number)
    settle(probe, 20, active_ms=1, audit_ms=1)
    advance(clock, 1)
    removed = walk(probe)
    assert removed[:3] == [(0, 0)] * 3  # Six rows each.
    assert total(removed) == (1, 1)


def test_a_walk_ends_although_its_tables_are_of_different_length(probe, short_looks, clock):
    """The shorter one waits for the longer: else one of them would always be on its way."""
    for _ in range(20):
        settle(probe, 1, active_ms=1)
        advance(clock, 1)
    assert total(walk(probe)) == (1, 0)
    for number in range(7):
        settle(probe, number)
    assert total(walk(probe)) == (0, 0)


def test_what_was_read_is_not_read_again_before_it_ends(probe, short_looks, clock):
    """Outcomes may be large and never change; a walk over them reads what is new."""
    for number in range(9):
        settle(probe, number, audit_ms=1_000 if number == 4 else AUDIT_MS)
    walk(probe)
    read = []
    probe.store._connections.reader.set_trace_callback(
        lambda text: read.append(text) if "retrysafe_outcomes" in text else None
    )
    walk(probe)
    assert len(read) == 1  # The end of the table.
    settle(probe, 9)
    advance(clock, 1_000)
    read.clear()
    assert total(walk(probe)) == (0, 1)
    assert len(read) == 2  # The stretch in which one has ended, and the end of the table.


def test_a_new_process_starts_from_the_first_row(probe, open_probe, short_looks, clock):
    """Nothing of a walk is stored, so nothing of it can be wrong in the next process."""
    for number in range(9):
        settle(probe, number, active_ms=1, audit_ms=1)
    advance(clock, 1)
    assert probe.sweep().keys == 6
    assert total(walk(open_probe())) == (3, 3)


def test_two_sweepers_remove_everything_once(path, probe, open_probe, short_looks, clock):
    """Two processes that sweep at once count each row for one of them."""
    for number in range(30):
        settle(probe, number, active_ms=1, audit_ms=1)
    advance(clock, 1)
    sweepers = [probe, probe, open_probe(), open_probe()]
    barrier, removed = threading.Barrier(len(sweepers)), []

    def sweep_all(sweeper):
        barrier.wait(LIMIT_SECONDS)
        removed.extend(walk(sweeper, limit=4))

    threads = [threading.Thread(target=sweep_all, args=(sweeper,)) for sweeper in sweepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert total(removed) == (30, 30)
    assert all(keys <= 4 and outcomes <= 4 for keys, outcomes in removed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_walk_leaves_nothing_that_has_ended(probe, open_probe, short_looks, clock, seed, path):
    """Whatever came, ended and was swept before, by this process or another, in any order."""
    chance = random.Random(seed)
    other = open_probe()
    for sweeper in (probe, other):
        sweeper.find()
        # Nothing here depends on the disk, and hundreds of flushes take seconds.
        sweeper.store._connections.writer.execute("PRAGMA synchronous = OFF")
    for number in range(50):
        for place in range(chance.choice((0, 1, 2, 12))):
            window_ms = chance.choice((1, 5, 20, 1_000))
            settle(probe, f"{number}-{place}", active_ms=window_ms, audit_ms=window_ms)
        advance(clock, chance.choice((0, 1, 5, 30, 1_000)))
        for _ in range(chance.randrange(4)):
            probe.sweep(chance.choice((1, 4, 100)))
        if chance.random() < 0.3:
            walk(other)
        if chance.random() < 0.3:
            walk(probe)  # The rest of the walk that is under way; what it passed may have ended.
            walk(probe, limit=chance.choice((1, 4, 100)))
            assert ended(path, clock) == (0, 0)


def ended(path, clock):
    """How many keys and outcomes are past their windows."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(
            "SELECT (SELECT count(*) FROM retrysafe_keys WHERE expires_at_ms <= ?1),"
            " (SELECT count(*) FROM retrysafe_outcomes WHERE audit_ends_at_ms <= ?1)",
            (clock(),),
        ).fetchone()

"""What only a SQLite file has: pragmas, locks, permissions, the view, connections."""

import errno
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from retrysafe import StoreUnavailable
from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import (
    Condition,
    Decision,
    OperatorCommand,
    Payload,
    SettleKind,
)
from retrysafe.errors import StoreError, StoreMissing, StoreRejected
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.testing.suite.probe import (
    ACTIVE_MS,
    KEY,
    LEASE_MS,
    RESULT,
    key_of,
    request,
    settlement,
)
from tests.forking import answer_of_child

NOBODY = 65_534


def is_open(path):
    """Whether this process holds a descriptor of the file."""
    wanted = path.stat()
    for entry in Path("/dev/fd").iterdir():
        try:
            held = os.fstat(int(entry.name))
        except OSError:
            continue  # The descriptor of the listing itself is gone by now.
        if (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


# Durability.


def test_every_commit_reaches_the_disk(probe):
    """The connection that writes has synchronous=FULL (2) and a write-ahead log."""
    probe.hold()
    connection = probe.store._connections.writer
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_file_stays_in_wal_mode(probe, path):
    """WAL is a property of the file: a program that opens it later finds it so."""
    probe.hold()
    probe.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_records_survive_closing(probe, open_probe):
    """A new object on the file finds the claim, its step and its outcome."""
    token = probe.hold()
    probe.record(token)
    probe.end(SettleKind.COMPLETE, token)
    stored = probe.stored()
    probe.close()
    assert open_probe().stored() == stored


def test_a_batch_is_one_transaction(probe):
    """128 claims cost one BEGIN and one COMMIT: the disk is what a commit costs."""
    probe.find()
    statements = []
    probe.store._connections.writer.set_trace_callback(statements.append)
    probe.commit([request(key_of(f"key-{number}")) for number in range(128)])
    probe.store._connections.writer.set_trace_callback(None)
    assert [item for item in statements if not item.startswith(("SELECT", "INSERT"))] == [
        "BEGIN IMMEDIATE",
        "COMMIT",
    ]
    # Merged: every statement is a chance for another thread to take the interpreter lock.
    assert len(statements) == 4


# Two objects on one file.


def test_two_objects_share_every_record(probe, open_probe):
    """What one writes the other sees at once: claims, steps, endings, commands, sweeps."""
    other = open_probe()
    token = probe.hold()
    assert other.claim().decision is Decision.IN_FLIGHT
    assert other.record(token, "by the other") is Decision.APPLY
    assert [step.name for step in probe.read().steps] == ["by the other"]
    assert other.end(SettleKind.FAIL, token) is Decision.APPLY
    assert probe.operate(OperatorCommand.EXPIRE) is Decision.APPLY
    assert other.sweep().keys == 1
    assert probe.find() is None


def test_two_objects_fence_each_other(probe, open_probe, clock):
    """A takeover through one object ends the ownership that the other one gave."""
    other = open_probe()
    zombie = probe.hold()
    clock.advance(timedelta(milliseconds=LEASE_MS))
    owner = other.hold()
    assert probe.end(SettleKind.COMPLETE, zombie) is Decision.LOST
    assert probe.end(SettleKind.COMPLETE, owner) is Decision.APPLY
    assert other.claim().payload == RESULT


# Locks.


def test_a_locked_file_is_unavailable_without_effect(open_probe, rival):
    """A writer that waited in vain says so, has written nothing, and may be repeated."""
    hasty = open_probe(busy_timeout=timedelta(milliseconds=20))
    hasty.find()
    wish = request()
    rival.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match=r"records\.db is locked by another writer") as seen:
        hasty.ask(wish)
    assert seen.value.retryable
    assert hasty.find() is None  # Readers do not wait for the writer.
    rival.execute("ROLLBACK")
    assert hasty.ask(wish).decision is Decision.ADMIT


@pytest.mark.parametrize("name", ["settle", "record", "operate", "sweep"])
def test_every_write_gives_up_on_a_locked_file(open_probe, rival, name):
    """No write of the port hangs, and none leaves its transaction open."""
    hasty = open_probe(busy_timeout=timedelta(milliseconds=20))
    over = key_of("over")
    hasty.end(SettleKind.COMPLETE, hasty.hold(over), over, active_ms=0)
    token = hasty.hold()
    stored = hasty.stored()
    calls = {
        "settle": lambda: hasty.end(SettleKind.COMPLETE, token),
        "record": lambda: hasty.record(token),
        "operate": lambda: hasty.operate(OperatorCommand.FORCE_RELEASE),
        "sweep": hasty.sweep,
    }
    rival.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable):
        calls[name]()
    rival.execute("ROLLBACK")
    assert hasty.stored() == stored
    calls[name]()


def test_a_locked_fresh_file_is_unavailable(path):
    """The first use, which makes the schema, gives up in the same words."""
    with closing(sqlite3.connect(path, isolation_level=None)) as rival:
        rival.execute("PRAGMA journal_mode = WAL")
        rival.execute("BEGIN IMMEDIATE")
        store = SqliteStore(path, busy_timeout=timedelta(milliseconds=20))
        with pytest.raises(StoreUnavailable, match="locked by another writer"):
            run_sync(store.commit([request()], []))
        assert store._connections.writer is None
        rival.execute("ROLLBACK")
        assert run_sync(store.read(KEY)) is None
        run_sync(store.close())


def test_a_writer_waits_for_its_turn(probe, rival):
    """Within the busy timeout a lock costs time and nothing else."""
    rival.execute("BEGIN IMMEDIATE")
    answers = []
    started = threading.Event()

    def write():
        started.set()
        answers.append(probe.claim())

    writer = threading.Thread(target=write)
    writer.start()
    assert started.wait(30)
    assert answers == []  # The lock is still held, so there cannot be an answer.
    rival.execute("ROLLBACK")
    writer.join(30)
    assert [answer.decision for answer in answers] == [Decision.ADMIT]


def test_the_clock_is_read_under_the_write_lock(path, clock, rival, open_probe):
    """The wait for the lock must not count against a lease, so no write asks earlier."""
    checks = []

    def now_ms():
        try:
            rival.execute("BEGIN IMMEDIATE")
            rival.execute("ROLLBACK")
            checks.append("free")
        except sqlite3.OperationalError:
            checks.append("locked")
        return clock()

    watched = open_probe(now_ms=now_ms)
    token = watched.hold()
    watched.record(token)
    watched.extend(token)
    watched.operate(OperatorCommand.FORCE_RELEASE)
    watched.operate(OperatorCommand.EXPIRE)
    assert checks == ["locked"] * 5
    assert watched.sweep().keys == 1
    assert checks[-1] == "locked"  # What was looked for without the lock is decided with it.


def test_a_full_disk_is_unavailable_without_effect(probe):
    """An outcome that did not fit leaves its claim pending, and is stored once there is room."""
    token = probe.hold()
    connection = probe.store._connections.writer
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    large = Payload("bytes.1", b"", bytes(1024 * 1024))
    with pytest.raises(StoreUnavailable, match="full"):
        probe.end(SettleKind.COMPLETE, token, payload=large)
    found = probe.read()
    assert (found.condition, found.outcomes) == (Condition.RUNNING, [])
    connection.execute("PRAGMA max_page_count = 1000000")
    assert probe.end(SettleKind.COMPLETE, token, payload=large) is Decision.APPLY
    assert probe.claim().payload == large


def plans_of_a_read(probe, read):
    """How SQLite finds what a read asks for, one line per table."""
    read()  # Opens the connection for reading.
    statements = []
    probe.store._connections.reader.set_trace_callback(statements.append)
    read()
    probe.store._connections.reader.set_trace_callback(None)
    return [
        row[3]
        for statement in statements
        if statement.lstrip().startswith("SELECT")
        for row in probe.store._connections.reader.execute(f"EXPLAIN QUERY PLAN {statement}")
    ]


def test_only_a_read_with_the_audit_scans(probe):
    """Operations and clients that poll must not pay for the outcomes of all other keys."""
    probe.end(SettleKind.COMPLETE, probe.hold())
    for read in (partial(probe.read, with_audit=False), probe.last):
        lean = plans_of_a_read(probe, read)
        assert any(line.startswith("SEARCH o USING INTEGER PRIMARY KEY") for line in lean)
        assert not [line for line in lean if line.startswith("SCAN")]
    whole = plans_of_a_read(probe, probe.read)
    assert [line for line in whole if line.startswith("SCAN")] == ["SCAN retrysafe_outcomes"]


# Files that cannot be used.


def test_a_missing_file_is_not_made_unless_asked(path):
    """Without `create` a wrong path is an error that names it, and stays a missing file."""
    store = SqliteStore(path, create=False)
    with pytest.raises(StoreMissing, match=r"no database at .*records\.db.*retrysafe migrate"):
        run_sync(store.read(KEY))
    assert not path.exists()


def test_a_missing_folder_is_named(tmp_path):
    """A folder is never made behind the user's back."""
    store = SqliteStore(tmp_path / "nowhere" / "records.db")
    with pytest.raises(StoreMissing, match=r"no folder .*nowhere"):
        run_sync(store.read(KEY))


def test_a_folder_is_not_a_database(tmp_path):
    """A path that names a folder says that it cannot be opened."""
    with pytest.raises(StoreMissing, match="cannot be opened"):
        run_sync(SqliteStore(tmp_path).read(KEY))


def test_another_file_is_refused_and_kept(path):
    """A file that is no database is neither used nor changed, and retrying does not help."""
    content = b"Dear diary, this is certainly not a database.\n" * 50
    path.write_bytes(content)
    with pytest.raises(
        StoreError, match=r"records\.db cannot be used: file is not a database"
    ) as e:
        run_sync(SqliteStore(path).commit([request()], []))
    assert not e.value.retryable
    assert path.read_bytes() == content
    assert not is_open(path)


def test_a_read_only_file_is_refused(clock):
    """A file without write permission says so, for whoever is not root."""
    folder = Path(tempfile.mkdtemp(prefix="retrysafe-"))
    try:
        path = folder / "records.db"
        store = SqliteStore(path, now_ms=clock)
        run_sync(store.read(KEY))
        run_sync(store.close())
        path.chmod(0o444)
        folder.chmod(0o555)
        assert answer_of_child(lambda: _write_read_only(path)) == (
            f"StoreMissing: sqlite:///{path} is read-only: check the permissions of file and folder"
        )
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def _write_read_only(path):
    if os.geteuid() == 0:
        os.setuid(NOBODY)  # Permissions do not bind root.
    try:
        run_sync(SqliteStore(path).commit([request()], []))
    except StoreError as error:
        return f"{type(error).__name__}: {error}"
    return "it was written"


def test_a_query_that_sqlite_cannot_hold_is_refused(probe):
    """A number or a text beyond SQLite is a StoreError, not an error of its binding."""
    for query in (RecordQuery(limit=2**70), RecordQuery(text_prefix="\ud800")):
        with pytest.raises(StoreRejected):
            probe.listed(query)
    assert probe.listed(RecordQuery()) == []


def test_a_number_that_sqlite_cannot_hold_fails_alone(probe):
    """A lease of a billion years is refused; its neighbour is claimed."""
    claimed, _ = probe.commit([request(lease_ms=2**70), request(key_of("key-2"))])
    assert isinstance(claimed[0], StoreRejected)
    assert claimed[1].decision is Decision.ADMIT
    assert probe.find() is None


# Connections.


def test_closing_gives_the_file_back(probe, path):
    """No descriptor stays open, and the log is folded into the file."""
    probe.hold()
    assert is_open(path)
    probe.close()
    assert not is_open(path)
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_closed_store_opens_again(probe, path):
    """Closing is no end: the next use opens a new connection."""
    token = probe.hold()
    probe.close()
    assert probe.end(SettleKind.COMPLETE, token) is Decision.APPLY
    probe.close()
    assert not is_open(path)


def test_a_new_store_opens_nothing(path):
    """Making the object touches no file, so it can be made at import time."""
    SqliteStore(path)
    assert not path.exists()


def test_a_failed_transaction_leaves_the_connection_usable(probe):
    """An error in the middle of a write ends its transaction."""

    def broken_clock():
        raise ZeroDivisionError

    probe.find()
    now_ms, probe.store._now_ms = probe.store._now_ms, broken_clock
    with pytest.raises(ZeroDivisionError):
        probe.claim()
    assert not probe.store._connections.writer.in_transaction
    probe.store._now_ms = now_ms
    assert probe.claim().decision is Decision.ADMIT


# Who may read it.


@pytest.fixture
def _open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder):
    return {item.name: stat.S_IMODE(item.stat().st_mode) for item in folder.iterdir()}


@pytest.mark.usefixtures("_open_umask")
@pytest.mark.parametrize("how", ["claim", "migrate"])
def test_a_new_file_is_for_its_owner_alone(tmp_path, how):
    """It holds callers, keys and outcomes; so do the log and the shared memory beside it."""
    store = SqliteStore(tmp_path / "keys.db")
    if how == "migrate":
        run_sync(store.migrate())
        assert modes(tmp_path) == {"keys.db": 0o600}
    run_sync(store.commit([request()], []))
    assert modes(tmp_path) == dict.fromkeys(("keys.db", "keys.db-wal", "keys.db-shm"), 0o600)
    run_sync(store.close())


@pytest.mark.usefixtures("_open_umask")
def test_a_new_file_behind_a_link_is_for_its_owner_alone(tmp_path):
    """The link is there before the file that it leads to."""
    (tmp_path / "data").mkdir()
    (tmp_path / "keys.db").symlink_to(tmp_path / "data" / "real.db")
    store = SqliteStore(tmp_path / "keys.db")
    run_sync(store.commit([request()], []))
    assert set(modes(tmp_path / "data").values()) == {0o600}
    run_sync(store.close())


@pytest.mark.usefixtures("_open_umask")
def test_a_new_file_is_private_where_nodes_may_not_be_made(tmp_path, monkeypatch):
    """As on macOS."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "mknod", refuse)
    store = SqliteStore(tmp_path / "keys.db")
    run_sync(store.commit([request()], []))
    assert set(modes(tmp_path).values()) == {0o600}
    run_sync(store.close())


def test_a_file_that_is_there_keeps_its_mode(tmp_path):
    """A group that shares it goes on."""
    path = tmp_path / "keys.db"
    path.touch()
    path.chmod(0o640)
    store = SqliteStore(path)
    run_sync(store.commit([request()], []))
    assert set(modes(tmp_path).values()) == {0o640}
    run_sync(store.close())


# What people query.


def rows_of(path, query, *parameters):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query, parameters).fetchall()


def test_json_outcomes_can_be_queried(probe, path):
    """The view shows a JSON body as JSON, and json_extract reads it."""
    for number in range(3):
        key = key_of(f"key-{number}")
        payload = Payload("json.1", b"", b'{ "amount": %d, "tags": ["a"]}' % (number * 100))
        probe.end(SettleKind.COMPLETE, probe.hold(key), key, payload=payload)
    rows = rows_of(
        path,
        "SELECT key, json_extract(body_json, '$.amount') FROM retrysafe_records "
        "WHERE json_extract(body_json, '$.amount') >= 100 ORDER BY key",
    )
    assert rows == [("key-1", 100), ("key-2", 200)]
    # The query changes nothing about the replay, which is byte for byte.
    assert probe.claim(key_of("key-1")).payload.body == b'{ "amount": 100, "tags": ["a"]}'


@pytest.mark.parametrize(
    "payload",
    [
        Payload("bytes.1", b"", b'{"looks": "like JSON"}'),
        Payload("json.1", b"", b'{"broken'),
        Payload("json.1", b"", b"\xff\xfe\x00"),
        Payload("json.1", b"", b""),
    ],
)
def test_what_is_not_json_does_not_break_the_view(probe, path, payload):
    """Such a body is shown as bytes, and its JSON column is NULL."""
    probe.end(SettleKind.COMPLETE, probe.hold(), payload=payload)
    assert rows_of(path, "SELECT body, body_json FROM retrysafe_records") == [(payload.body, None)]


def test_the_view_shows_states_in_words(probe, path):
    """One row per key, settled or not, with the outcome of its present life only."""
    names = {"succeeded": SettleKind.COMPLETE, "failed": SettleKind.FAIL}
    names |= {"released": SettleKind.RELEASE}
    for name, kind in names.items():
        probe.settle(settlement(kind, key_of(name), probe.hold(key_of(name))))
    probe.hold(key_of("pending"))
    query = "SELECT key, state, caller, operation, attempt, owner FROM retrysafe_records"
    assert sorted(rows_of(path, query)) == [
        (name, name, "caller-1", "charge", 1, "owner-1") for name in sorted([*names, "pending"])
    ]
    probe.advance(ACTIVE_MS)
    probe.hold(key_of("succeeded"))
    query = "SELECT state, body FROM retrysafe_records WHERE key = 'succeeded'"
    assert rows_of(path, query) == [("pending", None)]

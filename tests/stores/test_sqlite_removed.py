"""A file that is removed or replaced while a process has it open: nothing runs in two files."""

import asyncio
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    OutcomeNotStored,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import Decision, OperatorCommand, SettleKind
from retrysafe.errors import SchemaMissing, StepNotStored, StoreMissing
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.stores.sqlite import file
from retrysafe.testing.suite.probe import KEY, request
from tests.forking import answer_of_child, exit_code, fork

SAID = r"(?s)records\.db.* was removed or replaced while this process had it open.*Stop all proc"
# Another process with the same key; it says whether the operation ran there.
ANOTHER_PROCESS = """
import sys
from retrysafe import Idempotency, RetrysafeError
with Idempotency("sqlite:///" + sys.argv[1], caller="caller-1") as idem:
    try:
        answer = idem.answer(sys.argv[2], lambda: "there", request=None)
        print("replayed" if answer.replayed else "ran")
    except RetrysafeError as error:
        print(f"{type(error).__name__}: {error}")
"""


def in_another_process(path, key="key-1"):
    """What a process that starts now makes of the key."""
    return subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, str(path), key],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def beside(path):
    """The file, and the two that SQLite keeps beside it."""
    return [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]


def remove(path):
    for item in beside(path):
        item.unlink()


def remove_what_is_beside(path):
    for item in beside(path)[1:]:
        item.unlink()


def remove_the_log(path):
    """What somebody does who finds that it has grown: what was committed last is only there."""
    beside(path)[1].unlink()


def replace(path):
    """What a restored backup does."""
    backup = path.with_name("backup.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as target:
        source.backup(target)
    remove_what_is_beside(path)
    backup.replace(path)


def move_the_folder(path):
    path.parent.rename(path.parent.with_name("elsewhere"))


WAYS = [remove, remove_what_is_beside, remove_the_log, replace, move_the_folder]
losing = pytest.mark.parametrize("lose", WAYS, ids=lambda way: way.__name__)


@pytest.fixture
def path(tmp_path):
    """In a folder of its own, which can be moved."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder / "records.db"


# Claims.


@losing
def test_a_claim_is_refused_and_nothing_runs(path, lose):
    """The old process starts nothing, whatever a new one does at that path."""
    runs = []
    with Idempotency(SqliteStore(path), caller="caller-1", cache=False) as idem:
        idem.run("before", lambda: "done", request=None)
        lose(path)
        with pytest.raises(StoreMissing, match=SAID) as refused:
            idem.run("key-1", lambda: runs.append("here"), request=None)
        assert not refused.value.retryable
        with pytest.raises(StoreMissing, match=SAID):
            idem.run("before", lambda: runs.append("here"), request=None)  # Not even a replay.
    assert runs == []


def test_a_key_runs_in_the_new_process_only(path):
    """The new file is the new process's, and the old one stays out of it."""
    runs = []
    with Idempotency(SqliteStore(path), caller="caller-1", cache=False) as idem:
        idem.run("before", lambda: "done", request=None)
        remove(path)
        assert in_another_process(path) == "ran"
        with pytest.raises(StoreMissing, match=SAID):
            idem.run("key-1", lambda: runs.append("here"), request=None)
    assert runs == []
    assert in_another_process(path) == "replayed"


def test_event_loops_refuse_as_well(path):
    """The async face says the same."""
    runs = []

    async def operation():
        runs.append("here")

    async def scenario():
        async with AsyncIdempotency(SqliteStore(path), caller="caller-1", cache=False) as idem:
            await idem.run("before", operation, request=None)
            remove(path)
            with pytest.raises(StoreMissing, match=SAID):
                await idem.run("key-1", operation, request=None)

    asyncio.run(scenario())
    assert runs == ["here"]


def test_a_forked_child_makes_no_new_file(path):
    """A child is one of the processes that use the file; it must not start anew on its own."""
    store = SqliteStore(path)
    run_sync(store.commit([request()], []))
    remove(path)

    def use() -> str:
        with pytest.raises(StoreMissing):
            run_sync(store.commit([request()], []))
        return "refused"

    assert answer_of_child(use) == "refused"
    assert list(path.parent.iterdir()) == []
    run_sync(store.close())


@pytest.mark.parametrize("closes", ["after the fork", "before the fork"])
def test_a_forked_child_does_not_use_locks_that_nobody_else_sees(path, closes):
    """SQLite's library would go on with the `-shm` that the parent's `close` has deleted."""
    store = SqliteStore(path)
    run_sync(store.commit([request()], []))
    if closes == "before the fork":
        run_sync(store.close())
    (waiting, telling), (reading, writing) = os.pipe(), os.pipe()

    def use() -> None:
        try:
            os.read(waiting, 1)
            run_sync(store.commit([request()], []))
            os.write(writing, b"used")
        except StoreMissing:
            os.write(writing, b"refused")

    child = fork(use)
    os.close(writing)
    run_sync(store.close())
    os.write(telling, b"x")
    assert exit_code(child) == 0
    os.close(waiting)
    os.close(telling)
    with os.fdopen(reading) as answer:
        assert answer.read() == ("refused" if closes == "after the fork" else "used")


def use_a_new_object(store, path):
    return SqliteStore(path)


def use_it_closed_and_opened(store, path):
    run_sync(store.commit([request()], []))
    run_sync(store.close())
    return store


@pytest.mark.parametrize("use", [use_a_new_object, use_it_closed_and_opened])
def test_a_forked_child_uses_no_locks_of_its_own_by_any_store(path, use):
    """Its library goes on with the deleted `-shm` of the parent, whoever asks it to."""
    store = SqliteStore(path)
    run_sync(store.commit([request()], []))
    (waiting, telling), (reading, writing) = os.pipe(), os.pipe()

    def work() -> None:
        try:
            used = use(store, path)
            os.write(writing, b"ready")
            os.read(waiting, 1)
            run_sync(used.commit([request()], []))
            os.write(writing, b" used")
        except StoreMissing:
            os.write(writing, b" refused")

    child = fork(work)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert answer.read(5) == "ready"
        run_sync(store.close())
        assert not beside(path)[2].exists()
        # Another process makes a new one.
        with closing(sqlite3.connect(path)) as other:
            other.execute("SELECT * FROM retrysafe_keys").fetchall()
            assert beside(path)[2].exists()
            os.write(telling, b"x")
            assert exit_code(child) == 0
        assert answer.read() == " refused"
    os.close(waiting)
    os.close(telling)


# Endings and steps.


@losing
@pytest.mark.parametrize("asked_for", [True, False], ids=["another process", "nobody else"])
def test_a_running_operation_is_told_that_its_outcome_is_not_stored(path, lose, asked_for):
    """It ran, and its caller gets the value with the news; nothing is lost quietly."""
    with Idempotency(SqliteStore(path), caller="caller-1") as idem:

        def operation():
            lose(path)
            if asked_for and path.parent.exists():
                in_another_process(path)
            return 42

        with pytest.raises(OutcomeNotStored, match=SAID) as told:
            idem.run("key-1", operation, request=None)
        assert told.value.value == 42
        assert isinstance(told.value.__cause__, StoreMissing)


def test_a_step_is_told_that_its_result_is_not_stored(path):
    """A step that ran is not lost quietly either."""
    with Idempotency(SqliteStore(path), caller="caller-1") as idem:
        told = []

        def operation():
            remove(path)
            try:
                current_attempt().step("charge", lambda: "charged")
            except StepNotStored as error:
                told.append(error.value)
                raise

        with pytest.raises(StepNotStored, match=SAID):
            idem.run("key-1", operation, request=None)
        assert told == ["charged"]


# What else the port does.


@losing
@pytest.mark.parametrize(
    "name", ["settle", "record", "operate", "read", "list", "sweep", "migrate"]
)
def test_every_use_of_the_port_refuses(probe, path, lose, name):
    """Reading as well: an operator must not be shown for ever what nobody else sees."""
    token = probe.hold()
    probe.read()  # The connection for reading is open, too.
    calls = {
        "settle": lambda: probe.end(SettleKind.COMPLETE, token),
        "record": lambda: probe.record(token),
        "operate": lambda: probe.operate(OperatorCommand.FORCE_RELEASE),
        "read": probe.read,
        "list": lambda: probe.listed(RecordQuery()),
        "sweep": probe.sweep,
        "migrate": lambda: run_sync(probe.store.migrate()),
    }
    lose(path)
    left = sorted(path.parent.parent.rglob("*"))
    with pytest.raises(StoreMissing, match=SAID):
        calls[name]()
    assert sorted(path.parent.parent.rglob("*")) == left


def test_reading_that_starts_late_reads_the_same_file(probe, path):
    """The connection for reading is opened at its first use, and not to another file."""
    probe.hold()
    replace(path)
    with pytest.raises(StoreMissing, match=SAID):
        probe.read()
    assert probe.store._connections.reader is None


# Ways back.


def test_a_file_that_is_put_back_is_used_again(probe, path):
    """What counts is where the path leads, not what it did in between."""
    token = probe.hold()
    elsewhere = path.parent.with_name("elsewhere")
    path.parent.rename(elsewhere)
    with pytest.raises(StoreMissing, match=SAID):
        probe.claim()
    elsewhere.rename(path.parent)
    assert probe.end(SettleKind.COMPLETE, token) is Decision.APPLY


def test_closing_ends_the_matter(probe, path):
    """A store that was closed takes what it finds, as a process that starts does."""
    probe.hold()
    remove(path)
    probe.close()
    assert probe.claim().decision is Decision.ADMIT


def test_a_file_that_was_not_accepted_may_be_replaced(path):
    """Nothing was in use yet, so a deploy may put the right file there under a running process."""
    path.touch()
    store = SqliteStore(path, create=False, migrate=False)
    with pytest.raises(SchemaMissing):
        run_sync(store.read(KEY))
    ready = path.with_name("ready.db")
    maker = SqliteStore(ready)
    run_sync(maker.migrate())
    run_sync(maker.close())
    ready.replace(path)
    assert run_sync(store.read(KEY)) is None
    run_sync(store.close())


def test_a_link_is_followed(tmp_path, path):
    """A path may be a link to the file; led to another one, it is another file."""
    link = tmp_path / "link.db"
    link.symlink_to(path)
    store = SqliteStore(link)
    run_sync(store.commit([request()], []))
    assert run_sync(store.read(KEY)) is not None
    other = tmp_path / "other.db"
    shutil.copy(path, other)
    link.unlink()
    link.symlink_to(other)
    with pytest.raises(StoreMissing, match=r"link\.db was removed or replaced"):
        run_sync(store.commit([request()], []))
    run_sync(store.close())


def test_what_lies_beside_the_target_of_a_link_counts(tmp_path, path):
    """SQLite keeps its two files beside the file itself, not beside the link."""
    link = tmp_path / "link.db"
    link.symlink_to(path)
    store = SqliteStore(link)
    run_sync(store.commit([request()], []))
    remove_what_is_beside(path)
    with pytest.raises(StoreMissing, match=SAID):
        run_sync(store.commit([request()], []))
    run_sync(store.close())


def test_the_loss_is_told_before_what_follows_from_it(open_probe, path, rival):
    """Whatever SQLite says of a file that is gone, its user hears that it is gone."""
    hasty = open_probe(busy_timeout=timedelta(milliseconds=20))
    hasty.find()
    rival.execute("BEGIN IMMEDIATE")
    remove(path)
    with pytest.raises(StoreMissing, match=SAID):
        hasty.claim()


# The moment of opening.


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again(path, monkeypatch):
    """The store knows which file its connection is to, however late the replacement came."""
    run_sync(_made(path).close())
    other = path.with_name("other.db")
    shutil.copy(path, other)
    connect = file.connect

    def connect_too_early(*arguments):
        connection = connect(*arguments)
        if other.exists():
            other.replace(path)
        return connection

    monkeypatch.setattr(file, "connect", connect_too_early)
    store = SqliteStore(path)
    run_sync(store.commit([request()], []))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM retrysafe_keys").fetchone() == (1,)
    run_sync(store.close())


def test_a_file_that_never_stays_is_given_up(path, monkeypatch):
    """Opening ends."""
    connect = file.connect
    opened = []

    def connect_in_vain(*arguments):
        opened.append(connect(*arguments))
        path.unlink()
        return opened[-1]

    monkeypatch.setattr(file, "connect", connect_in_vain)
    with pytest.raises(StoreMissing, match=SAID):
        run_sync(SqliteStore(path).commit([request()], []))
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def _made(path):
    store = SqliteStore(path)
    run_sync(store.migrate())
    return store


def test_files_that_do_not_belong_together_say_what_to_do(probe, path):
    """Only the file is removed, its log is not: a new process tells that, not a disk error."""
    probe.hold()
    path.unlink()
    said = in_another_process(path)
    assert said.startswith(f"StoreMissing: sqlite:///{path} and the -wal and -shm beside it do not")
    assert "Stop all processes that use it; then bring back a backup, or remove all three" in said
    with pytest.raises(StoreMissing, match=SAID):
        probe.claim()


# What cannot be seen is not gone.


def test_a_file_that_cannot_be_seen_for_a_moment_is_asked_for_again(path, monkeypatch):
    """An operation that ran keeps its outcome when the file system refuses to look once."""
    refusals = [PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))]

    def stat(name):
        if armed and refusals:
            raise refusals.pop()
        return Path(name).stat()

    armed = []
    monkeypatch.setattr(file, "_stat", stat)
    with Idempotency(SqliteStore(path), caller="caller-1", cache=False) as idem:
        assert idem.run("key-1", lambda: armed.append(1) or "charged", request=None) == "charged"
        assert refusals == []
        assert idem.answer("key-1", lambda: "again", request=None).replayed


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ELOOP, errno.ENOMEM])
def test_a_file_that_cannot_be_seen_is_out_of_reach(probe, monkeypatch, number):
    """The error is one that a retry can help with, and names the reason."""
    probe.hold()

    def refuse(name):
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(file, "_stat", refuse)
    with pytest.raises(StoreUnavailable, match=os.strerror(number)) as told:
        probe.claim()
    assert told.value.retryable


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_a_file_that_is_not_there_is_lost(probe, monkeypatch, number):
    """A folder that became a file, and a handle that a server forgot, lead nowhere as well."""
    probe.hold()

    def refuse(name):
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(file, "_stat", refuse)
    with pytest.raises(StoreMissing, match=SAID):
        probe.claim()


def test_a_log_without_shared_locks_is_not_used(path):
    """A connection that SQLite joined to locks which are deleted: others would not see its own."""
    run_sync(_made(path).close())
    with closing(sqlite3.connect(path)) as other:
        other.execute("SELECT * FROM retrysafe_keys").fetchall()
        remove_what_is_beside(path)
        store = SqliteStore(path)
        with pytest.raises(StoreMissing, match=r"records\.db-shm was removed"):
            run_sync(store.commit([request()], []))
        run_sync(store.close())


# Names.


def test_a_file_whose_name_is_no_text(tmp_path):
    """File systems take any bytes for a name; the two files beside it are watched as well."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.db"))
    store = SqliteStore(path)
    run_sync(store.commit([request()], []))
    assert run_sync(store.read(KEY)) is not None
    remove_what_is_beside(path)
    with pytest.raises(StoreMissing, match="-shm was removed or replaced"):
        run_sync(store.commit([request()], []))
    run_sync(store.close())


def test_an_error_of_the_binding_itself_is_reported():
    """It has no result code of SQLite."""
    told = file.translated(sqlite3.OperationalError("Could not decode"), "sqlite:///a.db")
    assert isinstance(told, StoreUnavailable)
    assert "Could not decode" in str(told)

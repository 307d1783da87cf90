"""Late monkey-patching, forks that Python does not see, and loops that are not asyncio's.

Attacked: what our objects wait with. gevent replaces locks and queues after a preloaded application
was made; uWSGI forks in C, and patches after that; eventlet and trio wait by other means than ours.
Must hold: every request is answered, duplicates run once and get one outcome, a renewal keeps the
key of an operation that outlives its lease, a SIGTERM never leads to a second finished run. What
cannot work is refused at the start, in words that say what to use instead.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import partial

import anyio
import pytest
import trio

from retrysafe import AsyncIdempotency
from retrysafe.errors import InvalidInput
from tests.attacks.apps.ledger import LEASE
from tests.attacks.deployments import (
    DEPLOYMENTS,
    FINISHED,
    ROOT,
    START_SECONDS,
    STOP_SECONDS,
    Deployment,
    at_once,
    free_port,
    launch,
    serving,
    wait_until_it_answers,
)

LEASE_SECONDS = LEASE.total_seconds()
PAGE = ROOT / "docs" / "deployment.md"


def _marked(deployments):
    return [
        pytest.param(item, id=item.name, marks=() if item.is_quick else pytest.mark.long)
        for item in deployments
    ]


@pytest.mark.parametrize("deployment", _marked(DEPLOYMENTS))
def test_duplicates_run_once_and_nothing_hangs(deployment, database_url, tmp_path):
    """Duplicates at the same moment run once and get one outcome, whether they wait or ask again;
    also while an operation outlives its lease."""
    seconds = {"short": 0.05, "shorter": 0.0, "long": 1.5 * LEASE_SECONDS}
    with serving(deployment, database_url, tmp_path) as served:
        answers = at_once(
            *(
                partial(served.outcome, key, seconds[key], wait=wait)
                for key in seconds
                for wait in (0, 0, 10)
            )
        )
        assert [getattr(answer, "status", answer) for answer in answers] == [201] * 9
        for first in range(0, 9, 3):
            same = answers[first : first + 3]
            assert len({answer.body for answer in same}) == 1
            replays = [answer.getheader("Idempotent-Replayed") for answer in same]
            assert sorted(replays, key=str) == [None, "true", "true"]
        expected = {f"{what} {key}" for what in ("begin", "end") for key in seconds}
        assert served.counts() == dict.fromkeys(expected, 1)


@pytest.mark.parametrize("deployment", _marked(DEPLOYMENTS))
def test_a_sigterm_in_the_middle_of_an_operation(deployment, tmp_path):
    """The operation is finished and replayed by the next process, or cut off and run again after
    its lease, as the page says; never does it come to its end twice."""
    store_url, seconds = f"sqlite:///{tmp_path}/shop.db", 1.2 * LEASE_SECONDS
    with serving(deployment, store_url, tmp_path) as served:
        said = at_once(
            partial(served.post, "k", seconds),
            lambda: served.wait_for("begin k") or served.end(),
        )
        assert isinstance(said[1], str), said[1]
    was_finished = served.counts()["end k"] == 1
    with serving(deployment, store_url, tmp_path) as served:
        answer = served.outcome("k", seconds)
        assert answer.status == 201
        assert (answer.getheader("Idempotent-Replayed") == "true") is was_finished
        assert served.counts()["end k"] == 1
    assert was_finished is (deployment.at_sigterm == FINISHED)


def _refused(command, tmp_path, *, port, store=None):
    """What a server says that ends by itself, without having served anything."""
    store = store or f"sqlite:///{tmp_path}/shop.db"
    served = launch(command, port, store, tmp_path)
    try:
        served.process.wait(START_SECONDS)
    finally:
        served.process.kill()
        served.process.wait(STOP_SECONDS)
    return served.log.read_text(errors="replace")


def test_eventlet_is_refused_at_the_start(tmp_path):
    """A process that eventlet has patched does not begin to serve, and says what to use instead."""
    port = free_port()
    command = [sys.executable, "-m", "tests.attacks.apps.eventlet_server", str(port), "before"]
    said = _refused(command, tmp_path, port=port)
    assert "eventlet has patched this process" in said
    assert "gunicorn -k gevent" in said


def test_eventlet_that_patches_later_is_refused_too(tmp_path):
    """An application that was made before the patch answers no protected request with a guess: each
    one fails at once, in the same words, and nothing runs."""
    port = free_port()
    command = [sys.executable, "-m", "tests.attacks.apps.eventlet_server", str(port), "after"]
    served = launch(command, port, f"sqlite:///{tmp_path}/shop.db", tmp_path)
    try:
        wait_until_it_answers(served)
        assert [served.post("k", 0.0).status for _ in range(2)] == [500, 500]
        assert "eventlet has patched this process" in served.log.read_text()
        assert not served.counts()
    finally:
        served.process.kill()
        served.process.wait(STOP_SECONDS)


def test_trio_is_refused_at_the_start(tmp_path):
    """A server that runs another loop than asyncio's does not begin to serve, and says what to use
    instead."""
    port = free_port()
    deployment = Deployment("hypercorn -k trio", "asgi_app")
    said = _refused(deployment.command(port), tmp_path, port=port)
    assert "no event loop of asyncio is running here" in said
    assert "hypercorn's asyncio worker" in said


def test_greenlets_without_a_patch_are_refused_at_the_start(tmp_path):
    """uWSGI with gevent, but with locks of threads: the first one that waits would stop all."""
    port = free_port()
    deployment = Deployment("uwsgi --gevent 50", "wsgi_app")
    assert "set gevent-monkey-patch = true" in _refused(
        deployment.command(port), tmp_path, port=port
    )


@pytest.mark.parametrize("run", [trio.run, partial(anyio.run, backend="trio")])
def test_every_way_into_an_async_object_refuses_another_loop(run):
    """Entering and calling raise what to do, before anything is claimed."""
    idem = AsyncIdempotency("memory://", caller="shop")

    async def enter():
        async with idem:
            pytest.fail("entered")

    async def call():
        await idem.run("k", operation)

    async def operation():
        pytest.fail("ran")

    for way in (enter, call):
        with pytest.raises(InvalidInput, match="no event loop of asyncio"):
            run(way)


# What waits, or starts what runs aside. Bound at import, such a name stays what it was.
_WAITING_NAMES = {
    "queue": None,
    "select": None,
    "selectors": None,
    "socket": None,
    "_thread": None,
    "threading": {"get_ident"},
    "time": {"monotonic", "time", "time_ns"},
}


def test_no_module_binds_what_gevent_replaces():
    """Names from these modules are looked up when they are used, so that a patch reaches them."""
    bound = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in _WAITING_NAMES:
                harmless = _WAITING_NAMES[node.module] or set()
                bound += [
                    f"{path}: {name.name}" for name in node.names if name.name not in harmless
                ]
    assert bound == []


def test_workers_and_relays_from_before_a_patch_are_refused():
    """They wait with what they were made with; run later, they would stop every greenlet."""
    made = """
from gevent import monkey
from retrysafe import Idempotency
from retrysafe.relay import Relay
from retrysafe.stores import MemoryStore
store = MemoryStore()
idem = Idempotency(store, caller="shop")
before = [idem.worker().run, idem.worker().run_once, Relay(store, print).drain]
monkey.patch_all()
for run in before:
    try:
        run()
    except ValueError as error:
        assert "before gevent patched" in str(error), error
    else:
        raise AssertionError(run)
assert idem.run("k", lambda: 1, request=None) == 1
idem.worker().run_once()
Relay(store, print).drain()
"""
    subprocess.run([sys.executable, "-c", made], check=True, timeout=START_SECONDS)


def test_a_statement_that_waits_lets_other_greenlets_run(migrated_url):
    """Also when psycopg was imported before the patch: the greenlet that holds what a statement
    waits for must be able to give it back."""
    made = """
import sys
import psycopg
from gevent import monkey
from retrysafe import Idempotency
plain, _, schema = sys.argv[1].partition("?schema=")
idem = Idempotency(sys.argv[1], caller="shop")
idem.run("first", dict)
holder = psycopg.connect(plain)
monkey.patch_all()
import gevent
holder.execute(f"LOCK TABLE {schema}.keys IN ACCESS EXCLUSIVE MODE")
running = gevent.spawn(idem.run, "second", dict)
gevent.sleep(0.2)
assert not running.ready()
holder.rollback()
assert running.get(timeout=5) == {}
"""
    subprocess.run([sys.executable, "-c", made, migrated_url], check=True, timeout=20)


def test_the_page_on_deployment_lists_what_is_tested():
    """Its table has a row for each of these, with what a SIGTERM does to a running operation."""
    rows = re.findall(
        r"^\| `([^`]+)` \| (ASGI|WSGI) \| ([^|]+?) \|", PAGE.read_text(), re.MULTILINE
    )
    assert rows == [
        (item.options, item.application[:4].upper(), item.at_sigterm) for item in DEPLOYMENTS
    ]

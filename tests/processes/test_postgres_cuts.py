"""Connections that are cut during COMMIT, and a server that is killed between claim and settle."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from retrysafe import (
    AsyncIdempotency,
    Condition,
    Idempotency,
    Key,
    OutcomeNotStored,
    Policy,
    StoreUnavailable,
)
from retrysafe.wiring import open_store
from tests.servers.cutting import Cut, CuttingProxy
from tests.servers.fixtures import migrated
from tests.servers.postgres import PostgresServer

POLICY = Policy(settle_patience=timedelta(seconds=60))
KEY = Key("the key", caller="owner")
FACES = pytest.mark.parametrize("face", ["blocking", "async"])


def run_once(face: str, url: str, body) -> tuple[str, int]:
    """One call on a fresh object; the value and the attempt."""
    if face == "blocking":
        with Idempotency(url, caller="owner", policy=POLICY) as idem:
            answer = idem.answer("the key", body, name="op", request="r")
        return answer.value, answer.attempt

    async def call() -> tuple[str, int]:
        async def operation() -> str:
            return await asyncio.to_thread(body)

        async with AsyncIdempotency(url, caller="owner", policy=POLICY) as idem:
            answer = await idem.answer("the key", operation, name="op", request="r")
        return answer.value, answer.attempt

    return asyncio.run(call())


def stored_in(url: str):
    with Idempotency(url, caller="owner") as idem:
        return idem.read("the key")


@pytest.fixture
def proxy(postgres_server):
    proxy = CuttingProxy(postgres_server.port)
    yield proxy
    proxy.close()


@FACES
@pytest.mark.parametrize("cut", list(Cut))
@pytest.mark.parametrize("moment", ["claim", "settle"])
def test_a_cut_during_commit_is_found_out_by_the_token(
    postgres_server, migrated_url, proxy, face, cut, moment
):
    """Whether the commit happened or not, the operation runs once and its outcome is stored once.

    A cut before the server has the statement means that nothing happened; a cut of the answer means
    that it did. The client cannot tell them apart, so it asks again with the same token.
    """
    url = migrated_url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
    runs = []

    def body() -> str:
        runs.append(1)
        if moment == "settle":
            proxy.arm(KEY.digest, cut)
        return "done"

    if moment == "claim":
        proxy.arm(KEY.digest, cut)
    assert run_once(face, url, body) == ("done", 1)
    assert proxy.cuts == 1
    assert len(runs) == 1
    stored = stored_in(migrated_url)
    assert stored.condition is Condition.SUCCEEDED
    assert len(stored.outcomes) == 1
    assert run_once(face, migrated_url, body) == ("done", 1)
    assert len(runs) == 1


@pytest.fixture(scope="module")
def mortal_server():
    """A server with full durability that a test may kill."""
    server = PostgresServer()
    try:
        yield server.start()
    finally:
        server.remove()


@FACES
def test_a_server_killed_between_claim_and_settle_changes_nothing(mortal_server, face):
    """kill -9 of the whole server while the operation runs: the ending is stored after the restart.

    The same object goes on working: it reconnects by itself.
    """
    url = migrated(f"{mortal_server.url()}?schema=killed_{face}")
    runs = []
    # Comes back while the ending is being tried already.
    restart = threading.Timer(0.5, mortal_server.start)

    def body() -> str:
        runs.append(1)
        mortal_server.kill()
        restart.start()
        return "done"

    assert run_once(face, url, body) == ("done", 1)
    restart.join(60)
    assert len(runs) == 1
    stored = stored_in(url)
    assert (stored.condition, len(stored.outcomes)) == (Condition.SUCCEEDED, 1)
    assert run_once(face, url, body) == ("done", 1)
    assert len(runs) == 1


@FACES
def test_a_server_killed_while_nobody_looks_is_found_again(mortal_server, face):
    """Idle connections of an earlier server are not used: the next call needs no second try."""
    url = migrated(f"{mortal_server.url()}?schema=idle_{face}")
    store = open_store(url, is_async=face == "async")

    async def apart(function) -> None:
        # The loop has to see that its connections end, as a loop that is in use does.
        if face == "async":
            await asyncio.to_thread(function)
        else:
            function()

    async def scenario() -> None:
        assert await store.read(KEY) is None
        await apart(mortal_server.kill)
        with pytest.raises(StoreUnavailable):
            await store.read(KEY)
        await apart(mortal_server.start)
        assert await store.read(KEY) is None
        await apart(mortal_server.stop)
        await apart(mortal_server.start)
        assert await store.read(KEY) is None
        await store.close()

    drive(face, scenario())


@FACES
def test_a_server_that_stays_away_is_reported_and_the_operation_is_not_repeated(
    mortal_server, face
):
    """Without a server the caller is told that it ran; the value is in the error."""
    url = migrated(f"{mortal_server.url()}?schema=away_{face}")
    runs = []
    patience = POLICY.with_changes(settle_patience=timedelta(milliseconds=300))

    def body() -> str:
        runs.append(1)
        mortal_server.kill()
        return "done"

    async def body_async() -> str:
        return body()

    async def call() -> None:
        async with AsyncIdempotency(url, caller="owner", policy=patience) as idem:
            await idem.run("the key", body_async, name="op", request="r")

    try:
        with pytest.raises(OutcomeNotStored) as raised:
            if face == "async":
                asyncio.run(call())
            else:
                with Idempotency(url, caller="owner", policy=patience) as idem:
                    idem.run("the key", body, name="op", request="r")
        assert raised.value.value == "done"
        with pytest.raises(StoreUnavailable):
            run_once(face, url, body)
        assert len(runs) == 1
    finally:
        mortal_server.start()
    assert stored_in(url).condition is Condition.RUNNING


def drive(face: str, flow) -> None:
    if face == "async":
        asyncio.run(flow)
        return
    try:
        flow.send(None)
    except StopIteration:
        return
    raise AssertionError("a blocking store suspended")

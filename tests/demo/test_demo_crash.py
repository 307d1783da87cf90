"""What a crash leaves behind: no stuck key, no double execution, and nothing half done."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.demo.conftest import MOSTLY_SQLITE
from tests.demo.server import (
    BODIES,
    CHARGE,
    LEASE_SECONDS,
    ORDER,
    PATIENCE_SECONDS,
    headers_of,
    new_text,
    problem_of,
)

# The exit code that tells a crash on demand from any other end.
CRASH_CODE = 70


def crash(demo, path, key, body):
    """Sends a request that takes the process down."""
    with pytest.raises(httpx.TransportError):
        demo.post(path, key, body | {"outcome": "crash"})
    assert demo.process.wait(PATIENCE_SECONDS) == CRASH_CODE


def kill_midway(demo, path, key, body):
    """Kills the process while it works on the request, as `kill -9` does."""

    async def scenario():
        slow = body | {"delay_ms": 60_000}
        async with httpx.AsyncClient(base_url=demo.url, timeout=PATIENCE_SECONDS) as client:
            tasks = [
                asyncio.create_task(client.post(f"/{path}", headers=headers_of(key), json=slow))
                for _ in range(2)
            ]
            # The one that is refused says that the other one runs.
            done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result().status_code for task in done] == [409]
            demo.kill()
            for task in running:
                with pytest.raises(httpx.TransportError):
                    await task

    asyncio.run(scenario())


ENDS = {"crash": crash, "kill -9": kill_midway}


def taken_over(demo, key):
    """Retries when it is told to, as a client does, until there is an answer."""
    reply = demo.post("charges", key, CHARGE)
    for _ in range(LEASE_SECONDS):
        if reply.status_code != 409:
            break
        assert problem_of(reply) == "in-flight"
        seconds = int(reply.headers["retry-after"])
        assert 1 <= seconds <= LEASE_SECONDS
        time.sleep(seconds)
        reply = demo.post("charges", key, CHARGE)
    return reply


@MOSTLY_SQLITE
def test_a_charge_that_was_cut_off_is_taken_over_when_its_lease_ends(start_demo, store_url):
    """The key is held for the lease at most; then a retry runs, and one charge shows."""
    ended = {}
    for name, end in ENDS.items():
        end(start_demo(store_url), "charges", name, CHARGE)
        ended[name] = time.monotonic()
    demo = start_demo(store_url)
    assert demo.entries("charges", "c1") == []
    for name, at in ended.items():
        reply = taken_over(demo, name)
        assert reply.status_code == 201
        assert "idempotent-replayed" not in reply.headers
        assert reply.json()["attempt"] == 2
        # Retry-After is in whole seconds, rounded up; the rest is the start of a process.
        assert time.monotonic() - at < LEASE_SECONDS + 10
        assert demo.post("charges", name, CHARGE).headers["idempotent-replayed"] == "true"
    assert [(entry["key"], entry["attempt"]) for entry in demo.entries("charges", "c1")] == [
        (name, 2) for name in ENDS
    ]
    assert demo.stop()[0] == 0


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_order_that_was_cut_off_leaves_nothing_and_its_key_is_free_at_once(
    start_demo, store_url, end
):
    """The row that was written is gone with its transaction; the retry places one order."""
    key = new_text("key")
    end(start_demo(store_url), "orders", key, ORDER)
    demo = start_demo(store_url)
    assert demo.entries("orders", "c1") == []
    reply = demo.post("orders", key, ORDER)
    assert reply.status_code == 201
    assert reply.json()["attempt"] == 1
    assert len(demo.entries("orders", "c1")) == 1
    assert demo.stop() == (0, "")


@pytest.mark.parametrize("path", ["charges", "orders"])
def test_a_restarted_demo_remembers(start_demo, store_url, path):
    """On the same store and the same port: outcomes are replayed, the ledger goes on."""
    key = new_text("key")
    first = start_demo(store_url)
    made = first.post(path, key, BODIES[path])
    first.kill()
    second = start_demo(store_url, port=int(first.url.rpartition(":")[2]))
    replay = second.post(path, key, BODIES[path])
    assert replay.headers["idempotent-replayed"] == "true"
    assert replay.content == made.content
    assert len(second.entries(path, "c1")) == 1


@pytest.mark.parametrize("path", ["charges", "orders"])
def test_two_demos_on_one_store_execute_a_key_once(start_demo, store_url, path):
    """Whichever of the two processes is asked, the key has one execution and one response."""
    servers = [start_demo(store_url), start_demo(store_url)]
    rounds, crowd = 5, 10

    async def scenario():
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            found = []
            for _ in range(rounds):
                key, body = new_text("key"), BODIES[path] | {"delay_ms": 50}
                found.append(
                    await asyncio.gather(
                        *(
                            client.post(
                                f"{servers[number % 2].url}/{path}",
                                headers=headers_of(key),
                                json=body,
                            )
                            for number in range(crowd)
                        )
                    )
                )
            return found

    for replies in asyncio.run(scenario()):
        assert {reply.status_code for reply in replies} <= {201, 409}
        made = [reply for reply in replies if reply.status_code == 201]
        first = [reply for reply in made if "idempotent-replayed" not in reply.headers]
        assert len(first) == 1
        assert {reply.content for reply in made} == {first[0].content}
        refused = [reply for reply in replies if reply.status_code == 409]
        assert all(1 <= int(reply.headers["retry-after"]) <= LEASE_SECONDS for reply in refused)
    entries = servers[0].entries(path, "c1")
    assert len(entries) == rounds
    assert len({entry["key"] for entry in entries}) == rounds
    assert servers[1].entries(path, "c1") == entries
    assert [server.stop() for server in servers] == [(0, "")] * 2

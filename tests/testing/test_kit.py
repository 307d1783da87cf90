"""The test kit of applications: what it sees, the states that it gives, its attacks."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta
from typing import Annotated, Any

import flask
import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from retrysafe import (
    GLOBAL,
    AsyncIdempotency,
    Attempt,
    Idempotency,
    OperationInFlight,
    Policy,
    current_attempt,
)
from retrysafe.contrib.fastapi import Retrysafe, idempotent
from retrysafe.contrib.flask import Retrysafe as FlaskRetrysafe
from retrysafe.stores import MemoryStore
from retrysafe.testing import AttemptKilled, assert_ran, assert_replayed, stored_response

pytest_plugins = ["retrysafe.testing.plugin"]

KEY = {"Idempotency-Key": '"order"'}


class Declined(Exception):
    pass


class Shop:
    """Endpoints that are right, and endpoints that are not."""

    def __init__(self, path):
        self.path = path
        self.effects: list[str] = []
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE orders (name TEXT)")
        self.idempotency = AsyncIdempotency(f"sqlite:///{path}")
        self.app = FastAPI()
        retrysafe = Retrysafe(self.idempotency, caller=GLOBAL)
        retrysafe.install(self.app)
        self.app.router.lifespan_context = retrysafe.lifespan

        @self.app.post("/leased", status_code=201)
        async def leased(attempt: Annotated[Attempt, idempotent()]) -> dict[str, int]:
            self.effects.append("leased")
            return {"order": len(self.effects)}

        @self.app.post("/completed", status_code=201)
        def completed(attempt: Annotated[Attempt, idempotent()]) -> dict[str, int]:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO orders VALUES ('hat')")
                attempt.complete_in(connection, {"order": 1})
                connection.execute("COMMIT")
            return {"order": 1}

        @self.app.post("/stepped", status_code=201)
        async def stepped(attempt: Annotated[Attempt, idempotent()]) -> dict[str, str]:
            await attempt.step("charge", self.effects.append, "charged")
            return {"order": "stepped"}

        @self.app.post("/unprotected", status_code=201)
        async def unprotected() -> dict[str, int]:
            self.effects.append("unprotected")
            return {"order": len(self.effects)}

    def orders(self) -> int:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute("SELECT count(*) FROM orders").fetchone()[0]

    def count(self) -> int:
        return len(self.effects)


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path / "shop.db")


@pytest.fixture
def client(shop):
    """Started by the test: a kit is attached before."""
    return TestClient(shop.app)


def test_an_application_starts_with_every_test_and_its_store_is_fresh(shop, client, retrysafe_kit):
    kit = retrysafe_kit(shop.idempotency, "memory")
    with client, kit.runs_exactly(1):
        assert_ran(client.post("/leased", headers=KEY))
        assert_replayed(client.post("/leased", headers=KEY))
    with client, pytest.raises(AssertionError, match="1 attempts ran instead of 0"):
        with kit.runs_exactly(0):
            assert_ran(client.post("/leased", headers={"Idempotency-Key": "other"}))
        raise AssertionError("not reached")
    replayed = TestClient(shop.app)
    with replayed, pytest.raises(AssertionError, match="201 is a replay"):
        assert_ran(replayed.post("/leased", headers=KEY))
    assert not (shop.path.parent / "retrysafe.db").exists()


@pytest.mark.parametrize("store", ["memory", "sqlite", "postgres"])
def test_the_clock_ends_windows_and_leases(store, retrysafe_kit, postgres_server):
    policy = Policy(active_window=timedelta(hours=1), audit_window=timedelta(hours=2))
    with Idempotency(MemoryStore(), caller="shop", policy=policy) as idem:
        kit = retrysafe_kit(idem, postgres_server.url() if store == "postgres" else store)
        runs = [idem.run("k", lambda: 7, name="", request=None) for _ in range(2)]
        assert (runs, len(kit.runs)) == ([7, 7], 1)
        kit.advance(timedelta(minutes=61))
        assert idem.run("k", lambda: 8, name="", request=None) == 8
        with kit.seeding("running"):
            idem.run("held", lambda: 7, name="", request=None)
        with pytest.raises(OperationInFlight):
            idem.run("held", lambda: 7, name="", request=None)
        kit.advance(timedelta(hours=2))
        assert idem.run("held", lambda: 9, name="", request=None) == 9


def test_the_clock_of_ones_own_store_is_left_alone(retrysafe_kit):
    with Idempotency(MemoryStore(), caller="shop") as idem:
        with pytest.raises(ValueError, match="seeding"):
            retrysafe_kit(idem).advance(timedelta(1))
        with pytest.raises(ValueError, match="'memory', 'sqlite'"):
            retrysafe_kit(idem, "redis://")


def test_the_objects_own_store_comes_back(tmp_path, retrysafe_kit, request):
    own = MemoryStore()
    with Idempotency(own, caller="shop") as idem:
        idem.run("k", lambda: "own", name="", request=None)
        request.getfixturevalue("retrysafe_kit")
        from retrysafe.testing import Kit

        with Kit(idem, MemoryStore()):
            assert idem.run("k", lambda: "fresh", name="", request=None) == "fresh"
        assert idem.run("k", lambda: "again", name="", request=None) == "own"


# States.


def test_keys_of_functions_are_given_states(retrysafe_kit):
    policy = Policy(terminal=(Declined,))
    with Idempotency(MemoryStore(), caller="shop", policy=policy) as idem:
        kit = retrysafe_kit(idem, "memory")

        def call(key):
            return idem.run(key, lambda: "ran", name="", request=None)

        with kit.seeding("completed", {"id": 1}):
            call("completed")
        with kit.seeding("failed", Declined("no credit")), pytest.raises(Declined):
            call("failed")
        with kit.seeding("running"):
            call("running")
        with kit.seeding("abandoned"):
            call("abandoned")
        assert kit.runs == []
        assert call("completed") == {"id": 1}
        with pytest.raises(Declined, match="no credit"):
            call("failed")
        with pytest.raises(OperationInFlight):
            call("running")
        # Its lease is over after a millisecond.
        kit.advance(timedelta(seconds=1))
        assert call("abandoned") == "ran"
        with pytest.raises(AssertionError, match="nothing was claimed"), kit.seeding("running"):
            pass
        with pytest.raises(ValueError, match="has a record already"), kit.seeding("running"):
            call("running")
        for wrong in (("running", 1), ("failed", 1)):
            with pytest.raises(ValueError, match=r"outcome|exception"), kit.seeding(*wrong):
                pass


def test_keys_of_requests_are_given_states(shop, client, retrysafe_kit):
    kit = retrysafe_kit(shop.idempotency, "sqlite")
    with client:
        with kit.seeding("completed", stored_response(201, b'{"order": 7}')):
            client.post("/leased", headers=KEY)
        reply = client.post("/leased", headers=KEY)
        assert_replayed(reply)
        assert (reply.status_code, reply.json()) == (201, {"order": 7})
        with kit.seeding("running"):
            client.post("/leased", headers={"Idempotency-Key": "running"})
        reply = client.post("/leased", headers={"Idempotency-Key": "running"})
        assert reply.status_code == 409
        with pytest.raises(AssertionError, match="409 is no replay"):
            assert_replayed(reply)
    assert shop.effects == []


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_keys_of_atomic_blocks_are_given_states(tmp_path, retrysafe_kit, store, postgres_server):
    import psycopg

    with Idempotency(MemoryStore(), caller="shop") as idem:
        if store == "sqlite":
            path = tmp_path / "own.db"
            kit = retrysafe_kit(idem, f"sqlite:///{path}")
            connect = lambda: closing(sqlite3.connect(path))  # noqa: E731
        else:
            kit = retrysafe_kit(idem, postgres_server.url())
            connect = lambda: closing(psycopg.connect(postgres_server.url()))  # noqa: E731

        def place():
            with connect() as connection, connection:
                with idem.atomic(connection, "k", request=None) as run:
                    if not run.replayed:
                        run.complete("ran")
                return run.value

        with kit.seeding("completed", "seeded"):
            place()
        assert place() == "seeded"
        with kit.runs_exactly(0):
            assert place() == "seeded"


# Deaths.


def test_an_attempt_dies_where_the_test_says(shop, client, retrysafe_kit):
    kit = retrysafe_kit(shop.idempotency)
    with client:
        for point, effects in (("before", 0), ("after", 1)):
            headers = {"Idempotency-Key": point}
            with kit.crashing(point):
                assert client.post("/leased", headers=headers).status_code >= 409
            assert shop.count() == effects
            kept = kit.runs[-1].text
            assert kept == point
        headers = {"Idempotency-Key": "stepped"}
        shop.effects.clear()
        with kit.crashing("charge"):
            client.post("/stepped", headers=headers)
        again = client.post("/stepped", headers=headers)
        while again.status_code == 409:
            again = client.post("/stepped", headers=headers)
        assert_ran(again)
        assert shop.effects == ["charged"]
        with (
            pytest.raises(AssertionError, match="no attempt got as far as to die after the step"),
            kit.crashing("ship"),
        ):
            assert_ran(client.post("/stepped", headers={"Idempotency-Key": "another"}))


# The attack.


def test_a_right_endpoint_stands_the_attack(shop, client, retrysafe_kit):
    kit = retrysafe_kit(shop.idempotency)
    with client:
        kit.assert_runs_once(client, "POST", "/completed", effects=shop.orders)
        kit.assert_runs_once(
            client, "POST", "/stepped", effects=shop.count, crashes=("before", "charge", "after")
        )
        kit.assert_runs_once(client, "POST", "/leased", effects=shop.count, crashes=("before",))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/leased", "the effect happened 2 times after an attempt died before its outcome"),
        ("/unprotected", "nothing was claimed: the route is not protected"),
        ("/missing", "nothing was claimed"),
    ],
)
def test_a_wrong_endpoint_does_not(shop, client, retrysafe_kit, path, words):
    kit = retrysafe_kit(shop.idempotency)
    with client, pytest.raises(AssertionError, match=words):
        kit.assert_runs_once(client, "POST", path, effects=shop.count, at_once=4)


def test_a_client_that_has_not_started_the_application_is_refused(shop, client, retrysafe_kit):
    with pytest.raises(ValueError, match="with TestClient"):
        retrysafe_kit(shop.idempotency).assert_runs_once(client, "POST", "/leased")


def test_async_clients_attack_in_their_own_loop(shop, retrysafe_kit):
    kit = retrysafe_kit(shop.idempotency)

    async def whole():
        transport = httpx.ASGITransport(shop.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            await kit.assert_runs_once(client, "POST", "/completed", effects=shop.orders)
        await shop.idempotency.close()

    asyncio.run(whole())


def test_flasks_client_attacks(tmp_path, retrysafe_kit):
    """Also with keys that are made of the request."""
    from retrysafe.http import FieldsKey

    idem = Idempotency(MemoryStore(), secret="at least sixteen bytes")
    app, retrysafe, effects = flask.Flask("shop"), FlaskRetrysafe(), []
    retrysafe.init_app(app, idem, caller=GLOBAL)

    @app.post("/orders")
    @retrysafe.idempotent()
    def order() -> Any:
        effects.append("order")
        return {"order": 1}, 201

    @app.post("/natural")
    @retrysafe.idempotent(key=FieldsKey("/order", window=timedelta(days=1)))
    def natural() -> Any:
        effects.append("natural")
        return {"order": 1}, 201

    kit = retrysafe_kit(idem, "memory")
    count = lambda: len(effects)  # noqa: E731
    client, crashes = app.test_client(), ("before",)
    kit.assert_runs_once(client, "POST", "/orders", headers=KEY, effects=count, crashes=crashes)
    kit.assert_runs_once(
        client,
        "POST",
        "/natural",
        vary=lambda number: {"json": {"order": number}},
        effects=count,
        crashes=crashes,
    )
    idem.close()


def test_functions_stand_the_attack(retrysafe_kit):
    effects: list[str] = []

    def charge(order: str) -> str:
        current_attempt().step("charge", effects.append, order)
        return order

    with Idempotency(MemoryStore(), caller="shop") as idem:
        kit = retrysafe_kit(idem, "sqlite")
        kit.assert_call_runs_once(
            lambda number: idem.run(f"order-{number}", charge, f"order-{number}"),
            effects=lambda: len(effects),
        )
        with pytest.raises(AssertionError, match="2 times after an attempt died before its"):
            kit.assert_call_runs_once(
                lambda number: idem.run(f"o-{number}", effects.append, f"o-{number}"),
                effects=lambda: len(effects),
            )
        with kit.crashing("before"), pytest.raises(AttemptKilled):
            idem.run("killed", charge, "killed")


def test_async_functions_stand_the_attack(retrysafe_kit):
    effects: list[int] = []

    async def whole():
        async with AsyncIdempotency(MemoryStore(), caller="shop") as idem:
            kit = retrysafe_kit(idem, "memory")

            async def charge(number: int) -> int:
                await current_attempt().step("charge", effects.append, number)
                return number

            async def call(number: int) -> int:
                return await idem.run(f"order-{number}", charge, number)

            await kit.assert_call_runs_once(call, effects=lambda: len(effects))

    asyncio.run(whole())

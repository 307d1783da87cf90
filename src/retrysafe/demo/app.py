"""The demo's API: three ways to run an operation once, with FastAPI.

A charge is leased, because its effect is outside of the database. An order is atomic, because its
effect is inside. A checkout has durable steps. `make_app` puts all of it together: begin there.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from http import HTTPStatus
from inspect import isawaitable
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from retrysafe import AsyncIdempotency, Attempt, FingerprintRule, Policy, __version__
from retrysafe.contrib.fastapi import Retrysafe, idempotent
from retrysafe.dashboard import Dashboard
from retrysafe.demo.ledger import Entry, Ledger
from retrysafe.demo.playground import add_playground, restart_if_asked
from retrysafe.http import AtomicAttempt, bearer_token
from retrysafe.observe.prometheus import PrometheusMetrics
from retrysafe.relay import AsyncRelay, Delivery, RelayPolicy
from retrysafe.stores import open_store

# Short: after a crash, a retry waits until the lease has ended.
LEASE: Final = timedelta(seconds=10)
# Child keys must be the same after a restart. Your own secret belongs in `RETRYSAFE_SECRET` and not
# in the source.
SECRET: Final = "the retrysafe demo has no secrets"
# These fields simulate trouble. A retry may leave them out and is still the same request.
SIMULATED: Final = FingerprintRule(exclude=("/delay_ms", "/outcome"))
SIMULATED_CHECKOUT: Final = FingerprintRule(exclude=("/delay_ms", "/crash_after"))


def make_app(url: str, ledger: Ledger, dashboard_token: str | None = None) -> FastAPI:
    """The API on the store at this URL; the ledger is in the same database."""
    store = open_store(url, is_async=True)
    policy = Policy(lease=LEASE, wait_limit=timedelta(seconds=60))
    # Everybody may look, because the demo listens on the loopback interface alone.
    dashboard = Dashboard(url, token=dashboard_token, show_bodies=True, is_open_on_loopback=True)
    metrics = PrometheusMetrics(CollectorRegistry())
    idempotency = AsyncIdempotency(
        store,
        policy=policy,
        fingerprint=SIMULATED,
        secret=SECRET,
        observers=[dashboard.observer, metrics],
    )
    every = RelayPolicy(lease=LEASE, timeout=LEASE, poll=timedelta(milliseconds=200))
    relay = AsyncRelay(store, send_receipts(ledger), policy=every)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with ledger.opened():
            delivering = asyncio.create_task(relay.run())
            try:
                yield
            finally:
                await idempotency.close(timedelta(seconds=5))
                relay.stop()
                await delivering
                await store.close()
                await asyncio.to_thread(dashboard.close)

    app = FastAPI(
        title="retrysafe demo",
        version=__version__,
        description="Every POST may be sent twice, and is carried out once.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from the network.
        redoc_url=None,
    )
    Retrysafe(idempotency, caller=bearer_token).install(app)
    add_charges(app, ledger)
    add_orders(app, ledger)
    add_checkouts(app, ledger)
    add_lists(app, ledger, "/effects", "")
    for operation in ("charge", "order", "checkout"):
        add_lists(app, ledger, f"/{operation}s", operation)
    add_metrics(app, metrics)
    app.mount("/retrysafe", dashboard.asgi)
    add_playground(app)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)
    return app


def add_metrics(app: FastAPI, metrics: PrometheusMetrics) -> None:
    """What Prometheus scrapes."""

    @app.get("/metrics", include_in_schema=False)
    def scrape() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def add_charges(app: FastAPI, ledger: Ledger) -> None:
    """Charges are leased: their effect is outside of the database.

    The claim is durable before the work begins, and renewed while it lasts. If the process dies,
    the key is free when the lease ends, and the next retry starts over.
    """

    @app.post("/charges", status_code=201, responses=problems(400, 402, 422, 500))
    async def charge(body: Charge, attempt: Annotated[Attempt, idempotent()]) -> Response:
        """Charge a customer once, however often the request is sent."""
        return answer(await execute_charge(ledger, body, attempt))


async def execute_charge(ledger: Ledger, body: Charge, attempt: Attempt) -> Entry:
    """Stands for the payment provider: what it has charged stays charged."""
    await simulate(body.delay_ms, body.outcome)
    async with ledger.transaction() as connection:
        # The last thing before the effect: an attempt that has lost its lease stops here.
        attempt.raise_if_lost()
        made = body.model_dump(exclude={"delay_ms"})
        return await ledger.add(
            connection, "charge", made, key=attempt.key.text, attempt=attempt.number
        )


def add_orders(app: FastAPI, ledger: Ledger) -> None:
    """Orders are atomic: the order and the response are one transaction.

    If the process dies, neither is there, and the key is free at once.
    """
    in_one_transaction = idempotent(transaction=ledger.transaction)

    @app.post("/orders", status_code=201, responses=problems(400, 402, 422, 500))
    async def order(body: Order, attempt: AtomicAttempt[Any] = in_one_transaction) -> Response:
        """Place an order once, in one transaction with the response."""
        made = body.model_dump(exclude={"delay_ms"})
        entry = await ledger.add(
            attempt.connection, "order", made, key=attempt.key.text, attempt=attempt.number
        )
        # After the write, to show that a crash takes it back.
        await simulate(body.delay_ms, body.outcome)
        return answer(entry)


def add_checkouts(app: FastAPI, ledger: Ledger) -> None:
    """Checkouts have durable steps: an attempt that takes over after a crash skips finished ones.

    A crash between a call and its record repeats the call with the same child key, so that the
    other system knows it. The receipt is an outbox entry: it commits together with the checkout and
    the response, and the relay delivers it afterwards.
    """
    once = idempotent(fingerprint=SIMULATED_CHECKOUT)

    @app.post("/checkouts", status_code=201, responses=problems(400, 422, 500))
    async def checkout(body: Checkout, attempt: Attempt = once) -> Response:
        """Reserve, charge and send a receipt, each once, wherever the process dies."""
        await simulate(body.delay_ms)
        whose = {"customer": body.customer, "checkout_key": attempt.key.text}
        price = {"amount": 1000 * len(body.items), "currency": "eur"}

        async def send(effect: str, details: dict[str, Any]) -> str:
            key = attempt.child_key("checkout", effect)
            return await add_effect(ledger, effect, whose | details, key, attempt.number)

        async def write_receipt(charge: str) -> dict[str, Any]:
            return whose | {"charge": charge} | price

        def finished(step: str) -> None:
            # Only the first attempt crashes: a retry may carry the same field.
            if body.crash_after == step and attempt.is_first:
                crash()

        reservation = await attempt.step("reserve", send, "reservation", {"items": body.items})
        finished("reserve")
        charge = await attempt.step("charge", send, "charge", price)
        finished("charge")
        receipt = await attempt.step("receipt", write_receipt, charge)
        # Not inside the step: the attempt that completes must stage it, even if it skips the step.
        receipt_key = attempt.outbox.stage("receipts", receipt, aggregate=body.customer)
        finished("receipt")

        effects = {"reservation": reservation, "charge": charge, "receipt_key": receipt_key}
        async with ledger.transaction() as connection:
            made = {"customer": body.customer, "items": body.items} | price | effects
            entry = await ledger.add(
                connection, "checkout", made, key=attempt.key.text, attempt=attempt.number
            )
            response = answer(entry)
            completed = attempt.complete_in(connection, response)
            if isawaitable(completed):  # As the connection's own methods: asyncpg yes, sqlite3 no.
                await completed
        return response


async def add_effect(
    ledger: Ledger, effect: str, details: dict[str, Any], key: str, attempt: int
) -> str:
    """Stands for a call to another system, which executes a key once; returns what it made."""
    made = f"{effect}_{key.rpartition(':')[2]}"
    async with ledger.transaction() as connection:
        await ledger.add(connection, effect, details, key=key, attempt=attempt, entry_id=made)
    return made


def send_receipts(ledger: Ledger) -> Callable[[Delivery], Awaitable[None]]:
    """The relay's target. It stands for a mail server that drops repetitions by their key."""

    async def deliver(delivery: Delivery) -> None:
        await add_effect(ledger, "receipt", delivery.json(), delivery.key, delivery.attempt)

    return deliver


def add_lists(app: FastAPI, ledger: Ledger, path: str, operation: str) -> None:
    """What was really executed, in order: one entry for every execution."""

    @app.get(path, responses=problems(422))
    async def executed(customer: Customer = None) -> list[Entry]:
        return await ledger.entries(operation=operation, customer=customer or "")

    @app.get(f"{path}/{{entry_id}}", responses=problems(404, 422))
    async def one(entry_id: Text) -> Response:
        """What `Location` leads to."""
        found = await ledger.entries(operation=operation, entry_id=entry_id)
        if not found:
            return problem(404, "There is no such entry", retryable=False)
        return JSONResponse(found[0])


# Requests.

# Control characters have no place in a name, and PostgreSQL cannot store the first of them.
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Whole = Annotated[int, Field(ge=-(10**15), le=10**15)]
Fraction = Annotated[float, Field(ge=-1e15, le=1e15)]
# An item is a name, or a few plain fields.
Item = Text | Annotated[dict[Text, Text | bool | Whole | Fraction | None], Field(max_length=20)]
Customer = Annotated[Text | None, Query(description="Only the entries of this customer.")]
DelayMs = Annotated[int, Field(ge=0, le=60_000, description="How long the work takes.")]
Outcome = Literal["ok", "decline", "error", "crash"]


class Simulated(BaseModel):
    """What every charge and every order takes beside its own fields."""

    customer: Text
    delay_ms: DelayMs = 0
    outcome: Outcome = "ok"


class Charge(Simulated):
    """The body of `POST /charges`."""

    amount: Annotated[int, Field(gt=0, le=1_000_000_000, description="In the smallest unit.")]
    currency: Annotated[str, Field(pattern=r"^[A-Za-z]{3}$")]


class Order(Simulated):
    """The body of `POST /orders`."""

    item: Text
    quantity: Annotated[int, Field(gt=0, le=1_000_000)]


class Checkout(BaseModel):
    """The body of `POST /checkouts`."""

    items: Annotated[list[Item], Field(min_length=1, max_length=100)]
    customer: Text
    delay_ms: DelayMs = 0
    crash_after: Literal["reserve", "charge", "receipt"] | None = None


async def simulate(delay_ms: int, outcome: Outcome = "ok") -> None:
    """Takes its time; does not return from a crash."""
    await asyncio.sleep(delay_ms / 1000)
    if outcome == "crash":
        crash()


def crash() -> None:
    """Ends the process as a power cut does: only what is committed stays."""
    os.write(2, b"Crashed as asked. Start the demo again, and send the same request again.\n")
    restart_if_asked()
    os._exit(70)


# Answers.


def answer(entry: Entry) -> Response:
    """The answer to an execution: 201, or the outcome that the client wants to see."""
    operation = entry["operation"]
    if entry["outcome"] == "decline":
        return problem(402, f"The {operation} was declined", retryable=False, id=entry["id"])
    if entry["outcome"] == "error":
        return problem(500, f"The {operation} failed", retryable=True)
    location = f"/{operation}s/{entry['id']}"
    return JSONResponse(entry, status_code=201, headers={"Location": location})


def problem(status: int, title: str, **more: Any) -> Response:
    """A refusal in the form that retrysafe uses too."""
    content = {"type": "about:blank", "title": title, "status": status} | more
    return Response(json.dumps(content), status_code=status, media_type="application/problem+json")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems of a route for the OpenAPI document; retrysafe adds its own."""
    content = {"application/problem+json": {"schema": {"type": "object"}}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in statuses
    }


async def refused(_: Request, error: Any) -> Response:
    """What FastAPI refuses: a broken body, an unknown path, a wrong method."""
    response = problem(error.status_code, str(error.detail), retryable=False)
    response.headers.update(error.headers or {})
    return response


async def invalid(request: Request, error: Any) -> Response:
    """A request that does not fit; the answer names the faults and repeats no value."""
    faults = [
        {"where": "/".join(map(str, fault["loc"])), "what": fault["msg"]}
        for fault in error.errors()
    ]
    more: dict[str, Any] = {"errors": faults}
    if request.method == "POST":
        more["detail"] = "This answer is kept: send the corrected request with a new key."
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not media_type.endswith(("/json", "+json")):
            hint = "The body was not read as JSON: send it with Content-Type: application/json."
            more["detail"] = f"{hint} {more['detail']}"
    return problem(422, "The request is invalid", retryable=False, **more)

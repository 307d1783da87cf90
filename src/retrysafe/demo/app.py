"""The application: routes, rules, and the database that both share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from retrysafe import (
    AsyncIdempotency,
    FingerprintRule,
    Policy,
    StoreUrlInvalid,
    __version__,
    open_store,
)
from retrysafe.core.ports import Store
from retrysafe.demo import charges, checkouts, orders, reading, welcome
from retrysafe.demo.answers import invalid, refused
from retrysafe.demo.ledger import Ledger
from retrysafe.demo.sqlite_ledger import SqliteLedger
from retrysafe.http import IdempotencyMiddleware, Rule, bearer_token
from retrysafe.relay import AsyncRelay, RelayPolicy
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.postgres.urls import postgres_url
from retrysafe.stores.sqlite import SqliteStore

# Short enough to wait for after a crash; a slow charge is renewed long before it ends.
POLICY: Final = Policy(lease=timedelta(seconds=10), wait_limit=timedelta(seconds=60))
# How a run is staged is no part of what is asked for: a request that was made to fail may be
# sent again without the stage directions, and is still the same request.
REQUEST: Final = FingerprintRule(exclude=("/delay_ms", "/outcome"))
CHECKOUT: Final = FingerprintRule(exclude=("/delay_ms", "/crash_after"))
# Child keys must be the same after a restart. The demo has nothing to hide; your secret comes from
# the environment (`RETRYSAFE_SECRET`) and is in nobody's source.
SECRET: Final = "the retrysafe demo has no secrets"
# A receipt is part of a transaction of the ledger's, of which only a look at the outbox tells.
RELAY: Final = RelayPolicy(
    lease=timedelta(seconds=10), timeout=timedelta(seconds=10), poll=timedelta(milliseconds=200)
)
# A run that is cut off at the end of the server keeps its key until the lease ends, as in a crash.
_FAREWELL: Final = timedelta(seconds=5)


def make_app(url: str) -> FastAPI:
    """The demo on the store at this URL, which `prepare` has made ready; raises `StoreError`."""
    ledger = open_ledger(url)
    store = open_store(url, is_async=True)
    idempotency = AsyncIdempotency(store, policy=POLICY, fingerprint=REQUEST, secret=SECRET)
    relay = AsyncRelay(store, checkouts.receipts_into(ledger), policy=RELAY)
    app = FastAPI(
        title="retrysafe demo",
        version=__version__,
        description="Every POST may be sent twice, and is carried out once.",
        lifespan=_lifespan(ledger, store, idempotency, relay),
    )
    app.state.ledger = ledger
    app.add_middleware(
        IdempotencyMiddleware,
        idempotency=idempotency,
        caller=bearer_token,
        rules=[
            Rule(path="/charges", methods=("POST",)),
            Rule(path="/orders", methods=("POST",), transaction=ledger.transaction),
            Rule(path="/checkouts", methods=("POST",), fingerprint=CHECKOUT),
        ],
    )
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)
    for part in (charges, orders, checkouts, reading, welcome):
        app.include_router(part.router)
    return app


def _lifespan(
    ledger: Ledger, store: Store, idempotency: AsyncIdempotency, relay: AsyncRelay
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await ledger.open()
        delivering = asyncio.create_task(relay.run())
        try:
            yield
        finally:
            await idempotency.close(_FAREWELL)
            relay.stop()
            await delivering
            await store.close()
            await ledger.close()

    return lifespan


def open_ledger(url: str) -> Ledger:
    """The ledger in the store's own database; raises `StoreUrlInvalid` where there is none."""
    store = open_store(url, is_async=True)
    if isinstance(store, SqliteStore):
        return SqliteLedger(store.path)
    if isinstance(store, PostgresStore):
        # Imported here: its driver is needed for PostgreSQL only.
        from retrysafe.demo.postgres_ledger import PostgresLedger  # noqa: PLC0415

        return PostgresLedger(postgres_url(url))
    raise StoreUrlInvalid(
        f"the demo needs a store that survives it, and {url} ends with its process: use "
        "sqlite:///path/to/file.db or postgresql://user@host/database"
    )


async def prepare(url: str) -> None:
    """Brings the schemas of the store and of the ledger up to date; raises `StoreError`."""
    ledger = open_ledger(url)
    store = open_store(url, is_async=True)
    assert isinstance(store, SqliteStore | PostgresStore)  # Others have no ledger.
    try:
        await store.migrate()
    finally:
        await store.close()
    await ledger.open()
    try:
        await ledger.prepare()
    finally:
        await ledger.close()

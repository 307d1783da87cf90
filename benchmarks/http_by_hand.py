"""A middleware for this one purpose: what Python reaches between a server and an application.

It tells callers and keys apart, compares requests, keeps the response, and merges the rows of
concurrent requests. It knows no lease, no crash, no cancelled client, no stream, no rule and no
limit, so it is a bound and not something to use.
"""

from __future__ import annotations

import asyncio
import os
from hashlib import sha256
from typing import Any

import asyncpg

from benchmarks.postgres_bare import CONNECTIONS, Merged, keep
from benchmarks.postgres_statements import CLAIMS, COMPLETES

SCHEMA = "retrysafe"


class Postgres:
    """Claims and completes on retrysafe's tables, in batches."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def open(self) -> None:
        options = {"min_size": CONNECTIONS, "max_size": CONNECTIONS, "reset": keep}
        pool = await asyncpg.create_pool(self._url, **options)
        self._claims, self._completes = (
            Merged(pool, sql.format(schema=SCHEMA), CONNECTIONS // 2) for sql in (CLAIMS, COMPLETES)
        )

    async def claim(self, digest: bytes) -> bytes:
        token = os.urandom(16)
        await self._claims.commit((digest, token))
        return token

    async def complete(self, digest: bytes, token: bytes, body: bytes) -> None:
        await self._completes.commit((digest, token, body))


class ByHand:
    """Answers the first request by the application and stores the response."""

    def __init__(self, app: Any, store: Postgres) -> None:
        self._app = app
        self._store = store
        self._kept: dict[bytes, tuple[bytes, list[Any]]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._store.open()
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        body = b""
        while True:
            part = await receive()
            body += part["body"]
            if not part.get("more_body"):
                break
        caller, key = headers[b"authorization"], headers[b"idempotency-key"]
        digest = sha256(b"%d %b%b" % (len(caller), caller, key)).digest()[:16]
        request = b"%b %b %b" % (scope["method"].encode(), scope["raw_path"], body)
        fingerprint = sha256(request).digest()
        kept = self._kept.get(digest)
        if kept is None:
            kept = await self._run(scope, body, digest, fingerprint)
        elif kept[0] != fingerprint:
            raise RuntimeError("the load uses every key for one request")
        for message in kept[1]:
            await send(message)

    async def _run(
        self, scope: Any, body: bytes, digest: bytes, fingerprint: bytes
    ) -> tuple[bytes, list[Any]]:
        sent: list[Any] = []
        token = await self._store.claim(digest)

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        # Apart from the request, so that a client that leaves does not cancel it.
        await asyncio.shield(asyncio.ensure_future(self._app(scope, receive, send)))
        outcome = b"".join(message.get("body", b"") for message in sent)
        await self._store.complete(digest, token, outcome)
        self._kept[digest] = kept = (fingerprint, sent)
        return kept

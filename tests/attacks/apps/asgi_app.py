"""A charge that takes as long as its request says, in plain ASGI; made as it is imported."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from retrysafe import AsyncIdempotency
from retrysafe.http import IdempotencyMiddleware, bearer_token
from tests.attacks.apps.ledger import POLICY, STORE_VARIABLE, note

_idempotency = AsyncIdempotency(os.environ[STORE_VARIABLE], policy=POLICY)


async def charge(scope: Any, receive: Any, send: Any) -> None:
    """Says in the ledger when it begins and when it ends."""
    if scope["type"] == "lifespan":
        await _live(receive, send)
        return
    if scope["method"] == "GET":
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return
    key = dict(scope["headers"])[b"idempotency-key"].decode()
    note("begin", key)
    await asyncio.sleep(json.loads((await receive())["body"])["seconds"])
    note("end", key)
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    body = json.dumps({"run": os.urandom(8).hex()}).encode()
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            await _idempotency.close()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


application = IdempotencyMiddleware(charge, _idempotency, caller=bearer_token)

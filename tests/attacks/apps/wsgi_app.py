"""A charge that takes as long as its request says, in plain WSGI; made as it is imported."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from retrysafe import Idempotency
from retrysafe.http import WSGIIdempotencyMiddleware, bearer_token
from tests.attacks.apps.ledger import POLICY, STORE_VARIABLE, note


def charge(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Says in the ledger when it begins and when it ends."""
    if environ["REQUEST_METHOD"] == "GET":
        start_response("204 No Content", [])
        return ()
    key = environ["HTTP_IDEMPOTENCY_KEY"]
    note("begin", key)
    time.sleep(json.loads(environ["wsgi.input"].read())["seconds"])
    note("end", key)
    start_response("201 Created", [("Content-Type", "application/json")])
    return [json.dumps({"run": os.urandom(8).hex()}).encode()]


idempotency = Idempotency(os.environ[STORE_VARIABLE], policy=POLICY)
# Used before its server forks and before gevent patches, as applications do that look something up
# when they start: connections, locks and the thread of the heartbeat are there by then.
idempotency.run("at the start", dict, caller="shop")
application = WSGIIdempotencyMiddleware(charge, idempotency, caller=bearer_token)

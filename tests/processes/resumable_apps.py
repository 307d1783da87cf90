"""Two shops with a resumable route, for servers and workers as processes of their own.

The first attempt says through a pipe that its step is done, and then waits to be killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from flask import Flask, jsonify
from flask import request as flask_request

from retrysafe import AsyncIdempotency, Attempt, Idempotency, Policy, current_attempt
from retrysafe.contrib.fastapi import Retrysafe, idempotent
from retrysafe.http import Resumable, Rule, WSGIIdempotencyMiddleware, resumed_caller
from tests.processes.ledger import note

STORE, LEDGER, PIPE = (os.environ[f"SHOP_{name}"] for name in ("STORE", "LEDGER", "PIPE"))
POLICY = Policy(lease=timedelta(seconds=1), attempt_limit=1_000)
ACCEPTS = Resumable(accepts=True)
TOKENS = {"Bearer t0ken": "acme"}


def tell() -> None:
    """Says that the step is done; the test has waited for it."""
    if PIPE:
        Path(PIPE).write_text("stepped")


def account(request):
    """Whose request it is: the account behind the token."""
    return TOKENS.get(request.headers.get("Authorization", ""))


def charge(number: int) -> str:
    note(LEDGER, "charge", number)
    return f"charge-{number}"


def place(attempt: Attempt, number: int, response: object) -> None:
    """Writes an order in the transaction of its outcome: once, whatever is killed when."""
    file = STORE.removeprefix("sqlite:///")
    with closing(sqlite3.connect(file, isolation_level=None, timeout=30)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders VALUES (?)", (number,))
        attempt.complete_in(connection, response)
        connection.execute("COMMIT")


# FastAPI.

retrysafe = Retrysafe(AsyncIdempotency(STORE, policy=POLICY), caller=account)


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with retrysafe.lifespan(app):
        yield {"till": "till-1"}


app = FastAPI(lifespan=lifespan)
retrysafe.install(app)


def authenticated(request: Request) -> str:
    who = resumed_caller(request) or TOKENS.get(request.headers.get("authorization", ""))
    if who is None:
        raise HTTPException(401)
    return str(who)


@app.post("/charges/{number}", status_code=201)
async def charge_card(
    number: int,
    request: Request,
    who: Annotated[str, Depends(authenticated)],
    attempt: Annotated[Attempt, idempotent(resumable=ACCEPTS)],
) -> dict[str, str]:
    made = await attempt.step("charge", charge, number)
    if attempt.number == 1 and PIPE:
        tell()
        await asyncio.Event().wait()
    return {"charge": made, "who": who, "till": request.state.till}


@app.post("/orders/{number}", status_code=201)
async def place_order(
    number: int, attempt: Annotated[Attempt, idempotent(resumable=ACCEPTS)]
) -> JSONResponse:
    await asyncio.sleep(random.uniform(0, 0.1))
    response = JSONResponse({"order": number, "attempt": attempt.number}, 201)
    place(attempt, number, response)
    return response


# Flask.

shop = Flask(__name__)


@shop.before_request
def authenticate():
    if resumed_caller(flask_request) is None and account(flask_request) is None:
        return "who are you?", 401
    return None


@shop.post("/charges/<int:number>")
def charge_card_in_thread(number: int):
    attempt = current_attempt()
    made = attempt.step("charge", charge, number)
    if attempt.number == 1 and PIPE:
        tell()
        threading.Event().wait()
    who = resumed_caller(flask_request) or account(flask_request)
    return jsonify({"charge": made, "who": who, "till": "till-1"}), 201


@shop.post("/orders/<int:number>")
def place_order_in_thread(number: int):
    attempt = current_attempt()
    time.sleep(random.uniform(0, 0.1))
    response = shop.make_response(({"order": number, "attempt": attempt.number}, 201))
    place(attempt, number, response)
    return response


threads = WSGIIdempotencyMiddleware(
    shop,
    Idempotency(STORE, policy=POLICY),
    caller=account,
    rules=[
        Rule(path="/charges/{number}", resumable=ACCEPTS),
        Rule(path="/orders/{number}", resumable=ACCEPTS),
    ],
)

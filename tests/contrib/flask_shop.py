"""A shop in Flask: one view for each thing that a view may do."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

from flask import (
    Blueprint,
    Flask,
    Response,
    abort,
    g,
    jsonify,
    request,
    send_file,
    stream_with_context,
)
from flask.views import MethodView

from retrysafe import FOREVER, Policy, current_attempt
from retrysafe.contrib.flask import Retrysafe
from retrysafe.http import FieldsKey, Streaming

retrysafe = Retrysafe()
refunds = Blueprint("refunds", __name__)


class Declined(Exception):
    """Answered with 402 by an error handler."""


@dataclass
class Till:
    """What the views did, and where they stop for a test."""

    path: Path | None = None
    runs: list[Any] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    error: Exception | None = None
    started: threading.Event | None = None
    go_on: threading.Event = field(default_factory=threading.Event)

    def note(self, what: Any) -> int:
        self.runs.append(what)
        if self.started is not None:
            self.started.set()
            assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        return len(self.runs)

    def orders(self) -> list[str]:
        with closing(sqlite3.connect(self.path)) as connection:
            return [name for (name,) in connection.execute("SELECT name FROM orders")]


@refunds.post("/refunds/<int:number>")
@retrysafe.idempotent(policy=Policy(active_window=timedelta(days=7)))
def refund(number):
    return {"refund": number, "run": g.till.note(number)}, 201


@refunds.get("/refunds/<int:number>")
@retrysafe.idempotent()
def read_refund(number):
    return {"refund": number}


def make_app(till: Till) -> Flask:
    """The application without its protection, as a factory makes it."""
    app = Flask(__name__)

    @app.before_request
    def open_till():
        g.till = till
        g.account = request.headers.get("X-Account")
        till.order.append("before")

    @app.after_request
    def sign(response):
        till.order.append("after")
        response.headers["X-Served-By"] = f"shop-{len(till.order)}"
        response.set_cookie("seen", "1")
        return response

    @app.teardown_request
    def close_till(error):
        till.order.append("teardown")

    @app.errorhandler(Declined)
    def declined(error):
        return {"declined": True}, 402, {"X-Reason": "credit"}

    @app.post("/charges")
    @retrysafe.idempotent(headers=("X-Total",), wait=True)
    def charge():
        body = request.get_json()
        if body.get("outcome") == "abort":
            till.note("charge")
            abort(409, "closed account")
        assert g.idempotency is current_attempt()
        headers = {"Location": "/charges/1", "X-Total": "7", "X-Request-Id": "r-1"}
        return {"run": till.note("charge"), "amount": body["amount"]}, 201, headers

    @app.post("/async-charges")
    @retrysafe.idempotent()
    async def async_charge():
        assert g.idempotency is current_attempt()
        return {"run": till.note("async")}, 201

    @app.post("/notes")
    @retrysafe.idempotent(required=False)
    def note():
        return {"run": till.note("note"), "is_protected": g.idempotency is not None}

    @app.post("/open")
    @retrysafe.idempotent(protected=False)
    def open_to_all():
        return {"run": till.note("open")}

    @app.post("/orders")
    @retrysafe.idempotent()
    def order():
        body = request.get_json()
        made = ({"order": body["item"]}, body.get("status", 201), {"Location": "/orders/1"})
        till.note("order")
        with closing(sqlite3.connect(till.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO orders VALUES (?)", (body["item"],))
            g.idempotency.complete_in(connection, made)
            if body.get("fails"):
                raise LookupError("the transaction failed")
            connection.execute("COMMIT")
        if body.get("breaks"):
            raise LookupError("after the commit")
        return made

    @contextmanager
    def in_transaction():
        with closing(sqlite3.connect(till.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection

    @app.post("/atomic-orders")
    @retrysafe.idempotent(transaction=in_transaction)
    def atomic_order():
        g.idempotency.connection.execute("INSERT INTO orders VALUES ('pen')")
        till.note("order")
        return {"order": "pen"}, request.get_json()["status"]

    @app.post("/uploads")
    @retrysafe.idempotent()
    def upload():
        file = request.files["file"]
        content = file.read().decode()
        till.note("upload")
        return {"name": file.filename, "content": content, "title": request.form["title"]}

    @app.post("/bodies/<way>")
    @retrysafe.idempotent()
    def body(way):
        till.note("body")
        if way == "data":
            content = request.data
        elif way == "get_data":
            content = request.get_data()
        elif way == "stream":
            content = request.stream.read()
        elif way == "input":
            content = request.environ["wsgi.input"].read()
        else:
            content = repr(request.form.to_dict()).encode()
        return Response(content + b"|%d" % (request.content_length or 0), 201)

    @app.post("/stream")
    @retrysafe.idempotent()
    def stream():
        till.note("stream")

        @stream_with_context
        def chunks():
            for number in range(3):
                yield f"{number} {request.path}\n"

        return chunks()

    @app.post("/events")
    @retrysafe.idempotent()
    def events():
        till.note("events")
        return Response(iter([b"data: 1\n\n"]), mimetype="text/event-stream")

    @app.post("/passing")
    @retrysafe.idempotent(streaming=Streaming.PASS)
    def passing():
        till.note("passing")
        return Response(iter([b"a", b"b"]))

    @app.post("/files")
    @retrysafe.idempotent()
    def file():
        till.note("file")
        return send_file(BytesIO(b"report"), mimetype="text/plain", download_name="r.txt")

    @app.delete("/things/<name>")
    @retrysafe.idempotent(key=FieldsKey("{name}", window=FOREVER))
    def delete(name):
        till.note(name)
        return "", 204

    class Carts(MethodView):
        init_every_request = False
        decorators = (retrysafe.idempotent(),)

        def get(self):
            return jsonify("cart")

        def post(self):
            return {"run": till.note("cart")}

    class Boxes(MethodView):
        @retrysafe.idempotent(name="make a box")
        def post(self, size):
            return {"run": till.note(size)}

        def put(self, size):
            return {"run": till.note(size)}

    app.add_url_rule("/carts", view_func=Carts.as_view("carts"))
    app.add_url_rule("/boxes/<int:size>", view_func=Boxes.as_view("boxes"))

    @app.post("/plain")
    def plain():
        return {"run": till.note("plain")}

    app.register_blueprint(refunds, url_prefix="/v1")
    return app

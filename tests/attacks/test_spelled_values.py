"""One order, written in every way that a framework takes for it.

Attacked: natural keys. `/orders/07/cancel`, `/+7/`, `/7.0/` and `"7"` in a body are order 7 to an
endpoint that declares an int; a key made of the text would cancel it once for every spelling.

What must hold: whatever the framework makes of a request, an order is cancelled once. Another
spelling is the same key, and so another request under it (422), or is refused (400).
"""

from __future__ import annotations

import asyncio
import json
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import Path as FilePath
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
from fastapi import Body, Depends, FastAPI, Path
from flask import Flask
from litestar import Litestar, post
from litestar.params import FromPath
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from werkzeug.routing import BaseConverter

from retrysafe import FOREVER, GLOBAL, AsyncIdempotency, Idempotency, InvalidInput
from retrysafe.contrib.fastapi import Retrysafe, idempotent
from retrysafe.contrib.flask import Retrysafe as FlaskRetrysafe
from retrysafe.contrib.litestar import RetrysafePlugin
from retrysafe.contrib.litestar import idempotent as litestar_idempotent
from retrysafe.errors import FingerprintImpossible, KeyReused
from retrysafe.http import FieldsKey, IdempotencyMiddleware, Rule

SPELLINGS = (
    "7",
    "7",
    "07",
    "007",
    "+7",
    "%207",
    "7%20",
    "7.0",
    "7e0",
    "%EF%BC%97",
    "%D9%A7",
)
ID = "0189f7ea-aba0-7c33-ab1f-7fc6ca9b5e2a"


class Size(Enum):
    LARGE = "l"


def order_of(number: int) -> int:
    """A dependency that takes the parameter of the path in the endpoint's place."""
    return number


def ask(app, idem, asked):
    """The statuses of requests that come one after the other: paths, and bodies as JSON."""

    async def whole():
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return [(await client.post(path, json=body)).status_code for path, body in asked]
        finally:
            await idem.close()

    return asyncio.run(whole())


def fastapi_app(url: str = "memory://"):
    app, idem = FastAPI(), AsyncIdempotency(url)
    Retrysafe(idem, caller=GLOBAL).install(app)
    return app, idem


def test_a_converted_parameter_of_fastapi_is_one_value(database_url):
    """The key is made before FastAPI calls the endpoint, of what the endpoint will get."""
    app, idem = fastapi_app(database_url)
    runs = []

    @app.post("/{order}", dependencies=[idempotent(key=FieldsKey("{order}", window=FOREVER))])
    async def cancel(order: int) -> None:
        runs.append(order)

    statuses = ask(app, idem, [(f"/{text}", {}) for text in SPELLINGS])
    assert runs == [7]
    assert statuses[:2] == [200, 200]
    assert set(statuses[2:]) == {400, 422}


def test_a_field_of_a_body_is_one_value(database_url):
    """pydantic makes 1 of all of these, where it takes them."""
    app, idem = fastapi_app(database_url)
    runs = []

    @app.post("/", dependencies=[idempotent(key=FieldsKey("/order", window=FOREVER))])
    async def pay(order: Annotated[int, Body(embed=True)]) -> None:
        runs.append(order)

    values = (1, 1, 1.0, "1", "01", " 1", "+1", "1.0", "1\n", True, "true")
    statuses = ask(app, idem, [("/", {"order": value}) for value in values])
    assert (runs, statuses[:3]) == ([1], [200, 200, 200])
    assert set(statuses[3:]) == {400, 422}


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [
        (UUID, [ID, ID.upper(), ID.replace("-", ""), f"urn:uuid:{ID}"]),
        (Decimal, ["9.5", "9.50", "09.5", "95e-1"]),
        (float, ["9.5", "9.50", "95e-1"]),
        (date, ["2026-01-31", "2026-01-31T00:00:00", "1769817600"]),
        (Size, ["l"]),
        (Annotated[int, Path(ge=1)], ["7", "07"]),
        (str, ["c1"]),
    ],
)
def test_every_type_of_fastapi_is_one_value(kind, spellings):
    app, idem = fastapi_app()
    runs = []
    source = FieldsKey("{value}", window=FOREVER)

    async def endpoint(value: Any) -> None:
        runs.append(value)

    endpoint.__annotations__["value"] = kind
    app.post("/{value}", dependencies=[idempotent(key=source)])(endpoint)
    asked = [(f"/{text}", {}) for text in [spellings[0], *spellings]]
    statuses = ask(app, idem, asked)
    assert len(runs) == 1
    assert statuses[:2] == [200, 200]


def test_a_parameter_that_a_dependency_converts_is_one_value():
    """Also where the endpoint itself does not take it."""
    app, idem = fastapi_app()
    runs = []
    once = idempotent(key=FieldsKey("{number}", window=FOREVER))

    @app.post("/a/{number}", dependencies=[once])
    async def by_dependency(order: Annotated[int, Depends(order_of)]) -> None:
        runs.append(order)

    statuses = ask(app, idem, [("/a/7", {}), ("/a/07", {}), ("/a/x", {})])
    assert (runs, statuses) == ([7], [200, 422, 400])


def test_text_in_front_of_a_converter_is_taken_in_its_plainest_form():
    """A middleware sees the path as text: `{id:int}` further in makes 7 of 007."""
    runs = []

    async def cancel(request):
        runs.append(request.path_params["id"])
        return JSONResponse({})

    idem = AsyncIdempotency("memory://")
    rule = Rule(path="/{id}", key=FieldsKey("{id}", window=FOREVER))
    app = Starlette(routes=[Route("/{id:int}", cancel, methods=["POST"])])
    app = IdempotencyMiddleware(app, idem, caller=GLOBAL, rules=[rule])
    statuses = ask(app, idem, [(f"/{text}", {}) for text in SPELLINGS])
    assert (runs, statuses) == ([7], [200, 200, *[400] * 9])


def test_a_path_of_litestar_is_one_value(database_url):
    """Litestar gives a text that begins with a slash, and a handler has a `Path` of it."""
    idem, runs = AsyncIdempotency(database_url), []
    by_text, by_number = (
        litestar_idempotent(key=FieldsKey(field, window=FOREVER))
        for field in ("{order}", "{order:int}")
    )

    @post("/{order:path}", status_code=200, guards=[by_text])
    async def cancel(order: FromPath[FilePath]) -> None:
        runs.append(int(order.name))

    @post("/typed/{order:path}", status_code=200, guards=[by_number])
    async def cancel_typed(order: FromPath[FilePath]) -> None:
        runs.append(int(order.name))

    plugin = RetrysafePlugin(idem, caller=GLOBAL)
    asked = [(f"/{text}", {}) for text in (*SPELLINGS, "7/", "%2E/7", "7/%2E")]
    asked += [(f"/typed/{text}", {}) for text in ("7", "07", "+7", "7.0")]
    statuses = ask(Litestar([cancel, cancel_typed], plugins=[plugin]), idem, asked)
    assert runs == [7, 7]
    assert statuses == [200, 200, *[400] * 9, 200, 422, 422, 200, 422, 422, 400]


def test_a_number_of_a_function_is_one_value(database_url):
    """A column gives Decimals or 1 for true, where other code has an int or True."""
    runs = []
    with Idempotency(database_url, caller="c") as idem:

        @idem.once(key="invoice", window=FOREVER)
        def pay(invoice):
            runs.append(invoice)

        for number in (1, Decimal(1), Decimal("1.00")):
            pay(number)
        with pytest.raises(KeyReused):
            pay(True)  # The key is that of 1, and the request another one.
        with pytest.raises(FingerprintImpossible, match="no floats"):
            pay(1.0)
        pay("1")
    assert runs == [1, "1"]


class Loading(BaseConverter):
    """Loads an order, as some converters do."""

    def to_python(self, value):
        return Exception(f"order {value}")


def test_what_a_converter_loads_is_no_part_of_a_key():
    """Its text would be another one after the run, or in another process."""
    app = Flask(__name__)
    app.testing = True
    app.url_map.converters["order"] = Loading
    retrysafe, runs = FlaskRetrysafe(), []
    with Idempotency("memory://") as idem:
        retrysafe.init_app(app, idem, caller=GLOBAL)

        @app.post("/<order:order>")
        @retrysafe.idempotent(key=FieldsKey("{order}", window=FOREVER))
        def cancel(order):
            runs.append(order)
            return ""

        with pytest.raises(InvalidInput, match=r"made from \{order\}, .* gives as a Exception"):
            app.test_client().post("/7", data=json.dumps({}))
    assert runs == []

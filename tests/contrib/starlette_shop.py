"""The shop in Starlette."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from retrysafe.contrib.starlette import Idempotent, Retrysafe, idempotent
from tests.contrib.shops import REFUNDS, Declined, Till


def make_app(retrysafe: Retrysafe, till: Till, **options: Any) -> Starlette:
    @idempotent()
    async def charge(request):
        body = await request.json()
        await till.hold()
        status, content = till.charge(request.state.idempotency, body)
        headers = {"Location": "/charges/1"}
        task = BackgroundTask(till.noted)
        return JSONResponse(content, status, headers=headers, background=task)

    @idempotent()
    def sync_charge(request):
        body = {"amount": 7}
        status, content = till.charge(request.state.idempotency, body)
        return JSONResponse(content, status)

    @idempotent(required=False)
    async def note(request):
        till.runs.append("note")
        return JSONResponse({"run": len(till.runs)}, 201)

    async def open_to_all(request):
        till.runs.append("open")
        return JSONResponse({"run": len(till.runs)}, 201)

    class Refunds(HTTPEndpoint):
        async def get(self, request):
            return JSONResponse({"id": request.path_params["number"]})

        async def post(self, request):
            till.runs.append("refund")
            return JSONResponse({"run": len(till.runs)}, 201)

    @idempotent()
    async def stream(request):
        till.runs.append("stream")

        async def chunks():
            for number in range(3):
                yield f"{number} of run {len(till.runs)}\n"

        return StreamingResponse(chunks(), 201, media_type="text/plain")

    @idempotent()
    async def events(request):
        till.runs.append("events")
        return StreamingResponse(iter(["data: 1\n\n"]), media_type="text/event-stream")

    @idempotent()
    async def order(request):
        response = JSONResponse({"order": "pen"}, 201, headers={"Location": "/orders/1"})
        return till.order(request.state.idempotency, response)

    @idempotent()
    def sync_order(request):
        response = JSONResponse({"order": "pen"}, 201, headers={"Location": "/orders/1"})
        return till.order(request.state.idempotency, response)

    @idempotent(transaction=till.transaction)
    async def atomic_order(request):
        return JSONResponse(till.place(request.state.idempotency), 201)

    async def plain(request):
        till.runs.append("plain")
        return JSONResponse({"run": len(till.runs)}, 201)

    routes = [
        Route("/charges", charge, methods=["POST"]),
        Route("/sync-charges", sync_charge, methods=["POST"]),
        Route("/notes", note, methods=["POST"]),
        Route(
            "/open",
            open_to_all,
            methods=["POST"],
            middleware=[Middleware(Idempotent, protected=False)],
        ),
        Mount(
            "/v1",
            routes=[
                Route(
                    "/refunds/{number:int}",
                    Refunds,
                    middleware=[Middleware(Idempotent, policy=REFUNDS)],
                )
            ],
        ),
        Route("/stream", stream, methods=["POST"]),
        Route("/events", events, methods=["POST"]),
        Route("/orders", order, methods=["POST"]),
        Route("/sync-orders", sync_order, methods=["POST"]),
        Route("/atomic-orders", atomic_order, methods=["POST"]),
        Route("/plain", plain, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=retrysafe.lifespan,
        exception_handlers={Declined: lambda request, error: JSONResponse({"declined": True}, 402)},
        **options,
    )
    retrysafe.install(app)
    return app

"""The shop in FastAPI."""

from typing import Annotated, Any

from fastapi import APIRouter, BackgroundTasks, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from retrysafe import Attempt
from retrysafe.contrib.fastapi import IdempotentRoute, Retrysafe, idempotent
from retrysafe.http import AtomicAttempt
from tests.contrib.shops import REFUNDS, Declined, Till


class Charge(BaseModel):
    amount: int = 7
    outcome: str = "ok"


def make_app(retrysafe: Retrysafe, till: Till, **options: Any) -> FastAPI:
    app = FastAPI(lifespan=retrysafe.lifespan, **options)
    retrysafe.install(app)

    @app.exception_handler(Declined)
    async def declined(request, error):
        return JSONResponse({"declined": True}, 402)

    @app.post("/charges", status_code=201)
    async def charge(
        charge: Charge,
        attempt: Annotated[Attempt, idempotent()],
        request: Request,
        response: Response,
        tasks: BackgroundTasks,
    ):
        """Charges a card."""
        await till.hold()
        assert request.state.idempotency is attempt
        response.status_code, content = till.charge(attempt, charge.model_dump())
        response.headers["Location"] = "/charges/1"
        tasks.add_task(till.noted)
        return content

    @app.post("/sync-charges", status_code=201)
    def sync_charge(charge: Charge, attempt: Annotated[Attempt, idempotent()]):
        return till.charge(attempt, charge.model_dump())[1]

    @app.post("/notes", status_code=201, dependencies=[idempotent(required=False)])
    async def note():
        till.runs.append("note")
        return {"run": len(till.runs)}

    guarded = APIRouter(route_class=IdempotentRoute, dependencies=[idempotent()])

    @guarded.post("/open", status_code=201, dependencies=[idempotent(protected=False)])
    async def open_to_all():
        till.runs.append("open")
        return {"run": len(till.runs)}

    refunds = APIRouter(route_class=IdempotentRoute, dependencies=[idempotent(policy=REFUNDS)])

    @refunds.get("/refunds/{number}")
    async def refund(number: int):
        return {"id": number}

    @refunds.post("/refunds/{number}", status_code=201)
    async def make_refund(number: int):
        till.runs.append("refund")
        return {"run": len(till.runs)}

    @app.post("/stream", dependencies=[idempotent()])
    async def stream():
        till.runs.append("stream")

        async def chunks():
            for number in range(3):
                yield f"{number} of run {len(till.runs)}\n"

        return StreamingResponse(chunks(), 201, media_type="text/plain")

    @app.post("/events", dependencies=[idempotent()])
    async def events():
        till.runs.append("events")
        return StreamingResponse(iter(["data: 1\n\n"]), media_type="text/event-stream")

    @app.post("/orders")
    async def order(attempt: Annotated[Attempt, idempotent()]):
        response = JSONResponse({"order": "pen"}, 201, headers={"Location": "/orders/1"})
        return till.order(attempt, response)

    @app.post("/sync-orders")
    def sync_order(attempt: Annotated[Attempt, idempotent()]):
        response = JSONResponse({"order": "pen"}, 201, headers={"Location": "/orders/1"})
        return till.order(attempt, response)

    @app.post("/atomic-orders", status_code=201)
    async def atomic_order(
        attempt: Annotated[AtomicAttempt, idempotent(transaction=till.transaction)],
    ):
        return till.place(attempt)

    @app.post("/plain", status_code=201)
    async def plain():
        till.runs.append("plain")
        return {"run": len(till.runs)}

    app.include_router(guarded)
    app.include_router(refunds, prefix="/v1")
    return app

"""The shop in Litestar."""

from typing import Any, ClassVar

from litestar import Controller, Litestar, Request, Response, Router, get, post
from litestar.background_tasks import BackgroundTask
from litestar.params import FromPath, JSONBody
from litestar.response import ServerSentEvent, Stream

from retrysafe.contrib.litestar import RetrysafePlugin, idempotent
from tests.contrib.shops import REFUNDS, Declined, Till


def declined(request: Request, error: Exception) -> Response:
    return Response({"declined": True}, status_code=402)


def make_app(retrysafe: RetrysafePlugin, till: Till, **options: Any) -> Litestar:
    @post("/charges", guards=[idempotent()])
    async def charge(request: Request, data: JSONBody[dict[str, Any]]) -> Response[dict[str, Any]]:
        """Charges a card."""
        await till.hold()
        status, content = till.charge(request.state.idempotency, {"amount": 7, **data})
        return Response(
            content,
            status_code=status,
            headers={"Location": "/charges/1"},
            background=BackgroundTask(till.noted),
        )

    @post("/sync-charges", guards=[idempotent()], sync_to_thread=True)
    def sync_charge(request: Request) -> dict[str, Any]:
        return till.charge(request.state.idempotency, {"amount": 7})[1]

    @post("/notes", guards=[idempotent(required=False)])
    async def note() -> dict[str, int]:
        till.runs.append("note")
        return {"run": len(till.runs)}

    @post("/open", guards=[idempotent(protected=False)])
    async def open_to_all() -> dict[str, int]:
        till.runs.append("open")
        return {"run": len(till.runs)}

    class Refunds(Controller):
        path = "/refunds"
        guards: ClassVar = [idempotent(policy=REFUNDS)]

        @get("/{number:int}")
        async def refund(self, number: FromPath[int]) -> dict[str, int]:
            return {"id": number}

        @post("/{number:int}")
        async def make_refund(self, number: FromPath[int]) -> dict[str, int]:
            till.runs.append("refund")
            return {"run": len(till.runs)}

    @post("/stream", guards=[idempotent()])
    async def stream() -> Stream:
        till.runs.append("stream")

        async def chunks():
            for number in range(3):
                yield f"{number} of run {len(till.runs)}\n"

        return Stream(chunks(), media_type="text/plain", status_code=201)

    @post("/events", guards=[idempotent()])
    async def events() -> ServerSentEvent:
        till.runs.append("events")
        return ServerSentEvent(iter(["1"]))

    @post("/orders", guards=[idempotent()])
    async def order(request: Request) -> Response[dict[str, str]]:
        response = Response({"order": "pen"}, headers={"Location": "/orders/1"})
        return till.order(request.state.idempotency, response)

    @post("/sync-orders", guards=[idempotent()], sync_to_thread=True)
    def sync_order(request: Request) -> dict[str, str]:
        content = {"order": "pen"}
        till.order(request.state.idempotency, content)
        return content

    @post("/atomic-orders", guards=[idempotent(transaction=till.transaction)])
    async def atomic_order(request: Request) -> dict[str, int]:
        return till.place(request.state.idempotency)

    @post("/plain")
    async def plain() -> dict[str, int]:
        till.runs.append("plain")
        return {"run": len(till.runs)}

    return Litestar(
        [
            charge,
            sync_charge,
            note,
            Router("/", route_handlers=[open_to_all], guards=[idempotent()]),
            Router("/v1", route_handlers=[Refunds]),
            stream,
            events,
            order,
            sync_order,
            atomic_order,
            plain,
        ],
        plugins=[retrysafe],
        exception_handlers={Declined: declined},
        **options,
    )

"""A shop in Django: its settings, its views and its URLs."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import django
from django.conf import settings

if not settings.configured:
    settings.configure(DATABASES={"default": {}})
    django.setup()

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import connections, transaction
from django.http import (
    FileResponse,
    Http404,
    HttpResponse,
    JsonResponse,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import SimpleTemplateResponse
from django.urls import include, path, re_path
from django.utils.asyncio import async_unsafe
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.http import require_POST

from retrysafe import FOREVER, Policy, current_attempt
from retrysafe.contrib.django.decorators import idempotent
from retrysafe.http import ACCEPT, FieldsKey, KeyUse, Streaming

SETTINGS = {
    "ROOT_URLCONF": __name__,
    "ALLOWED_HOSTS": ["*"],
    "DEBUG": False,
    "TEMPLATES": [{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
    "MIDDLEWARE": [f"{__name__}.signing", f"{__name__}.AccountMiddleware"],
    # The usual one needs the tables of Django's own users.
    "REST_FRAMEWORK": {"UNAUTHENTICATED_USER": None},
    "LOGGING_CONFIG": None,
}


@dataclass
class Till:
    """What the views did, and where they stop for a test."""

    runs: list[Any] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    error: Exception | None = None
    started: threading.Event | None = None
    go_on: threading.Event = field(default_factory=threading.Event)
    alias: str = ""
    opened: io.BytesIO | None = None
    atomic_blocks: list[int] = field(default_factory=list)
    # Of streams without an end: how many pieces were made, where they fail, how often closed.
    pieces: int = 0
    piece: bytes = b"x" * 100
    # The stream itself, so that it ends only when somebody closes it.
    stream: Any = None
    last_piece: int | None = None
    closed: int = 0

    def note(self, what: Any) -> int:
        self.runs.append(what)
        if self.started is not None:
            self.started.set()
            assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        return len(self.runs)

    def write(self, name: str) -> None:
        with connections[self.alias].cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s)", [name])

    def orders(self) -> list[str]:
        with connections[self.alias].cursor() as cursor:
            cursor.execute("SELECT name FROM orders")
            return [name for (name,) in cursor.fetchall()]


till = Till()


def signing(get_response):
    """A middleware that changes every response, replays included."""

    def sign(request):
        till.order.append("in")
        response = get_response(request)
        till.order.append("out")
        response["X-Served-By"] = f"shop-{len(till.order)}"
        response.set_cookie("seen", "1")
        return response

    return sign


@async_unsafe
def loaded_user(token):
    """Reads the database, which Django forbids on an event loop."""
    return SimpleNamespace(pk=token, is_authenticated=bool(token))


class AccountMiddleware:
    """Authenticates as Django does: the user is loaded when somebody looks at it."""

    sync_capable = async_capable = True

    def __init__(self, get_response):
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request):
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        request.user = SimpleLazyObject(lambda: loaded_user(token))
        return self.get_response(request)


# Views.


@require_POST
@idempotent(headers=("X-Total",), wait=True)
def charge(request):
    assert request.idempotency is current_attempt()
    headers = {"Location": "/charges/1", "X-Total": "7", "X-Request-Id": "r-1"}
    response = JsonResponse({"run": till.note("charge")}, status=201, headers=headers)
    response.set_cookie("cart", "empty")
    return response


@idempotent(wait=True)
async def async_charge(request):
    assert request.idempotency is current_attempt()
    run = await asyncio.to_thread(till.note, "async")
    return JsonResponse({"run": run}, status=201, headers={"Location": "/charges/1"})


@idempotent(in_flight=ACCEPT)
def job(request):
    return JsonResponse({"run": till.note("job")}, status=201)


@idempotent(in_flight=ACCEPT)
async def async_job(request):
    return JsonResponse({"run": await asyncio.to_thread(till.note, "job")}, status=201)


@idempotent(key=KeyUse.OPTIONAL)
def note(request):
    return JsonResponse({"run": till.note("note"), "protected": bool(request.idempotency)})


@idempotent(key=KeyUse.OPTIONAL)
async def async_note(request):
    return JsonResponse({"run": till.note("note"), "protected": bool(request.idempotency)})


@idempotent(key=KeyUse.OFF)
def open_to_all(request):
    return JsonResponse({"run": till.note("open"), "protected": bool(request.idempotency)})


def plain(request):
    return JsonResponse({"run": till.note("plain")})


async def async_plain(request):
    return JsonResponse({"run": till.note("plain")})


RAISED = {"missing": Http404, "denied": PermissionDenied, "bad": BadRequest, "lost": LookupError}


@idempotent()
def raising(request, what):
    till.note(what)
    raise RAISED[what](what)


@idempotent()
async def async_raising(request, what):
    till.note(what)
    raise RAISED[what](what)


@idempotent()
def upload(request):
    file = request.FILES["file"]
    till.note("upload")
    return JsonResponse(
        {"name": file.name, "content": file.read().decode(), "title": request.POST["title"]}
    )


def peeking(view):
    """Looks into the file, and leaves it there."""

    def peek(request):
        request.FILES["file"].read(2)
        return view(request)

    return peek


@csrf_protect
@peeking
@idempotent()
def guarded_upload(request):
    return upload.__wrapped__(request)


def greedy(request):
    """Reads the request as a file before it calls the protected view."""
    request.read()
    return body(request, "body")


@idempotent()
def body(request, way):
    till.note("body")
    content = {"body": lambda: request.body, "read": request.read}.get(
        way, lambda: repr(dict(request.POST)).encode()
    )()
    return HttpResponse(content, status=201)


@idempotent()
def stream(request):
    till.note("stream")
    return StreamingHttpResponse((f"{number}\n" for number in range(3)), status=201)


async def numbers():
    for number in range(3):
        await asyncio.sleep(0)
        yield f"{number}\n".encode()


@idempotent()
async def async_stream(request):
    till.note("stream")
    return StreamingHttpResponse(numbers(), status=201)


def _counted(last=None):
    while True:
        till.pieces += 1
        # Without a limit this would take all memory.
        assert till.pieces < 10_000
        if till.pieces == last:
            raise LookupError("cursor")
        yield till.piece


def endless_pieces(last=None):
    till.closed = 0
    try:
        yield from _counted(last)
    finally:
        till.closed += 1


async def async_endless_pieces(last=None):
    till.closed = 0
    # Something of the loop that the stream began on, which no other loop can wait for.
    ready = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(ready.set_result, None)
    try:
        for piece in _counted(last):
            await asyncio.sleep(0)
            await ready
            yield piece
    finally:
        till.closed += 1


BRIEF = Policy(outcome_limit_bytes=1_000)


@idempotent(policy=BRIEF)
def endless(request):
    till.note("endless")
    return StreamingHttpResponse(endless_pieces(till.last_piece), status=201)


@idempotent(policy=BRIEF)
async def async_endless(request):
    till.note("endless")
    return StreamingHttpResponse(async_endless_pieces(till.last_piece), status=201)


@idempotent()
def endless_events(request):
    till.note("endless")
    return StreamingHttpResponse(endless_pieces(), content_type="text/event-stream")


@idempotent()
async def async_endless_events(request):
    till.note("endless")
    return StreamingHttpResponse(async_endless_pieces(), content_type="text/event-stream")


@idempotent()
def file(request):
    till.note("file")
    till.opened = io.BytesIO(b"report")
    response = FileResponse(till.opened, filename="r.txt", as_attachment=True)
    response.set_cookie("file", "1")
    return response


@idempotent()
def events(request):
    till.note("events")
    return StreamingHttpResponse(iter([b"data: 1\n\n"]), content_type="text/event-stream")


@idempotent()
async def async_events(request):
    till.note("events")
    return StreamingHttpResponse(numbers(), content_type="text/event-stream")


@idempotent(streaming=Streaming.PASS)
def passing(request):
    till.note("passing")
    return HttpResponse(b"ab")


@idempotent()
def template(request):
    till.note("template")
    text = engines["django"].from_string("Hello {{ name }}")
    return SimpleTemplateResponse(text, {"name": "pen"}, status=201)


@idempotent()
async def async_template(request):
    return template.__wrapped__(request)


@idempotent(source=FieldsKey("{name}", window=FOREVER))
def delete(request, name):
    till.note(name)
    response = HttpResponse(status=204)
    del response["Content-Type"]
    return response


@idempotent(source=FieldsKey("{number}", window=FOREVER))
def misnamed(request, name, number=None):
    till.note(name)
    return HttpResponse(status=204)


@idempotent(policy=Policy(active_window=timedelta(days=7)))
def refund(request, number):
    return JsonResponse({"refund": number, "run": till.note(number)}, status=201)


# Transactions.


def order_in_transaction(request):
    body = json.loads(request.body)
    response = JsonResponse({"order": body["item"]}, status=body.get("status", 201))
    with transaction.atomic(using=till.alias):
        till.write(body["item"])
        request.idempotency.complete_in(connections[till.alias], response)
        if body.get("fails"):
            raise LookupError("the transaction failed")
    return response


@idempotent()
def order(request):
    till.note("order")
    return order_in_transaction(request)


@idempotent()
async def async_order(request):
    till.note("order")
    return await sync_to_async(order_in_transaction)(request)


@contextmanager
def in_transaction():
    with transaction.atomic(using=till.alias):
        yield connections[till.alias]


@idempotent(transaction=in_transaction)
def atomic_order(request):
    with request.idempotency.connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES ('pen')")
    till.note("order")
    return JsonResponse({"order": "pen"}, status=json.loads(request.body)["status"])


def blocks_around() -> int:
    return len(connections[till.alias].atomic_blocks)


def hooked(request):
    """Writes an order, whose hook fails after the commit."""
    till.note("hooked")

    def hook():
        raise ConnectionError("the mail server is down")

    with transaction.atomic(using=till.alias):
        till.write("pen")
        transaction.on_commit(hook, using=till.alias)
    return JsonResponse({"order": "pen"}, status=201)


@idempotent()
def hooked_and_told(request):
    """The same in other words."""
    try:
        return hooked(request)
    except ConnectionError as error:
        raise LookupError("no mail server") from error


@idempotent()
def writing(request):
    till.atomic_blocks.append(blocks_around())
    till.write("pen")
    till.note("writing")
    return JsonResponse({"orders": len(till.orders())}, status=201)


@transaction.non_atomic_requests(using="shop")
@idempotent()
def writing_alone(request):
    return writing.__wrapped__(request)


@idempotent()
@transaction.non_atomic_requests(using="shop")
def writing_alone_inside(request):
    return writing.__wrapped__(request)


def misplaced(request):
    with transaction.atomic(using=till.alias):
        return writing(request)


# Classes.


@method_decorator(idempotent(), name="dispatch")
class Carts(View):
    def get(self, request):
        till.atomic_blocks.append(blocks_around() if till.alias else 0)
        return JsonResponse({"protected": bool(request.idempotency)})

    def post(self, request):
        if till.alias:
            till.atomic_blocks.append(blocks_around())
        return JsonResponse({"run": till.note("cart")})


class Boxes(View):
    @method_decorator(idempotent(name="make a box"))
    def post(self, request, size):
        return JsonResponse({"run": till.note(size)})

    def put(self, request, size):
        return JsonResponse({"run": till.note(size)})


@method_decorator(idempotent(), name="dispatch")
class AsyncCarts(View):
    async def get(self, request):
        return JsonResponse({"protected": bool(request.idempotency)})

    async def post(self, request):
        assert request.idempotency is current_attempt()
        return JsonResponse({"run": till.note("cart")})


class AsyncBoxes(View):
    @method_decorator(idempotent())
    async def post(self, request):
        return JsonResponse({"run": till.note("box")})


nested = [
    path("refunds/<int:number>", refund),
    re_path(r"^old-refunds/(?P<number>[0-9]{2})$", refund),
]
urlpatterns = [
    path("charges", charge),
    path("async-charges", async_charge),
    path("jobs", job),
    path("async-jobs", async_job),
    path("notes", note),
    path("async-notes", async_note),
    path("open", open_to_all),
    path("plain", plain),
    path("async-plain", async_plain),
    path("raising/<what>", raising),
    path("async-raising/<what>", async_raising),
    path("uploads", upload),
    path("guarded-uploads", guarded_upload),
    path("bodies/<way>", body),
    path("greedy", greedy),
    path("stream", stream),
    path("async-stream", async_stream),
    path("endless", endless),
    path("async-endless", async_endless),
    path("endless-events", endless_events),
    path("async-endless-events", async_endless_events),
    path("files", file),
    path("events", events),
    path("async-events", async_events),
    path("passing", passing),
    path("template", template),
    path("async-template", async_template),
    path("things/<name>", delete),
    path("misnamed/<name>", misnamed),
    path("named-so/<name>", misnamed, {"number": 7}),
    path("orders", order),
    path("async-orders", async_order),
    path("atomic-orders", atomic_order),
    path("hooked", idempotent()(hooked)),
    path("hooked-by-rule", hooked),
    path("hooked-and-told", hooked_and_told),
    path("writing", writing),
    path("writing-alone", writing_alone),
    path("writing-alone-inside", writing_alone_inside),
    path("misplaced", misplaced),
    path("carts", Carts.as_view()),
    path("boxes/<int:size>", Boxes.as_view()),
    path("async-carts", AsyncCarts.as_view()),
    path("async-boxes", AsyncBoxes.as_view()),
    path("exempt", csrf_exempt(charge)),
    path("v1/", include(nested)),
    path("api/", include("tests.contrib.django_shop_api")),
]

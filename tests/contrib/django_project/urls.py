"""Views in each of the ways that a project writes them."""

from contextlib import contextmanager

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.http import JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from rest_framework.response import Response
from rest_framework.views import APIView

from retrysafe.contrib.django.decorators import idempotent
from tests.contrib.django_project.shop.models import Order


@idempotent()
def plain(request):
    Order.objects.create(item="plain")
    if "fails" in request.headers:
        raise RuntimeError("after the write")
    return JsonResponse({"placed": "plain"}, status=201)


@idempotent()
def completed(request):
    response = JsonResponse({"placed": "completed"}, status=201)
    with transaction.atomic():
        Order.objects.create(item="completed")
        request.idempotency.complete_in(connection, response)
        if "fails" in request.headers:
            raise RuntimeError("before the commit")
    return response


@contextmanager
def in_transaction():
    with transaction.atomic():
        yield connection


@idempotent(transaction=in_transaction)
def atomic(request):
    Order.objects.create(item="atomic")
    if "fails" in request.headers:
        raise RuntimeError("before the commit")
    return JsonResponse({"placed": "atomic"}, status=201)


@idempotent()
async def on_loop(request):
    await sync_to_async(Order.objects.create)(item="on_loop")
    return JsonResponse({"placed": "on_loop"}, status=201)


class Rest(APIView):
    @method_decorator(idempotent())
    def post(self, request):
        with transaction.atomic():
            Order.objects.create(item="rest")
            response = Response({"placed": "rest"}, status=201)
            request.idempotency.complete_in(connection, response)
        return response


urlpatterns = [
    path("plain", plain),
    path("completed", completed),
    path("atomic", atomic),
    path("on_loop", on_loop),
    path("rest", transaction.non_atomic_requests(Rest.as_view())),
]

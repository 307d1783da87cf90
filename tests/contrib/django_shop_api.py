"""The shop's views in Django REST framework."""

from __future__ import annotations

from types import SimpleNamespace

from django.db import connections, transaction
from django.urls import path
from django.utils.decorators import method_decorator
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import api_view, authentication_classes, renderer_classes
from rest_framework.exceptions import APIException, ValidationError
from rest_framework.permissions import BasePermission
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from retrysafe import current_attempt
from retrysafe.contrib.django.decorators import idempotent
from tests.contrib import django_shop as shop


class TokenAuthentication(BaseAuthentication):
    """Knows its users by a header that nobody else looks at."""

    def authenticate(self, request):
        token = request.headers.get("X-Token")
        return (SimpleNamespace(pk=token, is_authenticated=True), None) if token else None


class Api:
    """What all views of the shop share; the defaults were read when the framework was imported."""

    authentication_classes = (TokenAuthentication,)
    renderer_classes = (JSONRenderer,)


def api(view):
    """A view function with the same."""
    view = authentication_classes(Api.authentication_classes)(view)
    return api_view(["POST"])(renderer_classes(Api.renderer_classes)(view))


class Declined(APIException):
    status_code = 402
    default_detail = "no credit"


def charged(request):
    if "decline" in request.data:
        shop.till.note("charge")
        raise Declined
    if "invalid" in request.data:
        raise ValidationError({"amount": ["is wrong"]})
    assert request.idempotency is current_attempt()
    run = shop.till.note("charge")
    return Response({"run": run, "amount": request.data["amount"]}, 201, headers={"X-Run": "1"})


@idempotent()
@api
def outside(request):
    return charged(request)


@api
@idempotent()
def inside(request):
    return charged(request)


class Charges(Api, APIView):
    @method_decorator(idempotent())
    def post(self, request):
        return charged(request)


@method_decorator(idempotent(), name="dispatch")
class WholeCharges(Api, APIView):
    def post(self, request):
        return charged(request)


class Looking(BasePermission):
    """Reads the body before the method is called."""

    def has_permission(self, request, view):
        return bool(request.data)


class LookedAt(Api, APIView):
    permission_classes = (Looking,)

    @method_decorator(idempotent())
    def post(self, request):
        return Response({"run": shop.till.note("looked"), "amount": request.data["amount"]})


class Orders(Api, APIView):
    @method_decorator(idempotent())
    def post(self, request):
        shop.till.note("order")
        response = Response({"order": request.data["item"]}, 201)
        with transaction.atomic(using=shop.till.alias):
            shop.till.write(request.data["item"])
            request.idempotency.complete_in(connections[shop.till.alias], response)
        return response


@method_decorator(idempotent(), name="dispatch")
class WholeOrders(Api, APIView):
    def post(self, request):
        return Orders.post.__wrapped__(self, request)


class Refunds(Api, ViewSet):
    @method_decorator(idempotent())
    def create(self, request):
        return Response({"run": shop.till.note("refund")}, 201)

    def destroy(self, request):
        return Response(status=204)


urlpatterns = [
    path("outside", outside),
    path("inside", inside),
    path("charges", Charges.as_view()),
    path("whole-charges", WholeCharges.as_view()),
    path("looked-at", LookedAt.as_view()),
    path("orders", Orders.as_view()),
    path("whole-orders", WholeOrders.as_view()),
    path("refunds", Refunds.as_view({"post": "create", "delete": "destroy"})),
]

"""Whether an application had an endpoint for a request, as far as its framework says so.

Owns the marks that frameworks leave. It matters at a path that is not spelled like its rule's: a
404 of the router frees the key for the right spelling, a 404 of an endpoint is what the endpoint
came to, and freed it would run again. So whatever leaves no mark counts as an endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# What the routers of Starlette and FastAPI, and of Litestar, leave in the scope that they look at.
_ROUTER: Final = "router"
_LITESTAR: Final = "litestar_app"
# What they leave there when they have found where to go.
_ENDPOINTS: Final = ("endpoint", "route", "route_handler")
# Where Flask leaves its request in the environ.
_FLASK: Final = "werkzeug.request"
_MARKS: Final = (_ROUTER, _LITESTAR, *_ENDPOINTS, _FLASK)
# Where integrations say it themselves.
UNSERVED_NAME: Final = "retrysafe.unserved"
_UNKNOWN: Final = object()


def can_tell(host: Mapping[str, Any]) -> bool:
    """Whether the marks will be the application's own; asked before it runs.

    Inside a router that stands further out, nobody could say whose they are.
    """
    return all(mark not in host for mark in _MARKS)


def is_unserved(host: Mapping[str, Any]) -> bool:
    """Whether no endpoint was found for a request; asked when it is answered.

    Only a router that has left its mark in this very scope or environ can say so: a middleware may
    have handed a copy on. Flask's mark is there until the application returns.
    """
    if UNSERVED_NAME in host:
        return bool(host[UNSERVED_NAME])
    if _FLASK in host:
        return getattr(host[_FLASK], "url_rule", _UNKNOWN) is None
    if any(mark in host for mark in _ENDPOINTS):
        return False
    if _ROUTER not in host:
        return _LITESTAR in host
    # One with a default of its own has that for an endpoint.
    router = host[_ROUTER]
    return bool(getattr(router, "default", None) == getattr(router, "not_found", _UNKNOWN))

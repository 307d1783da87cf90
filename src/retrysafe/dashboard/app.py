"""The way of a request through the dashboard: host, access, page or action, headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

from retrysafe.core.ports import Store, Waits
from retrysafe.dashboard import assets
from retrysafe.dashboard.access import (
    COOKIE,
    LOOPBACK_HOSTS,
    SESSION_SECONDS,
    Access,
    TooManyTries,
    is_same_origin,
)
from retrysafe.dashboard.actions import Actions
from retrysafe.dashboard.pages import Pages
from retrysafe.dashboard.rendering import Templates
from retrysafe.dashboard.samples import Samples
from retrysafe.dashboard.views import Shown
from retrysafe.dashboard.web import AsgiDoor, BadRequest, Request, Response, WsgiDoor
from retrysafe.errors import InvalidInput, RetrysafeError, StoreError
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store

# Scripts, styles and pictures come from here and from nowhere else, and no page may be framed.
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Dashboard:
    """Pages about one store, to be mounted in any ASGI or WSGI application.

    Reading needs the token, or a user whom `authorize` names. Acting always needs the token.
    """

    def __init__(
        self,
        store: str | Store,
        *,
        token: str | None = None,
        authorize: Callable[[Any], str | None] | None = None,
        show_bodies: bool = False,
        redact: Sequence[str] = (),
        is_open_on_loopback: bool = False,
    ) -> None:
        """Raises `InvalidInput` when nobody could read it, and for a store that suspends.

        `authorize` gets the ASGI scope or the WSGI environ and returns the user's name, or None.
        `redact` names JSON fields whose values are never shown, at any depth and in any case.
        `is_open_on_loopback` lets everybody read who asks for a loopback host: only for a server
        that listens on the loopback interface alone.
        """
        if token is None and authorize is None and not is_open_on_loopback:
            raise InvalidInput(
                "nobody could read this dashboard: pass token=… with a long random text, or "
                "authorize=… with a function that returns the name of a signed-in user"
            )
        opened = open_store(store, is_async=False) if isinstance(store, str) else store
        if opened.capabilities.waits is Waits.SUSPENDING:
            raise InvalidInput(
                "the dashboard needs a store for threads: pass the store's URL, and the dashboard "
                "opens its own connections"
            )
        self._store = opened
        self._owns_store = isinstance(store, str)
        self._access = Access(token, LOOPBACK_HOSTS if is_open_on_loopback else None)
        self._authorize = authorize
        self._is_open = is_open_on_loopback
        self._templates = Templates()
        shown = Shown(show_bodies, frozenset(name.lower() for name in redact))
        # Pass it in `observers=[…]` of this process's Idempotency: then the overview has a plot.
        self.observer = Samples()
        self._pages = Pages(opened, shown, self.observer)
        self._actions = Actions(opened)
        self.asgi = AsgiDoor(self.respond)
        self.wsgi = WsgiDoor(self.respond)

    def close(self) -> None:
        """Closes the connections that it has opened."""
        if self._owns_store:
            run_sync(self._store.close())

    def respond(self, request: Request) -> Response:
        """The response to a request; raises only what `authorize` raises."""
        try:
            response = self._routed(request)
        except BadRequest as error:
            response = self._problem(request, 400, str(error))
        except TooManyTries:
            response = self._problem(
                request, 429, "There were too many wrong tokens. Wait a minute, then try again."
            )
            response.headers["retry-after"] = "60"
        except StoreError as error:
            response = self._problem(request, 503, f"The store cannot be read: {error}")
        except RetrysafeError as error:
            response = self._problem(request, 409, str(error))
        response.headers = _HEADERS | response.headers
        return response

    def _routed(self, request: Request) -> Response:
        if not self._access.is_for_us(request):
            return Response(421, b"This dashboard answers to the loopback host only.", "text/plain")
        if request.path.startswith("/static/"):
            return assets.static(request)
        if request.path == "/login":
            return self._login(request)
        user = self._user(request)
        if user is None:
            return self._redirect(request, "/login")
        if request.method == "POST":
            return self._act(request, user)
        if request.method not in ("GET", "HEAD"):
            return self._problem(request, 405, "Pages are read with GET.")
        page = self._pages.find(request.path)
        if page is None:
            return self._problem(request, 404, "There is no such page.")
        name, values = page(request)
        status = 404 if name == "missing.html" else 200
        return self._page(request, name, status, user=user, **values)

    def _user(self, request: Request) -> str | None:
        """Whom the request comes from, as the audit will name them; None when nobody may read."""
        named = self._authorize(request.raw) if self._authorize is not None else None
        if named:
            return named
        if self._access.has_token and self._access.may_act(request):
            return "dashboard"
        return "" if self._is_open else None

    def _login(self, request: Request) -> Response:
        if request.method != "POST":
            return self._page(request, "login.html", is_wrong=False)
        if not is_same_origin(request):
            return self._problem(request, 403, "This form comes from another site.")
        if not self._access.takes(request.form().get("token", ""), request):
            return self._page(request, "login.html", 401, is_wrong=True)
        response = self._redirect(request, "/")
        response.headers["set-cookie"] = self._cookie(
            request, self._access.new_session(), SESSION_SECONDS
        )
        return response

    def _act(self, request: Request, user: str) -> Response:
        if not self._access.may_act(request):
            return self._problem(request, 403, "Acting needs the token: sign in first.")
        form = request.form()
        if not self._access.is_own_form(request, form.get("mark", "")):
            return self._problem(
                request, 403, "This form is from another site, or too old: load the page again."
            )
        if request.path == "/logout":
            response = self._redirect(request, "/")
            response.headers["set-cookie"] = self._cookie(request, "", 0)
            return response
        action = self._actions.find(request.path)
        if action is None:
            return self._problem(request, 404, "There is no such action.")
        done = action(form, user or "dashboard")
        if done.confirm is not None:
            return self._page(request, "confirm.html", user=user, **done.confirm)
        return self._redirect(request, done.target)

    def _page(self, request: Request, name: str, status: int = 200, **values: Any) -> Response:
        session = self._access.session(request)
        html = self._templates.render(
            name,
            root=request.root,
            path=request.path,
            has_token=self._access.has_token,
            may_act=bool(session),
            mark=self._access.form_mark(request),
            **values,
        )
        return Response(status, html.encode())

    def _problem(self, request: Request, status: int, text: str) -> Response:
        return self._page(
            request, "problem.html", status, title=HTTPStatus(status).phrase, text=text
        )

    def _redirect(self, request: Request, target: str) -> Response:
        # Relative to the mount, and never to a place that a request names.
        return Response(303, headers={"location": f"{request.root}{target}"})

    def _cookie(self, request: Request, value: str, seconds: int) -> str:
        secure = "; Secure" if request.is_https else ""
        return (
            f"{COOKIE}={value}; Path={request.root or '/'}; Max-Age={seconds}; HttpOnly; "
            f"SameSite=Strict{secure}"
        )

"""The reference application in Flask, with a decorator on every view."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, request

from retrysafe import Idempotency
from retrysafe.contrib.flask import Retrysafe
from tests.http_cases.acts import ACT_HEADER, PLAY_HEADER
from tests.http_cases.apps.performing import Performance
from tests.http_cases.configuration import METHODS, NUMBERED_PATH, RULES, Mount, options_of


def path_of(path: str) -> str:
    """A rule's path as Flask writes it."""
    if path.endswith("*"):
        return path.removesuffix("*") + "<path:rest>"
    return path.replace("{id}", "<int:id>" if path == NUMBERED_PATH else "<id>")


def perform(**_: Any) -> Response:
    """Answers every method of every path as its act says."""
    performance = Performance(
        request.headers.get(ACT_HEADER),
        request.headers.get(PLAY_HEADER),
        request.method,
        request.get_data(),
    )
    reply = performance.reply
    body = performance.chunks() if performance.act.is_streamed else performance.body()
    response = Response(body, reply.status)
    # As they are, some on several lines.
    del response.headers["Content-Type"]
    response.headers.extend(reply.headers)
    return response


def new_app(**options: Any) -> Flask:
    """An application without Flask's own folders and answers."""
    return Flask("cases", static_folder=None, template_folder=None, **options)


def add_views(app: Flask, *, is_decorated: bool) -> None:
    """Adds the view of every rule, and the one of all other paths."""
    for number, rule in enumerate(RULES):
        assert rule.path is not None
        view = Retrysafe.idempotent(**options_of(rule))(perform) if is_decorated else perform
        _add(app, path_of(rule.path), f"view-{number}", view)
    _add(app, "/<path:rest>", "rest", perform)


def _add(app: Flask, path: str, name: str, view: Any) -> None:
    app.add_url_rule(
        path, name, view, methods=METHODS, provide_automatic_options=False, strict_slashes=False
    )


def make(mount: Mount) -> Any:
    """The application as one mount has it."""
    app = new_app()
    idempotency = Idempotency(mount.store(), **mount.face_options())
    Retrysafe(app, idempotency, **mount.options())
    add_views(app, is_decorated=True)
    return app

"""The reference application in Flask, with rules for paths and no decorators."""

from __future__ import annotations

from typing import Any

from retrysafe import Idempotency
from retrysafe.contrib.flask import Retrysafe
from tests.http_cases.apps.flask_app import add_views, new_app
from tests.http_cases.configuration import Mount


def make(mount: Mount) -> Any:
    """The application as one mount has it."""
    app = new_app()
    idempotency = Idempotency(mount.store(), **mount.face_options())
    Retrysafe(app, idempotency, **mount.middleware_options())
    add_views(app, is_decorated=False)
    return app

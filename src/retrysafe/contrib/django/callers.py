"""Callers from Django's authentication."""

from __future__ import annotations

from retrysafe.http.request import Request


def authenticated_user(request: Request) -> str | None:
    """The user that Django or REST framework has authenticated, as `user:` and its primary key.

    Django's authentication must come first: its middleware above the view, or above retrysafe's
    own in the list; with REST framework, the decorator on the method and not on the class.
    """
    user = getattr(request.host, "user", None)
    return f"user:{user.pk}" if user is not None and user.is_authenticated else None

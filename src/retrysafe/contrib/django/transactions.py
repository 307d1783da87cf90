"""Transactions around views: an outcome is stored after the view's transaction has committed.

With `ATOMIC_REQUESTS`, Django opens a transaction around a view and commits it when the view has
returned. Around a protected view that would be too late: the outcome would be stored first, and
would stay when the commit fails. So protected views are exempt, and open it themselves, inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

# Where Django looks for the databases whose transactions a view does without.
EXEMPTION_NAME = "_non_atomic_requests"


class Exempt(set[str]):
    """Databases without a transaction around the view: all of them, as Django is told.

    The elements are those that the view was made to do without, by `non_atomic_requests`.
    """

    def __contains__(self, alias: object) -> bool:
        return True


def exemption(view: Any) -> Exempt:
    """The exemption of a protected view, which remembers the view's own."""
    return Exempt(iter(getattr(view, EXEMPTION_NAME, ())))


def _databases_around(callback: Any) -> list[str]:
    """Those whose transaction a protected view has to open itself."""
    exempt = getattr(callback, EXEMPTION_NAME, None)
    if not isinstance(exempt, Exempt):
        return []  # Django has opened them, or was told not to by somebody else.
    named = set(iter(exempt))
    return [
        alias
        for alias, options in connections.settings.items()
        if options["ATOMIC_REQUESTS"] and alias not in named
    ]


def with_transactions(view: Callable[..., Any], callback: Any) -> Callable[..., Any]:
    """The view in the transactions that Django would have opened around `callback`."""
    for alias in _databases_around(callback):
        view = transaction.atomic(using=alias)(view)
    return view


def require_none_around(callback: Any) -> None:
    """Raises as Django does for async views that should be in a transaction."""
    if _databases_around(callback):
        raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")


def require_none_open() -> None:
    """Raises `ImproperlyConfigured` in a transaction that commits after the outcome is stored."""
    for connection in connections.all(initialized_only=True):
        blocks = connection.atomic_blocks
        # Those of a test case are never committed, and no view sees them.
        if any(not getattr(block, "_from_testcase", False) for block in blocks):
            raise ImproperlyConfigured(
                f"a transaction on {connection.alias!r} is open around a protected view: its "
                "outcome would be stored before the commit, and stay if that fails. Put idempotent "
                "above transaction.atomic; with ATOMIC_REQUESTS put it on the view or on the "
                "class's dispatch, or put non_atomic_requests there"
            )

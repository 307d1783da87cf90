"""Transactions around views: an outcome is stored after the view's transaction has committed.

With `ATOMIC_REQUESTS`, Django opens a transaction around a view and commits it when the view has
returned. Around a protected view that would be too late: the outcome would be stored first, and
would stay when the commit fails. So protected views are exempt, and open it themselves, inside.
"""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from retrysafe.errors import CommitHookFailed

# Where Django looks for the databases whose transactions a view does without.
EXEMPTION_NAME = "_non_atomic_requests"
# Where the middleware notes on its request what a hook has raised; Django has made a 500 of it by
# the time that the middleware sees an answer.
HOOK_ERROR_NAME: Final = "_retrysafe_hook_error"
_HOOKS_CODE: Final = BaseDatabaseWrapper.run_and_clear_commit_hooks.__code__
# A chain of causes is short; a cycle in it must not hang a request.
_CHAIN_LIMIT: Final = 32


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


def raised_by_hook(error: BaseException) -> bool:
    """Whether the exception, or what it came from, is that of a hook after a commit."""
    found: BaseException | None = error
    for _ in range(_CHAIN_LIMIT):
        if found is None:
            return False
        if any(frame.f_code is _HOOKS_CODE for frame, _ in walk_tb(found.__traceback__)):
            return True
        found = found.__cause__ or found.__context__
    return False


def hook_failure(error: BaseException, view_name: str) -> CommitHookFailed:
    """The failure that stands for a view whose rows are committed."""
    return CommitHookFailed(
        f"a hook of transaction.on_commit raised {type(error).__name__} after the transaction of "
        f"{view_name} had committed: the view is not run again, which would write its rows again. "
        "Register the hook with robust=True, or store the response with complete_in"
    )

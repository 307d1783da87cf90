"""Tells objects that they woke up in a forked child, where their threads and locks are gone.

A child inherits memory, but no other thread: a lock that such a thread held stays locked for ever,
and an open database connection belongs to the parent. Objects register here and start afresh.

The same for locks of another make: gevent replaces threads and what they wait with, and where an
application is preloaded it does so after our objects were made. A lock from before stops all of
its greenlets at once, the one that would open the lock among them.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any, Final, Protocol


class ForkAware(Protocol):
    """An object with state that must not cross a fork."""

    def after_fork_in_child(self) -> None:
        """Replaces locks, threads and connections; runs before any other code of the child.

        It may be called twice after one fork.
        """


_registered: weakref.WeakSet[ForkAware] = weakref.WeakSet()
# Things of the parent that must be neither used nor closed in the child: closing a database
# connection there would run its clean-up against the parent's files.
_parked: list[object] = []


def register(item: ForkAware) -> None:
    """Keeps no reference: an object that is gone needs no refresh."""
    _registered.add(item)


def park(item: object) -> None:
    """Keeps a parent's object alive for ever, so that its finalizer never runs here."""
    _parked.append(item)


class ForkGuarded(ForkAware, Protocol):
    """An object that must not be in the middle of something while its process forks."""

    def before_fork(self) -> None:
        """Comes to rest; must not wait for long. It may be called twice before one fork."""

    def after_fork_in_parent(self) -> None:
        """Goes on."""


_guarded: weakref.WeakSet[ForkGuarded] = weakref.WeakSet()


def guard(item: ForkGuarded) -> None:
    """As `register`, for an object that also has to come to rest before the fork."""
    _registered.add(item)
    _guarded.add(item)


def _rest_all() -> None:
    for item in list(_guarded):
        item.before_fork()


def _go_on_all() -> None:
    for item in list(_guarded):
        item.after_fork_in_parent()


def _refresh_all() -> None:
    global _make_lock, _process_id
    refusal: Exception | None = None
    for item in list(_registered):
        try:
            item.after_fork_in_child()
        except Exception as error:
            # The others are refreshed all the same: their locks are held for the fork.
            refusal = error
    if refusal is not None:
        raise refusal
    # Last: whoever comes meanwhile must wait, and what an object refuses stays refused.
    _make_lock, _process_id = threading.Lock, os.getpid()


# What locks are made of, where the registered objects were made; and in which process.
_make_lock: object = threading.Lock
_process_id = os.getpid()
# uWSGI forks in C, past Python's hooks, after it has loaded the application. Asked only there:
# elsewhere every call would pay for a question to the system.
_FORKS_UNSEEN: Final = "uwsgi" in sys.modules
# One for each process and each make of locks: an older one may be held by nobody who lives.
_latches: Final[dict[object, Any]] = {}


def refresh_if_stale() -> None:
    """Has all objects start afresh after a fork or a monkey-patch that came unseen.

    Called wherever threads come in, before they touch a lock. Raises what an object refuses.
    """
    if threading.Lock is _make_lock and not _FORKS_UNSEEN:
        return
    if _is_stale():
        with _latches.setdefault((os.getpid(), threading.Lock), threading.Lock()):
            if _is_stale():
                _refresh_all()


def _is_stale() -> bool:
    return threading.Lock is not _make_lock or os.getpid() != _process_id


if hasattr(os, "register_at_fork"):
    # Twice: a signal that came during the fork raises at the entry of the first function after it,
    # and Python goes on with the next one. The locks that are held for the fork would stay taken.
    for _ in range(2):
        os.register_at_fork(
            before=_rest_all, after_in_parent=_go_on_all, after_in_child=_refresh_all
        )

"""Tells objects that they woke up in a forked child, where their threads and locks are gone.

A child inherits memory, but no other thread: a lock that such a thread held stays locked for ever,
and an open database connection belongs to the parent. Objects register here and start afresh.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """An object with state that must not cross a fork."""

    def after_fork_in_child(self) -> None:
        """Replaces locks, threads and connections; runs before any other code of the child."""


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
        """Comes to rest; must not wait for long."""

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
    for item in list(_registered):
        item.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_rest_all, after_in_parent=_go_on_all, after_in_child=_refresh_all)

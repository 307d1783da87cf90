"""A signal that raises, at every place in turn where Python might notice one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType


class Interrupted(BaseException):
    """What the signal raises."""


@contextmanager
def interrupted_at(place: int, modules: tuple[ModuleType, ...]) -> Iterator[list[int]]:
    """Raises `Interrupted` once, at the place-th look for signals in one of the modules.

    Python looks for them when it enters or resumes a function, and when a function written in C
    has returned. Gives a list that is empty while it has not raised.
    """
    files = {module.__file__ for module in modules}
    seen = 0
    struck: list[int] = []

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal seen
        if event in ("call", "c_return") and frame.f_code.co_filename in files and not struck:
            if seen == place:
                struck.append(place)
                raise Interrupted
            seen += 1

    sys.setprofile(profile)
    try:
        yield struck
    finally:
        sys.setprofile(None)


def at_every_place(act: Callable[[], object], *modules: ModuleType) -> Iterator[int]:
    """Interrupts `act` at one place after the other, until it comes through.

    Gives each place, for the test to look at what the interruption has left.
    """
    modules = (*modules, threading)
    for place in range(10_000):
        with interrupted_at(place, modules) as struck:
            try:
                act()
            except Interrupted:
                pass
        if not struck:
            return
        yield place
    raise AssertionError("it never came through")

"""A signal that raises, at every place in turn where Python looks for one."""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType


class Interrupted(BaseException):
    """What the signal raises."""


def whole_tree() -> tuple[ModuleType, ...]:
    """Every module of retrysafe that is imported by now: none is listed, so none drops out.

    And the one that makes context managers of generators, in which such a manager is interrupted.
    """
    return tuple(
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in ("retrysafe", "contextlib") and module.__file__
    )


class Struck(int):
    """The number of a place, and where it is."""

    where: str

    def __str__(self) -> str:
        return f"{int(self)}: {self.where}"


Handler = Callable[[], object]


def _interrupt() -> None:
    raise Interrupted


class _Strike:
    """Calls the handler of a signal once, at the place-th look for signals in one of the files.

    Python looks for signals when it enters or resumes a function, when a function that is written
    in C has returned to Python code, and when a loop starts over (decision 31). A profiler hears of
    the first two at the very place, a tracer of the third.
    """

    def __init__(self, place: int, files: set[str | None], handler: Handler) -> None:
        self._place = place
        self._files = files
        self._handler = handler
        self._seen = 0
        # Where it has struck.
        self.struck: list[str] = []

    def profile(self, frame: FrameType, event: str, _arg: object) -> None:
        """Called by Python."""
        if event in ("call", "c_return"):
            self._look(frame)

    def trace(self, frame: FrameType, event: str, _arg: object) -> object:
        """Called by Python for every function, and for every instruction of the chosen ones."""
        if frame.f_code.co_filename not in self._files or not self._loops_of(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and frame.f_lasti in self._loops_of(frame.f_code):
            self._look(frame)
        return self.trace

    @staticmethod
    @functools.cache
    def _loops_of(code: CodeType) -> frozenset[int]:
        return frozenset(
            item.offset
            for item in dis.get_instructions(code)
            if item.opname.startswith("JUMP_BACKWARD") and "NO_INTERRUPT" not in item.opname
        )

    def _look(self, frame: FrameType) -> None:
        if self.struck or frame.f_code.co_filename not in self._files:
            return
        if self._seen == self._place:
            self.struck.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
            self._handler()
        self._seen += 1


def at_every_place(
    act: Callable[[], object], *modules: ModuleType, handler: Handler = _interrupt
) -> Iterator[Struck]:
    """Interrupts `act` at one place after the other, until it comes through.

    Gives each place, for the test to look at what the interruption has left. What was raised is
    alive by then, and with it every frame that it went through, as in the handler of a caller. A
    handler of the test's own need not raise.
    """
    modules = (*modules, threading)
    files = {module.__file__ for module in modules}
    tracer = sys.gettrace()
    for place in range(10_000):
        strike = _Strike(place, files, handler)
        caught: list[BaseException] = []
        # No context manager around it: those of the standard library are struck, too.
        sys.settrace(strike.trace)
        sys.setprofile(strike.profile)
        try:
            act()
        except Interrupted as error:
            caught.append(error)
        finally:
            sys.setprofile(None)
            sys.settrace(tracer)
        if not strike.struck:
            return
        found = Struck(place)
        found.where = strike.struck[0]
        yield found
        caught.clear()
    raise AssertionError("it never came through")

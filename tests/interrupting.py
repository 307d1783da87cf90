"""A signal that raises, at every place in turn where Python looks for one."""

from __future__ import annotations

import _thread
import dis
import functools
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType

from retrysafe.errors import ClaimLost, StoreUnavailable


class Interrupted(BaseException):
    """What the signal raises."""


class Overflowed(Interrupted, RecursionError):
    """The same where the stack ends: an exception that code may catch and tell."""


def whole_tree() -> tuple[ModuleType, ...]:
    """Every module of retrysafe that is imported by now: none is listed, so none drops out.

    And the one that makes context managers of generators, in which such a manager is interrupted.
    """
    return tuple(
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in ("retrysafe", "contextlib") and module.__file__
    )


# Nothing here takes a tenth of it; reaching it is a hang.
HANG_SECONDS = 30


class Hung(BaseException):
    """Something waits for ever."""


def _watch_on() -> None:
    # Again and again: what ends a wait may wait once more.
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS, 1.0)


@contextmanager
def no_hang() -> Iterator[None]:
    """A lock that stays taken would hang the whole run; this ends the wait for it."""

    def bark(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, bark)
    _watch_on()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Struck(int):
    """The number of a place, and where it is."""

    where: str

    def __str__(self) -> str:
        return f"{int(self)}: {self.where}"


class Alarmed(Exception):
    """What the handler of a time limit raises: an exception that code may take for its own."""


class Refused(Alarmed, StoreUnavailable):
    """What leaves a handler whose call was refused, because its thread is at work in the store."""

    is_reentry = True

    def __init__(self) -> None:
        super().__init__("by a handler")


class Lost(Alarmed, ClaimLost):
    """What leaves a handler that has lost a claim of its own."""

    def __init__(self) -> None:
        super().__init__("by a handler")


class Stopped(Alarmed, StopIteration):
    """What leaves a handler that has asked an empty iterator for more."""


Handler = Callable[[], object]


def _interrupt() -> None:
    raise Interrupted


class _Crowd:
    """Several signals that arrive at once, each of which raises.

    Python runs the handler of the first one; what that raises leaves the others for the next looks.
    """

    def __init__(self, count: int, kind: type[BaseException]) -> None:
        self._kind = kind
        self._numbers = range(signal.SIGRTMIN, signal.SIGRTMIN + count)
        self._before = [signal.signal(number, self._raise) for number in self._numbers]
        self._is_over = True

    def arrive(self) -> None:
        """Raises, and has the code that hears of it raise again."""
        self._is_over = False
        # One call of C, after which Python looks.
        deque(map(_thread.interrupt_main, self._numbers), maxlen=0)

    def _raise(self, *_: object) -> None:
        if not self._is_over:
            raise self._kind

    def within(self, act: Callable[[], object]) -> None:
        """Calls `act`; a signal that has found no place to strike in it strikes nowhere else."""
        try:
            act()
        finally:
            self._is_over = True  # Python looks for none before this.

    def leave(self) -> None:
        """Puts the handlers back."""
        for number, handler in zip(self._numbers, self._before, strict=True):
            signal.signal(number, handler)


def at_every_place_at_once(
    count: int,
    act: Callable[[], object],
    *modules: ModuleType,
    kind: type[BaseException] = Interrupted,
) -> Iterator[Struck]:
    """As `at_every_place`, with so many signals at each of them."""
    crowd = _Crowd(count, kind)
    try:
        yield from at_every_place(lambda: crowd.within(act), *modules, handler=crowd.arrive)
    finally:
        crowd.leave()


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
        if signal.getitimer(signal.ITIMER_REAL)[0]:
            _watch_on()  # For each place anew: a loaded machine is no hang.
        strike = _Strike(place, files, handler)
        caught: list[BaseException] = []
        # No context manager around it: those of the standard library are struck, too.
        sys.settrace(strike.trace)
        sys.setprofile(strike.profile)
        try:
            act()
        except (Interrupted, Alarmed) as error:
            caught.append(error)
        except Exception as error:
            error.add_note(f"struck at {strike.struck}")
            raise
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

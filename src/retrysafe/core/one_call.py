"""One call of a user's function, and how it ended.

Owns the line between the function's own exception and one that came into our frames after it had
ended: a signal's handler may raise between any two of our lines (decision 31). What raised there is
no failure of the function, and a key that were freed for it would run the function again.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Final, TypeVar

from retrysafe.core.stop_iteration import own_error

E = TypeVar("E", bound=BaseException)

_NO_KEYWORDS: Final[Mapping[str, Any]] = MappingProxyType({})
_RETURNED: Final = "returned"


class OneCall:
    """A call that is made once; afterwards it tells how it ended, whatever came in between."""

    __slots__ = ("_ended", "_raised", "has_begun")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # A missing item is made by C alone, which looks for no signal between the function's return
        # and its storing here, nor after it. After a plain call Python looks first.
        self._ended: defaultdict[str, Any] = defaultdict(
            partial(function, *args, **(kwargs or _NO_KEYWORDS))
        )
        self.has_begun = False
        # The identity of what came out of the function. Not the exception itself: that has all
        # frames in which this is held, and only the garbage collector would free them.
        self._raised: int | None = None

    def make(self) -> Any:
        """Calls the function; raises what it raises."""
        try:
            # Python looks for no signal from here to the function's first line.
            self.has_begun = True
            return self._ended[_RETURNED]
        except BaseException as error:
            self._raised = id(error)
            raise

    def go_on(self) -> None:
        """What it gave has to be awaited: its end is still to come."""
        self._ended.clear()

    def end(self, value: Any) -> None:
        """Takes note of what came of it in the end."""
        self._ended[_RETURNED] = value

    def fail(self, error: E) -> E:
        """Takes note of what it raised in the end, or of what is wrong with what it gave."""
        self._raised = id(error)
        return error

    @property
    def has_returned(self) -> bool:
        """Whether the function came to its end, and nothing was found wrong with what it gave."""
        return _RETURNED in self._ended and self._raised is None

    @property
    def is_doubtful(self) -> bool:
        """Whether the function was called, and nobody knows how it ended."""
        return self.has_begun and self._raised is None and _RETURNED not in self._ended

    @property
    def value(self) -> Any:
        """What it returned; None when it did not."""
        return self._ended.get(_RETURNED)

    def is_own(self, error: BaseException) -> bool:
        """Whether the function raised this, or nothing of it has run.

        What a handler raised inside of the function counts as the function's: nobody else could
        have caught it there.
        """
        own = own_error(error)
        if self.has_begun and self._raised not in (id(error), id(own)):
            return False
        return not _is_of_handler(own)


def _is_of_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised it while nothing but our own frames was at work.

    The function of an adapter is our own as well: it calls the user's, and has work of its own
    after that. A handler is told by the frame that it came into, which it is given.
    """
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code is not _MAKE:
        place = place.tb_next
    while place is not None and place.tb_next is not None:
        interrupted, place = place.tb_frame, place.tb_next
        if _is_given(place.tb_frame, interrupted):
            return True
        if not place.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
            return False
    return False


def _is_given(frame: FrameType, interrupted: FrameType) -> bool:
    for value in frame.f_locals.values():
        if value is interrupted:
            return True
        if type(value) is tuple and any(item is interrupted for item in value):
            return True
    return False


_MAKE: Final = OneCall.make.__code__
_OWN_FILES: Final = str(Path(__file__).parents[1]) + os.sep

"""One call of a user's function, and how it ended.

Owns the line between the function's own exception and one that came into our frames after it had
ended: a signal's handler may raise between any two of our lines (decision 31). What raised there is
no failure of the function, and a key that were freed for it would run the function again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar

from retrysafe.core.handlers import is_of_handler
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
        """Whether the function raised this; before it has begun, whether no signal's handler did.

        What a handler raised inside of the function counts as the function's: nobody else could
        have caught it there. The function of an adapter is our own as well: it calls the user's,
        and has work of its own after that, in which a handler's exception is not the user's.
        """
        if not self.has_begun:
            return not is_of_handler(error)
        is_raised = self._raised in (id(error), id(own_error(error)))
        return is_raised and not is_of_handler(error, is_ours_only=True)


def is_interruption(made: OneCall | None, error: BaseException) -> bool:
    """Whether this is no failure of the call, but came in between: before it, or after it."""
    return is_of_handler(error) if made is None else not made.is_own(error)

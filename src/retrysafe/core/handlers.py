"""Who raised an exception: a signal's handler, or the code that it came into.

Owns that one question, which its class cannot answer. A handler may raise between any two of our
lines, and what it raises may be an error of retrysafe's own: that of a call that was refused inside
of the handler. Taken for the store's word, it would end a write that the store never refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from retrysafe.core.stop_iteration import own_error
from retrysafe.errors import OperationInFlight, RetrysafeError, StoreError

# What a call inside of a handler is refused with. No ending is told so.
_OF_CALLS: Final = (StoreError, OperationInFlight)
# Whatever a class has made of that name.
_traceback: Final[Any] = vars(BaseException)["__traceback__"]
_OWN_FILES: Final = str(Path(__file__).parents[1]) + os.sep


def is_of_handler(error: BaseException, *, is_ours_only: bool = False) -> bool:
    """Whether a signal's handler raised it, below the frame that has caught it.

    A handler is told by the frame that it came into, which Python gives it. With `is_ours_only`
    one that came into somebody else's code does not count: that code could have caught it.
    """
    place: TracebackType | None = _traceback.__get__(own_error(error))
    while place is not None and place.tb_next is not None:
        interrupted, place = place.tb_frame, place.tb_next
        if _is_given(place.tb_frame, interrupted):
            return True
        if is_ours_only and not place.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
            return False
    return False


def is_refusal(error: BaseException) -> bool:
    """Whether it says why an ending or a step does not stand, in retrysafe's own words.

    Everything else that is raised while one is stored came from outside: its caller is cancelled,
    or a signal's handler raised. Then it is stored all the same.
    """
    return (
        isinstance(error, RetrysafeError)
        and not isinstance(error, _OF_CALLS)
        and not is_of_handler(error)
    )


def _is_given(frame: FrameType, interrupted: FrameType) -> bool:
    for value in frame.f_locals.values():
        if value is interrupted:
            return True
        if type(value) is tuple and any(item is interrupted for item in value):
            return True
    return False

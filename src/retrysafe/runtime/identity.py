"""Who this process is to a store: the tokens of its claims, and its name for operators."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from retrysafe.core.model import TOKEN_BYTES

# The same bytes as `os.urandom`, which lets go of the interpreter lock to get them: with many
# threads that is a needless switch on every claim. Not every system has it.
_random_bytes: Callable[[int], bytes] = getattr(os, "getrandom", os.urandom)


# A token that no other claim ever had or will have. Asked from the system each time: a buffer of
# random bytes would be copied by a fork, or by a snapshot of a virtual machine, and two owners
# would hold the same token.
mint_token: Final[Callable[[], bytes]] = partial(_random_bytes, TOKEN_BYTES)


def owner_name() -> str:
    """Who holds a claim, for operators: host and process id."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}"

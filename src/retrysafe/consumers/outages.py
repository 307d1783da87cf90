"""Outages: which errors of a handler say that something it needs is away.

Owns what is recognised. Libraries are known by the names of their modules: none is imported.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from retrysafe.transactions import is_outage

# Not every OSError: a missing file is the message's own, and so is an HTTP status in some clients.
_AWAY_NUMBERS: Final = frozenset(
    {
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EIO),
    }
)
# The class and all below it, by the library's first name.
_AWAY_NAMES: Final = frozenset(
    {
        *(
            ("httpx", "TransportError"),
            ("httpcore", "NetworkError"),
            ("httpcore", "TimeoutException"),
        ),
        *(("requests", "ConnectionError"), ("requests", "Timeout")),
        *(("aiohttp", "ClientConnectionError"), ("urllib3", "NewConnectionError")),
        *(("redis", "ConnectionError"), ("redis", "TimeoutError")),
        *(("botocore", "HTTPClientError"), ("botocore", "ConnectionError")),
        *(("asyncpg", "PostgresConnectionError"), ("asyncpg", "CannotConnectNowError")),
        ("grpc", "FutureTimeoutError"),
    }
)


def is_away(error: BaseException) -> bool:
    """Whether something that the handler needs was out of reach, so that it is no one's fault."""
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror, socket.herror)):
        return True
    names = {(each.__module__.partition(".")[0], each.__name__) for each in type(error).__mro__}
    if names & _AWAY_NAMES:
        return True
    if isinstance(error, OSError):
        return error.errno in _AWAY_NUMBERS
    # Values of the wrong kind bear the names of outages in some drivers.
    return not isinstance(error, ValueError | TypeError) and is_outage(error)

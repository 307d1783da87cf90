"""Tells errors of the connection that time may heal from those that it will not."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Final

# A chain of causes is short; a cycle in it must not hang a request.
_CHAIN_LIMIT: Final = 32


def is_certificate_refused(error: BaseException) -> bool:
    """Whether the server's certificate was refused, which trying again does not change."""
    return any(isinstance(item, ssl.SSLCertVerificationError) for item in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from; requests and urllib3 wrap by argument and by `reason`."""
    waiting = [error]
    for _ in range(_CHAIN_LIMIT):
        if not waiting:
            return
        item = waiting.pop()
        yield item
        inner = (item.__context__, item.__cause__, getattr(item, "reason", None), *item.args)
        waiting += [found for found in inner if isinstance(found, BaseException)]

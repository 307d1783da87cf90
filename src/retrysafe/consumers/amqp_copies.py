"""Headers of the copies that retries and dead letters of RabbitMQ are.

All properties of a message travel in one frame, and a client that sends a larger one loses its
connection. What a publisher has sent fits, and what a library reads it can mostly write; what a
copy brings in addition may not. Owns what gives way. It must not know a library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

# How large the properties are with these headers; infinite for what the library cannot write.
Size = Callable[[dict[str, Any]], float]
Headers = dict[str, Any]

# The broker's notes on where the message has waited before.
_DEATHS: Final = ("x-death", "x-first-death-", "x-last-death-")


def text_of(value: Any) -> str:
    """The value of a header as handlers read it."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def returning(given: Headers, own: Headers, size: Size, limit: float) -> Headers | None:
    """Headers that handlers read as those of the message itself; None where none can be sent."""
    for headers in (given | own, _sent(given) | own):
        if size(headers) <= limit:
            return headers
    written = _written(_sent(given), size, limit)
    # Without ours, these are the ones that came in a frame of this size.
    for headers in (written | own, written):
        if len(written) == len(_sent(given)) and size(headers) <= limit:
            return headers
    return None


def buried(given: Headers, own: Headers, size: Size, limit: float) -> Headers:
    """Headers of a dead letter, which loses the largest of them rather than to stay."""
    if size(given | own) <= limit:
        return given | own
    written, bare = _written(_sent(given), size, limit), size({})
    sizes = {name: size({name: value}) - bare for name, value in written.items()}
    kept, room = {}, limit - size(own)
    for name in sorted(sizes, key=sizes.__getitem__):
        room -= sizes[name]
        if room < 0:
            break
        kept[name] = written[name]
    return kept | own


def _sent(given: Mapping[str, Any]) -> Headers:
    """What the publisher has sent."""
    return {name: value for name, value in given.items() if not name.startswith(_DEATHS)}


def _written(headers: Headers, size: Size, limit: float) -> Headers:
    """Each as it is, or as its text where the library cannot write what it has read."""
    written = {}
    for name, value in headers.items():
        for form in (lambda value=value: value, lambda value=value: text_of(value)):
            try:
                made = form()
            except RecursionError:
                break
            if size({name: made}) <= limit:
                written[name] = made
                break
    return written

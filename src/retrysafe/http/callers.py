"""Callers: whose key it is, from what the request proves about its sender.

Owns the shipped ways to tell, and the check of what others tell. They run before the application
does, and a replay is answered without it: a caller must therefore be something that only its
owner can send, or that a part in front of retrysafe has checked. Each docstring says which of the
two it is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final
from weakref import WeakKeyDictionary

from retrysafe.core.keys import CALLER_LIMIT_CHARACTERS, GlobalCaller
from retrysafe.errors import InvalidInput, PolicyInvalid
from retrysafe.http.request import Request

# None: nobody can be told, and the request is refused with 401.
CallerOf = Callable[[Request], str | GlobalCaller | None]

# The shipped callers, each with the header that tells it: it is told by nothing else of a request.
_headers_of: WeakKeyDictionary[CallerOf, str] = WeakKeyDictionary()


def is_told_by_headers(caller: CallerOf | GlobalCaller) -> bool:
    """Whether equal headers mean the same caller; of a function that is not ours nobody knows."""
    return isinstance(caller, GlobalCaller) or caller in _headers_of


def vary_of(caller: CallerOf | GlobalCaller) -> str | None:
    """What a response differs by that is for its caller alone, as `Vary` has it.

    None where all callers are one. Of a function that is not ours nobody knows.
    """
    if isinstance(caller, GlobalCaller):
        return None
    # Asked first: not every callable can be referred to weakly.
    return _headers_of[caller] if is_told_by_headers(caller) else "*"


def checked_caller_of(caller: object) -> CallerOf:
    """The function that tells callers; raises `InvalidInput` for what is none."""
    if not callable(caller) or inspect.iscoroutinefunction(caller):
        raise InvalidInput(
            f"caller is a plain function of the request such as bearer_token, or GLOBAL for one "
            f"namespace shared by everybody; got {caller!r}"
        )
    return caller


def checked_caller(caller: object) -> str | GlobalCaller | None:
    """What such a function has told; raises `InvalidInput` for what is no caller."""
    if isinstance(caller, str | GlobalCaller | None):
        return caller
    # Told to the client as a missing caller, nobody would find the mistake.
    raise InvalidInput(
        f"the caller is a text, or None when nobody can be told, got {caller!r}: write str(…) "
        "around a number such as the user's id"
    )


_BEARER: Final = re.compile(rb"bearer +([!-~]+)", re.IGNORECASE)
_BASIC: Final = re.compile(rb"basic +([!-~]+)", re.IGNORECASE)
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# 160 bits: no two tokens will ever share them, and a row holds 40 characters.
_DIGEST_CHARACTERS: Final = 40


def bearer_token(request: Request) -> str | None:
    """The holder of the bearer token in `Authorization`, as `bearer:` and a digest of the token.

    Safe without any check in front: only who has the token is this caller. The store gets the
    first 40 hexadecimal digits of the token's SHA-256, never the token; a token that can be
    guessed can be guessed from its digest, too. A new token is a new caller, so keys do not
    outlive the refresh of a token: use the account's name from your authentication where they
    must.
    """
    lines = request.lines_by_name()
    if lines is None:
        return _bearer_of(_only_line(request))
    line = lines.get(b"authorization", b"")
    return _bearer_before(line) if len(line) <= _KEPT_LIMIT_BYTES else _bearer_of(line)


def _bearer_of(line: bytes) -> str | None:
    found = _BEARER.fullmatch(line.strip(b" \t"))
    return None if found is None else caller_of_token(found[1])


def caller_of_token(token: bytes) -> str:
    """The caller that `bearer_token` makes of a token; for operators who look for its keys."""
    return "bearer:" + hashlib.sha256(token).hexdigest()[:_DIGEST_CHARACTERS]


# A client sends its token with every request, and nothing takes as long as the digest of it. The
# last ones are kept in memory, where each has been anyway; clients choose them, so that is bounded.
_KEPT_LIMIT_BYTES: Final = 4_096
_bearer_before = lru_cache(maxsize=1_024)(_bearer_of)


def basic_user(request: Request) -> str | None:
    """The user name in `Authorization: Basic`, as `basic:` and the name.

    The password is neither checked nor stored. Use it only behind a gateway or a middleware that
    has checked it: without one, whoever knows the name and a key could read a stored response.
    """
    encoded = _credentials(request, _BASIC)
    if encoded is None:
        return None
    try:
        pair = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return None
    name, colon, _ = pair.partition(b":")
    text = _text(name) if colon else None
    return None if text is None else _within_limit("basic:" + text)


def header_caller(name: str) -> CallerOf:
    """The caller in a header that your gateway sets, such as `X-Account`, as it stands.

    The gateway must remove what clients send under that name; anybody could be anybody else
    otherwise. Raises `PolicyInvalid` for a name that no header can have.
    """
    if _HEADER_NAME.fullmatch(name) is None:
        raise PolicyInvalid(f"a header's name consists of letters, digits and hyphens: {name!r}")
    wanted = name.lower().encode("ascii")

    def caller_in_header(request: Request) -> str | None:
        """The header's value; None when it is missing, empty, sent twice or not text."""
        lines = request.header_lines(wanted)
        if len(lines) != 1:
            return None
        text = _text(lines[0].strip(b" \t"))
        return None if text is None else _within_limit(text)

    _headers_of[caller_in_header] = name
    return caller_in_header


def _credentials(request: Request, scheme: re.Pattern[bytes]) -> bytes | None:
    found = scheme.fullmatch(_only_line(request).strip(b" \t"))
    return None if found is None else found[1]


def _only_line(request: Request) -> bytes:
    lines = request.header_lines(b"authorization")
    # With two lines, the part in front may have checked one and we would believe the other.
    return lines[0] if len(lines) == 1 else b""


def _text(value: bytes) -> str | None:
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text and text.isprintable() else None


def _within_limit(caller: str) -> str | None:
    # Cut off, two long names could become one caller.
    return caller if len(caller) <= CALLER_LIMIT_CHARACTERS else None


_headers_of[bearer_token] = _headers_of[basic_user] = "Authorization"

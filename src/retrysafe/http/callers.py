"""Callers: whose key it is, from what the request proves about its sender.

Owns the shipped ways to tell, and the check of what others tell. They run before the application
does, and a replay is answered without it: a caller must therefore be something that only its
owner can send, or that a part in front of retrysafe has checked. Each docstring says which of the
two it is. What proves who calls is a `Credential`, and is stored as a digest only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final
from weakref import WeakKeyDictionary

from retrysafe.core.keys.canonical import frame
from retrysafe.core.keys.key import CALLER_LIMIT_CHARACTERS, GlobalCaller
from retrysafe.core.keys.secret import PLAIN_TAG, Secrets
from retrysafe.errors import InvalidInput, PolicyInvalid
from retrysafe.http.header_names import HEADER_NAME, holds_credential
from retrysafe.http.request import Request


@dataclass(frozen=True, slots=True, init=False)
class Credential:
    """What proves who calls, such as a token; the store gets a digest of it and never the value.

    The caller is `scheme`, a colon and 40 hexadecimal digits: of the value's HMAC-SHA256 with the
    secret, or of its plain SHA-256 where there is no secret. Raises `InvalidInput` for a scheme
    that is no short word, and for an empty value.
    """

    scheme: str
    value: bytes = field(repr=False)

    def __init__(self, scheme: str, value: bytes | str) -> None:
        if not isinstance(scheme, str) or _SCHEME.fullmatch(scheme) is None:
            # Not shown: with the two swapped, this is the credential.
            raise InvalidInput(
                "a credential's scheme is a word of at most 20 small letters, digits and hyphens, "
                "such as 'session': write Credential('session', token), in this order"
            )
        if isinstance(value, str):
            value = value.encode("utf-8", "surrogatepass")
        if not isinstance(value, bytes) or not value:
            # Never shown: what is wrong may be a credential all the same.
            raise InvalidInput("a credential's value is bytes or text, and not empty")
        object.__setattr__(self, "scheme", scheme)
        object.__setattr__(self, "value", value)


# None: nobody can be told, and the request is refused with 401.
Told = str | Credential | GlobalCaller | None
CallerOf = Callable[[Request], Told] | Callable[[Request], Awaitable[Told]]

# Too short for a token, which would be stored as it stands where the two are swapped.
_SCHEME: Final = re.compile(r"[a-z][a-z0-9_-]{0,19}")
# 160 bits: no two tokens will ever share them, and a row holds 40 characters.
_DIGEST_CHARACTERS: Final = 40


def caller_of_credential(credential: Credential, secret: bytes | None) -> str:
    """The caller that is stored for a credential; also for operators who look for its keys."""
    scheme, value = credential.scheme, credential.value
    if secret is None:
        digest = hashlib.sha256(value).hexdigest()
    else:
        digest = hmac.digest(secret, frame(b"caller 1", scheme.encode(), value), "sha256").hex()
    return f"{scheme}:{digest[:_DIGEST_CHARACTERS]}"


def callers_of_credential(
    credential: Credential, secrets: Secrets, *, with_plain: bool = False
) -> list[str]:
    """The same by every secret that is listed, the first one's first; `with_plain` adds by none."""
    values: list[bytes | None] = [secret.value for secret in secrets.listed]
    if secrets.has_plain or with_plain:
        values.append(None)
    return [caller_of_credential(credential, value) for value in values]


# A client sends its token with every request, and nothing takes as long as the digest of it. The
# last ones are kept in memory, where each has been anyway; clients choose them, so that is bounded.
_KEPT_LIMIT: Final = 1_024
_KEPT_LIMIT_BYTES: Final = 4_096


class RotatingCaller(str):
    """The caller of a credential while several secrets are listed: by the first of them.

    Its keys are made for every one of them.
    """

    # The caller by each secret's tag.
    by_tag: dict[bytes, str]


class Naming:
    """Makes the caller that is stored of what a caller function tells, with its secrets."""

    __slots__ = ("_before", "_secrets")

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._before = lru_cache(maxsize=_KEPT_LIMIT)(self._digested)

    def named(self, told: object) -> str | GlobalCaller | None:
        """The caller; None when nobody could be told. Raises `InvalidInput` for what is none."""
        if isinstance(told, Credential):
            is_short = len(told.value) <= _KEPT_LIMIT_BYTES
            return self._before(told) if is_short else self._digested(told)
        if isinstance(told, str | GlobalCaller | None):
            return told
        if inspect.iscoroutine(told):
            told.close()
            raise InvalidInput(
                "the caller function returned a coroutine that nobody awaits: declare the function "
                "itself with async def"
            )
        # Told to the client as a missing caller, nobody would find the mistake.
        raise InvalidInput(
            # Not its value: that may be a token, and this goes to a log.
            "the caller is a text, a Credential, or None when nobody can be told, got a "
            f"{type(told).__qualname__}: write str(…) around a number such as the user's id"
        )

    def _digested(self, credential: Credential) -> str:
        secrets = self._secrets
        if not secrets.is_several:
            return caller_of_credential(credential, secrets.value)
        made = RotatingCaller(caller_of_credential(credential, secrets.value))
        made.by_tag = {
            secret.tag: caller_of_credential(credential, secret.value) for secret in secrets.listed
        }
        if secrets.has_plain:
            made.by_tag[PLAIN_TAG] = caller_of_credential(credential, None)
        return made


@dataclass(frozen=True, slots=True)
class Shipped:
    """What is known of a caller function that is ours."""

    # The header that tells it: it is told by nothing else of a request.
    header: str
    # What a 401 asks for.
    challenge: str = "Bearer"
    # Whether it tells a `Credential`.
    has_credential: bool = False
    # Its name and its security scheme in an OpenAPI document; None for one that clients never send.
    scheme: tuple[str, Mapping[str, Any]] | None = None


_shipped: WeakKeyDictionary[CallerOf, Shipped] = WeakKeyDictionary()


def shipped(caller: CallerOf | GlobalCaller) -> Shipped | None:
    """What is known of a caller function; None for one that is not ours."""
    # Not every callable can be referred to weakly.
    return _shipped.get(caller) if inspect.isfunction(caller) else None


def vary_of(caller: CallerOf | GlobalCaller) -> str | None:
    """What a response differs by that is for its caller alone, as `Vary` has it.

    None where all callers are one. Of a function that is not ours nobody knows.
    """
    if isinstance(caller, GlobalCaller):
        return None
    known = shipped(caller)
    return "*" if known is None else known.header


def checked_caller_of(caller: object) -> CallerOf:
    """The function that tells callers; raises `InvalidInput` for what is none."""
    if not callable(caller):
        raise InvalidInput(
            f"caller is a function of the request such as bearer_token, or GLOBAL for one "
            f"namespace shared by everybody; got {caller!r}"
        )
    for name, maker in (("api_key", api_key), ("gateway_header", gateway_header)):
        if caller is maker:
            raise InvalidInput(f'name the header: caller={name}("X-…")')
    return caller


def is_async(caller: object) -> bool:
    """Whether a caller function must be awaited."""
    return inspect.iscoroutinefunction(caller) or inspect.iscoroutinefunction(
        getattr(caller, "__call__", None)  # noqa: B004 — an object may have an async one.
    )


def require_blocking(caller: object) -> None:
    """Raises `InvalidInput` for an async caller function where nobody could await it."""
    if is_async(caller):
        raise InvalidInput(
            f"an application in threads cannot await its caller {caller!r}: pass a plain function "
            "of the request; async ones are for ASGI"
        )


_BEARER: Final = re.compile(rb"bearer +([!-~]+)", re.IGNORECASE)
_BASIC: Final = re.compile(rb"basic +([!-~]+)", re.IGNORECASE)


def bearer_token(request: Request) -> Credential | None:
    """The holder of the bearer token in `Authorization`; stored as `bearer:` and a digest.

    Safe without any check in front: only who has the token is this caller. Without a secret the
    digest is plain, and a token that can be guessed can be guessed from it. A new token is a new
    caller, so keys do not outlive the refresh of a token: use the account's name from your
    authentication where they must.
    """
    lines = request.lines_by_name()
    line = _only_line(request) if lines is None else lines.get(b"authorization", b"")
    return _bearer_before(line) if len(line) <= _KEPT_LIMIT_BYTES else _bearer_of(line)


def _bearer_of(line: bytes) -> Credential | None:
    found = _BEARER.fullmatch(line.strip(b" \t"))
    return None if found is None else Credential("bearer", found[1])


_bearer_before = lru_cache(maxsize=_KEPT_LIMIT)(_bearer_of)


def api_key(name: str = "X-API-Key") -> CallerOf:
    """The holder of the API key in this header; stored as `api-key:` and a digest.

    Safe without any check in front: only who has the API key is this caller. Two API keys of one
    account are two callers. Raises `PolicyInvalid` for a name that no header can have.
    """
    wanted = _checked_name(name)

    def holder_of_api_key(request: Request) -> Credential | None:
        """The credential; None when the header is missing, empty or sent twice."""
        value = _only_value(request, wanted)
        return Credential("api-key", value) if value else None

    _shipped[holder_of_api_key] = Shipped(
        name,
        # No scheme is registered for this; a 401 must have one, and this is what FastAPI says.
        f'APIKey in="header", name="{name}"',
        has_credential=True,
        scheme=("ApiKey", {"type": "apiKey", "in": "header", "name": name}),
    )
    return holder_of_api_key


def basic_user(request: Request) -> str | None:
    """The user name in `Authorization: Basic`, as `basic:` and the name.

    The password is neither checked nor stored. Use it only behind a gateway or a middleware that
    has checked it: without one, whoever knows the name and a key could read a stored response.
    """
    found = _BASIC.fullmatch(_only_line(request).strip(b" \t"))
    if found is None:
        return None
    try:
        pair = base64.b64decode(found[1], validate=True)
    except binascii.Error:
        return None
    name, colon, _ = pair.partition(b":")
    text = _text(name) if colon else None
    return None if text is None else _within_limit("basic:" + text)


def gateway_header(name: str) -> CallerOf:
    """The caller in a header that your gateway sets, such as `X-Account`, stored as it stands.

    The gateway must remove what clients send under that name; anybody could be anybody else
    otherwise. For a name, never for a credential: `api_key` is for those. Raises `PolicyInvalid`
    for a name that no header can have.
    """
    wanted = _checked_name(name)
    if holds_credential(wanted):
        raise PolicyInvalid(
            f"{name} holds a credential, which is not stored in clear: use bearer_token or "
            f"api_key({name!r})"
        )

    def caller_in_header(request: Request) -> str | None:
        """The header's value; None when it is missing, empty, sent twice or not text."""
        value = _only_value(request, wanted)
        text = None if value is None else _text(value)
        return None if text is None else _within_limit(text)

    _shipped[caller_in_header] = Shipped(name)
    return caller_in_header


def _checked_name(name: str) -> bytes:
    if not isinstance(name, str) or HEADER_NAME.fullmatch(name) is None:
        raise PolicyInvalid(f"a header's name consists of letters, digits and hyphens: {name!r}")
    return name.lower().encode("ascii")


def _only_value(request: Request, name: bytes) -> bytes | None:
    lines = request.header_lines(name)
    # With two lines, the part in front may have checked one and we would believe the other.
    return lines[0].strip(b" \t") if len(lines) == 1 else None


def _only_line(request: Request) -> bytes:
    return _only_value(request, b"authorization") or b""


def _text(value: bytes) -> str | None:
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text and text.isprintable() else None


def _within_limit(caller: str) -> str | None:
    # Cut off, two long names could become one caller.
    return caller if len(caller) <= CALLER_LIMIT_CHARACTERS else None


_shipped[bearer_token] = Shipped(
    "Authorization",
    has_credential=True,
    scheme=("BearerToken", {"type": "http", "scheme": "bearer"}),
)
_shipped[basic_user] = Shipped(
    "Authorization",
    'Basic realm="api"',
    scheme=("BasicUser", {"type": "http", "scheme": "basic"}),
)

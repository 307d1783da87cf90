"""Keys: whose they are, and the three ways to come by one.

A key belongs to a caller. The caller comes from the authentication context, never from the
client's words; a namespace shared by all callers exists only for those who write `GLOBAL`.

Keys that are derived, from domain values or from a whole request, have forms of their own. Nobody
who chooses a key can choose one of these.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from typing import Final

from retrysafe.core.keys.canonical import Part, digest, frame, frame_parts
from retrysafe.errors import CallerMissing, KeyInvalid, SecretMissing

# The limit of the HTTP contract; it also bounds the row that a client can make us store.
KEY_LIMIT_CHARACTERS: Final = 255
# Callers come from the server's own authentication, so the limit only catches mistakes.
CALLER_LIMIT_CHARACTERS: Final = 255
# Below this a secret can be found by trying; 16 random bytes cannot.
SECRET_MINIMUM_BYTES: Final = 16


class GlobalCaller:
    """The type of `GLOBAL`: one namespace for all callers, only ever by explicit choice."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "GLOBAL"


GLOBAL: Final = GlobalCaller()
Caller = str | GlobalCaller


class Key:
    """One caller's key; two keys are equal when caller and text are."""

    __slots__ = ("caller", "digest", "text")

    text: str
    # Whose it is; the empty text for GLOBAL.
    caller: str
    digest: bytes

    def __init__(self, text: str, *, caller: Caller) -> None:
        """Raises `KeyInvalid` for an unusable text, `CallerMissing` for an unusable caller."""
        if not isinstance(text, str) or not text:
            raise KeyInvalid(f"a key must be text of at least one character, got {text!r}")
        if len(text) > KEY_LIMIT_CHARACTERS:
            raise KeyInvalid(
                f"a key may have at most {KEY_LIMIT_CHARACTERS} characters, got {len(text)}: "
                "hash long values with natural_key()",
                key=text[:KEY_LIMIT_CHARACTERS],
            )
        self.text = text
        if isinstance(caller, GlobalCaller):
            # As it is stored. No real caller can have the empty text.
            caller = ""
        elif not isinstance(caller, str) or not caller:
            raise CallerMissing(
                f"a caller must be text of at least one character, got {caller!r}: pass the "
                "authenticated account or tenant, with str(…) around a number such as the user's "
                "id, or GLOBAL for one namespace shared by everybody"
            )
        elif len(caller) > CALLER_LIMIT_CHARACTERS:
            raise CallerMissing(
                f"a caller may have at most {CALLER_LIMIT_CHARACTERS} characters, got {len(caller)}"
            )
        self.caller = caller
        try:
            self.digest = digest(frame(self.caller.encode(), text.encode()))
        except UnicodeEncodeError:
            raise KeyInvalid(f"the key {text!r} or its caller is not valid Unicode text") from None
        if "\x00" in text or "\x00" in self.caller:
            # PostgreSQL cannot store it, and a key must mean the same on every store.
            raise KeyInvalid("a key and its caller must not contain the NUL character")

    @property
    def is_global(self) -> bool:
        """Whether the key lives in the namespace shared by all callers."""
        return self.caller == ""

    def renamed(self, text: str) -> Key:
        """Another key of the same caller."""
        return Key(text, caller=GLOBAL if self.is_global else self.caller)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        return self.text == other.text and self.caller == other.caller

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        """The key in a sentence, for people who do not read Python."""
        return f"key {self.text!r} " + (
            "(global)" if self.is_global else f"of caller {self.caller!r}"
        )

    def __repr__(self) -> str:
        caller = "GLOBAL" if self.is_global else repr(self.caller)
        return f"Key({self.text!r}, caller={caller})"


class DerivedKey(str):
    """A key that was made here from values, which tells it from a text that looks like one."""

    __slots__ = ()


# As `natural_key` and `body_key` write them.
_DERIVED_STARTS: Final = ("natural:", "body:")
_DERIVED: Final = re.compile(
    r"natural:.*:[A-Za-z0-9_-]{27}|body:[A-Za-z0-9_-]{43}", re.ASCII | re.DOTALL
)


def looks_derived(text: str) -> bool:
    """Whether a text that somebody chose has the form of a derived key.

    Whoever may choose keys, such as a client, could else take the key of invoice 42 in advance, and
    its payment would be refused as another request.
    """
    return (
        type(text) is not DerivedKey
        and text.startswith(_DERIVED_STARTS)
        and _DERIVED.fullmatch(text) is not None
    )


def natural_key(operation: str, /, *parts: Part, **fields: Part) -> str:
    """The key of a domain event that happens once, such as the payment of invoice 42.

    Equal operation and values give an equal key, in any process and any release. The operation's
    name stays readable in it. Pass the key as it is: a copy of its text is refused, because anybody
    can write one. Raises `FingerprintImpossible` for values without a stable form,
    and `KeyInvalid` when the operation is no text.
    """
    if not isinstance(operation, str):
        raise KeyInvalid(
            f"a natural key starts with the name of its operation, a text, got {operation!r}: "
            'write natural_key("payment", …)'
        )
    named = [item for name in sorted(fields) for item in (name, fields[name])]
    framed = frame(frame_parts(operation), frame_parts(*parts), frame_parts(*named))
    digest = _text_of(hashlib.sha256(framed).digest()[:DIGEST_TEXT_BYTES])
    return DerivedKey(f"natural:{operation[:150]}:{digest}")


# 20 bytes are 27 characters of text and leave no practical chance of two equal keys.
DIGEST_TEXT_BYTES: Final = 20


def body_key(secret: bytes, operation: str, body: bytes) -> str:
    """The key of a request whose client cannot send one: a keyed hash of what it asks for.

    The time window is not part of the key. A bucketed instant would give two keys to one request
    and its retry on either side of the bucket's edge; the record's active window decides instead.
    """
    mac = hmac.digest(
        checked_secret(secret), frame(b"body key 1", operation.encode(), body), "sha256"
    )
    return DerivedKey(f"body:{_text_of(mac)}")


def child_key(secret: bytes, parent: Key, *parts: Part, correction: bytes = b"") -> str:
    """The key to send downstream: the same for every attempt of the parent, different per parts.

    Keyed, so that nobody who sees a child key can guess another; framed, so that no two lists of
    parts meet. `correction` tells a corrected request from the one before it, so that nobody
    downstream sees one key with two requests. Raises `KeyInvalid` without parts: a child needs a
    name.
    """
    if not parts:
        raise KeyInvalid("a child key needs at least one part that names the call", key=parent.text)
    names = parent.caller.encode(), parent.text.encode()
    if correction:
        framed = frame(b"child key of a correction 1", *names, correction, frame_parts(*parts))
    else:
        framed = frame(b"child key 1", *names, frame_parts(*parts))
    return f"child:{_text_of(hmac.digest(checked_secret(secret), framed, 'sha256'))}"


def checked_secret(secret: bytes | None) -> bytes:
    """The secret itself; raises `SecretMissing` when there is none or it is too short."""
    if not secret:
        raise SecretMissing(
            "keyed hashes need a secret that stays the same over restarts: pass secret=… or set "
            "RETRYSAFE_SECRET (for example to the output of: openssl rand -hex 32)"
        )
    if len(secret) < SECRET_MINIMUM_BYTES:
        raise SecretMissing(f"the secret must have at least {SECRET_MINIMUM_BYTES} bytes")
    return secret


def _text_of(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

"""The headers that retrysafe reads and writes, to the letter of their specifications.

Owns the syntax of `Idempotency-Key` (a string item of RFC 8941), of `Prefer` (RFC 7240), of
`Retry-After`, of lengths and of paths in links. It must not know what a key or a preference leads
to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, NamedTuple
from urllib.parse import quote

from retrysafe.core.keys.key import KEY_LIMIT_CHARACTERS
from retrysafe.errors import KeyInvalid

# A key of 255 characters with all of them escaped, and parameters of more than that.
HEADER_LIMIT_BYTES: Final = 4_096

# Quantifiers of characters are possessive, and every group that is repeated begins with a character
# that nothing before it can take: no header makes a match take much longer than one pass over it.
# Groups are not, because early releases of Python 3.11 match possessive groups wrongly.
#
# RFC 8941: printable ASCII between quotes, where only the quote and the backslash are escaped.
_STRING: Final = rb'"[ !#-\[\]-~]*+(?:\\["\\][ !#-\[\]-~]*+)*"'
_BARE_ITEM: Final = b"|".join(
    (
        rb"-?[0-9]{1,12}\.[0-9]{1,3}",
        rb"-?[0-9]{1,15}",
        _STRING,
        rb"[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*+",
        rb":[A-Za-z0-9+/=]*+:",
        rb"\?[01]",
    )
)
_PARAMETERS: Final = rb"(?:; *+[a-z*][a-z0-9_\-.*]*+(?:=(?:%b))?)*" % _BARE_ITEM
_STRING_ITEM: Final = re.compile(rb" *+(%b)%b *+" % (_STRING, _PARAMETERS))
_STRING_START: Final = re.compile(rb" *+%b" % _STRING)
_ESCAPED: Final = re.compile(rb"\\(.)")
_UNPRINTABLE: Final = re.compile(rb"[^ -~]")
# A string as nearly all are: without escapes, parameters or blanks around it, and not too long.
_PLAIN_KEY: Final = re.compile(rb'"([ !#-\[\]-~]{1,%d}+)"' % KEY_LIMIT_CHARACTERS)
# What clients send that know nothing of structured fields: a UUID, order-42, base64.
_BARE_KEY: Final = re.compile(rb"[!#-+\--:<-~]++")
# What a path means something else by, in a URL.
_DOT_SEGMENTS: Final = frozenset({".", ".."})


def parse_key(lines: Sequence[bytes], *, strict: bool) -> str:
    """The key in the lines of an `Idempotency-Key` header; raises `KeyInvalid` for anything odd.

    A string in quotes is read as RFC 8941 says; its parameters are checked, then left out. Unless
    `strict`, a value without quotes is taken as it stands, because that is what most clients send:
    `abc` and `"abc"` are then the same key.
    """
    if len(lines) != 1:
        raise KeyInvalid(f"the key is sent in one header line, got {len(lines)} lines")
    plain = _PLAIN_KEY.fullmatch(lines[0])
    if plain is not None:
        return _addressable(plain[1].decode("ascii"))
    if len(lines[0]) > HEADER_LIMIT_BYTES:
        raise KeyInvalid(
            f"the header line with the key has at most {HEADER_LIMIT_BYTES:,} bytes, "
            f"got {len(lines[0]):,}"
        )
    # HTTP allows tabs around a value, structured fields do not.
    line = lines[0] if strict else lines[0].strip(b" \t")
    item = _STRING_ITEM.fullmatch(line)
    if item is not None:
        text = item[1][1:-1]
        if 0x5C in text:  # A backslash.
            text = _ESCAPED.sub(rb"\1", text)
    elif not strict and _BARE_KEY.fullmatch(line) is not None:
        text = line
    else:
        raise KeyInvalid(_complaint(line, strict=strict))
    if not 0 < len(text) <= KEY_LIMIT_CHARACTERS:
        raise KeyInvalid(
            f"a key has 1 to {KEY_LIMIT_CHARACTERS} characters, got {len(text)}",
            key=text[:KEY_LIMIT_CHARACTERS].decode("ascii") or None,
        )
    return _addressable(text.decode("ascii"))


def _addressable(key: str) -> str:
    """The key, which has a place at the status URL; raises `KeyInvalid` for `.` and `..`.

    Clients and proxies take such segments out of a path, also in their escaped form, and would ask
    for the status of nothing.
    """
    if key in _DOT_SEGMENTS:
        raise KeyInvalid(
            f"{key!r} cannot be a key, because it cannot stand in a URL: send one with other "
            "characters than dots",
            key=key,
        )
    return key


def _complaint(line: bytes, *, strict: bool) -> str:
    """Why the line holds no key, in words that its sender can act on."""
    if not line.strip(b" "):
        return "the key is empty"
    if _UNPRINTABLE.search(line) is not None:
        return "a key consists of printable ASCII characters; encode or hash anything else"
    if line.lstrip(b" ").startswith(b'"'):
        string = _STRING_START.match(line)
        if string is None:
            return (
                "the key's closing quote is missing, or a backslash stands before something other "
                "than a quote or a backslash"
            )
        if line[string.end() :].lstrip(b" ").startswith(b","):
            return "one key is sent with a request, got a list"
        return "what follows the key is not a list of parameters such as ;name=1"
    if strict:
        return 'a key is sent as a string in double quotes, as in "order-42"'
    return (
        "a key without quotes has no quotes, commas, semicolons or spaces in it: send it in "
        'double quotes, as in "order 42"'
    )


class Preference(NamedTuple):
    """What the client asks for in `Prefer`: to wait, to be answered at once, or neither."""

    wait_seconds: float | None
    respond_async: bool


NO_PREFERENCE: Final = Preference(None, False)

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_QUOTED: Final = rb'"(?:[^"\\]|\\.)*"'
# One member of the list, up to its comma or the end; a quoted text may contain both.
_MEMBER: Final = re.compile(rb'([^,"]*+(?:%b[^,"]*+)*)(?:,|\Z)' % _QUOTED, re.DOTALL)
_PREFERENCE: Final = re.compile(
    rb"[ \t]*+(%b)(?:[ \t]*+=[ \t]*+(%b|%b)?)?[ \t]*+(?:;.*)?" % (_TOKEN, _TOKEN, _QUOTED),
    re.DOTALL,
)
_SECONDS: Final = re.compile(rb"[0-9]++")
# Longer waits are the longest wait: 68 years, the number that RFC 9111 gives for the same case.
_LONGEST_WAIT_SECONDS: Final = 2.0**31


def parse_prefer(lines: Sequence[bytes]) -> Preference:
    """What the lines of a `Prefer` header ask for; what cannot be understood is not asked for.

    Of a preference that is sent several times the first one counts, as RFC 7240 says.
    """
    if not lines:
        return NO_PREFERENCE
    found: dict[bytes, bytes] = {}
    for line in lines:
        position = 0
        while position < len(line):
            member = _MEMBER.match(line, position)
            if member is None:
                break  # A quote that is never closed: nothing after it can be told apart.
            position = member.end()
            preference = _PREFERENCE.fullmatch(member[1])
            if preference is not None:
                value = preference[2] or b""
                if value.startswith(b'"'):
                    value = _ESCAPED.sub(rb"\1", value[1:-1])
                found.setdefault(preference[1].lower(), value)
    wait = found.get(b"wait", b"")
    return Preference(
        min(float(wait), _LONGEST_WAIT_SECONDS) if _SECONDS.fullmatch(wait) else None,
        # An empty value is the same as none; any other means something that nobody defined.
        found.get(b"respond-async") == b"",
    )


# More digits than any size has that a computer can count.
_LENGTH_DIGITS: Final = 18


def length_of(text: str | bytes) -> int | None:
    """The number of bytes in a `Content-Length`; None for what is no number of them.

    One with more digits than any length has is the largest length: `int` would raise for it.
    """
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text) if len(text) <= _LENGTH_DIGITS else 10**_LENGTH_DIGITS


def link_path(path: str) -> str:
    """A decoded path as it is written in links and in `Location`.

    Clients choose it where an application is mounted under a parameter: a line break in it would
    begin a header of the client's own.
    """
    return quote(path, safe="/:@!$&'()*+,;=~", errors="surrogateescape")


_SECOND: Final = timedelta(seconds=1)


def retry_after_text(remaining: timedelta) -> bytes:
    """The value of `Retry-After`: whole seconds, rounded up, and at least one."""
    # Negated, because the division of timedeltas rounds down.
    return b"%d" % max(1, -(-remaining // _SECOND))

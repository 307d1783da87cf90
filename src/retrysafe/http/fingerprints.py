"""The fingerprint of a request: method, path, query, and what its body says under a rule.

Owns what is hashed and in which order. Two requests are the same exactly when all of these are;
headers other than the content's type and encoding count only where the rule names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

from retrysafe.core.keys.canonical import DIGEST_BYTES, TooDeep, canonical_bytes, frame
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.model import Fingerprint
from retrysafe.http.bodies import (
    RAW,
    content_of,
    fields_of,
    media_type_parameters,
    too_deep,
)
from retrysafe.http.request import Request, plain_path, served_path

# Every part but the last carries its length. The last one's first byte says how it was made: as a
# value (j, i) or as the bytes themselves (r).
_FORM: Final = b"http request 1:%d:%b%d:%b%d:%b%d:%b"


def request_fingerprints(request: Request, rule: FingerprintRule) -> tuple[Fingerprint, ...]:
    """The request's fingerprint under the rule, then under each earlier one.

    The rule's pointers lead into JSON bodies, and name the fields of forms and multipart forms:
    `/name` is all values that were sent under that name. Any other body counts byte by byte. Of the
    query every field counts that the rule does not leave out, and of the headers those that it
    names. Unless the path is exact, slashes at its end and double ones do not count: a retry by the
    other spelling is the same request. Raises `FingerprintImpossible` past a limit.
    """
    media_type, value = content_of(request)
    if not rule.previous:
        return (_under(rule, value, request.body, _head(request, media_type, rule)),)
    return tuple(
        _under(each, value, request.body, _head(request, media_type, each))
        for each in (rule, *rule.previous)
    )


def _head(request: Request, media_type: bytes, rule: FingerprintRule) -> hashlib.blake2b:
    """The hash of all but the body, for the body to be added to it."""
    if rule.reads_head:
        asked = query_bytes(request.query, rule.exclude_query)
        state = _begun(request.method, request.path, asked, media_type, request.has_exact_path)
        counted = frame(*_chosen(request, rule))
        state.update(b"h%d:%b" % (len(counted), counted))
        return state
    if request.query or len(request.path) + len(media_type) > _KEPT_LIMIT:
        asked = query_bytes(request.query)
        return _begun(request.method, request.path, asked, media_type, request.has_exact_path)
    return _begun_before(request.method, request.path, media_type, request.has_exact_path).copy()


def _chosen(request: Request, rule: FingerprintRule) -> Iterator[bytes]:
    """What the rule has count of the headers, each framed; absent and empty are two things."""
    for name in rule.header_names:
        lines = request.header_lines(name)
        # Several lines are one list, as a proxy may write them.
        yield b"+" + b", ".join(line.strip(b" \t") for line in lines) if lines else b"-"
    if rule.media_type_parameters:
        yield frame(*media_type_parameters(request))


def _begun(
    method: str,
    path: str,
    asked: bytes,
    media_type: bytes,
    has_exact_path: bool,
) -> hashlib.blake2b:
    """The hash of method, path, query and media type."""
    verb = method.encode()
    path = served_path(path) if has_exact_path else plain_path(path)
    path_bytes = path.encode("utf-8", "surrogatepass")
    head = _FORM % (
        len(verb),
        verb,
        len(path_bytes),
        path_bytes,
        len(asked),
        asked,
        len(media_type),
        media_type,
    )
    return hashlib.blake2b(head, digest_size=DIGEST_BYTES)


# Clients choose the path and the type, so what is kept of them is bounded.
_KEPT_LIMIT: Final = 512


# An application has few paths that are not made of ids, and they get nearly all of its requests.
@lru_cache(maxsize=512)
def _begun_before(
    method: str,
    path: str,
    media_type: bytes,
    has_exact_path: bool,
) -> hashlib.blake2b:
    """The same for a request without a query. To be copied, not to be changed."""
    return _begun(method, path, b"", media_type, has_exact_path)


def _under(rule: FingerprintRule, value: Any, body: bytes, state: hashlib.blake2b) -> Fingerprint:
    if value is RAW:
        state.update(b"r")
        # Apart, because joining the two would copy a body of any size.
        state.update(body)
    else:
        try:
            state.update(rule.counting_bytes(value))
        except TooDeep:
            raise too_deep() from None
    return Fingerprint(rule.version, state.digest())


def query_bytes(query: bytes, excluded: tuple[str, ...] = ()) -> bytes:
    """The query as it counts: its fields by name, without those that are left out.

    A query without a field is as good as none. Raises `FingerprintImpossible` for too many fields.
    """
    if not query:
        return b""
    fields = fields_of(query)
    for name in excluded:
        fields.pop(name, None)
    return canonical_bytes(fields) if fields or not excluded else b""

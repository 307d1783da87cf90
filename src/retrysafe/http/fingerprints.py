"""The fingerprint of a request: method, path, query, and what its body says under a rule.

Owns what is hashed and in which order. Two requests are the same exactly when all of these are;
headers other than the content's type and encoding do not count.
"""

from __future__ import annotations

import hashlib
from typing import Final

from retrysafe.core.canonical import NotCanonical, canonical_bytes
from retrysafe.core.fingerprint import FingerprintRule
from retrysafe.core.framing import DIGEST_BYTES
from retrysafe.core.model import Fingerprint
from retrysafe.http.bodies import RAW, Content, content_of, fields_of
from retrysafe.http.request import Request

# Every part but the last carries its length. The last one's first byte says how it was made: as a
# value (j, i) or as the bytes themselves (r).
_FORM: Final = b"http request 1:%d:%b%d:%b%d:%b%d:%b"


def request_fingerprints(request: Request, rule: FingerprintRule) -> tuple[Fingerprint, ...]:
    """The request's fingerprint under the rule, then under each earlier one.

    The rule's pointers lead into JSON bodies, and name the fields of forms and multipart forms:
    `/name` is all values that were sent under that name. Any other body counts byte by byte, and
    so does the query's every field.
    """
    content = content_of(request)
    method = request.method.encode()
    path = request.path.encode("utf-8", "surrogatepass")
    query = query_bytes(request.query) if request.query else b""
    media_type = content.media_type
    state = hashlib.blake2b(
        _FORM
        % (
            len(method),
            method,
            len(path),
            path,
            len(query),
            query,
            len(media_type),
            media_type,
        ),
        digest_size=DIGEST_BYTES,
    )
    if not rule.previous:
        return (_under(rule, content, request.body, state),)
    return tuple(
        _under(each, content, request.body, state.copy()) for each in (rule, *rule.previous)
    )


def _under(
    rule: FingerprintRule, content: Content, body: bytes, state: hashlib.blake2b
) -> Fingerprint:
    counting = None
    if content.value is not RAW:
        try:
            counting = rule.counting_bytes(content.value)
        except NotCanonical:
            pass  # Too deep: such a body equals itself, and nothing else.
    if counting is None:
        state.update(b"r")
        # Apart, because joining the two would copy a body of any size.
        state.update(body)
    else:
        state.update(counting)
    return Fingerprint(rule.version, state.digest())


def query_bytes(query: bytes) -> bytes:
    """The query as it counts: its fields by name, or its bytes when there are too many."""
    fields = fields_of(query)
    return b"r" + query if fields is RAW else canonical_bytes(fields)

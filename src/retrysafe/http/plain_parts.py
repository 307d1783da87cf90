"""Forms that every framework reads alike, which natural keys are made from alone.

Owns what a plain form is. Frameworks disagree about all others: some end a part at a bare line
feed, some find a boundary inside a value, some decode a part or its name, and many views read JSON
whatever the type of the body says. The key would be of one order, and the view would run another.
So this lists what is taken, not what is refused.
"""

from __future__ import annotations

import re
from typing import Final

from retrysafe.errors import KeyInvalid
from retrysafe.http.bodies import RAW, Content, media_type_parameters
from retrysafe.http.request import Request

_MULTIPART: Final = b"multipart/"
_URLENCODED: Final = b"application/x-www-form-urlencoded"
# What clients write as it is, whatever they percent-encode. No bracket or quote can begin a body of
# these, and none has a blank, a brace or a line's end: it is no JSON with fields, YAML or XML.
_PLAIN_FORM: Final = re.compile(
    rb"(?!\[)(?:[A-Za-z0-9*\-._~!'()+&=\[\]:/@,$?]++|%[0-9A-Fa-f]{2})*+"
)
_HEAD_END: Final = b"\r\n\r\n"
_DELIMITER: Final = re.compile(rb"--[0-9A-Za-z_.+=/:?\-]++")
# Unquoted, other signs make another name of it: some parsers take <order> and order] for order.
_DISPOSITION: Final = re.compile(
    rb'form-data *+(?:; *+(?:(?:file)?name=(?:"[^"\\]*+"|[\w.\-]++)'
    rb'|filename\*=[^;"\\ ]++) *+)++',
    re.IGNORECASE,
)
_PADDED_NAME: Final = re.compile(r'; *name="(?:\s|[^"]*+(?<=\s)")', re.IGNORECASE)
_CHARSET: Final = re.compile(rb'[^;]*+; *+charset=("?)(utf-?8|us-ascii)\1', re.IGNORECASE)
# Whatever some parser takes for the end of a line, and no name has.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN_ENCODINGS: Final = frozenset({b"7bit", b"8bit", b"binary"})


def require_plain_parts(request: Request, content: Content) -> None:
    """Raises `KeyInvalid` for a form that frameworks may read differently.

    Takes time in proportion to the body.
    """
    types = request.header_lines(b"content-type")
    is_form = any(line.strip(b" \t").lower().startswith(_URLENCODED) for line in types)
    if is_form and not (_has_plain_type(request) and _PLAIN_FORM.fullmatch(request.body)):
        raise KeyInvalid(
            "the key is made from a field of a form, and this body can be read in different ways: "
            "percent-encode all but letters, digits and -._~, as browsers do (curl: "
            "--data-urlencode), with no charset but utf-8; a body that is JSON says so with "
            "Content-Type: application/json"
        )
    if not any(line.strip(b" \t").lower().startswith(_MULTIPART) for line in types):
        return
    if content[1] is RAW or not _is_plain(request):
        raise KeyInvalid(
            "the key is made from a field of a multipart form, and frameworks read this form in "
            "different ways: send it as browsers do, with a boundary that no value has in it, "
            "lines of a part's head that end with CR LF, name and filename alone in "
            "Content-Disposition, no blanks around a name, and values in UTF-8 that are not "
            "encoded otherwise"
        )


def _has_plain_type(request: Request) -> bool:
    parameters = [text.lower() for text in media_type_parameters(request)]
    return parameters in ([], [b"charset", b"utf-8"])


def _is_plain(request: Request) -> bool:
    if not _has_plain_type(request):
        return False
    body = request.body
    # The body has been read, so it begins with its delimiter.
    delimiter = body.partition(b"\r\n")[0]
    if _DELIMITER.fullmatch(delimiter) is None:
        return False
    # Only the first one is not at the start of a line.
    if body.count(delimiter) != body.count(b"\r\n" + delimiter) + 1:
        return False
    start = len(delimiter) + 2
    while (end := body.find(_HEAD_END, start)) >= 0:
        after = body.find(delimiter, end)
        # Other characters all become the same one for frameworks that decode as ASCII.
        is_ascii = body[end:after].isascii()
        if not all(_is_plain_line(line, is_ascii) for line in body[start:end].split(b"\r\n")):
            return False
        start = after + len(delimiter) + 2
    return True


def _is_plain_line(line: bytes, is_ascii: bool) -> bool:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if _CONTROL.search(text) is not None:
        return False
    name, _, value = line.partition(b":")
    name, value = name.lower(), value.strip(b" ")
    if name == b"content-disposition":
        return _DISPOSITION.fullmatch(value) is not None and _PADDED_NAME.search(text) is None
    if name == b"content-transfer-encoding":
        return value.lower() in _PLAIN_ENCODINGS
    if name == b"content-type" and b"charset" in value.lower():
        charset = _CHARSET.fullmatch(value)
        return charset is not None and (is_ascii or charset[2].lower() != b"us-ascii")
    # Some frameworks unpack a part that says it is packed.
    return name != b"content-encoding"

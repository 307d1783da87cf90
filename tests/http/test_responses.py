"""Stored responses: what is kept, and that what was kept comes back."""

from __future__ import annotations

import django.http
import flask
import pytest
import starlette.responses
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core.model import Payload
from retrysafe.core.values.trees import NotReadable, NotStorable
from retrysafe.errors import PolicyInvalid
from retrysafe.http.responses import (
    NEVER_STORED,
    STORED_HEADERS,
    Response,
    ResponseCodec,
    response_of,
)

CODEC = ResponseCodec(("X-Total",))
header_texts = st.binary(max_size=20).filter(lambda text: b"\n" not in text and b"\r" not in text)


@given(
    st.integers(200, 599),
    st.lists(st.tuples(st.sampled_from(sorted(STORED_HEADERS | {b"x-total"})), header_texts)),
    st.binary(max_size=100),
)
def test_what_is_kept_comes_back(status, headers, body):
    """Status, body, and every header on the list, repeated ones in their order."""
    decoded = CODEC.decode(CODEC.encode(Response(status, headers, body)))
    kept = [header for header in decoded.headers if header[0] != b"content-length"]
    assert (decoded.status, kept, decoded.body) == (status, headers, body)
    lengths = [value for name, value in decoded.headers if name == b"content-length"]
    assert lengths == ([] if status in (204, 205, 304) else [b"%d" % len(body)])


@given(st.sampled_from(sorted(NEVER_STORED)), header_texts)
def test_what_belongs_to_one_client_is_never_kept(name, text):
    """Cookies, hop-by-hop and tracing headers; nor anything that is on no list."""
    head = CODEC.encode(Response(200, [(name.upper(), text), (b"x-other", text)], b"")).head
    assert head == b"200"


@pytest.mark.parametrize(
    "name", ["Set-Cookie", "traceparent", "X-B3-TraceId", "Date", "Connection"]
)
def test_what_belongs_to_one_client_cannot_be_asked_for(name):
    """Naming it is an error of the configuration."""
    with pytest.raises(PolicyInvalid, match=name.lower()):
        ResponseCodec((name,))


@pytest.mark.parametrize("extra", ["X-A", (7,), ("Ünsinn",)])
def test_names_of_headers_are_checked(extra):
    """A text alone would be taken for its letters."""
    with pytest.raises(PolicyInvalid, match="list of header names"):
        ResponseCodec(extra)


def test_a_header_with_a_line_break_is_dropped():
    """It could forge other headers in what is stored."""
    headers = [(b"location", b"/a\nset-cookie\nx"), (b"link", b"a\rb"), (b"etag", b'"1"')]
    assert CODEC.encode(Response(200, headers, b"")).head == b'200\netag\n"1"'


@pytest.mark.parametrize(
    "payload",
    [
        Payload("json.1", b"200", b""),
        Payload("http.1", b"", b""),
        Payload("http.1", b"2000", b""),
        Payload("http.1", b"200\nlocation", b""),
    ],
)
def test_damaged_or_foreign_outcomes_are_not_shown(payload):
    """Rather no response than a made-up one."""
    with pytest.raises(NotReadable):
        CODEC.decode(payload)


def test_streams_have_nothing_to_store():
    """Which the engine remembers as done without an outcome."""
    with pytest.raises(NotStorable, match="streamed"):
        CODEC.encode(Response(200, [], b"", is_streamed=True))


def test_responses_of_frameworks_are_understood():
    """So that a transaction can be completed with the response that is about to be returned."""
    for made in (
        starlette.responses.Response(b"x", 201, {"Location": "/1"}),
        flask.Response(b"x", 201, {"Location": "/1"}),
        django.http.HttpResponse(
            b"x", "text/plain; charset=utf-8", status=201, headers={"Location": "/1"}
        ),
    ):
        response = response_of(made)
        assert (response.status, response.body) == (201, b"x")
        assert (b"location", b"/1") in [(name.lower(), text) for name, text in response.headers]
    for wrong in ({"id": 1}, None, starlette.responses.StreamingResponse(iter([]))):
        with pytest.raises(NotStorable, match="response"):
            response_of(wrong)

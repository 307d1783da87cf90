"""The request: how its headers are found."""

from __future__ import annotations

from retrysafe.http.request import Request

REQUEST = Request("POST", "/", b"", [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", b"")])


def test_a_header_is_its_first_line():
    assert REQUEST.header(b"a") == b"1"
    assert REQUEST.header(b"c") == b""
    assert REQUEST.header(b"d") is None


def test_lines_come_in_the_order_sent():
    assert REQUEST.header_lines(b"a") == [b"1", b"3"]
    assert REQUEST.header_lines(b"d") == []


def test_requests_share_no_parameters():
    """What one rule takes from a path never shows up in another request."""
    other = Request("POST", "/", b"", [])
    REQUEST.parameters["id"] = "7"
    assert other.parameters == {}

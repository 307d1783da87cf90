"""The request: how its headers are found, and whether all of its body is there."""

from __future__ import annotations

import pytest

from retrysafe.http import Protection
from retrysafe.http.request import Request
from tests.http.building import request

REQUEST = Request("POST", "/", b"", [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", b"")])


def test_a_header_is_its_first_line():
    assert REQUEST.header(b"a") == b"1"
    assert REQUEST.header(b"c") == b""
    assert REQUEST.header(b"d") is None


def test_lines_come_in_the_order_sent():
    assert REQUEST.header_lines(b"a") == [b"1", b"3"]
    assert REQUEST.header_lines(b"d") == []


def test_headers_are_text_by_name_in_any_letter_case():
    """Several lines are one value, as HTTP joins them; what is not there is not there."""
    headers = REQUEST.headers
    assert (headers["A"], headers["a"], headers.get("C")) == ("1, 3", "1, 3", "")
    assert headers.lines("A") == ["1", "3"]
    assert headers.get("d") is None
    assert "B" in headers
    assert "d" not in headers
    assert (list(headers), len(headers)) == (["a", "b", "c"], 3)
    with pytest.raises(KeyError):
        headers["Kontö-Δ"]


def test_requests_share_no_parameters():
    """What one rule takes from a path never shows up in another request."""
    other = Request("POST", "/", b"", [])
    REQUEST.parameters["id"] = "7"
    assert other.parameters == {}


@pytest.mark.parametrize(
    ("headers", "is_cut_off"),
    [
        ((), False),
        (((b"content-length", b"3"),), False),
        (((b"content-length", b"2"),), False),
        (((b"content-length", b"4"),), True),
        (((b"content-length", b"many"),), False),
        (((b"content-length", b"4"), (b"content-encoding", b"gzip")), False),
    ],
)
def test_a_body_is_cut_off_when_less_has_arrived_than_was_declared(headers, is_cut_off):
    """One that was decoded on its way has a length of its own."""
    assert Protection.is_cut_off(request(b"abc", headers=headers)) is is_cut_off

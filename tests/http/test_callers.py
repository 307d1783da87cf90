"""Callers: who sent the request, and that no secret becomes part of the answer."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe import GLOBAL, Key
from retrysafe.core.keys.secret import Secrets
from retrysafe.errors import InvalidInput, PolicyInvalid
from retrysafe.http import callers
from retrysafe.http.callers import (
    Credential,
    api_key,
    basic_user,
    bearer_token,
    checked_caller_of,
    gateway_header,
)
from retrysafe.http.request import Request

SECRET = b"0123456789abcdef0123456789abcdef"
TOKENS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=600)


def sent(*lines: bytes, name: bytes = b"authorization") -> Request:
    return Request("POST", "/", b"", [(b"host", b"h"), *((name, line) for line in lines)])


def stored(credential, secret=None):
    """The caller that the protection makes of a credential."""
    return callers.Naming(Secrets(secret)).named(credential)


def basic(pair: bytes) -> bytes:
    return b"Basic " + base64.b64encode(pair)


class Slotted:
    """A caller of the user's own that cannot be referred to weakly, nor be hashed."""

    __slots__ = ()
    __hash__ = None

    def __call__(self, request: Request) -> str:
        return "alice"


def test_of_a_caller_that_is_not_ours_nothing_is_known():
    """Whatever kind of callable it is: what it looks at may be anything, so caches must not."""
    for caller in (Slotted(), Slotted().__call__, lambda request: "alice", str.upper):
        assert callers.vary_of(caller) == "*"
    assert callers.vary_of(bearer_token) == "Authorization"
    assert callers.vary_of(GLOBAL) is None


@given(TOKENS, TOKENS)
def test_a_token_becomes_a_digest_that_fits_a_key(first, second):
    """Equal tokens are one caller, others differ, and the store never sees a token."""
    for secret in (None, SECRET):
        caller = stored(bearer_token(sent(b"Bearer " + first.encode())), secret)
        assert Key("k", caller=caller).caller == caller
        assert len(first) < 8 or first not in caller
        other = stored(bearer_token(sent(b"bearer  " + second.encode())), secret)
        assert (caller == other) == (first == second)


def test_tokens_of_any_length_are_told_apart_and_long_ones_are_not_kept():
    """Clients choose their tokens, so those that are kept in memory are short."""
    callers._bearer_before.cache_clear()
    for length in (4_089, 4_090, 60_000):
        token = b"t" * (length - 1)
        digests = {hashlib.sha256(token + end).hexdigest()[:40] for end in (b"1", b"2")}
        told = {stored(bearer_token(sent(b"Bearer " + token + end))) for end in (b"1", b"2")}
        assert told == {f"bearer:{digest}" for digest in digests}
    assert callers._bearer_before.cache_info().currsize == 2


def test_the_digest_of_a_token_is_frozen():
    """It is stored with every key: another one would turn retries into new requests."""
    token = bearer_token(sent(b"Bearer token-1"))
    assert stored(token) == f"bearer:{hashlib.sha256(b'token-1').hexdigest()[:40]}"
    assert stored(token, SECRET) == "bearer:3e5252e1e394e3b277d8397d404d06b22a225be5"
    key = api_key()(sent(b"live_42", name=b"x-api-key"))
    assert stored(key) == f"api-key:{hashlib.sha256(b'live_42').hexdigest()[:40]}"
    assert stored(key, SECRET) == "api-key:074f4f9a6bc5157bb7c3b1578be0803ce65683fa"


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (b"",),
        (b"Bearer",),
        (b"Bearer ",),
        (b"Bearer\ttoken",),
        (b"Bearertoken",),
        (b"token",),
        (b"Basic dTpw",),
        (b"Bearer a b",),
        (b"Bearer \xe9",),
        (b"Bearer a", b"Bearer a"),
        (b"Bearer a", b"Bearer b"),
    ],
)
def test_without_one_clear_token_nobody_is_the_caller(lines):
    """With two lines, the part in front may have checked the other one."""
    assert bearer_token(sent(*lines)) is None


@pytest.mark.parametrize(
    ("pair", "caller"),
    [
        (b"alice:secret", "basic:alice"),
        (b"alice:", "basic:alice"),
        (b"alice:a:b", "basic:alice"),
        ("zoë:x".encode(), "basic:zoë"),
        (b"a" * 249 + b":x", "basic:" + "a" * 249),
        (b"a" * 250 + b":x", None),
        (b"alice", None),
        (b":secret", None),
        (b"al\x00ice:x", None),
        (b"al\nice:x", None),
        (b"\xff:x", None),
    ],
)
def test_the_user_of_basic_credentials_is_the_name_alone(pair, caller):
    """Cut off or cleaned up, two names could become one; such a name is nobody's."""
    assert basic_user(sent(basic(pair))) == caller


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (b"Basic",),
        (b"Basic !!!!",),
        (b"Basic YWxp!Y2U6eA==",),
        (b"Basic YWxpY2U6", b"Basic YWxpY2U6"),
        (b"Basic YWxpY2U",),
        (b"Bearer YWxpY2U6eA==",),
    ],
)
def test_broken_basic_credentials_are_nobodys(lines):
    assert basic_user(sent(*lines)) is None


def test_a_user_is_never_taken_for_the_holder_of_a_token():
    token = stored(bearer_token(sent(b"Bearer t")))
    assert basic_user(sent(basic(token.encode() + b":x"))) != token


@pytest.mark.parametrize(
    ("lines", "caller"),
    [
        ((b"acct_1",), "acct_1"),
        ((b"\t acct_1 ",), "acct_1"),
        (("kontö".encode(),), "kontö"),
        ((b"a" * 255,), "a" * 255),
        ((b"a" * 256,), None),
        ((), None),
        ((b"",), None),
        ((b"  ",), None),
        ((b"a\x00",), None),
        ((b"\xff",), None),
        ((b"a", b"a"), None),
        ((b"a", b"b"), None),
    ],
)
def test_the_caller_in_a_gateways_header(lines, caller):
    assert gateway_header("X-Account")(sent(*lines, name=b"x-account")) == caller


@pytest.mark.parametrize("name", ["", "X Account", "X-Account:", "Kontö", "a\r\nb"])
def test_a_name_that_no_header_has_is_refused_when_it_is_configured(name):
    for made in (gateway_header, api_key):
        with pytest.raises(PolicyInvalid, match="header's name"):
            made(name)


@pytest.mark.parametrize(
    "name",
    ["Authorization", "Proxy-Authorization", "X-API-Key", "x-api-key", "Api-Key", "apikey",
     "Cookie", "X-Auth-Token", "X-Access-Token", "X-Forwarded-Access-Token", "Private-Token",
     "X-Password", "X-Client-Secret", "Cf-Access-Jwt-Assertion", "X-Auth", "X-Session",
     "X-Session-Id", "X-Bearer", "X-Auth-Key", "X-Shop-Key", "X-SID"],
)  # fmt: skip
def test_a_header_that_holds_a_credential_is_no_gateways(name):
    """It would be stored in clear."""
    with pytest.raises(PolicyInvalid, match="api_key"):
        gateway_header(name)


@pytest.mark.parametrize("name", ["X-Auth-Request-User", "X-Authenticated-User", "X-Tenant"])
def test_a_header_with_a_name_in_it_is_a_gateways(name):
    assert gateway_header(name)(sent(b"acme", name=name.lower().encode())) == "acme"


@pytest.mark.parametrize(
    "lines", [(), (b"",), (b"  ",), (b"live_42", b"live_42"), (b"live_42", b"live_43")]
)
def test_without_one_clear_api_key_nobody_is_the_caller(lines):
    assert api_key("X-API-Key")(sent(*lines, name=b"x-api-key")) is None


def test_an_api_key_is_taken_as_it_is_sent():
    """Any bytes but the blanks around them: what counts as a key is the application's to know."""
    holder = api_key("X-Key")
    assert holder(sent(b" \xff-1\t", name=b"x-key")) == Credential("api-key", b"\xff-1")


def test_what_a_caller_function_returned_is_not_shown():
    """It may be a token, and the refusal goes to a log."""
    with pytest.raises(InvalidInput, match="got a bytes") as caught:
        callers.Naming(Secrets()).named(b"tok_live_1")
    assert "tok_live_1" not in str(caught.value)


def test_a_credential_is_never_shown():
    """Neither by its own words, nor by a request's, nor in an error about it."""
    shown = repr(Credential("session", "s3cret-value"))
    assert "session" in shown
    assert "s3cret" not in shown
    request = sent(b"Bearer s3cret-value")
    assert "s3cret" not in repr(request) + repr(request.headers)
    with pytest.raises(InvalidInput) as caught:
        Credential("session", 3)
    assert "3" not in str(caught.value)


def test_a_credential_that_is_given_as_the_scheme_is_neither_stored_nor_shown():
    """Swapped with its scheme it would be a part of the caller, in clear."""
    for token in ("0123456789abcdef01234567", "sk_live_0123456789abcdefg", "4711"):
        with pytest.raises(InvalidInput, match="in this order") as caught:
            Credential(token, "session")
        assert token not in str(caught.value)


@pytest.mark.parametrize(("scheme", "value"), [("", b"v"), ("a b", b"v"), ("A", b"v"), ("a", b"")])
def test_a_credential_has_a_scheme_and_a_value(scheme, value):
    with pytest.raises(InvalidInput, match="credential"):
        Credential(scheme, value)


def test_one_value_is_another_caller_under_another_scheme_and_secret():
    """Else who may send one kind of credential could be the holder of another."""
    made = {
        stored(Credential(scheme, b"v"), secret)
        for scheme in ("bearer", "session")
        for secret in (None, SECRET, SECRET[::-1])
    }
    assert len(made) == 6


def test_a_credential_has_a_caller_for_every_secret():
    """By the first one to the eye, and the others with it."""
    credential, other = Credential("session", "v"), SECRET[::-1]
    made = callers.Naming(Secrets(SECRET, other, None)).named(credential)
    assert made == stored(credential, SECRET)
    assert list(made.by_tag.values()) == [stored(credential, key) for key in (SECRET, other, None)]
    assert not hasattr(callers.Naming(Secrets(SECRET)).named(credential), "by_tag")


@pytest.mark.parametrize("maker", [api_key, gateway_header])
def test_a_header_that_is_not_named_is_refused_when_it_is_configured(maker):
    """Later it would be each request's error, and nobody would know what to write."""
    with pytest.raises(InvalidInput, match=rf"caller={maker.__name__}\("):
        checked_caller_of(maker)


def test_a_request_shows_no_credentials():
    """Whatever raises or logs one: neither lines, nor body, nor the server's own request."""
    made = Request("POST", "/", b"", [(b"x-api-key", b"token-1")], b"token-2", {"k": b"token-3"})
    assert "token" not in repr(made)

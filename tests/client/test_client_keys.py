"""Which key a request is sent with: the caller's, an intent's, an attempt's, or a new one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import timedelta

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from retrysafe import ClaimLost, Idempotency, InvalidInput, current_attempt
from retrysafe.client import RetryPolicy, for_attempt, header_value, intent_key, one_intent
from retrysafe.errors import KeyInvalid, SecretMissing
from retrysafe.stores import MemoryStore
from tests.client.clients import CONNECTION_ERRORS
from tests.client.server import Answer, Drop

SECRET = "at least sixteen bytes"


def parsed(header: str) -> str:
    """What a server reads, by RFC 8941: quotes around, backslash before a quote or a backslash."""
    assert header[0] == header[-1] == '"'
    text, escaped = "", False
    for character in header[1:-1]:
        if escaped:
            assert character in '"\\'
            text, escaped = text + character, False
        elif character == "\\":
            escaped = True
        else:
            assert character != '"'
            text += character
    assert not escaped
    return text


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255))
def test_every_sendable_key_arrives_as_it_is(key):
    """Quotes and backslashes included."""
    assert parsed(header_value(key)) == key


@pytest.mark.parametrize("key", ["", "a" * 256, "naïve", "two\nlines", "\x7f", None, 7])
def test_a_key_that_cannot_be_sent_is_refused_before_anything_is(key):
    with pytest.raises(KeyInvalid):
        header_value(key)
    with pytest.raises(KeyInvalid):
        intent_key(key)


def test_the_callers_header_is_sent_as_it_is(server, client):
    """A key of the caller's own is kept over the retries, on every method that changes state."""
    for method in ("POST", "PUT", "DELETE"):
        server.script(Drop(after_effect=True))
        client.send(method, "/charges", headers={"idempotency-key": f'"mine {method}"'})
        assert server.keys[-2:] == [f'"mine {method}"'] * 2
    assert len(server.effects) == 3


def test_a_key_on_a_safe_method_is_taken_off(server, client):
    client.send("GET", "/charges", None, headers={"Idempotency-Key": '"mine"'})
    assert server.keys == [None]


def test_a_client_can_ask_the_server_to_wait_for_the_outcome(server, make_client):
    """`Prefer: wait=N` on every try of a request with a key; the caller's own header is kept."""
    client = make_client(policy=RetryPolicy(wait=timedelta(seconds=10)))
    server.script(Drop(after_effect=True))
    client.send("POST", "/charges")
    client.send("GET", "/charges", None)
    client.send("PUT", "/charges")
    client.send("POST", "/charges", headers={"prefer": "respond-async"})
    prefers = [seen.headers.get("prefer") for seen in server.seen]
    assert prefers == ["wait=10", "wait=10", None, None, "respond-async"]


def test_nothing_is_preferred_unless_asked_for(server, client):
    client.send("POST", "/charges")
    assert "prefer" not in server.seen[0].headers


def test_an_intent_holds_one_key_over_several_calls(server, client):
    """A caller's own loop repeats the request with one key; the next intent has another."""
    with one_intent() as key:
        for _ in range(3):
            client.send("POST", "/charges")
    with one_intent() as other:
        client.send("POST", "/charges")
    client.send("POST", "/charges")
    sent = [parsed(item) for item in server.keys]
    assert sent[:4] == [key, key, key, other]
    assert len(set(sent)) == 3
    assert len(server.effects) == 3


def test_an_intent_can_be_entered_again(server, client):
    """What was given up can be taken up later, with the same key."""
    intent = one_intent()
    for _ in range(2):
        with intent:
            client.send("POST", "/charges")
    assert len(server.effects) == 1


def test_a_stored_key_is_sent_again(server, client):
    """A key that was stored before the first call survives the process that stored it."""
    for _ in range(2):
        with intent_key("order-1001") as key:
            client.send("POST", "/charges")
    assert key == "order-1001"
    assert server.keys == ['"order-1001"'] * 2


def test_the_innermost_scope_decides_and_the_header_beats_it(server, client):
    with intent_key("outer"):
        with intent_key("inner"):
            client.send("POST", "/charges")
            client.send("POST", "/refunds", headers={"Idempotency-Key": '"explicit"'})
        client.send("POST", "/charges")
    assert server.keys == ['"inner"', '"explicit"', '"outer"']


def test_an_intent_ends_with_its_block_also_by_an_error(server, client):
    with pytest.raises(ZeroDivisionError), intent_key("short"):
        _ = 1 / 0
    client.send("POST", "/charges")
    assert server.keys != ['"short"']


def test_intents_of_threads_are_their_own(server, client):
    """A thread that is in no intent sends a new key, whatever the others hold."""
    with intent_key("here"):
        thread = threading.Thread(target=client.send, args=("POST", "/charges"))
        thread.start()
        thread.join(10)
    assert server.keys != ['"here"']
    assert len(server.keys) == 1


@pytest.mark.parametrize("make_client", ["httpx", "httpx-async"], indirect=True)
def test_an_extension_gives_one_request_its_key(server, client):
    """Text is put into the header's form; None sends no key, and so no retry."""
    server.script(Drop(after_effect=True))
    with intent_key("outer"):
        client.send("POST", "/charges", extensions={"idempotency_key": 'say "x"'})
    assert server.keys == ['"say \\"x\\""'] * 2
    server.script(Answer(503))
    answer = client.send("POST", "/charges", extensions={"idempotency_key": None})
    assert (answer.status, answer.tries, server.keys[2:]) == (503, None, [None])


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_that_keeps_the_method_keeps_the_key(server, client, status):
    """It is the same request at another address, retries included."""
    server.script(
        Answer(503), Answer(status, {"Location": "/moved"}), Drop(after_effect=True), Answer(503)
    )
    answer = client.send("POST", "/charges", b"body", redirects=True)
    assert answer.replayed
    assert server.effects == [("/moved", b"body")]
    assert len(server.keys) == 5
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize("status", [302, 303])
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": '"mine"'}], ids=["new", "explicit"])
def test_a_redirect_that_changes_the_method_drops_the_key(server, client, status, headers):
    """The GET is another request, and a key belongs to one."""
    server.script(Answer(status, {"Location": "/result"}))
    client.send("POST", "/charges", redirects=True, headers=headers)
    assert [(seen.method, seen.path) for seen in server.seen] == [
        ("POST", "/charges"),
        ("GET", "/result"),
    ]
    assert server.keys[0] is not None
    assert server.keys[1] is None


@pytest.mark.parametrize("make_client", ["httpx"], indirect=True)
def test_an_httpx_request_that_is_sent_again_keeps_its_key(server, client):
    """Whoever sends the same request object again means the same operation."""
    request = client.client.build_request("POST", f"{server.url}/charges", json={})
    for _ in range(2):
        client.client.send(request)
    assert len(server.effects) == 1
    assert isinstance(request, httpx.Request)


@pytest.mark.parametrize("make_client", ["requests"], indirect=True)
def test_a_prepared_request_that_is_sent_again_keeps_its_key(server, client):
    """Whoever sends the same request object again means the same operation."""
    request = client.client.prepare_request(requests.Request("POST", f"{server.url}/charges"))
    for _ in range(2):
        client.client.send(request)
    assert len(server.effects) == 1


class Shop:
    """An object with a store, whose operations call the server downstream."""

    def __init__(self, **options) -> None:
        options = {"caller": "shop", "secret": SECRET, **options}
        self.idem = Idempotency(MemoryStore(), **options)


@pytest.fixture
def shop():
    made = Shop()
    yield made
    made.idem.close()


def test_a_takeover_repeats_the_child_key_downstream(server, client, shop):
    """The first attempt dies after its call; the second one gets that call's answer."""
    attempts = []

    def checkout():
        attempt = current_attempt()
        attempts.append(attempt.number)
        with for_attempt(attempt, "payments"):
            answer = client.send("POST", "/charges", b'{"amount": 5}')
        if attempt.number == 1:
            raise ConnectionError("the worker lost its database")
        return [answer.body.decode(), answer.replayed]

    with pytest.raises(ConnectionError):
        shop.idem.run("order-1", checkout, request=None)
    assert shop.idem.run("order-1", checkout, request=None) == ['{"number": 1}', True]
    assert attempts == [1, 2]
    assert server.effects == [("/charges", b'{"amount": 5}')]
    # Another operation is another parent, and so another key.
    with pytest.raises(ConnectionError):
        attempts.clear()
        shop.idem.run("order-2", checkout, request=None)
    assert len(set(server.keys)) == 2


def test_a_named_call_sends_the_child_key_of_that_name(server, client, shop):
    """What the transport sends is what `attempt.child_key` says, per element of a fan-out."""

    def notify():
        attempt = current_attempt()
        with for_attempt(attempt, "payments", name="charge"):
            client.send("POST", "/charges")
        for row in (7, 8):
            with for_attempt(attempt, "mail", row, name="send"):
                client.send("POST", "/mails", str(row).encode())
        with for_attempt(attempt, "mail", 9):
            client.send("POST", "/mails?draft=1", b"9")
        return [
            attempt.child_key("payments", "charge"),
            attempt.child_key("mail", "send", 7),
            attempt.child_key("mail", "send", 8),
            attempt.child_key("mail", "POST /mails", 9),
        ]

    wanted = shop.idem.run("order-1", notify, request=None)
    assert [parsed(key) for key in server.keys] == wanted
    assert len(set(wanted)) == 4


def test_two_calls_with_one_child_key_are_refused(server, client, shop):
    """The second one would get the first one's answer, and its effect would be lost."""

    def pay_twice():
        with for_attempt(current_attempt(), "payments"):
            client.send("POST", "/charges")
            with pytest.raises(InvalidInput, match="same child key"):
                client.send("POST", "/charges")
            client.send("POST", "/refunds")

    shop.idem.run("order-1", pay_twice, request=None)
    assert [path for path, _ in server.effects] == ["/charges", "/refunds"]


@pytest.mark.parametrize("make_client", ["httpx", "requests"], indirect=True)
def test_two_simultaneous_calls_with_one_child_key_are_refused(server, client, shop):
    """A fan-out that forgot to say which element it is for is told so before it is sent."""
    entered, leave = threading.Event(), threading.Event()

    def hold(exchange):
        entered.set()
        assert leave.wait(10)
        exchange.answer(201, {}, b"")

    server.script(hold)

    def fan_out():
        with for_attempt(current_attempt(), "mail"), ThreadPoolExecutor(1) as pool:
            first = pool.submit(copy_context().run, client.send, "POST", "/mails", b"1")
            assert entered.wait(10)
            try:
                with pytest.raises(InvalidInput, match="same child key"):
                    client.send("POST", "/mails", b"2")
            finally:
                leave.set()
            first.result(10)

    shop.idem.run("order-1", fan_out, request=None)
    assert len(server.seen) == 1


def test_a_call_that_was_given_up_may_be_made_again(server, client, shop):
    """With the same key, so that it cannot happen twice."""
    server.script(*[Drop(after_effect=True)] * RetryPolicy().tries_limit)

    def pay():
        with for_attempt(current_attempt(), "payments"):
            with pytest.raises(CONNECTION_ERRORS):
                client.send("POST", "/charges")
            return client.send("POST", "/charges").replayed

    assert shop.idem.run("order-1", pay, request=None) is True
    assert len(server.effects) == 1
    assert len(set(server.keys)) == 1


def test_an_attempt_that_lost_its_claim_sends_nothing_more(server, client, shop):
    """A zombie stops before its next try, not only before its next call."""

    def pay():
        attempt = current_attempt()

        def lose_the_claim(exchange):
            # What a renewal does that the store refuses.
            attempt._lease.revoke()
            exchange.answer(503, {}, b"")

        server.script(lose_the_claim)
        with for_attempt(attempt, "payments"):
            with pytest.raises(ClaimLost):
                client.send("POST", "/charges")
            client.send("POST", "/refunds")

    with pytest.raises(ClaimLost):
        shop.idem.run("order-1", pay, request=None)
    assert len(server.seen) == 1


def test_a_missing_secret_shows_before_anything_is_sent():
    shop = Shop(secret=None)

    def pay():
        with pytest.raises(SecretMissing):
            for_attempt(current_attempt(), "payments")

    shop.idem.run("order-1", pay, request=None)
    shop.idem.close()

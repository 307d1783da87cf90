"""Webhooks: signed requests to a real HTTP server, and what its answers mean."""

from __future__ import annotations

import asyncio
import hmac
import threading
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from retrysafe import InvalidInput
from retrysafe.errors import DeliveryFailed, SecretMissing
from retrysafe.relay import AsyncRelay, Delivery, Relay
from retrysafe.relay.signing import secret_bytes, signed_headers, verify_webhook, webhook_id
from retrysafe.relay.targets.webhooks import AsyncWebhook, Webhook, _retry_after
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore
from tests.forking import exit_code, fork
from tests.relay.scripted import entry, stage
from tests.servers.process import free_port

SECRET = "0123456789abcdef"
OTHER_SECRET = "fedcba9876543210"
NOW = 1_700_000_000


class Receiver:
    """A real HTTP server that writes down what it gets and answers as told."""

    def __init__(self):
        self.requests = []
        # From where each of them came.
        self.addresses = []
        self.answers = []
        receiver = self

        class Answering(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests.append((dict(self.headers), body))
                receiver.addresses.append(self.client_address)
                status, headers = receiver.answers.pop(0) if receiver.answers else (204, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def keep_connections(self):
        self._server.RequestHandlerClass.protocol_version = "HTTP/1.1"

    @staticmethod
    def pause(seconds):
        """Lets the server's threads work."""
        threading.Event().wait(seconds)

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


def delivery(**changes):
    fields = {
        "key": 'entry:a"b\\c',
        "topic": "orders.paid",
        "body": b'{"order": 7}',
        "content_type": "application/json",
        "aggregate": "order-7",
        "attempt": 2,
        "staged_at": datetime(2024, 1, 1, tzinfo=UTC),
    }
    return Delivery(**(fields | changes))


def send(kind, url, item=None, secret=SECRET, **options):
    """Delivers once, with the blocking or the async kind."""
    item = item or delivery()
    if kind == "blocking":
        target = Webhook(url, secret, now_seconds=lambda: NOW, **options)
        try:
            run_sync(target.deliver(item))
        finally:
            run_sync(target.close())
        return

    async def main():
        target = AsyncWebhook(url, secret, now_seconds=lambda: NOW, **options)
        try:
            await target.deliver(item)
        finally:
            await target.close()

    asyncio.run(main())


both = pytest.mark.parametrize("kind", ["blocking", "async"])


@both
def test_a_request_says_what_it_is_and_who_sent_it(receiver, kind):
    """The key as a structured field string, and a signature that another library would accept."""
    send(kind, receiver.url)
    ((headers, body),) = receiver.requests
    found = {name.lower(): value for name, value in headers.items()}
    assert body == b'{"order": 7}'
    assert found["idempotency-key"] == '"entry:a\\"b\\\\c"'
    assert (found["content-type"], found["retrysafe-topic"]) == ("application/json", "orders.paid")
    assert (found["retrysafe-attempt"], found["webhook-timestamp"]) == ("2", str(NOW))
    # By hand, as the scheme has it.
    message_id = webhook_id('entry:a"b\\c')
    signed = f"{message_id}.{NOW}.".encode() + body
    mac = hmac.digest(SECRET.encode(), signed, "sha256")
    assert found["webhook-signature"] == f"v1,{b64encode(mac).decode()}"
    assert verify_webhook(headers, body, SECRET, now_seconds=NOW + 1) == message_id


@both
@pytest.mark.parametrize("status", [301, 302, 307, 400, 404, 409, 429, 500, 503])
def test_whatever_is_no_success_is_tried_again(receiver, kind, status):
    """A redirect too: whoever answers must not choose where signed data goes."""
    receiver.answers = [(status, {"location": receiver.url, "retry-after": "7"})]
    with pytest.raises(DeliveryFailed, match=f"answered {status}") as failed:
        send(kind, receiver.url)
    assert (failed.value.retryable, failed.value.is_final) == (True, False)
    assert failed.value.retry_after == timedelta(seconds=7)
    assert len(receiver.requests) == 1


@both
def test_a_receiver_that_is_gone_is_not_asked_again(receiver, kind):
    receiver.answers = [(410, {})]
    with pytest.raises(DeliveryFailed) as failed:
        send(kind, receiver.url)
    assert failed.value.is_final
    assert not failed.value.retryable


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("99999999", 3_600), ("-1", None), ("soon", None), ("9" * 10, None), ("²", None)],
)
def test_a_time_to_wait_is_believed_within_reason(text, seconds):
    """An hour at most; dates and nonsense leave it to the back-off."""
    response = httpx.Response(503, headers=[(b"retry-after", text.encode("latin-1", "replace"))])
    expected = None if seconds is None else timedelta(seconds=seconds)
    assert _retry_after(response) == expected


@both
def test_nobody_there_is_a_failure(kind):
    with pytest.raises(httpx.ConnectError):
        send(kind, f"http://127.0.0.1:{free_port()}/")


@both
def test_a_client_of_yours_stays_open(receiver, kind):
    if kind == "blocking":
        with httpx.Client() as client:
            send(kind, receiver.url, client=client)
            assert not client.is_closed
    else:

        async def main():
            async with httpx.AsyncClient() as client:
                target = AsyncWebhook(receiver.url, SECRET, client=client)
                await target.deliver(delivery())
                await target.close()
                assert not client.is_closed

        asyncio.run(main())
    assert len(receiver.requests) == 1


def test_a_target_posts_in_one_loop_after_another(receiver):
    """A connection that was kept for the next request is the last loop's."""
    receiver.keep_connections()
    target = AsyncWebhook(receiver.url, SECRET)

    async def main():
        await target.deliver(delivery())
        await target.close()

    for _ in range(2):
        asyncio.run(main())
    assert len(receiver.requests) == 2


def test_a_child_posts_by_a_client_of_its_own(receiver):
    """On one connection, parent and child would read each other's answers."""
    receiver.keep_connections()
    target = Webhook(receiver.url, SECRET)
    try:
        run_sync(target.deliver(delivery()))
        parents = target._client

        def in_child():
            run_sync(target.deliver(delivery()))
            assert target._client is not parents

        assert exit_code(fork(in_child)) == 0
        run_sync(target.deliver(delivery()))
    finally:
        run_sync(target.close())
    first, second, third = receiver.addresses
    assert first == third != second


@both
def test_a_relay_posts_until_the_receiver_takes_it(receiver, kind):
    """The same key each time, in the order of the aggregate."""
    store = MemoryStore()
    stage(store, entry("a1", "a"), entry("a2", "a"))
    if kind == "blocking":
        target = Webhook(receiver.url, SECRET)
        report = Relay(store, target).drain()
        run_sync(target.close())
    else:

        async def main():
            target = AsyncWebhook(receiver.url, SECRET)
            try:
                return await AsyncRelay(store, target).drain()
            finally:
                await target.close()

        report = asyncio.run(main())
    assert report.delivered == 2
    assert [body for _, body in receiver.requests] == [b"a1", b"a2"]


@pytest.mark.parametrize("url", ["ftp://host/", "host/path", "http:///path", ""])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(InvalidInput):
        Webhook(url, SECRET)


@pytest.mark.parametrize("secret", ["", b"", "short", "whsec_no base 64", "whsec_YWJj"])
def test_a_weak_or_broken_secret_is_refused(secret):
    with pytest.raises(SecretMissing):
        Webhook("https://example.com", secret)


def test_no_secret_at_all_is_refused():
    with pytest.raises(InvalidInput, match="needs a secret"):
        Webhook("https://example.com", [])


# Verifying.


def signed(*secrets, body=b"body", key="entry:1", at=NOW):
    return signed_headers([secret_bytes(secret) for secret in secrets], key, at, body)


def test_receivers_may_change_over_to_a_new_secret():
    """While both sign, either side may have changed."""
    headers = signed(OTHER_SECRET, SECRET)
    for secret in (SECRET, OTHER_SECRET):
        assert verify_webhook(headers, b"body", secret, now_seconds=NOW) == "entry:1"


def test_an_encoded_secret_is_decoded():
    raw = bytes(range(32))
    encoded = f"whsec_{b64encode(raw).decode()}"
    assert secret_bytes(encoded) == raw == b64decode(encoded.removeprefix("whsec_"))
    assert verify_webhook(signed(raw), b"body", encoded, now_seconds=NOW) == "entry:1"


def test_anything_that_was_changed_is_refused():
    """The body, the key, the instant, the secret, and requests that were kept for later."""
    headers = signed(SECRET)
    for changed in (
        {"webhook-id": "entry:2"},
        {"webhook-timestamp": str(NOW + 1)},
        {"webhook-timestamp": "soon"},
        {"webhook-timestamp": "9" * 16},
        {"webhook-timestamp": "²"},
        {"webhook-signature": ""},
        {"webhook-signature": "v1,AAAA ü"},
        # As a server that decodes headers with surrogates gives them.
        {"webhook-id": "\udcff"},
        {"webhook-signature": "v1,\udcff"},
    ):
        with pytest.raises(InvalidInput):
            verify_webhook(headers | changed, b"body", SECRET, now_seconds=NOW)
    for body, secret, now in (
        (b"other", SECRET, NOW),
        (b"body", OTHER_SECRET, NOW),
        (b"body", SECRET, NOW + 301),
        (b"body", SECRET, NOW - 301),
        (b"body", SECRET, float("nan")),
    ):
        with pytest.raises(InvalidInput):
            verify_webhook(headers, body, secret, now_seconds=now)
    for name in headers:
        with pytest.raises(InvalidInput, match=name):
            rest = {other: value for other, value in headers.items() if other != name}
            verify_webhook(rest, b"body", SECRET, now_seconds=NOW)
    assert verify_webhook(headers, b"body", SECRET, now_seconds=NOW + 300) == "entry:1"


def test_the_body_of_a_recorded_request_cannot_become_part_of_its_head():
    """The attack itself: the sender signed a body that begins with an instant of the future."""
    later = NOW + 86_400
    recorded = signed(SECRET, body=f"{later}.rest".encode())
    moved = recorded | {"webhook-id": f"entry:1.{NOW}", "webhook-timestamp": str(later)}
    with pytest.raises(InvalidInput, match="no dot"):
        verify_webhook(moved, b"rest", SECRET, now_seconds=later)
    with pytest.raises(InvalidInput, match="no dot"):
        signed_headers([secret_bytes(SECRET)], "entry.1", NOW, b"body")


@pytest.mark.parametrize("key", ["a.b", "entry:1", "ü.😀", "." * 255])
def test_every_key_has_an_id_without_a_dot_and_of_its_own(key):
    made = webhook_id(key)
    assert "." not in made
    assert made.isascii()
    assert made == webhook_id(key) != webhook_id(key + "x")


def test_a_published_message_of_the_scheme_verifies():
    """The example that libraries of Standard Webhooks test themselves with."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    headers = {
        "Webhook-Id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "Webhook-Timestamp": "1614265330",
        "Webhook-Signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    body = b'{"test": 2432232314}'
    message_id = headers["Webhook-Id"]
    assert verify_webhook(headers, body, secret, now_seconds=1_614_265_330) == message_id
    made = signed_headers([secret_bytes(secret)], message_id, 1_614_265_330, body)
    assert {name.lower(): value for name, value in headers.items()} == made
    # Signatures of other versions, and of other secrets, may stand beside it.
    several = "v2,AAAA v1,AAAA " + headers["Webhook-Signature"]
    changed = headers | {"Webhook-Signature": several}
    assert verify_webhook(changed, body, secret, now_seconds=1_614_265_330) == message_id

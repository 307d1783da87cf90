"""Webhooks as targets: one signed POST per entry, through httpx."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

from retrysafe import forks
from retrysafe.core.ports import Waits
from retrysafe.errors import DeliveryFailed, InvalidInput
from retrysafe.extras import missing_extra
from retrysafe.relay.ports import Delivery
from retrysafe.relay.signing import Secret, secret_bytes, signed_headers, webhook_id
from retrysafe.relay.targets.of_loop import OfLoop

try:
    import httpx

    from retrysafe.relay.request_limit import deadline, limited
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "webhooks", error) from error

# What a receiver may ask for; a day of silence on a typing error would be worse than a try.
_RETRY_AFTER_MOST: Final = timedelta(hours=1)
_GONE: Final = 410
# What is read of an answer's body, which says nothing to a relay: a short one leaves the connection
# ready for the next entry, and for a long one a new connection is cheaper.
_BODY_LIMIT_BYTES: Final = 64 * 1024


class _Request:
    """What both kinds share: how a delivery becomes a request, and an answer a verdict."""

    def __init__(
        self, url: str, secrets: Secret | Sequence[Secret], now_seconds: Callable[[], float]
    ) -> None:
        parts = httpx.URL(url)
        if parts.scheme not in ("http", "https") or not parts.host:
            raise InvalidInput(f"a webhook's URL starts with https:// or http://, got {url!r}")
        self._url = parts
        given = [secrets] if isinstance(secrets, str | bytes) else list(secrets)
        if not given:
            raise InvalidInput("a webhook needs a secret: receivers could not tell who sends it")
        self._secrets = [secret_bytes(secret) for secret in given]
        self._now_seconds = now_seconds

    def build(self, delivery: Delivery) -> httpx.Request:
        """The request: the key for the receiver's idempotency layer, and the signature."""
        quoted = delivery.key.replace("\\", "\\\\").replace('"', '\\"')
        headers = {
            "content-type": delivery.content_type,
            "user-agent": "retrysafe",
            # A structured field string, as the Idempotency-Key draft asks for.
            "idempotency-key": f'"{quoted}"',
            "retrysafe-topic": delivery.topic,
            "retrysafe-attempt": str(delivery.attempt),
        }
        signed = signed_headers(
            self._secrets, webhook_id(delivery.key), int(self._now_seconds()), delivery.body
        )
        return httpx.Request("POST", self._url, headers=headers | signed, content=delivery.body)

    @staticmethod
    def judge(response: httpx.Response, key: str) -> None:
        """Raises unless the receiver has taken it: anything but 2xx, a redirect included."""
        if response.is_success:
            return
        status = response.status_code
        raise DeliveryFailed(
            f"the receiver answered {status}",
            key=key,
            retry_after=_retry_after(response),
            # The one status that says so itself: nobody will ever be there again.
            is_final=status == _GONE,
        )


def _retry_after(response: httpx.Response) -> timedelta | None:
    text = response.headers.get("retry-after", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        return None  # None was given, or a date, which the back-off covers well enough.
    return min(timedelta(seconds=int(text)), _RETRY_AFTER_MOST)


def _skim(response: httpx.Response, ends_at: float) -> None:
    """Reads what is left of a short answer. How it ends is of no matter: the head says it all."""
    size_bytes = 0
    with suppress(httpx.TransportError):
        for chunk in response.iter_raw():
            size_bytes += len(chunk)
            if size_bytes > _BODY_LIMIT_BYTES or time.monotonic() >= ends_at:
                return


async def _async_skim(response: httpx.Response) -> None:
    size_bytes = 0
    async for chunk in response.aiter_raw():
        size_bytes += len(chunk)
        if size_bytes > _BODY_LIMIT_BYTES:
            return


class Webhook:
    """Posts entries to a URL, for `Relay`."""

    waits = Waits.BLOCKING

    def __init__(
        self,
        url: str,
        secret: Secret | Sequence[Secret],
        *,
        client: httpx.Client | None = None,
        timeout: timedelta = timedelta(seconds=10),
        now_seconds: Callable[[], float] = time.time,
    ) -> None:
        """`secret` signs the requests; give several while receivers change over to a new one.

        `timeout` limits each delivery as a whole, from looking its host up to its last byte. A
        client of your own stays yours, with its own time-outs for connecting and for the head of
        the answer. Raises `InvalidInput` and `SecretMissing`.
        """
        self._request = _Request(url, secret, now_seconds)
        self._timeout_seconds = timeout.total_seconds()
        self._owns_client = client is None
        self._client = client
        self._making = threading.Lock()
        forks.register(self)

    def _opened(self) -> httpx.Client:
        forks.refresh_if_stale()
        with self._making:
            if self._client is None:
                self._client = limited(httpx.Client(timeout=self._timeout_seconds))
            return self._client

    def after_fork_in_child(self) -> None:
        """Makes a client of its own: on a connection of both, each would read the other's answers.

        One that you gave stays.
        """
        self._making = threading.Lock()
        if self._owns_client and self._client is not None:
            forks.park(self._client)
            self._client = None

    async def deliver(self, delivery: Delivery) -> None:
        """Posts one entry; raises `DeliveryFailed`, and what httpx raises."""
        ends_at = time.monotonic() + self._timeout_seconds
        token = deadline.set(ends_at)
        try:
            # Redirects are not followed: whoever answers must not choose where signed data goes.
            response = self._opened().send(
                self._request.build(delivery), stream=True, follow_redirects=False
            )
            try:
                _skim(response, ends_at)
            finally:
                response.close()
        finally:
            deadline.reset(token)
        self._request.judge(response, delivery.key)

    async def close(self) -> None:
        """Closes the client, unless it is yours; the next delivery makes a new one."""
        client = self._client
        if self._owns_client and client is not None:
            self._client = None
            client.close()


class AsyncWebhook:
    """Posts entries to a URL, for `AsyncRelay`."""

    waits = Waits.SUSPENDING

    def __init__(
        self,
        url: str,
        secret: Secret | Sequence[Secret],
        *,
        client: httpx.AsyncClient | None = None,
        timeout: timedelta = timedelta(seconds=10),
        now_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Takes what `Webhook` takes."""
        self._request = _Request(url, secret, now_seconds)
        self._timeout_seconds = timeout.total_seconds()
        self._client = client
        self._own: OfLoop[httpx.AsyncClient] = OfLoop()

    async def deliver(self, delivery: Delivery) -> None:
        """Posts one entry; raises `DeliveryFailed`, `TimeoutError`, and what httpx raises."""
        request = self._request.build(delivery)
        async with asyncio.timeout(self._timeout_seconds) as limit:
            client = self._client or await self._opened()
            response = await client.send(request, stream=True, follow_redirects=False)
        try:
            with suppress(httpx.TransportError, TimeoutError):
                async with asyncio.timeout_at(limit.when()):
                    await _async_skim(response)
        finally:
            await response.aclose()
        self._request.judge(response, delivery.key)

    async def _opened(self) -> httpx.AsyncClient:
        async with self._own.opening():
            if self._own.held is None:
                self._own.held = httpx.AsyncClient(timeout=self._timeout_seconds)
            return self._own.held

    async def close(self) -> None:
        """Closes the client, unless it is yours; the next delivery makes a new one."""
        client = self._own.taken()
        if client is not None:
            await client.aclose()

"""Webhooks as targets: one signed POST per entry, through httpx."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from retrysafe.core.ports import Waits
from retrysafe.errors import DeliveryFailed, InvalidInput
from retrysafe.extras import missing_extra
from retrysafe.relay.ports import Delivery
from retrysafe.relay.signing import Secret, secret_bytes, signed_headers

try:
    import httpx
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "webhooks", error) from error

# What a receiver may ask for; a day of silence on a typing error would be worse than a try.
_RETRY_AFTER_MOST: Final = timedelta(hours=1)
_GONE: Final = 410


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
            self._secrets, delivery.key, int(self._now_seconds()), delivery.body
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

        A client of your own stays yours. Raises `InvalidInput` and `SecretMissing`.
        """
        self._request = _Request(url, secret, now_seconds)
        self._owns_client = client is None
        self._client = client or httpx.Client(timeout=timeout.total_seconds())

    async def deliver(self, delivery: Delivery) -> None:
        """Posts one entry; raises `DeliveryFailed`, and what httpx raises."""
        # Redirects are not followed: whoever answers must not choose where signed data goes.
        response = self._client.send(self._request.build(delivery), follow_redirects=False)
        self._request.judge(response, delivery.key)

    async def close(self) -> None:
        """Closes the client, unless it is yours."""
        if self._owns_client:
            self._client.close()


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
        self._owns_client = client is None
        self._client = client or httpx.AsyncClient(timeout=timeout.total_seconds())

    async def deliver(self, delivery: Delivery) -> None:
        """Posts one entry; raises `DeliveryFailed`, and what httpx raises."""
        response = await self._client.send(self._request.build(delivery), follow_redirects=False)
        self._request.judge(response, delivery.key)

    async def close(self) -> None:
        """Closes the client, unless it is yours."""
        if self._owns_client:
            await self._client.aclose()

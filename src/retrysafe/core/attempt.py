"""An attempt as the operation sees it: its number, its claim, and keys for calls downstream."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from retrysafe.core.call import Call
from retrysafe.core.framing import Part
from retrysafe.core.joining import JoinedOutcome, Joiner
from retrysafe.core.keys import Key, checked_secret, child_key
from retrysafe.core.lease import Lease
from retrysafe.errors import ClaimLost, InvalidInput


class Attempt:
    """One run of an operation. Available inside the operation as `current_attempt()`.

    `is_first` says that no earlier attempt in this life of the key can have left effects behind.
    """

    __slots__ = (
        "_call",
        "_joiner",
        "_lease",
        "_monotonic",
        "_secret",
        "is_first",
        "joined",
        "key",
        "number",
        "operation",
    )

    def __init__(
        self,
        key: Key,
        operation: str,
        number: int,
        lease: Lease,
        monotonic: Callable[[], float],
        secret: bytes | None,
        is_first: bool,
        call: Call | None = None,
        joiner: Joiner | None = None,
    ) -> None:
        self.key = key
        self.operation = operation
        self.number = number
        self._lease = lease
        self._monotonic = monotonic
        self._secret = secret
        # Not the same as number 1: an operator's release starts the numbers over.
        self.is_first = is_first
        self._call = call
        self._joiner = joiner
        # The outcome that `complete_in` wrote last; the engine asks what became of it.
        self.joined: JoinedOutcome | None = None

    @property
    def token(self) -> bytes:
        """The claim's token: random, and unique in the whole history of the key."""
        return self._lease.token

    @property
    def deadline(self) -> datetime:
        """When the lease ends unless it is renewed, by the store's clock."""
        return datetime.fromtimestamp(self._lease.ends_at_ms / 1000, UTC)

    @property
    def time_left(self) -> timedelta:
        """What is surely left of the lease; zero when the claim is lost."""
        return timedelta(seconds=self._lease.seconds_left(self._monotonic()))

    @property
    def is_lost(self) -> bool:
        """Whether another owner has, or may have, the key: stop before the next effect."""
        return self._lease.is_lost(self._monotonic())

    def raise_if_lost(self) -> None:
        """Raises `ClaimLost` when the claim is, or may be, lost. Call it before an effect."""
        if self.is_lost:
            raise ClaimLost(
                f"the claim on {self.key.text!r} is lost or its lease ran out", key=self.key.text
            )

    def complete_in(self, connection: object, value: Any) -> Any:
        """Writes the outcome in the user's open transaction, so that both commit or neither does.

        `value` is then the outcome, whatever the operation returns. Make it the last thing before
        the commit. For a protected request it is the response, as the framework makes it. It is
        awaited exactly when the connection's own methods are. Raises `ClaimLost` when another owner
        has the key: let it end the transaction. Raises `TransactionMissing` when none is open, and
        `InvalidInput` for a value or a connection that cannot be used, or for an outcome that frees
        the key.
        """
        if self._joiner is None or self._call is None:
            raise InvalidInput("this attempt's store cannot work in a transaction of yours")
        return self._joiner.complete(self._call, self._lease, connection, value, self._keep)

    def _keep(self, joined: JoinedOutcome) -> None:
        self.joined = joined

    def child_key(self, *parts: Part) -> str:
        """The key for a call downstream: the same in every attempt, different for other parts.

        Raises `SecretMissing` when no secret was configured.
        """
        return child_key(checked_secret(self._secret), self.key, *parts)

    def __repr__(self) -> str:
        return f"Attempt({self.key!r}, number={self.number})"

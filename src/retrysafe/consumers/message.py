"""A message as every broker delivers it: what it says, what it is called, where it came from.

Owns the one shape that handlers and the rest of this package see. It must not know any broker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retrysafe.errors import InvalidInput


class PayloadInvalid(InvalidInput):
    """The message is not what the handler reads; no retry can mend it."""


@dataclass(slots=True, eq=False)
class Message:
    """One delivery of one message.

    `identity` is what the broker calls the message: the same in every delivery of it, and never
    given to another one. None where the broker has no such name.
    """

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    identity: str | None = None
    # How often the broker has delivered it, this time included; 1 where the broker does not count.
    deliveries: int = 1
    # Messages of one lane are handled one after the other, in their order; None for no order.
    lane: str | None = None
    # What the broker's own library needs to settle this delivery.
    receipt: Any = field(default=None, repr=False)
    # Why the broker's library could not read its headers and its id: it is a dead letter.
    unreadable: str | None = None

    def header(self, name: str) -> str | None:
        """The value of a header, whatever the case of its name."""
        found = self.headers.get(name)
        if found is not None:
            return found
        wanted = name.lower()
        for each, value in self.headers.items():
            if each.lower() == wanted:
                return value
        return None

    @property
    def text(self) -> str:
        """The body as text; raises `PayloadInvalid` when it is not UTF-8."""
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise PayloadInvalid(f"the message is not UTF-8 text: {error}") from None

    def json(self) -> Any:
        """The body as JSON; raises `PayloadInvalid` when it is not."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise PayloadInvalid(f"the message is not JSON: {error}") from None

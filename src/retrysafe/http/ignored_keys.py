"""Keys that no rule reads: a client believes that it is protected, and it is not.

Owns which requests are told of, and how often they are logged. Each is reported, because a count
must be right; each path is logged once, because a log must stay readable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from retrysafe.core.events import EventKind, Reporter
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.errors import KeyInvalid
from retrysafe.http.headers import parse_key
from retrysafe.http.responses import Header
from retrysafe.http.rules import SAFE_METHODS

# What such requests are counted under: their paths are for clients to choose.
OPERATION: Final = "(no rule)"
# Clients choose the paths, so what is remembered of them is bounded.
LOGGED_LIMIT: Final = 100
# Where a scope or environ holds a list; a protection further in, whose rule fits, adds to it.
NOTICED_NAME: Final = "retrysafe.noticed"
_KEY_HEADER: Final = b"idempotency-key"
_NO_RULE: Final = (
    "%s %r brings an Idempotency-Key and no rule protects it: add a Rule for its path, or one with "
    "protected=False"
)
_NOT_READ: Final = (
    "%s %r brings an Idempotency-Key, which does not count there: FieldsKey makes the key, and "
    "two requests with the same fields are one"
)
_logger = logging.getLogger("retrysafe")


def keys_in(method: str, headers: Iterable[Header]) -> list[bytes]:
    """The lines of the key of a request that may change something; none for any other request."""
    if method in SAFE_METHODS:
        return []
    return [value for name, value in headers if name == _KEY_HEADER]


class IgnoredKeys:
    """The requests of one application whose keys no rule reads."""

    __slots__ = ("_lock", "_logged")

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()
        # One that a signal's handler, which calls the application as well, may take again.
        self._lock = threading.RLock()

    def note(
        self,
        report: Reporter,
        method: str,
        route: str,
        lines: Sequence[bytes],
        *,
        has_rule: bool = False,
    ) -> None:
        """No rule reads the key of a request; `route` is its route, or else its path.

        It passes by, or, where it has a rule, runs under a key that is made from its fields.
        """
        try:
            text = parse_key(lines, strict=False)
        except KeyInvalid:
            text = "(unreadable)"
        key = Key(text, caller=GLOBAL)
        if has_rule:
            # The call itself is counted under the operation of its rule.
            report.beside(EventKind.KEY_IGNORED, key, OPERATION)
        else:
            report.passed_by(key, OPERATION)
        with self._lock:
            if (method, route) in self._logged or len(self._logged) > LOGGED_LIMIT:
                return
            self._logged.add((method, route))
            is_last = len(self._logged) > LOGGED_LIMIT
        if is_last:
            _logger.warning(
                "keys are sent to more than %d paths that no rule protects: the others are not "
                "logged",
                LOGGED_LIMIT,
            )
        else:
            _logger.warning(_NOT_READ if has_rule else _NO_RULE, method, route[:200])

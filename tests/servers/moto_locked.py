"""Moto's server with one lock more: as it is, it loses messages.

Its `delete_message` copies the list of messages and puts the copy in its place, without the lock
that `send_message` appends under: what is sent in between is gone. Real SQS loses nothing so, and a
test that counts messages must not blame a consumer for it.
"""

from __future__ import annotations

import sys
from typing import Any

from moto.server import main
from moto.sqs import models

_delete = models.Queue.delete_message


def _delete_alone(self: Any, receipt_handle: str) -> None:
    with self._messages_lock:
        _delete(self, receipt_handle)


models.Queue.delete_message = _delete_alone  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))  # type: ignore[func-returns-value]

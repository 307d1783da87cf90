"""What an application did, one line for each thing, in a file that outlives its process."""

from __future__ import annotations

import os
from datetime import timedelta

from retrysafe import Policy

STORE_VARIABLE = "DEPLOYMENT_STORE"
LEDGER_VARIABLE = "DEPLOYMENT_LEDGER"
# Short, so that an operation outlives it in a test; renewals are what keeps its key.
LEASE = timedelta(seconds=1)
POLICY = Policy(lease=LEASE)


def note(what: str, key: str) -> None:
    """Adds a line. One write of a file that is open for appending: no two can mix."""
    ledger = os.open(os.environ[LEDGER_VARIABLE], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(ledger, f"{what} {key.strip(chr(34))}\n".encode())
    finally:
        os.close(ledger)

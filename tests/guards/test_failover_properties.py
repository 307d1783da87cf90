"""What a failover must not break; each fails when its guard is taken out."""

from __future__ import annotations

import pytest

from retrysafe.core import transitions
from retrysafe.core.model import Decision, SettleKind
from retrysafe.errors import StoreNotWritable
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres import claims
from retrysafe.stores.postgres.drivers.servers import require_writable
from retrysafe.stores.postgres.settlements import Settlements
from retrysafe.testing.suite.probe import KEY, request, settlement

NOW_MS = 1_700_000_000_000
TOKEN = b"a token of a try"
WISH = request(token=TOKEN)


def claimed_record():
    record, _ = transitions.claim(None, WISH, NOW_MS)
    assert record is not None
    return record


def test_a_claim_that_is_found_made_is_written_before_it_is_believed():
    """The commit that made it may have given up waiting for its standby."""
    record = claimed_record()
    judged = claims.judged(WISH, (record, None, NOW_MS + 1), 0)
    assert isinstance(judged, claims.Takeover)
    assert judged.old == judged.new == record
    assert judged.answer.decision is Decision.CONFIRM


class OneRecord:
    """What is read and written of a record that a rival changes before the first confirmation."""

    def __init__(self, record):
        self._record = record
        self.confirmed = []

    async def read_all(self, digests):
        return dict.fromkeys(digests, (self._record, NOW_MS + 2))

    async def confirm(self, record):
        self.confirmed.append(record)
        return len(self.confirmed) > 1


def test_an_outcome_that_is_found_stored_is_written_before_it_is_believed():
    """The same for the ending, until the write of the very record that was read stands."""
    ending = settlement(SettleKind.COMPLETE, KEY, TOKEN)
    settled, _ = transitions.settle(claimed_record(), ending, NOW_MS + 1)
    one = OneRecord(settled)
    (answer,) = run_sync(Settlements(one, one).answered([ending], set()))
    assert answer.decision is Decision.CONFIRM
    assert one.confirmed == [settled, settled]


def test_a_server_without_writes_is_refused_when_it_is_opened():
    """What a standby answers may be old, and its connection would be kept."""
    require_writable("SELECT 1", "the server")
    with pytest.raises(StoreNotWritable):
        require_writable("SELECT 0", "the server")

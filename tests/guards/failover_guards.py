"""The guards of failovers on PostgreSQL; `tests/attacks/test_failover.py` shows them on servers."""

from __future__ import annotations

from retrysafe.stores.postgres import claims
from retrysafe.stores.postgres.drivers import servers
from retrysafe.stores.postgres.settlements import Settlements
from tests.guards import test_failover_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

FAILOVER_GUARDS: tuple[Guard, ...] = (
    Guard(
        "a claim that is found made is written again",
        "an operation runs on a claim that only the old primary had, and again after a failover",
        (InCode(claims.judged, "if answer.decision is Decision.CONFIRM:", "if False:"),),
        properties.test_a_claim_that_is_found_made_is_written_before_it_is_believed,
    ),
    Guard(
        "an outcome that is found stored is written again",
        "an outcome is told that a failover forgets, and its operation runs again",
        (InCode(Settlements._settle, "if await self._contended.confirm(record):", "if True:"),),
        properties.test_an_outcome_that_is_found_stored_is_written_before_it_is_believed,
    ),
    Guard(
        "a new connection asks whether its server takes writes",
        "connections to a standby are kept, and what it does not know yet counts as undone",
        (InCode(servers.require_writable, 'if status != "SELECT 1":', "if False:"),),
        properties.test_a_server_without_writes_is_refused_when_it_is_opened,
    ),
)

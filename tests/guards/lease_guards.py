"""The guards of renewals; part of the list in `guards`."""

from __future__ import annotations

from retrysafe.core.lease import Lease
from retrysafe.runtime import task_ports
from retrysafe.runtime.heartbeat import ThreadHeartbeat
from retrysafe.stores.sqlite.connections import Connections
from retrysafe.stores.sqlite.store import SqliteStore
from tests.guards import test_lease_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

LEASE_GUARDS: tuple[Guard, ...] = (
    Guard(
        "renewal: it gives up after a part of the lease",
        "one silent connection uses up the lease, and a healthy operation runs twice",
        (
            InCode(
                Lease.renewal_timeout_seconds,
                "lease_seconds / (LATE_TIMEOUTS_PER_LEASE if is_late else TIMEOUTS_PER_LEASE)",
                "lease_seconds",
            ),
        ),
        properties.test_a_renewal_gives_up_while_there_is_a_lease_to_save,
    ),
    Guard(
        "renewal: in a thread of its own, under asyncio too",
        "a busy event loop renews too late, and a healthy operation runs twice",
        (
            InCode(
                task_ports._heartbeat,
                "if is_blocking or isinstance(store, ExtendsAnywhere):",
                "if is_blocking is None:",
            ),
        ),
        properties.test_an_operation_that_blocks_its_loop_is_renewed,
    ),
    Guard(
        "renewal: leases of other lengths wait in other threads",
        "a renewal that may wait for minutes holds up a lease of a second",
        (InCode(ThreadHeartbeat.add, "lease.lease_ms.bit_length()", "0"),),
        properties.test_a_renewal_of_a_long_lease_holds_up_no_short_one,
    ),
    Guard(
        "renewal: before all other writers of a SQLite file",
        "hundreds of steps make renewals late, and healthy operations run twice",
        (InCode(SqliteStore.extend, "self._connections.write_first(", "self._write("),),
        properties.test_a_renewal_queues_behind_no_writer_of_its_process,
    ),
    Guard(
        "renewal: a busy writer of a SQLite file gives way",
        "one busy writer makes renewals late, and healthy operations run twice",
        (InCode(Connections.write, "with self._renewing:", "if True:"),),
        properties.test_a_busy_writer_gives_way_to_a_renewal,
    ),
)

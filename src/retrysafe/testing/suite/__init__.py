"""The definition of a store, as one pytest class that every store's tests subclass.

Each module holds one subject; `StoreSuite` joins them. How a third party uses it:

    from retrysafe.testing import StoreSuite

    class TestMyStore(StoreSuite):
        @pytest.fixture(autouse=True)
        def folder(self, tmp_path):
            self.path = tmp_path / "records.db"

        def make_store(self, clock):
            return MyStore(self.path, now_ms=clock)

        def join_store(self, store, clock):
            return MyStore(self.path, now_ms=clock)

A store for event loops overrides `run` as well, with one loop for the whole test:

        @pytest.fixture(autouse=True)
        def runner(self):
            with asyncio.Runner() as self.loop:
                yield

        def run(self, flow):
            return self.loop.run(flow)

What the suite assumes, and what it does not:

- The clock is the only clock. A store that asks its database for the time must let a test put
  this clock in the place of that question; every lease and every window is checked to the
  millisecond.
- Tokens are 16 random bytes, so no two claims ever share one by chance. A store needs no check
  for that, and the suite never makes two claims with one token unless it means a repetition.
  Everything that fences (settle, extend, record_step) relies on it.
- Nothing is left out by a product's name. Where stores may differ (how they wait, which texts
  they can hold) a test looks at `capabilities` or accepts the ways that the port allows, and
  exclusivity, fencing and leases have no such choice: a subclass cannot replace a test.
"""

from __future__ import annotations

from typing import Any

from retrysafe.testing.suite.batches import BatchCases
from retrysafe.testing.suite.claims import ClaimCases
from retrysafe.testing.suite.collisions import CollisionCases
from retrysafe.testing.suite.concurrency import ConcurrencyCases
from retrysafe.testing.suite.corrections import CorrectionCases
from retrysafe.testing.suite.leases import LeaseCases
from retrysafe.testing.suite.listing import ListingCases
from retrysafe.testing.suite.operators import OperatorCases
from retrysafe.testing.suite.outbox_operators import OutboxOperatorCases
from retrysafe.testing.suite.outbox_order import OutboxOrderCases
from retrysafe.testing.suite.outbox_relaying import OutboxRelayCases
from retrysafe.testing.suite.outbox_staging import OutboxStagingCases
from retrysafe.testing.suite.outbox_tries import OutboxTryCases
from retrysafe.testing.suite.payloads import PayloadCases
from retrysafe.testing.suite.recovery import RecoveryCases
from retrysafe.testing.suite.retention import RetentionCases
from retrysafe.testing.suite.settlement import SettlementCases
from retrysafe.testing.suite.steps import StepCases
from retrysafe.testing.suite.table import TableCases


class StoreSuite(
    TableCases,
    ClaimCases,
    CorrectionCases,
    LeaseCases,
    SettlementCases,
    PayloadCases,
    StepCases,
    OutboxStagingCases,
    OutboxTryCases,
    OutboxRelayCases,
    OutboxOrderCases,
    OutboxOperatorCases,
    OperatorCases,
    ListingCases,
    RetentionCases,
    RecoveryCases,
    BatchCases,
    CollisionCases,
    ConcurrencyCases,
):
    """Subclass it, name the class `Test…`, and give it `make_store`; see the module above.

    Raises `TypeError` when a subclass replaces one of its tests: a store that leaves out a case
    is not a store.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        replaced = [name for name in vars(cls) if name.startswith("test_")]
        replaced = [name for name in replaced if hasattr(StoreSuite, name)]
        if replaced:
            raise TypeError(
                f"{cls.__name__} replaces {', '.join(replaced)}: the suite defines what a store "
                "is, so its tests cannot be left out; give your own tests other names"
            )


__all__ = ["StoreSuite"]

"""A relay in two forms: one for threads, one for an event loop, with the same methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from retrysafe.core.callables import shown_in_place
from retrysafe.core.outbox.port import Outbox, outbox_of
from retrysafe.core.ports import Store, Waits
from retrysafe.errors import InvalidInput
from retrysafe.relay.delivery_loop import RelayEngine, RelayReport
from retrysafe.relay.policy import RelayPolicy
from retrysafe.relay.pools import TaskDeliveryPool, ThreadDeliveryPool
from retrysafe.relay.ports import Deliver, Target
from retrysafe.relay.targets.function import FunctionInThreads, target_for
from retrysafe.runtime import local_time
from retrysafe.runtime.background_thread import BackgroundThread
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.runtime.threaded import ThreadedStore

OnReport = Callable[[RelayReport], None]


def _checked_size(concurrency: int) -> int:
    if concurrency < 1:
        raise InvalidInput(f"concurrency is a whole number from 1 up, got {concurrency}")
    return concurrency


def _checked_store(store: object, opened: str) -> Store:
    """The store itself; raises `InvalidInput` for its URL, and for what only uses a store.

    A relay opens nothing: it would have to be closed, and by nobody but its owner.
    """
    if not hasattr(store, "capabilities"):
        raise InvalidInput(
            f"a relay takes a store object, such as {opened}, which stays yours to close; got "
            f"{shown_in_place(store)}"
        )
    return cast("Store", store)


class Relay(BackgroundThread):
    """Delivers outbox entries from threads; any number of relays may work on one store."""

    _ROLE = "relay"

    def __init__(
        self,
        store: Store,
        target: Target,
        *,
        policy: RelayPolicy | None = None,
        concurrency: int = 16,
        on_report: OnReport | None = None,
    ) -> None:
        """`target` is a function of a `Delivery`, or an object such as `Webhook`.

        `concurrency` is how many deliveries may be under way at once. `on_report` hears the counts
        after every commit. Raises `InvalidInput` for a store without an outbox, for the URL of one,
        and for what needs an event loop. Store and target stay yours.
        """
        super().__init__()
        store = _checked_store(store, "open_store('sqlite:///app.db')")
        if store.capabilities.waits is Waits.SUSPENDING:
            raise InvalidInput("this store needs an event loop: use AsyncRelay with it")
        self._outbox = outbox_of(store)
        size = _checked_size(concurrency)
        self._target: Deliver = target_for(target, Waits.BLOCKING, size)
        self._pool = ThreadDeliveryPool(self._target, size)
        self._engine = RelayEngine(
            self._outbox,
            self._pool,
            policy or RelayPolicy(),
            monotonic=local_time.monotonic,
            mint_token=mint_token,
            on_report=on_report,
        )

    @property
    def report(self) -> RelayReport:
        """What it has done so far."""
        return self._engine.report

    def run(self) -> RelayReport:
        """Delivers until `stop`, in this thread. An outage of the store is waited for."""
        return self._run(until_idle=False)

    def drain(self) -> RelayReport:
        """Delivers until nothing is due any more; entries in their back-off are not waited for.

        Raises `StoreUnavailable` when the store does not answer several times in a row.
        """
        return self._run(until_idle=True)

    def _run(self, *, until_idle: bool) -> RelayReport:
        self._begin()
        hints = self._outbox.hints
        hints.listen(self._pool.wake)
        try:
            run_sync(self._engine.run(until_idle=until_idle))
        finally:
            hints.forget(self._pool.wake)
            run_sync(self._pool.close())
        return self.report

    def stop(self) -> None:
        """Ends `run` once what is under way is delivered; safe in a signal's function."""
        self._engine.stop()


class AsyncRelay:
    """Delivers outbox entries from tasks of an event loop."""

    def __init__(
        self,
        store: Store,
        target: Target,
        *,
        policy: RelayPolicy | None = None,
        concurrency: int = 64,
        on_report: OnReport | None = None,
    ) -> None:
        """Takes what `Relay` takes; a plain function as target is called in worker threads."""
        self._store = _checked_store(store, "open_store('sqlite:///app.db', is_async=True)")
        outbox_of(store)
        self._size = _checked_size(concurrency)
        self._target = target_for(target, Waits.SUSPENDING, self._size)
        self._policy = policy or RelayPolicy()
        self._on_report = on_report
        self._engine: RelayEngine | None = None
        self._is_stopped = False

    @property
    def report(self) -> RelayReport:
        """What it has done so far."""
        return RelayReport() if self._engine is None else self._engine.report

    async def run(self) -> RelayReport:
        """Delivers until `stop`. An outage of the store is waited for."""
        return await self._run(until_idle=False)

    async def drain(self) -> RelayReport:
        """Delivers until nothing is due any more; entries in their back-off are not waited for.

        Raises `StoreUnavailable` when the store does not answer several times in a row.
        """
        return await self._run(until_idle=True)

    async def _run(self, *, until_idle: bool) -> RelayReport:
        threaded: ThreadedStore | None = None
        outbox: Outbox = outbox_of(self._store)
        if self._store.capabilities.waits is Waits.BLOCKING:
            threaded = ThreadedStore(self._store)
            outbox = threaded.outbox
        pool = TaskDeliveryPool(self._target, self._size, self._policy.timeout.total_seconds())
        self._engine = engine = RelayEngine(
            outbox,
            pool,
            self._policy,
            monotonic=local_time.monotonic,
            mint_token=mint_token,
            on_report=self._on_report,
        )
        engine.is_stopping = self._is_stopped
        outbox.hints.listen(pool.wake)
        try:
            await engine.run(until_idle=until_idle)
        finally:
            outbox.hints.forget(pool.wake)
            await pool.close()
            if isinstance(self._target, FunctionInThreads):
                await self._target.close()
            if threaded is not None:
                threaded.end_workers()
        return engine.report

    def stop(self) -> None:
        """Ends `run` once what is under way is delivered."""
        self._is_stopped = True
        if self._engine is not None:
            self._engine.stop()

"""A relay whose pool, clock and chance are in the test's hands; every rest is a line of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

from retrysafe.core.keys.key import Key
from retrysafe.core.model import SettleKind, StagedEntry
from retrysafe.core.outbox.entries import Entry, EntryQuery
from retrysafe.relay import RelayPolicy
from retrysafe.relay.delivery_loop import RelayEngine
from retrysafe.relay.ports import Finished, MayBegin
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, ManualClock
from retrysafe.testing.suite.probe import request, settlement


def stage(store, *entries: StagedEntry) -> None:
    """Runs an operation that stages these entries."""
    key = Key(f"stages {mint_token().hex()}", caller="tests")
    wish = request(key)
    end = settlement(SettleKind.COMPLETE, key, wish.token)
    end.entries = entries
    run_sync(store.commit([wish], []))
    run_sync(store.commit([], [end]))


def entry(name: str, aggregate: str | None = None) -> StagedEntry:
    return StagedEntry(f"entry:{name}", "t", "text/plain", name.encode(), aggregate)


def deliver_by(make, *items, is_blocking: bool) -> None:
    """Delivers items by a target of a broker, which is then closed twice."""

    async def main() -> None:
        target = make()
        try:
            for item in items:
                await target.deliver(item)
        finally:
            await target.close()
            await target.close()

    (run_sync if is_blocking else asyncio.run)(main())


class ScriptedPool:
    """Holds what it was given until the test says how each delivery ended."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.begun: list[Entry] = []
        self.queued: list[Entry] = []
        self.taken: list[str] = []
        self.rests: list[float] = []
        self.wakes = 0
        self._ended: list[Finished] = []
        self._may_begin: dict[int, MayBegin] = {}
        # What happens during each rest, in order; a rest too many ends the test.
        self.script: list[Callable[[], None]] = []

    def start(self, entry: Entry, may_begin: MayBegin) -> None:
        self._may_begin[entry.id] = may_begin
        self.queued.append(entry)
        self._begin()

    def _begin(self) -> None:
        while self.queued and len(self.begun) < self.size:
            entry = self.queued.pop(0)
            if self._may_begin[entry.id](entry):
                self.taken.append(entry.body.decode())
                self.begun.append(entry)
            else:
                self._ended.append(Finished(entry, is_begun=False))

    def end(self, *errors: BaseException | None, name: str | None = None) -> None:
        """Ends the deliveries that were begun first, or the one of that name."""
        for error in errors or (None,):
            chosen = self.begun[0]
            if name is not None:
                chosen = next(item for item in self.begun if item.body.decode() == name)
            self.begun.remove(chosen)
            self._begin()
            self._ended.append(Finished(chosen, error))

    def finished(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        return ended

    def withdraw(self) -> list[Entry]:
        queued, self.queued = self.queued, []
        return queued

    async def wait(self, seconds: float) -> None:
        self.rests.append(seconds)
        assert self.script, "the relay rests longer than the test expects"
        self.script.pop(0)()

    def wake(self) -> None:
        self.wakes += 1

    async def close(self) -> None:
        """Nothing to end."""


class _Died(BaseException):
    """The end of a relay that tells nobody."""


def _die() -> None:
    raise _Died


class Scene:
    """A store, its clock, and a relay on it."""

    def __init__(self, size: int = 4, **settings) -> None:
        self.clock = ManualClock()
        # How far the store's clock has jumped ahead of the relay's.
        self.ahead_ms = 0
        self.store = FaultyStore(MemoryStore(now_ms=self.clock))
        self.policy = RelayPolicy(**settings)
        self.pool = ScriptedPool(size)
        self.engine = self.relay(self.pool)

    def relay(self, pool: ScriptedPool) -> RelayEngine:
        """One more relay on the same store."""
        return RelayEngine(
            self.store.outbox,
            pool,
            self.policy,
            monotonic=lambda: (self.clock() - self.ahead_ms) / 1000,
            mint_token=mint_token,
            jitter=lambda: 0.5,
        )

    def stage(self, *names: str, aggregate: str | None = None) -> None:
        stage(self.store, *(entry(name, aggregate) for name in names))

    def run(self, *script: Callable[[], None], until_idle: bool = True):
        """Runs the relay; each rest does the next thing of the script."""
        self.pool.script += script
        run_sync(self.engine.run(until_idle=until_idle))
        assert self.pool.script == []
        return self.engine.report

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def jump(self, seconds: float) -> None:
        """Sets the store's clock forward; the relay's goes on as it did."""
        self.pass_time(seconds)
        self.ahead_ms += round(seconds * 1000)

    def slow_writes(self, seconds: float) -> None:
        """Lets every write of the relay take that long."""
        outbox = self.engine._outbox

        async def write(writes):
            decisions = await outbox.write(writes)
            self.pass_time(seconds)
            return decisions

        self.engine._outbox = SimpleNamespace(
            claim=outbox.claim, write=write, extend=outbox.extend, hints=outbox.hints
        )

    def stand_still_before_claim(self, number: int, seconds: float = 40) -> None:
        """Lets the process stand still right before its n-th claim, after it saw to its leases."""
        turns = iter(range(1, 1_000_000))

        def mint() -> bytes:
            if next(turns) == number:
                self.pass_time(seconds)
            return mint_token()

        self.engine._mint_token = mint

    def relay_dies(self) -> list[str]:
        """A relay begins what it can, ends nothing, and its leases run out; what it had begun."""
        pool = ScriptedPool(self.pool.size)
        pool.script = [_die]
        with suppress(_Died):
            run_sync(self.relay(pool).run())
        self.pass_time(self.policy.lease.total_seconds())
        return pool.taken

    def states(self) -> dict[str, str]:
        found = run_sync(self.store.outbox.list_entries(EntryQuery(limit=1_000)))
        return {item.entry.body.decode(): item.condition.value for item in found}

    def stored(self, name: str):
        found = run_sync(self.store.outbox.list_entries(EntryQuery(limit=1_000)))
        (chosen,) = [item for item in found if item.entry.body.decode() == name]
        return chosen

"""A database of one record, and transactions on it whose every answer the test can choose."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Payload,
    Record,
    SettleKind,
    Settlement,
    StagedEntry,
    StepWrite,
)
from retrysafe.core.ports import Fate, Waits
from tests.core.driving import Clock


@dataclass
class Database:
    """The committed record with its payload; a transaction works on it directly."""

    clock: Clock = field(default_factory=Clock)
    record: Record | None = None
    payload: Payload | None = None


@dataclass
class FakeTransaction:
    """A user's transaction, with the calls in their order."""

    database: Database = field(default_factory=Database)
    # What `lock` answers, in order; then True.
    locks: deque[bool] = field(default_factory=deque)
    sees: bool = True
    fate_is: Fate | Exception = Fate.STANDS
    undo_error: Exception | None = None
    settle_error: Exception | None = None
    settles: Decision | None = None
    staged: list[StagedEntry] = field(default_factory=list)
    stage_error: Exception | None = None
    calls: list[str] = field(default_factory=list)
    settled: list[SettleKind] = field(default_factory=list)
    waits = Waits.BLOCKING
    _saved: tuple[Record | None, Payload | None] = (None, None)

    async def begin(self) -> None:
        self.calls.append("begin")
        self._saved = (self.database.record, self.database.payload)

    async def keep(self) -> None:
        self.calls.append("keep")

    async def undo(self) -> None:
        self.calls.append("undo")
        self.database.record, self.database.payload = self._saved
        if self.undo_error is not None:
            raise self.undo_error

    async def lock(self, key: Key, wait_seconds: float | None) -> bool:
        self.calls.append("lock" if wait_seconds is None else f"lock {wait_seconds:g}")
        return self.locks.popleft() if self.locks else True

    async def look(self, request: ClaimRequest) -> ClaimAnswer:
        self.calls.append("look")
        return self._decide(request)[1]

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        self.calls.append("claim")
        changed, answer = self._decide(request)
        self.database.record = changed or self.database.record
        return answer

    def _decide(self, request: ClaimRequest) -> tuple[Record | None, ClaimAnswer]:
        changed, answer = transitions.claim(
            self.database.record, request, self.database.clock.now_ms()
        )
        if answer.decision is Decision.REPLAY:
            answer.payload = self.database.payload
        return changed, answer

    async def sees_changes(self) -> bool:
        return self.sees

    async def settle(self, settlement: Settlement) -> Decision:
        self.calls.append("settle")
        self.staged += settlement.entries
        self.settled.append(settlement.kind)
        if self.settle_error is not None:
            raise self.settle_error
        if self.settles is not None:
            return self.settles
        record, now_ms = self.database.record, self.database.clock.now_ms()
        changed, answer = transitions.settle(record, settlement, now_ms)
        if changed is not None:
            self.database.record, self.database.payload = changed, settlement.payload
        return answer.decision

    async def record_step(self, write: StepWrite) -> Decision:
        self.calls.append(f"record {write.step.name}")
        if self.settle_error is not None:
            raise self.settle_error
        return self.settles or Decision.APPLY

    async def step_fate(self, write: StepWrite) -> Fate:
        self.calls.append(f"fate of {write.step.name}")
        return await self.fate(None)

    async def stage(self, entries: Sequence[StagedEntry]) -> None:
        self.calls.append("stage")
        if self.stage_error is not None:
            raise self.stage_error
        self.staged += entries

    async def fate(self, settlement: Settlement) -> Fate:
        if isinstance(self.fate_is, Exception):
            raise self.fate_is
        return self.fate_is

"""A store whose faults and whose calls are seen from another process: by files.

A file `<mount>.fault` in the server's directory says what is broken, until it is removed. Every
call of the store adds a byte to `<mount>.calls`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrysafe.core.ports import Capabilities, ClaimResult, ExtendResult, SettleResult, Store
from retrysafe.errors import StoreUnavailable
from tests.http_cases.stage import Line

# What can be broken: everything, the answers to settlements, or the answer to the next call only.
DOWN, SETTLEMENTS, NEXT_ANSWER = "down", "settlements", "next answer"
# Followed by a play and a point: the next call waits there.
HELD = "held"


def fault_path(directory: Path, mount_name: str) -> Path:
    return directory / f"{mount_name}.fault"


def calls_path(directory: Path, mount_name: str) -> Path:
    return directory / f"{mount_name}.calls"


class ControlledStore:
    """Any store, broken and counted from outside."""

    def __init__(self, store: Store, directory: Path, mount_name: str) -> None:
        self._store = store
        self._directory = directory
        self._fault_path = fault_path(directory, mount_name)
        self._calls_path = calls_path(directory, mount_name)

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    async def commit(
        self, claims: Sequence[Any], settlements: Sequence[Any]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        fault = self._begin()
        if fault.startswith(HELD):
            self._hold(fault)
        elif fault == NEXT_ANSWER:
            self._fault_path.unlink(missing_ok=True)
            await self._store.commit(claims, settlements)
            raise _outage()
        elif fault == SETTLEMENTS and settlements:
            claimed, _ = await self._store.commit(claims, ())
            return claimed, [_outage() for _ in settlements]
        return await self._store.commit(claims, settlements)

    async def extend(self, extensions: Sequence[Any], timeout_seconds: float) -> list[ExtendResult]:
        self._begin()
        return await self._store.extend(extensions, timeout_seconds)

    async def read(self, key: Any, *, with_audit: bool = False) -> Any:
        self._begin()
        return await self._store.read(key, with_audit=with_audit)

    async def last_outcome(self, key: Any) -> Any:
        self._begin()
        return await self._store.last_outcome(key)

    async def record_step(self, write: Any) -> Any:
        self._begin()
        return await self._store.record_step(write)

    async def list_records(self, query: Any) -> Any:
        return await self._store.list_records(query)

    async def operate(self, key: Any, command: Any, *note: Any) -> Any:
        return await self._store.operate(key, command, *note)

    async def sweep(self, limit: int) -> Any:
        return await self._store.sweep(limit)

    async def close(self) -> None:
        await self._store.close()

    def _begin(self) -> str:
        """Counts the call; raises when the store is down, else tells the fault."""
        # Appending one byte is atomic, so that several processes count together.
        descriptor = os.open(self._calls_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, b".")
        finally:
            os.close(descriptor)
        try:
            fault = self._fault_path.read_text()
        except FileNotFoundError:
            return ""
        if fault == DOWN:
            raise _outage()
        return fault

    def _hold(self, fault: str) -> None:
        _, play, point = fault.split(" ")
        # Once: the calls after the one that is held must pass when it goes on.
        self._fault_path.unlink(missing_ok=True)
        line = Line(self._directory, play, is_run=False)
        line.hold(point)
        line.close()


def _outage() -> StoreUnavailable:
    return StoreUnavailable("the case has broken the store")

"""The demonstration from the first word to the summary, and what it leaves behind: nothing."""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Final

from rich.console import Console

from retrysafe.core.model import RecordQuery
from retrysafe.core.ports import Waits
from retrysafe.errors import StoreUrlInvalid
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import open_store
from retrysafe.story import acts
from retrysafe.story.ledger import CHARGED, STARTED, Ledger
from retrysafe.story.processes import Processes
from retrysafe.story.story import Expectation, Story

# Long enough to read "retry in 4.9 s" and wait for it, short enough to stay.
_LEASE: Final = timedelta(seconds=5)
# The shortest at which a slow machine still sees the refusal before the lease is over.
_FAST_LEASE: Final = timedelta(seconds=3)
_PAUSE_SECONDS: Final = 2.0
# How long a frozen worker may block the store before it is thawed and frozen again.
_BUSY_TIMEOUT: Final = timedelta(seconds=2)
# The acts charge three different orders; the mismatch charges nothing.
_CHARGES_EXPECTED: Final = 3
_WIDTH: Final = 96


@dataclass(slots=True)
class Result:
    """What the demonstration found."""

    store: str
    seconds: float = 0.0
    started: int = 0
    charged: int = 0
    expectations: list[Expectation] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether everything came as expected."""
        return all(item.is_met for item in self.expectations)

    def shape(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "is_ok": self.is_ok,
            "store": self.store,
            "seconds": round(self.seconds, 1),
            "ledger": {"executions": self.started, "charges": self.charged},
            "expectations": [
                {
                    "act": item.act,
                    "what": item.what,
                    "expected": item.expected,
                    "actual": item.actual,
                    "is_met": item.is_met,
                }
                for item in self.expectations
            ],
        }


def demonstrate(url: str | None, *, is_fast: bool, console: Console) -> Result:
    """Plays all acts on the store, or on a SQLite file in a temporary folder.

    Raises `StoreUrlInvalid` and the store's errors. No process outlives it, whatever ends it.
    """
    console.width = min(console.width, _WIDTH)
    # The story tells what happens; the log would tell it twice.
    logging.getLogger("retrysafe").addHandler(logging.NullHandler())
    with TemporaryDirectory(prefix="retrysafe-demo-") as folder, _ended_by_sigterm():
        store_url = url or f"sqlite:///{folder}/demo.db"
        story = Story(console, 0.0 if is_fast else _PAUSE_SECONDS)
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        started = time.monotonic()
        _play(story, store_url, ledger, _FAST_LEASE if is_fast else _LEASE)
        return Result(
            store_url,
            time.monotonic() - started,
            len(ledger.entries(STARTED)),
            len(ledger.entries(CHARGED)),
            story.expectations,
        )


def _play(story: Story, url: str, ledger: Ledger, lease: timedelta) -> None:
    store = open_store(url, busy_timeout=_BUSY_TIMEOUT)
    if store.capabilities.waits is Waits.NEVER:
        raise StoreUrlInvalid(
            f"{url} lives in one process, and the demonstration needs several: use "
            "sqlite:///path/to/file.db, or no --store for a temporary file"
        )
    try:
        # A store that cannot be used is told before the story begins.
        run_sync(store.list_records(RecordQuery(limit=1)))
        # Without a cache every answer that is shown comes from the store.
        with Idempotency(store, cache=False) as idempotency, Processes() as processes:
            story.say(
                "However often an operation is retried, raced or interrupted: there is one run at "
                f"a time and one outcome, and everybody gets it. Watch it happen on {url}. The "
                "ledger stands for the card network: every execution writes into it, so a double "
                "charge would show."
            )
            stage = acts.Stage(story, idempotency, processes, ledger, url, _run_id(), lease)
            acts.race(stage)
            acts.crash(stage)
            acts.zombie(stage)
            acts.mismatch(stage)
            story.act("Summary: expected and actual, from the store and the ledger", "all acts")
            story.expect(
                "charges in the ledger",
                expected=_CHARGES_EXPECTED,
                actual=len(ledger.entries(CHARGED)),
            )
            story.summarise()
    finally:
        run_sync(store.close())


def _run_id() -> str:
    """Letters only: the acts look for amounts in texts that contain the key."""
    return "".join(secrets.choice("abcdefghkmnpqrstvwxyz") for _ in range(6))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that the workers are ended on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

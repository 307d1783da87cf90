"""What the runtime tests stand on: a store that can be watched and held up, threads with results.

Nothing here sleeps to order a race: a test waits for the event that it needs, with a limit that
only a hang reaches.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrysafe.core.keys.key import Key
from retrysafe.core.model import ClaimRequest, Extension, Settlement
from retrysafe.core.ports import Capabilities, ClaimResult, ExtendResult, SettleResult, Store, Waits
from retrysafe.stores.memory.store import MemoryStore

PATIENCE_SECONDS = 30


class Clock:
    """A wall clock for stores that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)


@dataclass
class Commit:
    """One commit, or one renewal, as the store saw it."""

    claims: list[ClaimRequest]
    settlements: list[Settlement]
    extensions: list[Extension] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """What the rows are, such as ["claim", "complete"]."""
        settled = [item.kind.name.lower() for item in self.settlements]
        return ["claim"] * len(self.claims) + settled + ["extend"] * len(self.extensions)

    @property
    def is_renewal(self) -> bool:
        return bool(self.extensions)


class StagedStore:
    """A store that notes each call, and calls the test before and after each commit's effect.

    What `before` or `after` raises is what the commit raises; a coroutine that one returns is
    awaited, so that a store for event loops can be held up without blocking the loop.
    """

    def __init__(
        self,
        inner: Store | None = None,
        *,
        waits: Waits = Waits.BLOCKING,
        batch_limit: int = 64,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        if inner is None:
            inner = MemoryStore() if now_ms is None else MemoryStore(now_ms=now_ms)
        self.inner = inner
        self.capabilities = Capabilities(waits, batch_limit=batch_limit)
        self.commits: list[Commit] = []
        self.other_calls: list[str] = []
        self.before: Callable[[Commit], object] | None = None
        self.after: Callable[[Commit], object] | None = None
        self._news = threading.Condition()

    @property
    def calls_count(self) -> int:
        return len(self.commits) + len(self.other_calls)

    @property
    def kinds(self) -> list[list[str]]:
        return [commit.kinds for commit in self.commits]

    @property
    def renewals(self) -> list[Commit]:
        return [commit for commit in self.commits if commit.is_renewal]

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Waits for commits to make the condition true."""
        with self._news:
            assert self._news.wait_for(is_reached, PATIENCE_SECONDS), self.kinds

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        commit = Commit(list(claims), list(settlements))
        with self._news:
            self.commits.append(commit)
            self._news.notify_all()
        await _play(self.before, commit)
        answers = await self.inner.commit(claims, settlements)
        await _play(self.after, commit)
        return answers

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        commit = Commit([], [], list(extensions))
        with self._news:
            self.commits.append(commit)
            self._news.notify_all()
        await _play(self.before, commit)
        answers = await self.inner.extend(extensions, timeout_seconds)
        await _play(self.after, commit)
        return answers

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        async def call(*args: Any, **options: Any) -> Any:
            self.other_calls.append(name)
            return await method(*args, **options)

        return call


async def _play(hook: Callable[[Commit], object] | None, commit: Commit) -> None:
    if hook is not None:
        result = hook(commit)
        if inspect.isawaitable(result):
            await result


class Hold:
    """Holds up the threads that pass until the test lets them go."""

    def __init__(self) -> None:
        self._reached = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, *_: object) -> None:
        """Stops here."""
        self._reached.release()
        assert self._open.wait(PATIENCE_SECONDS), "nobody let this thread go"

    def reached(self, count: int = 1) -> None:
        """Waits until that many more threads have stopped here."""
        for _ in range(count):
            assert self._reached.acquire(timeout=PATIENCE_SECONDS), "nobody came"

    def open(self) -> None:
        self._open.set()


class TaskHold:
    """The same for the tasks of one event loop."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._open = asyncio.Event()

    async def __call__(self, *_: object) -> None:
        self._reached.set()
        await asyncio.wait_for(self._open.wait(), PATIENCE_SECONDS)

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), PATIENCE_SECONDS)

    def open(self) -> None:
        self._open.set()


class Worker(threading.Thread):
    """A thread whose result or exception the test can ask for."""

    def __init__(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self._work = (work, args, kwargs)
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        work, args, kwargs = self._work
        try:
            self._value = work(*args, **kwargs)
        except BaseException as error:
            self._error = error

    def ended(self) -> BaseException | None:
        """What the thread raised, once it has ended."""
        self.join(PATIENCE_SECONDS)
        assert not self.is_alive(), "the thread hangs"
        return self._error

    def result(self) -> Any:
        """What the work returned; raises what it raised."""
        error = self.ended()
        if error is not None:
            raise error
        return self._value


def until(is_reached: Callable[[], bool]) -> None:
    """Waits for a state that makes no sound; it never passes early."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_reached():
        assert time.monotonic() < end, "the state is not reached"
        time.sleep(0.001)


def drive(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs the coroutine in a fresh loop and checks that it leaves no task behind."""

    async def watched() -> Any:
        result = await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        return result

    return asyncio.run(watched())


async def turns(count: int = 20) -> None:
    """Lets everything that is ready run; nothing in these tests needs more turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def raised(work: Awaitable[Any]) -> BaseException | None:
    """What awaiting raises."""
    try:
        await work
    except BaseException as error:
        return error
    return None


KEY = Key("the key", caller="tester")

"""Attack: a signal's handler that raises, or that calls retrysafe, anywhere in a whole call.

What must hold: nothing is left behind that later calls wait for. What the handler raises is never
taken for the failure of the operation or of a step: what has run does not run again. A handler that
calls retrysafe itself is served or refused, and never waits for its own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from retrysafe import (
    Idempotency,
    OperationInFlight,
    Policy,
    RetrysafeError,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.core.keys.canonical import TooDeep
from retrysafe.core.model import Decision, Payload, Step, StepWrite
from retrysafe.errors import StepNotStored
from retrysafe.http.rules import Rule
from retrysafe.http.wsgi import WSGIIdempotencyMiddleware
from retrysafe.runtime import thread_pool
from retrysafe.runtime.current import current
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit
from retrysafe.runtime.thread_pool import ThreadPool
from retrysafe.stores import SqliteStore, open_store
from retrysafe.stores.postgres.drivers.psycopg_connections import PsycopgPool
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import key_of, request
from tests.http.driving import ask_wsgi
from tests.interrupting import (
    HANG_SECONDS,
    Alarmed,
    Interrupted,
    Overflowed,
    Refused,
    at_every_place,
    at_every_place_at_once,
    no_hang,
    whole_tree,
)

STEP = Step("charge", 0, Payload("json.1", b"", b"1"))


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with no_hang():
        yield


class Shop:
    """Calls with a step, each under a key of its own, and how often each was carried out."""

    def __init__(self, idem: Idempotency) -> None:
        self.idem = idem
        self.number = 0
        self.runs: Counter[str] = Counter()

    def call(self) -> int:
        self.number += 1
        return self.pay(f"key-{self.number}")

    def pay(self, key: str, *, has_step: bool = True) -> int:
        def charge() -> int:
            self.runs[key] += 1
            return 7

        def operation() -> int:
            return current_attempt().step("charge", charge) if has_step else charge()

        return self.idem.run(key, operation, name="pay", request="r")

    def require_empty(self, place: object) -> None:
        assert current.get() is None, f"an attempt is left after a signal at {place}"
        calls = self.idem._calls
        assert not calls._gate.inside, f"somebody is inside after a signal at {place}"
        assert not calls._engine.flights_count, f"a flight is left after a signal at {place}"


@pytest.fixture(params=["sqlite", "memory", "postgresql"])
def shop(request, tmp_path: Path, monkeypatch) -> Iterator[Shop]:
    monkeypatch.setattr("retrysafe.core.engine.CLAIM_TRIES", 1)
    url = f"{request.param}://"
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'keys.db'}"
    elif request.param == "postgresql":
        # With one connection, what an interruption keeps is missing at once.
        url = f"{request.getfixturevalue('migrated_url')}&pool=1"
    policy = Policy(settle_patience=timedelta(0))
    with Idempotency(url, caller="tester", policy=policy, cache=False) as idem:
        made = Shop(idem)
        made.pay("warm-up")
        if request.param == "sqlite":
            idem._calls.store._connections.writer.execute("PRAGMA synchronous = OFF")
        yield made
    # What was interrupted while a connection was being made is thrown away here, and not during a
    # later test, which would be blamed for a connection that was not closed.
    del made
    gc.collect()


# Of a flow that a signal kept from being begun; Python says so when it is thrown away.
never_begun = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@never_begun
@pytest.mark.parametrize("kind", [Interrupted, Overflowed])
@pytest.mark.parametrize("count", [1, 3])
def test_a_call_leaves_nothing_behind(shop: Shop, count: int, kind: type[Interrupted]):
    """Wherever it is interrupted, the next one works, and nobody is waited for.

    Also when several signals come at once, each of which raises; and where the stack ends.
    """

    def call() -> None:
        with suppress(RetrysafeError, TooDeep):  # What an overflow may be told as.
            shop.call()

    place = 0
    for place in at_every_place_at_once(count, call, *whole_tree(), kind=kind):
        assert shop.pay(f"next-{shop.number}") == 7, place
        shop.require_empty(place)
    assert place > 100
    assert max(shop.runs.values()) == 1


@never_begun
@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize(("count", "kind"), [(1, Alarmed), (3, Alarmed), (1, Refused)])
def test_an_exception_of_a_handler_is_no_failure_of_the_operation(
    shop: Shop, count: int, kind: type[Alarmed], has_step: bool
):
    """What has run does not run again, wherever the handler raised; after one signal the outcome is
    stored, and the retry is told it. Also when the handler's own call was refused."""

    def call() -> None:
        shop.number += 1
        with suppress(RetrysafeError):  # What a signal inside of the store may be told as.
            shop.pay(f"key-{shop.number}", has_step=has_step)

    place = 0
    blocked = 0
    for place in at_every_place_at_once(count, call, *whole_tree(), kind=kind):
        key = f"key-{shop.number}"
        has_run = bool(shop.runs[key])
        try:
            assert shop.pay(key, has_step=has_step) == 7, place
        except OperationInFlight:
            blocked += has_run
            assert count > 1 or not has_run, place
        assert shop.runs[key] <= 1, place
        shop.require_empty(place)
    assert place > 100
    assert blocked < place


@never_begun
def test_an_exception_of_a_handler_is_no_failure_of_a_request():
    """The middleware has work of its own after the application's, in which the handler raises."""
    number, runs, has_ended = 0, 0, True

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        nonlocal runs, has_ended
        runs, has_ended = runs + 1, False
        # What is raised in there is raised inside of the application.
        start_response("201 Created", [("Content-Type", "text/plain")])
        has_ended = True
        return [b"paid"]

    def ask() -> int:
        return ask_wsgi(protected, key=f'"k-{number}"').status

    def act() -> None:
        nonlocal number, runs, has_ended
        number, runs, has_ended = number + 1, 0, True
        with suppress(RetrysafeError):
            ask()

    with Idempotency("memory://", cache=False) as idem:
        protected = WSGIIdempotencyMiddleware(app, idem, caller=lambda _: "c", rules=[Rule()])
        act()
        place = 0
        for place in at_every_place_at_once(1, act, *whole_tree(), kind=Alarmed):
            is_own = not has_ended
            assert ask() in (201, 409), place
            assert runs <= 1 + is_own, str(place)
    assert place > 100


@never_begun
@pytest.mark.parametrize("is_same_key", [False, True])
def test_a_handler_may_call(shop: Shop, is_same_key: bool):
    """It is served or refused at once; the call that it came into goes on; nothing runs twice."""
    heard: Counter[str] = Counter()

    def handler() -> None:
        try:
            shop.pay(f"key-{shop.number}" if is_same_key else f"handler-{shop.number}")
        except (StoreUnavailable, OperationInFlight) as error:
            heard[type(error).__name__] += 1
        else:
            heard["served"] += 1

    place = 0
    for place in at_every_place(shop.call, *whole_tree(), handler=handler):
        assert shop.runs[f"key-{shop.number}"] == 1, place
        shop.require_empty(place)
    assert place > 100
    assert max(shop.runs.values()) == 1
    assert heard["served"]
    assert len(heard) > 1


class Beside:
    """A thread that carries the next batch, and a handler that comes when it has begun to."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._writer = ThreadGroupCommit(store)
        self._answers: list[Any] = []
        self._carrier = threading.Thread(target=self._claim_other)
        # Called once, where the test has the main thread interrupted.
        self.handlers: list[Callable[[], None]] = []

    def _claim_other(self) -> None:
        self._answers.append(run_sync(self._writer.claim(request(key_of("other")))))

    def _handler(self) -> None:
        self._carrier.start()
        while not self._writer._carriers:
            pass  # Until the other thread has the batch; it cannot end before this one goes on.
        with pytest.raises(StoreUnavailable, match="signal's handler"):
            run_sync(self._writer.claim(request(key_of("handler"))))

    def check(self) -> None:
        """A step is written, and the handler comes into that; nobody waits for itself."""
        held = request(key_of("k"))
        run_sync(self._writer.claim(held))
        self.handlers.append(self._handler)
        write = StepWrite(held.key, held.token, STEP)
        assert run_sync(self._store.record_step(write)) is Decision.APPLY
        self._carrier.join(30)
        assert [answer.decision for answer in self._answers] == [Decision.ADMIT]
        assert not self.handlers
        run_sync(self._store.close())

    def interrupt(self) -> None:
        if self.handlers and threading.current_thread() is threading.main_thread():
            self.handlers.pop()()


@pytest.mark.timeout(60)
def test_a_handler_in_the_middle_of_a_write_does_not_wait_for_its_own_thread(tmp_path):
    """Another thread carries its claim, and waits for the lock that this one holds."""
    clock = ManualClock()

    def now_ms() -> int:
        beside.interrupt()
        return clock()

    beside = Beside(SqliteStore(tmp_path / "keys.db", now_ms=now_ms))
    beside.check()


@pytest.mark.timeout(60)
def test_a_handler_inside_of_the_pool_does_not_wait_for_its_own_thread(migrated_url, monkeypatch):
    """The same for the lock of the connections."""
    usual = PsycopgPool._give_back

    def give_back(pool: Any, place: Any) -> None:
        beside.interrupt()
        usual(pool, place)

    monkeypatch.setattr(PsycopgPool, "_give_back", give_back)
    beside = Beside(open_store(migrated_url))
    beside.check()


def test_a_step_of_a_handler_inside_of_the_store_is_refused_at_once(tmp_path):
    """It is the thread's own write that is in the way: no patience helps."""
    handlers: list[Callable[[], None]] = []
    heard: list[BaseException] = []
    clock = ManualClock()

    def now_ms() -> int:
        if handlers:
            handlers.pop()()
        return clock()

    def operation() -> int:
        attempt = current_attempt()

        def handler() -> None:
            with pytest.raises(StepNotStored) as caught:
                attempt.step("handler", lambda: 1)
            heard.append(caught.value)

        handlers.append(handler)
        return attempt.step("charge", lambda: 7)

    store = SqliteStore(tmp_path / "keys.db", now_ms=now_ms)
    patient = Policy(settle_patience=timedelta(hours=1))
    with Idempotency(store, caller="tester", policy=patient) as idem:
        assert idem.run("k", operation, name="pay", request="r") == 7
    assert len(heard) == 1


@never_begun
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loops_worker_threads_outlive_a_handler(monkeypatch):
    """Wherever it raises in the loop's thread, the loop hears of the end of the work that it waits
    for, the next work is done, and the threads can be ended."""
    monkeypatch.setattr(thread_pool, "LOOK_SECONDS", 0.01)
    pools = [ThreadPool(1, "struck")]

    async def work() -> int:
        return await asyncio.wait_for(pools[0].run(lambda: 7), HANG_SECONDS)

    def act() -> None:
        pools[0] = ThreadPool(1, "struck")
        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(lambda *_: None)
            with suppress(RuntimeError):  # What a start may be told as that was struck.
                runner.run(work())
            pools[0].close()

    place = 0
    for place in at_every_place(act, thread_pool, concurrent.futures._base):
        assert asyncio.run(work()) == 7, str(place)
        pools[0].close()
    assert place > 30
    assert not thread_pool._under_way

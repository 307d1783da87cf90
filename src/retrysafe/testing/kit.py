"""The test kit of an application: its own idempotency object, watched and attacked.

Owns what is asserted of an endpoint, a consumer or a function: twenty tries at once run once, and
an attempt that dies is finished by the next. Works on the store that the object has, or on a fresh
one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Payload
from retrysafe.core.ports import Store, Waits
from retrysafe.core.values.codec import ValueCodec, encode_failure
from retrysafe.errors import ClaimLost
from retrysafe.http.responses import Response, ResponseCodec
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.calls import calls_of
from retrysafe.runtime.drive import run_sync
from retrysafe.testing.senders import CallSender, Reply, RequestSender, Sender, is_replay
from retrysafe.testing.watched import AttemptKilled, Crash, KeySeeded, Seed, SeedState, WatchedStore

# How long the lease of a dead attempt may take to end. It is of milliseconds, but a SQLite store of
# your own spares it for seconds on a busy machine.
_TAKEOVER_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.005
_FAILURE_LIMIT_BYTES: Final = 65_536
_ERROR_STATUS: Final = 400

Effects = Callable[[], int]


def assert_replayed(response: Any) -> None:
    """The response is an earlier one, sent again: nothing was run for it."""
    assert is_replay(response), f"{response.status_code} is no replay: {_shown(response)}"


def assert_ran(response: Any) -> None:
    """The request was run, and succeeded."""
    assert not is_replay(response), f"{response.status_code} is a replay: nothing was run"
    assert response.status_code < _ERROR_STATUS, f"{response.status_code}: {_shown(response)}"


def _shown(response: Any) -> str:
    body = getattr(response, "content", None)
    return repr((response.data if body is None else body)[:500])


def stored_response(
    status: int, body: bytes = b"", *, headers: Mapping[str, str] | None = None
) -> Response:
    """A response for `Kit.seeding`."""
    named = {"content-type": "application/json", **(headers or {})}
    lines = [(name.lower().encode(), text.encode("latin-1")) for name, text in named.items()]
    return Response(status, lines, body)


class Kit:
    """Watches one `Idempotency` or `AsyncIdempotency` for the time of a `with` block.

    The object has no replay cache meanwhile: every try asks the store.
    """

    def __init__(
        self,
        idempotency: Idempotency | AsyncIdempotency,
        store: Store | None = None,
        *,
        turn: Callable[[timedelta], object] | None = None,
    ) -> None:
        """`store` takes the place of the object's own; `turn` makes the time go on in it."""
        calls: Any = calls_of(idempotency)
        self._calls = calls
        self._own = (calls.store, calls.settings, calls.owns_store)
        self._turn = turn
        self._fresh = store
        self.store = WatchedStore(calls.store if store is None else store)

    def __enter__(self) -> Kit:
        _, settings, owns_store = self._own
        self._calls.replace_store(
            self.store,
            replace(settings, has_cache=False),
            owns_store=owns_store or self._fresh is not None,
        )
        return self

    def __exit__(self, *_: object) -> None:
        own_store, settings, owns_store = self._own
        self._calls.replace_store(own_store, settings, owns_store=owns_store)
        fresh = self._fresh
        # One of an event loop is closed there, with the object.
        if fresh is not None and fresh.capabilities.waits is not Waits.SUSPENDING:
            run_sync(fresh.close())

    # What happened.

    @property
    def runs(self) -> list[Key]:
        """The keys of all attempts so far, in order; a key stands twice if it ran twice."""
        return list(self.store.granted)

    @contextmanager
    def runs_exactly(self, count: int) -> Iterator[None]:
        """The block runs that many attempts, whatever number of tries is sent."""
        before = len(self.store.granted)
        yield
        ran = self.store.granted[before:]
        assert len(ran) == count, f"{len(ran)} attempts ran instead of {count}: {ran}"

    # States.

    def advance(self, by: timedelta) -> None:
        """Turns the store's clock forward: leases and windows end.

        Raises `ValueError` for a store that the kit has not opened.
        """
        if self._turn is None:
            raise ValueError(
                "the clock of a store that is your own cannot be turned: give the kit a store of "
                "its own ('memory', 'sqlite', or a PostgreSQL URL), or use seeding('abandoned')"
            )
        self._turn(by)

    @contextmanager
    def seeding(self, state: SeedState, value: Any = None) -> Iterator[None]:
        """Calls inside the block run nothing: their keys get the state, for this very request.

        `value` is what a completed one has returned, the exception of a failed one, or what
        `stored_response` made for a protected request.
        """
        seed = Seed(state, _payload_of(state, value))
        self.store.seed = seed
        try:
            yield
        except KeySeeded:
            pass
        finally:
            self.store.finish_seeding(seed)
        assert seed.count, "nothing was claimed inside of seeding: no key was given the state"

    @contextmanager
    def crashing(self, point: str = "after") -> Iterator[None]:
        """The attempt inside the block dies: nothing more of it reaches the store.

        `point` is "before" the operation, "after" it but before its outcome is stored, or the name
        of a step after which it dies. Its lease ends at once, so the next try takes over.
        """
        crash = self.store.crash = Crash(point)
        try:
            yield
        except (AttemptKilled, ClaimLost):
            # Nobody hears the last words of a process that is gone.
            pass
        finally:
            self.store.crash = None
        assert crash.has_happened, f"no attempt got as far as to die {crash.told}"

    # The attack.

    def assert_runs_once(
        self,
        client: Any,
        method: str,
        url: str,
        *,
        effects: Effects | None = None,
        at_once: int = 20,
        crashes: Iterable[str] = ("before", "after"),
        vary: Callable[[int], Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """Sends a request many times at once, kills attempts, and retries: each runs once.

        `client` is a TestClient, httpx's, Flask's or Django's; it is awaited exactly when the
        client's own methods are. `options` are those of the client. `effects` counts what the
        endpoint does. Every attack has a key of its own; for keys that are made of the request,
        `vary(number)` gives the options that tell its request from others.
        """
        sender = RequestSender(client, method, url, options, vary)
        flow = self._attack(sender, effects, at_once, tuple(crashes))
        return flow if sender.is_async else run_sync(flow)

    def assert_call_runs_once(
        self,
        call: Callable[[int], Any],
        *,
        effects: Effects | None = None,
        at_once: int = 20,
        crashes: Iterable[str] = ("before", "after"),
    ) -> Any:
        """The same for a function or a consumer's handler.

        `call(number)` makes one call; another number is another key. It is awaited when `call` is
        an async function.
        """
        flow = self._attack(CallSender(call), effects, at_once, tuple(crashes))
        return flow if asyncio.iscoroutinefunction(call) else run_sync(flow)

    async def _attack(
        self, sender: Sender, effects: Effects | None, at_once: int, crashes: tuple[str, ...]
    ) -> None:
        await self._race(sender, effects, at_once)
        for phase, point in enumerate(crashes, 1):
            await self._die(sender, effects, phase, point)

    async def _race(self, sender: Sender, effects: Effects | None, at_once: int) -> None:
        before, count = len(self.store.granted), _counted(effects)
        replies = await sender.send_at_once(0, at_once)
        told = ", ".join(f"{times} x {text}" for text, times in Counter(map(str, replies)).items())
        for reply in replies:
            if reply.error is not None and not reply.in_flight:
                raise AssertionError(
                    f"a try failed among {at_once} at once: {told}"
                ) from reply.error
        ran = Counter(key.digest for key in self.store.granted[before:])
        assert ran, (
            "nothing was claimed: the route is not protected, the request brings no key that it "
            f"takes, or the kit watches another object than the application's. Answers: {told}"
        )
        most = max(ran.values())
        assert most == 1, f"{most} of {at_once} tries at once ran. Answers: {told}"
        winners = [reply for reply in replies if not reply.in_flight and not reply.replayed]
        for winner in winners:
            _require_success(winner)
        self._require_effect(effects, count, f"after {at_once} tries at once")
        await self._require_replay(sender, 0, replies)

    async def _die(self, sender: Sender, effects: Effects | None, phase: int, point: str) -> None:
        count = _counted(effects)
        crash = Crash(point)
        with self.crashing(point):
            await sender.send(phase)
        until = time.monotonic() + _TAKEOVER_SECONDS
        reply = await sender.send(phase)
        while reply.in_flight and time.monotonic() < until:
            await self._pause(sender)
            reply = await sender.send(phase)
        if reply.error is not None:
            raise AssertionError(
                f"the retry of an attempt that died {crash.told} failed: {reply}"
            ) from reply.error
        assert not reply.in_flight, f"the retry found an attempt that died {crash.told} in flight"
        _require_success(reply)
        self._require_effect(effects, count, f"after an attempt died {crash.told} and was retried")
        await self._require_replay(sender, phase, [reply])

    @staticmethod
    async def _pause(sender: Sender) -> None:
        if getattr(sender, "is_async", False):
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            time.sleep(_PAUSE_SECONDS)  # noqa: ASYNC251 — a blocking client has no loop.

    async def _require_replay(self, sender: Sender, phase: int, earlier: list[Reply]) -> None:
        before = len(self.store.granted)
        reply = await sender.send(phase)
        if reply.error is not None:
            raise AssertionError(f"a late retry failed: {reply}") from reply.error
        ran = self.store.granted[before:]
        assert not ran, f"a late retry ran again, and was answered {reply}"
        values = [item.value for item in (*earlier, reply) if not item.in_flight]
        assert all(value == reply.value for value in values), f"answers differ: {values}"

    @staticmethod
    def _require_effect(effects: Effects | None, before: int, when: str) -> None:
        if effects is None:
            return
        made = effects() - before
        advice = (
            ". Make the effect a step, give the system that is called a child key, or store the "
            "outcome in the effect's transaction (complete_in, or a rule with a transaction)"
            if made > 1
            else ""
        )
        assert made == 1, f"the effect happened {made} times {when}{advice}"


def _counted(effects: Effects | None) -> int:
    return 0 if effects is None else effects()


def _require_success(reply: Reply) -> None:
    assert reply.status is None or reply.status < _ERROR_STATUS, (
        f"the request itself is answered {reply}: send one that succeeds"
    )


def _payload_of(state: SeedState, value: Any) -> Payload | None:
    if state in ("running", "abandoned"):
        if value is not None:
            raise ValueError(f"a key that is {state} has no outcome: leave the value out")
        return None
    if isinstance(value, Response):
        return ResponseCodec().encode(value)
    if isinstance(value, BaseException):
        return encode_failure(value, _FAILURE_LIMIT_BYTES)
    if state == "failed":
        raise ValueError("a failed key has an exception, or a stored_response(…) of its request")
    return ValueCodec().encode(value)

"""Nested claims: one request with a key for every secret that is listed.

Owns the order of its levels and what each of them stores. A key that is made with a secret, such as
a body key or the key of a caller that is a credential, is another key after the secret was
replaced. While both secrets are listed, a call claims both keys, one inside the other, and runs its
operation innermost. So it excludes a process that knows only the old secret and one that knows only
the new, and each of them finds the outcome. Looking for one key and then claiming the other would
let both run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from retrysafe.core.call import Answer, Call, Nest
from retrysafe.core.events import Reporter
from retrysafe.core.flights import Flight
from retrysafe.core.handlers import is_refusal
from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.model import (
    TAG_BYTES,
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Ending,
    Fingerprint,
    Payload,
    SettleKind,
    Settlement,
    State,
    StoredOutcome,
)
from retrysafe.core.ports import Ports
from retrysafe.core.retries import Retries
from retrysafe.core.run import Runner
from retrysafe.core.settle import Settler
from retrysafe.core.steps.writer import READ_TRIES
from retrysafe.core.values import codec
from retrysafe.errors import (
    KeyReused,
    OperationInFlight,
    OutcomeUnavailable,
    RetrysafeError,
    StoreError,
    StoreUnavailable,
)

_ENDINGS: Final = {
    State.SUCCEEDED: Ending.SUCCEEDED,
    State.FAILED: Ending.FAILED,
    State.RELEASED: Ending.RELEASED,
}

# Settles one level, and returns what it has settled; None when that is nothing.
End = Callable[[], Awaitable[tuple[Ending, Payload] | None]]
Ask = Callable[[Call, Callable[..., Any], Any, Any], Awaitable[Answer[Any]]]


def nested(call: Call, keys: Iterable[tuple[bytes, Key]]) -> Call:
    """The call with all keys of its request, each with the tag of the secret that made it.

    In the order of the tags, which is the same in all processes, however they list their secrets:
    in two orders, two duplicates could refuse each other again and again. Its arguments are not
    stored: a worker that resumed one level would know nothing of the others.
    """
    by_tag = dict(keys)
    levels = [by_tag[tag] for tag in sorted(by_tag)]
    if len(set(levels)) == 1:
        return call
    nest = Nest(by_tag)
    # Nor does it take a corrected request: the levels could be of different ones then.
    call = replace(call, nothing_happened=None)
    made = replace(call, key=levels[-1], arguments=None, nest=nest)
    for key in reversed(levels[:-1]):
        made = replace(call, key=key, arguments=None, nest=nest, inner=made)
    return made


class NestedRunner:
    """Runs the outer levels of nested claims: each one asks for the next, and stores as it ended.

    Observers hear of a call once, from the level where it ended.
    """

    __slots__ = (
        "_ask",
        "_background",
        "_begin",
        "_clock",
        "_monotonic",
        "_remember",
        "_renewals",
        "_settler",
        "_store",
        "_writer",
    )

    def __init__(self, ports: Ports, runner: Runner, ask: Ask) -> None:
        self._ask = ask
        self._store = ports.store
        self._writer = ports.writer
        self._clock = ports.clock
        self._monotonic = ports.clock.monotonic
        self._background = ports.background
        self._renewals = ports.renewals
        self._begin = runner.begin
        self._remember = runner.remember
        self._settler = Settler(replace(ports, report=Reporter(None)))

    async def run(
        self,
        flight: Flight,
        call: Call,
        operation: Callable[..., Any],
        args: Any,
        kwargs: Any,
        request: ClaimRequest,
        answer: ClaimAnswer,
        asked: float,
    ) -> Answer[Any]:
        """Answers the next level under this one's claim, and settles this one alike.

        Raises as the next level does, or why this level's ending does not stand.
        """
        lease = self._begin(flight, call, request, answer, asked)
        inner = _inner_of(call, lease, answer)
        try:
            # Inside the try, as in `Runner.run`.
            self._renewals.add(lease)
            # Cancellation and process exit pass through: only the lease frees this level, too.
            try:
                told = await self._ask(inner, operation, args, kwargs)
            except Exception as error:
                end = partial(self._end_by_error, call, flight, lease, inner, answer, error)
                await self._insist(call, lease, answer.attempt, end)
                raise
            end = partial(self._end, call, flight, lease, inner, answer.attempt, told.value)
            await self._insist(call, lease, answer.attempt, end)
        finally:
            lease.is_held = False
            self._renewals.remove(lease)
        return told

    async def _insist(self, call: Call, lease: Lease, attempt: int, end: End) -> None:
        """Settles this level, also when its caller is cancelled meanwhile."""
        try:
            await end()
        except BaseException as error:
            if not is_refusal(error):
                # As in `Settler._hand_over`: the next level has ended, its caller is cancelled.
                orphan = self._end_orphan(call, lease, attempt, end)
                self._background.finish(orphan, self._settler.abandoning(call, attempt))
            raise

    async def _end_orphan(self, call: Call, lease: Lease, attempt: int, end: End) -> None:
        """The same for a caller who is gone; there is nobody left to tell."""
        leases = (lease, *_nest_of(call).held)
        try:
            for each in leases:
                each.is_held = True
                self._renewals.add(each)
            ended = await end()
            if ended is not None:
                await self._settler.settle_around(call, lease, *ended, attempt)
        except RetrysafeError:
            return
        finally:
            for each in leases:
                each.is_held = False
            for each in leases:
                self._renewals.remove(each)

    async def _end(
        self, call: Call, flight: Flight, lease: Lease, inner: Call, attempt: int, value: Any
    ) -> tuple[Ending, Payload] | None:
        """Settles this level as the next one ended, which gave a value; raises as `settle` does.

        Returns what it has settled; None when that is nothing.
        """
        asked = self._monotonic()
        _nest_of(call).active_ms = _nest_of(inner).active_ms
        try:
            ended = await self._ended(inner)
        except StoreError:
            ended = None
        if ended is not None:
            ending, payload = _ENDINGS[ended.state], ended.payload
        elif lease.may_be_settled:
            # The user's transaction has written the ending of every level, and decides about it.
            return None
        else:
            ending, payload = self._settler.payload_of(call, value, attempt)
        payload = await self._settler.settle(call, lease, ending, payload, attempt, value)
        self._share(call, flight, ending, payload, attempt, asked)
        return ending, payload

    async def _end_by_error(
        self,
        call: Call,
        flight: Flight,
        lease: Lease,
        inner: Call,
        answer: ClaimAnswer,
        error: Exception,
    ) -> tuple[Ending, Payload] | None:
        """The same after the next level raised.

        What that level raised about itself is never stored as an outcome. The key is freed where it
        is known that nothing ran, and left to its lease where that is not known.
        """
        nest, asked = _nest_of(inner), self._monotonic()
        if nest.token is None and not nest.is_replay:
            if isinstance(error, OperationInFlight | KeyReused):
                await self._let_go(call, lease, answer.decision)
            return None
        _nest_of(call).active_ms = nest.active_ms
        try:
            ended = await self._ended(inner)
        except StoreError:
            return None
        if ended is not None:
            ending, payload = _ENDINGS[ended.state], ended.payload
        elif nest.is_replay and isinstance(error, OutcomeUnavailable):
            ending, payload = Ending.SUCCEEDED, codec.withheld("it is no longer stored")
        elif nest.is_replay:
            ending = Ending.FAILED
            payload = codec.encode_failure(error, call.policy.outcome_limit_bytes)
        else:
            return None
        ending, payload = await self._settler.settle_judged(
            call, lease, ending, payload, answer.attempt, error
        )
        self._share(call, flight, ending, payload, answer.attempt, asked)
        return ending, payload

    async def _ended(self, inner: Call) -> StoredOutcome | None:
        """How the next level ended; None when it has not, or nobody knows any more."""
        retries = Retries(READ_TRIES, self._monotonic)
        while True:
            try:
                ended = await self._store.last_outcome(inner.key)
                break
            except StoreUnavailable as error:
                pause = retries.pause_after(error)
                if pause is None:
                    raise
            await self._clock.sleep(pause)
        token = _nest_of(inner).token
        # Another token's is of an earlier attempt, or of an owner that has taken over.
        return None if ended is None or token not in (None, ended.token) else ended

    async def _let_go(self, call: Call, lease: Lease, decision: Decision) -> None:
        """Leaves the key as this claim has found it: nothing ran under it.

        A record that this claim has made would keep the fingerprint of a request that was refused,
        and refuse the honest one after it. One that it took over is of an earlier attempt: without
        its steps, its fingerprint and its count, the next one would repeat what was done.
        """
        policy, payload = call.policy, codec.withheld("it was refused")
        settlement = Settlement(SettleKind.RELEASE, call.key, lease.token, payload)
        if decision is not Decision.ADMIT:
            settlement.active_ms, settlement.audit_ms = policy.active_ms, policy.audit_ms
        # The level around must not take this release for an ending.
        _nest_of(call).token = None
        try:
            await self._writer.settle(settlement)
        except StoreError:
            return  # The lease frees it instead.

    def _share(
        self,
        call: Call,
        flight: Flight,
        ending: Ending,
        payload: Payload,
        attempt: int,
        asked: float,
    ) -> None:
        if ending is Ending.RELEASED:
            flight.share(payload, attempt, is_released=True)
        else:
            active_ms = _nest_of(call).active_ms
            if active_ms is None:
                active_ms = call.policy.active_ms
            self._remember(call, flight, payload, attempt, asked, active_ms)


def _nest_of(call: Call) -> Nest:
    assert call.nest is not None  # Every level has one.
    return call.nest


def _inner_of(call: Call, lease: Lease, answer: ClaimAnswer) -> Call:
    """The call of the next level, with what this one's claim has told."""
    around = _nest_of(call)
    fingerprint = answer.fingerprint or around.fingerprint
    assert call.inner is not None  # Only outer levels come here.
    return replace(
        call.inner,
        progress=call.progress,
        fingerprints=_begun_first(call.fingerprints, fingerprint),
        nest=Nest(
            around.keys,
            (*around.held, lease),
            fingerprint,
            answer.correction or around.correction,
            around.is_later or answer.decision is not Decision.ADMIT,
            max(around.crashes, answer.attempt - 1 - answer.releases),
        ),
    )


def _begun_first(
    fingerprints: tuple[Fingerprint, ...], began: Fingerprint | None
) -> tuple[Fingerprint, ...]:
    """The fingerprints, those first that were made as that of the record around was.

    So that all levels tell the same secret, which child keys are made with.
    """
    if began is None:
        return fingerprints

    def is_like(fingerprint: Fingerprint) -> bool:
        if began.rule > 0 or fingerprint.rule > 0:
            return began.rule > 0 and fingerprint.rule > 0
        return fingerprint.digest[:TAG_BYTES] == began.digest[:TAG_BYTES]

    return tuple(sorted(fingerprints, key=lambda item: not is_like(item)))

"""The atomic block: claim, business writes and outcome in the one transaction of the user.

Owns the order of an atomic run. There is no lease to renew and nothing to settle later: until the
user's transaction commits nobody else sees any of it, and when it rolls back the key is free. It
must not know databases; it speaks to the `Transaction` port.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from retrysafe.core.call import Call
from retrysafe.core.events import ENDING_KINDS, EventKind, trace_of
from retrysafe.core.keys.canonical import Part
from retrysafe.core.keys.key import Key, checked_secret, child_key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Fingerprint,
    Payload,
    SettleKind,
    Settlement,
    StagedEntry,
)
from retrysafe.core.outbox.staging import Staging
from retrysafe.core.policy import InFlight
from retrysafe.core.ports import Ports, Transaction
from retrysafe.core.replay import gone, in_flight, replayed_value, reused
from retrysafe.core.settings import Settings
from retrysafe.core.values import codec
from retrysafe.errors import ClaimLost, InvalidInput, OperationInFlight, OutcomeMissing

# A leased owner under the same key is polled as the engine polls.
POLL_SECONDS: Final = 0.02
POLL_MAXIMUM_SECONDS: Final = 0.5
POLL_GROWTH: Final = 1.5


class Stage(Enum):
    """How far a block has come."""

    NEW = "new"
    CLAIMED = "claimed"
    SETTLED = "settled"
    LEFT = "left"


def storable(call: Call, value: Any) -> Payload:
    """The payload of an outcome that is written with the user's own writes.

    Raises `InvalidInput` when it cannot be stored. Unlike in a leased run nothing has happened
    yet that could not be undone, so refusing is better than remembering an outcome without value.
    """
    return storable_payload(call, call.codec, value)


def storable_payload(call: Call, outcome_codec: codec.OutcomeCodec, value: Any) -> Payload:
    """The same for any value of an operation, a step's result for one."""
    try:
        payload = codec.bounded(outcome_codec.encode(value), call.policy.outcome_limit_bytes)
    except Exception as error:
        raise InvalidInput(
            f"the outcome of {call.key.text!r} cannot be stored: {codec.message_of(error)}",
            key=call.key.text,
        ) from error
    if payload.form == codec.WITHHELD:
        raise InvalidInput(str(codec.unavailable(payload, call.key.text)), key=call.key.text)
    return payload


def settlement_of(
    call: Call,
    token: bytes,
    kind: SettleKind,
    payload: Payload,
    entries: tuple[StagedEntry, ...] = (),
    came_to: Any = None,
) -> Settlement:
    """The ending of an attempt as it is written in the user's transaction."""
    policy = call.policy
    settlement = Settlement(
        kind, call.key, token, payload, policy.active_ms, policy.audit_ms, entries
    )
    if call.nothing_happened is not None and kind is not SettleKind.COMPLETE:
        settlement.nothing_happened = call.nothing_happened(came_to)
    settlement.drops_arguments = call.arguments is not None or call.recovers is not None
    return settlement


class AtomicBlock:
    """One pass through an atomic block."""

    def __init__(
        self, call: Call, transaction: Transaction, ports: Ports, settings: Settings
    ) -> None:
        self.call = call
        # All keys of a request whose key has several forms, see `nested_claims`; here they are
        # claimed and settled one after the other, in the one transaction.
        self._levels = [call]
        while self._levels[-1].inner is not None:
            self._levels.append(self._levels[-1].inner)
        self._transaction = transaction
        self._clock = ports.clock
        self._report = ports.report
        self._secrets = settings.secrets
        # Of the record, where an earlier attempt has begun it: tells with which secret.
        self._fingerprint: Fingerprint | None = None
        self._token = ports.mint_token()
        self._owner = ports.owner
        self._stage = Stage.NEW
        self.replayed = False
        self.attempt = 0
        self._value: Any = None
        self._has_outbox = ports.store.capabilities.has_outbox
        self._outbox: Staging | None = None
        self._correction = b""
        # The replayed outcome as it is stored, and for how long it may be remembered.
        self.replayed_payload: Payload | None = None
        self.replayed_ms = 0
        self.replayed_trace = ""
        self._run_times = ports.run_times
        self._began_monotonic = 0.0
        # Whether observers hear of the call from here, and not from whoever made the block.
        self._is_followed = False

    # Entering.

    async def enter(self) -> None:
        """Claims the key, or finds the outcome to replay.

        Raises `TransactionMissing`, `KeyReused`, `OperationInFlight`, the stored failure,
        `OutcomeUnavailable` or `AttemptsExhausted`, and what the database raises.
        """
        if self._stage is not Stage.NEW:
            raise InvalidInput("an atomic block is entered once: make a new one for a retry")
        self._stage = Stage.LEFT
        self._is_followed = self._report.begins(self.call, self._clock.monotonic)
        if not self._is_followed:
            await self._enter()
            return
        # An atomic route is followed by the engine; a block in a user's own code by itself.
        self._report.tell_begin(self.call)
        try:
            await self._enter()
        except BaseException as error:
            self._report.end(self.call, error)
            raise

    async def _enter(self) -> None:
        await self._transaction.begin()
        try:
            try:
                answer = await self._admission(self.call)
                for level in self._levels[1:]:
                    if answer.decision is Decision.REPLAY:
                        break
                    around = answer
                    answer = await self._admission(level)
                    answer.fingerprint = answer.fingerprint or around.fingerprint
                    answer.correction = answer.correction or around.correction
            finally:
                if self.call.waiters is not None:
                    self.call.waiters.leave(self)
            if answer.decision is Decision.REPLAY:
                self.attempt = answer.attempt
                self.replayed_trace = trace_of(answer.owner)
                self.call.progress.replays(self.replayed_trace)
                self._tell(EventKind.REPLAYED)
                if answer.payload is None:
                    raise gone(self.call, answer.state)
                self._value = replayed_value(self.call, answer.payload)
                self.replayed = True
                self.replayed_payload = answer.payload
                # A corrected request may take its place at any moment: it is not kept.
                self.replayed_ms = 0 if answer.nothing_happened else answer.remaining_ms
            elif limit := self.call.policy.exhausted_limit(answer.attempt, answer.releases):
                # Not stored: the error rolls the user's transaction back, and the next caller
                # finds the same number of attempts and is told the same.
                self._tell(EventKind.EXHAUSTED)
                exhausted = codec.exhausted(limit, getattr(self.call.policy, limit))
                raise codec.decode_failure(exhausted, (), self.call.key.text)
        except BaseException:
            await self._undo()
            raise
        if self.replayed:
            # Gives the lock back: other retries must not take this reader for a running owner.
            await self._transaction.undo()
            return
        self._stage = Stage.CLAIMED
        self._began_monotonic = self._clock.monotonic()
        self.attempt = answer.attempt
        self._fingerprint, self._correction = answer.fingerprint, answer.correction
        was_abandoned = answer.condition is Condition.ABANDONED
        self._tell(EventKind.TAKEN_OVER if was_abandoned else EventKind.CLAIMED)

    async def _admission(self, call: Call) -> ClaimAnswer:
        transaction = self._transaction
        policy = call.policy
        request = ClaimRequest(
            call.key,
            call.fingerprints,
            self._token,
            policy.lease_ms,
            call.operation,
            self.call.progress.owner(self._owner),
            takes_corrections=call.nothing_happened is not None,
        )
        wait_until: float | None = None
        if policy.in_flight is InFlight.WAIT:
            wait_until = self._clock.monotonic() + policy.wait_seconds
        if not await transaction.lock(call.key, None):
            if wait_until is None:
                return await self._without_lock(request)
            if not self._may_wait():
                return await self._without_lock(request)
            # Nothing is read before the wait: on SQLite a transaction that has read before the
            # rival commits cannot become the writer after it.
            self.call.progress.begin_wait()
            seconds_left = max(0.0, wait_until - self._clock.monotonic())
            if not await transaction.lock(call.key, seconds_left):
                raise self._in_flight(None, has_waited=True)
        return await self._claim(request, wait_until)

    def _may_wait(self) -> bool:
        waiters = self.call.waiters
        return waiters is None or waiters.enter(self)

    async def _without_lock(self, request: ClaimRequest) -> ClaimAnswer:
        """What can be answered while somebody else has the lock: they may only be reading."""
        seen = await self._transaction.look(request)
        if seen.decision is Decision.REPLAY:
            return seen
        if seen.decision is Decision.MISMATCH:
            raise self._reused(seen)
        raise self._in_flight(None, has_waited=False)

    async def _claim(self, request: ClaimRequest, wait_until: float | None) -> ClaimAnswer:
        """Claims under the lock; a leased owner of the key is waited for if that can help."""
        poll_seconds = POLL_SECONDS
        while True:
            asked = self._clock.monotonic()
            answer = await self._transaction.claim(request)
            self.call.progress.end_claim(asked)
            if answer.decision is Decision.MISMATCH:
                raise self._reused(answer)
            if answer.decision is not Decision.IN_FLIGHT:
                return answer
            now = self._clock.monotonic()
            lease_seconds = answer.remaining_ms / 1000 + 0.001
            if (
                wait_until is None
                or not await self._transaction.sees_changes()
                or not self._may_wait()
            ):
                raise self._in_flight(answer, has_waited=False)
            if now >= wait_until:
                raise self._in_flight(answer, has_waited=True)
            self.call.progress.begin_wait()
            await self._clock.sleep(min(poll_seconds, lease_seconds, wait_until - now))
            poll_seconds = min(poll_seconds * POLL_GROWTH, POLL_MAXIMUM_SECONDS)

    # Inside.

    @property
    def value(self) -> Any:
        """The outcome: replayed, or given to `complete`; raises `OutcomeMissing` before that."""
        if self.replayed or self._stage is Stage.SETTLED:
            return self._value
        raise OutcomeMissing(
            f"{self.call.key.text!r} has no outcome yet: it is run by this block",
            key=self.call.key.text,
        )

    def child_key(self, *parts: Part) -> str:
        """The key for a call downstream; raises `SecretMissing`."""
        key, secret = self._parent()
        return child_key(checked_secret(secret), key, *parts, correction=self._correction)

    def _parent(self) -> tuple[Key, bytes | None]:
        """What child keys are made of: the key by the secret that the operation began with."""
        keys = None if self.call.nest is None else self.call.nest.keys
        secret, key = self._secrets.parent(self._levels[-1].key, keys, self._fingerprint)
        return key, secret

    @property
    def outbox(self) -> Staging:
        """What is delivered once the user's transaction has committed; raises `InvalidInput`."""
        if not self._has_outbox:
            raise InvalidInput("this block's store has no outbox to stage entries in")
        if self._outbox is None:
            self._outbox = Staging(*self._parent(), self._require_claimed, self._correction)
        return self._outbox

    async def complete(self, value: Any) -> None:
        """Stores the outcome; raises `ClaimLost`, or `InvalidInput` for a value without a form."""
        self._require_claimed()
        await self.conclude(SettleKind.COMPLETE, storable(self.call, value), value)

    async def conclude(self, kind: SettleKind, payload: Payload, value: Any) -> None:
        """Stores an outcome whose stored form is known already; raises `ClaimLost`."""
        self._require_claimed()
        await self._settle(kind, payload, value)
        self._value = value
        self._tell(ENDING_KINDS[kind])

    async def fail(self, error: Exception) -> None:
        """Stores a failure for good; raises `ClaimLost`."""
        self._require_claimed()
        payload = codec.encode_failure(error, self.call.policy.outcome_limit_bytes)
        await self.conclude(SettleKind.FAIL, payload, None)

    def _require_claimed(self) -> None:
        text = self.call.key.text
        if self.replayed:
            raise InvalidInput(
                f"{text!r} is a replay and has its outcome: return run.value instead", key=text
            )
        if self._stage is not Stage.CLAIMED:
            raise InvalidInput(f"the outcome of {text!r} is given once, inside the block", key=text)

    async def _settle(self, kind: SettleKind, payload: Payload, came_to: Any) -> None:
        entries = () if self._outbox is None else self._outbox.entries()
        self.call.progress.begin_settle()
        for level in self._levels:
            is_innermost = level is self._levels[-1]
            settlement = settlement_of(
                level, self._token, kind, payload, entries if is_innermost else (), came_to
            )
            decision = await self._transaction.settle(settlement)
            if decision is not Decision.APPLY:
                # The claim was rolled back by a savepoint, or the user's transaction was: whoever
                # claims now may be running.
                self._tell(EventKind.LOST)
                raise ClaimLost(
                    f"the claim on {self.call.key.text!r} is gone: the transaction, or the "
                    "savepoint that it was made in, was rolled back inside the block",
                    key=self.call.key.text,
                )
        self._stage = Stage.SETTLED
        self.call.progress.end_settle()

    # Leaving.

    async def leave(self, error: BaseException | None) -> None:
        """Keeps a block that has its outcome; undoes any other.

        Raises `OutcomeMissing` when the block ended quietly without an outcome.
        """
        try:
            await self._leave(error)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self._is_followed:
                self._report.end(self.call, error)

    async def _leave(self, error: BaseException | None) -> None:
        stage, self._stage = self._stage, Stage.LEFT
        if stage in (Stage.SETTLED, Stage.CLAIMED):
            seconds = self._clock.monotonic() - self._began_monotonic
            self._run_times.add(self.call.operation, seconds)
            self.call.progress.end_operation()
        if stage is Stage.SETTLED and error is None:
            await self._transaction.keep()
            self._stage = Stage.SETTLED
        elif stage in (Stage.SETTLED, Stage.CLAIMED):
            await self._undo()
            self._tell(EventKind.RELEASED)
            if error is None:
                raise OutcomeMissing(
                    f"the atomic block of {self.call.key.text!r} ended without an outcome: call "
                    "run.complete(value) before it ends. Nothing that it wrote is kept",
                    key=self.call.key.text,
                )

    async def _undo(self) -> None:
        try:
            await self._transaction.undo()
        except Exception:
            # The connection is gone, or the transaction has ended. Either undoes more than this
            # would have, and the reason for undoing matters more to the caller.
            return

    # Words.

    def _tell(self, kind: EventKind) -> None:
        self._report(kind, self.call, self.attempt)

    def _reused(self, answer: ClaimAnswer) -> Exception:
        self._tell(EventKind.MISMATCHED)
        return reused(self.call, answer.operation)

    def _in_flight(self, answer: ClaimAnswer | None, *, has_waited: bool) -> OperationInFlight:
        """The refusal beside a leased owner; None is a rival's transaction, which has no lease."""
        self._tell(EventKind.WAIT_TIMED_OUT if has_waited else EventKind.IN_FLIGHT)
        message = f"another run of {self.call.key.text!r} has not ended"
        elapsed, left = 0.0, None
        is_locked = answer is None or answer.is_locked
        if answer is not None and not is_locked:
            elapsed, left = answer.elapsed_ms / 1000, answer.remaining_ms / 1000
        seconds = self._run_times.retry_after(self.call.operation, elapsed, left)
        error = in_flight(self.call, message, seconds, is_locked=is_locked)
        error.has_waited = has_waited
        return error

"""What both faces share: their settings, and how listeners are told.

Owns nothing that waits; the faces add that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from types import FunctionType
from typing import Any, Final

from retrysafe.core.cache import ReplayCache
from retrysafe.core.call import Call
from retrysafe.core.events import ALL_KINDS, Emit, Event, EventKind, Reporter
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    TOKEN_BYTES,
    Condition,
    Decision,
    Fingerprint,
    OperatorCommand,
    StagedEntry,
    StoredKey,
)
from retrysafe.core.outbox.entries import staged_entry
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Store, Transaction, Waits
from retrysafe.core.run_times import RunTimes
from retrysafe.core.values.codec import OutcomeCodec
from retrysafe.errors import InvalidInput, OperatorRefused
from retrysafe.runtime.checks import (
    SecretSource,
    checked_observers,
    checked_policy,
    checked_rule,
    require_call,
    require_runnable,
    require_visible,
    secrets_of,
)
from retrysafe.runtime.describe import (
    UNSET,
    CallerSource,
    KeySource,
    Once,
    Settings,
    Unset,
    asked_for,
    checked_caller,
    codec_for,
    codec_of,
    operation_name,
)
from retrysafe.runtime.resumable import Resumable, Resumables, Run
from retrysafe.runtime.threaded_transaction import in_thread

_logger = logging.getLogger("retrysafe")

# The functions of a large service; what comes after them is only put together anew each time.
KNOWN_LIMIT: Final = 1_000
# Fingerprints, policy, name and codec, as a call takes them.
Known = tuple[tuple[Fingerprint, ...], Policy, str, OutcomeCodec]


# The same bytes as `os.urandom`, which lets go of the interpreter lock to get them: with many
# threads that is a needless switch on every claim. Not every system has it.
_random_bytes: Callable[[int], bytes] = getattr(os, "getrandom", os.urandom)


def mint_token() -> bytes:
    """A token that no other claim ever had or will have.

    Asked from the system each time. A buffer of random bytes would be copied by a fork, or by a
    snapshot of a virtual machine, and two owners would hold the same token.
    """
    return _random_bytes(TOKEN_BYTES)


def reporter(observers: Iterable[Emit]) -> Reporter:
    """One listener for many; what a listener raises never reaches the operation.

    A listener that has `kinds` hears those only. Nobody pays for events that nobody wants.
    """
    listeners = tuple(observers)
    if not listeners:
        return Reporter(None)
    kinds = frozenset().union(*(getattr(item, "kinds", ALL_KINDS) for item in listeners))

    def tell(event: Event) -> None:
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                _logger.exception("an observer of retrysafe failed")

    return Reporter(tell, kinds)


def checked_limit(limit: int) -> int:
    """The limit itself; raises `InvalidInput` for one that would mean everything or nothing."""
    if limit < 1:
        raise InvalidInput(f"a limit is a whole number from 1 up, got {limit}")
    return limit


def require_name(name: object) -> None:
    """Raises `InvalidInput` where the function stands in the place of its name."""
    if name is not None and not isinstance(name, str):
        raise InvalidInput(
            "resumable takes the name of an operation: write @idem.resumable() or "
            "@idem.resumable('name') above the function"
        )


class Face:
    """The settings of an `Idempotency` or `AsyncIdempotency` object."""

    def __init__(
        self,
        store: Store,
        *,
        caller: CallerSource | None = None,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        secret: SecretSource = None,
        cache: bool = True,
        observers: Iterable[Emit] = (),
        owns_store: bool = False,
    ) -> None:
        self._store = store
        self._settings = Settings(
            checked_caller(caller),
            Policy() if policy is None else checked_policy(policy),
            FingerprintRule() if rule is None else checked_rule(rule),
            secrets_of(secret),
        )
        self._has_cache = cache
        self._report = reporter(checked_observers(observers))
        self._owns_store = owns_store
        # For adapters: how long the operations of this object took. Set before its first use, two
        # objects share it.
        self.run_times = RunTimes()
        self._resumables = Resumables()
        # What every call of a function has in common that brings nothing but its key.
        self._known: dict[Callable[..., Any], Known] = {}

    @property
    def policy(self) -> Policy:
        """The policy of calls that bring none of their own."""
        return self._settings.policy

    @property
    def settings(self) -> Settings:
        """For adapters: what calls are made with that bring nothing of their own."""
        return self._settings

    @property
    def store(self) -> Store:
        """For adapters: where the records are."""
        return self._store

    @property
    def resumable_names(self) -> list[str]:
        """The names of the operations that a worker of this object can finish."""
        return sorted(self._resumables.by_name)

    def report(self, kind: EventKind, key: Key, operation: str = "") -> None:
        """For adapters: tells the observers what happened outside of the engine."""
        self._report(kind, key, operation)

    def _new_cache(self) -> ReplayCache | None:
        return ReplayCache() if self._has_cache else None

    def _call(
        self,
        key: str | Key,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        caller: CallerSource | None,
        name: str | None,
        request: object | Unset,
        policy: Policy | None,
        rule: FingerprintRule | None,
        returns: type | tuple[type, ...] | None,
    ) -> Call:
        settings = self._settings
        is_usual = not args and (
            request is UNSET
            and name is None
            and policy is None
            and rule is None
            and returns is None
            and type(operation) is FunctionType
        )
        if is_usual:
            known = self._known.get(operation)
            if known is not None:
                return Call(settings.call_key(key, caller), *known)
        require_call(operation, args)
        if request is UNSET:
            if not args:
                require_visible(operation)
            request = asked_for(operation, args)
        found = None
        if self._resumables.by_function:
            found = self._resumables.of(operation, args)
        if found is not None:
            return self._resumable_call(
                *found, settings.call_key(key, caller), name, request, policy, rule, returns
            )
        if name is None:
            name = operation_name(operation)
        call = Call(
            settings.call_key(key, caller),
            settings.fingerprints(None if rule is None else checked_rule(rule), name, request),
            settings.policy if policy is None else checked_policy(policy),
            name,
            codec_for(operation, returns),
        )
        # What a closure or a default holds must not be kept alive for this.
        if (
            is_usual
            and operation.__closure__ is None
            and operation.__defaults__ is None
            and operation.__kwdefaults__ is None
            and len(self._known) < KNOWN_LIMIT
        ):
            self._known[operation] = (call.fingerprints, call.policy, name, call.codec)
            # Declared by somebody else since it was looked for: who declares looks here after that.
            if operation in self._resumables.by_function:
                self._known.pop(operation, None)
        return call

    def _resumable_call(
        self,
        resumable: Resumable,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: Key,
        name: str | None,
        request: object,
        policy: Policy | None,
        rule: FingerprintRule | None,
        returns: type | tuple[type, ...] | None,
    ) -> Call:
        """The call of an operation that was declared resumable, with its arguments."""
        if name is not None and name != resumable.name:
            raise InvalidInput(
                f"this operation is resumable as {resumable.name!r}, and a worker would not find "
                f"it as {name!r}: leave name= out"
            )
        policy = resumable.policy if policy is None else checked_policy(policy)
        rule = None if rule is None else checked_rule(rule)
        return Call(
            key,
            self._settings.fingerprints(rule, resumable.name, request),
            policy,
            resumable.name,
            resumable.codec if returns is None else codec_of(returns),
            arguments=resumable.payload(args, kwargs, policy.arguments_limit_bytes),
        )

    def _register(
        self,
        function: Callable[..., Any],
        name: str | None,
        policy: Policy | None,
        returns: type | tuple[type, ...] | None,
        run: Run,
    ) -> Resumable:
        """Makes a function resumable by its name; raises `InvalidInput`."""
        require_runnable(function)
        resumable = Resumable(
            operation_name(function) if name is None else name,
            function,
            self._settings.policy if policy is None else checked_policy(policy),
            codec_for(function, returns),
            run,
        )
        self._resumables.register(resumable)
        self._known.clear()
        return resumable

    def _join(self, connection: object, waits: Waits | None) -> Transaction:
        """The user's transaction, if the store and this face can work in it; None takes both."""
        join: Callable[[object], Transaction] | None = getattr(self._store, "join", None)
        if join is None:
            raise InvalidInput(
                f"{type(self._store).__name__} has no transactions to join: atomic mode needs a "
                "PostgreSQL or a SQLite store"
            )
        transaction = join(connection)
        if waits is Waits.SUSPENDING and transaction.waits is self._store.capabilities.waits:
            # A store that blocks is used through a thread, and so are its transactions.
            transaction = in_thread(transaction, self._store)
        if waits is not None and transaction.waits is not waits:
            needed = "Idempotency" if transaction.waits is Waits.BLOCKING else "AsyncIdempotency"
            kind = type(connection)
            raise InvalidInput(f"use {needed} with {kind.__module__}.{kind.__qualname__}")
        return transaction

    def _staged(
        self,
        topic: str,
        payload: Any,
        key: str | None,
        aggregate: str | None,
        deliver_at: datetime | None,
        content_type: str | None,
    ) -> StagedEntry:
        if not self._store.capabilities.has_outbox:
            raise InvalidInput(f"{type(self._store).__name__} has no outbox to stage entries in")
        return staged_entry(
            f"entry:{mint_token().hex()}" if key is None else key,
            topic,
            payload,
            aggregate=aggregate,
            deliver_at=deliver_at,
            content_type=content_type,
        )

    def _atomic_call(
        self,
        key: str | Key,
        *,
        caller: CallerSource | None,
        name: str,
        request: object,
        policy: Policy | None,
        rule: FingerprintRule | None,
        returns: type | tuple[type, ...] | None,
    ) -> Call:
        rule = None if rule is None else checked_rule(rule)
        return Call(
            self._settings.call_key(key, caller),
            self._settings.fingerprints(rule, name, request),
            self._settings.policy if policy is None else checked_policy(policy),
            name,
            codec_of(returns),
        )

    def _once(
        self,
        function: Callable[..., Any],
        *,
        key: KeySource,
        window: timedelta | None,
        caller: CallerSource | None,
        name: str | None,
        policy: Policy | None,
        rule: FingerprintRule | None,
        ignore: Iterable[str],
        returns: type | tuple[type, ...] | None,
        resume: Run | None = None,
    ) -> Once:
        """The decoration of a function; with `resume` it is resumable, and that runs it."""
        require_runnable(function)
        if isinstance(ignore, str):
            raise InvalidInput(f"ignore takes a list of parameter names, got the text {ignore!r}")
        once = Once(
            function,
            self._settings,
            key,
            operation_name(function) if name is None else name,
            checked_caller(caller),
            self._settings.policy if policy is None else checked_policy(policy),
            None if rule is None else checked_rule(rule),
            codec_for(function, returns),
            frozenset(ignore),
            window,
        )
        if resume is not None:
            once.keep = self._register(function, once.name, once.policy, returns, resume).payload
        return once


def operator_outcome(
    decision: Decision, command: OperatorCommand, key: Key, stored: StoredKey | None
) -> None:
    """Raises `OperatorRefused` with what to do instead, when the command was refused."""
    if decision is not Decision.REFUSE:
        return
    if stored is None:
        raise OperatorRefused(
            f"there is no record of {key}: check the key and the caller", key=key.text
        )
    condition = stored.condition
    advice = {
        (OperatorCommand.RELEASE, Condition.RUNNING): (
            "its owner may still be at work; wait for the lease, or force the release if you know "
            "that the owner is gone"
        ),
    }.get((command, condition))
    if advice is None and command is OperatorCommand.EXPIRE:
        advice = "a pending record never expires; release it first, or wait for its lease"
    if advice is None:
        advice = "the operation succeeded; expire the key if it must be able to run again"
    raise OperatorRefused(
        f"cannot {command.value} {key} while it is {condition.value}: {advice}", key=key.text
    )

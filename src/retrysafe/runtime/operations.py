"""The operations of one object: how each of their calls becomes a `Call`.

Owns which of them are resumable. It does no I/O, and is the same for threads and for tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from retrysafe.core.call import Call
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import Key
from retrysafe.core.policy import Policy
from retrysafe.core.settings import (
    CallerSource,
    Settings,
    checked_caller,
    checked_fingerprint,
    checked_policy,
)
from retrysafe.core.values.codec import codec_for, codec_of
from retrysafe.errors import InvalidInput
from retrysafe.runtime.checks import require_call, require_runnable, require_visible
from retrysafe.runtime.describe import (
    UNSET,
    KeySource,
    Once,
    Unset,
    asked_for,
    operation_name,
)
from retrysafe.runtime.resumable import Resumable, Resumables, Run


class Operations:
    """What an object knows of the operations that it runs."""

    __slots__ = ("app", "resumables", "settings")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.resumables = Resumables()
        # What a worker sends stored requests through: an ASGI or WSGI application.
        self.app: Any = None

    def call(
        self,
        key: str | Key,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        caller: CallerSource | None,
        name: str | None,
        request: object | Unset,
        policy: Policy | None,
        fingerprint: FingerprintRule | None,
        returns: type | tuple[type, ...] | None,
    ) -> Call:
        """The call of an operation with these arguments; raises `InvalidInput`."""
        settings = self.settings
        require_call(operation, args)
        if request is UNSET:
            if not args:
                require_visible(operation)
            request = asked_for(operation, args)
        found = None
        if self.resumables.by_function:
            found = self.resumables.of(operation, args)
        if found is not None:
            return self._resumable_call(
                *found, settings.call_key(key, caller), name, request, policy, fingerprint, returns
            )
        if name is None:
            name = operation_name(operation)
        return Call(
            settings.call_key(key, caller),
            settings.fingerprints(
                None if fingerprint is None else checked_fingerprint(fingerprint), name, request
            ),
            settings.policy if policy is None else checked_policy(policy),
            name,
            codec_for(operation, returns),
        )

    def _resumable_call(
        self,
        resumable: Resumable,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: Key,
        name: str | None,
        request: object,
        policy: Policy | None,
        fingerprint: FingerprintRule | None,
        returns: type | tuple[type, ...] | None,
    ) -> Call:
        """The call of an operation that was declared resumable, with its arguments."""
        if name is not None and name != resumable.name:
            raise InvalidInput(
                f"this operation is resumable as {resumable.name!r}, and a worker would not find "
                f"it as {name!r}: leave name= out"
            )
        policy = resumable.policy if policy is None else checked_policy(policy)
        rule = None if fingerprint is None else checked_fingerprint(fingerprint)
        return Call(
            key,
            self.settings.fingerprints(rule, resumable.name, request),
            policy,
            resumable.name,
            resumable.codec if returns is None else codec_of(returns),
            arguments=resumable.payload(args, kwargs, policy.arguments_limit_bytes),
        )

    def register(
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
            self.settings.policy if policy is None else checked_policy(policy),
            codec_for(function, returns),
            run,
        )
        self.resumables.register(resumable)
        return resumable

    def atomic_call(
        self,
        key: str | Key,
        *,
        caller: CallerSource | None,
        name: str,
        request: object,
        policy: Policy | None,
        fingerprint: FingerprintRule | None,
        returns: type | tuple[type, ...] | None,
    ) -> Call:
        """The call of an atomic block; raises `InvalidInput`."""
        rule = None if fingerprint is None else checked_fingerprint(fingerprint)
        return Call(
            self.settings.call_key(key, caller),
            self.settings.fingerprints(rule, name, request),
            self.settings.policy if policy is None else checked_policy(policy),
            name,
            codec_of(returns),
        )

    def once(
        self,
        function: Callable[..., Any],
        *,
        key: KeySource,
        window: timedelta | None,
        caller: CallerSource | None,
        name: str | None,
        policy: Policy | None,
        fingerprint: FingerprintRule | None,
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
            self.settings,
            key,
            operation_name(function) if name is None else name,
            checked_caller(caller),
            self.settings.policy if policy is None else checked_policy(policy),
            None if fingerprint is None else checked_fingerprint(fingerprint),
            codec_for(function, returns),
            frozenset(ignore),
            window,
        )
        if resume is not None:
            once.keep = self.register(function, once.name, once.policy, returns, resume).payload
        return once

"""The settings of an object: what its calls are made with when they bring nothing of their own.

Owns their checks, the scope of a key and the fingerprints of a request. Settings
never change, so a fork or another event loop takes them as they are.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from retrysafe.core.callables import shown_in_place
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import GLOBAL, Caller, GlobalCaller, Key, looks_derived
from retrysafe.core.keys.secret import NO_SECRETS, Secrets
from retrysafe.core.model import Fingerprint
from retrysafe.core.policy import Policy
from retrysafe.errors import (
    CallerMissing,
    InvalidInput,
    KeyInvalid,
    PolicyInvalid,
)

CallerSource = Caller | Callable[[], Caller]
# A secret, or several: the first makes, the others are recognised. None at the end of a list stands
# for what was made without one.
SecretSource = bytes | str | Sequence[bytes | str | None] | None

SECRET_VARIABLE: Final = "RETRYSAFE_SECRET"
# What stands for None in that variable. No secret is so short.
NO_SECRET_WORD: Final = "none"


@dataclass(frozen=True, slots=True)
class Settings:
    """What an object was made with."""

    caller: CallerSource | None = None
    policy: Policy = field(default_factory=Policy)
    fingerprint: FingerprintRule = field(default_factory=FingerprintRule)
    secrets: Secrets = NO_SECRETS
    has_cache: bool = True

    @classmethod
    def checked(
        cls,
        *,
        caller: CallerSource | None,
        policy: Policy | None,
        fingerprint: FingerprintRule | None,
        secret: SecretSource,
        cache: bool,
    ) -> Self:
        """The settings from what a user wrote; raises `InvalidInput` for what cannot be used."""
        return cls(
            checked_caller(caller),
            Policy() if policy is None else checked_policy(policy),
            FingerprintRule() if fingerprint is None else checked_fingerprint(fingerprint),
            secrets_of(secret),
            cache,
        )

    def fingerprints(
        self, rule: FingerprintRule | None, name: str, request: object
    ) -> tuple[Fingerprint, ...]:
        """What tells this request from others under its key; raises `FingerprintImpossible`."""
        rule = self.fingerprint if rule is None else rule
        return self.secrets.fingerprints(rule.fingerprints_of_value(name, request))

    def key(self, key: str | Key, caller: CallerSource | None) -> Key:
        """The scoped key; raises `CallerMissing` when nobody said whose it is."""
        if isinstance(key, Key):
            if caller is not None:
                raise InvalidInput("pass a Key or a caller, not both: the Key has its caller")
            return key
        source = self.caller if caller is None else caller
        if source is None:
            raise CallerMissing(
                "whose key is it? Pass caller=… with the authenticated account (a text, or a "
                "function that returns it), or caller=GLOBAL for one namespace shared by everybody"
            )
        if not isinstance(source, str | GlobalCaller):
            if not callable(source):
                raise _no_caller(source)
            source = source()
        return Key(key, caller=source)

    def call_key(self, key: str | Key, caller: CallerSource | None) -> Key:
        """The same for a key to run under; raises `KeyInvalid` for a copy of a derived key."""
        scoped = self.key(key, caller)
        if looks_derived(scoped.text):
            raise KeyInvalid(
                "a text of this form is a copy of a key that is made from values, and whoever "
                "chooses keys could take such a key in advance: pass what natural_key(…) returns, "
                "or another key",
                key=scoped.text,
            )
        return scoped


# A key that nobody uses, read to find out whether the store can be read.
CHECK_KEY: Final = Key("retrysafe:check", caller=GLOBAL)

# Checks.


def _no_caller(given: object) -> InvalidInput:
    return InvalidInput(
        f"caller is a text, a plain function that returns it, or GLOBAL, got {given!r}: write "
        "str(…) around a number such as the user's id"
    )


def checked_caller(caller: CallerSource | None) -> CallerSource | None:
    """Whose keys they are, for many calls to come; raises `InvalidInput`.

    Also for an async function: nobody would await it.
    """
    if caller is None or isinstance(caller, str | GlobalCaller):
        return caller
    if not callable(caller) or inspect.iscoroutinefunction(caller):
        raise _no_caller(caller)
    return caller


def checked_policy(policy: object) -> Policy:
    """The policy itself; raises `PolicyInvalid` for anything else, such as its settings alone."""
    if not isinstance(policy, Policy):
        raise PolicyInvalid(
            f"policy takes a Policy, such as Policy(lease=timedelta(seconds=5)), got {policy!r}"
        )
    return policy


def checked_fingerprint(rule: object) -> FingerprintRule:
    """The rule itself; raises `PolicyInvalid` for anything else."""
    if not isinstance(rule, FingerprintRule):
        raise PolicyInvalid(
            "fingerprint takes a FingerprintRule, such as FingerprintRule(exclude=['/0/sent_at']), "
            f"got {rule!r}"
        )
    return rule


def secrets_of(secret: object) -> Secrets:
    """The secrets; raises `InvalidInput` for what is neither text, bytes nor a list of these.

    And `SecretMissing` for a short one. The secrets themselves are never shown.
    """
    if isinstance(secret, str):
        _require_one_line(secret)
        # A file or a variable often ends with a line break.
        secret = [line for line in secret.splitlines() if line]
    elif secret is None or isinstance(secret, bytes):
        # Of random bytes any one may be a line break; of a text in bytes it is one.
        if secret is not None and secret.isascii():
            text = secret.decode("ascii")
            if all(map(str.isprintable, text.splitlines())):
                _require_one_line(text)
        secret = [secret]
    if not isinstance(secret, list | tuple):
        raise InvalidInput(
            f"secret takes text, bytes or a list of them, got {shown_in_place(secret)}"
        )
    values = [item.encode() if isinstance(item, str) else item for item in secret]
    for value in values:
        if not isinstance(value, bytes | None):
            raise InvalidInput(f"a list of secrets has text and bytes, got {shown_in_place(value)}")
    return Secrets(*values)


def _require_one_line(secret: str) -> None:
    """Raises `InvalidInput` for a text of several lines.

    Taken apart, a PEM file would give three secrets, the first of which everybody knows.
    """
    if sum(map(bool, secret.splitlines())) > 1:
        raise InvalidInput(
            "the secret has several lines: pass a list, with one item for each secret, or with "
            "the whole text as its one item"
        )


def environment_secret() -> list[str | None] | None:
    """The secrets in `RETRYSAFE_SECRET`, each on a line of its own; None without one.

    Raises `InvalidInput` for a PEM file, whose first line everybody knows, and for what looks like
    several secrets in one line: taken as one, it would be another secret than all of them.
    """
    lines = os.environ.get(SECRET_VARIABLE, "").splitlines()
    if any(line.startswith("-----BEGIN ") for line in lines):
        raise InvalidInput(
            f"each line of {SECRET_VARIABLE} is a secret, and a PEM file has public ones: set it "
            "to the output of openssl rand -hex 32, or pass secret=[…] with the whole text"
        )
    if any("," in line or "\\n" in line for line in lines):
        raise InvalidInput(
            f"{SECRET_VARIABLE} has a comma or a backslash with n, which could mean several "
            "secrets: write each on a line of its own, with real line breaks; where that cannot be "
            "done, or one secret has such a character, pass secret=[…]"
        )
    return [None if line == NO_SECRET_WORD else line for line in lines if line] or None

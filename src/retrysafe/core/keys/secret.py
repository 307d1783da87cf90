"""Secrets: what keyed hashes are made with, and which one made what is stored.

Owns the list of an object's secrets and the tag by which a record tells which of them it began
with. Secrets rotate: the first of the list makes new hashes, and what any other has made is
recognised for as long as that one is listed.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from retrysafe.core.keys.canonical import DIGEST_BYTES
from retrysafe.core.keys.key import Key, checked_secret
from retrysafe.core.model import TAG_BYTES, Fingerprint
from retrysafe.errors import InvalidInput, SecretMissing

# What is made without a secret has no tag.
PLAIN_TAG: Final = b""


class Secret:
    """One secret: its value, and the tag of what it makes."""

    __slots__ = ("_new_hashing", "tag", "value")

    def __init__(self, value: bytes) -> None:
        """Raises `SecretMissing` for a short one."""
        self.value = checked_secret(value)
        # Told to everybody who reads the store. Of a random secret it gives nothing away that
        # could be used, and checked_secret refuses what could be found by trying.
        self.tag = hmac.digest(value, b"retrysafe: tag of a secret", "sha256")[:TAG_BYTES]
        key = hmac.digest(value, b"retrysafe: fingerprints", "sha256")
        self._new_hashing = blake2b(key=key, digest_size=DIGEST_BYTES - TAG_BYTES).copy

    def fingerprint(self, plain: Fingerprint) -> Fingerprint:
        """The keyed fingerprint of a request; a negative rule tells it from a plain one.

        Whoever reads the store cannot try requests against it, such as all amounts up to 1,000.
        """
        hashing = self._new_hashing()
        hashing.update(plain.digest)
        return Fingerprint(-plain.rule, self.tag + hashing.digest())

    def __repr__(self) -> str:
        return f"Secret(tag={self.tag.hex()})"


class Secrets:
    """The secrets of one object: the first makes, the others are recognised."""

    __slots__ = ("has_plain", "listed")

    def __init__(self, *values: bytes | None) -> None:
        """None, at the end of the list, stands for what was made without a secret.

        Raises `SecretMissing` for a short one, and `InvalidInput` for one that is listed twice.
        """
        if None in values[:-1]:
            raise InvalidInput("None comes last in a list of secrets: it stands for the past")
        self.listed = tuple(Secret(value) for value in values if value is not None)
        # Whether what was made without a secret is looked for under its own name.
        self.has_plain = not self.listed or values[-1] is None
        if len({secret.tag for secret in self.listed}) != len(self.listed):
            raise InvalidInput("a secret is listed twice: leave it out, or take another one")

    @property
    def value(self) -> bytes | None:
        """The secret that makes new hashes; None without any."""
        return self.listed[0].value if self.listed else None

    @property
    def is_several(self) -> bool:
        """Whether a key that is made with a secret has more than one form."""
        return len(self.listed) + self.has_plain > 1

    def fingerprints(self, plain: tuple[Fingerprint, ...]) -> tuple[Fingerprint, ...]:
        """A request's fingerprints by every secret, the first one's first, and without any.

        The plain ones are for records from before there was a secret.
        """
        listed = self.listed
        if not listed:
            return plain
        if len(listed) == len(plain) == 1:
            return (listed[0].fingerprint(plain[0]), plain[0])
        keyed = (secret.fingerprint(each) for secret in listed for each in plain)
        return (*keyed, *plain)

    def began_with(self, fingerprint: Fingerprint | None) -> Secret | None:
        """The secret that a record was begun with, by its fingerprint; None without any.

        No fingerprint means that this process has just begun it. Child keys must be the same in
        every attempt, also in one after the secret was replaced. Raises `SecretMissing` when that
        secret is not listed here, or cannot be told.
        """
        if not self.listed:
            return None
        if fingerprint is None:
            return self.listed[0]
        if fingerprint.rule > 0:
            if len(self.listed) > 1:
                # From before fingerprints were keyed. Which of them was the secret of that time is
                # not known, and child keys by another one would be a second charge.
                raise SecretMissing(
                    "this operation began before fingerprints told which secret they were made "
                    "with, and several are listed here: list only the secret of that time until "
                    "what began with it has ended, and replace it then"
                )
            return self.listed[0]
        for secret in self.listed:
            if fingerprint.digest.startswith(secret.tag):
                return secret
        raise SecretMissing(
            "an earlier attempt of this operation made its child keys with a secret that is not "
            "listed here: list it until what began with it has ended"
        )

    def parent(
        self, key: Key, keys: Mapping[bytes, Key] | None, fingerprint: Fingerprint | None
    ) -> tuple[bytes | None, Key]:
        """What child keys are made with: the secret that a record began with, and the key by it.

        `keys` are all keys of the request by the tags of their secrets; None where it has one.
        Raises `SecretMissing`.
        """
        secret = self.began_with(fingerprint)
        if secret is None:
            return None, key
        return secret.value, key if keys is None else keys.get(secret.tag, key)

    def key_by(self, keys: Mapping[bytes, Key], fingerprint: Fingerprint | None, key: Key) -> Key:
        """The key that every attempt of an operation sees; `key` where its secret is not known."""
        try:
            return self.parent(key, keys, fingerprint)[1]
        except SecretMissing:
            return key

    def __repr__(self) -> str:
        return f"Secrets({', '.join(map(repr, self.listed))})"


NO_SECRETS: Final = Secrets()

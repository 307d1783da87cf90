"""Fingerprints: when two requests are the same request.

Owns the rule (which fields count), its version, and the framing of what is hashed. Two requests
are compared only under one rule, so a rule that changes must get a new version; the earlier rules
stay known for as long as their records live.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from retrysafe.core.keys import canonical
from retrysafe.core.keys.framing import digest, frame
from retrysafe.core.model import Fingerprint
from retrysafe.errors import PolicyInvalid

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Headers whose part in a fingerprint is decided elsewhere.
_COUNTED_APART: Final = frozenset({"content-type", "idempotency-key"})


@lru_cache(maxsize=512)
def _framed_start(parts: tuple[bytes, ...]) -> bytes:
    """What all fingerprints of one operation start with; a program has few operations."""
    return frame(b"fingerprint 1", frame(*parts))


@dataclass(frozen=True, slots=True)
class FingerprintRule:
    """Which parts of a request count; raises `PolicyInvalid` for broken pointers or versions.

    `include` names the only fields that count, `exclude` the fields that do not, both as JSON
    Pointers. They apply to bodies that are JSON and, over HTTP, to the fields of forms by `/name`;
    any other body counts byte by byte. Change `version` with every change of the rule, and list
    the rules that it replaces in `previous`.

    The others are for requests over HTTP alone. `headers` names headers that count, such as
    `If-Match`; `exclude_query` names fields of the query that do not; `media_type_parameters` has
    the parameters of `Content-Type` count, but for a boundary.
    """

    version: int = 1
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    previous: tuple[FingerprintRule, ...] = ()
    headers: tuple[str, ...] = ()
    exclude_query: tuple[str, ...] = ()
    media_type_parameters: bool = False
    # The headers by their lower-case names, in one order.
    header_names: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    # Whether any option is about the head of an HTTP request.
    reads_head: bool = field(init=False, repr=False, compare=False)
    _included: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)
    _excluded: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # 32,767 is what the smallest integer column of the stores can hold.
        if type(self.version) is not int or not 1 <= self.version <= 32_767:
            raise PolicyInvalid(
                f"a rule's version is a whole number from 1 to 32,767, got {self.version!r}"
            )
        for name in ("include", "exclude"):
            pointers = getattr(self, name)
            if isinstance(pointers, str):
                raise PolicyInvalid(
                    f"{name} takes a list of JSON Pointers, got the text {pointers!r}"
                )
            try:
                tokens = tuple(canonical.pointer_tokens(pointer) for pointer in sorted(pointers))
            except (ValueError, TypeError, AttributeError) as error:
                raise PolicyInvalid(f"{name} takes a list of JSON Pointers: {error}") from None
            object.__setattr__(self, f"_{name}d", tokens)
        self._check_head()
        if not isinstance(self.previous, tuple | list) or not all(
            isinstance(rule, FingerprintRule) for rule in self.previous
        ):
            raise PolicyInvalid(f"previous takes a list of rules, got {self.previous!r}")
        versions = [self.version, *(rule.version for rule in self.previous)]
        if len(set(versions)) != len(versions):
            raise PolicyInvalid(f"every rule needs its own version, got {versions}")

    def _check_head(self) -> None:
        for name in ("headers", "exclude_query"):
            given = getattr(self, name)
            if not isinstance(given, tuple | list) or not all(
                isinstance(item, str) for item in given
            ):
                raise PolicyInvalid(f"{name} takes a list of names, got {given!r}")
        for header in self.headers:
            if _HEADER_NAME.fullmatch(header) is None:
                raise PolicyInvalid(f"no header has the name {header!r}: write If-Match, say")
            if header.lower() in _COUNTED_APART:
                raise PolicyInvalid(
                    f"{header} counts as it must: its parameters with media_type_parameters=True"
                    if header.lower() == "content-type"
                    else f"{header} cannot be compared under itself: it is the key"
                )
        if type(self.media_type_parameters) is not bool:
            raise PolicyInvalid(
                f"media_type_parameters is True or False, got {self.media_type_parameters!r}"
            )
        names = tuple(sorted({header.lower().encode("ascii") for header in self.headers}))
        object.__setattr__(self, "header_names", names)
        reads_head = bool(names or self.exclude_query or self.media_type_parameters)
        object.__setattr__(self, "reads_head", reads_head)

    def fingerprints(self, *parts: bytes, body: bytes) -> tuple[Fingerprint, ...]:
        """The request's fingerprint under this rule, then under each earlier one."""
        own = Fingerprint(self.version, self._digest(parts, body))
        if not self.previous:
            return (own,)
        return (own, *(rule.fingerprints(*parts, body=body)[0] for rule in self.previous))

    def fingerprints_of_value(self, *parts: bytes, tree: Any) -> tuple[Fingerprint, ...]:
        """The same for a request that is a tree of Python values; no text is parsed for it.

        Raises `ValueError` for integers too long to be written out.
        """
        value = canonical.of_tree(tree)
        if not self.previous:
            return (Fingerprint(self.version, self._framed(parts, self.counting_bytes(value))),)
        return tuple(
            Fingerprint(rule.version, rule._framed(parts, rule.counting_bytes(value)))  # noqa: SLF001 — rules of one class.
            for rule in (self, *self.previous)
        )

    @staticmethod
    def _framed(parts: tuple[bytes, ...], counting: bytes) -> bytes:
        return digest(b"%b%d:%b" % (_framed_start(parts), len(counting), counting))

    def _digest(self, parts: tuple[bytes, ...], body: bytes) -> bytes:
        """The bytes that count; the first one says how they were made, so no two ways meet."""
        try:
            counting = self.counting_bytes(canonical.parse(body))
        except (canonical.NotCanonical, RecursionError):
            counting = b"r" + body
        return self._framed(parts, counting)

    def counting_bytes(self, value: Any) -> bytes:
        """The parts of a parsed value that count; raises `NotCanonical` when it is too deep."""
        for tokens in self._excluded:
            value = canonical.without(value, tokens)
        if not self._included:
            return b"j" + canonical.canonical_bytes(value)
        chosen = (canonical.select(value, tokens) for tokens in self._included)
        return b"i" + frame(*map(canonical.canonical_bytes, chosen))

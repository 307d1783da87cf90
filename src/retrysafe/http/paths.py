"""Patterns of paths, matched in one pass: no path makes a match take longer than its length.

Owns what `/charges/{id}` and `/v1/*` mean. A regular expression for them would try every split of a
segment with two parameters, such as `{name}.{ext}`, and clients choose the paths.
"""

from __future__ import annotations

import re
from typing import Final

from retrysafe.errors import PolicyInvalid

_PARAMETER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
# The same with what some frameworks write behind the name, as in {id:int}.
_NAMED: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::[^{}]*)?\}")


def names_in(path: str) -> frozenset[str]:
    """The names of the parameters in a path, as rules and frameworks write it."""
    return frozenset(_NAMED.findall(path))


class PathPattern:
    """One pattern: `{name}` is one or more characters of a segment, `*` at the end is the rest.

    Raises `PolicyInvalid` for stray braces and doubled names.
    """

    __slots__ = ("_count", "_fixed", "_is_open", "_named", "_whole")

    def __init__(self, path: str) -> None:
        self._is_open = path.endswith("*")
        stem = path[:-1] if self._is_open else path
        pieces = _PARAMETER.split(stem)
        names = pieces[1::2]
        if any("{" in text or "}" in text for text in pieces[::2]):
            raise PolicyInvalid(
                f"the path {path!r} is no pattern: write {{name}} for one segment, and * at the "
                "end for everything below"
            )
        if len(set(names)) != len(names):
            raise PolicyInvalid(f"the path {path!r} names a parameter twice")
        segments = [_PARAMETER.split(segment) for segment in stem.split("/")]
        self._count = len(segments)
        # By their index: segments that are a text, that are one name, and all others.
        self._fixed: list[tuple[int, str]] = []
        self._whole: list[tuple[int, str]] = []
        self._named: list[tuple[int, list[str], list[str]]] = []
        for index, parts in enumerate(segments):
            if self._is_open and index == self._count - 1:
                self._named.append((index, parts[::2], parts[1::2]))
            elif len(parts) == 1:
                self._fixed.append((index, parts[0]))
            elif len(parts) == 3 and not parts[0] and not parts[2]:
                self._whole.append((index, parts[1]))
            else:
                self._named.append((index, parts[::2], parts[1::2]))

    def match(self, path: str) -> dict[str, str] | None:
        """What the names stand for in this path; None when it does not fit.

        Of two names in one segment the first takes as much as it can.
        """
        count, is_open = self._count, self._is_open
        segments = path.split("/", count - 1 if is_open else count)
        if len(segments) != count:
            return None
        for index, text in self._fixed:
            if segments[index] != text:
                return None
        found: dict[str, str] = {}
        for index, name in self._whole:
            found[name] = segment = segments[index]
            if not segment:
                return None
        for index, texts, names in self._named:
            segment = segments[index]
            if is_open and index == count - 1:
                if not _begins(texts, names, segment, found):
                    return None
            elif not _fits(texts, names, segment, len(segment) - len(texts[-1]), found):
                return None
        return found


def _begins(texts: list[str], names: list[str], rest: str, found: dict[str, str]) -> bool:
    """Whether the rest of a path begins so; what follows is open."""
    if not names:
        return rest.startswith(texts[0])
    # The names before the last text take what they can of the first segment.
    segment = rest.partition("/")[0]
    end = segment.rfind(texts[-1])
    return _fits(texts, names, segment[: end + len(texts[-1])], end, found)


def _fits(
    texts: list[str], names: list[str], segment: str, end: int, found: dict[str, str]
) -> bool:
    """Whether a whole segment fits, whose last text begins at `end`; adds what its names mean."""
    if end < 0 or not segment.endswith(texts[-1]):
        return False
    # From the right: each text at its last place leaves the most to the names before it.
    for position in range(len(names) - 1, 0, -1):
        start = segment.rfind(texts[position], 0, end - 1) if end else -1
        if start < 0:
            return False
        found[names[position]] = segment[start + len(texts[position]) : end]
        end = start
    if end <= len(texts[0]) or not segment.startswith(texts[0]):
        return False
    found[names[0]] = segment[len(texts[0]) : end]
    return True

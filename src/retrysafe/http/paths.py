"""Patterns of paths, matched in one pass: no path makes a match take longer than its length.

Owns what `/charges/{id}` and `/v1/*` mean. A regular expression for them would try every split of a
segment with two parameters, such as `{name}.{ext}`, and clients choose the paths.
"""

from __future__ import annotations

import re
from typing import Final

from retrysafe.errors import PolicyInvalid

_PARAMETER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class PathPattern:
    """One pattern: `{name}` is one or more characters of a segment, `*` at the end is the rest.

    Raises `PolicyInvalid` for stray braces and doubled names.
    """

    __slots__ = ("_is_open", "_segments")

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
        # Of each segment: its texts, and the names between them.
        self._segments = [
            (parts[::2], parts[1::2]) for parts in map(_PARAMETER.split, stem.split("/"))
        ]

    def match(self, path: str) -> dict[str, str] | None:
        """What the names stand for in this path; None when it does not fit.

        Of two names in one segment the first takes as much as it can.
        """
        expected = self._segments
        segments = path.split("/", len(expected) - 1 if self._is_open else len(expected))
        if len(segments) != len(expected):
            return None
        found: dict[str, str] = {}
        for (texts, names), segment in zip(expected[:-1], segments, strict=False):
            if not names:
                if segment != texts[0]:
                    return None
            elif not _fits(texts, names, segment, len(segment) - len(texts[-1]), found):
                return None
        texts, names = expected[-1]
        last = segments[-1]
        if not names:
            is_fit = last.startswith(texts[0]) if self._is_open else last == texts[0]
            return found if is_fit else None
        end = len(last) - len(texts[-1])
        if self._is_open:
            # What follows the last text is open, so the names before it take what they can.
            last = last.partition("/")[0]
            end = last.rfind(texts[-1])
            last = last[: end + len(texts[-1])]
        return found if _fits(texts, names, last, end, found) else None


def _fits(
    texts: list[str], names: list[str], segment: str, end: int, found: dict[str, str]
) -> bool:
    """Whether a whole segment fits, whose last text begins at `end`; adds what its names mean."""
    if end < 0 or not segment.endswith(texts[-1]):
        return False
    # From the right: each text at its last place leaves the most to the names before it.
    for position in range(len(names) - 1, 0, -1):
        place = segment.rfind(texts[position], 0, end - 1) if end else -1
        if place < 0:
            return False
        found[names[position]] = segment[place + len(texts[position]) : end]
        end = place
    if end <= len(texts[0]) or not segment.startswith(texts[0]):
        return False
    found[names[0]] = segment[len(texts[0]) : end]
    return True

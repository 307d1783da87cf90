"""Patterns of paths, matched in one pass: no path makes a match take longer than its length.

Owns what `/charges/{id}` and `/v1/*` mean. A regular expression for them would try every split of a
segment with two parameters, such as `{name}.{ext}`, and clients choose the paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from retrysafe.errors import PolicyInvalid

_PARAMETER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
# The same with what some frameworks write behind the name, as in {id:int}.
_NAMED: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::[^{}]*)?\}")
# A parameter as others write it, and a star that is not at the end.
_FOREIGN: Final = re.compile(
    r"/:(?P<colon>[A-Za-z_]\w*)|<(?:[^<>]*:)?(?P<angle>[A-Za-z_]\w*)>|[<>]|\*(?=.)", re.DOTALL
)
# What stands in no path as a rule sees it, and what to write instead.
_UNMATCHED: Final = (
    (re.compile(r"[?#]"), "leave out the query and the fragment, which are no part of a path"),
    (re.compile("%[0-9A-Fa-f]{2}"), "write the character itself, because paths come decoded"),
    (re.compile(r"\s\Z|[\x00-\x1f\x7f]"), "leave out blanks at its end and control characters"),
    (re.compile(r"\\"), "write slashes"),
    (re.compile(r"/\.\.?(?:/|\Z)"), "leave out . and .., which clients take out of a path"),
)
# Stands for whatever a parameter takes: nobody writes it in a path.
_ANYTHING: Final = "\ue000"


def names_in(path: str) -> frozenset[str]:
    """The names of the parameters in a path, as rules and frameworks write it."""
    return frozenset(_NAMED.findall(path))


def check_path(path: str, *, is_exact: bool) -> None:
    """Raises `PolicyInvalid` for a rule's path that no request has, and says what to write.

    Its routes would run unprotected.
    """
    found = _FOREIGN.search(path)
    name = None if found is None else found["colon"] or found["angle"]
    if found is not None and name is None:
        raise PolicyInvalid(
            f"the path {path!r} is no pattern: write {{name}} for one segment, and * at the end "
            "for everything below"
        )
    advice = None if name is None else f"write {{{name}}} for that segment"
    if "//" in path and not is_exact:
        advice = "write single slashes, as which double ones count"
    for shape, instead in _UNMATCHED:
        if advice is None and shape.search(path) is not None:
            advice = instead
    if advice is not None:
        raise PolicyInvalid(
            f"the path {path!r} would be taken as it stands, and match nothing: {advice}"
        )


def samples_of(path: str | None, depth: int) -> Iterator[str]:
    """Paths that stand for all that a pattern matches; None is the pattern for all paths.

    Another pattern with at most `depth` segments matches all of these, or there is a path that the
    first one matches and the other does not: its texts cannot match what a parameter of the first
    one takes, so its own parameters must.
    """
    plain = _PARAMETER.sub(_ANYTHING, path or "/*")
    if not plain.endswith("*"):
        yield plain
        return
    for count in range(depth + 1):
        yield plain[:-1] + "/".join([_ANYTHING] * count)


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

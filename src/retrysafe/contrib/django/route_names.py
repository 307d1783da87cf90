"""Django's routes as people read them: on the policy page, and as the names of operations."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from django.contrib.admindocs.utils import (
    remove_non_capturing_groups,
    replace_metacharacters,
    replace_named_groups,
    replace_unnamed_groups,
)

# What a route of `path` has none of, and a route of `re_path` does.
_EXPRESSION: Final = re.compile(r"[\^$()\\]")
_PLAIN_PARAMETER: Final = re.compile(r"<[^<>]*>")


@lru_cache(maxsize=1024)
def path_of(route: str) -> str:
    """The route with a slash in front; a regular expression is told by its groups."""
    if _EXPRESSION.search(_PLAIN_PARAMETER.sub("", route)):
        route = replace_named_groups(remove_non_capturing_groups(route))
        route = replace_metacharacters(replace_unnamed_groups(route))
    return "/" + route.removeprefix("/")

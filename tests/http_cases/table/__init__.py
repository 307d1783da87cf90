"""The table of cases: every promise of the HTTP layer as requests and expected answers."""

from __future__ import annotations

from dataclasses import replace

from tests.http_cases.cases import Case
from tests.http_cases.table import (
    abuse,
    callers,
    hostile,
    keys,
    outcomes,
    pages,
    requests,
    running,
)

GROUPS = {
    "Keys": keys,
    "The same request, or another": requests,
    "Outcomes and replays": outcomes,
    "While the first request runs": running,
    "Callers": callers,
    "Pages and safe methods": pages,
    "Bodies, clients that leave, streams, stores that fail": abuse,
    "Hostile bytes": hostile,
}
CASES: tuple[Case, ...] = tuple(
    replace(case, group=group) for group, module in GROUPS.items() for case in module.CASES
)

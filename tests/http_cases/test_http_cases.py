"""The table of cases, on every server, with every application: the same results everywhere.

What a server plays in every run, and what in a long one alone, is said in `selecting`.
"""

from __future__ import annotations

import pytest

from tests.http_cases.selecting import played_in_every_run
from tests.http_cases.serving import KINDS, ServerKind
from tests.http_cases.table import CASES


def _rows_of(kind: ServerKind):
    often = played_in_every_run(kind, CASES)
    for case in CASES:
        if kind.reason_without(case) is None:
            marks = () if case.name in often else pytest.mark.long
            yield pytest.param(kind.name, case, id=f"{kind.name}-{case.name}", marks=marks)


_ROWS = [row for kind in KINDS for row in _rows_of(kind)]


@pytest.mark.parametrize(("server_name", "case"), _ROWS)
def test_case(server_name, case, results):
    """Every answer of the case is the expected one, and nothing ran more often than it says."""
    error = results(server_name)[case.name]
    if error is not None:
        raise error

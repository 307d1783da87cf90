"""The table of cases, on every server, with every application: the same results everywhere."""

from __future__ import annotations

import pytest

from tests.http_cases.serving import KINDS
from tests.http_cases.table import CASES

_ROWS = [
    pytest.param(kind.name, case, id=f"{kind.name}-{case.name}")
    for kind in KINDS
    for case in CASES
    if kind.reason_without(case) is None
]


@pytest.mark.parametrize(("server_name", "case"), _ROWS)
def test_case(server_name, case, results):
    """Every answer of the case is the expected one, and nothing ran more often than it says."""
    error = results(server_name)[case.name]
    if error is not None:
        raise error

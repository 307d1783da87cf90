"""Requests made up from the demo's own description: whatever they hold, there is an answer."""

from __future__ import annotations

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from tests.demo.server import PATIENCE_SECONDS, headers_of, new_text

EXAMPLES = (20, pytest.param(60, marks=pytest.mark.long))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# A 500 and a crash are what these ask for; the rest of the tests is about them.
ON_PURPOSE = ("error", "crash")
PATIENT_MS = 50


@pytest.fixture
def operations(demo):
    """Every operation that the running demo describes, without the ends that break it."""
    described = demo.client.get("/openapi.json").json()
    for name in ("Charge", "Order"):
        fields = described["components"]["schemas"][name]["properties"]
        fields["outcome"]["enum"] = [
            value for value in fields["outcome"]["enum"] if value not in ON_PURPOSE
        ]
        fields["delay_ms"]["maximum"] = PATIENT_MS
    schema = schemathesis.openapi.from_dict(described)
    return [result.ok() for result in schema.get_all_operations()]


def is_bearable(case):
    """Whether the request neither asks for a failure nor for a long wait."""
    body = case.body
    if not isinstance(body, dict):
        return True
    delay = body.get("delay_ms")
    is_patient = not isinstance(delay, int | float | str) or str(delay) in map(
        str, range(PATIENT_MS + 1)
    )
    is_calm = body.get("outcome") not in ON_PURPOSE and body.get("crash_after") is None
    return is_calm and is_patient


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_brings_the_server_out_of_order(demo, operations, mode, examples):
    """No 500, and every answer is one that the description names; its schema holds."""
    answered = set()
    # The key is part of what is made up only where wrong ones are wanted.
    is_positive = mode is GenerationMode.POSITIVE
    with requests.Session() as session:
        for operation in operations:

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case):
                assume(is_bearable(case))
                headers = headers_of(new_text("key") if is_positive else None)
                response = case.call(
                    base_url=demo.url, session=session, headers=headers, timeout=PATIENCE_SECONDS
                )
                answered.add((case.method, case.operation.path, response.status_code))
                case.validate_response(response, checks=CHECKS)

            check()
    # The made-up requests got further than the door.
    expected = (201, 402) if is_positive else (422,)
    for path in ("/charges", "/orders"):
        assert {("POST", path, status) for status in expected} <= answered
    assert ("POST", "/checkouts", expected[0]) in answered
    assert demo.process.poll() is None

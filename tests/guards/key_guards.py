"""The guards of keys that are made from requests."""

from __future__ import annotations

from retrysafe.contrib import fastapi
from retrysafe.http import field_values
from tests.guards import test_key_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

KEY_GUARDS: tuple[Guard, ...] = (
    Guard(
        "a text that can be another spelling is no part of a natural key",
        "order 7 runs once more for each of 07, +7 and 7.0",
        (InCode(field_values._of_text, "if _has_other_spellings(text):", "if False:"),),
        properties.test_no_spelling_of_a_value_runs_twice,
    ),
    Guard(
        "a natural key is made of what FastAPI converts",
        "order 7 runs once more for each spelling that the endpoint's int takes",
        (
            InCode(
                fastapi._converted,
                "made[name] = NOT_TAKEN if errors else value",
                "made[name] = '-'.join(parameters[name])",
            ),
        ),
        properties.test_no_converted_value_runs_twice,
    ),
)

"""The guards of keys that are made from requests."""

from __future__ import annotations

from retrysafe.contrib import fastapi
from retrysafe.core.keys import canonical
from retrysafe.core.settings import Settings
from retrysafe.http import field_values, key_sources
from retrysafe.http.protection import Protection
from retrysafe.runtime.describe import Once
from retrysafe.runtime.operations import Operations
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
        "a number that a float rounds is no part of a natural key",
        "order 7 runs once more as 7.00000000000000000001, which its framework rounds",
        (InCode(field_values._require_exact, "not _is_float(value)", "False"),),
        properties.test_no_number_runs_twice,
    ),
    Guard(
        "a client's key does not look like one that is made from its request",
        "a client with a key gets the response of one without, and its own order is lost; or takes "
        "the key of an invoice that somebody else is about to pay",
        (InCode(key_sources.require_own_key, "if looks_derived(text):", "if False:"),),
        properties.test_a_clients_key_does_not_meet_a_derived_key,
    ),
    Guard(
        "a text is not taken for the natural key that it copies",
        "whoever may choose a key, such as the sender of a message, blocks the payment of an "
        "invoice, which is refused as another request",
        (InCode(Settings.call_key, "if looks_derived(scoped.text):", "if False:"),),
        properties.test_a_copied_key_blocks_no_function,
    ),
    Guard(
        "a client's key is refused where the body makes the keys",
        "two equal orders with two keys are one, and the second is lost",
        (
            InCode(
                Protection._sent_key,
                "if isinstance(route.maker, BodyKey):",
                "if False:",
            ),
        ),
        properties.test_two_keys_are_not_one_intent,
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
    Guard(
        "an operation that hides its values is refused",
        "a closure over another amount gets the outcome of the first, and nobody is told",
        (InCode(Operations.call, "if not args:", "if False:"),),
        properties.test_no_hidden_amount_gets_the_outcome_of_another,
    ),
    Guard(
        "an operation under `once` has a name",
        "the refund of an order gets the outcome of its charge, and nobody is told",
        (InCode(Once.__post_init__, "if not self.name:", "if False:"),),
        properties.test_no_refund_gets_the_outcome_of_a_charge,
    ),
    Guard(
        "whole Decimals are the numbers that they equal",
        "an invoice is paid twice whose number comes once from a column and once from a request",
        (
            InCode(
                canonical.part_bytes,
                "whole = None if number is None else number.whole(_DIGITS_LIMIT)",
                "whole = None",
            ),
        ),
        properties.test_no_type_of_a_number_runs_twice,
    ),
)

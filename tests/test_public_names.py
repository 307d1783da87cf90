"""What users import stays what it is: names, docstrings, the tree of errors, pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest

import retrysafe
from retrysafe import errors

# Each name has one home; only the errors that most callers catch stand in `retrysafe` as well.
# Another module's names may change.
PUBLIC_NAMES = {
    "retrysafe": [
        "Answer",
        "AsyncIdempotency",
        "AtomicAttempt",
        "Attempt",
        "BodyKey",
        "ClaimLost",
        "Ending",
        "FOREVER",
        "FingerprintRule",
        "GLOBAL",
        "Idempotency",
        "InFlight",
        "InvalidInput",
        "Key",
        "KeyReused",
        "OperationFailed",
        "OperationInFlight",
        "OutcomeNotStored",
        "OutcomeUnavailable",
        "Policy",
        "RetrysafeError",
        "StepRetry",
        "StoreUnavailable",
        "child_key",
        "current_attempt",
        "natural_key",
        "step",
    ],
    "retrysafe.errors": [
        "ArgumentsNotStorable",
        "AttemptsExhausted",
        "AwaitForgotten",
        "CallerMissing",
        "ClaimLost",
        "Closed",
        "CommitHookFailed",
        "CompensationFailed",
        "DeliveryFailed",
        "DigestCollision",
        "FingerprintImpossible",
        "FlowSuspended",
        "InvalidInput",
        "KeyInvalid",
        "KeyReused",
        "OperationFailed",
        "OperationInFlight",
        "OperationUndone",
        "OperatorRefused",
        "OutcomeMissing",
        "OutcomeNotStored",
        "OutcomeUnavailable",
        "PolicyInvalid",
        "ResumedRequestRefused",
        "RetrysafeError",
        "SchemaChanged",
        "SchemaMissing",
        "SchemaTooNew",
        "SecretMissing",
        "StepNotStored",
        "StepReused",
        "StepUnavailable",
        "StepsChanged",
        "StoreError",
        "StoreMissing",
        "StoreNotWritable",
        "StoreRejected",
        "StoreUnavailable",
        "StoreUrlInvalid",
        "TransactionMissing",
    ],
    "retrysafe.stores": ["Condition", "MemoryStore", "PostgresStore", "SqliteStore", "open_store"],
    "retrysafe.dashboard": ["Dashboard"],
    "retrysafe.observe": ["Event", "EventKind", "EventLog", "Progress", "Result"],
    "retrysafe.observe.opentelemetry": ["OpenTelemetryMetrics", "OpenTelemetryTraces"],
    "retrysafe.observe.prometheus": ["PrometheusMetrics"],
    "retrysafe.workers": ["AsyncWorker", "Worker", "WorkerPolicy"],
    "retrysafe.transactions": ["is_conflict", "retry_serialization"],
}
PAIRS = [(module, name) for module, names in PUBLIC_NAMES.items() for name in names]


def public(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def error_classes() -> dict[str, type]:
    """Every class that the module of errors defines."""
    return {
        name: item
        for name, item in vars(errors).items()
        if inspect.isclass(item) and item.__module__ == errors.__name__
    }


def drawn_tree() -> dict[str, str | None]:
    """Each class in the docstring's drawing, with the class that it hangs under."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        del path[depth:]
        parents[match[2]] = path[-1] if path else None
        path.append(match[2])
    return parents


@pytest.mark.parametrize("module", sorted(set(PUBLIC_NAMES) - {"retrysafe.errors"}))
def test_public_names_are_frozen(module):
    """A name is added or removed on purpose, here and in the changelog, never by accident."""
    exported = import_module(module).__all__
    assert sorted(exported) == sorted(PUBLIC_NAMES[module])
    assert len(set(exported)) == len(exported)


def test_users_learn_few_names():
    """What most programs need stands in `retrysafe`; everything else has its own module."""
    assert len(PUBLIC_NAMES["retrysafe"]) == 27


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_every_public_name_explains_itself(module, name):
    """Each public name exists and has a docstring of its own, not an inherited one."""
    item = public(module, name)
    documented = item if inspect.isclass(item) or inspect.isfunction(item) else type(item)
    # A class without a docstring shows None in its own namespace; inspect would look further up.
    own = vars(documented)["__doc__"] if inspect.isclass(documented) else documented.__doc__
    assert own
    assert own.strip()


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_public_methods_explain_themselves(module, name):
    """Whatever a user can call on a public class has a docstring."""
    item = public(module, name)
    if not inspect.isclass(item):
        return
    undocumented = [
        member
        for member, value in inspect.getmembers(item)
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        and (getattr(value, "__module__", None) or "").startswith("retrysafe")
        and not inspect.getdoc(value)
    ]
    assert undocumented == []


def test_every_error_has_its_home_and_hangs_under_the_root():
    """A user can catch every error by its public name, and all of them by the root."""
    assert sorted(error_classes()) == sorted(PUBLIC_NAMES["retrysafe.errors"])
    for name, kind in error_classes().items():
        assert getattr(retrysafe, name, kind) is kind
        assert issubclass(kind, retrysafe.RetrysafeError)


def test_every_error_has_a_docstring_of_its_own():
    for kind in error_classes().values():
        assert "__doc__" in vars(kind)
        assert vars(kind)["__doc__"]


def test_drawn_tree_is_the_real_tree():
    """The docstring lists exactly the classes that exist, each under its true parent."""
    real = {
        name: None if kind.__base__ is Exception else kind.__base__.__name__
        for name, kind in error_classes().items()
    }
    assert drawn_tree() == real


def test_invalid_input_is_a_value_error():
    """Frameworks that turn ValueError into a client error do so for every invalid input."""
    for kind in error_classes().values():
        assert issubclass(kind, ValueError) == issubclass(kind, retrysafe.InvalidInput)


def test_exactly_these_errors_promise_that_a_retry_may_help():
    retryable = {name for name, kind in error_classes().items() if kind.retryable}
    assert retryable == {
        "CompensationFailed",
        "DeliveryFailed",
        "OperationInFlight",
        "ResumedRequestRefused",
        "StoreNotWritable",
        "StoreUnavailable",
    }


def made(kind: type) -> Exception:
    """One error of this kind, with all that it can carry."""
    extra = {
        errors.KeyReused: {"first_operation": "ship"},
        errors.OperationInFlight: {"retry_after": timedelta(seconds=3)},
        errors.OperationFailed: {"type_name": "shop:Declined"},
        errors.AttemptsExhausted: {"type_name": "AttemptsExhausted"},
        errors.OutcomeNotStored: {"value": {"charge": 7}},
    }.get(kind, {})
    return kind("what happened", key="k-1", **extra)


@pytest.mark.parametrize("name", sorted(error_classes()))
@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_errors_survive_pickling_and_copying(name, through):
    """An error raised in a worker process reaches the parent whole, whatever it carries."""
    error = made(error_classes()[name])
    error.add_note("seen on host 3")
    twin = through(error)
    assert type(twin) is type(error)
    assert str(twin) == "what happened"
    assert vars(twin) == vars(error)


def _members(face):
    """The public methods and properties of a face, with the names of their parameters."""
    return {
        name: list(inspect.signature(member).parameters) if callable(member) else "property"
        for name, member in inspect.getmembers(face)
        if not name.startswith("_")
    }


def test_both_objects_have_the_same_methods():
    """What is learned on one face is known on the other: names, parameters and their order."""
    assert _members(retrysafe.Idempotency) == _members(retrysafe.AsyncIdempotency)

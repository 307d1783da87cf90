"""What was given in the place of a function is refused in words, and left without a warning."""

from __future__ import annotations

import pytest

from retrysafe.core.attempt import Attempt
from retrysafe.core.callables import require_function
from retrysafe.errors import InvalidInput
from tests.core.driving import World
from tests.core.stepped import Effects, run, stored_steps


async def charge() -> None:
    """Never run."""


def test_a_function_passes():
    """Anything that can be called, a class included."""
    require_function(charge, "unused")
    require_function(dict, "unused")


def test_a_value_is_named_by_its_type():
    """Its contents stay out of messages."""
    with pytest.raises(InvalidInput, match=r"^pass the function; got a value of type 'dict'$"):
        require_function({"card": "4111"}, "pass the function")


def test_a_coroutine_is_closed():
    """So that nobody warns of it: it will never be awaited."""
    made = charge()
    with pytest.raises(InvalidInput, match="got a value of type 'coroutine'"):
        require_function(made, "pass the function")
    with pytest.raises(RuntimeError, match="cannot reuse"):
        made.send(None)


@pytest.mark.parametrize("options", [{}, {"compensate": 5}], ids=["call", "compensate"])
def test_a_step_refuses_a_value_before_anything_of_it_is_noted(options):
    """The operation may go on, and ask for the step as it should be."""
    world, effects = World(), Effects()

    async def operation(attempt: Attempt) -> object:
        with pytest.raises(InvalidInput, match="not its result; got a value of type 'int'"):
            attempt.step("charge", effects.do if options else 5, "charge", **options)
        return await attempt.step("charge", effects.do, "charge", compensate=effects.undo)

    assert run(world.first, operation).value == "charge done"
    assert effects.ran == ["charge"]
    assert stored_steps(world) == [("charge", 1)]

"""Generator functions are refused: calling one runs nothing, so nothing would be done."""

from __future__ import annotations

import asyncio

import pytest

from retrysafe import FOREVER, AsyncIdempotency, Idempotency, InvalidInput


def _parts():
    yield 1


async def _async_parts():
    yield 1


def test_a_generator_function_is_refused_and_its_key_stays_unused():
    """A key is never settled as done by an operation whose body has not run."""
    with Idempotency("memory://", caller="c") as idem:
        with pytest.raises(InvalidInput, match="calling it runs nothing"):
            idem.run("k", _parts)
        with pytest.raises(InvalidInput, match="calling it runs nothing"):
            idem.once(window=FOREVER, key="amount")(_parts)
        assert idem.read("k") is None


def test_asyncio_refuses_both_kinds_of_generator():
    """An async generator function runs nothing either when it is called."""

    async def scenario():
        async with AsyncIdempotency("memory://", caller="c") as idem:
            for operation in (_parts, _async_parts):
                with pytest.raises(InvalidInput, match="calling it runs nothing"):
                    await idem.run("k", operation)
            return await idem.read("k")

    assert asyncio.run(scenario()) is None

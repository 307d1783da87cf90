"""The marks of atomic blocks that are open in an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref

import pytest

from retrysafe import MemoryStore, StoreUnavailable
from retrysafe.runtime.reentry import OpenBlock, require_outside


class Silent:
    """A transaction of a store that knows nothing of `is_open`."""


class Telling:
    def is_open(self):
        return True


def test_a_transaction_that_cannot_tell_its_end_has_the_lock_until_the_block_is_left():
    """A store of a third party is guarded as far as it can be."""

    async def scenario():
        store = MemoryStore()
        block = OpenBlock(store, Silent())
        with pytest.raises(StoreUnavailable):
            require_outside(store)
        require_outside(MemoryStore())
        block.leave()
        require_outside(store)

    asyncio.run(scenario())


def test_a_block_that_was_left_does_not_keep_its_transaction():
    """A task that was started inside has a copy of the marks for as long as it lives."""

    async def scenario():
        transaction = Telling()
        block = OpenBlock(MemoryStore(), transaction)
        inside = contextvars.copy_context()
        seen = weakref.ref(transaction)
        block.leave()
        del transaction, block
        gc.collect()
        assert seen() is None
        assert len(inside) > 0

    asyncio.run(scenario())

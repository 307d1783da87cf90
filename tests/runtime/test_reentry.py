"""The marks of atomic blocks that are open."""

from __future__ import annotations

import contextvars
import gc
import weakref

import pytest

from retrysafe import StoreUnavailable
from retrysafe.reentry import OpenBlock, require_outside


class Transaction:
    def is_open(self):
        return True


def test_a_transaction_that_cannot_tell_its_end_has_the_lock_until_the_block_is_left():
    """A store of a third party is guarded as far as it can be."""
    lock, owner = object(), object()
    block = OpenBlock(lock, owner, None)
    with pytest.raises(StoreUnavailable):
        require_outside(lock, owner)
    require_outside(object(), owner)
    require_outside(lock, object())
    block.leave()
    require_outside(lock, owner)


def test_a_block_that_was_left_does_not_keep_its_transaction():
    """A task that was started inside has a copy of the marks for as long as it lives."""
    transaction = Transaction()
    block = OpenBlock(object(), object(), transaction.is_open)
    inside = contextvars.copy_context()
    seen = weakref.ref(transaction)
    block.leave()
    del transaction, block
    gc.collect()
    assert seen() is None
    assert len(inside) > 0

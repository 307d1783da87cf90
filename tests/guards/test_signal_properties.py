"""What must hold when a signal's handler raises an `Exception` in our frames."""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from retrysafe import Idempotency, OperationInFlight, current_attempt
from retrysafe.core.one_call import OneCall
from retrysafe.runtime.thread_ports import ThreadExecutor
from retrysafe.stores import MemoryStore
from tests.interrupting import Alarmed, at_every_place_at_once, whole_tree


def ask(idem: Idempotency, key: str, operation: Callable[[], Any]) -> Any:
    return idem.run(key, operation, name="pay", request=None)


def strike(operate: Callable[[Callable[[], object]], object]) -> None:
    """A signal that raises at every place in turn, and then a retry: no effect comes twice.

    And two at once, of which the second one raises in what is done about the first.
    """
    number, ran = 0, [0]

    def effect() -> int:
        ran[0] += 1
        return 7

    def act() -> None:
        nonlocal number
        number += 1
        ran[0] = 0
        ask(idem, str(number), partial(operate, effect))

    with Idempotency(MemoryStore(), caller="shop", cache=False) as idem:
        ask(idem, "warm-up", partial(operate, effect))
        for count in (1, 2):
            for place in at_every_place_at_once(count, act, *whole_tree(), kind=Alarmed):
                with suppress(OperationInFlight):
                    ask(idem, str(number), partial(operate, effect))
                assert ran[0] < 2, place


def test_an_operation_that_returned_does_not_run_again():
    strike(lambda effect: effect())


def test_no_signal_is_looked_for_right_after_the_operation():
    """A real one, that comes while the operation is in its last function, written in C."""

    def bark(*_: object) -> None:
        raise Alarmed

    ran: list[int] = []
    before = signal.signal(signal.SIGUSR1, bark)
    try:
        with Idempotency(MemoryStore(), caller="shop", cache=False) as idem:
            last = partial(list, map(_thread.interrupt_main, [signal.SIGUSR1]))
            with pytest.raises(Alarmed):
                ask(idem, "order", last)
            assert ask(idem, "order", lambda: ran.append(1)) == [None]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ran == []


def test_a_step_that_returned_does_not_run_again():
    strike(lambda effect: current_attempt().step("charge", effect))


def test_a_step_in_doubt_frees_no_key():
    """It was called, and nobody knows what came of it."""
    ran: list[int] = []

    async def perform_step(call: Callable[..., Any], made: OneCall) -> Any:
        made.make()
        made.go_on()
        raise Alarmed

    with (
        pytest.MonkeyPatch.context() as patch,
        Idempotency(MemoryStore(), caller="shop", cache=False) as idem,
    ):
        patch.setattr(ThreadExecutor, "perform_step", staticmethod(perform_step))
        operation = partial(_charge, ran)
        with pytest.raises(Exception, match="nobody knows whether it ran"):
            ask(idem, "order", operation)
        with pytest.raises(OperationInFlight):
            ask(idem, "order", operation)
    assert ran == [1]


def _charge(ran: list[int]) -> object:
    return current_attempt().step("charge", ran.append, 1)

"""What must hold when a signal's handler raises an `Exception` in our frames."""

from __future__ import annotations

import _thread
import itertools
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from retrysafe import Ending, Idempotency, OperationInFlight, Policy, current_attempt
from retrysafe.core.one_call import OneCall
from retrysafe.core.steps import pending
from retrysafe.runtime import drive
from retrysafe.runtime.thread_ports import ThreadExecutor
from retrysafe.stores import MemoryStore
from tests.interrupting import Alarmed, Lost, Refused, Stopped, at_every_place_at_once, whole_tree


def ask(idem: Idempotency, key: str, operation: Callable[[], Any]) -> Any:
    return idem.run(key, operation, name="pay", request=None)


def strike(
    operate: Callable[[Callable[[], object]], object],
    kind: type[Alarmed] = Alarmed,
    counts: tuple[int, ...] = (1, 2),
    policy: Policy | None = None,
    *,
    is_stored: bool = False,
) -> None:
    """A signal that raises at every place in turn, and then a retry: no effect comes twice.

    And two at once, of which the second one raises in what is done about the first. With
    `is_stored`, what has run is stored by then.
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

    with Idempotency(MemoryStore(), caller="shop", policy=policy, cache=False) as idem:
        ask(idem, "warm-up", partial(operate, effect))
        for count in counts:
            for place in at_every_place_at_once(count, act, *whole_tree(), kind=kind):
                has_run = bool(ran[0])
                try:
                    ask(idem, str(number), partial(operate, effect))
                except OperationInFlight:
                    assert not (is_stored and has_run), place
                assert ran[0] < 2, place


def test_an_operation_that_returned_does_not_run_again():
    strike(lambda effect: effect())


def test_an_error_of_retrysafe_that_leaves_a_handler_is_no_ending():
    """The ending that it came into is stored, as after every other exception of a handler."""
    strike(lambda effect: effect(), Lost, (1,), is_stored=True)


def test_a_refusal_that_leaves_a_handler_is_not_the_stores():
    """The handler called retrysafe while its thread was at work in the store."""
    strike(lambda effect: effect(), Refused, (1,), is_stored=True)


def test_nor_while_steps_are_looked_after():
    """Between the operation's return and its ending, its steps are brought to an end."""
    strike(lambda effect: current_attempt().step("charge", effect), Refused, (1,), is_stored=True)


def test_what_a_handler_raises_before_the_first_line_fails_nothing():
    """Nothing of the operation has run: no failure of it is stored, and no retry is used up."""
    strike(lambda effect: effect(), policy=Policy(unlisted=Ending.FAILED))


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


def test_a_handlers_stop_iteration_is_no_result_of_a_step():
    """Python takes one that leaves a method for what a coroutine has returned."""
    results: list[object] = []

    def operation() -> None:
        results.append(current_attempt().step("charge", lambda: 7))

    def act() -> None:
        with suppress(RuntimeError):  # What Python makes of it in coroutines.
            ask(idem, str(next(keys)), operation)

    keys = itertools.count()
    with Idempotency(MemoryStore(), caller="shop", cache=False) as idem:
        act()
        places = list(at_every_place_at_once(1, act, pending, drive, kind=Stopped))
    assert len(places) > 3
    assert set(results) == {7}


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

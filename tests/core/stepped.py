"""Operations made of steps, told in a few words, and what really ran of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer
from retrysafe.core.model import Payload, Step
from tests.core.building import KEY, call
from tests.core.driving import Process, World, drive


class Effects:
    """The outside world: every call that a step made, in order."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def do(self, what: Any) -> Any:
        self.ran.append(what)
        return f"{what} done"

    def undo(self, what: Any) -> None:
        self.ran.append(f"undo of {what}")


class Stop(BaseException):
    """The end of a process, as far as the engine can tell."""


def crash() -> None:
    """Ends the process in the middle of the operation."""
    raise Stop


def run(process: Process, operation: Callable[[Attempt], Any], **options: Any) -> Answer[Any]:
    """One attempt, run to its end."""
    return process.answer(call(**options), process.operating(operation))


def crashed(process: Process, operation: Callable[[Attempt], Any], **options: Any) -> None:
    """One attempt that ends with the process; its lease runs out."""
    try:
        run(process, operation, **options)
    except Stop:
        while process.world.background:
            process.world.background.pop().close()  # They end with the process.
        process.world.clock.advance(60)
        return
    raise AssertionError("the operation ended by itself")


def in_order(effects: Effects, *names: str, then: Callable[[], Any] | None = None) -> Any:
    """An operation of steps one after the other, and what comes after them."""

    async def operation(attempt: Attempt) -> Any:
        values = [await attempt.step(name, effects.do, name) for name in names]
        if then is not None:
            then()
        return values

    return operation


def stored_steps(world: World) -> list[tuple[str, int]]:
    """What is recorded of the key, by name and position."""
    return [(step.name, step.position) for step in drive(world.store.read(KEY)).steps]


def plant(world: World, *steps: tuple[str, int, Payload]) -> None:
    """A first attempt that recorded these steps and crashed."""

    async def operation(attempt: Attempt) -> Any:
        for name, position, payload in steps:
            write = attempt._opened_steps().writer.write_of(Step(name, position, payload))
            await world.store.record_step(write)
        crash()

    crashed(world.first, operation)

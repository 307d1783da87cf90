"""The stage directions of a request: it takes its time, and it may take the process down."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from retrysafe import Attempt
from retrysafe.demo.wishes import CheckoutWish, Ending, Staging, Step, Wish

CRASH_CODE: Final = 70


async def delayed(wish: Wish) -> None:
    """Takes as long as was asked for."""
    await asyncio.sleep(wish.delay_ms / 1000)


async def staged(wish: Staging) -> None:
    """Takes as long as was asked for; does not return from a crash."""
    await delayed(wish)
    if wish.outcome is Ending.CRASH:
        _crash()


def crash_point(step: Step, wish: CheckoutWish, attempt: Attempt) -> None:
    """The end of a step; does not return when the process is to die here.

    Only a first attempt dies: the retry that takes over may carry the same stage directions.
    """
    if wish.crash_after is step and attempt.is_first:
        _crash()


def _crash() -> None:
    # No cleanup, no goodbye: as after a power cut, only what is committed is there.
    os.write(2, b"Crashed as asked. Start the demo again, and send the same request again.\n")
    os._exit(CRASH_CODE)

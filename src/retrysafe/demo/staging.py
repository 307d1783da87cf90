"""The stage directions of a request: it takes its time, and it may take the process down."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from retrysafe.demo.wishes import Ending, Staging

CRASH_CODE: Final = 70


async def staged(wish: Staging) -> None:
    """Takes as long as was asked for; does not return from a crash."""
    await asyncio.sleep(wish.delay_ms / 1000)
    if wish.outcome is Ending.CRASH:
        # No cleanup, no goodbye: as after a power cut, only what is committed is there.
        os._exit(CRASH_CODE)

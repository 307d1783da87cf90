"""A handler whose database is not there."""

from __future__ import annotations

from contextlib import asynccontextmanager

from retrysafe import InvalidInput
from retrysafe.consumers import Handler


@asynccontextmanager
async def opened(url):
    raise InvalidInput("the database is not there")
    yield


async def work(message):
    return None


charge = Handler(work, lifespan=opened)

"""A worker that looks once for what crashed, in threads or on a loop."""

from __future__ import annotations

import asyncio
import inspect

from retrysafe import AsyncIdempotency, Idempotency


def recovered_once(store, options, checkout, policy):
    """What one round of a worker has recovered; on a loop, when the operation is for one."""

    async def work():
        async with AsyncIdempotency(store, **options) as idem:
            idem.resumable("checkout")(checkout)
            return (await idem.worker(policy).run_once())["recovery"]

    if inspect.iscoroutinefunction(checkout):
        return asyncio.run(work())
    with Idempotency(store, **options) as idem:
        idem.resumable("checkout")(checkout)
        return idem.worker(policy).run_once()["recovery"]

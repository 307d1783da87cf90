"""Large bodies and queries are compared beside the event loop, in one worker thread of the process.

Owns from which size on that is worth a hop, and the thread. While a loop reads a body it renews no
lease and answers nobody, and a client could hold it for as long as it likes with bodies that are
dear to read.
"""

from __future__ import annotations

from typing import Final

from retrysafe.runtime.thread_pool import ThreadPool

# The dearest JSON, numbers with a fraction, takes 0.35 s a megabyte: this much of it takes 11 ms.
# A hop takes about 0.1 ms, and such a body a millisecond at the least.
LARGE_BODY_BYTES: Final = 32 * 1024

# One thread: reading holds Python's own lock, and a second one would only slow the loop.
LARGE_BODIES: Final = ThreadPool(1, "retrysafe-large-bodies")

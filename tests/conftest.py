"""What every test has: fixtures that start servers when asked for, and how properties are checked.

The same examples in every run, and no stopwatch: a run must not fail because of the machine's load
or by luck, and the coverage that it is measured by must not change from run to run. To look for new
counterexamples, run with `--hypothesis-profile=search`.
"""

import os
import shutil
import signal
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers.fixtures"]

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "search", deadline=None, max_examples=2_000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

# A shell that starts this run in the background makes it ignore Ctrl-C, and so would every command
# that the tests interrupt on purpose.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files in memory, where there is room: the tests kill processes, never the machine, so that what a
# disk would add to every commit is waiting. To test on a disk, set TMPDIR to a folder there.
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 4 * 2**30
if (
    "TMPDIR" not in os.environ
    and os.access(_MEMORY, os.W_OK | os.X_OK)
    and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
):
    # The processes that the tests start look at the variable; this one has looked already.
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

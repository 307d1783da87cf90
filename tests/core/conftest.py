"""How properties are checked here: the same examples in every run, and no stopwatch.

A run must not fail because of the machine's load or by luck, and the coverage that it is measured
by must not change from run to run. To look for new counterexamples, run with
`--hypothesis-profile=search`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "search", deadline=None, max_examples=2_000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

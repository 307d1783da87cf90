"""What a seed means: who calls what, on which clocks, and what goes wrong how often.

Everything here is drawn before the first step; keys, requests and policies are made once, because
a simulation of many thousand scenarios must not spend its time on building them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from random import Random

from retrysafe.core.keys.canonical import digest
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Fingerprint
from retrysafe.core.policy import InFlight, Policy
from tests.simulation.answers import Busy, Declined

LEASE_SECONDS = 1.0
LEASE_MS = 1000
KEYS = tuple(Key(f"k{number}", caller="tenant") for number in range(3))
ATTEMPT_LIMITS = (1, 2, 3)
# Beside each of them: how many attempts may free the key; None for any number.
RELEASE_LIMITS: dict[int, int | None] = {1: 2, 2: None, 3: 1}
# Keys with these limits are made from requests: after a decline they take a corrected one.
DERIVED_LIMITS = (1, 2)


def _request(number: int) -> tuple[Fingerprint, Fingerprint]:
    return tuple(Fingerprint(rule, digest(b"%d %d" % (rule, number))) for rule in (1, 2))


# Each request under two rules, current rule first: a deploy that changes the rule is under way.
REQUESTS = tuple(
    (fingerprints, fingerprints[::-1]) for fingerprints in (_request(number) for number in range(2))
)
REQUEST_OF = {
    fingerprint.digest: number
    for number, (fingerprints, _) in enumerate(REQUESTS)
    for fingerprint in fingerprints
}


def _policy(
    attempt_limit: int, in_flight: InFlight, wait_seconds: float, active_seconds: float
) -> Policy:
    return Policy(
        lease=timedelta(seconds=LEASE_SECONDS),
        active_window=timedelta(seconds=active_seconds),
        audit_window=timedelta(days=30),
        attempt_limit=attempt_limit,
        release_limit=RELEASE_LIMITS[attempt_limit],
        in_flight=in_flight,
        wait_limit=timedelta(seconds=wait_seconds),
        # Long enough for a few tries, short enough that giving up is seen as well.
        settle_patience=timedelta(seconds=0.6),
        terminal=(Declined,),
        retryable=(Busy,),
        nothing_happened=(Declined,),
    )


# A day, as people use it, and one so short that keys start new lives within a scenario.
ACTIVE_SECONDS = (86_400.0, 1.5)
POLICIES = {
    (limit, is_short): (
        _policy(limit, InFlight.FAIL, 0.0, ACTIVE_SECONDS[is_short]),
        _policy(limit, InFlight.WAIT, 0.4, ACTIVE_SECONDS[is_short]),
        _policy(limit, InFlight.WAIT, 6.0, ACTIVE_SECONDS[is_short]),
    )
    for limit in ATTEMPT_LIMITS
    for is_short in (False, True)
}
# Waits longer than any lease can still hold: the last caller must get an answer.
PATIENT = {
    limit: _policy(limit, InFlight.WAIT, 60.0, ACTIVE_SECONDS[0]) for limit in ATTEMPT_LIMITS
}


@dataclass(slots=True)
class CallerPlan:
    """One caller: where it runs, what it asks for, and how stubborn it is."""

    process: int
    key: int
    request: int
    fingerprints: tuple[Fingerprint, ...]
    policy: Policy
    delay_seconds: float
    tries: int
    pause_seconds: float


@dataclass(slots=True)
class Scenario:
    """Everything that is decided before the first step."""

    keys: int
    limits: list[int]
    # Per process: rate and offset of its clock, lateness of its heartbeat (None: dead), cache.
    processes: list[tuple[float, float, float | None, bool]]
    callers: list[CallerPlan]
    tick_ms: float
    laggard: int | None
    crash_rate: float
    cancel_rate: float
    fault_rate: float
    jump_rate: float
    has_operator: bool
    has_sweeper: bool
    long_run_rate: float
    # Per key: how many steps its operation has. All attempts of a key run the same code.
    steps: list[int]
    has_worker: bool = False


def draw_scenario(random: Random) -> Scenario:
    """A small scenario: few keys and callers make collisions, and collisions are the point."""
    chance, choice = random.random, random.choice
    keys = choice((1, 1, 1, 2, 3))
    limits = [choice(ATTEMPT_LIMITS) for _ in range(keys)]
    is_short = chance() < 0.1
    process_count = choice((2, 2, 3, 4))
    processes = [
        (
            choice((1.0, 1.0, 0.9, 1.1, 2.0)),
            chance() * 1000,
            choice((0.0, 0.0, 0.3, 1.5, None)),
            chance() < 0.5,
        )
        for _ in range(process_count)
    ]
    callers = []
    rival_rate = choice((0.0, 0.3))
    for _ in range(choice((2, 3, 4, 4, 5, 6))):
        key = int(chance() * keys)
        request = int(chance() < rival_rate)
        callers.append(
            CallerPlan(
                process=int(chance() * process_count),
                key=key,
                request=request,
                fingerprints=REQUESTS[request][chance() < 0.2],
                policy=choice(POLICIES[limits[key], is_short]),
                delay_seconds=choice((0.0, 0.0, 0.0, 0.2, 2.0)),
                tries=choice((1, 2, 4)),
                pause_seconds=choice((0.0, 0.1, 1.2)),
            )
        )
    return Scenario(
        keys=keys,
        limits=limits,
        processes=processes,
        callers=callers,
        tick_ms=choice((0.1, 3.0, 30.0, 150.0)),
        laggard=int(chance() * process_count) if chance() < 0.3 else None,
        crash_rate=choice((0.0, 0.0, 0.01, 0.04)),
        cancel_rate=choice((0.0, 0.0, 0.03, 0.1)),
        fault_rate=choice((0.0, 0.0, 0.1, 0.3)),
        jump_rate=choice((0.0, 0.0, 0.03)),
        has_operator=chance() < 0.08,
        has_sweeper=chance() < 0.1,
        long_run_rate=choice((0.0, 0.3, 0.8)),
        steps=[choice((0, 0, 1, 2, 3)) for _ in range(keys)],
    )

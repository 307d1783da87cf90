"""SIGKILL at every boundary of an operation of steps: every effect happens exactly once.

And where the operation fails for good, everything is undone exactly once.
"""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta
from functools import partial

import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    InFlight,
    Policy,
    child_key,
    current_attempt,
)
from retrysafe.core.keys.key import Key
from retrysafe.core.model import State
from tests.processes import downstream
from tests.processes.boundaries import Boundaries, MortalPostgresStore, MortalStore
from tests.processes.downstream import SERVICES
from tests.processes.ledger import noted

SECRET = b"the secret of this test"
# A live owner is renewed; a dead one has lost its lease by the time that all owners have died.
POLICY = Policy(
    lease=timedelta(milliseconds=300), in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=30)
)
# An owner has about fifty boundaries; a count far beyond that is an endless loop.
BOUNDARIES_LIMIT = 150


def checkout(ports: dict[str, int], cross) -> list[str]:
    """The operation: three services one after the other, each with a child key of its own."""
    attempt = current_attempt()
    return [attempt.step(name, call_service, attempt, name, ports, cross) for name in SERVICES]


async def checkout_async(ports: dict[str, int], cross) -> list[str]:
    attempt = current_attempt()
    return [
        await attempt.step(name, call_service, attempt, name, ports, cross) for name in SERVICES
    ]


def call_service(attempt, name: str, ports: dict[str, int], cross) -> str:
    cross(f"call-{name}:before")
    answer = downstream.post(ports[name], attempt.child_key(name))
    cross(f"call-{name}:after")
    return answer


class Declined(Exception):
    """The failure for good."""


def failed_checkout(ports: dict[str, int], cross) -> None:
    """Two services, and then a failure after which both are undone."""
    attempt = current_attempt()
    for name in SERVICES[:2]:
        undo = partial(undo_service, attempt, name, ports, cross)
        attempt.step(name, call_service, attempt, name, ports, cross, compensate=undo)
    raise Declined("no credit")


async def failed_checkout_async(ports: dict[str, int], cross) -> None:
    attempt = current_attempt()
    for name in SERVICES[:2]:
        undo = partial(undo_service, attempt, name, ports, cross)
        await attempt.step(name, call_service, attempt, name, ports, cross, compensate=undo)
    raise Declined("no credit")


def undo_service(attempt, name: str, ports: dict[str, int], cross, result: str) -> None:
    assert result.startswith(name)
    cross(f"undo-{name}:before")
    downstream.post(ports[name], attempt.child_key("undo", name))
    cross(f"undo-{name}:after")


def _own_failing(*args) -> None:
    """The owner of the operation that fails for good."""
    try:
        _own(*args, failed_checkout, failed_checkout_async)
    except Declined:
        return


def _own(
    pipe, face, url, caller, ports, log, fatal, operation=checkout, on_loop=checkout_async
) -> None:
    """The owner: one run of the key, with death at the boundary of that number."""
    boundaries = Boundaries(log, fatal)
    if url.startswith("sqlite"):
        store = MortalStore(url.removeprefix("sqlite:///"), boundaries)
    else:
        store = MortalPostgresStore(url, boundaries, is_async=face == "async")
    policy = POLICY.with_changes(terminal=Declined)
    options = {"caller": caller, "policy": policy, "secret": SECRET}
    if face == "async":
        asyncio.run(_own_async(store, options, on_loop, ports, boundaries))
        return
    with Idempotency(store, **options) as idem:
        idem.run("order", operation, ports, boundaries.cross, name="checkout", request=None)


async def _own_async(store, options, operation, ports, boundaries) -> None:
    async with AsyncIdempotency(store, **options) as idem:
        await idem.run("order", operation, ports, boundaries.cross, name="checkout", request=None)


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_owner_killed_at_each_boundary(start, tmp_path, url, ports, face):
    """Around each call, each statement, each step write and the settle; then a retry finishes."""
    crossed = _deaths(start, tmp_path, _own, face, url, ports)
    for name in SERVICES:
        for point in (f"call-{name}:before", f"call-{name}:after"):
            assert point in crossed
        for side in ("before", "after"):
            assert f"step-{name}:{side}" in crossed
    for number, boundary in enumerate(crossed, 1):
        _retry(url, f"caller-{number}", ports, boundary)
    # Every effect of every order happened exactly once, the survivor's included.
    for name, port in ports.items():
        executions = downstream.seen(port)["executions"]
        assert sorted(executions) == sorted(_key(number, name) for number in _orders(crossed))


def _deaths(start, tmp_path, owner, face, url, ports) -> list[str]:
    """Owners that die at the first boundary, the second, … until one survives; where they died."""
    log = str(tmp_path / "boundaries")
    for fatal in range(1, BOUNDARIES_LIMIT):
        code = start(owner, face, url, f"caller-{fatal}", ports, log, fatal).exit_code()
        if code == 0:
            break
        assert code == -signal.SIGKILL
    else:
        pytest.fail("the owner meets boundaries without end")
    crossed = [line[0] for line in noted(log)]
    assert len(crossed) == fatal - 1
    return crossed


def _orders(crossed: list[str]) -> range:
    """One order per death, and that of the survivor."""
    return range(1, len(crossed) + 2)


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_owner_killed_at_each_boundary_of_undoing(start, tmp_path, url, ports, face):
    """However far a failing operation came, a retry ends it: done once, undone once, failed."""
    crossed = _deaths(start, tmp_path, _own_failing, face, url, ports)
    for name in SERVICES[:2]:
        for point in (f"undo-{name}:before", f"undo-{name}:after", f"step-!undo-{name}:after"):
            assert point in crossed
    assert "step-!failed:before" in crossed
    policy = POLICY.with_changes(terminal=Declined)
    for number in range(1, len(crossed) + 1):
        with Idempotency(url, caller=f"caller-{number}", policy=policy, secret=SECRET) as idem:
            with pytest.raises(Declined):
                idem.run(
                    "order", failed_checkout, ports, lambda _: None, name="checkout", request=None
                )
            after = idem.read("order")
            assert after.record.state is State.FAILED
            names = [step.name for step in after.steps]
            assert names == ["reserve", "charge", "!failed", "!undo charge", "!undo reserve"]
    for name in SERVICES[:2]:
        executions = downstream.seen(ports[name])["executions"]
        expected = [
            _key(number, *parts, name) for number in _orders(crossed) for parts in ((), ("undo",))
        ]
        assert sorted(executions) == sorted(expected)
        for number in _orders(crossed):
            done, undone = _key(number, name), _key(number, "undo", name)
            assert executions.index(done) < executions.index(undone)


def _key(number: int, *parts: str) -> str:
    return child_key(SECRET, Key("order", caller=f"caller-{number}"), *parts)


def _retry(url, caller, ports, boundary) -> None:
    """Retries as another process would, and checks what it did against what was there."""
    with Idempotency(url, caller=caller, policy=POLICY, secret=SECRET) as idem:
        before = idem.read("order")
        recorded = [] if before is None else [step.name for step in before.steps]
        assert recorded == list(SERVICES[: len(recorded)])
        calls = []
        answer = idem.answer(
            "order",
            checkout,
            ports,
            calls.append,
            name="checkout",
            request=None,
        )
        was_settled = before is not None and before.record.state is State.SUCCEEDED
        assert answer.replayed is was_settled, boundary
        # What was recorded is not asked for again, and everything else is, in order.
        expected = [] if was_settled else SERVICES[len(recorded) :]
        assert calls == [f"call-{name}:{side}" for name in expected for side in ("before", "after")]
        after = idem.read("order")
        assert [(step.name, step.position) for step in after.steps] == [
            (name, position) for position, name in enumerate(SERVICES, 1)
        ]
        assert [outcome.state for outcome in after.outcomes] == [State.SUCCEEDED]
        # The caller gets what the services answered to the very first request of each key.
        for name, said in zip(SERVICES, answer.value, strict=True):
            key = child_key(SECRET, Key("order", caller=caller), name)
            place = downstream.seen(ports[name])["executions"].index(key) + 1
            assert said == f"{name} {place}"

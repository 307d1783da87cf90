"""What a stored record means on the status page, for the states that a live request cannot show."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, Policy
from retrysafe.http.problems import ProblemContext
from retrysafe.http.status_page import status_response
from retrysafe.runtime.calls import calls_of
from retrysafe.stores import Condition, MemoryStore
from retrysafe.testing import ManualClock
from tests.http.driving import Reply

PLACE = ProblemContext("/policy", "/status")


def status_of(idem):
    response = status_response(idem.read("k"), PLACE, "k", calls_of(idem).run_times)
    lines = [(name.decode(), value.decode()) for name, value in response.headers]
    return Reply(response.status, lines, response.body)


def test_a_cut_off_operation_is_abandoned_when_its_lease_ends():
    """Running until then, with a pause that the lease bounds; afterwards a retry is advised."""
    clock = ManualClock()
    idem = Idempotency(MemoryStore(now_ms=clock), caller="a")

    def die():
        raise SystemExit

    with pytest.raises(SystemExit):
        idem.run("k", die)
    running = status_of(idem)
    assert (running.json["state"], running.headers["retry-after"]) == ("running", "1")
    clock.advance(timedelta(seconds=30))
    assert idem.read("k").condition is Condition.ABANDONED
    abandoned = status_of(idem)
    assert (abandoned.status, abandoned.json["state"]) == (200, "abandoned")
    assert "retry-after" not in abandoned.headers
    idem.close()


def test_an_outcome_that_is_no_response_is_not_shown():
    """A function of the same caller used the key: its value is nobody's response."""
    idem = Idempotency(MemoryStore(), caller="a")
    idem.run("k", lambda: {"secret": 1}, request=None)
    reply = status_of(idem)
    assert reply.problem == "outcome-unavailable"
    assert b"secret" not in reply.body
    idem.close()


def test_an_outcome_that_was_cleaned_away_is_not_made_up():
    """The record is there, its outcome is not."""
    idem = Idempotency(MemoryStore(), caller="a")
    idem.run("k", lambda: 1, request=None)
    idem._calls.store._outcomes.clear()
    assert status_of(idem).problem == "outcome-unavailable"
    idem.close()


def test_a_failure_that_was_cleaned_away_is_not_told_as_done():
    idem = Idempotency(MemoryStore(), caller="a", policy=Policy(terminal=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        idem.run("k", divmod, 1, 0)
    idem._calls.store._outcomes.clear()
    assert status_of(idem).problem == "operation-failed"
    idem.close()


def test_adapters_recall_without_asking_the_store():
    """What the process remembers comes back at once; what it does not is None."""

    async def run():
        from retrysafe.core.call import Call
        from retrysafe.core.keys.key import Key
        from retrysafe.core.model import Fingerprint
        from retrysafe.core.policy import Policy
        from retrysafe.core.values.codec import ValueCodec

        fingerprints = (Fingerprint(1, b"x" * 16),)
        call = Call(Key("k", caller="a"), fingerprints, Policy(), "op", ValueCodec())

        async def operation(attempt):
            return attempt.number

        idem = AsyncIdempotency(MemoryStore())
        assert calls_of(idem).recall(call) is None
        assert (await calls_of(idem).answer_call(call, operation)).value == 1
        assert calls_of(idem).recall(call).replayed
        await idem.close()
        blocking = Idempotency(MemoryStore())
        assert calls_of(blocking).recall(call) is None
        assert calls_of(blocking).answer_call(call, lambda attempt: attempt.number).value == 1
        assert calls_of(blocking).recall(call).value == 1
        blocking.expire(call.key)
        assert calls_of(blocking).recall(call) is None
        blocking.close()
        forgetful = Idempotency(MemoryStore(), cache=False)
        calls_of(forgetful).answer_call(call, lambda attempt: 1)
        assert calls_of(forgetful).recall(call) is None
        forgetful.close()

    asyncio.run(run())

"""A store that does not answer is told to every local duplicate by the one that asked."""

from __future__ import annotations

import asyncio
import threading

import pytest

from retrysafe.core.call import Call
from retrysafe.core.engine import CLAIM_TRIES, Engine
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Fingerprint
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.settings import Settings
from retrysafe.core.values.codec import ValueCodec
from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.task_ports import TaskClock
from tests.core.driving import ports_over


class _SilentWriter:
    """Never answers, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def claim(self, request):
        self.asked += 1
        await asyncio.sleep(0)
        raise StoreUnavailable("no answer")


class _Clock(TaskClock):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("in_flight", list(InFlight))
def test_followers_of_a_claim_that_got_no_answer_are_reported(in_flight):
    """Ten duplicates cost the tries of one, and each gets an error of its own."""
    writer = _SilentWriter()
    engine = Engine(ports_over(writer, _Clock(), lock=threading.Lock()), Settings(has_cache=False))

    def call(fingerprint: bytes) -> Call:
        key = Key("key", caller="tester")
        policy = Policy(in_flight=in_flight)
        return Call(key, (Fingerprint(1, fingerprint),), policy, "", ValueCodec())

    async def main() -> list[BaseException]:
        # Half of them bring another request: the store is silent for those as well.
        return await asyncio.gather(
            *(engine.answer(call(b"ab"[number % 2 :]), None) for number in range(10)),
            return_exceptions=True,
        )

    errors = asyncio.run(main())
    assert [type(error) for error in errors] == [StoreUnavailable] * 10
    assert len({id(error) for error in errors}) == 10
    assert {error.key for error in errors[1:]} == {"key"}
    assert writer.asked == CLAIM_TRIES
    assert engine.flights_count == 0

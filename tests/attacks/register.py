"""The register of runs without a claim, alone, with a clock to turn."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from retrysafe import Policy
from retrysafe.core.call import Answer, Call
from retrysafe.core.events import Reporter
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.core.model import Fingerprint
from retrysafe.core.run_times import RunTimes
from retrysafe.http import Breaker
from retrysafe.http.responses import Response, ResponseCodec
from retrysafe.http.rules import KEPT_BELOW_500
from retrysafe.http.unprotected import UnprotectedRuns
from retrysafe.runtime.drive import run_sync


class Register:
    """What one process knows of its keys; leases last 30 seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.breaker = Breaker()
        self.runs = UnprotectedRuns(self.breaker, lambda: self.now)
        # How many runs without a claim there were.
        self.count = 0
        # What the process remembers of a run with a claim.
        self.remembered: Answer[Any] | None = None

    def call(self, key: str = "k") -> Call:
        return Call(
            Key(key, caller=GLOBAL),
            (Fingerprint(1, b"f" * 16),),
            Policy(lease=timedelta(seconds=30)),
            "POST *",
            ResponseCodec(),
            KEPT_BELOW_500.ending_of,
        )

    def run(
        self, key: str = "k", body: bytes = b"", error: BaseException | None = None
    ) -> Answer[Any]:
        """A request that comes without a claim."""

        async def invoke(attempt: None) -> Response:
            assert attempt is None
            self.count += 1
            if error is not None:
                raise error
            return Response(201, [], body)

        answer = self.runs.answer(
            self.call(key), invoke, lambda _: self.remembered, Reporter(None), RunTimes()
        )
        return run_sync(answer)

    def recall(self, key: str = "k") -> Answer[Any] | None:
        """What a request is told before the store is asked."""
        return self.runs.recall(self.call(key), Reporter(None), RunTimes())

    def begin_claimed(self, call: Call) -> None:
        self.runs.begin_claimed(call, RunTimes())

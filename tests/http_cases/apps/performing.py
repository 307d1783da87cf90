"""What every reference application does alike: report its run, hold where told, answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from retrysafe import RetrysafeError, current_attempt
from tests.http_cases.acts import Act, Reply, act_of, reply_to
from tests.http_cases.configuration import directory
from tests.http_cases.stage import AsyncLine, Line


class Mishap(Exception):
    """What an application raises that was told to fail."""


def _attempt() -> int:
    """The number of the running attempt; 0 on a request that nothing protects."""
    try:
        return current_attempt().number
    except RetrysafeError:
        return 0


class Performance:
    """One run of an application that blocks."""

    def __init__(self, act_header: str | None, play: str | None, method: str, body: bytes) -> None:
        self.act = act_of(act_header)
        attempt = _attempt()
        self._line = None if play is None else Line(directory(), play, attempt=attempt)
        if self._line and self.act.hold:
            self._line.hold(self.act.hold)
        if self.act.fails == "before":
            self._close()
            raise Mishap("as the case wants it")
        run = self._line.run if self._line else 0
        self.reply = reply_to(self.act, method=method, run=run, attempt=attempt, received=body)

    def chunks(self) -> Iterator[bytes]:
        """The body, piece by piece; ends the run."""
        try:
            for number, chunk in enumerate(self.reply.chunks):
                yield chunk
                if number == 0 and self._line and self.act.pause:
                    self._line.hold(self.act.pause)
                if number == 0 and self.act.fails == "midway":
                    raise Mishap("as the case wants it, after the first piece")
        finally:
            self._close()

    def body(self) -> bytes:
        """The body in one piece; ends the run."""
        return b"".join(self.chunks())

    def _close(self) -> None:
        if self._line:
            self._line.close()


class AsyncPerformance:
    """One run of an application on an event loop."""

    def __init__(self, act: Act, line: AsyncLine | None, reply: Reply) -> None:
        self.act = act
        self._line = line
        self.reply = reply

    @classmethod
    async def begin(
        cls, act_header: str | None, play: str | None, method: str, body: bytes
    ) -> AsyncPerformance:
        act = act_of(act_header)
        attempt = _attempt()
        line = None if play is None else await AsyncLine.open(directory(), play, attempt=attempt)
        if line and act.hold:
            await line.hold(act.hold)
        if act.fails == "before":
            if line:
                line.close()
            raise Mishap("as the case wants it")
        run = line.run if line else 0
        return cls(
            act,
            line,
            reply_to(act, method=method, run=run, attempt=attempt, received=body),
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece; ends the run."""
        try:
            for number, chunk in enumerate(self.reply.chunks):
                yield chunk
                if number == 0 and self._line and self.act.pause:
                    await self._line.hold(self.act.pause)
                if number == 0 and self.act.fails == "midway":
                    raise Mishap("as the case wants it, after the first piece")
        finally:
            if self._line:
                self._line.close()

    async def body(self) -> bytes:
        """The body in one piece; ends the run."""
        return b"".join([chunk async for chunk in self.chunks()])

"""Plays cases against a server, over its socket, and checks every answer to the last header."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tests.http_cases import cases, checking, wire
from tests.http_cases.acts import ACT_HEADER, PLAY_HEADER
from tests.http_cases.cases import HTTP_2, Ask, Case, Expectation
from tests.http_cases.configuration import LEASE_SECONDS, mount_of, store_path
from tests.http_cases.controlled_store import HELD, calls_path, fault_path
from tests.http_cases.operators import claim_elsewhere, operate
from tests.http_cases.serving import RunningServer, ServerKind, start
from tests.http_cases.stage import Stage
from tests.http_cases.wire import Answer

# Far more than any case takes, so that only a case that hangs is cut off.
CASE_SECONDS = 60
FLOOD_CONNECTIONS = 200
# Enough to hide the pauses of single cases, few enough for two cores.
PLAYS_AT_ONCE = 8
_ONE_CONTEXT = ssl.create_default_context()
_numbers = itertools.count(1)


@dataclass
class Begun:
    """A request on a connection of its own."""

    ask: Ask
    client: httpx.AsyncClient
    task: asyncio.Task[Answer | None]
    chunks: list[bytes]
    news: asyncio.Condition
    is_counted: bool = False


class Server:
    """A running server as the plays see it."""

    def __init__(
        self, urls: dict[str, str], directory: Path, traits: frozenset[str], stage: Stage
    ) -> None:
        # Where each mount is served.
        self.urls = urls
        self.directory = directory
        self.traits = traits
        self.stage = stage
        # Cases that break a store have it for themselves.
        self._mount_locks: dict[str, asyncio.Lock] = {}

    def turn(self, case: Case) -> asyncio.Lock:
        """What a case holds while it plays: its mount, unless that is the application itself."""
        prefix = mount_of(case.asks[0].path).prefix
        return self._mount_locks.setdefault(prefix, asyncio.Lock()) if prefix else asyncio.Lock()

    def client(self, prefix: str) -> httpx.AsyncClient:
        """A client with one connection to a mount."""
        is_http_2 = HTTP_2 in self.traits
        return httpx.AsyncClient(
            base_url=self.urls[prefix],
            http1=not is_http_2,
            http2=is_http_2,
            verify=_ONE_CONTEXT,
            timeout=CASE_SECONDS,
            # Granian closes a connection whose request was refused before its body was read, and a
            # client that has begun to send the next one over it gets no answer.
            limits=httpx.Limits(
                max_connections=1,
                max_keepalive_connections=0 if "granian" in self.traits else None,
            ),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )


class Play:
    """One case on one server."""

    def __init__(self, case: Case, server: Server) -> None:
        self.case = case
        self.server = server
        self.stage = server.stage
        self.name = f"p{next(_numbers)}"
        self.mount = mount_of(case.asks[0].path)
        # How often the application should have run by now, and what those runs answered.
        self.runs = 0
        self.answers: list[Answer | None] = []
        self._begun: dict[str, Begun] = {}
        self._url = server.urls[self.mount.prefix]
        self._client = self._new_client()

    async def perform(self) -> None:
        """Plays every step; raises AssertionError for an answer that is not the expected one."""
        try:
            async with asyncio.timeout(CASE_SECONDS):
                await self._steps()
        finally:
            fault_path(self.server.directory, self.mount.name).unlink(missing_ok=True)
            for begun in self._begun.values():
                await _leave(begun)
            await self._client.aclose()
        assert len(self.stage.runs[self.name]) == self.runs

    async def _steps(self) -> None:
        steps = iter(self.case.steps)
        for number, step in enumerate(steps, 1):
            answered: tuple[Ask, Answer | None, bool] | None = None
            match step:
                case Ask():
                    answered = step, await self.ask(step), False
                case cases.Finish(name):
                    begun = self._begun.pop(name)
                    answered = begun.ask, await begun.task, begun.is_counted
                    await begun.client.aclose()
                case cases.Continue(ask):
                    answered = ask, await wire.ask_with_continue(self._told(ask)), False
                case cases.Until(problem, ask):
                    answered = ask, await self._until(problem, ask), False
                case _:
                    await self._direct(step)
            if answered is not None:
                expectation = next(steps)
                try:
                    self._check(expectation, *answered)
                except AssertionError as error:
                    error.add_note(f"step {number}: {answered[0]}")
                    error.add_note(f"expected: {expectation}")
                    error.add_note(f"answered: {answered[1]}")
                    raise
                if isinstance(expectation, cases.Broken):
                    # Servers close the connection of an application that raised, now or soon.
                    await self._client.aclose()
                    self._client = self._new_client()

    async def _direct(self, step: Any) -> None:
        """Follows a stage direction."""
        server = self.server
        match step:
            case cases.Begin(name, ask):
                self._start(name, replace(ask, act=ask.act.held_at(name)))
                await self._arrival(name)
                self.runs += 1
                self._begun[name].is_counted = True
            case cases.Start(name, ask):
                self._start(name, ask)
            case cases.Release(point):
                self.stage.cue(self.name, point)
            case cases.Reached(point):
                await self._arrival(point)
                for begun in self._begun.values():
                    if begun.ask.act.pause == point and not begun.is_counted:
                        begun.is_counted = True
                        self.runs += 1
            case cases.Receives(name, data):
                await self._receives(self._begun[name], data)
            case cases.HangUp(name):
                await _leave(self._begun.pop(name))
            case cases.CutOff(ask):
                await self._cut_off(ask)
            case cases.Upgrade(path):
                await wire.read_greeting(self._url, path)
            case cases.Crowd():
                await self._crowd(step)
            case cases.Flood():
                await self._flood(step)
            case cases.Break(fault, point):
                text = f"{HELD} {self.name} {point}" if fault == HELD else fault
                fault_path(server.directory, self.mount.name).write_text(text)
            case cases.Heal():
                fault_path(server.directory, self.mount.name).unlink(missing_ok=True)
            case cases.Quiet(ask, expectation):
                before = self._store_calls()
                self._check(expectation, ask, await self.ask(ask), False)
                assert self._store_calls() == before
            case cases.Operate(command, key, caller):
                path = store_path(server.directory, self.mount.name)
                await asyncio.to_thread(operate, path, command, key, self._token(caller))
            case cases.ClaimElsewhere(ask, key, caller):
                path = store_path(server.directory, self.mount.name)
                await asyncio.to_thread(
                    claim_elsewhere, path, ask, key, self._token(caller), LEASE_SECONDS
                )

    # Requests.

    def _new_client(self) -> httpx.AsyncClient:
        return self.server.client(self.mount.prefix)

    def _token(self, caller: str) -> str:
        return f"{caller}-{self.name}"

    def _told(self, ask: Ask) -> wire.Told:
        """The request as it goes over the wire."""
        lines: list[tuple[bytes, bytes]] = [(PLAY_HEADER.encode(), self.name.encode())]
        keys = ask.key if isinstance(ask.key, tuple) else () if ask.key is None else (ask.key,)
        for key in keys:
            text = key if isinstance(key, bytes) else self._filled(key).encode()
            lines.append((b"idempotency-key", text))
        if ask.caller is not None:
            lines.append((b"authorization", f"Bearer {self._token(ask.caller)}".encode()))
        if ask.content_type is not None:
            lines.append((b"content-type", ask.content_type.encode()))
        lines.append((ACT_HEADER.encode(), ask.act.header().encode()))
        lines += [(name.encode(), self._filled(value).encode()) for name, value in ask.headers]
        return wire.Told(self._url, ask.method, self._filled(ask.path), lines, ask.body, ask.pieces)

    def _filled(self, text: str) -> str:
        text = text.replace("{play}", self.name)
        return text.replace("{next}", str(next(_numbers))) if "{next}" in text else text

    async def ask(self, ask: Ask, client: httpx.AsyncClient | None = None) -> Answer | None:
        """One exchange; None when the server closed the connection instead of answering."""
        return await self._exchange(self._told(ask), client or self._client, None)

    async def _exchange(
        self, told: wire.Told, client: httpx.AsyncClient, begun: Begun | None
    ) -> Answer | None:
        content = told.body if not told.pieces else _sent_in(told.body, told.pieces)
        has_body = bool(told.body) or told.method not in ("GET", "HEAD", "OPTIONS")
        request = client.build_request(
            told.method, told.path, headers=told.lines, content=content if has_body else None
        )
        try:
            response = await client.send(request, stream=True)
            try:
                body = b""
                async for chunk in response.aiter_raw():
                    body += chunk
                    if begun is not None:
                        async with begun.news:
                            begun.chunks.append(chunk)
                            begun.news.notify_all()
            finally:
                await response.aclose()
        except httpx.RemoteProtocolError:
            return None
        lines = [
            (name.decode().lower(), value.decode("latin-1")) for name, value in response.headers.raw
        ]
        return Answer(response.status_code, lines, body)

    def _start(self, name: str, ask: Ask) -> None:
        client = self._new_client()
        begun = Begun(ask, client, None, [], asyncio.Condition())  # type: ignore[arg-type]
        begun.task = asyncio.create_task(self._exchange(self._told(ask), client, begun))
        self._begun[name] = begun

    async def _arrival(self, point: str) -> None:
        """Waits for a run at the point; fails when every request is answered without one."""
        arrival = asyncio.create_task(self.stage.arrival(self.name, point))
        answers = asyncio.gather(*(begun.task for begun in self._begun.values()))
        await asyncio.wait((arrival, answers), return_when=asyncio.FIRST_COMPLETED)
        if not arrival.done() and not any(
            answer is not None and answer.status == 202 for answer in answers.result()
        ):
            arrival.cancel()
            raise AssertionError(f"no run came to {point}: {answers.result()}")
        # An accepted request may run later than its answer comes.
        await arrival

    async def _receives(self, begun: Begun, data: bytes) -> None:
        async with begun.news:
            await begun.news.wait_for(lambda: data in b"".join(begun.chunks) or begun.task.done())
        assert not begun.task.done(), begun.task.result()

    async def _cut_off(self, ask: Ask) -> None:
        told = self._told(ask)
        if HTTP_2 not in self.server.traits:
            await wire.cut_off(told)
            return
        client = self._new_client()
        try:
            with_content = client.build_request(
                told.method, told.path, headers=told.lines, content=_broken_off(told.body)
            )
            await client.send(with_content)
        except _HungUp:
            pass
        finally:
            await client.aclose()

    async def _until(self, problem: str, ask: Ask) -> Answer | None:
        while True:
            answer = await self.ask(ask)
            if answer is None:
                return answer
            if problem == "unprotected":
                if answer.header("idempotency-protected") != "false":
                    return answer
                self.runs += 1
                self.answers.append(answer)
            elif not checking.is_problem(answer, problem):
                return answer
            await asyncio.sleep(0.02)  # Only paces the questions; their answers decide.

    # Many at once.

    async def _crowd(self, crowd: cases.Crowd) -> None:
        point = "crowd"
        told = self._told(replace(crowd.ask, act=crowd.ask.act.held_at(point)))
        # A connection each: on one that is shared, the client's answers wait for each other.
        clients = [self._new_client() for _ in range(crowd.count)]
        try:
            tasks = {asyncio.create_task(self._exchange(told, client, None)) for client in clients}
            await self.stage.arrival(self.name, point)
            self.runs += 1
            done: set[asyncio.Task[Answer | None]] = set()
            if not crowd.waits:
                pending = set(tasks)
                while len(pending) > 1:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                done = tasks - pending
                for task in done:
                    self._check(crowd.others, crowd.ask, task.result(), False)
            self.stage.cue(self.name, point)
            answers = [await task for task in tasks - done]
            first = [
                answer
                for answer in answers
                if answer is not None and answer.header("idempotent-replayed") is None
            ]
            assert len(first) == 1, f"{len(first)} answers are no replays: {first[:3]}"
            self._check(cases.Ran(), crowd.ask, first[0], True)
            for answer in answers:
                if answer is not first[0]:
                    self._check(crowd.others, crowd.ask, answer, False)
        finally:
            await _close(clients)

    async def _flood(self, flood: cases.Flood) -> None:
        told = self._told(flood.ask)
        before = self._store_calls()
        clients = [self._new_client() for _ in range(FLOOD_CONNECTIONS)]

        async def ask_on(client: httpx.AsyncClient) -> list[Answer | None]:
            return [
                await self._exchange(told, client, None)
                for _ in range(flood.count // FLOOD_CONNECTIONS)
            ]

        try:
            answers = [
                answer
                for several in await asyncio.gather(*map(ask_on, clients))
                for answer in several
            ]
        finally:
            await _close(clients)
        assert len(answers) == flood.count
        calls = self._store_calls() - before
        for answer in answers:
            self._check(flood.each, flood.ask, answer, False)
        assert calls <= flood.store_calls_at_most, f"the store was called {calls} times"

    def _store_calls(self) -> int:
        path = calls_path(self.server.directory, self.mount.name)
        return path.stat().st_size if path.exists() else 0

    # Answers.

    def _check(
        self, expectation: Expectation, ask: Ask, answer: Answer | None, is_counted: bool
    ) -> None:
        runs = isinstance(expectation, cases.Ran | cases.Untouched | cases.Broken) or (
            isinstance(expectation, cases.Refused) and expectation.has_run
        )
        if runs and not is_counted:
            self.runs += 1
        checking.check(expectation, self, ask, answer)
        told = self.stage.runs[self.name]
        assert len(told) == self.runs, f"{len(told)} runs instead of {self.runs}"
        if runs:
            self.answers.append(answer)


class _HungUp(Exception):
    """Ends a request in the middle of its body."""


async def _broken_off(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    raise _HungUp


async def _sent_in(body: bytes, pieces: int) -> AsyncIterator[bytes]:
    size = max(1, -(-len(body) // pieces))
    for place in range(0, len(body), size):
        yield body[place : place + size]
        await asyncio.sleep(0)


async def _close(clients: list[httpx.AsyncClient]) -> None:
    for client in clients:
        await client.aclose()


async def _leave(begun: Begun) -> None:
    begun.task.cancel()
    await asyncio.wait((begun.task,))
    await begun.client.aclose()


def played_on(kind: ServerKind, selected: Iterable[Case]) -> dict[str, Exception | None]:
    """Plays the cases on a server that is there for them only: None, or what was wrong."""
    running = start(kind)
    try:
        running.wait_until_ready()
        return asyncio.run(_play_all(running, selected))
    finally:
        running.stop()


async def _play_all(
    running: RunningServer, selected: Iterable[Case]
) -> dict[str, Exception | None]:
    stage = Stage()
    listener = await stage.open(running.directory)
    server = Server(running.urls, running.directory, running.kind.traits, stage)
    turns = asyncio.Semaphore(PLAYS_AT_ONCE)
    outcomes: dict[str, Exception | None] = {}

    async def play(case: Case) -> None:
        # Its mount first: a case that waits for it must not keep others from playing.
        async with server.turn(case), turns:
            try:
                await Play(case, server).perform()
                outcomes[case.name] = None
            except Exception as error:
                outcomes[case.name] = error

    try:
        await asyncio.gather(*map(play, selected))
    finally:
        listener.close()
    return outcomes

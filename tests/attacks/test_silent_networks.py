"""Networks that go silent: open connections carry nothing any more, and new ones work.

A firewall forgets connections, an address moves to another host, a proxy hangs. Nobody says so, and
the server is well. Attacked is a healthy owner on PostgreSQL, through both drivers: the silence
begins as it claims, between its renewals, as it renews or as it settles, while a rival waits for
the key. What must hold: one execution, whose outcome the rival is given; no `ClaimLost`; and the
silence costs seconds.

`SWALLOWED` bytes are acknowledged, as a proxy does it: only limits on our own side end that wait.
`DROPPED` packets are not: there the socket's own options do, see the last part.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest

from retrysafe import AsyncIdempotency, Idempotency, InFlight, Key, Policy
from retrysafe.core.events import Event, EventKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres.asyncpg_connector import AsyncpgConnector
from retrysafe.stores.postgres.connector import PoolOptions
from retrysafe.stores.postgres.psycopg_connector import PsycopgConnector
from retrysafe.stores.postgres.store import PostgresStore
from retrysafe.stores.postgres.urls import postgres_url
from tests.servers.fixtures import migrated, schema_on
from tests.servers.silence import Cut, Silence, SilencingProxy

FACES = pytest.mark.parametrize("face", ["blocking", "async"])
SILENCES = pytest.mark.parametrize("silence", list(Silence), ids=lambda item: item.value)
KEY = Key("the key", caller="owner")
OUTCOME = "the outcome of the owner's run"
PATIENCE_SECONDS = 60


class Moment(Enum):
    """When the silence begins, seen from the owner."""

    CLAIM_UNHEARD = "the server does not get the claim"
    CLAIM_UNANSWERED = "the claim stands, and its answer is lost"
    BETWEEN_RENEWALS = "nothing is under way"
    RENEWAL_UNHEARD = "the server does not get a renewal"
    RENEWAL_UNANSWERED = "a renewal stands, and its answer is lost"
    SETTLEMENT_UNHEARD = "the server does not get the ending"
    SETTLEMENT_UNANSWERED = "the ending stands, and its answer is lost"


@dataclass
class Timing:
    """How long a lease is, and how long a commit may take."""

    lease: timedelta
    pool: PoolOptions

    @property
    def operation_seconds(self) -> float:
        """Longer than the lease: only renewals keep the key."""
        return 1.5 * self.lease.total_seconds()


SHORT = Timing(timedelta(seconds=1.5), PoolOptions(commit_timeout=timedelta(seconds=0.5)))
DEFAULT = Timing(Policy().lease, PoolOptions())


def made_store(url: str, pool: PoolOptions, *, is_async: bool) -> PostgresStore:
    parts = postgres_url(url)
    connector: Any = (
        AsyncpgConnector(parts.for_asyncpg, parts.location, pool)
        if is_async
        else PsycopgConnector(parts.for_libpq, parts.location, pool)
    )
    return PostgresStore(connector, location=parts.location, schema_name=parts.schema_name)


@dataclass
class Play:
    """One owner behind a proxy that goes silent at one moment, and one rival who waits."""

    url: str
    proxy: SilencingProxy
    moment: Moment
    timing: Timing
    runs: list[str] = field(default_factory=list)
    events: list[EventKind] = field(default_factory=list)
    rival: Future[str] = field(default_factory=Future)

    def note(self, event: Event) -> None:
        self.events.append(event.kind)

    def begin(self) -> None:
        """Before the owner asks."""
        if self.moment is Moment.CLAIM_UNHEARD:
            self.proxy.arm(KEY.digest, Cut.BEFORE)
        elif self.moment is Moment.CLAIM_UNANSWERED:
            self.proxy.arm(KEY.digest, Cut.AFTER)
            # The rival must meet the owner's record, not a free key.
            self.proxy.on_silence = self.let_rival_wait

    def operation(self) -> str:
        """What the owner runs, in a thread of its own if need be."""
        self.runs.append("owner")
        if self.moment is not Moment.CLAIM_UNANSWERED:
            self.let_rival_wait()
        if self.moment is Moment.RENEWAL_UNHEARD:
            self.proxy.arm(KEY.digest, Cut.BEFORE)
        elif self.moment is Moment.RENEWAL_UNANSWERED:
            self.proxy.arm(KEY.digest, Cut.AFTER)
        half = self.timing.operation_seconds / 2
        time.sleep(half)
        if self.moment is Moment.BETWEEN_RENEWALS:
            assert self.proxy.silence() > 0
        time.sleep(half)
        if self.moment is Moment.SETTLEMENT_UNHEARD:
            self.proxy.arm(OUTCOME.encode(), Cut.BEFORE)
        elif self.moment is Moment.SETTLEMENT_UNANSWERED:
            self.proxy.arm(OUTCOME.encode(), Cut.AFTER)
        return OUTCOME

    def let_rival_wait(self) -> None:
        threading.Thread(target=self._run_rival, daemon=True).start()

    def _run_rival(self) -> None:
        def run() -> str:
            self.runs.append("rival")
            return "the outcome of the rival's run"

        policy = Policy(
            lease=self.timing.lease,
            in_flight=InFlight.WAIT,
            wait_limit=timedelta(seconds=PATIENCE_SECONDS),
        )
        try:
            with Idempotency(self.url, caller="owner", policy=policy) as idem:
                self.rival.set_result(idem.run("the key", run, name="op", request="r"))
        except BaseException as error:
            self.rival.set_exception(error)

    def answer(self, face: str) -> str:
        """What the owner is answered, through the proxy."""
        self.begin()
        port = f":{self.proxy.port}/"
        url = f"{self.url.rpartition(':')[0]}{port}{self.url.rpartition('/')[2]}"
        policy = Policy(lease=self.timing.lease)
        store = made_store(url, self.timing.pool, is_async=face == "async")
        options = {"caller": "owner", "policy": policy, "observers": [self.note]}
        if face == "blocking":
            with Idempotency(store, **options) as idem:
                answer = idem.run("the key", self.operation, name="op", request="r")
            run_sync(store.close())
            return answer

        async def run() -> str:
            async def operation() -> str:
                return await asyncio.to_thread(self.operation)

            async with AsyncIdempotency(store, **options) as idem:
                answer = await idem.run("the key", operation, name="op", request="r")
            await store.close()
            return answer

        return asyncio.run(run())


@contextmanager
def played(
    server_url: str, server_port: int, silence: Silence, moment: Moment, timing: Timing
) -> Iterator[Play]:
    with schema_on(server_url) as url:
        proxy = SilencingProxy(server_port, silence)
        try:
            yield Play(migrated(url), proxy, moment, timing)
        finally:
            proxy.close()


def hold_out(server: Any, face: str, silence: Silence, moment: Moment, timing: Timing) -> None:
    """One execution, one outcome for both, and nothing lost."""
    with played(server.url(), server.port, silence, moment, timing) as play:
        began = time.monotonic()
        assert play.answer(face) == OUTCOME, moment
        took = time.monotonic() - began
        assert play.rival.result(PATIENCE_SECONDS) == OUTCOME, moment
        assert play.runs == ["owner"], moment
        assert EventKind.CLAIM_LOST not in play.events, moment
        if moment is not Moment.BETWEEN_RENEWALS:
            assert play.proxy.cuts == 1, moment
        # The silence costs one wait for a commit and a few retries; the rest is for a slow machine.
        commit_seconds = timing.pool.commit_timeout.total_seconds()
        assert took < timing.operation_seconds + commit_seconds + 4, moment


def all_at_once(server: Any, face: str, silence: Silence, timing: Timing) -> None:
    with ThreadPoolExecutor(len(Moment)) as pool:
        plays = [pool.submit(hold_out, server, face, silence, item, timing) for item in Moment]
        for play in plays:
            play.result()


@FACES
@SILENCES
def test_a_silent_network_takes_no_key_from_its_owner(postgres_server, face, silence):
    """Whenever the silence begins, the operation runs once, and the waiting rival is answered."""
    all_at_once(postgres_server, face, silence, SHORT)


@pytest.mark.long
@FACES
@SILENCES
def test_a_silent_network_takes_no_key_with_default_settings(postgres_server, face, silence):
    """The same with a lease of 30 s and the time limits that everybody has."""
    all_at_once(postgres_server, face, silence, DEFAULT)

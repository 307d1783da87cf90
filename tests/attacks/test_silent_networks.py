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
import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from retrysafe import AsyncIdempotency, Idempotency, InFlight, Key, Policy
from retrysafe.core.events import Event, EventKind
from retrysafe.errors import StoreUnavailable, StoreUrlInvalid
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres.drivers.asyncpg import AsyncpgConnector
from retrysafe.stores.postgres.drivers.port import Keepalive, PoolOptions
from retrysafe.stores.postgres.drivers.psycopg import PsycopgConnector
from retrysafe.stores.postgres.store import PostgresStore
from retrysafe.stores.postgres.urls import postgres_url
from tests.attacks.conftest import beside
from tests.servers.fixtures import migrated, schema_on
from tests.servers.silence import Cut, Silence, SilencingProxy

FACES = pytest.mark.parametrize("face", ["blocking", "async"])
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


SHORT = Timing(timedelta(seconds=2.4), PoolOptions(commit_timeout=timedelta(seconds=0.8)))
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
    # When the owner had its answer.
    answered: float = 0.0

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
                self.answered = time.monotonic()
            run_sync(store.close())
            return answer

        async def run() -> str:
            async def operation() -> str:
                return await asyncio.to_thread(self.operation)

            async with AsyncIdempotency(store, **options) as idem:
                answer = await idem.run("the key", operation, name="op", request="r")
                self.answered = time.monotonic()
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
        took = play.answered - began
        assert play.rival.result(PATIENCE_SECONDS) == OUTCOME, moment
        assert play.runs == ["owner"], moment
        assert EventKind.LOST not in play.events, moment
        if moment is not Moment.BETWEEN_RENEWALS:
            assert play.proxy.cuts == 1, moment
        # The silence costs one wait for a commit and a few retries; the rest is for a slow machine.
        commit_seconds = timing.pool.commit_timeout.total_seconds()
        assert took < timing.operation_seconds + commit_seconds + 4, moment


def all_at_once(server: Any, face: str, timing: Timing) -> None:
    """Every moment with every kind of silence: what they wait for costs no time together."""
    scenes = [(silence, moment) for silence in Silence for moment in Moment]
    with ThreadPoolExecutor(len(scenes)) as pool:
        plays = [pool.submit(hold_out, server, face, *scene, timing) for scene in scenes]
        for play in plays:
            play.result()


@FACES
def test_a_silent_network_takes_no_key_from_its_owner(postgres_server, face):
    """Whenever the silence begins, the operation runs once, and the waiting rival is answered."""
    all_at_once(postgres_server, face, SHORT)


@pytest.mark.long
@FACES
def test_a_silent_network_takes_no_key_with_default_settings(postgres_server, face):
    """The same with a lease of 30 s and the time limits that everybody has."""
    all_at_once(postgres_server, face, DEFAULT)


# What one connection does.


class Line:
    """A connector behind a proxy, for both drivers."""

    def __init__(self, face: str, port: int, options: str = "", **limits: timedelta) -> None:
        url = postgres_url(f"postgresql://retrysafe@127.0.0.1:{port}/postgres{options}")
        pool = replace(url.pool, **limits)
        self._runner = asyncio.Runner() if face == "async" else None
        self.connector: Any = (
            PsycopgConnector(url.for_libpq, url.location, pool)
            if self._runner is None
            else AsyncpgConnector(url.for_asyncpg, url.location, pool)
        )

    def run(self, flow: Any) -> Any:
        return run_sync(flow) if self._runner is None else self._runner.run(flow)

    def seconds_until_given_up(self, flow: Any) -> float:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            self.run(flow)
        return time.monotonic() - began

    def close(self) -> None:
        self.run(self.connector.close())
        if self._runner is not None:
            self._runner.close()


@contextmanager
def line(face: str, proxy: SilencingProxy, options: str = "", **limits: Any) -> Iterator[Line]:
    made = Line(face, proxy.port, options, **limits)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def dropping(postgres_server):
    proxy = SilencingProxy(postgres_server.port, Silence.DROPPED)
    yield proxy
    proxy.close()


@pytest.fixture
def swallowing(postgres_server):
    proxy = SilencingProxy(postgres_server.port)
    yield proxy
    proxy.close()


# Far above the options' own times, for a slow machine, and far below the limit of a statement.
SOON_SECONDS = 10


@FACES
def test_what_is_not_acknowledged_ends_its_connection(dropping, face):
    """`tcp_user_timeout`: a statement whose packets are dropped does not wait for its limit."""
    with line(face, dropping, "?tcp_user_timeout=1000&keepalives_idle=100") as client:
        client.run(client.connector.fetch_patiently("SELECT 1"))
        assert dropping.silence() == 1
        flow = client.connector.fetch_patiently("SELECT 1")
        assert client.seconds_until_given_up(flow) < SOON_SECONDS


@FACES
def test_a_peer_that_vanishes_while_a_statement_runs_is_found_out(dropping, face):
    """Keepalives: all that was sent is acknowledged, and then the other side is gone."""
    options = "?keepalives_idle=1&keepalives_interval=1&keepalives_count=2&tcp_user_timeout=0"
    with line(face, dropping, options) as client:
        hush = threading.Timer(0.5, dropping.silence)
        client.run(client.connector.fetch_patiently("SELECT 1"))
        hush.start()
        flow = client.connector.fetch_patiently("SELECT pg_sleep(60)")
        assert client.seconds_until_given_up(flow) < SOON_SECONDS
        hush.join()


@FACES
def test_a_transaction_is_given_up_as_soon_as_a_statement(swallowing, face):
    """Its rollback is not waited for: over that connection nothing comes back any more."""

    async def work(session: Any) -> None:
        swallowing.silence()
        await session.fetch("SELECT 1")

    limit = timedelta(seconds=1)
    with line(face, swallowing, commit_timeout=limit) as client:
        assert client.seconds_until_given_up(client.connector.transact(work)) < 1.9
        assert client.run(client.connector.fetch("SELECT 1"))


@FACES
def test_one_silent_connection_is_enough_for_all_idle_ones(swallowing, face):
    """Its neighbours in the pool are not tried one after the other, each for its time."""

    async def use_three(connector: Any, count: int = 3) -> None:
        async def work(_: Any) -> None:
            await beside(connector, use_three(connector, count - 1))

        if count:
            await connector.transact(work)

    with line(face, swallowing, commit_timeout=timedelta(seconds=1)) as client:
        client.run(use_three(client.connector))
        assert swallowing.silence() == 3
        assert client.seconds_until_given_up(client.connector.fetch("SELECT 1")) < 1.9
        began = time.monotonic()
        client.run(client.connector.fetch("SELECT 1"))
        assert time.monotonic() - began < 0.9


@FACES
def test_a_renewal_waits_for_no_connection_of_the_pool(swallowing, face):
    """All of them may be in use for as long as they like."""

    async def renew_meanwhile(connector: Any) -> Any:
        return await connector.transact(lambda _: connector.fetch_renewal(5.0, "SELECT 1"))

    with line(face, swallowing, "?pool=1") as client:
        assert [tuple(row) for row in client.run(renew_meanwhile(client.connector))] == [(1,)]


@FACES
def test_a_renewal_is_on_a_fresh_connection_after_the_first_silence(swallowing, face):
    """It costs one try of the time that the heartbeat gives, and the next one goes through."""
    with line(face, swallowing) as client:
        fetch = client.connector.fetch_renewal
        client.run(fetch(5.0, "SELECT 1"))
        client.run(fetch(5.0, "SELECT 1"))
        assert swallowing.connections == 1
        swallowing.silence()
        assert 0.2 <= client.seconds_until_given_up(fetch(0.2, "SELECT 1")) < 2
        client.run(fetch(5.0, "SELECT 1"))
        assert swallowing.connections == 2


SOCKET_OPTIONS = {
    "keepalives": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    "keepalives_idle": (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    "keepalives_interval": (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    "keepalives_count": (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
    "tcp_user_timeout": (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
}


def options_set(port: int) -> list[dict[str, int]]:
    """What is set on each socket of this process that leads to that port."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        # Sockets alone: a second descriptor of a SQLite file would end its locks when it closes.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as shared:
                if shared.family == socket.AF_INET and shared.getpeername()[1] == port:
                    found.append(
                        {name: shared.getsockopt(*item) for name, item in SOCKET_OPTIONS.items()}
                    )
    return found


@FACES
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", Keepalive()),
        ("?keepalives_idle=77&tcp_user_timeout=4321", Keepalive(1, 77, 5, 3, 4321)),
    ],
    ids=["by default", "as the URL says"],
)
def test_every_connection_has_keepalives(swallowing, face, options, expected):
    """Those of the pool and those of renewals; what the URL says counts for both drivers."""
    with line(face, swallowing, options) as client:
        client.run(client.connector.fetch("SELECT 1"))
        client.run(client.connector.fetch_renewal(5.0, "SELECT 1"))
        assert options_set(swallowing.port) == [asdict(expected)] * 2


@FACES
def test_closing_does_not_wait_for_a_silent_server(swallowing, face):
    """Nobody takes leave over such a connection."""
    with line(face, swallowing) as client:
        client.run(client.connector.fetch("SELECT 1"))
        client.run(client.connector.fetch_renewal(5.0, "SELECT 1"))
        assert swallowing.silence() == 2
        began = time.monotonic()
        client.run(client.connector.close())
        assert time.monotonic() - began < 4


def test_keepalives_that_are_no_numbers_are_refused():
    """By name, before anything is opened."""
    with pytest.raises(StoreUrlInvalid, match="keepalives_idle is a whole number"):
        postgres_url("postgresql://shop@127.0.0.1/shop?keepalives_idle=soon")

"""The one limit on a delivery in a thread: from looking its host up to its last byte."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import httpcore
import httpx
import pytest

from retrysafe.relay import request_limit
from tests.attacks.test_hostile_servers import Dripping
from tests.relay.test_webhooks import send

WAIT = 30


@contextmanager
def within(seconds: float, now: float = 0.0):
    token = request_limit.deadline.set(now + seconds)
    try:
        yield
    finally:
        request_limit.deadline.reset(token)


@pytest.fixture
def resolver(monkeypatch):
    """A resolver that is silent until the test ends, for all but numbers."""
    made = SimpleNamespace(may_answer=threading.Event(), asked=0, left=0)
    ended = threading.Condition()
    find = socket.getaddrinfo

    def silent(host, port, *args, flags=0, **options):
        if flags & socket.AI_NUMERICHOST:
            return find(host, port, *args, flags=flags, **options)
        with ended:
            made.asked += 1
            ended.notify_all()
        try:
            assert made.may_answer.wait(WAIT)
            raise socket.gaierror("nobody is there")
        finally:
            with ended:
                made.left += 1
                ended.notify_all()

    def was_asked(times: int) -> bool:
        """Whether it was asked so often; a thread that asks may need a moment to begin."""
        with ended:
            return ended.wait_for(lambda: made.asked >= times, WAIT) and made.asked == times

    made.was_asked = was_asked
    monkeypatch.setattr(request_limit.socket, "getaddrinfo", silent)
    yield made
    made.may_answer.set()
    with ended:
        assert ended.wait_for(lambda: made.left == made.asked, WAIT)


def test_a_resolver_that_is_silent_does_not_hold_a_delivery(resolver):
    """It ends with its own time-out, and not with that of the system, which is half a minute."""
    with pytest.raises(httpx.ConnectTimeout, match="not found in time"):
        send("blocking", "http://receiver.test/", timeout=timedelta(milliseconds=500))
    assert not resolver.may_answer.is_set()
    assert resolver.was_asked(1)


def test_the_threads_of_a_silent_resolver_are_bounded(resolver, monkeypatch):
    """Deliveries that find no place end in time as well, and ask nobody."""
    monkeypatch.setattr(request_limit, "_LOOKUPS_LIMIT", 2)
    lookups = request_limit._Lookups()
    for _ in range(4):
        with pytest.raises(httpcore.ConnectTimeout):
            lookups.find("receiver.test", 80, 0.05)
    assert resolver.was_asked(2)
    # A fork leaves those threads in the parent.
    lookups.after_fork_in_child()
    with pytest.raises(httpcore.ConnectTimeout):
        lookups.find("receiver.test", 80, 0.05)
    assert resolver.was_asked(3)


def test_an_unknown_host_is_told_and_gives_its_place_back(resolver, monkeypatch):
    """As an error of the connection, which is what it was without a limit."""
    monkeypatch.setattr(request_limit, "_LOOKUPS_LIMIT", 1)
    lookups = request_limit._Lookups()
    resolver.may_answer.set()
    for _ in range(3):
        with pytest.raises(httpcore.ConnectError, match="nobody is there"):
            lookups.find("receiver.test", 80, WAIT)


class Silent(httpcore.NetworkBackend):
    """Addresses of which none answers, by a clock that they turn."""

    def __init__(self, answering: str = "") -> None:
        self.now = 0.0
        self.tried: list[tuple[str, float]] = []
        self._answering = answering

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        self.tried.append((host, timeout))
        if host == self._answering:
            return httpcore.MockStream([])
        self.now += timeout
        raise httpcore.ConnectTimeout("silent")


@pytest.mark.parametrize("answering", ["", "10.0.0.3"])
def test_all_addresses_of_a_host_share_one_limit(monkeypatch, answering):
    """Each has its share of the time that is left, so that the last one has a chance as well."""
    silent = Silent(answering)
    monkeypatch.setattr(request_limit, "time", SimpleNamespace(monotonic=lambda: silent.now))
    monkeypatch.setattr(
        request_limit, "_addresses", lambda *_: ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.3"]
    )
    backend = request_limit._Backend()
    backend._backend = silent
    with within(8):
        if answering:
            backend.connect_tcp("receiver.test", 80, 10.0)
        else:
            with pytest.raises(httpcore.ConnectTimeout, match="silent"):
                backend.connect_tcp("receiver.test", 80, 10.0)
    assert silent.tried[:3] == [("10.0.0.1", 2.0), ("10.0.0.2", 2.0), ("10.0.0.3", 2.0)]
    assert silent.now == (4.0 if answering else 8.0)


def test_addresses_are_listed_once_and_found_by_name():
    """`localhost` is a name, and its port is of no matter."""
    assert set(request_limit._addresses("localhost", 80, WAIT)) <= {"127.0.0.1", "::1"}
    assert request_limit._addresses("127.0.0.1", 80, WAIT) == ["127.0.0.1"]
    assert request_limit._addresses("receiver.test", 80, None) == ["receiver.test"]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_drips_ends_with_the_time_out(monkeypatch, scheme):
    """The limit holds on the way through a proxy as well, which the environment may name."""
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    # What answers here is the proxy: with a head that takes ten seconds, a byte at a time.
    proxy = Dripping(b"HTTP/1.1 204 No Content\r\n", b"x-dripping: " + b"a" * 34 + b"\r\n\r\n")
    try:
        monkeypatch.setenv(f"{scheme}_proxy", proxy.url)
        with pytest.raises(httpx.TimeoutException):
            send("blocking", f"{scheme}://receiver.test/", timeout=timedelta(milliseconds=400))
        assert proxy.was_left.wait(WAIT)
    finally:
        proxy.close()

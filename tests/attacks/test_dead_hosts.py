"""Hosts that die inside a transaction without a word: no FIN, no RST, only silence.

Attacked: such a host has written the record of a key in its transaction, as `complete_in`, a joined
step or an atomic run does. The server keeps the transaction, and with it the row, until it gives
the connection up. What must hold: callers are told that an open transaction holds the key, and not
that a lease is about to end; nobody runs the operation meanwhile; and the settings that `retrysafe
doctor` advises end the transaction in time, after which the key is free.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import psycopg
import pytest

from retrysafe import Idempotency, InFlight, OperationInFlight, Policy, StoreUnavailable
from retrysafe.stores.postgres import store as postgres
from tests.docs.documents import ROOT
from tests.servers.fixtures import missing

LEASE = timedelta(milliseconds=300)
POLICY = Policy(lease=LEASE)
PATIENT = Policy(lease=LEASE, in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=30))
HELD = "an open transaction holds it, and only the end of that transaction frees it"

LEASED = """
import sys, time
from datetime import timedelta
import psycopg
from retrysafe import Idempotency, Policy, current_attempt

def operation():
    connection = psycopg.connect(sys.argv[2])
    connection.execute("SELECT 1")
    {write}
    print("written", flush=True)
    time.sleep(600)

idem = Idempotency(sys.argv[1], caller="shop")
policy = Policy(lease=timedelta(milliseconds=300))
idem.run("order-1", operation, name="place", request=None, policy=policy)
"""
ATOMIC = """
import sys, time
import psycopg
from retrysafe import Idempotency

idem = Idempotency(sys.argv[1], caller="shop")
connection = psycopg.connect(sys.argv[2])
with idem.atomic(connection, "order-1", name="place", request=None) as run:
    run.complete(1)
print("written", flush=True)
time.sleep(600)
"""
PROGRAMS = {
    "outcome": LEASED.format(write="current_attempt().complete_in(connection, 1)"),
    "step": LEASED.format(
        write="current_attempt().step('book', lambda: 1, in_transaction=connection)"
    ),
    "atomic run": ATOMIC,
}


@contextmanager
def silenced(what: str, url: str, **settings: str) -> Iterator[None]:
    """A host that has written the record in its transaction, and then stood still for ever.

    For the server a stopped process is a silent one. Only the machine under it still acknowledges
    packets, which is why keepalives are tested by an interface that goes down.
    """
    plain = url.partition("?")[0]
    options = "%20".join(f"-c%20{name}%3D{value}" for name, value in settings.items())
    command = [sys.executable, "-c", PROGRAMS[what], url, f"{plain}?options={options}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"written\n"
            process.send_signal(signal.SIGSTOP)
            wait_for_the_lease(url)
            yield
        finally:
            process.kill()


def wait_for_the_lease(url: str) -> None:
    """Until it has ended by the server's clock."""
    plain, _, schema = url.partition("?schema=")
    ended = f"SELECT coalesce(bool_and(lease_ends_at < now()), true) FROM {schema}.records"
    with psycopg.connect(plain, autocommit=True) as connection:
        while connection.execute(ended).fetchone() != (True,):
            time.sleep(0.02)


@pytest.fixture
def url(migrated_url):
    return migrated_url


def never() -> str:
    pytest.fail("the operation ran beside its open transaction")


@pytest.mark.parametrize("what", PROGRAMS)
def test_callers_are_told_that_a_transaction_holds_the_key(url, what):
    """Its lease is over and does not matter; whoever waits or retries must not expect a second."""
    with silenced(what, url), Idempotency(url, caller="shop") as idem:
        for _ in range(2):
            with pytest.raises(OperationInFlight, match=HELD) as raised:
                idem.run("order-1", never, name="place", request=None, policy=POLICY)
            assert raised.value.is_locked
            assert "lease" not in str(raised.value)
            assert timedelta(0) < raised.value.retry_after <= timedelta(seconds=2)


@pytest.mark.parametrize("what", PROGRAMS)
def test_an_atomic_rival_is_told_so_too(url, what):
    with (
        silenced(what, url),
        Idempotency(url, caller="shop") as idem,
        closing(psycopg.connect(url.partition("?")[0])) as connection,
        pytest.raises(OperationInFlight, match=HELD) as raised,
        idem.atomic(connection, "order-1", name="place", request=None, policy=POLICY),
    ):
        never()
    assert raised.value.is_locked


@pytest.mark.parametrize("what", ["outcome", "step"])
def test_an_operator_is_told_so_too(url, what, monkeypatch):
    """Neither waits for ever, nor takes a key from a transaction that may commit."""
    monkeypatch.setattr(postgres, "_OPERATOR_LOCK_WAIT", "50ms")
    with (
        silenced(what, url),
        Idempotency(url, caller="shop") as idem,
        pytest.raises(StoreUnavailable, match="an open transaction holds 'order-1'"),
    ):
        idem.release("order-1", force=True)


@pytest.mark.parametrize("what", PROGRAMS)
def test_the_idle_limit_ends_the_transaction(url, what):
    """The first setting that `doctor` advises: then the next caller runs."""
    with (
        silenced(what, url, idle_in_transaction_session_timeout="1s"),
        Idempotency(url, caller="shop") as idem,
    ):
        told = idem.run("order-1", lambda: "second", name="place", request=None, policy=PATIENT)
    assert told == "second"


@pytest.mark.long
@pytest.mark.parametrize("version", ["18", "15"])
@pytest.mark.parametrize(
    ("settings", "is_ended"),
    [
        (("tcp_keepalives_idle=1", "tcp_keepalives_interval=1", "tcp_keepalives_count=2"), True),
        (("tcp_keepalives_idle=1", "tcp_keepalives_interval=1", "tcp_user_timeout=3s"), True),
        (("idle_in_transaction_session_timeout=2s",), True),
        ((), False),
    ],
    ids=["keepalives", "user timeout", "idle limit", "as it comes"],
)
def test_what_ends_the_transaction_of_a_host_that_vanished(version, settings, is_ended):
    """By real silence: the interface between them goes down, and nothing is acknowledged."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        missing("network namespace (run as root, apt-get install iproute2 util-linux)")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "tests.attacks.dead_host", version, *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"free after ([\d.]+) s\n|still locked\n", done.stdout)
    assert found is not None, done.stdout
    assert bool(found[1]) is is_ended
    if is_ended:
        assert float(found[1]) < 15

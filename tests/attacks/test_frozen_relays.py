"""Relays that stand still past their leases, at each boundary from the claim to the settlement.

Attacked: what a relay does on waking with the entries that it had only queued. Meanwhile an
operator has discarded the head of an aggregate, and another relay has delivered what is behind it.

Must hold: nothing begins on a lease that is over unless the store confirms it. What another has
decided stands, and a discarded entry never arrives after its successors.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from datetime import timedelta

import pytest

from retrysafe.core.model import Decision
from retrysafe.core.outbox.entries import EntryCommand, EntryStart
from retrysafe.relay import delivery_loop
from retrysafe.relay.deliveries import HeldEntries
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from tests.attacks.freezing import Freezer, wait_until_frozen
from tests.attacks.relays import LEASE, drain, entries, policy_of, stage, states, wait_until
from tests.processes.ledger import note, noted
from tests.servers.fixtures import migrated, schema_on

LANE = ("head", "next", "last")
FREE = ("free-1", "free-2", "free-3")
# The look is the last thing before a delivery; after it, the target itself is at work.
BOUNDARIES = (
    "claim:before",
    "claim:after",
    "look:before",
    "start:before",
    "start:after",
    "deliver:before",
    "deliver:after",
    "settle:before",
    "settle:after",
)


# A server takes longer, and decides the same.
SOME = ("claim:after", "look:before", "start:before", "settle:before")


def _zombie(pipe, url: str, ledger: str, face: str, boundary: str, lease: timedelta) -> None:
    freezer = Freezer(ledger, boundary)
    made, may_begin = delivery_loop.RelayEngine.__init__, HeldEntries.may_begin

    def wrapped(self, outbox, *args, **options) -> None:
        made(self, _Outbox(outbox, freezer), *args, **options)

    def look(self, entry) -> bool:
        freezer.cross("look:before")
        return may_begin(self, entry)

    def deliver(delivery) -> None:
        name = delivery.body.decode()
        note(ledger, "zombie", name)
        freezer.cross("deliver:before")
        freezer.cross("deliver:after")

    delivery_loop.RelayEngine.__init__, HeldEntries.may_begin = wrapped, look
    drain(url, deliver, policy_of(lease), face, 1)


class _Outbox:
    """An outbox with boundaries around what its relay writes."""

    def __init__(self, outbox, freezer: Freezer) -> None:
        self.hints, self.extend = outbox.hints, outbox.extend
        self.claim = freezer.around(outbox.claim, "claim")
        self._start = freezer.around(outbox.write, "start")
        self._settle = freezer.around(outbox.write, "settle")

    async def write(self, writes):
        is_start = isinstance(writes[-1], EntryStart)
        return await (self._start if is_start else self._settle)(writes)


def _decide(url: str, ledger: str) -> None:
    """An operator discards the head, and another relay delivers the rest."""
    wait_until(lambda: "claimed" not in states(url).values())
    head = entries(url)["head"]
    if head.condition.value == "waiting":
        store = open_store(url)
        try:
            done = run_sync(store.outbox.operate(head.entry.id, EntryCommand.DISCARD))
            assert done is Decision.APPLY
        finally:
            run_sync(store.close())
    else:
        assert head.condition.value == "delivered"
    while set(states(url).values()) - {"delivered", "discarded"}:
        drain(url, lambda it: note(ledger, "other", it.body.decode()), policy_of(), "threads", 4)


def _attack(start, urls, tmp_path, face, lease=LEASE) -> None:
    attacks = []
    for boundary, url in urls.items():
        ledger = str(tmp_path / boundary.replace(":", "-"))
        stage(url, *LANE, aggregate="lane")
        stage(url, *FREE)
        attacks.append((start(_zombie, url, ledger, face, boundary, lease), url, ledger, boundary))
    for child, _, _, _ in attacks:
        wait_until_frozen(child)
    for _, url, ledger, _ in attacks:
        _decide(url, ledger)
    before = [(states(url), noted(ledger)) for _, url, ledger, _ in attacks]
    for child, _, _, _ in attacks:
        child.kill(signal.SIGCONT)
    for (child, url, ledger, boundary), (decided, lines) in zip(attacks, before, strict=True):
        assert child.result() is None
        assert states(url) == decided, boundary
        assert noted(ledger) == lines, f"frozen at {boundary}, it delivered what was decided"
        assert lines.count(["frozen", boundary]) == 1


@pytest.fixture
def sqlite_urls(tmp_path):
    return {name: f"sqlite:///{tmp_path}/{name.replace(':', '-')}.db" for name in BOUNDARIES}


@pytest.fixture
def postgres_urls(postgres_server):
    with ExitStack() as stack:
        schemas = {name: schema_on(postgres_server.url()) for name in SOME}
        yield {name: migrated(stack.enter_context(made)) for name, made in schemas.items()}


@pytest.mark.parametrize("face", ["threads", "tasks"])
def test_a_frozen_relay_delivers_nothing_that_was_decided_meanwhile(
    start, sqlite_urls, tmp_path, face
):
    """Frozen in its claim, before its look, its start, its delivery, its settlement."""
    _attack(start, sqlite_urls, tmp_path, face)


@pytest.mark.parametrize("face", ["threads", "tasks"])
def test_the_same_on_postgresql(start, postgres_urls, tmp_path, face):
    _attack(start, postgres_urls, tmp_path, face)


@pytest.mark.long
def test_the_same_with_the_default_lease(start, sqlite_urls, tmp_path):
    _attack(start, sqlite_urls, tmp_path, "threads", timedelta(seconds=60))

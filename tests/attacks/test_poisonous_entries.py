"""Entries that kill the relay that delivers them, beside innocent ones.

Attacked: the count of tries, and who is blamed for a dead relay. A receiver's library that crashes
the process, or a payload that uses up its memory, ends every relay that begins to deliver it, with
whatever else that relay has in its hands.

Must hold: a try counts when its delivery begins and not before; what a dead relay had begun is
delivered alone, so that the poisonous entry is found; only that one dies, whatever the limit is;
everything else is delivered, and aggregates keep their order.
"""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest

from tests.attacks.relays import LEASE, drain, entries, policy_of, stage, states
from tests.processes.ledger import note, noted

INNOCENT = ("a", "b", "c", "d", "e")
LANE = ("lane-1", "lane-2", "lane-3")
SIZE = 3


def _relay(pipe, url, ledger, face, limit, lease, is_first) -> None:
    """Dies of the poison; the first one with all of its places taken."""
    crowd = threading.Barrier(SIZE)
    under_way: list[str] = []

    def deliver(delivery) -> None:
        name = delivery.body.decode()
        under_way.append(name)
        note(ledger, "begins", name, delivery.attempt, len(under_way))
        if is_first:
            # Innocent ones are under way when it happens, and nobody hears how they end.
            crowd.wait()
        if name == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_first:
            threading.Event().wait()
        note(ledger, "ends", name)
        under_way.remove(name)

    policy = policy_of(lease, attempt_limit=limit)
    is_over = {"delivered", "dead"}
    while not set(states(url).values()) <= is_over:
        drain(url, deliver, policy, face, SIZE)


def _attack(start, url, ledger, face, limit, lease) -> list[list[str]]:
    """Lets relays die until one lives; what was done, in order."""
    stage(url, "a", "poison", *INNOCENT[1:])
    stage(url, *LANE, aggregate="lane")
    patience = 10 * lease.total_seconds()
    for _ in range(limit + 3):
        is_first = not noted(ledger)
        child = start(_relay, url, ledger, face, limit, lease, is_first)
        # Leases have to end first, and those of default length last longer than any child may.
        child.wait_for_end(patience)
        if child.exit_code() == 0:
            return noted(ledger)
        assert child.exit_code() == -signal.SIGKILL
        if is_first:
            # What was begun is counted, and what was only claimed is not.
            tries = {name: item.entry.attempts for name, item in entries(url).items()}
            begun = {name for _, name, *_ in noted(ledger)}
            assert {name for name, count in tries.items() if count} == begun
    raise AssertionError("every relay dies")


def _check(url, lines, limit) -> None:
    expected = dict.fromkeys((*INNOCENT, *LANE), "delivered") | {"poison": "dead"}
    assert states(url) == expected
    # Once beside others, which tells nobody anything, and then alone.
    begun = [line[1] for line in lines if line[0] == "begins"]
    assert begun.count("poison") == max(2, limit)
    assert entries(url)["poison"].entry.attempts == max(2, limit)
    # Those that shared their first try with the poison have their second one alone.
    shared = set(begun[:SIZE])
    alone = [line for line in lines[SIZE:] if line[0] == "begins" and line[1] in shared]
    assert {line[3] for line in alone} == {"1"}
    assert all(begun.count(name) <= 2 for name in (*INNOCENT, *LANE))
    ended = [line[1] for line in lines if line[0] == "ends"]
    assert [name for name in ended if name in LANE] == list(LANE)


@pytest.mark.parametrize(("face", "limit"), [("threads", 1), ("tasks", 3)])
def test_a_poisonous_entry_dies_alone(start, shared_url, ledger, face, limit):
    """Relays die of it one after the other, with real kills; nothing innocent dies with it."""
    lines = _attack(start, shared_url, ledger, face, limit, LEASE)
    _check(shared_url, lines, limit)


@pytest.mark.long
def test_a_poisonous_entry_dies_alone_with_the_default_lease(start, shared_url, ledger):
    """The same with the lease that relays have unless told otherwise."""
    lines = _attack(start, shared_url, ledger, "threads", 2, timedelta(seconds=60))
    _check(shared_url, lines, 2)

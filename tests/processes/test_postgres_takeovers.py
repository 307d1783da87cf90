"""Processes that come back at once for the keys of one that has died: each key goes to one."""

from __future__ import annotations

from collections import Counter

from retrysafe.core.model import Decision
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.stores.opening import postgres_store
from retrysafe.testing.suite.probe import key_of, request
from tests.processes.children import CONTEXT

KEYS = 100
ROUNDS = 5
PROCESSES = 2


def _keys(number: int) -> list:
    return [key_of(f"round {number}, key {place}") for place in range(KEYS)]


def _take_over(pipe, url: str, direction: int, barrier) -> list[list[tuple[str, bytes]]]:
    """What each claim of each round was told, and the token that it was made with."""
    store = postgres_store(url, is_async=False)
    told = []
    try:
        run_sync(store.commit([request(key_of(f"warm {direction}"))], []))
        for number in range(ROUNDS):
            wishes = [request(key, mint_token()) for key in _keys(number)[::direction]]
            barrier.wait(60)
            answers, _ = run_sync(store.commit(wishes, []))
            told.append([(a.decision.value, w.token) for a, w in zip(answers, wishes, strict=True)])
    finally:
        run_sync(store.close())
    return [told_once[::direction] for told_once in told]


def test_each_abandoned_key_goes_to_one_process(start, migrated_url):
    """Batches over the same 100 keys, in opposite orders: nobody deadlocks, and nobody shares."""
    store = postgres_store(migrated_url, is_async=False)
    for number in range(ROUNDS):
        run_sync(store.commit([request(key, lease_ms=0) for key in _keys(number)], []))
    barrier = CONTEXT.Barrier(PROCESSES)
    children = [start(_take_over, migrated_url, order, barrier) for order in (1, -1)]
    results = [child.result() for child in children]
    for number in range(ROUNDS):
        for place, key in enumerate(_keys(number)):
            told = [result[number][place] for result in results]
            winners = [token for decision, token in told if decision == Decision.TAKE_OVER.value]
            assert Counter(decision for decision, _ in told) == {
                Decision.TAKE_OVER.value: 1,
                Decision.IN_FLIGHT.value: PROCESSES - 1,
            }
            found = run_sync(store.read(key)).record
            assert ([found.token], found.attempt) == (winners, 2)
    run_sync(store.close())

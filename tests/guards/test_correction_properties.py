"""Corrected requests: one property per guard, each of which fails without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from retrysafe import FOREVER, Idempotency, KeyReused, Policy, current_attempt, natural_key
from retrysafe.core.model import Decision, Payload, SettleKind
from retrysafe.core.ports import Store
from retrysafe.errors import StepNotStored, StoreMissing
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from retrysafe.testing.clock import ManualClock
from retrysafe.testing.suite.probe import KEY, LEASE_MS, OTHER, Probe, request
from tests.guards.test_properties import sqlite_store

SECRET = "x" * 32
ARGUMENTS = Payload("json.1", b"", b"[[1],{}]")


class Declined(Exception):
    pass


LISTED = Policy(terminal=(Declined,), nothing_happened=(Declined,))


def shop(store: Store | None = None, *, cache: bool = False) -> Idempotency:
    return Idempotency(
        store or MemoryStore(), caller="shop", policy=LISTED, cache=cache, secret=SECRET
    )


def pay_with(idem: Idempotency, pay: Callable[[str], Any], **options: Any) -> Callable[..., Any]:
    @idem.once(**{"key": "invoice", "window": FOREVER, "name": "pay", **options})
    def pay_invoice(invoice: int, card: str) -> Any:
        return pay(card)

    return pay_invoice


def decline(card: str) -> str:
    if card == "bad":
        raise Declined("no funds")
    return "paid"


def refused(pay: Callable[..., Any], error: type[BaseException] = Declined) -> None:
    """The first card fails, and no other is taken."""
    with pytest.raises(error):
        pay(42, "bad")
    with pytest.raises(KeyReused):
        pay(42, "good")


def test_an_unlisted_failure_keeps_the_key() -> None:
    """Nobody said that nothing happened."""

    def unclear(card: str) -> str:
        raise ValueError(card)

    policy = LISTED.with_changes(terminal=(ValueError,))
    with shop() as idem:
        refused(pay_with(idem, unclear, policy=policy), ValueError)


def test_a_clients_key_takes_no_correction() -> None:
    """A text that a function gives may be what a client has sent."""
    with shop() as idem:
        derived = pay_with(idem, decline)
        with pytest.raises(Declined):
            derived(42, "bad")
        sent = pay_with(idem, decline, key=lambda invoice, card: natural_key("pay", invoice=42))
        with pytest.raises(KeyReused):
            sent(42, "good")


def probed(store: Store) -> Probe:
    return Probe(store, ManualClock(), run_sync)


def ended(probe: Probe, token: bytes, kind: SettleKind = SettleKind.RELEASE) -> None:
    assert probe.end(kind, token, nothing_happened=True) is Decision.APPLY


def correct(probe: Probe, operation: str = "charge") -> Decision:
    wish = request(KEY, None, OTHER, operation=operation, takes_corrections=True)
    return probe.ask(wish).decision


def test_another_operation_is_no_correction() -> None:
    """It is another request for good."""
    probe = probed(MemoryStore())
    ended(probe, probe.hold())
    assert correct(probe, "refund") is Decision.MISMATCH


def _with_a_step(probe: Probe) -> None:
    token = probe.hold()
    probe.record(token)
    ended(probe, token)
    assert correct(probe) is Decision.MISMATCH


def test_a_stored_step_keeps_the_key() -> None:
    """Something has happened, whatever the ending says."""
    _with_a_step(probed(MemoryStore()))


def test_a_stored_step_keeps_the_key_in_sqlite() -> None:
    """The same, where a statement looks for it."""
    clock = ManualClock()
    with sqlite_store(clock) as store:
        _with_a_step(Probe(store, clock, run_sync))


def _after_a_crash(probe: Probe) -> None:
    probe.hold()
    probe.advance(LEASE_MS)
    ended(probe, probe.hold())
    assert correct(probe) is Decision.MISMATCH


def test_a_crash_in_its_life_keeps_the_key() -> None:
    """One harmless ending says nothing about the attempt before it."""
    clock = ManualClock()
    _after_a_crash(Probe(MemoryStore(now_ms=clock), clock, run_sync))


def test_an_unlisted_ending_in_its_life_keeps_the_key() -> None:
    """The same of an attempt that freed the key without a word about its effects."""
    probe = probed(MemoryStore())
    assert probe.end(SettleKind.RELEASE, probe.hold()) is Decision.APPLY
    ended(probe, probe.hold())
    assert correct(probe) is Decision.MISMATCH


def test_a_crash_in_its_life_keeps_the_key_in_sqlite() -> None:
    """The same, where the statement that ends the attempt decides."""
    clock = ManualClock()
    with sqlite_store(clock) as store:
        _after_a_crash(Probe(store, clock, run_sync))


def test_a_mark_counts_for_the_claim_that_made_it() -> None:
    """A release of retrysafe that does not know the mark leaves it where it was."""
    clock = ManualClock()
    with sqlite_store(clock) as store:
        probe = Probe(store, clock, run_sync)
        ended(probe, probe.hold(), SettleKind.FAIL)
        # As if another attempt had failed since.
        store._write(lambda connection: connection.execute(ANOTHER_TOKEN))
        assert correct(probe) is Decision.MISMATCH


ANOTHER_TOKEN = "UPDATE retrysafe_keys SET token = randomblob(16), attempt = attempt + 1"


def test_a_corrected_request_does_not_run_with_the_arguments_before_it() -> None:
    """A worker would charge the card that was declined."""
    probe = probed(MemoryStore())
    ended(probe, probe.hold(arguments=ARGUMENTS))
    assert correct(probe) is Decision.TAKE_OVER
    assert probe.read().arguments is None


def _corrected_elsewhere(pay: Callable[..., Any], store: Store) -> None:
    with pytest.raises(Declined):
        pay(42, "bad")
    with shop(store) as other:
        assert pay_with(other, decline)(42, "good") == "paid"
    with pytest.raises(KeyReused):
        pay(42, "bad")


def test_what_was_declined_is_not_replayed_after_its_correction() -> None:
    """Not by the process that ran it either."""
    store = MemoryStore()
    with shop(store, cache=True) as owner:
        _corrected_elsewhere(pay_with(owner, decline), store)


def test_what_was_replayed_is_not_replayed_after_its_correction() -> None:
    """Nor by one that has replayed it from the store."""
    store = MemoryStore()
    with shop(store) as owner, pytest.raises(Declined):
        pay_with(owner, decline)(42, "bad")
    with shop(store, cache=True) as other:
        _corrected_elsewhere(pay_with(other, decline), store)


def test_child_keys_are_those_of_the_corrected_request() -> None:
    """Else a receiver downstream sees one key with two requests."""
    seen = []

    def pay(card: str) -> str:
        seen.append(current_attempt().child_key("acquirer"))
        return decline(card)

    with shop() as idem:
        invoice = pay_with(idem, pay)
        with pytest.raises(Declined):
            invoice(42, "bad")
        assert invoice(42, "good") == "paid"
    assert len(set(seen)) == 2


def test_a_step_that_could_not_be_stored_is_not_nothing() -> None:
    """It ran, and no store knows of it."""

    def pay(card: str) -> str:
        raise StepNotStored("ran", key="k", value=card)

    policy = LISTED.with_changes(
        terminal=(StepNotStored,), nothing_happened=(Declined, StepNotStored)
    )
    with shop() as idem:
        refused(pay_with(idem, pay, policy=policy), StepNotStored)


def test_an_unstored_step_keeps_the_key() -> None:
    """It ran, and the operation went on without it until its card was declined."""
    store, reserved = FaultyStore(MemoryStore()), []
    store.fail(Moment.BEFORE, method="record_step", error=lambda _: StoreMissing("gone"))

    def pay(card: str) -> str:
        with suppress(StepNotStored):
            current_attempt().step("reserve", reserved.append, card)
        return decline(card)

    with shop(store) as idem:
        refused(pay_with(idem, pay))
    assert reserved == ["bad"]

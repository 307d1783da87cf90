"""Corrected calls: a failure that its user has mended is no trap; an uncertain one is refused."""

from __future__ import annotations

import threading

import pytest

from retrysafe import (
    BodyKey,
    Ending,
    Idempotency,
    InFlight,
    KeyReused,
    OperationFailed,
    Policy,
    current_attempt,
    natural_key,
)
from retrysafe.errors import PolicyInvalid
from retrysafe.stores import MemoryStore

SECRET = "x" * 32
LIMIT_SECONDS = 30


class Declined(Exception):
    pass


class Unclear(Exception):
    pass


# The failure is kept, or it frees the key: either way the next card is taken.
KEPT = Policy(terminal=(Declined,), nothing_happened=(Declined,))
FREED = Policy(retryable=(Declined,), nothing_happened=(Declined,))


class Till:
    """Pays an invoice with a card; each card does what it is told to."""

    def __init__(self, **cards):
        self.cards = cards
        self.ran = []
        self.children = []

    def pay(self, invoice, card):
        self.ran.append(card)
        self.children.append(current_attempt().child_key("acquirer"))
        outcome = self.cards[card]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def paying(subject, url, till, policy, **options):
    made = subject(url, caller="shop", secret=SECRET)
    options = {"key": "invoice", **options}
    return made.once(till.pay, name="pay", policy=policy, **options)


@pytest.mark.parametrize("policy", [KEPT, FREED], ids=["kept", "freed"])
def test_another_card_is_taken_after_a_declined_one(database_url, subject, policy):
    """It runs once, and from then on it is what the key is for."""
    till = Till(bad=Declined("no funds"), good="paid")
    pay = paying(subject, database_url, till, policy)
    with pytest.raises(Declined):
        pay(42, "bad")
    assert pay(42, "good") == "paid"
    assert pay(42, "good") == "paid"
    with pytest.raises(KeyReused):
        pay(42, "bad")
    assert till.ran == ["bad", "good"]


def test_a_declined_card_is_declined_again_without_a_run(database_url, subject):
    """The same request is replayed as ever, also after another one was declined, too."""
    till = Till(bad=Declined("no funds"), worse=Declined("stolen"))
    pay = paying(subject, database_url, till, KEPT)
    for card in ("bad", "bad", "worse", "worse"):
        with pytest.raises(Declined):
            pay(42, card)
    assert till.ran == ["bad", "worse"]


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (KEPT.with_changes(terminal=(Declined, Unclear)), Unclear("?")),
        (KEPT.with_changes(unlisted=Ending.FAILED), TimeoutError("?")),
        (FREED, Unclear("?")),
        (FREED, TimeoutError("?")),
        (FREED, KeyboardInterrupt()),
        (KEPT.with_changes(nothing_happened=()), Declined("no funds")),
        (FREED.with_changes(nothing_happened=()), Declined("no funds")),
    ],
    ids=["failed", "unlisted", "freed", "time-out", "cut off", "kept, no list", "freed, no list"],
)
def test_what_is_not_listed_stays_refused(database_url, subject, policy, error):
    """Nobody knows what happened, so nothing runs beside it."""
    till = Till(bad=error, good="paid")
    pay = paying(subject, database_url, till, policy)
    with pytest.raises(type(error)):
        pay(42, "bad")
    with pytest.raises(KeyReused):
        pay(42, "good")
    assert till.ran == ["bad"]


def test_one_uncertain_attempt_keeps_the_key_for_its_request(database_url, subject):
    """A time-out, and then a decline of the same card: the first may have been paid."""
    till = Till(bad=TimeoutError("?"), good="paid")
    pay = paying(subject, database_url, till, FREED)
    with pytest.raises(TimeoutError):
        pay(42, "bad")
    till.cards["bad"] = Declined("no funds")
    with pytest.raises(Declined):
        pay(42, "bad")
    with pytest.raises(KeyReused):
        pay(42, "good")
    assert till.ran == ["bad", "bad"]


def test_a_stored_step_keeps_the_key_for_its_request(database_url):
    """A part is done already: nothing happened is not true, whatever the rule lists."""
    with Idempotency(database_url, caller="shop") as idem:
        ran = []

        @idem.once(key="invoice", window=KEPT.active_window, name="pay", policy=KEPT)
        def pay(invoice, card):
            current_attempt().step("reserve", ran.append, card)
            raise Declined("no funds")

        with pytest.raises(Declined):
            pay(42, "bad")
        with pytest.raises(KeyReused):
            pay(42, "good")
        assert ran == ["bad"]


def test_child_keys_are_those_of_the_corrected_request(database_url, subject):
    """Nobody downstream sees one key with two requests; the first one's stay what they are."""
    till = Till(bad=Declined("no funds"), good=ConnectionError("try again"))
    pay = paying(subject, database_url, till, FREED)
    with pytest.raises(Declined):
        pay(42, "bad")
    with pytest.raises(Declined):
        pay(42, "bad")
    with pytest.raises(ConnectionError):
        pay(42, "good")
    till.cards["good"] = "paid"
    assert pay(42, "good") == "paid"
    first, second, corrected, again = till.children
    assert first == second
    assert corrected == again != first
    plain = []
    made = subject(database_url, caller="shop", secret=SECRET)
    other = natural_key("pay", invoice=42)
    made.call("expire", other)
    made.answer(
        other,
        lambda: plain.append(current_attempt().child_key("acquirer")),
        name="pay",
        request="anything",
    )
    assert plain == [first]


def test_a_key_that_its_caller_brings_takes_no_correction(database_url, subject):
    """`run` is given a key, and so is `once` by a function that gives a text: a client's, maybe."""
    till = Till(bad=Declined("no funds"), good="paid")
    pay = paying(subject, database_url, till, KEPT, key=lambda invoice, card: f"invoice-{invoice}")
    with pytest.raises(Declined):
        pay(42, "bad")
    with pytest.raises(KeyReused):
        pay(42, "good")
    made = subject(database_url, caller="shop", policy=KEPT, secret=SECRET)
    with pytest.raises(Declined):
        made.run("client-key", till.pay, 43, "bad")
    with pytest.raises(KeyReused):
        made.run("client-key", till.pay, 43, "good")
    assert till.ran == ["bad", "bad"]


def test_a_body_key_takes_no_list():
    """A corrected call has another key, so the list would promise what never happens.

    The policy of all operations may have one, for those with other keys.
    """
    with Idempotency(MemoryStore(), caller="shop", policy=KEPT, secret=SECRET) as idem:
        decorate = idem.once(key=BodyKey(), name="pay", policy=FREED)
        with pytest.raises(PolicyInvalid, match="another key anyway"):
            decorate(Till().pay)
        till = Till(bad=Declined("no funds"), good="paid")
        pay = idem.once(key=BodyKey(), name="pay")(till.pay)
        for _ in range(2):
            with pytest.raises(Declined):
                pay(42, "bad")
        assert pay(42, "good") == "paid"
        assert till.ran == ["bad", "good"]


def test_what_another_process_has_corrected_is_not_replayed_here(database_url, subject):
    """No process keeps an outcome that a corrected request may replace at any moment."""
    till = Till(bad=Declined("no funds"), good="paid")
    here, there = (paying(subject, database_url, till, KEPT) for _ in range(2))
    for _ in range(2):
        with pytest.raises(Declined):
            here(42, "bad")
    assert there(42, "good") == "paid"
    with pytest.raises(KeyReused):
        here(42, "bad")
    assert here(42, "good") == "paid"
    assert till.ran == ["bad", "good"]


@pytest.mark.parametrize("policy", [KEPT, FREED], ids=["kept", "freed"])
def test_a_corrected_request_is_refused_while_the_first_one_runs(database_url, policy):
    """And taken once that has ended with nothing done."""
    policy = policy.with_changes(in_flight=InFlight.WAIT)
    with Idempotency(database_url, caller="shop", secret=SECRET) as idem:
        claimed, may_go_on = threading.Event(), threading.Event()
        ran = []

        @idem.once(key="invoice", window=policy.active_window, name="pay", policy=policy)
        def pay(invoice, card):
            ran.append(card)
            if card == "bad":
                claimed.set()
                assert may_go_on.wait(LIMIT_SECONDS)
                raise Declined("no funds")
            return "paid"

        told = []

        def first():
            with pytest.raises((Declined, OperationFailed)):
                pay(42, "bad")
            told.append("declined")

        thread = threading.Thread(target=first)
        thread.start()
        try:
            assert claimed.wait(LIMIT_SECONDS)
            # While the first one runs, another request is refused, as the table says.
            with pytest.raises(KeyReused):
                pay(42, "good")
        finally:
            may_go_on.set()
            thread.join(LIMIT_SECONDS)
        assert told == ["declined"]
        assert pay(42, "good") == "paid"
        assert ran == ["bad", "good"]

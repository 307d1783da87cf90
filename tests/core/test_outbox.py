"""Outbox entries as pure data: keys, limits, what may happen to one, and how tries are spaced."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

from retrysafe import InvalidInput, Key, natural_key
from retrysafe.core.model import Decision, StagedEntry
from retrysafe.core.outbox import entries
from retrysafe.core.outbox.entries import (
    DISCARDED_KEEP_MS,
    BackOff,
    EntryClaim,
    EntryCommand,
    EntryCondition,
    EntryEnding,
    EntryStart,
    EntryState,
    Hints,
    OpenTry,
    error_text,
    tries_text,
)
from retrysafe.core.outbox.port import outbox_of
from retrysafe.core.outbox.staging import BODY_LIMIT_BYTES, entry_key, staged_entry
from retrysafe.core.ports import Capabilities, Waits
from tests.core.building import KEY, NOW, OTHER_TOKEN, TOKEN

LEASE_MS = 1_000
SECRET = b"s" * 16


def made(payload=None, **options):
    """A staged entry with one thing that matters."""
    fields = {
        "key": "entry:1",
        "topic": "orders.paid",
        "aggregate": None,
        "deliver_at": None,
        "content_type": None,
    } | options
    return staged_entry(fields.pop("key"), fields.pop("topic"), payload, **fields)


def entry(**changes):
    fresh = entries.new_entry(StagedEntry("k", "t", "c", b"b", "a", 0), 7, KEY, NOW)
    return replace(fresh, **changes)


def held(**changes):
    return entry(token=TOKEN, attempts=1, due_at_ms=NOW + LEASE_MS, **changes)


# Keys.


def test_an_entry_key_is_the_same_in_every_attempt_and_different_for_everything_else():
    """What it is made of is framed, so no two lists of parts meet; the secret is part of it."""
    keys = {
        entry_key(None, KEY, "a", "b"),
        entry_key(None, KEY, "ab", ""),
        entry_key(None, KEY, "a", 1),
        entry_key(None, KEY, "a", "1"),
        entry_key(None, Key("other", caller=KEY.caller), "a", "b"),
        entry_key(None, Key(KEY.text, caller="other"), "a", "b"),
        entry_key(SECRET, KEY, "a", "b"),
    }
    assert len(keys) == 7
    assert entry_key(SECRET, KEY, "a", "b") in keys
    assert all(key.startswith("entry:") and key.isascii() and len(key) < 60 for key in keys)


# What can be staged.


@pytest.mark.parametrize(
    ("payload", "body", "kind"),
    [
        (b"\x00\xff", b"\x00\xff", "application/octet-stream"),
        (bytearray(b"a"), b"a", "application/octet-stream"),
        ("ü", "ü".encode(), "text/plain; charset=utf-8"),
        ({"ü": [1, None]}, '{"ü":[1,null]}'.encode(), "application/json"),
        (None, b"null", "application/json"),
        (0, b"0", "application/json"),
        ({}, b"{}", "application/json"),
    ],
)
def test_payloads_are_delivered_as_what_they_are(payload, body, kind):
    """Bytes as bytes, text as text, the rest as plain JSON; falsy ones included."""
    found = made(payload)
    assert (found.body, found.content_type) == (body, kind)
    assert made(payload, content_type="application/xml").content_type == "application/xml"


def deep():
    tree = []
    for _ in range(100_000):
        tree = [tree]
    return tree


@pytest.mark.parametrize("payload", [object(), {1, 2}, float("nan"), "\ud800", deep()])
def test_a_payload_without_a_form_is_refused(payload):
    """Before anything is stored: a relay could do nothing about it."""
    with pytest.raises(InvalidInput, match="bytes, text or plain JSON"):
        made(payload)


@pytest.mark.parametrize(
    "options",
    [
        {"topic": ""},
        {"topic": "with space"},
        {"topic": "a" * 201},
        {"topic": "line\n"},
        {"topic": "star.*"},
        {"topic": None},
        {"key": ""},
        {"key": "x" * 256},
        {"key": "ü"},
        {"key": "a\nb"},
        {"key": 7},
        {"aggregate": ""},
        {"aggregate": "a\x00b"},
        {"aggregate": "\ud800"},
        {"aggregate": "x" * 256},
        {"content_type": ""},
        {"content_type": "a\nb"},
        {"content_type": "ü"},
        {"deliver_at": datetime(2024, 1, 1)},  # noqa: DTZ001 — that is what is refused.
        {"deliver_at": 12},
    ],
    ids=repr,
)
def test_what_a_store_or_a_target_could_not_take_is_refused(options):
    """A header, a subject, a routing key and every store's text can hold what is let through."""
    with pytest.raises(InvalidInput):
        made({}, **options)


def test_a_body_has_a_limit():
    assert made(b"x" * BODY_LIMIT_BYTES).body
    with pytest.raises(InvalidInput, match="1,000,001 bytes"):
        made(b"x" * (BODY_LIMIT_BYTES + 1))


def test_an_instant_is_never_early():
    """In any time zone, rounded up to the next millisecond; one before the epoch means at once."""
    at = datetime(2024, 5, 1, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=2)))
    assert made(deliver_at=at).deliver_at_ms == 1_714_557_600_001
    assert made(deliver_at=datetime(1960, 1, 1, tzinfo=UTC)).deliver_at_ms == 0
    assert made().deliver_at_ms == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no\x00"), "ValueError: no\ufffd"),
        (ValueError(), "ValueError"),
        (ValueError("\ud800"), "ValueError: ?"),
        (ValueError("x" * 2_000), "ValueError: " + "x" * 988),
    ],
)
def test_errors_are_stored_as_short_plain_text(error, text):
    assert error_text(error) == text


def test_an_error_that_cannot_be_shown_is_an_error_all_the_same():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert error_text(Mute()) == "Mute: (its message cannot be shown)"


# What may happen to one.


def test_a_new_entry_waits_for_its_time():
    assert entry().due_at_ms == NOW
    assert (entry().caller, entry().origin) == (KEY.caller, KEY.text)
    later = StagedEntry("k", "t", "c", b"", None, NOW + 5)
    found = entries.new_entry(later, 1, None, NOW)
    assert (found.due_at_ms, found.caller, found.origin) == (NOW + 5, None, None)
    assert not entries.is_claimable(found, NOW + 4)
    assert entries.is_claimable(found, NOW + 5)


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({}, EntryCondition.WAITING),
        ({"token": TOKEN, "due_at_ms": NOW + 1}, EntryCondition.CLAIMED),
        ({"token": TOKEN, "due_at_ms": NOW}, EntryCondition.WAITING),
        ({"due_at_ms": NOW + 1}, EntryCondition.WAITING),
        ({"state": EntryState.DEAD}, EntryCondition.DEAD),
        ({"state": EntryState.DELIVERED}, EntryCondition.DELIVERED),
        ({"state": EntryState.DISCARDED}, EntryCondition.DISCARDED),
    ],
)
def test_an_entry_is_claimed_while_its_lease_holds(changes, condition):
    assert entries.condition_of(entry(**changes), NOW) is condition


def test_dead_entries_hold_back_only_where_they_block():
    for state in EntryState:
        found = entry(state=state)
        waits = state is EntryState.WAITING
        assert entries.holds_back(found, dead_blocks=False) == waits
        assert entries.holds_back(found, dead_blocks=True) == (waits or state is EntryState.DEAD)


def test_a_claim_starts_a_lease_and_counts_no_try():
    found = entries.claimed(entry(), EntryClaim(TOKEN, 1, LEASE_MS), NOW)
    assert found == replace(held(), attempts=0)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_start_counts_the_try_and_extends_the_lease(is_alone):
    start = EntryStart(7, TOKEN, 3, 5_000, is_alone)
    found = entries.written(held(), start, NOW)
    assert (found.attempts, found.due_at_ms) == (3, NOW + 5_000)
    assert found.open_try is (OpenTry.ALONE if is_alone else OpenTry.SHARED)
    assert entries.written(held(), replace(start, lease_ms=1), NOW).due_at_ms == NOW + LEASE_MS


def test_what_begins_with_a_claim_has_no_open_try():
    found = [entry(id=1), entry(id=2, open_try=OpenTry.SHARED), entry(id=3), entry(id=4)]
    chosen = entries.beginning(found, EntryClaim(TOKEN, 4, LEASE_MS, begins=2))
    assert [item.id for item in chosen] == [1, 3]


def test_a_start_needs_the_token():
    """What a relay has only queued may be over by now, or another one's."""
    start = EntryStart(7, TOKEN, 3, 5_000)
    assert entries.written(None, start, NOW) is None
    assert entries.written(entry(token=OTHER_TOKEN), start, NOW) is None
    assert entries.written(held(state=EntryState.DISCARDED), start, NOW) is None


@pytest.mark.parametrize("state", [s for s in EntryState if s is not EntryState.DISCARDED])
def test_an_ending_needs_the_token(state):
    """A zombie, a stranger and a late word about something that is over change nothing."""
    ending = EntryEnding(7, TOKEN, state)
    assert entries.settled(None, ending, NOW) is None
    assert entries.settled(held(), replace(ending, token=OTHER_TOKEN), NOW) is None
    assert entries.settled(entry(), ending, NOW) is None
    assert entries.settled(held(state=EntryState.DELIVERED), ending, NOW) is None
    assert entries.settled(held(), ending, NOW) is not None


def test_endings_write_what_they_say():
    tried = EntryEnding(7, TOKEN, EntryState.WAITING, 50, error="no")
    assert entries.settled(held(), tried, NOW) == entry(
        attempts=1, due_at_ms=NOW + 50, last_error="no"
    )
    returned = EntryEnding(7, TOKEN, EntryState.WAITING, attempts=0, open_try=OpenTry.SHARED)
    assert entries.written(held(), returned, NOW) == entry(open_try=OpenTry.SHARED)
    delivered = EntryEnding(7, TOKEN, EntryState.DELIVERED, keep_ms=9)
    assert entries.settled(held(last_error="before"), delivered, NOW) == entry(
        state=EntryState.DELIVERED,
        attempts=1,
        due_at_ms=NOW + LEASE_MS,
        settled_at_ms=NOW,
        expires_at_ms=NOW + 9,
        last_error="before",
    )
    buried = EntryEnding(7, TOKEN, EntryState.DEAD, keep_ms=9, error="end")
    found = entries.settled(held(), buried, NOW)
    assert (found.state, found.expires_at_ms, found.last_error) == (EntryState.DEAD, None, "end")


def test_a_lease_is_extended_by_its_owner_and_never_shortened():
    assert entries.extended(held(), TOKEN, 5_000, NOW).due_at_ms == NOW + 5_000
    assert entries.extended(held(), TOKEN, 1, NOW).due_at_ms == NOW + LEASE_MS
    assert entries.extended(held(), OTHER_TOKEN, 5_000, NOW) is None
    assert entries.extended(None, TOKEN, 5_000, NOW) is None
    assert entries.extended(held(state=EntryState.DEAD), TOKEN, 5_000, NOW) is None


def test_an_operator_decides_about_what_is_neither_under_way_nor_over():
    dead = entry(state=EntryState.DEAD, attempts=9, settled_at_ms=1, last_error="e")
    changed, decision = entries.operated(dead, EntryCommand.RETRY, NOW)
    assert decision is Decision.APPLY
    assert changed == entry(last_error="e")
    changed, decision = entries.operated(dead, EntryCommand.DISCARD, NOW)
    assert (changed.state, changed.expires_at_ms) == (
        EntryState.DISCARDED,
        NOW + DISCARDED_KEEP_MS,
    )
    for refused in (None, held(), entry(state=EntryState.DELIVERED)):
        for command in EntryCommand:
            assert entries.operated(refused, command, NOW) == (None, Decision.REFUSE)


# Trying again.


def test_waits_grow_and_spread_and_have_an_end():
    back_off = BackOff(timedelta(seconds=1), timedelta(seconds=10), 2.0)
    longest = [back_off.wait_ms(attempts, lambda: 1.0) for attempts in range(1, 7)]
    assert longest == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]
    shortest = [back_off.wait_ms(attempts, lambda: 0.0) for attempts in range(1, 4)]
    assert shortest == [500, 1_000, 2_000]
    assert back_off.wait_ms(0, lambda: 1.0) == 1_000
    assert back_off.wait_ms(10**9, lambda: 1.0) == 10_000


@pytest.mark.parametrize(
    "settings",
    [
        {"first": timedelta(0)},
        {"first": timedelta(seconds=2), "longest": timedelta(seconds=1)},
        {"growth": 0.5},
        {"growth": 1_000.0},
    ],
)
def test_a_back_off_that_does_not_back_off_is_refused(settings):
    with pytest.raises(InvalidInput, match="back-off"):
        BackOff(**settings)


# Hints and the port.


def test_hints_reach_those_who_listen():
    hints, told = Hints(), []
    hints.tell()
    first, second = (lambda: told.append(1)), (lambda: told.append(2))
    hints.listen(first)
    hints.listen(second)
    hints.tell()
    hints.forget(first)
    hints.forget(first)
    hints.tell()
    assert told == [1, 2, 2]


def test_a_store_without_an_outbox_is_refused_by_name():
    class Plain:
        capabilities = Capabilities(Waits.NEVER)

    class Full:
        capabilities = Capabilities(Waits.NEVER, has_outbox=True)
        outbox = "the outbox"

    with pytest.raises(InvalidInput, match="Plain has no outbox"):
        outbox_of(Plain())
    assert outbox_of(Full()) == "the outbox"


def test_json_bodies_are_plain_json():
    """Receivers need no library of ours to read them."""
    assert json.loads(made({"a": [1, "ü"]}).body) == {"a": [1, "ü"]}


def test_tries_are_counted_in_words():
    assert [tries_text(count) for count in (0, 1, 2)] == ["0 tries", "1 try", "2 tries"]


@pytest.mark.parametrize("key", [natural_key("payout", 42), str(natural_key("payout", 42))])
def test_a_key_that_receivers_refuse_is_not_staged(key):
    """A sender who could choose such a key could take somebody else's in advance."""
    with pytest.raises(InvalidInput, match="write one of your own"):
        staged_entry(key, "payouts", {}, aggregate=None, deliver_at=None, content_type=None)

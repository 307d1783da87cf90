"""The parts around the engine: cache, lease, attempt, reports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core.attempt import Attempt
from retrysafe.core.cache import ReplayCache
from retrysafe.core.events import ALL_KINDS, Event, EventKind, Reporter
from retrysafe.core.flights import Flight, is_same_request
from retrysafe.core.keys.key import child_key
from retrysafe.core.keys.secret import Secrets
from retrysafe.core.lease import RENEWALS_PER_LEASE, Lease
from retrysafe.core.model import ClaimAnswer, Condition, Decision, Payload
from retrysafe.core.settings import Settings
from retrysafe.errors import ClaimLost, SecretMissing
from tests.core.building import KEY, MARK, OTHER_MARK, TOKEN, call
from tests.core.driving import Clock, ManualClock, ports_over

SECRET = b"0123456789abcdef"


# The cache of finished outcomes.


REQUEST = Flight((MARK, OTHER_MARK), "charge")


def outcome(size_bytes: int = 1) -> Payload:
    return Payload("bytes.1", b"", b"x" * size_bytes)


def keep(
    cache: ReplayCache,
    digest: bytes,
    item: Payload,
    *,
    at: float = 0,
    remaining_ms: int = 10**9,
) -> None:
    cache.keep(digest, REQUEST, item, 3, asked_monotonic=at, remaining_ms=remaining_ms)


def test_an_outcome_is_found_until_its_time_is_over():
    """The time counts from when the store was asked, not from when it answered."""
    cache, item = ReplayCache(seconds=2.0), outcome()
    keep(cache, b"a", item, at=100.0)
    found = cache.find(b"a", 101.999)
    assert found.payload == item
    assert (found.attempt, found.operation) == (3, "charge")
    assert is_same_request(found, REQUEST)
    assert found.fingerprints == REQUEST.fingerprints
    assert cache.find(b"a", 102.0) is None


def test_an_outcome_never_outlives_the_records_window():
    cache = ReplayCache(seconds=2.0)
    keep(cache, b"a", outcome(), at=100.0, remaining_ms=500)
    assert cache.find(b"a", 100.499) is not None
    assert cache.find(b"a", 100.5) is None


@pytest.mark.parametrize("remaining_ms", [0, -5])
def test_a_window_that_is_over_is_not_kept(remaining_ms):
    cache = ReplayCache()
    keep(cache, b"a", outcome(), remaining_ms=remaining_ms)
    assert cache.find(b"a", -1.0) is None


def test_the_oldest_goes_first_when_there_are_too_many():
    cache = ReplayCache(new_limit=2)
    for digest in (b"a", b"b", b"c"):
        keep(cache, digest, outcome())
    assert [cache.find(digest, 0) is not None for digest in (b"a", b"b", b"c")] == [
        False,
        True,
        True,
    ]


def test_keeping_again_makes_an_outcome_the_newest():
    cache = ReplayCache(new_limit=2)
    for digest in (b"a", b"b", b"a", b"c"):
        keep(cache, digest, outcome())
    assert [cache.find(digest, 0) is not None for digest in (b"a", b"b", b"c")] == [
        True,
        False,
        True,
    ]


def test_what_was_asked_for_again_is_not_pushed_out_by_what_is_new():
    cache = ReplayCache(new_limit=2)
    keep(cache, b"a", outcome())
    cache.move(b"a")
    for digest in (b"b", b"c", b"d"):
        keep(cache, digest, outcome())
    assert [cache.find(digest, 0) is not None for digest in (b"a", b"b", b"c", b"d")] == [
        True,
        False,
        True,
        True,
    ]


def test_of_those_that_were_asked_for_again_the_oldest_goes_first():
    cache = ReplayCache(new_limit=1, replayed_limit=2)
    for digest in (b"a", b"b", b"c"):
        keep(cache, digest, outcome())
        cache.move(digest)
    assert [cache.find(digest, 0) is not None for digest in (b"a", b"b", b"c")] == [
        False,
        True,
        True,
    ]


def test_the_new_outcome_of_a_key_takes_the_place_of_one_that_was_asked_for_again():
    cache = ReplayCache()
    keep(cache, b"a", outcome(1))
    cache.move(b"a")
    keep(cache, b"a", outcome(2))
    assert cache.find(b"a", 0).payload == outcome(2)
    cache.forget(b"a")
    assert cache.find(b"a", 0) is None


def test_moving_what_is_not_there_moves_nothing():
    cache = ReplayCache()
    cache.move(b"a")
    assert cache.find(b"a", 0) is None
    keep(cache, b"a", outcome())
    cache.move(b"a")
    cache.move(b"a")
    assert cache.find(b"a", 0) is not None


def test_one_large_outcome_does_not_push_out_the_small_ones():
    cache = ReplayCache(bytes_limit=160)
    keep(cache, b"a", outcome(10))
    keep(cache, b"b", outcome(11))
    assert cache.find(b"a", 0) is not None
    assert cache.find(b"b", 0) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(0, 12), st.sampled_from(["keep", "move", "forget"])
        ),
        max_size=60,
    )
)
def test_the_cache_is_bounded_and_counts_right(actions):
    """After any history all bounds hold, and forgetting everything gives every byte back."""
    cache = ReplayCache(new_limit=4, replayed_limit=2, bytes_limit=160)
    for number, size_bytes, action in actions:
        if action == "keep":
            keep(cache, bytes([number]), outcome(size_bytes))
        elif action == "move":
            cache.move(bytes([number]))
        else:
            cache.forget(bytes([number]))
        sizes = [
            [len(kept[4]) + len(kept[5]) for kept in part.values()]
            for part in (cache.new, cache.replayed)
        ]
        assert len(sizes[0]) <= 4
        assert len(sizes[1]) <= 2
        assert cache._new_bytes == sum(sizes[0]) <= 40
        assert cache._replayed_bytes == sum(sizes[1]) <= 120
        assert cache.new.keys().isdisjoint(cache.replayed)
    for number in range(10):
        cache.forget(bytes([number]))
    assert (cache._new_bytes, cache._replayed_bytes) == (0, 0)


def test_counts_that_a_signal_has_left_too_high_are_put_right():
    """It may raise between an entry's end and its count; the cache must go on all the same."""
    cache = ReplayCache(bytes_limit=160)
    cache._new_bytes = cache._replayed_bytes = 1_000
    keep(cache, b"a", outcome())
    keep(cache, b"b", outcome())
    cache.move(b"b")
    keep(cache, b"c", outcome())
    cache.move(b"c")
    keep(cache, b"d", outcome())
    assert cache.find(b"c", 0) is not None
    assert cache.find(b"d", 0) is not None
    assert (cache._new_bytes, cache._replayed_bytes) == (1, 1)


# The lease as its owner knows it.


def lease(**changes: object) -> Lease:
    settings = {
        "key": KEY,
        "token": TOKEN,
        "lease_ms": 30_000,
        "remaining_ms": 30_000,
        "ends_at_ms": 1_700_000_000_000,
        "asked_monotonic": 100.0,
    }
    return Lease(**{**settings, **changes})


def test_the_local_end_counts_from_before_the_claim_was_sent():
    """However slow the store was, the owner never believes in a later end than the store does."""
    item = lease()
    assert item.seconds_left(100.0) == 30.0
    assert item.seconds_left(129.0) == 1.0
    assert not item.is_lost(129.999)
    assert item.is_lost(130.0)
    assert item.seconds_left(131.0) == 0.0


def test_two_renewals_may_fail_before_a_lease_ends():
    item = lease()
    assert item.renew_monotonic == 110.0
    assert RENEWALS_PER_LEASE == 3


def test_a_confirmed_claim_is_renewed_by_what_is_left_of_it():
    item = lease(remaining_ms=3_000)
    assert item.renew_monotonic == 101.0
    assert item.is_lost(103.0)


def test_a_renewal_moves_the_end():
    item = lease()
    item.renewed(asked_monotonic=110.0, remaining_ms=30_000, ends_at_ms=1_700_000_010_000)
    assert item.seconds_left(130.0) == 10.0
    assert item.renew_monotonic == 120.0
    assert item.ends_at_ms == 1_700_000_010_000


def test_after_an_unanswered_renewal_the_next_try_comes_sooner():
    item = lease()
    item.put_off(110.0)
    assert item.renew_monotonic == 112.5
    assert item.seconds_left(110.0) == 20.0  # Nothing was gained.


def test_a_revoked_lease_is_lost_for_good():
    item = lease()
    item.revoke()
    assert item.is_lost(100.0)
    assert item.seconds_left(100.0) == 0.0
    assert not item.may_renew(100.0)
    item.renewed(asked_monotonic=100.0, remaining_ms=30_000, ends_at_ms=0)
    assert item.is_lost(100.0)


def test_the_run_limit_ends_renewal_and_not_the_lease():
    item = lease(run_limit_seconds=60.0)
    assert item.may_renew(159.999)
    assert not item.may_renew(160.0)
    assert not item.is_lost(129.0)
    assert lease().may_renew(10**9)


# An attempt as the operation sees it.


def attempt(item: Lease, now: float, secret: bytes | None = SECRET, number: int = 1) -> Attempt:
    decision = Decision.ADMIT if number == 1 else Decision.TAKE_OVER
    granted = ClaimAnswer(decision, Condition.ABSENT, number)
    ports = ports_over(None, ManualClock(Clock(now)))
    return Attempt(call(), item, granted, ports, Settings(secrets=Secrets(secret)))


def test_an_attempt_tells_its_claim():
    made = attempt(lease(), 120.0, number=2)
    assert (made.key, made.operation, made.number, made.token) == (KEY, "shop.pay", 2, TOKEN)
    assert not made.is_first
    assert attempt(lease(), 120.0).is_first
    assert made.time_left == timedelta(seconds=10)
    assert made.deadline == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert repr(made) == "Attempt(Key('order-1', caller='tenant-1'), number=2)"


def test_an_attempt_stops_when_its_claim_may_be_lost():
    live, late = attempt(lease(), 129.0), attempt(lease(), 130.0)
    assert not live.is_lost
    live.raise_if_lost()
    assert late.is_lost
    assert late.time_left == timedelta(0)
    with pytest.raises(ClaimLost) as caught:
        late.raise_if_lost()
    assert caught.value.key == "order-1"


def test_an_attempts_child_keys_are_the_keys_of_its_key():
    """They are the same in every attempt, because attempt and token are no part of them."""
    first, second = attempt(lease(), 100.0), attempt(lease(token=b"U" * 16), 100.0, number=2)
    assert first.child_key("stripe", 1) == second.child_key("stripe", 1)
    assert first.child_key("stripe", 1) == child_key(SECRET, KEY, "stripe", 1)


def test_an_attempt_without_a_secret_makes_no_child_keys():
    with pytest.raises(SecretMissing):
        attempt(lease(), 100.0, secret=None).child_key("stripe")


# Reports.


def test_a_reporter_tells_everything_about_an_event():
    heard: list[Event] = []
    asked = call(operation="shop.pay")
    Reporter(heard.append)(EventKind.REPLAYED, asked, 2, "why", source="process")
    Reporter(heard.append).beside(EventKind.ABANDONED, KEY, "shop.pay", 3, "late")
    assert heard == [
        Event(EventKind.REPLAYED, KEY, "shop.pay", 2, "why", "process"),
        Event(EventKind.ABANDONED, KEY, "shop.pay", 3, "late"),
    ]
    assert heard[0].result is None


def test_a_reporter_tells_only_what_is_wanted():
    heard: list[Event] = []
    report = Reporter(heard.append, frozenset({EventKind.FAILED}))
    for kind in EventKind:
        report(kind, call())
        report.beside(kind, KEY)
    assert [event.kind for event in heard] == [EventKind.FAILED] * 2


def test_without_a_listener_nothing_is_reported():
    report = Reporter(None)
    for kind in ALL_KINDS:
        assert report(kind, call()) is None
    assert frozenset(EventKind) == ALL_KINDS

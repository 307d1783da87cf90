"""Flights share one leader's news; renewing keeps the leases of all attempts alive."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from retrysafe.core.cache import ReplayCache
from retrysafe.core.events import Event, EventKind, Reporter
from retrysafe.core.flights import Flight, Flights, Phase, is_same_request
from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.model import Decision, ExtendAnswer, Fingerprint, Payload
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.core.renewal import due_leases, next_renewal, renew
from retrysafe.errors import StoreRejected, StoreUnavailable
from tests.core.building import MARK, OTHER_MARK, call
from tests.core.driving import World, drive


class Bell:
    """A signal that counts."""

    def __init__(self) -> None:
        self.rung = 0

    def set(self) -> None:
        self.rung += 1


def flights() -> Flights:
    return Flights(nullcontext())


def test_the_first_to_join_leads_and_the_others_follow():
    sky = flights()
    flight, other = Flight((MARK,), "charge"), Flight((OTHER_MARK,), "charge")
    assert sky.join(b"a", flight, 0.0) is flight
    assert flight.phase is Phase.CLAIMING
    assert sky.join(b"a", other, 0.0) is flight
    assert sky.join(b"b", other, 0.0) is other
    assert len(sky) == 2


def test_landing_a_flight_that_never_flew_changes_nothing():
    """Whoever follows lands its own flight all the same: a signal may come at any line."""
    sky = flights()
    flight = sky.join(b"a", Flight((MARK,), "charge"), 0.0)
    sky.land(b"a", Flight((MARK,), "charge"))
    assert len(sky) == 1
    assert flight.phase is Phase.CLAIMING


def test_an_operator_ends_the_hold_of_a_flight():
    sky = flights()
    flight = sky.join(b"a", Flight((MARK,), "charge"), 0.0)
    sky.revoke(b"a")  # Still claiming: there is no lease to end.
    flight.lease = lease(b"a")
    sky.revoke(b"b")
    assert sky.join(b"a", Flight((MARK,), "charge"), 0.0) is flight
    sky.revoke(b"a")
    assert sky.join(b"a", Flight((MARK,), "charge"), 0.0) is not flight


class _Replacing:
    """A lock in front of which somebody else replaces a flight that was given up."""

    def __init__(self) -> None:
        self.sky = Flights(self)
        self.rival = Flight((MARK,), "charge")

    def __enter__(self) -> None:
        self.sky._by_digest[b"a"] = self.rival

    def __exit__(self, *error: object) -> None:
        pass


def test_a_flight_that_was_given_up_is_replaced_once():
    """Two who find that its owner has lost the key agree on the next leader."""
    race = _Replacing()
    flight = race.sky.join(b"a", Flight((MARK,), "charge"), 0.0)
    flight.lease = lease(b"a")
    flight.lease.revoke()
    assert race.sky.join(b"a", Flight((MARK,), "charge"), 0.0) is race.rival


class _Held:
    """A lock that tells whether it is held."""

    def __init__(self) -> None:
        self.is_held = False

    def __enter__(self) -> None:
        self.is_held = True

    def __exit__(self, *error: object) -> None:
        self.is_held = False


def test_threads_that_share_an_engine_land_and_remember_one_at_a_time():
    """Else one could take away the flight that has replaced its own, or miscount the cache."""
    lock = _Held()
    seen: list[tuple[str, bool]] = []

    class Watched(dict[bytes, Flight]):
        def pop(self, digest: bytes, *default: Any) -> Any:
            seen.append(("landed", lock.is_held))
            return super().pop(digest, *default)

    class Cache(ReplayCache):
        def keep(self, *outcome: Any) -> None:
            seen.append(("remembered", lock.is_held))
            super().keep(*outcome)

        def move(self, digest: bytes) -> None:
            seen.append(("asked for again", lock.is_held))
            super().move(digest)

    world = World()
    process, other = world.first, world.process()
    for engine in (process.engine, other.engine):
        engine._lock = engine._flights._lock = engine._runner._lock = lock
        engine._flights._by_digest = Watched()
        engine._cache = engine._runner._cache = Cache()
    assert not process.answer(call()).replayed
    assert process.answer(call()).replayed
    assert process.answer(call()).replayed
    again = ("asked for again", True)
    assert seen == [("remembered", True), ("landed", True), again, again]
    seen.clear()
    assert other.answer(call()).replayed
    assert seen == [("remembered", True), ("asked for again", True), ("landed", True)]


def test_a_replay_from_the_store_was_asked_for_again():
    """Else it would go as soon as a thousand others have run, and be read again and again."""
    world = World(cache=True)
    assert not world.first.answer(call()).replayed
    second = world.process()
    assert second.answer(call()).replayed
    mine, other = world.first.engine._cache, second.engine._cache
    assert (len(mine.new), len(mine.replayed)) == (1, 0)
    assert (len(other.new), len(other.replayed)) == (0, 1)


def test_after_landing_the_next_one_leads_a_new_flight():
    sky = flights()
    flight = sky.join(b"a", Flight((MARK,), "charge"), 0.0)
    sky.land(b"a", flight)
    assert flight.phase is Phase.LANDED
    assert len(sky) == 0
    again = Flight((MARK,), "charge")
    assert sky.join(b"a", again, 0.0) is again


def test_news_wake_everybody_who_enlisted_and_only_once():
    sky = flights()
    flight = sky.join(b"a", Flight((MARK,), "charge"), 0.0)
    bells = [Bell(), Bell()]
    assert all(sky.enlist(flight, Phase.CLAIMING, bell) for bell in bells)
    sky.enter(flight, Phase.RUNNING)
    sky.land(b"a", flight)
    assert [bell.rung for bell in bells] == [1, 1]


def test_landing_wakes_those_who_wait_for_the_end():
    sky = flights()
    flight = sky.join(b"a", Flight((MARK,), "charge"), 0.0)
    sky.enter(flight, Phase.RUNNING)
    bell = Bell()
    assert sky.enlist(flight, Phase.RUNNING, bell)
    sky.land(b"a", flight)
    assert bell.rung == 1


def test_nobody_waits_for_news_that_came_already():
    """Between looking at the phase and enlisting the leader may move on: no lost wake-up."""
    sky = flights()
    flight = sky.join(b"a", Flight((MARK,), "charge"), 0.0)
    sky.enter(flight, Phase.RUNNING)
    bell = Bell()
    assert not sky.enlist(flight, Phase.CLAIMING, bell)
    sky.land(b"a", flight)
    assert bell.rung == 0


def test_a_flight_knows_how_long_the_running_attempt_may_last():
    flight = Flight((MARK,), "charge")
    assert flight.seconds_left(100.0) == 0.0
    flight.conflict_ends_monotonic = 105.0
    assert flight.seconds_left(100.0) == 5.0
    assert flight.seconds_left(106.0) == 0.0
    flight.lease = lease(b"t", asked=100.0)
    assert flight.seconds_left(101.0) == 29.0


def test_a_flight_hands_over_what_was_shared():
    flight, payload = Flight((MARK,), "charge"), Payload("json.1", b"", b"1")
    flight.share(payload, 3)
    assert (flight.payload, flight.attempt) == (payload, 3)


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ([(1, b"a")], [(1, b"a")], True),
        ([(1, b"a")], [(1, b"b")], False),
        ([(2, b"x"), (1, b"a")], [(1, b"a")], True),
        ([(2, b"x"), (1, b"a")], [(1, b"b")], False),
        ([(1, b"a")], [(2, b"x"), (1, b"b")], False),
        ([(2, b"x"), (1, b"a")], [(2, b"x"), (1, b"b")], True),
        ([(1, b"a")], [(2, b"b")], True),
        ([], [(1, b"a")], True),
    ],
)
def test_requests_are_compared_under_the_first_rule_that_both_know(first, second, is_same):
    def marks(pairs: list[tuple[int, bytes]]) -> tuple[Fingerprint, ...]:
        return tuple(Fingerprint(*pair) for pair in pairs)

    assert is_same_request(Flight(marks(first), "a"), Flight(marks(second), "a")) is is_same


# Renewing.


def lease(token: bytes, *, asked: float = 0.0, run_limit: float | None = None) -> Lease:
    return Lease(
        key=Key(token.hex(), caller="c"),
        token=token,
        lease_ms=30_000,
        remaining_ms=30_000,
        ends_at_ms=0,
        asked_monotonic=asked,
        run_limit_seconds=run_limit,
    )


@dataclass
class Extends:
    """A store that only extends, with an answer or an exception per token."""

    answers: dict[bytes, object] = field(default_factory=dict)
    error: Exception | None = None
    batches: list[list[bytes]] = field(default_factory=list)
    joined: list[bytes] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    capabilities = Capabilities(Waits.NEVER, batch_limit=2)

    async def extend(self, extensions, timeout_seconds):
        self.timeouts.append(timeout_seconds)
        assert all(item.lease_ms == 30_000 for item in extensions)
        self.batches.append([item.token for item in extensions])
        self.joined += [item.token for item in extensions if item.is_joined]
        if self.error is not None:
            raise self.error
        applied = ExtendAnswer(Decision.APPLY, 30_000, 77)
        return [self.answers.get(item.token, applied) for item in extensions]


def renewed(store: Extends, leases: list[Lease], now: float = 15.0) -> list[Event]:
    heard: list[Event] = []
    drive(renew(store, leases, lambda: now, Reporter(heard.append)))
    return heard


def test_due_leases_are_those_at_their_time_that_may_be_renewed():
    due, nearly, early = lease(b"a"), lease(b"e", asked=1.0), lease(b"b", asked=9.0)
    over, revoked = lease(b"c", run_limit=5.0), lease(b"d")
    revoked.revoke()
    everything = [due, nearly, early, over, revoked]
    assert due_leases(everything, 9.9) == []
    assert due_leases(everything, 10.0) == [due, nearly]
    assert due_leases(everything, 19.0) == [due, nearly, early]
    assert due_leases([], 10.0) == []


def test_the_next_renewal_is_the_earliest_that_may_happen():
    """Leases past their run limit do not wake the heartbeat for ever."""
    assert next_renewal([lease(b"a", asked=2.0), lease(b"b", asked=1.0)], 5.0) == 11.0
    assert next_renewal([lease(b"c", run_limit=5.0), lease(b"a")], 5.0) == 10.0
    assert next_renewal([lease(b"c", run_limit=5.0)], 5.0) is None
    assert next_renewal([], 0.0) is None


def test_leases_are_renewed_in_batches_of_the_stores_size():
    leases = [lease(bytes([number])) for number in range(5)]
    store = Extends()
    assert renewed(store, leases) == []
    assert [len(batch) for batch in store.batches] == [2, 2, 1]
    assert [item.seconds_left(15.0) for item in leases] == [30.0] * 5
    assert [item.ends_at_ms for item in leases] == [77] * 5


@pytest.mark.parametrize(("now", "timeout_seconds"), [(10.0, 5.0), (15.0, 5.0), (17.5, 7.5)])
def test_a_renewal_waits_for_a_part_of_its_lease(now, timeout_seconds):
    """A silent connection costs one try; a store that is slow has longer for the next ones."""
    store = Extends()
    renewed(store, [lease(b"a"), lease(b"b", asked=9.0)][: 1 if now > 15 else 2], now)
    assert store.timeouts == [timeout_seconds]


def test_a_lost_lease_is_revoked_and_its_neighbour_renewed():
    lost, kept = lease(b"a"), lease(b"b")
    renewed(Extends({b"a": ExtendAnswer(Decision.LOST)}), [lost, kept])
    assert lost.is_revoked
    assert kept.seconds_left(15.0) == 30.0


def test_a_lease_is_not_revoked_by_the_commit_that_ended_its_attempt():
    """The operation may still be at work after its own commit; it is asked for no more."""
    joined = lease(b"a")
    joined.may_be_settled = True
    assert renewed(Extends({b"a": ExtendAnswer(Decision.LOST)}), [joined]) == []
    assert not joined.is_lost(15.0)
    assert joined.seconds_left(15.0) == 15.0
    assert next_renewal([joined], 15.0) is None


def test_a_lease_with_a_step_in_a_users_transaction_is_revoked_when_it_is_lost():
    """A step ends nothing, so only somebody else can have taken the key."""
    joined = lease(b"a")
    joined.is_joined = True
    renewed(Extends({b"a": ExtendAnswer(Decision.LOST)}), [joined])
    assert joined.is_revoked


def test_the_store_is_told_which_leases_a_users_transaction_may_hold():
    joined, plain = lease(b"a"), lease(b"b")
    joined.is_joined = True
    store = Extends()
    renewed(store, [joined, plain])
    assert store.joined == [b"a"]


def test_a_refused_row_is_tried_again_soon_and_its_neighbour_renewed():
    refused, kept = lease(b"a"), lease(b"b")
    (event,) = renewed(Extends({b"a": StoreRejected("no")}), [refused, kept])
    assert (event.kind, event.key, event.detail) == (EventKind.RENEWAL_FAILED, refused.key, "no")
    assert refused.renew_monotonic == 17.5
    assert refused.seconds_left(15.0) == 15.0
    assert kept.seconds_left(15.0) == 30.0


@pytest.mark.parametrize(
    ("error", "detail"),
    [(StoreUnavailable("down"), "down"), (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug")],
)
def test_no_error_of_a_store_ends_the_renewing(error, detail):
    """One exception out of here would end the heartbeat, and with it every other lease."""
    leases = [lease(b"a"), lease(b"b"), lease(b"c")]
    store = Extends(error=error)
    heard = renewed(store, leases)
    assert [event.detail for event in heard] == [detail] * 3
    assert len(store.batches) == 2
    assert [item.is_revoked for item in leases] == [False] * 3
    assert {item.renew_monotonic for item in leases} == {17.5}


class _LandsWhenAsked(dict[bytes, Flight]):
    """A flight is taken away just after it was looked up, as the garbage collector may do it."""

    def get(self, digest: bytes, default: Any = None) -> Any:
        found = super().get(digest, default)
        super().pop(digest, None)
        return found


def test_a_flight_that_is_taken_away_while_it_lands_has_landed():
    """Nobody who lands his own flight hears of a missing entry."""
    flights, flight = Flights(threading.RLock()), Flight((), "charge")
    flights._by_digest = _LandsWhenAsked({b"digest": flight})
    flights.land(b"digest", flight)
    assert flight.phase is Phase.LANDED
    assert len(flights) == 0


def test_who_signs_up_as_the_flight_lands_is_told_that_it_is_late():
    """Its signal is gone from the list by then, with all the others."""
    flights, flight = Flights(threading.RLock()), Flight((), "charge")

    class Waiters(list[Any]):
        def append(self, signal: Any) -> None:
            super().append(signal)
            flights.land(b"digest", flight)

    class Signalled:
        is_set = False

        def set(self) -> None:
            self.is_set = True

    flight.waiters, signal = Waiters(), Signalled()
    assert not flights.enlist(flight, Phase.CLAIMING, signal)
    assert signal.is_set

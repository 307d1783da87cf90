"""The relay's engine: what is claimed, delivered, tried again, buried and given back."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta

import pytest

from retrysafe import StoreUnavailable
from retrysafe.core.outbox.entries import BackOff, EntryClaim, EntryCommand, OpenTry
from retrysafe.errors import DeliveryFailed, PolicyInvalid, SchemaMissing
from retrysafe.relay import RelayPolicy
from retrysafe.relay.delivery_loop import RelayReport
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.testing import Moment
from tests.relay.scripted import Scene, ScriptedPool

REFUSED = ValueError("refused")


# Delivering.


def test_what_is_due_is_delivered_and_then_the_relay_is_idle():
    scene = Scene()
    scene.stage("a", "b")
    report = scene.run(lambda: scene.pool.end(None, None))
    assert report == RelayReport(delivered=2)
    assert scene.states() == {"a": "delivered", "b": "delivered"}
    assert scene.pool.taken == ["a", "b"]


def test_an_entry_is_claimed_before_it_is_delivered():
    """A rival that looks while the delivery is under way gets nothing."""
    scene = Scene()
    scene.stage("a")
    rival = []

    def look():
        claim = EntryClaim(mint_token(), 10, 1_000)
        rival.extend(run_sync(scene.store.outbox.claim(claim)).entries)
        scene.pool.end()

    scene.run(look)
    assert (rival, scene.states()) == ([], {"a": "delivered"})


def test_an_aggregate_is_delivered_in_its_order():
    """The next entry is begun only when the one before it is delivered."""
    scene = Scene()
    scene.stage("a1", "a2", "a3", aggregate="a")
    scene.stage("b1", aggregate="b")
    seen = []

    def step(name):
        def act():
            seen.append(sorted(item.body.decode() for item in scene.pool.begun))
            scene.pool.end(name=name)

        return act

    scene.run(*(step(name) for name in ("a1", "a2", "b1", "a3")))
    assert seen == [["a1", "b1"], ["a2", "b1"], ["a3", "b1"], ["a3"]]


def test_a_failing_head_waits_and_holds_its_aggregate():
    scene = Scene(back_off=BackOff(timedelta(seconds=10), timedelta(seconds=10)))
    scene.stage("a1", "a2", aggregate="a")
    report = scene.run(lambda: scene.pool.end(REFUSED))
    assert report == RelayReport(failed=1)
    assert scene.stored("a1").entry.last_error == "ValueError: refused"
    assert scene.run() == report
    scene.pass_time(7.5)
    scene.run(scene.pool.end, scene.pool.end)
    assert scene.pool.taken == ["a1", "a1", "a2"]


def test_tries_are_spaced_by_the_back_off():
    """Half of it for sure, the rest by chance; here chance gives the middle."""
    scene = Scene(back_off=BackOff(timedelta(seconds=8), timedelta(seconds=100)))
    scene.stage("a")
    waits = []
    for _ in range(3):
        scene.run(lambda: scene.pool.end(REFUSED))
        stored = scene.stored("a")
        waits.append(stored.entry.due_at_ms - stored.now_ms)
        scene.pass_time(waits[-1] / 1000)
    assert waits == [6_000, 12_000, 24_000]


def test_a_target_may_ask_for_more_time_and_not_for_less():
    scene = Scene(back_off=BackOff(timedelta(seconds=8), timedelta(seconds=8)))
    scene.stage("a")
    for asked, wait_ms in ((60, 60_000), (1, 6_000)):
        error = DeliveryFailed("busy", retry_after=timedelta(seconds=asked))
        scene.run(lambda error=error: scene.pool.end(error))
        stored = scene.stored("a")
        assert stored.entry.due_at_ms - stored.now_ms == wait_ms
        scene.pass_time(60)


# The end of trying.


def test_an_entry_is_dead_after_its_tries(caplog):
    """With the last error for an operator, and a line in the log at the level of errors."""
    scene = Scene(attempt_limit=2, back_off=BackOff(timedelta(seconds=1), timedelta(seconds=1)))
    scene.stage("a1", "a2", aggregate="a")
    scene.run(lambda: scene.pool.end(ValueError("first")))
    scene.pass_time(1)
    report = scene.run(lambda: scene.pool.end(ValueError("second")))
    assert report == RelayReport(failed=1, dead=1)
    assert scene.states() == {"a1": "dead", "a2": "waiting"}
    assert scene.stored("a1").entry.last_error == "ValueError: second"
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert "dead after 2 tries" in caplog.text
    # By the number, which is what commands take.
    assert "entry 1 (entry:" in caplog.text


def test_a_dead_entry_frees_its_aggregate_where_that_is_asked_for():
    scene = Scene(attempt_limit=1, dead_blocks=False)
    scene.stage("a1", "a2", aggregate="a")
    scene.run(lambda: scene.pool.end(REFUSED), scene.pool.end)
    assert scene.states() == {"a1": "dead", "a2": "delivered"}


def test_a_final_failure_is_not_tried_again():
    scene = Scene(attempt_limit=100)
    scene.stage("a")
    report = scene.run(lambda: scene.pool.end(DeliveryFailed("gone", is_final=True)))
    assert report == RelayReport(dead=1)
    assert scene.states() == {"a": "dead"}


def test_an_entry_that_kills_its_relays_is_buried_without_another_try():
    """Each of them died with the entry in its hands, so no error was ever written."""
    scene = Scene(attempt_limit=3)
    scene.stage("a")
    for _ in range(3):
        assert scene.relay_dies() == ["a"]
    assert scene.run() == RelayReport(dead=1)
    assert scene.pool.taken == []
    assert "without a word" in scene.stored("a").entry.last_error


# Entries that end their relays.


def test_a_try_counts_when_its_delivery_begins():
    """What the pool has no room for is not counted, and neither is what a relay only claims."""
    scene = Scene(size=2)
    scene.stage("a", "b", "c", "d")
    seen = {}

    def look():
        seen.update({name: scene.stored(name).entry.attempts for name in "abcd"})
        scene.engine.stop()

    scene.run(look, lambda: scene.pool.end(None, None), until_idle=False)
    assert seen == {"a": 1, "b": 1, "c": 0, "d": 0}


def test_what_a_dead_relay_had_begun_is_delivered_alone():
    """One after the other, beside nothing else; what it had only claimed is under no suspicion."""
    scene = Scene(size=3)
    scene.stage("a", "b", "c", "d", "e")
    assert scene.relay_dies() == ["a", "b", "c"]
    seen = []

    def act():
        seen.append([item.body.decode() for item in scene.pool.begun])
        scene.pool.end(*[None] * len(scene.pool.begun))

    report = scene.run(*[act] * 4)
    assert seen == [["d", "e"], ["a"], ["b"], ["c"]]
    assert report == RelayReport(delivered=5)
    assert scene.stored("a").entry.attempts == 2


def test_only_the_entry_that_ends_its_relays_dies():
    """Whatever the limit, an innocent one is never buried for the company it was in."""
    for limit in (1, 2, 3):
        scene = Scene(size=3, attempt_limit=limit)
        scene.stage("a", "poison", "b", "c")
        scene.stage("head", aggregate="lane")
        pools = []
        for _ in range(limit + 2):
            pool = ScriptedPool(3)
            pool.script = [_ends_unless_poisonous(pool)] * 20
            pools.append(pool)
            with suppress(BrokenPipeError):
                run_sync(scene.relay(pool).run(until_idle=True))
            scene.pass_time(60)
        poison = scene.stored("poison")
        assert scene.states() == {
            "a": "delivered",
            "b": "delivered",
            "c": "delivered",
            "head": "delivered",
            "poison": "dead",
        }
        # Once beside others, where nobody could tell, and then alone.
        assert poison.entry.attempts == max(2, limit)
        assert sum(pool.taken.count("poison") for pool in pools) == max(2, limit)


def _ends_unless_poisonous(pool):
    def act():
        names = [item.body.decode() for item in pool.begun]
        if "poison" in names:
            raise BrokenPipeError
        pool.end(*[None] * len(names))

    return act


def test_an_innocent_entry_does_not_wait_for_a_poisonous_one():
    """The one that ended a relay alone comes last, and nothing else is held meanwhile."""
    scene = Scene(size=2)
    scene.stage("poison")
    assert [scene.relay_dies() for _ in range(2)] == [["poison"]] * 2
    scene.stage("a", "b", "c")
    rival = []

    def act():
        claim = EntryClaim(mint_token(), 10, 1_000)
        rival.extend(run_sync(scene.store.outbox.claim(claim)).entries)
        scene.pool.end()

    report = scene.run(lambda: scene.pool.end(None, None), act)
    assert scene.pool.taken == ["a", "b", "poison"]
    assert [(item.body.decode(), item.attempts) for item in rival] == [("c", 0)]
    assert report == RelayReport(delivered=3, returned=1)


def test_suspects_that_hang_take_turns_with_the_others():
    """A healthy entry waits for one of them, not for all; each of them is still alone."""
    later = BackOff(timedelta(hours=1), timedelta(hours=1))
    scene = Scene(size=3, timeout=timedelta(seconds=5), back_off=later)
    scene.stage("a", "b", "c")
    assert scene.relay_dies() == ["a", "b", "c"]
    seen = []

    def look():
        seen.append([item.body.decode() for item in scene.pool.begun])

    def hang():
        look()
        scene.stage(*(f"{len(seen)} {number}" for number in range(2)))
        scene.pass_time(5)
        scene.pool.end(REFUSED)

    def others():
        look()
        scene.stage(f"{len(seen)} late")
        scene.pool.end(None, None)

    def late():
        look()
        # What comes when the turn is over waits for the next one.
        scene.stage(f"{len(seen)} too late")
        scene.pass_time(5)
        scene.pool.end()

    def last():
        look()
        scene.pass_time(1)
        scene.pool.end()

    scene.run(hang, others, late, last, last, last)
    assert seen == [["a"], ["1 0", "1 1"], ["2 late"], ["b"], ["3 too late"], ["c"]]


def test_the_others_have_their_turn_while_a_suspect_hangs_for_ever():
    """A thread cannot be interrupted: from its time-out on it counts for nothing."""
    scene = Scene(size=3, timeout=timedelta(seconds=5))
    scene.stage("a", "b")
    assert scene.relay_dies() == ["a", "b"]
    seen = []

    def look(*, seconds=0, ended=None):
        def act():
            seen.append([item.body.decode() for item in scene.pool.begun])
            if len(seen) == 1:
                scene.stage("ok")
            scene.pass_time(seconds)
            if ended is not None:
                scene.pool.end(name=ended)

        return act

    scene.run(look(seconds=5), look(seconds=4, ended="ok"), look(ended="b"), look(ended="a"))
    assert seen == [["a"], ["a", "ok"], ["a", "b"], ["a"]]


def test_one_word_clears_an_entry():
    """An error is an ending: the relay lived, and the next try is as any other."""
    scene = Scene(size=2, back_off=BackOff(timedelta(seconds=1), timedelta(seconds=1)))
    scene.stage("a", "b")
    assert scene.relay_dies() == ["a", "b"]
    scene.run(lambda: scene.pool.end(REFUSED), lambda: scene.pool.end(REFUSED))
    scene.pass_time(1)
    seen = []

    def act():
        seen.extend(item.body.decode() for item in scene.pool.begun)
        scene.pool.end(None, None)

    scene.run(act)
    assert seen == ["a", "b"]


def test_a_hanging_delivery_keeps_nobody_from_being_delivered_alone():
    """A thread cannot be interrupted; after its time-out it does not count."""
    scene = Scene(size=2, timeout=timedelta(seconds=5))
    scene.stage("suspect")
    scene.relay_dies()
    held = run_sync(scene.store.outbox.claim(EntryClaim(mint_token(), 10, 1_000))).entries
    scene.stage("hangs")

    def wait():
        scene.pass_time(1)

    def look():
        assert [item.body.decode() for item in scene.pool.begun] == ["hangs", "suspect"]
        scene.pool.end(None, None)

    assert [item.body.decode() for item in held] == ["suspect"]
    scene.run(*[wait] * 5, look)
    assert scene.states() == {"suspect": "delivered", "hangs": "delivered"}


def test_a_start_whose_answer_was_lost_is_counted_once():
    """It is asked for again, and says which try it is."""
    scene = Scene(size=1)
    scene.stage("a", "b")

    def end():
        scene.store.fail(Moment.AFTER, method="outbox.write")
        scene.pool.end()

    scene.run(end, lambda: None, scene.pool.end)
    assert scene.stored("b").entry.attempts == 1


def test_nothing_begins_with_a_claim_while_the_store_fails():
    """Of a second claim whose answer is lost, nothing is counted that nobody delivers."""
    scene = Scene(lease=timedelta(seconds=30), timeout=timedelta(seconds=5))
    scene.stage("a")
    scene.store.fail(Moment.AFTER, method="outbox.claim", times=2)
    scene.run(
        lambda: scene.pass_time(30),
        lambda: scene.pass_time(30),
        scene.pool.end,
    )
    assert scene.stored("a").entry.attempts == 2


# Leases.


def test_a_slow_delivery_keeps_its_lease():
    """Renewed at a third, so that a rival never gets it while this relay lives."""
    scene = Scene(lease=timedelta(seconds=30))
    scene.stage("a")
    rival = []

    def wait():
        scene.pass_time(10)
        claim = EntryClaim(mint_token(), 10, 1_000)
        rival.extend(run_sync(scene.store.outbox.claim(claim)).entries)

    report = scene.run(*[wait] * 8, scene.pool.end)
    assert rival == []
    assert report == RelayReport(delivered=1)


def test_a_zombie_relays_late_word_is_refused(caplog):
    """It stood still, another relay delivered, and its own word comes too late."""
    scene = Scene(lease=timedelta(seconds=30))
    scene.stage("a")
    other = ScriptedPool()

    def stand_still():
        scene.pass_time(30)
        other.script = [other.end]
        run_sync(scene.relay(other).run(until_idle=True))
        assert scene.states() == {"a": "delivered"}
        scene.pool.end(REFUSED)

    report = scene.run(stand_still)
    assert report == RelayReport(failed=1, lost=1)
    assert scene.states() == {"a": "delivered"}
    assert "has entry number 1" in caplog.text


def test_a_relay_that_meets_its_own_entry_again_does_not_deliver_it_twice_at_once():
    """After it stood still it claims what it is still delivering: a new lease, and no new try."""
    scene = Scene(lease=timedelta(seconds=30))
    scene.stage("a")

    scene.stand_still_before_claim(2)
    report = scene.run(scene.pool.end)
    assert scene.pool.taken == ["a"]
    assert scene.stored("a").entry.attempts == 1
    assert report == RelayReport(delivered=1)


# Outages.


@pytest.mark.parametrize("moment", Moment)
def test_an_ending_that_the_store_did_not_hear_is_told_again(moment):
    """Lost before or after it was written: the entry is delivered once, and counted once."""
    scene = Scene()
    scene.stage("a")

    def end():
        scene.store.fail(moment, method="outbox.write")
        scene.pool.end()

    report = scene.run(end, lambda: None)
    assert report == RelayReport(delivered=1)
    assert scene.states() == {"a": "delivered"}


def test_an_outage_is_waited_for_longer_each_time():
    scene = Scene()
    scene.store.fail(Moment.BEFORE, method="outbox.claim", times=8)
    scene.run(*[lambda: None] * 7, scene.engine.stop, until_idle=False)
    assert scene.pool.rests == [0.375, 0.75, 1.5, 3.0, 6.0, 12.0, 22.5, 22.5]


def test_a_claim_whose_answer_was_lost_is_found_again_after_its_lease():
    """Nobody knows of it, so nobody delivers it until the lease is over; then it is delivered."""
    scene = Scene(lease=timedelta(seconds=30), timeout=timedelta(seconds=5))
    scene.stage("a")
    scene.store.fail(Moment.AFTER, method="outbox.claim")
    scene.run(lambda: scene.pass_time(30), scene.pool.end)
    assert scene.states() == {"a": "delivered"}


def test_a_drain_is_given_up_when_the_store_stays_away():
    """Whoever waits for its end must hear of it; what is in the air is landed before."""
    scene = Scene()
    scene.stage("a")

    def cut():
        scene.store.fail(Moment.BEFORE, times=None)
        scene.pool.end()

    with pytest.raises(StoreUnavailable):
        scene.run(cut, lambda: None, lambda: None)
    assert scene.pool.begun == []


def test_what_is_no_outage_ends_the_relay():
    """A missing schema does not come back by waiting."""
    scene = Scene()
    scene.store.fail(
        Moment.BEFORE, method="outbox.claim", error=lambda _: SchemaMissing("no schema")
    )
    with pytest.raises(SchemaMissing):
        scene.run()


# Stopping.


def test_a_stop_finishes_what_is_under_way_and_gives_the_rest_back():
    """What nobody has begun is free for other relays at once, and its try is not counted."""
    scene = Scene(size=2)
    scene.stage("a", "b", "c", "d")

    def stop():
        assert set(scene.states().values()) == {"claimed"}
        scene.engine.stop()

    report = scene.run(stop, lambda: None, lambda: scene.pool.end(None, None), until_idle=False)
    assert report == RelayReport(delivered=2, returned=2)
    assert scene.states() == {"a": "delivered", "b": "delivered", "c": "waiting", "d": "waiting"}
    assert [scene.stored(name).entry.attempts for name in "cd"] == [0, 0]


def test_a_stop_takes_back_what_was_counted_and_has_not_begun():
    """A write may count what the pool begins soon; given back, it is as it was before."""
    scene = Scene(size=1)
    scene.slow_writes(0.01)
    scene.stage(*(f"n{number}" for number in range(60)))
    counted = []

    def act():
        scene.pass_time(0.005)
        scene.pool.end()

    def stop():
        counted.extend(item.body.decode() for item in scene.pool.queued)
        scene.engine.stop()

    scene.run(*[act] * 30, stop, lambda: None, scene.pool.end, until_idle=False)
    assert counted
    assert {scene.stored(name).entry.attempts for name in counted} == {0}
    assert {scene.stored(name).entry.open_try for name in counted} == {OpenTry.NONE}


def test_what_a_renewal_calls_lost_is_not_begun_from_the_queue():
    """The store's clock jumped: the lease is over there, and by the relay's own clock it is not."""
    scene = Scene(size=1)
    scene.slow_writes(0.01)
    scene.stage(*(f"n{number}" for number in range(60)))
    discarded = []

    def act():
        scene.pass_time(0.005)
        scene.pool.end()

    def discard():
        lease_seconds = scene.policy.lease.total_seconds()
        scene.jump(lease_seconds)
        for item in scene.pool.queued:
            discarded.append(item.body.decode())
            run_sync(scene.store.outbox.operate(item.id, EntryCommand.DISCARD))
        scene.pass_time(lease_seconds / 2)  # Renewals are due.

    scene.pool.script = [*[act] * 30, discard, *[act] * 400]
    run_sync(scene.engine.run(until_idle=True))
    assert discarded
    assert set(discarded).isdisjoint(scene.pool.taken)


def test_a_stopped_relay_claims_nothing():
    scene = Scene()
    scene.engine.stop()
    scene.stage("a")
    assert scene.run(until_idle=False) == RelayReport()
    assert scene.pool.wakes == 1


def test_a_stop_without_a_store_gives_up_after_a_few_tries():
    """The leases free what the store could not be told of."""
    scene = Scene()
    scene.stage("a")

    def stop():
        scene.store.fail(Moment.BEFORE, method="outbox.write", times=None)
        scene.pool.end()
        scene.engine.stop()

    assert scene.run(stop, lambda: None, lambda: None, until_idle=False) == RelayReport()
    scene.store.heal()
    scene.pass_time(60)
    assert scene.states() == {"a": "waiting"}


# Pace.


def test_a_relay_takes_no_more_than_its_pool_can_carry():
    scene = Scene(size=2)
    scene.stage(*(f"n{number}" for number in range(20)))
    seen = []

    def act():
        seen.append(len(scene.pool.begun) + len(scene.pool.queued))
        scene.pool.end(*[None] * len(scene.pool.begun))

    scene.run(*[act] * 10)
    assert max(seen) <= 4
    assert scene.engine.report.delivered == 20


def test_a_quick_target_gets_larger_batches():
    """Many deliveries share one commit, up to the limit of the policy."""
    scene = Scene(size=2, batch_limit=10)
    scene.stage(*(f"n{number}" for number in range(400)))
    seen = []

    def act():
        seen.append(list(scene.states().values()).count("claimed"))
        scene.pass_time(0.002)
        while scene.pool.begun:
            scene.pool.end()

    # More rests than can be needed; those that are left over were not.
    scene.pool.script = [act] * 400
    run_sync(scene.engine.run(until_idle=True))
    assert scene.engine.report.delivered == 400
    assert max(seen) > 4
    assert max(seen) <= 40


def test_a_quick_target_does_not_wait_for_the_store():
    """Tries are counted ahead for what begins during the next writes; of a slow one, none are."""
    for seconds, is_ahead in ((0.001, True), (1.0, False)):
        scene = Scene(size=2)
        scene.slow_writes(0.005)
        scene.stage(*(f"n{number}" for number in range(200)))
        seen = []

        def act(scene=scene, seen=seen, seconds=seconds):
            seen.append(len(scene.pool.begun) + len(scene.pool.queued))
            scene.pass_time(seconds)
            scene.pool.end(*[None] * len(scene.pool.begun))

        scene.pool.script = [act] * 400
        run_sync(scene.engine.run(until_idle=True))
        assert scene.engine.report.delivered == 200
        assert (max(seen) > 2) is is_ahead


def test_a_walk_over_waiting_aggregates_ends_and_is_rested_from():
    """A relay with nothing to do looks at every aggregate once, and then rests its poll."""
    scene = Scene(size=1, poll=timedelta(seconds=2))
    for number in range(30):
        scene.stage(f"n{number}", aggregate=f"lane {number:02}")
    held = run_sync(scene.store.outbox.claim(EntryClaim(mint_token(), 100, 3_600_000)))
    assert len(held.entries) == 30
    scene.run(scene.engine.stop, until_idle=False)
    assert scene.pool.rests == [2.0]


def test_free_entries_do_not_starve_aggregates():
    """Both get their share of every claim."""
    scene = Scene(size=2)
    scene.stage(*(f"free {number}" for number in range(20)))
    scene.stage("head", aggregate="lane")
    seen = []

    def look():
        seen.extend(name for name, state in scene.states().items() if state == "claimed")
        scene.engine.stop()

    scene.run(
        look,
        lambda: None,
        lambda: scene.pool.end(*[None] * len(scene.pool.begun)),
        until_idle=False,
    )
    assert "head" in seen


# Settings.


@pytest.mark.parametrize(
    "settings",
    [
        {"lease": timedelta(0)},
        {"timeout": timedelta(0)},
        {"poll": timedelta(0)},
        {"timeout": timedelta(seconds=61)},
        {"keep": timedelta(seconds=-1)},
        {"attempt_limit": 0},
        {"attempt_limit": 1_000_001},
        {"batch_limit": 0},
        {"batch_limit": 1_001},
    ],
    ids=repr,
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(PolicyInvalid):
        RelayPolicy(**settings)

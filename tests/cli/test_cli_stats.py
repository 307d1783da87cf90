"""`retrysafe stats` and `doctor`: figures of a store, and what its keys say about settings."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe import figures
from retrysafe.cli import doctor
from retrysafe.core.listing import Position, RecordPage
from retrysafe.core.model import Condition, Record, SettleKind, State, StoredKey
from retrysafe.core.size import StoreSize, TableSize
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store

NOW_MS = 10**12


def stored(condition=Condition.SUCCEEDED, *, age_ms=1_000, **changes):
    values = {
        "digest": b"d" * 16,
        "caller": "acme",
        "text": "k",
        "operation": "charge",
        "rule": 1,
        "fingerprint": b"f" * 16,
        "state": State.SUCCEEDED,
        "token": b"t" * 16,
        "attempt": 1,
        "first_claimed_at_ms": NOW_MS - age_ms,
        "claimed_at_ms": NOW_MS - age_ms,
        "lease_ends_at_ms": NOW_MS - age_ms + 30_000,
        "settled_at_ms": NOW_MS - age_ms + 50,
        "expires_at_ms": NOW_MS - age_ms + 50 + 3_600_000,
        "owner": "host:1",
    }
    return StoredKey(Record(**(values | changes)), condition, NOW_MS)


def figured(sample=(), recent=None, pending=None, rows=0):
    size = StoreSize({"keys": TableSize(rows, 10)}, 0, 3, 1, 2.5)
    return figures.stats_json(size, sample, recent or RecordPage([]), pending or RecordPage([]))


def test_rows_are_compared_with_rate_and_window():
    """300 keys in five minutes for an hour each are 3,600; twice as many are there."""
    found = figured([stored()] * 10, RecordPage([stored()] * 300), rows=7_200)
    assert (found["keys_per_second"], found["active_window_seconds"]) == (1.0, 3_600)
    assert (found["keys_projected"], found["keys_to_projection"]) == (3_600, 2.0)
    assert found["outbox"] == {"waiting": 3, "dead": 1, "oldest_seconds": 2.5}


def test_a_full_page_of_new_keys_is_a_rate_over_its_span():
    """More keys than are looked at: the oldest of them says since when."""
    page = RecordPage([stored(age_ms=1), stored(age_ms=2_000)], Position(0, b""))
    assert figured(recent=page)["keys_per_second"] == 1.0
    assert figured(recent=RecordPage([], None, "all of it"))["keys_per_second"] is None


def test_keys_for_ever_have_no_projection():
    """Nobody knows how many there will be."""
    sample = [stored(expires_at_ms=NOW_MS + 2**55)]
    found = figured(sample, RecordPage(sample))
    assert (found["active_window_seconds"], found["keys_projected"]) == (None, None)


def test_ages_and_shares_come_from_what_was_seen():
    """Running keys by their first claim, abandoned ones by the end of their lease."""
    pending = RecordPage(
        [stored(Condition.RUNNING, age_ms=number * 1_000) for number in range(1, 101)]
        + [stored(Condition.ABANDONED, lease_ends_at_ms=NOW_MS - 7_000)],
        None,
        "half of it",
    )
    sample = [stored()] * 3 + [stored(Condition.OUTLIVED, expires_at_ms=NOW_MS - 5_000)]
    found = figured(sample, pending=pending)
    ages = found["pending"]["running_age_seconds"]
    assert ages == {"p50": 51, "p95": 96, "p99": 100, "max": 100}
    assert (found["pending"]["abandoned"], found["pending"]["longest_abandoned_seconds"]) == (1, 7)
    assert (found["pending"]["is_part"], found["pending"]["not_searched"]) == (True, "half of it")
    assert found["conditions"] == {"outlived": 0.25, "succeeded": 0.75}
    assert found["sweep_lag_seconds"] == 5


def test_the_command_shows_a_store(invoke, desk):
    """To people as lines, to programs as JSON, on SQLite."""
    desk.put("a")
    desk.put("b", SettleKind.FAIL)
    desk.claim("c")
    desk.now_ms += 1_000
    arguments = ("stats", "--store", desk.url)
    found = invoke(*arguments, "--json").json
    assert found["pending"]["running"] == 1
    assert found["conditions"] == {"failed": 0.3333, "running": 0.3333, "succeeded": 0.3333}
    assert found["attempts"] == {"keys": 3, "with_several_attempts": 0, "failed": 1, "released": 0}
    people = invoke(*arguments).stdout
    assert "about 3 rows" in people
    assert "the oldest 1 s" in people
    desk.now_ms += desk.ACTIVE_MS * 10
    later = invoke(*arguments).stdout
    assert "abandoned        1, for up to" in later


def test_a_sample_is_spread_over_all_records(database_url):
    """Of few records it is all of them; of many it is about as many as were asked for."""
    store = open_store(database_url)
    from retrysafe.testing.suite.probe import Probe, key_of

    assert run_sync(store.sample(10)) == []
    probe = Probe(store, lambda: 0, run_sync)
    for number in range(40):
        probe.hold(key_of(f"k{number}"))
    assert len({item.record.text for item in run_sync(store.sample(100))}) == 40
    some = {int(item.record.text[1:]) for item in run_sync(store.sample(10))}
    assert 10 <= len(some) <= 20
    run_sync(store.close())


# Doctor.


def test_doctor_says_what_it_checked_and_what_mends(invoke, desk):
    """Every check by its name; a finding has its check and a command."""
    for number in range(30):
        desk.claim(f"k{number}")
    desk.now_ms += 3_600_000
    document = invoke("doctor", "--store", desk.url, "--json").json
    for name in ("access", "schema", "abandoned keys", "leases", "windows", "sweep", "outbox"):
        assert name in document["checked"]
    (found,) = [item for item in document["findings"] if item["check"] == "abandoned keys"]
    assert found["text"].startswith("30 keys are abandoned for more than 15 min")
    assert found["mend"] == "retrysafe keys list --condition abandoned --older-than 15m"
    people = invoke("doctor", "--store", desk.url).stdout
    assert "  mend: retrysafe keys list --condition abandoned" in people
    assert people.splitlines()[-1].startswith("checked: access, schema")


def late(count, of):
    """Settled keys, some of them after their lease."""
    return [stored(lease_ends_at_ms=NOW_MS - 999)] * count + [stored()] * (of - count)


@pytest.mark.parametrize(
    ("sample", "count"),
    [(late(1, 20), 1), (late(0, 20), 0), (late(19, 19), 0), (late(1, 200), 0)],
    ids=["one of twenty", "none", "too few to say", "less than one in a hundred"],
)
def test_leases_are_compared_with_how_long_operations_take(sample, count):
    """One in a hundred that is settled after its lease is one too many."""
    found = doctor.lease_findings(sample)
    assert len(found) == count
    if found:
        assert "charge" in found[0].mend


def test_short_windows_and_late_sweeps_are_told():
    """By what is stored, not by what a policy says today."""
    assert doctor.window_findings([stored(), stored(Condition.RUNNING, expires_at_ms=None)]) == []
    (short,) = doctor.window_findings([stored(expires_at_ms=NOW_MS - 1_000 + 50 + 5_000)])
    assert "remembered for 5 s" in short.text
    week_ms = timedelta(days=7) // timedelta(milliseconds=1)
    old = stored(Condition.OUTLIVED, expires_at_ms=NOW_MS - week_ms)
    (unswept,) = doctor.sweep_findings([old, stored()])
    assert "50% of the sampled keys" in unswept.text
    assert doctor.sweep_findings([stored(Condition.OUTLIVED, expires_at_ms=NOW_MS - 1)]) == []
    (dead,) = doctor.outbox_findings(StoreSize(outbox_dead=3))
    assert dead.mend == "retrysafe outbox list --state dead"

"""Listing: what an operator sees of many records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import Condition, SettleKind
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import LEASE_MS, PRESENT, Probe, key_of, request


def _texts(probe: Probe, query: RecordQuery) -> list[str]:
    return [item.record.text for item in probe.listed(query)]


class ListingCases(SuiteBase):
    """Filters narrow, the limit bounds, the newest claim comes first."""

    def test_an_empty_store_lists_nothing(self, probe: Probe) -> None:
        """No records, no rows."""
        assert probe.listed(RecordQuery()) == []

    def test_the_newest_claim_comes_first(self, probe: Probe) -> None:
        """By the instant of the last claim, so a takeover moves a key to the front."""
        for text in ("a", "b", "c"):
            probe.hold(key_of(text))
            probe.advance(1)
        assert _texts(probe, RecordQuery()) == ["c", "b", "a"]
        probe.advance(LEASE_MS)
        probe.hold(key_of("a"))
        assert _texts(probe, RecordQuery()) == ["a", "c", "b"]

    def test_equal_instants_have_one_order(self, probe: Probe) -> None:
        """Records claimed in one millisecond are ordered by digest, the same on every store."""
        keys = [key_of(f"key-{number}") for number in range(8)]
        for key in keys:
            probe.hold(key)
        expected = [key.text for key in sorted(keys, key=lambda key: key.digest)]
        assert _texts(probe, RecordQuery()) == expected
        assert _texts(probe, RecordQuery(limit=3)) == expected[:3]

    def test_the_limit_bounds(self, probe: Probe) -> None:
        """Never more rows than asked for."""
        for number in range(5):
            probe.hold(key_of(f"key-{number}"))
            probe.advance(1)
        assert _texts(probe, RecordQuery(limit=2)) == ["key-4", "key-3"]
        assert len(probe.listed(RecordQuery(limit=5))) == 5
        assert len(probe.listed(RecordQuery(limit=50))) == 5

    def test_by_caller(self, probe: Probe) -> None:
        """One caller's records only; the empty text names those that are shared by all."""
        probe.hold(key_of("a", caller="caller-1"))
        probe.hold(key_of("b", caller="caller-2"))
        assert _texts(probe, RecordQuery(caller="caller-2")) == ["b"]
        assert _texts(probe, RecordQuery(caller="caller")) == []
        assert _texts(probe, RecordQuery(caller="")) == []

    @pytest.mark.parametrize(
        ("prefix", "expected"),
        [
            ("", ["Order", "o%x", "o_x", "oax", "order"]),
            ("o", ["o%x", "o_x", "oax", "order"]),
            ("O", ["Order"]),
            ("o%", ["o%x"]),
            ("o_", ["o_x"]),
            ("order", ["order"]),
            ("orders", []),
            ("'", []),
        ],
    )
    def test_by_prefix(self, probe: Probe, prefix: str, expected: list[str]) -> None:
        """Exact to the letter: no wildcards, no folding of cases."""
        for text in ("order", "Order", "o%x", "o_x", "oax"):
            probe.hold(key_of(text))
        assert sorted(_texts(probe, RecordQuery(text_prefix=prefix))) == expected

    def test_by_a_prefix_of_wide_characters(self, probe: Probe) -> None:
        """A prefix counts characters, not bytes."""
        for text in ("日本-1", "日本-2", "日光"):
            probe.hold(key_of(text))
        assert len(probe.listed(RecordQuery(text_prefix="日本"))) == 2
        assert len(probe.listed(RecordQuery(text_prefix="日"))) == 3

    def test_by_condition(self, probe: Probe) -> None:
        """Each condition finds the records that are in it now, and several find their union."""
        _one_in_each_condition(probe)
        for condition in PRESENT:
            found = probe.listed(RecordQuery(conditions=frozenset({condition})))
            assert [item.record.text for item in found] == [condition.value]
            assert [item.condition for item in found] == [condition]
        both = frozenset({Condition.RUNNING, Condition.FAILED})
        assert sorted(_texts(probe, RecordQuery(conditions=both))) == ["failed", "running"]
        absent = frozenset({Condition.ABSENT})
        assert probe.listed(RecordQuery(conditions=absent)) == []

    def test_filters_are_joined(self, probe: Probe) -> None:
        """A record must pass all of them, and the limit counts what passed."""
        _one_in_each_condition(probe)
        query = RecordQuery(
            caller="caller-1", text_prefix="r", conditions=frozenset({Condition.RELEASED}), limit=1
        )
        assert _texts(probe, query) == ["released"]

    def test_by_operation_and_by_age(self, probe: Probe) -> None:
        """The name to the letter; the age counts from the last claim."""
        probe.ask(request(key_of("old"), operation="refund"))
        probe.advance(1_000)
        probe.ask(request(key_of("new"), operation="charge"))
        probe.advance(500)
        assert _texts(probe, RecordQuery(operation="refund")) == ["old"]
        assert _texts(probe, RecordQuery(operation="ref")) == []
        assert _texts(probe, RecordQuery(older_than_ms=1_500)) == ["old"]
        assert _texts(probe, RecordQuery(newer_than_ms=500)) == ["new"]
        assert _texts(probe, RecordQuery(older_than_ms=500, newer_than_ms=1_499)) == ["new"]

    @pytest.mark.parametrize("conditions", [frozenset(), frozenset({Condition.RUNNING})])
    def test_pages_follow_each_other(self, probe: Probe, conditions: frozenset[Condition]) -> None:
        """Every record comes once, also where several were claimed in one millisecond."""
        for number in range(7):
            probe.hold(key_of(f"key-{number}"))
            probe.advance(number % 2)
        expected = _texts(probe, RecordQuery(conditions=conditions))
        assert len(expected) == 7
        query, found = RecordQuery(conditions=conditions, limit=2), list[str]()
        while True:
            page = probe.page(query)
            found += [item.record.text for item in page.keys]
            if page.after is None:
                break
            query = replace(query, after=page.after)
        assert found == expected

    def test_a_listed_record_is_the_record(self, probe: Probe) -> None:
        """The rows are those that `read` gives, without steps and audit."""
        _one_in_each_condition(probe)
        for item in probe.listed(RecordQuery()):
            found = probe.read(key_of(item.record.text))
            assert (item.record, item.condition) == (found.record, found.condition)
            assert item.now_ms == found.now_ms == probe.clock()
            assert (item.steps, item.outcomes) == ([], [])


def _one_in_each_condition(probe: Probe) -> None:
    """Brings one key into each condition; each key is named by its condition."""
    held = {condition: probe.hold(key_of(condition.value)) for condition in PRESENT}
    kinds = {
        Condition.SUCCEEDED: SettleKind.COMPLETE,
        Condition.FAILED: SettleKind.FAIL,
        Condition.RELEASED: SettleKind.RELEASE,
        Condition.OUTLIVED: SettleKind.COMPLETE,
    }
    for condition, kind in kinds.items():
        active_ms = 1 if condition is Condition.OUTLIVED else 10 * LEASE_MS
        probe.end(kind, held[condition], key_of(condition.value), active_ms=active_ms)
    probe.advance(LEASE_MS - 1)
    probe.extend(held[Condition.RUNNING], key_of(Condition.RUNNING.value))
    probe.advance(1)

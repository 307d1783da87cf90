"""The table itself: it is whole, it says what it leaves out and why, and it can fail."""

from __future__ import annotations

import pytest

from retrysafe.http.problems import KINDS as PROBLEM_KINDS
from tests.http_cases import cases
from tests.http_cases.cases import PROBLEMS, Ask, case, post
from tests.http_cases.configuration import mount_of
from tests.http_cases.playing import played_on
from tests.http_cases.selecting import WHOLE, depends_on_server, played_in_every_run, traits
from tests.http_cases.serving import BARE, KINDS, KINDS_BY_NAME
from tests.http_cases.table import CASES


def test_the_table_is_large_and_every_case_has_its_own_name():
    """Names are how a failing case is found."""
    assert len(CASES) >= 150
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_a_case_stays_in_one_mount():
    """Its store is broken and counted for the case alone."""
    for each in CASES:
        assert len({mount_of(ask.path).prefix for ask in each.asks}) == 1, each.name


def test_every_run_plays_the_whole_table_once_and_all_that_servers_can_change():
    """What only a long run plays meets nothing that the server's own choice does not meet."""
    for kind in KINDS:
        playable = [case for case in CASES if kind.reason_without(case) is None]
        often = played_in_every_run(kind, CASES)
        if kind.name in WHOLE:
            assert often == {case.name for case in playable}
            continue
        rarely = [case for case in playable if case.name not in often]
        assert rarely
        met = {trait for case in playable if case.name in often for trait in traits(case)}
        for each in rarely:
            if not any(isinstance(step, cases.Flood) for step in each.steps):
                assert not depends_on_server(each), each.name
                assert set(traits(each)) <= met, each.name
    protocols = {KINDS_BY_NAME[name].application.partition(":")[0] for name in WHOLE}
    assert protocols == {cases.ASGI, cases.WSGI}


def test_problems_are_those_of_the_middleware():
    """Status and advice are written down twice on purpose: a change must be meant."""
    real = {kind.slug: (kind.status, kind.retryable) for kind in PROBLEM_KINDS}
    assert {slug: real[slug] for slug in PROBLEMS} == PROBLEMS
    # Those that are left can only be met by a server that loses its claim, its schema or itself.
    assert real.keys() - PROBLEMS.keys() == {"claim-lost", "store-unusable", "closing"}


def test_every_problem_is_met():
    """A refusal that no case expects is not promised by anything."""
    expected = {
        step.problem for case in CASES for step in case.steps if isinstance(step, cases.Refused)
    }
    # Told to a client that has gone; its case sees that nothing ran.
    assert PROBLEMS.keys() - expected == {"body-incomplete"}


def test_what_is_left_out_is_left_out_for_a_reason():
    """Every trait is one that some server has, and every case is played somewhere."""
    traits = set().union(*(kind.traits for kind in KINDS))
    for each in CASES:
        assert each.without.keys() <= traits
        assert all(each.without.values())
        assert any(kind.reason_without(each) is None for kind in KINDS)
    for kind in KINDS:
        assert sum(kind.reason_without(each) is None for each in CASES) >= 150


def test_a_request_without_an_expectation_is_refused():
    """Else a case would send it, look away and pass."""
    for steps in ((), (post(),), (cases.Ran(),), (post(), post()), (cases.Heal(), cases.Ran())):
        with pytest.raises(ValueError, match="odd"):
            case("odd", "Odd", *steps)


def test_an_application_without_protection_fails_the_table():
    """Every case that promises a replay or a refusal notices when there is none."""
    plain = (Ask, *cases.EXPECTATIONS)
    promising = [
        case
        for case in CASES
        if all(isinstance(step, plain) for step in case.steps)
        and any(isinstance(step, cases.Replay | cases.Refused) for step in case.steps)
        # There the application without protection has one around it.
        and not mount_of(case.asks[0].path).is_nested
    ]
    assert len(promising) >= 150
    outcomes = played_on(BARE, promising)
    assert [name for name, error in outcomes.items() if not isinstance(error, AssertionError)] == []

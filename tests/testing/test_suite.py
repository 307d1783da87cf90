"""The suite itself: it cannot be thinned out, and it fails stores that break their promises."""

import inspect
import os
import subprocess
import sys
import textwrap

import pytest

from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock, StoreSuite

# Each broken store: what it does otherwise, and the case that must notice.
BROKEN = {
    "NoFence": (
        """
        def _settle(self, settlement, now_ms):
            record = self._records[settlement.key.digest]
            return super()._settle(replace(settlement, token=record.token), now_ms)
        """,
        "test_an_owner_that_was_taken_over_writes_nothing[complete]",
    ),
    "LeaseEndsEarly": (
        """
        def _claim(self, request, now_ms):
            return super()._claim(replace(request, lease_ms=request.lease_ms - 1), now_ms)
        """,
        "test_a_lease_holds_to_its_last_millisecond",
    ),
    "ChecksThenActs": (
        """
        async def commit(self, claims, settlements):
            if claims and claims[0].key.digest not in self._records:
                self.gate.wait(30)  # Every racer has looked before the first one writes.
                self.looked.is_free = True
            return await super().commit(claims, settlements)

        def _claim(self, request, now_ms):
            if getattr(self.looked, "is_free", False):
                self._records.pop(request.key.digest, None)
            return super()._claim(request, now_ms)
        """,
        "test_racing_claims_have_one_winner[absent-admit]",
    ),
    "StateBeforeMismatch": (
        """
        def _claim(self, request, now_ms):
            record = self._records.get(request.key.digest)
            if record is not None and record.state is State.PENDING:
                same = Fingerprint(record.rule, record.fingerprint)
                request = replace(request, fingerprints=(same,))
            return super()._claim(request, now_ms)
        """,
        "test_a_mismatch_is_decided_before_the_state[running]",
    ),
    "SweepsPending": (
        """
        async def sweep(self, limit):
            self._records.clear()
            return await super().sweep(limit)
        """,
        "test_a_sweep_never_touches_pending",
    ),
    "DropsEmptyBodies": (
        """
        def _settle(self, settlement, now_ms):
            if settlement.payload and not settlement.payload.body:
                settlement = replace(settlement, payload=None)
            return super()._settle(settlement, now_ms)
        """,
        "test_an_outcome_replays_byte_for_byte[complete-empty body]",
    ),
    "ResumesOldSteps": (
        """
        def _claim(self, request, now_ms):
            kept = self._steps.get(request.key.digest, {})
            answer = super()._claim(request, now_ms)
            self._steps[request.key.digest] = kept
            return answer
        """,
        "test_a_new_life_has_no_old_steps",
    ),
}

HEADER = """
import threading
from dataclasses import replace

from retrysafe.core.model import Fingerprint, State
from retrysafe.stores import MemoryStore
from retrysafe.testing import StoreSuite
from retrysafe.testing.suite.concurrency import RACERS
"""

CLASSES = """
class {name}(MemoryStore):
    gate = threading.Barrier(RACERS)
    looked = threading.local()
{body}

class Test{name}(StoreSuite):
    def make_store(self, clock):
        return {name}(now_ms=clock)
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The cases that failed when each broken store met the case that is meant for it."""
    folder = tmp_path_factory.mktemp("broken")
    module = folder / "test_broken.py"
    classes = [
        CLASSES.format(name=name, body=textwrap.indent(textwrap.dedent(body), "    "))
        for name, (body, _) in BROKEN.items()
    ]
    module.write_text(HEADER + "\n".join(classes))
    chosen = [f"test_broken.py::Test{name}::{case}" for name, (_, case) in BROKEN.items()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", *chosen],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "COLUMNS": "300"},  # A narrow terminal would cut the reasons off.
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_store_fails(failed, name):
    """Each broken promise is noticed by an assertion of the case that is named for it."""
    case = BROKEN[name][1]
    start = f"FAILED test_broken.py::Test{name}::{case} - "
    reasons = [line.removeprefix(start) for line in failed.splitlines() if line.startswith(start)]
    assert [reason[:6].lower() for reason in reasons] == ["assert"]


def test_a_case_cannot_be_replaced():
    """A subclass that leaves a case out is refused when it is defined."""
    with pytest.raises(TypeError, match="replaces test_a_second_claim_is_in_flight"):

        class LenientSuite(StoreSuite):
            test_a_second_claim_is_in_flight = None


def test_a_subclass_adds_cases_of_its_own():
    """Other names are free."""

    class LargerSuite(StoreSuite):
        def test_something_of_its_own(self):
            """Its own."""

    assert LargerSuite.test_something_of_its_own is not None


def test_a_subclass_must_make_a_store():
    """Without `make_store` the suite says what is missing."""
    with pytest.raises(NotImplementedError, match="make_store"):
        StoreSuite().make_store(ManualClock())


def test_a_store_is_its_own_second_object_unless_told_otherwise():
    """Right for records that live in the object; stores on files or servers override it."""
    store = MemoryStore()
    assert StoreSuite().join_store(store, ManualClock()) is store


def test_every_case_states_its_property():
    """The docstrings are the definition that a store's author reads."""
    cases = [item for name, item in vars_of(StoreSuite) if name.startswith("test_")]
    assert len(cases) > 100
    assert [case.__name__ for case in cases if not case.__doc__] == []


def test_no_two_subjects_share_a_case():
    """A name that two modules use would silently drop one of the cases."""
    names = [name for base in StoreSuite.__mro__ for name in vars(base) if name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def vars_of(suite):
    return inspect.getmembers(suite, inspect.isfunction)


def test_a_case_of_the_suite_is_never_skipped():
    """Neither a mark nor a call in the suite leaves a case out."""
    for name, case in vars_of(StoreSuite):
        marks = {mark.name for mark in getattr(case, "pytestmark", [])}
        assert marks <= {"parametrize"}, name
        assert "pytest.skip" not in inspect.getsource(case), name

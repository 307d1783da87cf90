"""Every store behaves as the pure model does, over long random histories.

Hypothesis invents the histories: claims, endings, extensions, steps, commands, sweeps and clocks
that jump, over a few keys (two of which share a digest), few tokens and few fingerprints, so that
rows meet. After every step each key is read and compared with the model.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from retrysafe import GLOBAL, Key
from retrysafe.core.listing import RecordQuery
from retrysafe.core.machine import condition_of
from retrysafe.core.model import (
    ClaimRequest,
    Condition,
    Extension,
    Fingerprint,
    OperatorCommand,
    Payload,
    SettleKind,
    Settlement,
    Step,
    StepWrite,
)
from retrysafe.errors import StoreError
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import colliding
from tests.stores.model import Model
from tests.stores.postgres_stores import ClockedStore, Table
from tests.stores.sqlite_stores import calm_store

FIRST = Key("key-1", caller="caller-1")
KEYS = (
    FIRST,
    Key("key-2", caller="caller-1"),
    Key("key-1", caller=GLOBAL),
    colliding(FIRST, "the twin"),
)
# So few that a token is used again for the same key, as a retried claim does, and for others.
TOKENS = tuple(bytes([number]) * 16 for number in range(1, 6))
FINGERPRINTS = (
    (Fingerprint(1, b"a" * 16),),
    (Fingerprint(1, b"b" * 16),),
    (Fingerprint(2, b"c" * 16), Fingerprint(1, b"a" * 16)),
    (Fingerprint(3, b"d" * 16),),
)
PAYLOADS = (
    None,
    Payload("json.1", b"", b"null"),
    Payload("bytes.1", b"\x00", b""),
    Payload("failure.1", b"", b"\xff"),
)
# Small numbers that add up to each other, so that instants fall exactly on boundaries.
DURATIONS_MS = (1, 10, 100, 1_000)

keys = st.sampled_from(KEYS)
tokens = st.sampled_from(TOKENS)
durations_ms = st.sampled_from(DURATIONS_MS)
claims = st.builds(
    ClaimRequest,
    key=keys,
    fingerprints=st.sampled_from(FINGERPRINTS),
    token=tokens,
    lease_ms=durations_ms,
    operation=st.sampled_from(("", "charge", "refund")),
    owner=st.sampled_from(("", "owner-1")),
    arguments=st.sampled_from((None, None, *PAYLOADS[1:])),
    takes_corrections=st.booleans(),
)
settlements = st.builds(
    Settlement,
    kind=st.sampled_from(SettleKind),
    key=keys,
    token=tokens,
    payload=st.sampled_from(PAYLOADS),
    active_ms=durations_ms,
    audit_ms=durations_ms,
    nothing_happened=st.booleans(),
)
extensions = st.builds(Extension, key=keys, token=tokens, lease_ms=durations_ms)

steps = st.builds(
    Step,
    name=st.sampled_from(("reserve", "charge")),
    position=st.integers(1, 3),
    payload=st.sampled_from(PAYLOADS[1:]),
)


class StoreAgainstModel(RuleBasedStateMachine):
    """One store, one model, one clock."""

    def make_store(self, clock):
        raise NotImplementedError

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.store = self.make_store(self.clock)
        self.model = Model(self.clock)

    def teardown(self):
        run_sync(self.store.close())

    @rule(request=claims)
    def claim(self, request):
        self.commit([request], [])

    @rule(settlement=settlements)
    def settle(self, settlement):
        self.commit([], [settlement])

    @rule(
        claims=st.lists(claims, min_size=1, max_size=4),
        settlements=st.lists(settlements, max_size=4),
    )
    def commit(self, claims, settlements):
        """Within a batch the rows count one after the other, settlements first."""
        claimed, settled = run_sync(self.store.commit(claims, settlements))
        assert settled == [self.model.settle(item) for item in settlements]
        assert list(map(plain, claimed)) == [plain(self.model.claim(item)) for item in claims]

    @rule(
        kind=st.sampled_from(SettleKind),
        key=keys,
        payload=st.sampled_from(PAYLOADS),
        nothing_happened=st.booleans(),
    )
    def settle_by_owner(self, kind, key, payload, nothing_happened):
        """Random tokens seldom hold a key, so here the owner writes, if there is one."""
        record = self.model.shelf(key).record
        if record is not None:
            ending = Settlement(kind, key, record.token, payload, 1_000, 1_000)
            ending.nothing_happened = nothing_happened
            self.commit([], [ending])

    @rule(key=keys, kind=st.sampled_from(SettleKind), token=tokens)
    def correct(self, key, kind, token):
        """What seldom comes about by itself: a harmless ending, and then another request."""
        record = self.model.shelf(key).record
        if record is None:
            return
        self.commit([], [Settlement(kind, key, record.token, PAYLOADS[1], 1_000, 1_000, (), True)])
        asked = FINGERPRINTS[record.fingerprint == FINGERPRINTS[0][0].digest]
        self.commit(
            [ClaimRequest(key, asked, token, 1_000, record.operation, takes_corrections=True)], []
        )

    @rule(
        # Where two tokens of a key come at once, a store may write the renewal beside the record,
        # and tell others less of the lease than there is. The suite looks at that case.
        items=st.lists(extensions, min_size=1, max_size=4, unique_by=lambda item: item.key.digest)
    )
    def extend(self, items):
        answers = run_sync(self.store.extend(items, 30.0))
        assert answers == [self.model.extend(item) for item in items]

    @rule(key=keys, lease_ms=durations_ms)
    def extend_by_owner(self, key, lease_ms):
        record = self.model.shelf(key).record
        if record is not None:
            self.extend([Extension(key, record.token, lease_ms)])

    @rule(request=claims, held=tokens)
    def take_over(self, request, held):
        answer = run_sync(self.store.take_over(request, held))
        assert answer == self.model.take_over(request, held)

    @rule(request=claims)
    def take_over_from_the_owner(self, request):
        record = self.model.shelf(request.key).record
        if record is not None:
            self.take_over(request, record.token)

    @rule(
        limit=st.integers(1, 4),
        after=st.sampled_from((b"", *(key.digest for key in KEYS))),
        operations=st.lists(st.sampled_from(("", "charge", "refund")), unique=True),
    )
    def list_abandoned(self, limit, after, operations):
        abandoned = self.model.abandoned()
        found = [item.record for item in run_sync(self.store.list_abandoned(limit))]
        assert len(found) == min(limit, len(abandoned))
        assert all(item in [shelf.record for shelf in abandoned] for item in found)
        expected = sorted(
            (shelf.record.digest, shelf.record.token, shelf.arguments)
            for shelf in abandoned
            if shelf.arguments is not None and shelf.record.digest > after
            if shelf.record.operation in operations
        )
        assert [
            (item.record.digest, item.record.token, item.arguments)
            for item in run_sync(self.store.list_resumable(limit, after, operations))
        ] == expected[:limit]

    @rule(key=keys, token=tokens, step=steps)
    def record_step(self, key, token, step):
        write = StepWrite(key, token, step)
        assert run_sync(self.store.record_step(write)) is self.model.record_step(write)

    @rule(key=keys, step=steps)
    def record_step_by_owner(self, key, step):
        record = self.model.shelf(key).record
        if record is not None:
            self.record_step(key, record.token, step)

    @rule(key=keys, command=st.sampled_from(OperatorCommand))
    def operate(self, key, command):
        decision = run_sync(self.store.operate(key, command))
        assert decision is self.model.operate(key, command)

    @rule(limit=st.sampled_from((1, 2, 100)))
    def sweep(self, limit):
        """Rounds until nothing is left: which rows a round takes is the store's own choice."""
        keys, outcomes = self.model.outlived(), self.model.past_audit()
        has_needless = max(len(self.model.needless()), self.count_renewals()) >= limit
        keys_left, outcomes_left, has_more = len(keys), len(outcomes), True
        while has_more:
            report = run_sync(self.store.sweep(limit))
            assert report.keys == min(limit, keys_left)
            assert report.outcomes == min(limit, outcomes_left)
            keys_left -= report.keys
            outcomes_left -= report.outcomes
            # A round too many may be asked for after a full one, and never one too few.
            has_more = report.has_more
            assert has_more or keys_left == outcomes_left == 0
            assert limit in (report.keys, report.outcomes) or has_needless or not has_more
        for digest in keys:
            self.model.shelves[digest].record = None
            self.model.shelves[digest].steps = {}
            self.model.shelves[digest].arguments = None
        for shelf in self.model.needless():
            shelf.arguments = None
        for digest, outcome in outcomes:
            self.model.shelves[digest].outcomes.remove(outcome)

    def count_renewals(self):
        """What a store keeps of leases beside its records; the model has nothing of the kind."""
        return 0

    @rule(by_ms=durations_ms)
    def advance(self, by_ms):
        self.clock.advance(timedelta(milliseconds=by_ms))

    @rule(by_ms=st.sampled_from((1, 100)))
    def jump_back(self, by_ms):
        self.clock.jump_back(timedelta(milliseconds=by_ms))

    @rule(
        caller=st.sampled_from((None, "caller-1", "")),
        prefix=st.sampled_from(("", "key", "key-1")),
        conditions=st.frozensets(st.sampled_from(Condition), max_size=3),
        limit=st.integers(1, 4),
    )
    def list_records(self, caller, prefix, conditions, limit):
        expected = [
            record
            for record in (shelf.record for shelf in self.model.shelves.values())
            if record is not None
            and caller in (None, record.caller)
            and record.text.startswith(prefix)
            and (not conditions or condition_of(record, self.clock()) in conditions)
        ]
        expected.sort(key=lambda record: (-record.claimed_at_ms, record.digest))
        query = RecordQuery(caller, prefix, conditions, limit)
        found = run_sync(self.store.list_records(query)).keys
        assert [item.record for item in found] == expected[:limit]

    @invariant()
    def every_key_reads_as_in_the_model(self):
        for key in KEYS:
            found = run_sync(self.store.read(key, with_audit=True))
            expected = self.model.record_of(key)
            last = run_sync(self.store.last_outcome(key))
            if found is None:
                assert expected is None
                assert last is None
                continue
            shelf = self.model.shelf(key)
            assert found.record == expected
            assert found.condition is self.model.condition(key)
            assert found.now_ms == self.clock()
            assert found.arguments == shelf.arguments
            # Equal positions and instants have no order of their own.
            assert sorted(found.steps, key=by_name) == sorted(shelf.steps.values(), key=by_name)
            positions = [step.position for step in found.steps]
            assert positions == sorted(positions)
            assert sorted(found.outcomes, key=repr) == sorted(shelf.outcomes, key=repr)
            lean = run_sync(self.store.read(key))
            assert lean.outcomes == self.model.standing(key)
            lean.outcomes = found.outcomes
            assert lean == found
            # Which of them is the newest has no answer under a clock that jumps back.
            assert last is None or last in self.model.present(key)


def plain(result):
    """Errors are compared by what they are; answers are compared as they are."""
    return (type(result), result.key) if isinstance(result, StoreError) else result


def by_name(step):
    return step.name


class MemoryAgainstModel(StoreAgainstModel):
    def make_store(self, clock):
        return MemoryStore(now_ms=clock)


class SqliteAgainstModel(StoreAgainstModel):
    def make_store(self, clock):
        self.folder = tempfile.TemporaryDirectory(prefix="retrysafe-")
        return calm_store(Path(self.folder.name) / "records.db", clock)

    def teardown(self):
        super().teardown()
        self.folder.cleanup()


class PostgresAgainstModel(StoreAgainstModel):
    table: Table

    def make_store(self, clock):
        self.table.empty()
        return ClockedStore(self.table.url, clock, is_async=False)

    def count_renewals(self):
        sql = f"SELECT count(*) FROM {self.store.schema_name}.renewals"
        ((count,),) = run_sync(self.store._connector.fetch(sql))
        return count


# The same histories in every run: a failure is the change's, not the dice's. SQLite waits for the
# disk in every step and PostgreSQL for the network, so they get fewer of them.
PROFILE = settings(derandomize=True, deadline=None, database=None, print_blob=False)


@pytest.mark.parametrize(
    ("machine", "examples"), [(MemoryAgainstModel, 300), (SqliteAgainstModel, 200)]
)
def test_a_store_behaves_as_the_model(machine, examples):
    """No history that Hypothesis can find tells the store from the pure model."""
    profile = settings(PROFILE, max_examples=examples, stateful_step_count=40)
    run_state_machine_as_test(machine, settings=profile)


def test_postgres_behaves_as_the_model(postgres_server, postgres_url):
    """The same for PostgreSQL, which decides in SQL what the model decides in Python."""
    table = Table(postgres_url, postgres_server.url())
    machine = type("Machine", (PostgresAgainstModel,), {"table": table})
    # Without shrinking, which would take minutes over a network; the failing history is shown.
    profile = settings(
        PROFILE, max_examples=60, stateful_step_count=30, phases=[Phase.explicit, Phase.generate]
    )
    run_state_machine_as_test(machine, settings=profile)
    table.close()

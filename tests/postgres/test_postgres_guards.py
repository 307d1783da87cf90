"""The guards in PostgreSQL's statements: without any of them, a promise breaks on a real server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest

from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    Decision,
    Extension,
    Payload,
    SettleKind,
    StagedEntry,
    Step,
    StepWrite,
)
from retrysafe.errors import OperationInFlight, StoreUnavailable
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.postgres.claims import Takeover, write_takeovers
from retrysafe.testing.suite.probe import KEY, OTHER, key_of, request, settlement

# The shortest lease there is: on the server's clock it is over when the next statement begins.
INSTANT_MS = 0
ARGUMENTS = Payload("json.1", b"", b"[[1],{}]")
PAIR = (KEY, key_of("key-2"))


def claimed(store: PostgresStore, token: bytes, lease_ms: int = INSTANT_MS) -> Decision:
    ((answer,), _) = run_sync(store.commit([request(KEY, token, lease_ms=lease_ms)], []))
    return answer.decision


def ended(store: PostgresStore, token: bytes, **kwargs: object) -> Decision:
    _, (answer,) = run_sync(
        store.commit([], [settlement(SettleKind.COMPLETE, KEY, token, **kwargs)])
    )
    return answer.decision


def ended_in_a_batch(store: PostgresStore, token: bytes, **kwargs: object) -> Decision:
    """The same beside an ending of somebody else, so that it takes the statement of a batch."""
    other = settlement(SettleKind.COMPLETE, key_of("other"), mint_token())
    _, (answer, beside) = run_sync(
        store.commit([], [settlement(SettleKind.COMPLETE, KEY, token, **kwargs), other])
    )
    assert beside.decision is Decision.LOST
    return answer.decision


def taken_over(store: PostgresStore) -> tuple[bytes, bytes]:
    """The tokens of a zombie and of its successor."""
    zombie, successor = mint_token(), mint_token()
    claimed(store, zombie)
    assert claimed(store, successor, 60_000) is Decision.TAKE_OVER
    return zombie, successor


def zombie_cannot_settle(store: PostgresStore) -> None:
    zombie, _ = taken_over(store)
    assert ended(store, zombie) is Decision.LOST


def zombie_cannot_settle_in_a_batch(store: PostgresStore) -> None:
    zombie, _ = taken_over(store)
    assert ended_in_a_batch(store, zombie) is Decision.LOST


def outcome_never_changes(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token, 60_000)
    assert ended(store, token) is Decision.APPLY
    assert ended(store, token, payload=Payload("json.1", b"", b"2")) is Decision.CONFIRM
    assert len(run_sync(store.read(KEY, with_audit=True)).outcomes) == 1


def outcome_never_changes_in_a_batch(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token, 60_000)
    assert ended(store, token) is Decision.APPLY
    later = Payload("json.1", b"", b"2")
    assert ended_in_a_batch(store, token, payload=later) is Decision.CONFIRM
    assert len(run_sync(store.read(KEY, with_audit=True)).outcomes) == 1


def only_one_takes_over(store: PostgresStore) -> None:
    claimed(store, mint_token())
    record = run_sync(store.read(KEY)).record
    now_ms = record.lease_ends_at_ms
    rivals = [transitions.claim(record, request(KEY, mint_token()), now_ms)[0] for _ in range(2)]
    won = [run_sync(store._contended.replace(record, rival)) for rival in rivals]
    assert won == [True, False]


def zombie_cannot_extend(store: PostgresStore) -> None:
    zombie, _ = taken_over(store)
    (answer,) = run_sync(store.extend([Extension(KEY, zombie, 30_000)], 30.0))
    assert answer.decision is Decision.LOST


def zombie_cannot_extend_beside(store: PostgresStore) -> None:
    zombie, _ = taken_over(store)
    assert renewed_beside(store, zombie) is Decision.LOST


def renewed_beside(store: PostgresStore, token: bytes, *keys: Key) -> Decision | None:
    """What becomes of the first renewal; the others are of keys that are held by the same token."""
    wishes = [Extension(key, token, 60_000, True) for key in (KEY, *keys)]
    answer, *others = run_sync(store.extend(wishes, 0.5))
    assert {item.decision for item in others} <= {Decision.APPLY}
    return None if isinstance(answer, StoreUnavailable) else answer.decision


def renewal_beats_a_takeover(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token)
    record = run_sync(store.read(KEY)).record
    rival, _ = transitions.claim(record, request(KEY), record.lease_ends_at_ms)
    assert renewed_beside(store, token) is Decision.APPLY
    assert not run_sync(store._contended.replace(record, rival))


def renewal_beats_takeovers_together(store: PostgresStore) -> None:
    token = mint_token()
    run_sync(store.commit([request(key, token, lease_ms=INSTANT_MS) for key in PAIR], []))
    together = judged(store, *PAIR)
    assert renewed_beside(store, token) is Decision.APPLY
    taken, _ = run_sync(write_takeovers(store._statements.fetch, together))
    assert taken == {PAIR[1].digest}


def renewals_do_not_wait_for_a_takeover(store: PostgresStore) -> None:
    token = mint_token()
    run_sync(store.commit([request(key, token, lease_ms=INSTANT_MS) for key in PAIR], []))
    make_impatient(store)
    with closing(psycopg.connect(store.url)) as user:
        user.execute("SELECT 1")
        answer = run_sync(store.join(user).claim(request(KEY)))
        assert answer.decision is Decision.TAKE_OVER
        try:
            assert renewed_beside(store, token, PAIR[1]) is None
        except StoreUnavailable as error:
            pytest.fail(str(error))


def zombie_cannot_record_a_step(store: PostgresStore) -> None:
    zombie, _ = taken_over(store)
    write = StepWrite(KEY, zombie, Step("charge", 1, Payload("json.1", b"", b"1")))
    assert run_sync(store.record_step(write)) is Decision.LOST


def another_result_of_a_step_is_refused(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token, 60_000)
    first, other = (Step("charge", 1, Payload("json.1", b"", body)) for body in (b"1", b"2"))
    assert run_sync(store.record_step(StepWrite(KEY, token, first))) is Decision.APPLY
    assert run_sync(store.record_step(StepWrite(KEY, token, other))) is Decision.LOST


def stored_step_is_not_repeated_in_a_transaction(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token, 60_000)
    write = StepWrite(KEY, token, Step("charge", 1, Payload("json.1", b"", b"1")))
    assert run_sync(store.record_step(write)) is Decision.APPLY
    with closing(psycopg.connect(store.url)) as connection:
        connection.execute("SELECT 1")
        assert run_sync(store.join(connection).record_step(write)) is Decision.LOST


def zombie_cannot_settle_in_its_transaction(store: PostgresStore) -> None:
    zombie, _ = taken_over(store)
    url = store.url
    with closing(psycopg.connect(url)) as connection:
        connection.execute("SELECT 1")
        transaction = store.join(connection)
        decision = run_sync(transaction.settle(settlement(SettleKind.COMPLETE, KEY, zombie)))
    assert decision is Decision.LOST


def rival_of_an_atomic_run_is_told_at_once(store: PostgresStore) -> None:
    idem = Idempotency(store)
    with closing(psycopg.connect(store.url)) as first, closing(psycopg.connect(store.url)) as rival:
        # Without its guard the rival would wait for the first one, which waits for us.
        rival.execute("SET lock_timeout = '100ms'")
        with idem.atomic(first, KEY, name="order") as run:
            run.complete(1)
            with pytest.raises(OperationInFlight), idem.atomic(rival, KEY, name="order"):
                pass


def make_impatient(store: PostgresStore) -> None:
    """Without its guard a statement would wait for a transaction that waits for us."""
    connector = store._connector
    limit = timedelta(milliseconds=500)
    connector._options = dataclasses.replace(connector._options, statement_timeout=limit)
    run_sync(store.close())  # New connections have the new limit.


def batch_does_not_wait_for_an_atomic_run(store: PostgresStore) -> None:
    make_impatient(store)
    idem = Idempotency(store)
    with closing(psycopg.connect(store.url)) as user:
        with idem.atomic(user, KEY, name="order") as run:
            run.complete(1)
        try:
            claims = [request(KEY), request(key_of("other"))]
            answers, _ = run_sync(store.commit(claims, []))
        except StoreUnavailable as error:
            pytest.fail(str(error))
    assert [answer.decision for answer in answers] == [Decision.IN_FLIGHT, Decision.ADMIT]


def claim_does_not_wait_for_an_atomic_run(store: PostgresStore) -> None:
    make_impatient(store)
    idem = Idempotency(store)
    with closing(psycopg.connect(store.url)) as user:
        with idem.atomic(user, KEY, name="order") as run:
            run.complete(1)
        try:
            assert claimed(store, mint_token()) is Decision.IN_FLIGHT
        except StoreUnavailable as error:
            pytest.fail(str(error))


def claim_of_a_busy_key_keeps_atomic_runs_off(store: PostgresStore) -> None:
    # Skipping comes between an atomic run's lock and its row: only the lock can tell.
    store._contended.busy_keys.note([KEY.digest])
    with closing(psycopg.connect(store.url)) as user:
        user.execute("SELECT 1")
        transaction = store.join(user)
        assert run_sync(transaction.lock(KEY, None))
        assert claimed(store, mint_token(), 60_000) is Decision.IN_FLIGHT
        assert run_sync(transaction.claim(request(KEY))).decision is Decision.ADMIT


def takeover_does_not_wait_for_the_owner(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token)
    make_impatient(store)
    with closing(psycopg.connect(store.url)) as user:
        user.execute("SELECT 1")
        ending = settlement(SettleKind.COMPLETE, KEY, token)
        assert run_sync(store.join(user).settle(ending)) is Decision.APPLY
        try:
            assert claimed(store, mint_token()) is Decision.IN_FLIGHT
        except StoreUnavailable as error:
            pytest.fail(str(error))


def ending_does_not_wait_for_its_step(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token, 60_000)
    make_impatient(store)
    with closing(psycopg.connect(store.url)) as user:
        user.execute("SELECT 1")
        write = StepWrite(KEY, token, Step("charge", 1, Payload("json.1", b"", b"1")))
        assert run_sync(store.join(user).record_step(write)) is Decision.APPLY
        try:
            _, (answer,) = run_sync(store.commit([], [settlement(SettleKind.COMPLETE, KEY, token)]))
        except StoreUnavailable as error:
            pytest.fail(str(error))
    assert isinstance(answer, StoreUnavailable)


def judged(store: PostgresStore, *keys: Key) -> list[Takeover]:
    """Takeovers of keys that nobody holds, up to their writing."""
    made = []
    for place, key in enumerate(keys):
        found = run_sync(store.read(key))
        new, answer = transitions.claim(found.record, request(key), found.now_ms)
        made.append(Takeover(found.record, new, answer, place))
    return made


def only_one_of_a_batch_takes_over(store: PostgresStore) -> None:
    run_sync(store.commit([request(key, lease_ms=INSTANT_MS) for key in PAIR], []))
    rivals = [judged(store, *PAIR) for _ in range(2)]
    won = [run_sync(write_takeovers(store._statements.fetch, rival))[0] for rival in rivals]
    assert won == [{key.digest for key in PAIR}, set()]


def takeovers_do_not_wait_for_the_owner(store: PostgresStore) -> None:
    tokens = [mint_token() for _ in PAIR]
    wishes = zip(PAIR, tokens, strict=True)
    run_sync(store.commit([request(*wish, lease_ms=INSTANT_MS) for wish in wishes], []))
    make_impatient(store)
    together = judged(store, *PAIR)
    with closing(psycopg.connect(store.url)) as user:
        user.execute("SELECT 1")
        ending = settlement(SettleKind.COMPLETE, PAIR[0], tokens[0])
        assert run_sync(store.join(user).settle(ending)) is Decision.APPLY
        try:
            taken, _ = run_sync(write_takeovers(store._statements.fetch, together))
        except StoreUnavailable as error:
            pytest.fail(str(error))
    assert taken == {PAIR[1].digest}


def new_lives_start_without_steps(store: PostgresStore) -> None:
    claims = [request(key, arguments=ARGUMENTS) for key in PAIR]
    run_sync(store.commit(claims, []))
    step = Step("charge", 1, Payload("json.1", b"", b"1"))
    for item in claims:
        write = StepWrite(item.key, item.token, step)
        assert run_sync(store.record_step(write)) is Decision.APPLY
    endings = [
        settlement(SettleKind.COMPLETE, item.key, item.token, active_ms=INSTANT_MS)
        for item in claims
    ]
    run_sync(store.commit([], endings))
    answers, _ = run_sync(store.commit([request(key) for key in PAIR], []))
    assert [answer.decision for answer in answers] == [Decision.ADMIT] * 2
    assert [run_sync(store.read(key)).steps for key in PAIR] == [[], []]
    assert rows_of_arguments(store) == 0


def new_life_has_no_old_arguments(store: PostgresStore) -> None:
    token = mint_token()
    run_sync(store.commit([request(KEY, token, arguments=ARGUMENTS)], []))
    ended(store, token, active_ms=INSTANT_MS)
    assert claimed(store, mint_token()) is Decision.ADMIT
    assert rows_of_arguments(store) == 0


def arguments_go_with_their_key(store: PostgresStore) -> None:
    token = mint_token()
    run_sync(store.commit([request(KEY, token, arguments=ARGUMENTS)], []))
    wish = settlement(SettleKind.RELEASE, KEY, token, active_ms=INSTANT_MS)
    run_sync(store.commit([], [wish]))
    # The sweep's own clearing of needless arguments comes after; it must find nothing to do.
    ((removed, *_),) = run_sync(store._statements.fetch("sweep_pages", "(0,0)", "(100,0)", 10))
    assert (removed, rows_of_arguments(store)) == (1, 0)


def arguments_belong_to_one_life(store: PostgresStore) -> None:
    run_sync(store.commit([request(KEY, mint_token(), lease_ms=0, arguments=ARGUMENTS)], []))
    with closing(psycopg.connect(store.url, autocommit=True)) as connection:
        # As a release would sweep that does not know the table.
        connection.execute(f"DELETE FROM {store.schema_name}.keys")
        connection.execute("SELECT pg_sleep(0.002)")
    claimed(store, mint_token())
    assert run_sync(store.list_resumable(10, b"", ["charge"])) == []


def first_arguments_stay(store: PostgresStore) -> None:
    run_sync(store.commit([request(KEY, mint_token(), lease_ms=0, arguments=ARGUMENTS)], []))
    later = Payload("json.1", b"", b"2")
    ((answer,), _) = run_sync(store.commit([request(KEY, mint_token(), arguments=later)], []))
    assert answer.decision is Decision.TAKE_OVER
    assert run_sync(store.read(KEY)).arguments == ARGUMENTS


def harmless(store: PostgresStore, token: bytes, *, in_a_batch: bool = False) -> bool:
    """Ends an attempt so, and gives what the record says of its life."""
    endings = [settlement(SettleKind.RELEASE, KEY, token, nothing_happened=True)]
    if in_a_batch:
        endings.append(settlement(SettleKind.COMPLETE, key_of("other"), mint_token()))
    run_sync(store.commit([], endings))
    return run_sync(store.read(KEY)).record.nothing_happened


def crash_stays_uncertain(store: PostgresStore) -> None:
    _, successor = taken_over(store)
    assert not harmless(store, successor)


def crash_stays_uncertain_in_a_batch(store: PostgresStore) -> None:
    _, successor = taken_over(store)
    assert not harmless(store, successor, in_a_batch=True)


def crash_stays_uncertain_in_a_transaction(store: PostgresStore) -> None:
    _, successor = taken_over(store)
    ending = settlement(SettleKind.FAIL, KEY, successor, nothing_happened=True)
    with closing(psycopg.connect(store.url)) as connection:
        connection.execute("SELECT 1")
        assert run_sync(store.join(connection).settle(ending)) is Decision.APPLY
        connection.commit()
    assert not run_sync(store.read(KEY)).record.nothing_happened


def crash_stays_uncertain_beside_entries(store: PostgresStore) -> None:
    _, successor = taken_over(store)
    ending = settlement(SettleKind.FAIL, KEY, successor, nothing_happened=True)
    ending.entries = (StagedEntry("entry-1", "mail", "application/json", b"1"),)
    run_sync(store.commit([], [ending]))
    assert not run_sync(store.read(KEY)).record.nothing_happened


def stored_step_has_happened(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token, 60_000)
    write = StepWrite(KEY, token, Step("charge", 1, Payload("json.1", b"", b"1")))
    assert run_sync(store.record_step(write)) is Decision.APPLY
    assert not harmless(store, token)


def mark_is_of_one_claim(store: PostgresStore) -> None:
    token = mint_token()
    claimed(store, token, 60_000)
    assert harmless(store, token)
    with closing(psycopg.connect(store.url, autocommit=True)) as connection:
        # As a release ends the next attempt that does not know of marks.
        connection.execute(f"UPDATE {store.schema_name}.keys SET token = digest, attempt = 2")
    assert not run_sync(store.read(KEY)).record.nothing_happened


def corrections(store: PostgresStore) -> list[Takeover]:
    """Corrections of two keys, of which a step is stored since they were judged."""
    made = []
    for key in PAIR:
        token = mint_token()
        run_sync(store.commit([request(key, token)], []))
        write = StepWrite(key, token, Step("charge", 1, Payload("json.1", b"", b"1")))
        run_sync(store.record_step(write))
        run_sync(store.commit([], [settlement(SettleKind.FAIL, key, token)]))
        found = run_sync(store.read(key))
        record = dataclasses.replace(found.record, nothing_happened=True)
        wish = request(key, None, OTHER, takes_corrections=True)
        changed, answer = transitions.claim(record, wish, found.now_ms)
        assert answer.decision is Decision.TAKE_OVER
        made.append(Takeover(record, changed, answer, len(made)))
    return made


def correction_looks_for_steps(store: PostgresStore) -> None:
    first, _ = corrections(store)
    assert not run_sync(store._contended.replace(first.old, first.new, is_new_request=True))


def corrections_look_for_steps(store: PostgresStore) -> None:
    taken, _ = run_sync(write_takeovers(store._statements.fetch, corrections(store)))
    assert taken == set()


def rows_of_arguments(store: PostgresStore) -> int:
    with closing(psycopg.connect(store.url, autocommit=True)) as connection:
        found = connection.execute(f"SELECT count(*) FROM {store.schema_name}.arguments")
        return found.fetchone()[0]


@dataclasses.dataclass(frozen=True)
class Guard:
    """A part of a statement, and the property that breaks without it."""

    statement: str
    guard: str
    without: str
    check: Callable[[PostgresStore], None]


NO_STEP = "NOT EXISTS (SELECT 1 FROM {schema}.steps AS s WHERE s.digest = k.digest)"
NOTHING_HAPPENED = f"(CASE WHEN k.nothing_happened_token = k.token THEN {NO_STEP} ELSE false END)"

GUARDS = [
    Guard("settle_one", " AND NOT k.is_uncertain", "", crash_stays_uncertain),
    Guard("commit", " AND NOT k.is_uncertain", "", crash_stays_uncertain_in_a_batch),
    Guard("settle_record", " AND NOT k.is_uncertain", "", crash_stays_uncertain_in_a_transaction),
    Guard("settle_staged", " AND NOT k.is_uncertain", "", crash_stays_uncertain_beside_entries),
    Guard("read_records", NO_STEP, "true", stored_step_has_happened),
    Guard(
        "read_records",
        "k.nothing_happened_token = k.token",
        "k.nothing_happened_token IS NOT NULL",
        mark_is_of_one_claim,
    ),
    Guard(
        "replace_record",
        f"{NOTHING_HAPPENED} = $28::boolean",
        "$28::boolean IS NOT NULL",
        correction_looks_for_steps,
    ),
    Guard(
        "replace_records",
        f"{NOTHING_HAPPENED} = w.old_nothing_happened",
        "w.old_nothing_happened IS NOT NULL",
        corrections_look_for_steps,
    ),
    Guard("commit", " AND k.token = w.token", "", zombie_cannot_settle_in_a_batch),
    Guard("commit", " AND k.state = 1", "", outcome_never_changes_in_a_batch),
    Guard("settle_one", "k.token = $2::bytea", "$2::bytea <> ''", zombie_cannot_settle),
    Guard("settle_one", " AND k.state = 1", "", outcome_never_changes),
    Guard(
        "claim_one",
        "set_config('lock_timeout', '50ms', true)",
        "''::text",
        claim_does_not_wait_for_an_atomic_run,
    ),
    Guard(
        "replace_record",
        "k.token = $14 AND k.state = $15::smallint AND k.attempt = $16\n"
        "        AND k.lease_ends_at_ms <= $17",
        "(k.token <> $14 OR k.state = $15::smallint OR k.attempt = $16)",
        only_one_takes_over,
    ),
    Guard(
        "replace_record",
        "\n    WHERE r.token <> $14 OR r.lease_ends_at_ms <= $17",
        "",
        renewal_beats_a_takeover,
    ),
    Guard(
        "replace_record",
        "FOR UPDATE OF k",
        "FOR NO KEY UPDATE OF k",
        renewals_do_not_wait_for_a_takeover,
    ),
    Guard(
        "replace_records",
        "AND h.old_lease_ends_at_ms < r.lease_ends_at_ms",
        "AND false",
        renewal_beats_takeovers_together,
    ),
    Guard(
        "replace_records",
        " AND k.token = w.old_token AND k.state = w.old_state\n"
        "        AND k.attempt = w.old_attempt AND k.lease_ends_at_ms <= w.old_lease_ends_at_ms",
        "",
        only_one_of_a_batch_takes_over,
    ),
    Guard(
        "replace_records",
        "set_config('lock_timeout', '50ms', true)",
        "''::text",
        takeovers_do_not_wait_for_the_owner,
    ),
    Guard(
        "replace_records",
        "DELETE FROM {schema}.steps\n"
        "    WHERE digest IN (SELECT digest FROM replaced WHERE is_new_request)",
        "SELECT 1",
        new_lives_start_without_steps,
    ),
    Guard(
        "replace_records",
        "DELETE FROM {schema}.arguments\n"
        "    WHERE digest IN (SELECT digest FROM replaced WHERE is_new_request)",
        "SELECT 1",
        new_lives_start_without_steps,
    ),
    Guard("extend", " AND k.token = w.token", "", zombie_cannot_extend),
    Guard("extend_beside", " AND k.token = w.token", "", zombie_cannot_extend_beside),
    Guard("extend_beside", " SKIP LOCKED", "", renewals_do_not_wait_for_a_takeover),
    Guard("record_step", "AND token = $2", "AND $2::bytea <> ''", zombie_cannot_record_a_step),
    Guard(
        "has_step", " AND body = $5", " AND $5::bytea <> ''", another_result_of_a_step_is_refused
    ),
    Guard(
        "record_step_joined",
        "FROM stored",
        "FROM held",
        stored_step_is_not_repeated_in_a_transaction,
    ),
    Guard(
        "settle_record",
        "AND k.token = $2::bytea",
        "AND $2::bytea <> ''",
        zombie_cannot_settle_in_its_transaction,
    ),
    Guard(
        "replace_record",
        "WHERE $19::boolean AND $20::text IS NULL AND digest",
        "WHERE $19::boolean AND $20::text IS NOT NULL AND digest",
        new_life_has_no_old_arguments,
    ),
    Guard(
        "replace_record",
        "WHERE $19::boolean OR a.first_claimed_at_ms <> excluded.first_claimed_at_ms",
        "",
        first_arguments_stay,
    ),
    Guard(
        "sweep_pages",
        "DELETE FROM {schema}.arguments WHERE digest IN (SELECT digest FROM removed)",
        "SELECT 1",
        arguments_go_with_their_key,
    ),
    Guard(
        "list_resumable",
        " AND k.first_claimed_at_ms = a.first_claimed_at_ms",
        "",
        arguments_belong_to_one_life,
    ),
    Guard(
        "commit",
        ", set_config('lock_timeout', '50ms', true)",
        "",
        batch_does_not_wait_for_an_atomic_run,
    ),
    Guard(
        "skip_locked",
        "pg_try_advisory_xact_lock_shared(number)",
        "number IS NOT NULL",
        claim_of_a_busy_key_keeps_atomic_runs_off,
    ),
    Guard(
        "replace_record",
        "set_config('lock_timeout', $23::text, true)",
        "$23::text",
        takeover_does_not_wait_for_the_owner,
    ),
    Guard("skip_locked", " SKIP LOCKED", "", ending_does_not_wait_for_its_step),
    Guard(
        "try_lock",
        "pg_try_advisory_xact_lock($1::bigint)",
        "$1::bigint IS NOT NULL",
        rival_of_an_atomic_run_is_told_at_once,
    ),
]


def opened(url: str, guard: Guard | None) -> PostgresStore:
    store = postgres_store(url, is_async=False)
    store.url = url.partition("?")[0]
    if guard is not None:
        text = store._statements.texts[guard.statement]
        part = guard.guard.replace("{schema}", store.schema_name)
        assert text.count(part) == 1
        changed = {guard.statement: text.replace(part, guard.without)}
        store._statements.texts = {**store._statements.texts, **changed}
    return store


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.check.__name__)
@pytest.mark.parametrize("is_there", [True, False], ids=["with", "without"])
def test_the_property_needs_its_guard(migrated_url, guard, is_there):
    """The property holds on the statements as they are, and breaks without the guard."""
    store = opened(migrated_url, None if is_there else guard)
    try:
        if is_there:
            guard.check(store)
        else:
            # What breaks is the property, not the changed statement.
            broken = (AssertionError, pytest.fail.Exception, psycopg.errors.LockNotAvailable)
            with pytest.raises(broken):
                guard.check(store)
    finally:
        run_sync(store.close())

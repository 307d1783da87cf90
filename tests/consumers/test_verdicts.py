"""The table of verdicts: every error has its row, and every row is what happens."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest

from retrysafe import Policy, errors
from retrysafe.consumers import BackOff, Message, PayloadInvalid
from retrysafe.consumers.verdict import TABLE, Action, Outage, Verdict, rule_of
from retrysafe.stores import MemoryStore
from tests.consumers.scripted import Tasks, Threads, message

DECLARED = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, errors.RetrysafeError)
]
OURS, DOWNSTREAM, OWN = Outage.OURS, Outage.DOWNSTREAM, Outage.NONE
# Written down here once more, by hand: a row that is changed must be changed twice.
EXPECTED = {
    "dead_letter": "PayloadInvalid KeyInvalid FingerprintImpossible KeyReused DigestCollision "
    "OperationFailed AttemptsExhausted CommitHookFailed",
    "ack": "OutcomeUnavailable",
    "leave": "OperationInFlight ClaimLost OutcomeNotStored Closed",
    OURS: "StoreUnavailable StoreNotWritable StoreMissing SchemaMissing SchemaTooNew SchemaChanged "
    "StoreError InvalidInput CallerMissing SecretMissing PolicyInvalid StoreUrlInvalid "
    "TransactionMissing FlowSuspended",
    DOWNSTREAM: "StepNotStored CompensationFailed OperationUndone DeliveryFailed ConnectionError "
    "TimeoutError",
    OWN: "StoreRejected StepReused StepsChanged StepUnavailable ArgumentsNotStorable "
    "AwaitForgotten OutcomeMissing OperatorRefused ResumedRequestRefused RetrysafeError Exception",
}


def made(kind):
    """An error of this class."""
    options = {"key": "k"}
    if kind is errors.OperationInFlight:
        options["retry_after"] = timedelta(seconds=7)
    if issubclass(kind, errors.OperationFailed):
        options["type_name"] = "Declined"
    return kind("why", **options) if issubclass(kind, errors.RetrysafeError) else kind("why")


@pytest.fixture(params=[Threads, Tasks])
def way(request):
    way = request.param(MemoryStore(), caller="unused")
    yield way
    way.close()


def test_every_error_has_a_row_of_its_own():
    """A new error cannot slip through by its parent's row: somebody must decide about it."""
    assert set(DECLARED) <= set(TABLE)


def test_the_table_is_what_was_decided():
    told = {}
    for kind, rule in TABLE.items():
        name = rule.action.value if rule.action is not Action.RETRY else rule.outage
        told.setdefault(name, []).append(kind.__name__)
    assert {name: set(kinds) for name, kinds in told.items()} == {
        name: set(kinds.split()) for name, kinds in EXPECTED.items()
    }


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_what_the_engine_raises_gives_the_verdict_of_its_row(way, kind, monkeypatch):
    """The whole table, through the whole judge, in threads and in a loop."""
    judge = way.judge(lambda message: None, tries=3)

    async def answer(call, invoke):
        raise made(kind)

    monkeypatch.setattr(judge._engine, "answer", answer)
    verdict = way.run(judge.handle(message()))
    rule = TABLE[kind]
    assert (verdict.action, verdict.outage, verdict.has_run) == (rule.action, rule.outage, False)
    assert rule.because in verdict.reason


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_an_outage_is_retried_for_ever_and_a_failure_of_the_message_is_not(way, kind, monkeypatch):
    """However often it was tried: only what may be the message's own fault dead-letters it."""
    judge = way.judge(lambda message: None, tries=3)

    async def answer(call, invoke):
        raise made(kind)

    monkeypatch.setattr(judge._engine, "answer", answer)
    verdicts = [way.run(judge.handle(message(deliveries=1_000), tries=1_000)) for _ in range(3)]
    verdict, rule = verdicts[-1], TABLE[kind]
    assert verdicts[1].action is rule.action
    is_retried = rule.action is Action.RETRY
    if is_retried and rule.outage is Outage.NONE:
        assert verdict.action is Action.DEAD_LETTER
        assert "tries failed" in verdict.reason
    else:
        assert verdict.action is rule.action
    assert verdict.delay <= BackOff().longest


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_what_the_handler_itself_raises_never_acks_and_never_pauses(way, kind):
    """The handler may meet the same errors with other keys and stores: they say less there."""

    def fail(message):
        raise made(kind)

    verdict = way.run(way.judge(fail, tries=3).handle(message()))
    assert verdict.has_run
    assert verdict.action is not Action.ACK
    assert verdict.outage is not Outage.OURS
    if issubclass(kind, errors.StoreError) and kind is not errors.StoreRejected:
        expected = Action.DEAD_LETTER if kind is errors.DigestCollision else Action.RETRY
        assert verdict.action is expected


def test_what_ends_the_process_is_no_verdict():
    with pytest.raises(KeyboardInterrupt):
        rule_of(KeyboardInterrupt())


def test_the_pause_doubles_and_has_a_limit():
    pause = BackOff(timedelta(seconds=1), timedelta(seconds=10))
    assert [pause.after(tries).total_seconds() for tries in (0, 1, 2, 3, 4, 5, 10_000)] == [
        *(1, 1, 2, 4, 8, 10, 10),
    ]


def test_only_ack_drop_and_dead_letter_are_final():
    final = {action for action in Action if Verdict(action, "").is_final}
    assert final == {Action.ACK, Action.DROP, Action.DEAD_LETTER}


def test_a_message_tells_what_is_wrong_with_its_body():
    """Poison has a reason that people can read."""
    with pytest.raises(PayloadInvalid, match="not UTF-8"):
        Message(b"\xff").json()
    with pytest.raises(PayloadInvalid, match="not JSON"):
        Message(b"{").json()
    assert Message(b'{"a": 1}').json() == {"a": 1}


def test_a_policy_that_is_terminal_dead_letters(way):
    """A failure for good is stored, and the redelivery of it runs nothing."""
    runs = []

    def decline(message):
        runs.append(message)
        raise PermissionError("declined")

    judge = way.judge(decline, policy=Policy(terminal=(PermissionError,)))
    first = way.run(judge.handle(message()))
    again = way.run(judge.handle(message(deliveries=2)))
    assert [first.action, again.action] == [Action.DEAD_LETTER] * 2
    assert "declined" in again.reason
    assert len(runs) == 1

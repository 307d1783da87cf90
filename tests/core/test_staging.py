"""Staging in an attempt: entries stand or fall with the outcome, and each is written once."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from retrysafe.core.atomic.block import AtomicBlock
from retrysafe.core.atomic.complete_in import stage_in
from retrysafe.core.keys.key import Key
from retrysafe.core.keys.secret import Secrets
from retrysafe.core.model import Decision, Ending, StagedEntry
from retrysafe.core.outbox.entries import EntryClaim, EntryQuery
from retrysafe.core.outbox.staging import ENTRIES_LIMIT, Staging, entry_key
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Capabilities, Fate, Waits
from retrysafe.core.settings import Settings
from retrysafe.errors import ClaimLost, InvalidInput, StepsChanged, StoreUnavailable
from retrysafe.stores.memory.store import MemoryStore
from tests.core.building import KEY, TOKEN, call
from tests.core.driving import Fault, ManualClock, World, drive, ports_over
from tests.core.sample_types import Declined
from tests.core.transacting import FakeTransaction

SECRET = b"0123456789abcdef"
ENTRY = StagedEntry("entry:1", "t", "text/plain", b"x")


def world(**options):
    return World(join=options.pop("join", lambda connection: FakeTransaction()), **options)


def entries(world):
    """What could be delivered now, oldest first."""
    found = drive(world.store.outbox.list_entries(EntryQuery(limit=10_000)))
    return [item.entry for item in reversed(found)]


def staging(*payloads, ending=None, topic="orders.paid", **options):
    """An operation that stages, and then returns or raises."""

    async def operation(attempt):
        for payload in payloads:
            attempt.outbox.stage(topic, payload, **options)
        if isinstance(ending, BaseException):
            raise ending
        return ending

    return operation


def plain():
    return Staging(KEY, None, lambda: None)


# With the outcome, or not at all.


def test_entries_are_written_with_the_outcome():
    """One settlement holds both, so that no crash can come between them."""
    made = world()
    made.first.answer(call(), staging("a", "b", aggregate="order-1"))
    (settlement,) = made.first.writer.settlements
    assert [entry.body for entry in settlement.entries] == [b"a", b"b"]
    assert [(entry.body, entry.aggregate) for entry in entries(made)] == [
        (b"a", "order-1"),
        (b"b", "order-1"),
    ]


def test_a_replay_stages_nothing():
    made = world()
    for _ in range(2):
        made.first.answer(call(), staging("a"))
    assert len(entries(made)) == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_operation_that_raises_stages_nothing(is_terminal):
    """Whether the failure is stored or frees the key: what it meant to send is not sent."""
    policy = Policy(terminal=(Declined,)) if is_terminal else Policy()
    made = world()
    with pytest.raises(Declined):
        made.first.answer(call(policy=policy), staging("a", ending=Declined("no")))
    assert entries(made) == []
    assert made.kinds[-1] == ("failed" if is_terminal else "released")


@pytest.mark.parametrize(
    ("ending", "count"),
    [(Ending.SUCCEEDED, 1), (Ending.FAILED, 1), (Ending.RELEASED, 0)],
)
def test_a_returned_value_that_is_kept_keeps_its_entries(ending, count):
    """A stored refusal may tell others about itself; a released key runs again and stages then."""
    made = world()
    made.first.answer(call(judge=lambda value: ending), staging("a", ending="value"))
    assert len(entries(made)) == count


def test_a_second_attempt_stages_under_the_same_keys():
    """The first crashed after staging and left nothing; receivers cannot tell the difference."""
    made = world()
    seen = []

    async def operation(attempt):
        seen.append(attempt.outbox.stage("t", attempt.number))
        if attempt.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.first.answer(call(), operation)
    assert entries(made) == []
    made.clock.seconds += 3_600
    made.process().answer(call(), operation)
    assert [entry.body for entry in entries(made)] == [b"2"]
    assert seen == [entries(made)[0].key] * 2


def test_a_zombie_cannot_stage():
    """Its lease is over, so somebody else may be staging; its ending is refused as well."""
    made = world()

    async def operation(attempt):
        made.clock.seconds += 3_600
        attempt.outbox.stage("t", 1)

    with pytest.raises(ClaimLost):
        made.first.answer(call(), operation)
    assert entries(made) == []


def test_a_zombie_that_staged_before_it_was_one_writes_nothing():
    """The token is checked in the transaction that would have written its entries."""
    made = world()

    async def overtaken(attempt):
        attempt.outbox.stage("t", "zombie")
        made.clock.seconds += 3_600
        made.process().answer(call(), staging("owner"))

    with pytest.raises(ClaimLost):
        made.first.answer(call(), overtaken)
    assert [entry.body for entry in entries(made)] == [b"owner"]


def test_a_lost_answer_stages_once():
    """The settlement is repeated with its entries, and confirmed."""
    made = world()
    made.first.writer.settle_faults.append(Fault(error=StoreUnavailable("cut"), is_after=True))
    made.first.answer(call(), staging("a"))
    assert len(made.first.writer.settlements) == 2
    assert len(entries(made)) == 1


def test_an_outcome_that_cannot_be_stored_still_delivers():
    """The operation has run; what it staged goes out although its value is withheld."""
    made = world()
    made.first.answer(call(), staging("a", ending=object()))
    assert made.first.writer.payload_forms == ["withheld.1"]
    assert len(entries(made)) == 1


def test_nothing_can_be_staged_after_the_outcome():
    """A thread that the operation left behind would stage into the void."""
    made = world()
    kept = []

    async def operation(attempt):
        kept.append(attempt.outbox)

    made.first.answer(call(), operation)
    with pytest.raises(InvalidInput, match="written already"):
        kept[0].stage("t", 1)


def test_a_store_without_an_outbox_refuses_at_once():
    """Better than an operation whose messages nobody keeps."""
    made = World()
    made.first.store.capabilities = Capabilities(Waits.NEVER)
    with pytest.raises(InvalidInput, match="no outbox"):
        made.first.answer(call(), staging("a"))


# In the user's transaction.


@pytest.mark.parametrize(("fate", "count"), [(Fate.STANDS, 0), (Fate.OPEN, 0), (Fate.UNDONE, 1)])
def test_entries_go_into_the_transaction_that_completes(fate, count):
    """And with the ordinary settlement when that transaction was rolled back."""
    transaction = FakeTransaction(settles=Decision.APPLY, fate_is=fate)
    made = world(join=lambda connection: transaction)

    async def operation(attempt):
        attempt.outbox.stage("t", "a")
        attempt.complete_in("connection", 1)
        with pytest.raises(InvalidInput, match="written already"):
            attempt.outbox.stage("t", "late")
        return 2

    made.first.answer(call(), operation)
    assert [entry.body for entry in transaction.staged] == [b"a"]
    assert len(entries(made)) == count


def test_complete_in_works_without_entries():
    transaction = FakeTransaction(settles=Decision.APPLY)
    made = world(join=lambda connection: transaction)

    async def operation(attempt):
        attempt.complete_in("connection", 1)

    assert made.first.answer(call(), operation).value == 1
    assert transaction.staged == []


def block(store=None):
    transaction = FakeTransaction()
    ports = ports_over(
        None,
        ManualClock(transaction.database.clock),
        store=store or MemoryStore(),
        mint_token=lambda: TOKEN,
    )
    return transaction, AtomicBlock(call(), transaction, ports, Settings(secrets=Secrets(SECRET)))


@pytest.mark.parametrize("how", ["complete", "fail"])
def test_an_atomic_block_stages_in_its_own_transaction(how):
    """With the outcome or the stored failure; both commit with the user's writes."""
    transaction, made = block()
    drive(made.enter())
    key = made.outbox.stage("t", "a", name="n")
    assert key == entry_key(SECRET, KEY, "t", "n")
    assert made.outbox is made.outbox
    drive(made.complete(1) if how == "complete" else made.fail(Declined("no")))
    assert [entry.key for entry in transaction.staged] == [key]
    with pytest.raises(InvalidInput):
        made.outbox.stage("t", "late")


def test_an_atomic_block_without_an_outbox_refuses():
    _, made = block(SimpleNamespace(capabilities=Capabilities(Waits.NEVER)))
    drive(made.enter())
    with pytest.raises(InvalidInput, match="no outbox"):
        made.outbox.stage("t", "a")


def test_an_entry_of_no_operation_is_staged_between_two_marks():
    transaction = FakeTransaction()
    assert drive(stage_in(transaction, ENTRY)) == "entry:1"
    assert (transaction.calls, transaction.staged) == (["begin", "stage", "keep"], [ENTRY])


def test_a_failed_staging_undoes_itself_and_nothing_else():
    transaction = FakeTransaction(stage_error=StoreUnavailable("no"))
    with pytest.raises(StoreUnavailable):
        drive(stage_in(transaction, ENTRY))
    assert transaction.calls == ["begin", "stage", "undo"]


# Names.


def test_entries_of_a_topic_are_numbered():
    """So their keys differ, and are the same whenever the operation stages in the same order."""
    first, again = plain(), plain()
    keys = [first.stage(topic, 1) for topic in ("a", "b", "a")]
    assert len(set(keys)) == 3
    assert [again.stage(topic, 2) for topic in ("b", "a", "a")] == [keys[1], keys[0], keys[2]]


def test_a_name_makes_the_key_whatever_the_order():
    one = plain()
    keys = [one.stage("t", 1, name=name) for name in ("x", "y")]
    two = plain()
    assert [two.stage("t", 1, name=name) for name in ("y", "x")] == keys[::-1]


def test_the_same_entry_again_is_one_entry():
    """As when a transaction inside the operation is tried again."""
    made = plain()
    assert made.stage("t", 1, name="n") == made.stage("t", 1, name="n")
    assert len(made.entries()) == 1


def test_two_different_entries_of_one_name_are_refused():
    """Receivers would drop one of them."""
    made = plain()
    made.stage("t", 1, name="n")
    with pytest.raises(InvalidInput, match="named 'n'"):
        made.stage("t", 2, name="n")
    assert [entry.body for entry in made.entries()] == [b"1"]


def test_threads_that_stage_at_once_get_different_keys():
    made = plain()
    barrier = threading.Barrier(4)

    def stage():
        barrier.wait(60)
        for _ in range(100):
            made.stage("t", 1)

    threads = [threading.Thread(target=stage) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({entry.key for entry in made.entries()}) == 400


def test_a_number_that_is_taken_is_passed_over():
    """A counter that two threads read at once gives both of them the same number."""
    made = plain()
    made._entries["t", 1] = ENTRY
    assert made.stage("t", "x") == entry_key(None, KEY, "t", 2)


def test_an_operation_stages_a_bounded_number():
    made = plain()
    for _ in range(ENTRIES_LIMIT):
        made.stage("t", 1)
    with pytest.raises(InvalidInput, match="at most 1,000"):
        made.stage("t", 1)


def test_a_relay_may_claim_what_was_staged():
    made = world()
    made.first.answer(call(), staging("a"))
    found = drive(made.store.outbox.claim(EntryClaim(TOKEN, 10, 1_000)))
    assert [entry.origin for entry in found.entries] == [KEY.text]


# Beside steps.


def test_nothing_is_staged_inside_a_step():
    """A later attempt skips the step, and the entry would be lost without a word."""
    made = world()

    async def operation(attempt):
        with pytest.raises(InvalidInput, match="inside a step"):
            await attempt.step("inner", lambda: attempt.outbox.stage("t", "inside"))
        attempt.outbox.stage("t", "before")
        await attempt.step("charge", lambda: 7)
        attempt.outbox.stage("t", "after")

    made.first.answer(call(), made.first.operating(operation))
    assert [entry.body for entry in entries(made)] == [b"before", b"after"]


def test_an_operation_inside_a_step_of_another_one_stages_its_own():
    """Its key is its own, so it is skipped or repeated as a whole."""
    made = world()

    async def inner(attempt):
        attempt.outbox.stage("t", "inner")

    other = call(key=Key("inner", caller="tenant-1"))

    async def nested():
        return (await made.first.engine.answer(other, made.first.operating(inner))).value

    async def outer(attempt):
        await attempt.step("inner", nested)

    made.first.answer(call(), made.first.operating(outer))
    assert [entry.body for entry in entries(made)] == [b"inner"]


def test_a_resumed_operation_stages_what_the_crashed_one_had_staged():
    """The step is skipped, the staging around it is not."""
    made = world()
    calls = []

    async def operation(attempt):
        await attempt.step("charge", lambda: calls.append(1))
        attempt.outbox.stage("t", f"receipt of attempt {attempt.number}")
        if attempt.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.first.answer(call(), made.first.operating(operation))
    made.clock.seconds += 3_600
    second = made.process()
    second.answer(call(), second.operating(operation))
    assert calls == [1]
    assert [entry.body for entry in entries(made)] == [b"receipt of attempt 2"]


def test_a_cancelled_caller_with_steps_does_not_lose_what_was_staged():
    """Its last write is finished without it, entries included."""
    made = world()

    async def operation(attempt):
        if attempt.number == 1:
            raise KeyboardInterrupt
        attempt.outbox.stage("t", "a")
        return "value"

    with pytest.raises(KeyboardInterrupt):
        made.first.answer(call(), made.first.operating(operation))
    made.clock.seconds += 3_600
    second = made.process()
    # The stored steps are read at the end, and the caller is cancelled while they are.
    second.store.read_faults.append(Fault(pauses=True))
    flow = second.start(call(), second.operating(operation))
    flow.throw(KeyboardInterrupt())
    (last_write,) = made.background
    drive(last_write)
    assert [entry.body for entry in entries(made)] == [b"a"]


def test_an_operation_that_left_steps_out_sends_nothing():
    """Its word does not count, whether its caller is still there or not."""
    for is_cancelled in (False, True):
        made = world()

        async def operation(attempt):
            if attempt.number == 1:
                await attempt.step("charge", lambda: 7)
                raise KeyboardInterrupt
            attempt.outbox.stage("t", "a")

        with pytest.raises(KeyboardInterrupt):
            made.first.answer(call(), made.first.operating(operation))
        made.clock.seconds += 3_600
        second = made.process()
        if is_cancelled:
            second.store.read_faults.append(Fault(pauses=True))
            second.start(call(), second.operating(operation)).throw(KeyboardInterrupt())
            drive(made.background.pop())
        else:
            with pytest.raises(StepsChanged):
                second.answer(call(), second.operating(operation))
        assert entries(made) == []

"""The four acts: race, crash, zombie, mismatch. Each tells, does, looks, and notes what it saw."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from rich.table import Table

from retrysafe.core.call import Answer
from retrysafe.core.model import Condition, StoredKey
from retrysafe.core.policy import InFlight
from retrysafe.errors import KeyReused, OperationInFlight, StoreUnavailable
from retrysafe.idempotency import Idempotency
from retrysafe.story.charging import CALLER, Charge, Receipt
from retrysafe.story.ledger import CHARGED, STARTED, Ledger
from retrysafe.story.processes import Processes, WorkerProcess
from retrysafe.story.story import Story
from retrysafe.story.worker import Job

AMOUNT: Final = 4_200
PROCESSES: Final = 4
THREADS: Final = 8
# The race is about the claim, not about the lease: it must not end on a slow machine.
LONG_LEASE: Final = timedelta(seconds=30)
# A frozen worker may be caught in the middle of a write, about once in a thousand times.
FREEZE_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Stage:
    """What the acts share."""

    story: Story
    idempotency: Idempotency
    processes: Processes
    ledger: Ledger
    store: str
    run_id: str
    lease: timedelta

    def key(self, name: str) -> str:
        """A key of this run: on a store that is used again, it must be a new one."""
        return f"{name}-{self.run_id}"

    def job(self, key: str, *, lease: timedelta, threads: int = 1, is_held: bool = False) -> Job:
        """What a worker is told to do."""
        return Job(
            store=self.store,
            ledger=str(Path(self.ledger.path).resolve()),
            key=key,
            amount=AMOUNT,
            lease_ms=lease // timedelta(milliseconds=1),
            threads=threads,
            work_seconds=0.0 if is_held else 0.3,
            is_held=is_held,
        )

    def stored(self, key: str) -> StoredKey:
        """The record as the store has it now."""
        stored = self.idempotency.read(key, caller=CALLER)
        assert stored is not None  # Every act looks after it has claimed.
        return stored

    def stored_receipts(self, key: str) -> list[str]:
        """The receipts in the stored outcomes; there must never be two."""
        return [json.loads(item.payload.body)["receipt"] for item in self.stored(key).outcomes]

    def counts(self, key: str) -> tuple[int, int]:
        """How often the operation was started and how often money moved, by the ledger."""
        return len(self.ledger.entries(STARTED, key)), len(self.ledger.entries(CHARGED, key))


def race(stage: Stage) -> None:
    """Many callers, one key, one execution."""
    story, key = stage.story, stage.key("order-17")
    callers = PROCESSES * THREADS
    story.act(f"1  Race: {callers} callers, one key", "race")
    story.say(
        f"{PROCESSES} processes with {THREADS} threads each charge the same card at the same "
        f"moment, all with the key {key!r}. One of them wins the claim and works; the others "
        "wait for its outcome, because their policy says so: InFlight.WAIT. By default they would "
        "be refused, as the retry in the next act is."
    )
    job = stage.job(key, lease=LONG_LEASE, threads=THREADS)
    workers = stage.processes.start_all([job] * PROCESSES)
    for worker in workers:
        worker.go()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("process", "callers", "ran it", "got a replay", "receipt"):
        table.add_column(title, justify="left" if title == "receipt" else "right")
    receipts: set[str] = set()
    ran = replayed = 0
    for worker in workers:
        answers = [worker.hear_message("receipt") for _ in range(THREADS)]
        mine = {item["receipt"] for item in answers}
        replays = sum(item["is_replay"] for item in answers)
        table.add_row(
            str(worker.pid), str(THREADS), str(THREADS - replays), str(replays), ", ".join(mine)
        )
        receipts |= mine
        ran += THREADS - replays
        replayed += replays
    story.show(table)
    started, charged = stage.counts(key)
    story.see(f"the ledger has {started} execution and {charged} charge for this key")
    story.expect("executions in the ledger", expected=1, actual=started)
    story.expect("charges in the ledger", expected=1, actual=charged)
    story.expect("callers that ran it", expected=1, actual=ran)
    story.expect("callers that got a replay", expected=callers - 1, actual=replayed)
    story.expect("different receipts", expected=1, actual=len(receipts))
    story.expect(
        "it is the stored one", expected=True, actual=[*receipts] == stage.stored_receipts(key)
    )


def crash(stage: Stage) -> None:
    """A worker dies half-way; its lease runs out and a retry takes over."""
    story, key = stage.story, stage.key("order-18")
    story.act("2  Crash: the worker dies half-way", "crash")
    worker = stage.processes.start(stage.job(key, lease=stage.lease, is_held=True))
    worker.go()
    attempt = worker.hear("inside")
    story.say(
        f"Process {worker.pid} has claimed {key!r} and is in the middle of attempt {attempt}. "
        "It gets SIGKILL now: no exception, no clean-up, no chance to say goodbye. Nobody will "
        "know how far it got, so a retry must not simply run: it is told to wait for what is left "
        f"of the lease ({stage.lease.total_seconds():g} s, and nobody renews it any more)."
    )
    ending = worker.kill()
    story.see(f"process {worker.pid} ended by signal {-ending}")
    charge = Charge(stage.ledger, key, AMOUNT)
    refusal = _answer_or_refusal(stage, charge)
    story.expect("a retry at once", expected="in flight", actual=_name(refusal))
    answer = _retry_as_told(stage, charge, refusal)
    story.see(f"attempt {answer.attempt} took over and finished: {answer.value['receipt']}")
    started, charged = stage.counts(key)
    story.see(f"the ledger has {started} executions, of which {charged} moved money")
    story.say(
        "The first one died before its charge. Had it died just after, the second would have "
        "charged again: no store can know what a dead process did elsewhere. Send "
        "every call to a system outside a child key, the same in each attempt, by which the other "
        "side recognises the repetition."
    )
    story.expect("attempt that finished", expected=2, actual=answer.attempt)
    story.expect("charges in the ledger", expected=1, actual=charged)
    story.expect("stored receipts", expected=answer.value["receipt"], actual=_only(stage, key))


def zombie(stage: Stage) -> None:
    """A worker is frozen past its lease; when it wakes up, its outcome no longer counts."""
    story, key = stage.story, stage.key("order-19")
    story.act("3  Zombie: the worker that comes back", "zombie")
    worker = stage.processes.start(stage.job(key, lease=stage.lease, is_held=True))
    worker.go()
    attempt = worker.hear("inside")
    story.say(
        f"Process {worker.pid} is in attempt {attempt} for {key!r}. It gets SIGSTOP: a long "
        "pause, as a suspended machine or a stuck disk makes it. It does not know, and its "
        "lease runs out."
    )
    charge = Charge(stage.ledger, key, AMOUNT)
    _freeze_between_writes(stage, worker, charge)
    answer = charge.run_once(stage.idempotency, lease=stage.lease, in_flight=InFlight.WAIT)
    story.see(
        f"a retry waited for the lease and finished as attempt {answer.attempt}: "
        f"{answer.value['receipt']}"
    )
    before = stage.stored(key)
    story.say(
        "Now the old owner gets SIGCONT. It wakes up in the middle of its work, and tries to "
        "store a receipt of its own."
    )
    worker.thaw()
    worker.go()
    is_lost = worker.hear("is_lost")
    heard = worker.hear_message("error")
    story.see(f"the zombie asks whether its claim is lost: {'yes' if is_lost else 'no'}")
    story.see(f"the store tells it {heard['error']}: {heard['message']}")
    after = stage.stored(key)
    story.see(f"the store still has {_only(stage, key)}, made by attempt {after.record.attempt}")
    _, charged = stage.counts(key)
    story.expect("attempt that finished", expected=2, actual=answer.attempt)
    story.expect("what the zombie heard", expected="ClaimLost", actual=heard["error"])
    story.expect("charges in the ledger", expected=1, actual=charged)
    story.expect(
        "the stored outcome is unchanged",
        expected=True,
        actual=(before.record, before.outcomes) == (after.record, after.outcomes),
    )


def mismatch(stage: Stage) -> None:
    """Another request under a used key is refused, and learns nothing."""
    story, key = stage.story, stage.key("order-17")
    story.act("4  Mismatch: an old key, another amount", "mismatch")
    story.say(
        f"A client uses {key!r} of the first act again, now for {AMOUNT * 2} instead of "
        f"{AMOUNT}. A replay would pretend that {AMOUNT * 2} was paid, and a run would charge a "
        "second time: both are wrong, so it is refused."
    )
    before = stage.stored(key)
    heard, words = "an answer", ""
    try:
        Charge(stage.ledger, key, AMOUNT * 2).run_once(stage.idempotency, lease=stage.lease)
    except KeyReused as error:
        heard, words = type(error).__name__, f"{error} {vars(error)}"
        story.see(f"{heard}: {error}")
    after = stage.stored(key)
    secrets = [*stage.stored_receipts(key), str(AMOUNT)]
    started, charged = stage.counts(key)
    story.see(f"the ledger still has {started} execution and {charged} charge for this key")
    story.expect("what the client heard", expected="KeyReused", actual=heard)
    story.expect(
        "parts of the outcome leaked", expected=0, actual=sum(item in words for item in secrets)
    )
    story.expect("charges in the ledger", expected=1, actual=charged)
    story.expect(
        "the stored outcome is unchanged",
        expected=True,
        actual=(before.record, before.outcomes) == (after.record, after.outcomes),
    )


def _answer_or_refusal(stage: Stage, charge: Charge) -> Answer[Receipt] | OperationInFlight:
    try:
        return charge.run_once(stage.idempotency, lease=stage.lease)
    except OperationInFlight as refusal:
        return refusal


def _retry_as_told(
    stage: Stage, charge: Charge, result: Answer[Receipt] | OperationInFlight
) -> Answer[Receipt]:
    """Retries as a good client does: after the time that it was told, and not before."""
    while isinstance(result, OperationInFlight):
        seconds = result.retry_after.total_seconds()
        condition = stage.stored(charge.key).condition
        stage.story.see(f"the record is {condition.value}; retry in {seconds:.1f} s")
        time.sleep(seconds + 0.01)
        if stage.stored(charge.key).condition is Condition.ABANDONED:
            stage.story.see("the lease is over, and the record counts as abandoned")
        result = _answer_or_refusal(stage, charge)
    return result


def _freeze_between_writes(stage: Stage, worker: WorkerProcess, charge: Charge) -> None:
    """Freezes the worker where it does not hold the write lock of the database.

    A process that is stopped inside a transaction keeps the file locked for everybody, with or
    without retrysafe. Its renewals are short, so this is rare, but the demonstration must end.
    """
    for _ in range(FREEZE_TRIES):
        worker.freeze()
        try:
            result = _answer_or_refusal(stage, charge)
        except StoreUnavailable:
            worker.thaw()
            time.sleep(0.05)
            continue
        if isinstance(result, OperationInFlight):
            seconds = result.retry_after.total_seconds()
            stage.story.see(f"process {worker.pid} is frozen; retry in {seconds:.1f} s")
        return


def _name(result: Answer[Receipt] | OperationInFlight) -> str:
    return "in flight" if isinstance(result, OperationInFlight) else "an answer"


def _only(stage: Stage, key: str) -> str:
    """The stored receipt; all of them if there is more than one, so that it shows."""
    return ", ".join(stage.stored_receipts(key))

"""Recovery: which abandoned claims a worker takes over, when, and what it reports."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest

from retrysafe import GLOBAL
from retrysafe.core.call import Answer
from retrysafe.core.events import Event, EventKind, Reporter
from retrysafe.core.keys.key import Key
from retrysafe.core.model import ClaimRequest, Fingerprint, Payload, SettleKind, Settlement
from retrysafe.core.recovery import (
    BACK_OFF_MAXIMUM_MS,
    PAGE_LIMIT,
    REPORT_LIMIT,
    REPORTED_LIMIT,
    AbandonedReport,
    Recovery,
    RecoveryReport,
    back_off_ms,
    key_of,
)
from retrysafe.core.values.trees import NotReadable
from retrysafe.errors import ClaimLost, Closed, OperationInFlight
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock
from tests.core.building import record
from tests.core.driving import drive

ARGUMENTS = Payload("json.1", b"", b"[[],{}]")
LEASE_MS = 1_000
BACK_OFF_MS = 10_000
PATIENCE_SECONDS = 5.0


class WorkerPool:
    """Runs each flow at once, in as many places as a test gives it."""

    size = 3
    has_given_up = False

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.patience: list[float] = []
        self.is_slow = False

    async def wait_for_room(self, timeout_seconds: float) -> bool:
        self.patience.append(timeout_seconds)
        return not self.is_slow

    async def has_room(self) -> bool:
        self.room -= 1
        return self.room >= 0

    def start(self, flow) -> None:
        drive(flow)


class Operation:
    """A resumer that notes whom it was asked to run, and ends as it is told."""

    def __init__(self, ending=None) -> None:
        self.ending = ending
        self.unreadable = False
        self.ran: list[str] = []

    def prepare(self, stored):
        assert stored.arguments == ARGUMENTS
        if self.unreadable:
            raise NotReadable("the class is gone")

        async def run():
            self.ran.append(stored.record.text)
            if isinstance(self.ending, BaseException):
                raise self.ending
            return Answer(None, self.ending == "replay", 2)

        return run


class Notices:
    """What no caller hears of."""

    def __init__(self) -> None:
        self.failures: list[tuple[Key, BaseException]] = []
        self.full: list[int] = []
        self.more: list[int] = []

    def failed(self, key: Key, error: BaseException) -> None:
        self.failures.append((key, error))

    def is_full(self, size: int) -> None:
        self.full.append(size)

    def has_more(self, limit: int) -> None:
        self.more.append(limit)


class Scene:
    """A store with abandoned keys, and a recovery over it."""

    def __init__(self, ending=None, **options) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(now_ms=self.clock)
        self.pay = Operation(ending)
        self.heard: list[Event] = []
        # How many were abandoned at each look.
        self.looked: list[int] = []
        self.notices = Notices()
        self.pool = options.pop("pool", None) or WorkerPool()
        self.recovery = Recovery(
            store=self.store,
            resumers={"pay": self.pay},
            pool=self.pool,
            lock=nullcontext(),
            report=Reporter(self._hear),
            back_off_ms=BACK_OFF_MS,
            patience_seconds=PATIENCE_SECONDS,
            notices=self.notices,
        )
        self._tokens = 0

    def claim(self, text: str, operation: str = "pay", *, arguments=ARGUMENTS, caller="c") -> bytes:
        self._tokens += 1
        token = self._tokens.to_bytes(16)
        key = Key(text, caller=caller)
        mark = (Fingerprint(1, b"f" * 16),)
        request = ClaimRequest(key, mark, token, LEASE_MS, operation, arguments=arguments)
        drive(self.store.commit([request], []))
        return token

    def unripe(self, count: int) -> None:
        """Keys that were abandoned twice, so that their third attempt has to wait."""
        for _ in range(2):
            for number in range(count):
                self.claim(f"unripe-{number}")
            self.wait()

    def wait(self, by_ms: int = LEASE_MS) -> None:
        self.clock.advance(timedelta(milliseconds=by_ms))

    def resume(self) -> RecoveryReport:
        drive(self.recovery.resume_all())
        return self.recovery.report

    def _hear(self, event: Event) -> None:
        if event.kind is EventKind.LOOKED:
            self.looked.append(event.count)
        else:
            self.heard.append(event)

    def look(self) -> list[str]:
        drive(self.recovery.report_abandoned())
        return [f"{event.key.text}: {event.detail}" for event in self.heard]


# Resuming.


def test_what_is_abandoned_is_resumed():
    """After its lease and not before."""
    scene = Scene()
    scene.claim("order")
    scene.wait(LEASE_MS - 1)
    assert scene.resume() == RecoveryReport()
    scene.wait(1)
    assert scene.resume() == RecoveryReport(resumed=1)
    assert scene.pay.ran == ["order"]
    assert scene.heard == []


def test_only_what_has_arguments_and_is_known_here_is_resumed():
    scene = Scene()
    scene.claim("without", arguments=None)
    scene.claim("foreign", "ship")
    scene.wait()
    assert scene.resume() == RecoveryReport()
    assert scene.pay.ran == []


@pytest.mark.parametrize(
    ("ending", "report"),
    [
        (None, RecoveryReport(resumed=1)),
        ("replay", RecoveryReport(lost=1)),
        (ClaimLost("gone"), RecoveryReport(lost=1)),
        (OperationInFlight("busy", key="k", retry_after=timedelta(1)), RecoveryReport(lost=1)),
        (Closed("closed"), RecoveryReport(lost=1)),
        (ValueError("no"), RecoveryReport(failed=1)),
    ],
)
def test_what_became_of_a_resumption_is_counted(ending, report):
    """Finished, somebody else's, or failed; and a failure is told, because nobody called."""
    scene = Scene(ending)
    scene.claim("order")
    scene.wait()
    assert scene.resume() == report
    expected = [(Key("order", caller="c"), ending)] if report.failed else []
    assert scene.notices.failures == expected


class Cancelled(BaseException):
    """As an event loop cancels."""


@pytest.mark.parametrize("ending", [Cancelled(), SystemExit(3), KeyboardInterrupt()])
def test_an_operation_that_cuts_itself_off_leaves_a_trace(ending):
    """It counts as failed and is told; its thread or task gets it all the same."""
    scene = Scene(ending)
    scene.claim("order")
    scene.wait()
    with pytest.raises(type(ending)):
        scene.resume()
    assert scene.recovery.report == RecoveryReport(failed=1)
    assert scene.notices.failures == [(Key("order", caller="c"), ending)]


def test_what_a_worker_gives_up_has_not_failed():
    """That it was cancelled says nothing about the operation."""
    scene = Scene(Cancelled())
    scene.pool.has_given_up = True
    scene.claim("order")
    scene.wait()
    with pytest.raises(Cancelled):
        scene.resume()
    assert (scene.recovery.report, scene.notices.failures) == (RecoveryReport(), [])
    scene.pay.ending = ValueError("no")
    assert scene.resume() == RecoveryReport(failed=1)


def test_a_flow_that_is_thrown_away_counts_nothing():
    """Its memory may be given back by a thread that is just counting."""
    scene = Scene(GeneratorExit())
    scene.claim("order")
    scene.wait()
    with pytest.raises(GeneratorExit):
        scene.resume()
    assert (scene.recovery.report, scene.notices.failures) == (RecoveryReport(), [])


def test_a_long_wait_for_room_is_told_once_in_a_walk():
    """With the number of operations that are under way; a short wait is not told."""
    scene = Scene(pool=WorkerPool())
    for number in range(3):
        scene.claim(f"order-{number}")
    scene.wait()
    scene.resume()
    assert (scene.pool.patience, scene.notices.full) == ([PATIENCE_SECONDS] * 3, [])
    scene.pool.is_slow = True
    scene.resume()
    assert scene.notices.full == [WorkerPool.size]
    scene.resume()
    assert scene.notices.full == [WorkerPool.size] * 2
    assert len(scene.pay.ran) == 9


def test_only_what_is_declared_here_is_asked_for():
    """Arguments of other operations may be large, and are nobody's business here."""
    scene = Scene()
    asked = []
    look = scene.store.list_resumable

    def noted(limit, after, operations):
        asked.append((after, operations))
        return look(limit, after, operations)

    scene.store.list_resumable = noted
    scene.resume()
    assert asked == [(b"", ("pay",))]


def test_the_walk_meets_everything_once():
    """Also past a page of keys that wait for their next attempt."""
    scene = Scene()
    scene.unripe(PAGE_LIMIT + 5)
    texts = {f"order-{number}" for number in range(2 * PAGE_LIMIT)}
    for text in texts:
        scene.claim(text)
    scene.wait()
    assert scene.resume().resumed == len(texts)
    assert len(scene.pay.ran) == len(texts)
    assert set(scene.pay.ran) == texts


def test_nothing_starts_without_room():
    """A pool that is being stopped gets nothing more."""
    scene = Scene(pool=WorkerPool(room=2))
    for number in range(5):
        scene.claim(f"order-{number}")
    scene.wait()
    assert scene.resume().resumed == 2
    assert len(scene.pay.ran) == 2


def test_arguments_that_cannot_be_read_are_reported_and_hold_up_nobody():
    """Nothing is claimed, so another worker may resume it; the report comes once."""
    scene = Scene()
    scene.claim("order")
    scene.wait()
    scene.pay.unreadable = True
    assert scene.resume() == RecoveryReport()
    scene.resume()
    assert scene.pay.ran == []
    assert [(item.kind, item.key.text) for item in scene.heard] == [(EventKind.ABANDONED, "order")]
    assert scene.heard[0].detail == (
        "its arguments cannot be used here: the class is gone; the next retry takes it over"
    )
    assert scene.recovery.abandoned == AbandonedReport(1)
    scene.pay.unreadable = False
    assert scene.resume() == RecoveryReport(resumed=1)


# Back-off.


def test_attempts_that_follow_each_other_wait_longer():
    """At once after the first, then the base, doubled each time, up to a limit."""
    waits = [back_off_ms(attempt, 1_000) for attempt in range(7)]
    assert waits == [0, 0, 1_000, 2_000, 4_000, 8_000, 16_000]
    assert back_off_ms(50, 1_000) == back_off_ms(10_000, 1_000) == BACK_OFF_MAXIMUM_MS
    assert back_off_ms(9, 0) == 0


def test_an_operation_that_kills_its_worker_waits_before_the_next_attempt():
    scene = Scene()
    token = scene.claim("order")
    scene.wait()
    request = ClaimRequest(
        Key("order", caller="c"), (Fingerprint(1, b"f" * 16),), b"w" * 16, LEASE_MS, "pay"
    )
    drive(scene.store.take_over(request, token))
    scene.wait(LEASE_MS + BACK_OFF_MS - 1)
    assert scene.resume() == RecoveryReport()
    scene.wait(1)
    assert scene.resume() == RecoveryReport(resumed=1)


# Reports.


def test_each_abandoned_claim_is_reported_once():
    """Again only when it is abandoned by somebody else."""
    scene = Scene()
    scene.claim("order", "ship", caller=GLOBAL)
    assert scene.look() == []
    scene.wait()
    told = (
        "order: no resumable operation of that name is registered here; "
        "the next retry takes it over"
    )
    assert scene.look() == [told]
    assert scene.look() == [told]
    scene.claim("order", "ship", caller=GLOBAL)
    assert scene.look() == [told]
    scene.wait()
    assert scene.look() == [told, told]
    assert [(item.operation, item.attempt) for item in scene.heard] == [("ship", 1), ("ship", 2)]
    assert scene.heard[0].key == Key("order", caller=GLOBAL)
    assert scene.recovery.abandoned == AbandonedReport(2)


def test_an_operation_without_its_arguments_is_reported():
    scene = Scene()
    scene.claim("order", arguments=None)
    scene.wait()
    assert scene.look() == [
        "order: it was claimed without its arguments; the next retry takes it over"
    ]


def test_what_can_be_resumed_is_not_reported():
    scene = Scene()
    scene.claim("order")
    scene.wait()
    assert scene.look() == []


def test_what_changes_between_the_look_and_the_question_is_not_reported():
    """Swept away, or taken over: it is not abandoned any more."""
    scene = Scene()
    token = scene.claim("order", arguments=None)
    scene.wait()
    listed = drive(scene.store.list_abandoned(10))
    scene.store.list_abandoned = lambda limit: _given(listed)
    scene.claim("order", arguments=None)
    assert scene.look() == []
    key = Key("order", caller="c")
    second = drive(scene.store.read(key)).record.token
    assert second != token
    drive(scene.store.commit([], [Settlement(SettleKind.RELEASE, key, second, active_ms=1)]))
    scene.wait()
    drive(scene.store.sweep(10))
    assert scene.look() == []


def test_a_record_that_was_settled_during_the_look_is_not_reported():
    """A store that looks page by page may show one."""
    scene = Scene()
    token = scene.claim("order", "ship")
    key = Key("order", caller="c")
    drive(scene.store.commit([], [Settlement(SettleKind.RELEASE, key, token, active_ms=1_000)]))
    settled = drive(scene.store.read(key))
    scene.store.list_abandoned = lambda limit: _given([settled])
    assert scene.look() == []


async def _given(found):
    return found


def test_a_look_that_does_not_show_all_is_reported(monkeypatch):
    """It has a limit, and shows the same ones each time; who reads the reports has to know."""
    monkeypatch.setattr("retrysafe.core.recovery.REPORT_LIMIT", 2)
    scene = Scene()
    for number in range(2):
        scene.claim(f"order-{number}", "ship")
    scene.wait()
    assert (len(scene.look()), scene.notices.more) == (2, [])
    scene.claim("order-2", "ship")
    scene.wait()
    assert (len(scene.look()), scene.notices.more) == (2, [2])


def test_the_memory_of_reports_is_bounded(monkeypatch):
    """The oldest is forgotten; there is room for many times what one look shows."""
    monkeypatch.setattr("retrysafe.core.recovery.REPORTED_LIMIT", 2)
    scene = Scene()
    for number in range(3):
        scene.claim(f"order-{number}", "ship")
        scene.wait()
    assert [item.partition(":")[0] for item in scene.look()] == ["order-0", "order-1", "order-2"]
    assert scene.looked == [3]
    assert len(scene.recovery._reported) == 2
    assert REPORTED_LIMIT > 2 * REPORT_LIMIT


def test_the_key_of_a_record():
    assert key_of(record()) == Key("order-1", caller="tenant-1")
    assert key_of(record(caller="")) == Key("order-1", caller=GLOBAL)

"""From a message to its verdict, in threads and in a loop."""

from __future__ import annotations

import errno
import socket
import sqlite3
import threading
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta

import pytest

from retrysafe import (
    FOREVER,
    ClaimLost,
    FingerprintRule,
    InvalidInput,
    Policy,
    current_attempt,
    natural_key,
)
from retrysafe.consumers import Action, Handler, PayloadInvalid, consumer_name
from retrysafe.consumers.consumer import checked_policy
from retrysafe.consumers.deadlines import Deadline
from retrysafe.consumers.handler import unquoted
from retrysafe.errors import KeyInvalid, PolicyInvalid
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore, SqliteStore
from retrysafe.testing import FaultyStore, ManualClock, Moment
from tests.consumers.scripted import LEASE, Tasks, Threads, message, policy

WAYS = [Threads, Tasks]


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture(params=WAYS)
def way(request, store):
    way = request.param(store, caller="unused", cache=False)
    yield way
    way.close()


def actions(way, judge, *messages):
    return [way.run(judge.handle(each)).action.value for each in messages]


def test_a_message_is_handled_once(way):
    """First delivery runs; redeliveries are acked without work, whatever the handler returned."""
    runs = []
    judge = way.judge(runs.append)
    first, again = (way.run(judge.handle(message(deliveries=number))) for number in (1, 2))
    assert (first.action, first.has_run) == (Action.ACK, True)
    assert (again.action, again.has_run) == (Action.ACK, False)
    assert len(runs) == 1


def test_a_failed_message_that_comes_again_is_no_duplicate_of_itself(way):
    """The key is free after a failure: the redelivery runs."""
    runs = []

    def fail_first(message):
        runs.append(message)
        if len(runs) == 1:
            raise OSError("disk")

    judge = way.judge(fail_first)
    assert actions(way, judge, message(), message(deliveries=2)) == ["retry", "ack"]
    assert len(runs) == 2


@pytest.mark.parametrize("kind", WAYS)
def test_the_window_counts_from_the_last_try_and_not_from_the_first_delivery(kind):
    """A message that was retried for long is remembered for as long as any other."""
    clock, runs = ManualClock(), []
    way = kind(MemoryStore(now_ms=clock), caller="unused", cache=False)

    def fail_first(message):
        runs.append(message)
        if len(runs) == 1:
            raise LookupError("not yet")

    judge = way.judge(fail_first, policy=policy(active_window=timedelta(hours=1)))
    assert actions(way, judge, message()) == ["retry"]
    for _ in range(2):
        clock.advance(timedelta(minutes=50))
        assert actions(way, judge, message()) == ["ack"]
    assert len(runs) == 2
    way.close()


def test_a_message_that_keeps_failing_is_dead_lettered_with_its_reason(way):
    def fail(message):
        raise LookupError("no such customer")

    judge = way.judge(fail, tries=3)
    verdicts = [way.run(judge.handle(message())) for _ in range(3)]
    assert [each.action for each in verdicts] == [Action.RETRY, Action.RETRY, Action.DEAD_LETTER]
    assert [each.delay.total_seconds() for each in verdicts] == [1, 2, 0]
    assert "3 tries failed" in verdicts[2].reason
    assert "LookupError: no such customer" in verdicts[2].reason


def test_a_downstream_outage_never_dead_letters(way):
    def fail(message):
        raise ConnectionError("the provider is away")

    judge = way.judge(fail, tries=2)
    assert actions(way, judge, *(message() for _ in range(5))) == ["retry"] * 5


def test_only_failures_of_the_message_count(way, monkeypatch):
    """Not outages, not deliveries, not how often it waited; what is done starts over."""
    script = [ConnectionError(), LookupError(), TimeoutError(), ConnectionError(), LookupError()]

    def fail(message):
        raise script.pop(0)

    judge = way.judge(fail, tries=2)
    verdicts = [way.run(judge.handle(message(deliveries=30), tries=30)) for _ in range(5)]
    assert [each.action.value for each in verdicts] == ["retry"] * 4 + ["dead_letter"]
    assert verdicts[1].delay == timedelta(seconds=1)
    # One whose dead letter was not taken does not start over.
    script.append(LookupError())
    assert actions(way, judge, message()) == ["dead_letter"]
    monkeypatch.setattr("retrysafe.consumers.judge.COUNTED_MESSAGES", 1)
    script += [LookupError()] * 3
    # As many are counted as there is place for.
    assert actions(way, judge, message("a"), message("b"), message("a")) == ["retry"] * 3


def test_a_message_that_succeeds_is_not_counted_any_more(way):
    script = [LookupError("not yet")]

    def fail_first(message):
        if script:
            raise script.pop()

    judge = way.judge(fail_first)
    assert actions(way, judge, message(), message()) == ["retry", "ack"]
    assert not judge._failures


def test_a_key_that_cannot_be_made_is_counted_by_the_brokers_name_for_the_message(way):
    def key(message):
        raise LookupError("no such customer")

    judge = way.judge(print, tries=2, key=key)
    assert actions(way, judge, message(), message()) == ["retry", "dead_letter"]
    nameless = [message(None, deliveries=number) for number in (1, 2)]
    assert actions(way, judge, *nameless) == ["retry", "dead_letter"]


class Busy(Exception):
    """What a provider's library raises when it is away."""


def error_of(module, name, *bases, **values):
    return type(name, bases or (Exception,), {"__module__": module, **values})("away")


@pytest.mark.parametrize(
    ("error", "is_counted"),
    [
        (socket.gaierror(-2, "unknown host"), False),
        (OSError(errno.EHOSTUNREACH, "no route"), False),
        (error_of("httpx", "ReadTimeout", type(error_of("httpx", "TransportError"))), False),
        (error_of("requests.exceptions", "ConnectionError", OSError), False),
        (error_of("psycopg", "OperationalError"), False),
        (error_of("asyncpg.exceptions", "CannotConnectNowError", sqlstate="57P03"), False),
        (Busy(), False),
        (FileNotFoundError(errno.ENOENT, "no such file"), True),
        (error_of("requests.exceptions", "HTTPError", OSError), True),
        (error_of("asyncpg.exceptions", "DataError", ValueError, sqlstate="08000"), True),
        (error_of("psycopg.errors", "UniqueViolation", sqlstate="23505"), True),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)
def test_what_the_handler_needs_and_is_away_does_not_count(error, is_counted):
    def fail(message):
        raise error

    way = Threads(MemoryStore(), caller="unused")
    verdict = way.run(way.judge(fail, tries=1, outages=(Busy,)).handle(message()))
    assert verdict.action is (Action.DEAD_LETTER if is_counted else Action.RETRY)
    way.close()


def test_another_payload_under_the_same_id_is_never_run(way):
    runs = []
    judge = way.judge(runs.append)
    assert actions(way, judge, message(), message(body=b'{"amount": 6}')) == ["ack", "dead_letter"]
    assert len(runs) == 1


def test_equal_json_is_the_same_payload(way):
    """A producer that sends it again may write the fields in another order."""
    judge = way.judge(lambda message: None, fingerprint=FingerprintRule(exclude=("/sent_at",)))
    first = message(body=b'{"amount": 5, "to": "c1", "sent_at": 1}')
    again = message(body=b'{"to":"c1","amount":5,"sent_at":2}')
    assert actions(way, judge, first, again) == ["ack", "ack"]


@pytest.mark.parametrize(("chosen", "expected"), [("LEAVE", "leave"), ("DROP", "drop")])
@pytest.mark.parametrize("kind", WAYS)
def test_what_runs_elsewhere_is_left_or_dropped(kind, store, chosen, expected):
    """A second consumer meets the claim of the first, whose handler is still at work."""
    here, there = kind(store, caller="unused"), Threads(store, caller="unused")
    second = here.judge(lambda message: None, in_flight=Action[chosen])
    seen = []

    def outer(message):
        # While this handler runs, the other consumer gets the same message.
        worker = threading.Thread(target=lambda: seen.append(here.run(second.handle(message))))
        worker.start()
        worker.join()

    first = there.judge(outer)
    assert there.run(first.handle(message())).action is Action.ACK
    assert seen[0].action.value == expected
    assert not seen[0].has_run
    if chosen == "LEAVE":
        assert timedelta(0) < seen[0].delay <= LEASE
    here.close()
    there.close()


# Keys.


def key_of(handler, item):
    return handler.key_text(item)


@pytest.mark.parametrize(
    "chosen", ["message:7", str(natural_key("message", 12)), f'"{natural_key("message", 12)}"']
)
def test_a_publisher_cannot_choose_the_key_of_another_message(chosen):
    """The honest message would be refused as another request."""
    with pytest.raises(KeyInvalid, match="a key of your own"):
        key_of(Handler(print), message("8", headers={"Idempotency-Key": chosen}))


def test_the_key_is_the_header_then_the_fields_then_the_brokers_name():
    by_fields = Handler(print, key=("order",))
    item = message("7", body=b'{"order": 12}')
    sent = message("7", body=b'{"order": 12}', headers={"idempotency-key": '"a \\"b\\""'})
    assert key_of(by_fields, sent) == 'a "b"'
    assert key_of(by_fields, item) == key_of(by_fields, message("8", body=b'{"order": 12, "x": 1}'))
    assert key_of(by_fields, item) != key_of(by_fields, message("7", body=b'{"order": 13}'))
    assert key_of(Handler(print), item) == "message:7"
    assert key_of(Handler(print, key=lambda each: each.json()["order"] and "own"), item) == "own"
    assert key_of(Handler(print, key=lambda each: None), item) == "message:7"
    assert unquoted('"') == '"'
    longest = message("7" * 255)
    assert len(key_of(Handler(print), longest)) < 100
    assert key_of(Handler(print), longest) != key_of(Handler(print), message("7" * 254))


@pytest.mark.parametrize(
    ("handler", "item"),
    [
        (Handler(print), message(None)),
        (Handler(print), message(headers={"Idempotency-Key": ""})),
        (Handler(print), message(headers={"Idempotency-Key": "x" * 256})),
        (Handler(print, key=("order",)), message(body=b"{}")),
        (Handler(print, key=("order",)), message(body=b"[]")),
        (Handler(print, key=("order",)), message(body=b"poison")),
    ],
    ids=["no identity", "empty", "long", "no field", "no object", "no JSON"],
)
def test_a_message_without_a_usable_key_is_dead_lettered(way, handler, item):
    """It is never run unprotected, and never lost in silence."""
    runs = []
    judge = way.judge(runs.append, key=handler.key)
    verdict = way.run(judge.handle(item))
    assert (verdict.action, runs) == (Action.DEAD_LETTER, [])
    if item.identity is None:
        # What to do about it, and not only that there is none.
        assert "publish it with a message id or the header Idempotency-Key" in verdict.reason


def test_the_same_id_on_two_queues_or_groups_is_two_messages(way):
    """Queues count from 1, each for itself: their names keep the ids apart."""
    runs = []
    for queue in ("a/b", "a", "a%2Fb"):
        way.run(way.judge(runs.append, queue=queue).handle(message()))
    assert len(runs) == 3
    names = {consumer_name("a", "b"), consumer_name("a/b"), consumer_name("a", "b/")}
    assert len(names) == 3


# Renames.


@pytest.mark.parametrize("is_atomic", [False, True])
@pytest.mark.parametrize("kind", WAYS)
def test_a_renamed_consumer_knows_what_it_has_done(kind, is_atomic, tmp_path):
    """Old, renamed and old again, as in a rolling deploy: each message runs once."""
    shop = Shop(tmp_path, kind)
    way = kind(shop.store, caller="unused", cache=False)
    options = {"transaction": shop.transaction(way)} if is_atomic else {}
    runs = []

    def handle(message, attempt=None):
        runs.append(message.identity)

    old = way.judge(handle, queue="old", **options)
    new = way.judge(handle, queue="new", aliases=["old"], **options)
    newest = way.judge(handle, queue="newest", aliases=["new", "old"], **options)
    for identity in ("1", "2", "3"):
        for judge in {"1": (old, new, newest), "2": (newest, new, old), "3": (new, old)}[identity]:
            assert way.run(judge.handle(message(identity))).action is Action.ACK
    assert runs == ["1", "2", "3"]
    way.close()


# Outages and lost claims.


@pytest.mark.parametrize("kind", WAYS)
def test_a_store_that_is_away_pauses_and_runs_nothing(kind, store):
    faulty = FaultyStore(store)
    way = kind(faulty, caller="unused", cache=False)
    runs = []
    judge = way.judge(runs.append, tries=1)
    faulty.fail(Moment.BEFORE, method="commit", times=None)
    verdict = way.run(judge.handle(message(), tries=50))
    assert (verdict.action, verdict.outage.name, runs) == (Action.RETRY, "OURS", [])
    way.close()


def test_the_handler_sees_the_brokers_deadline(way):
    """`attempt.is_lost` tells of the lease and of the broker's deadline, whichever ends first."""
    clock = [0.0]
    deadline = Deadline(10.0, 0.0)
    seen = []

    def handle(message):
        attempt = current_attempt()
        attempt._monotonic = lambda: clock[0]
        attempt._lease.ends_monotonic = 1_000.0
        seen.append((attempt.is_lost, attempt.time_left.total_seconds()))
        clock[0] = 10.0
        seen.append((attempt.is_lost, attempt.time_left.total_seconds()))
        # The claim is over, so the broker's deadline is not prolonged any more.
        assert deadline.stops_renewing()
        attempt.raise_if_lost()

    verdict = way.run(way.judge(handle).handle(message(), deadline))
    assert seen == [(False, 10.0), (True, 0.0)]
    assert (verdict.action, verdict.delay) == (Action.LEAVE, LEASE)


def test_a_lost_claim_acks_nothing(way):
    def lose(message):
        current_attempt()._lease.revoke()
        raise ClaimLost("another owner has it")

    assert actions(way, way.judge(lose), message()) == ["leave"]


# The user's transaction.


class Shop:
    """Orders in the store's own SQLite file, and what became of their transactions."""

    def __init__(self, folder, kind):
        self.path = folder / "shop.db"
        self.store = SqliteStore(self.path)
        run_sync(self.store.migrate())
        with sqlite3.connect(self.path) as connection:
            connection.execute("CREATE TABLE orders (name TEXT)")
        connection.close()
        self.log = []
        self.fails_after_commit = False

    @contextmanager
    def blocking(self):
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                self.log.append("rolled back")
                raise
            connection.execute("COMMIT")
            self.log.append("committed")
            if self.fails_after_commit:
                self.fails_after_commit = False
                raise sqlite3.OperationalError("database is locked")
        finally:
            connection.close()

    @asynccontextmanager
    async def awaited(self):
        with self.blocking() as connection:
            yield connection

    def transaction(self, way):
        return self.awaited if isinstance(way, Tasks) else self.blocking

    def orders(self):
        connection = sqlite3.connect(self.path)
        try:
            return [name for (name,) in connection.execute("SELECT name FROM orders")]
        finally:
            connection.close()


@pytest.mark.parametrize("kind", WAYS)
def test_same_transaction_the_ack_follows_the_commit(kind, tmp_path):
    """Business write and outcome commit together; a failure rolls both back, and it runs again."""
    shop = Shop(tmp_path, kind)
    way = kind(shop.store, caller="unused", cache=False)
    attempts = []

    def place(message, attempt):
        attempts.append(attempt.number)
        attempt.connection.execute("INSERT INTO orders VALUES (?)", (message.identity,))
        if len(attempts) == 1:
            raise LookupError("not yet")

    judge = way.judge(place, transaction=shop.transaction(way))
    failed = way.run(judge.handle(message()))
    assert (failed.action, shop.orders(), shop.log) == (Action.RETRY, [], ["rolled back"])
    done = way.run(judge.handle(message()))
    assert (done.action, shop.orders()) == (Action.ACK, ["1"])
    assert shop.log == ["rolled back", "committed"]
    again = way.run(judge.handle(message()))
    assert (again.action, again.has_run, shop.orders()) == (Action.ACK, False, ["1"])
    way.close()


@pytest.mark.parametrize("kind", WAYS)
def test_a_commit_that_was_applied_and_reported_as_failed_is_found(kind, tmp_path):
    """It is retried as an outage, never dead-lettered, and the next try finds it done."""
    shop = Shop(tmp_path, kind)
    way = kind(shop.store, caller="unused", cache=False)

    def place(message, attempt):
        attempt.connection.execute("INSERT INTO orders VALUES (?)", (message.identity,))

    judge = way.judge(place, transaction=shop.transaction(way), tries=1)
    shop.fails_after_commit = True
    first = way.run(judge.handle(message()))
    assert (first.action, first.outage.name) == (Action.RETRY, "OURS")
    again = way.run(judge.handle(message()))
    assert (again.action, again.has_run, shop.orders()) == (Action.ACK, False, ["1"])
    way.close()


# Set-up.


def test_the_window_covers_what_the_broker_may_deliver_again():
    """Without a policy of its own the window is made to fit; a shorter one is refused."""
    days = timedelta(days=4)
    assert checked_policy(Handler(print), policy(), "q", days).active_window == days
    assert checked_policy(Handler(print), policy(), "q", None).active_window == FOREVER
    longer = policy(active_window=timedelta(days=5))
    assert checked_policy(Handler(print), longer, "q", days) is longer
    short = Handler(print, policy=Policy())
    with pytest.raises(PolicyInvalid, match=r"q may deliver .* for 4 days.* is 1 day, 0:00:00"):
        checked_policy(short, policy(), "q", days)
    with pytest.raises(PolicyInvalid, match="without a limit"):
        checked_policy(short, policy(), "q", None)
    told = Handler(print, policy=Policy(), redelivery=timedelta(hours=2))
    assert checked_policy(told, policy(), "q", None) is told.policy
    # People send dead letters back long after the broker's own time is over.
    redriven = Handler(print, redelivery=timedelta(days=60))
    made = checked_policy(redriven, policy(), "q", days)
    assert (made.active_window, made.audit_window) == (timedelta(days=60),) * 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Handler("shop:charge"),
        lambda: Handler(print, in_flight=Action.ACK),
        lambda: Handler(print, tries=0),
        lambda: Handler(print, key="order"),
        lambda: Handler(print, aliases="old"),
    ],
)
def test_a_handler_that_makes_no_sense_is_refused_when_it_is_made(wrong):
    with pytest.raises(InvalidInput):
        wrong()


def test_a_reason_can_be_written_by_every_broker(way):
    """Errors quote payloads, and half a character would keep the dead letter from being sent."""

    def refuse(_):
        raise PayloadInvalid("unknown currency \ud800")

    verdict = way.run(way.judge(refuse).handle(message()))
    assert verdict.action is Action.DEAD_LETTER
    assert "unknown currency" in verdict.reason.encode().decode()

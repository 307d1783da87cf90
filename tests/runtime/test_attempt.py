"""What an operation sees of its own attempt."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

from retrysafe import (
    ClaimLost,
    Idempotency,
    Key,
    Policy,
    RetrysafeError,
    child_key,
    current_attempt,
)
from retrysafe.errors import SecretMissing
from retrysafe.stores import MemoryStore
from tests.runtime.staged import KEY, Clock, StagedStore

SECRET = "0123456789abcdef"


def test_attempt_tells_key_number_token_and_deadline(subject):
    """All of it is there, and equals what the store holds."""
    clock = Clock()
    store = MemoryStore(now_ms=clock)
    face = subject(store, policy=Policy(lease=timedelta(seconds=60)))
    seen = {}

    def operation() -> None:
        attempt = current_attempt()
        seen.update(
            key=attempt.key,
            operation=attempt.operation,
            number=attempt.number,
            is_first=attempt.is_first,
            token=attempt.token,
            deadline=attempt.deadline,
            time_left=attempt.time_left,
            is_lost=attempt.is_lost,
        )
        attempt.raise_if_lost()

    face.run(KEY, operation, name="payments.pay")
    record = face.call("read", KEY).record
    assert seen["key"] == KEY
    assert seen["operation"] == "payments.pay"
    assert (seen["number"], seen["is_first"]) == (1, True)
    assert seen["token"] == record.token
    assert len(seen["token"]) == 16
    expected = datetime.fromtimestamp(clock.now_ms / 1000, UTC) + timedelta(seconds=60)
    assert seen["deadline"] == expected
    assert timedelta(seconds=50) < seen["time_left"] <= timedelta(seconds=60)
    assert seen["is_lost"] is False


def test_attempt_counts_and_tokens_differ(subject):
    """Each attempt has its number and a token of its own."""
    face = subject(MemoryStore())
    seen = []

    def operation() -> str:
        attempt = current_attempt()
        seen.append((attempt.number, attempt.is_first, attempt.token))
        if attempt.number < 3:
            raise ConnectionError("again")
        return "done"

    for _ in range(2):
        with pytest.raises(ConnectionError):
            face.run(KEY, operation)
    assert face.answer(KEY, operation).attempt == 3
    assert [(number, is_first) for number, is_first, _ in seen] == [
        (1, True),
        (2, False),
        (3, False),
    ]
    assert len({token for *_, token in seen}) == 3


def test_child_keys_are_the_same_in_every_attempt(subject):
    """Downstream calls of a second attempt carry the keys of the first."""
    face = subject(MemoryStore(), secret=SECRET)
    seen = []

    def operation() -> None:
        attempt = current_attempt()
        seen.append([attempt.child_key("charge"), attempt.child_key("mail", 1)])
        if attempt.is_first:
            raise ConnectionError("again")

    with pytest.raises(ConnectionError):
        face.run(KEY, operation)
    face.run(KEY, operation)
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]
    assert seen[0][0] == child_key(SECRET.encode(), KEY, "charge")
    assert seen[0][0] != child_key(SECRET.encode(), Key("the key", caller="other"), "charge")


def test_child_keys_need_a_secret(subject, monkeypatch):
    """Without one the operation is told, and the key is freed as for any unlisted error."""
    monkeypatch.delenv("RETRYSAFE_SECRET", raising=False)
    face = subject(MemoryStore())
    with pytest.raises(SecretMissing):
        face.run(KEY, lambda: current_attempt().child_key("charge"))


def test_no_attempt_outside_of_an_operation(subject):
    """Before, after and outside there is none, also after a failure."""
    face = subject(MemoryStore())

    def fail() -> None:
        assert current_attempt().number == 1
        raise ValueError

    with pytest.raises(ValueError):
        face.run(KEY, fail)
    with pytest.raises(RetrysafeError, match="no operation is running here"):
        current_attempt()


def test_nested_operations_have_their_own_attempts():
    """The inner attempt hides the outer one until it ends."""
    with Idempotency(MemoryStore(), caller="tester") as idem:

        def inner() -> str:
            return current_attempt().key.text

        def outer() -> list[str]:
            return [current_attempt().key.text, idem.run("inner", inner), inner()]

        assert idem.run("outer", outer, request=None) == ["outer", "inner", "outer"]


def test_attempt_of_a_forced_release_is_lost(subject):
    """An operator frees the key under the operation: its outcome is refused, another stands."""
    clock = Clock()
    store = MemoryStore(now_ms=clock)
    face = subject(store)

    def operation() -> str:
        with Idempotency(store) as rival:
            rival.release(KEY, force=True)
            assert rival.answer(KEY, lambda: "rival", name="", request="r").attempt == 1
        return "first"

    with pytest.raises(ClaimLost) as caught:
        face.run(KEY, operation, name="", request="r")
    assert caught.value.key == KEY.text
    assert face.run(KEY, lambda: "second", request="r") == "rival"


def test_failure_of_a_lost_attempt_is_a_lost_claim(subject):
    """An exception of a zombie is not its key's failure; it is told as the cause."""
    store = MemoryStore()
    face = subject(store)

    def operation() -> None:
        with Idempotency(store) as rival:
            rival.release(KEY, force=True)
            rival.run(KEY, lambda: "rival", request="r")
        raise ValueError("late")

    with pytest.raises(ClaimLost) as caught:
        face.run(KEY, operation, name="", request="r", policy=Policy(terminal=(ValueError,)))
    assert isinstance(caught.value.__cause__, ValueError)
    assert face.run(KEY, lambda: "second", request="r") == "rival"


def test_lost_attempt_is_seen_by_the_operation():
    """The heartbeat hears of the loss, and the operation can stop before its next effect."""
    store = StagedStore()
    policy = Policy(lease=timedelta(milliseconds=300))
    with Idempotency(store, policy=policy) as idem:

        def operation() -> str:
            attempt = current_attempt()
            with Idempotency(store) as rival:
                rival.release(KEY, force=True)
            ticks = threading.Event()
            for _ in range(3000):
                if attempt.is_lost:
                    break
                ticks.wait(0.005)
            assert attempt.time_left == timedelta(0)
            attempt.raise_if_lost()
            return "never"

        with pytest.raises(ClaimLost):
            idem.run(KEY, operation, name="", request="r")
        stored = idem.read(KEY)
        assert stored.outcomes == []

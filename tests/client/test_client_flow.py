"""Properties of the retry flow, whatever a server and a network do."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.client import RetryBudget, RetryPolicy, Stopped, tries_of
from retrysafe.client.httpx import AsyncRetryTransport, RetryTransport
from tests.client.clients import START, ManualTiming

# Waits and clocks are floats; a sum of a few of them is exact to much better than this.
CLOSE = 1e-6

ERRORS = [
    httpx.ConnectError,
    httpx.ReadError,
    httpx.ReadTimeout,
    httpx.RemoteProtocolError,
    httpx.LocalProtocolError,
    httpx.UnsupportedProtocol,
]
TRANSIENT = (httpx.ConnectError, httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)

answers = st.builds(
    lambda status, after, told, replayed: (status, after, told, replayed),
    st.sampled_from([200, 201, 303, 400, 404, 408, 409, 422, 425, 429, 500, 501, 502, 503, 504]),
    st.none() | st.integers(0, 100),
    st.sampled_from([None, None, True, False]),
    st.sampled_from([False, False, False, True]),
)
# What one try meets, and how long it takes.
fates = st.tuples(answers | st.sampled_from(ERRORS), st.floats(0, 30))
policies = st.builds(
    lambda tries, limit, first, most: RetryPolicy(
        tries_limit=tries,
        time_limit=timedelta(seconds=limit),
        backoff=timedelta(seconds=min(first, most)),
        backoff_limit=timedelta(seconds=most),
    ),
    st.integers(1, 8),
    st.floats(0, 200),
    st.floats(0, 5),
    st.floats(0, 60),
)


class Fated(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A transport whose every try has its fate; notes when each began, and with what."""

    def __init__(self, timing: ManualTiming, fate_list) -> None:
        self.timing = timing
        self.fates = list(fate_list)
        self.began_at: list[float] = []
        self.sent: list[tuple] = []
        # What the server asked the client to wait, after each try.
        self.asked: list[float] = []
        self.was_final: list[bool] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.began_at.append(self.timing.monotonic() - START)
        key = request.headers.get("Idempotency-Key")
        self.sent.append((request.method, str(request.url), key, request.content))
        fate, seconds = self.fates.pop(0) if self.fates else ((200, None, None, False), 0.0)
        self.timing.passed += seconds
        if not isinstance(fate, tuple):
            self.asked.append(0.0)
            self.was_final.append(fate not in TRANSIENT)
            raise fate("scripted")
        status, after, told, replayed = fate
        self.asked.append(float(after or 0))
        is_worth_it = status in (408, 425, 429, 500, 502, 503, 504)
        if status == 409:
            is_worth_it = True
        self.was_final.append(not is_worth_it or told is False or replayed)
        headers = {} if after is None else {"Retry-After": str(after)}
        if replayed:
            headers["Idempotent-Replayed"] = "true"
        if told is None:
            return httpx.Response(status, headers=headers)
        return httpx.Response(status, headers=headers, json={"retryable": told})

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


def sent_once(fate_list, draws, policy, *, is_async=False, budget=None):
    """One operation through the transport; its trail and how it ended."""
    timing = ManualTiming()
    inner = Fated(timing, fate_list)
    draws = iter(draws)
    options = {
        "policy": policy,
        "budget": budget or RetryBudget(capacity=1_000),
        "timing": timing,
        "random": lambda: next(draws, 0.5),
    }
    request = httpx.Request("POST", "https://server.test/charges", json={"amount": 5})
    try:
        if is_async:
            ended = asyncio.run(AsyncRetryTransport(inner, **options).handle_async_request(request))
        else:
            ended = RetryTransport(inner, **options).handle_request(request)
    except httpx.TransportError as error:
        ended = error
    return inner, timing, ended


draws_lists = st.lists(st.floats(0, 1, exclude_max=True), max_size=8)


@given(st.lists(fates, max_size=10), draws_lists, policies)
def test_no_limit_is_ever_exceeded(fate_list, draws, policy):
    """Not the tries, not the time, and no wait is shorter than the server asks for."""
    inner, timing, ended = sent_once(fate_list, draws, policy)
    assert len(inner.began_at) <= policy.tries_limit
    assert all(began <= policy.time_seconds + CLOSE for began in inner.began_at[1:])
    assert len(timing.slept) == len(inner.began_at) - 1
    for number, (wait, asked) in enumerate(zip(timing.slept, inner.asked, strict=False)):
        bound = min(policy.backoff_limit_seconds, policy.backoff_seconds * 2**number)
        assert asked - CLOSE <= wait <= asked + bound + CLOSE
    if isinstance(ended, httpx.Response):
        report = tries_of(ended)
        assert report.count == len(inner.began_at)
        assert report.waited_seconds == pytest.approx(sum(timing.slept))


@given(st.lists(fates, max_size=10), draws_lists, policies)
def test_the_key_and_the_request_never_change(fate_list, draws, policy):
    """Every try of one operation is the same request with the same key; two have two keys."""
    inner, _, _ = sent_once(fate_list, draws, policy)
    other, _, _ = sent_once(fate_list, draws, policy)
    assert len(set(inner.sent)) == 1
    assert inner.sent[0][2] is not None
    assert inner.sent[0][2] != other.sent[0][2]


@given(st.lists(fates, max_size=10), draws_lists, policies)
def test_a_final_answer_ends_it_and_nothing_else_does_without_a_reason(fate_list, draws, policy):
    """What is final is never retried; what is not final is retried as far as the limits go."""
    inner, _, ended = sent_once(fate_list, draws, policy)
    assert not any(inner.was_final[:-1])
    report = tries_of(ended)
    if report is None:
        stopped = ended.__notes__[0].rpartition(": ")[2]
        assert (stopped == Stopped.FAILED.value) == inner.was_final[-1]
    else:
        assert (report.stopped is Stopped.ANSWERED) == inner.was_final[-1]
        stopped = report.stopped.value
    if stopped == Stopped.TRIES.value:
        assert len(inner.began_at) == policy.tries_limit
    if stopped == Stopped.TIME.value:
        spent = inner.timing.passed + inner.asked[-1]
        assert spent >= policy.time_seconds - CLOSE


@given(st.lists(fates, max_size=6), draws_lists, policies)
def test_threads_and_tasks_take_the_same_decisions(fate_list, draws, policy):
    """One flow, two ways to drive it."""
    blocking, slept, _ = sent_once(fate_list, draws, policy)
    tasks, suspended, _ = sent_once(fate_list, draws, policy, is_async=True)
    assert blocking.began_at == tasks.began_at
    assert slept.slept == suspended.slept


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 10)), max_size=200),
    st.floats(0, 20),
    st.floats(0, 1),
    st.floats(0, 3),
)
def test_the_budget_bounds_the_retries_of_all_requests(moves, capacity, per_request, per_second):
    """Whatever comes when: a burst, a share of the requests, and a trickle; never more."""
    budget = RetryBudget(capacity=capacity, per_request=per_request, per_second=per_second)
    now = START
    requests = retries = 0
    for is_request, seconds in moves:
        now += seconds
        if is_request:
            budget.note_request()
            requests += 1
        else:
            retries += budget.take(now)
        earned = requests * per_request + (now - START) * per_second
        assert retries <= capacity + earned + CLOSE


def test_the_budget_refills_by_requests_and_by_time():
    """The bound is not kept by refusing everything."""
    budget = RetryBudget(capacity=1, per_request=0.5, per_second=0.1)
    assert [budget.take(0.0), budget.take(0.0)] == [True, False]
    budget.note_request()
    assert not budget.take(0.0)
    budget.note_request()
    assert budget.take(0.0)
    assert not budget.take(9.0)
    assert budget.take(10.0)


def test_a_quiet_time_saves_up_no_more_than_the_capacity():
    """The burst after a thousand good requests is as small as any other."""
    budget = RetryBudget(capacity=3, per_request=1, per_second=1)
    for _ in range(1_000):
        budget.note_request()
    assert sum(budget.take(0.0) for _ in range(10)) == 3
    assert sum(budget.take(1_000.0) for _ in range(10)) == 3


def test_an_older_reading_of_the_clock_takes_no_token_away():
    """Threads read the clock before they reach the budget, and not in that order."""
    budget = RetryBudget(capacity=5, per_request=0, per_second=1)
    assert budget.take(10.0)
    assert budget.take(5.0)
    assert budget.take(10.0)


def test_a_random_wait_ends_where_the_time_does():
    """The last try begins at the limit, not after it."""
    policy = RetryPolicy(
        time_limit=timedelta(seconds=10),
        backoff=timedelta(seconds=8),
        backoff_limit=timedelta(seconds=60),
    )
    down = [((503, None, None, False), 1.0)] * 3
    inner, timing, _ = sent_once(down, [0.5, 0.999], policy)
    assert inner.began_at == pytest.approx([0, 5, 10])
    assert timing.slept == pytest.approx([4, 4])


def test_a_retry_that_is_not_made_costs_no_token():
    """Requests that end for another reason leave the budget to those that can use it."""
    budget = RetryBudget(capacity=1, per_request=0, per_second=0)
    down = [((503, None, None, False), 0.0)]
    sent_once(down, [], RetryPolicy(tries_limit=1), budget=budget)
    sent_once(down, [], RetryPolicy(time_limit=timedelta(0)), budget=budget)
    inner, _, _ = sent_once(down, [], RetryPolicy(), budget=budget)
    assert len(inner.sent) == 2


def test_a_cancelled_task_stops_during_its_wait():
    """Nothing is sent after the caller has gone."""

    class Held(ManualTiming):
        async def sleep(self, seconds: float) -> None:
            waiting.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        transport = AsyncRetryTransport(inner, timing=inner.timing)
        request = httpx.Request("POST", "https://server.test/charges")
        task = asyncio.create_task(transport.handle_async_request(request))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    waiting = asyncio.Event()
    inner = Fated(Held(), [((503, None, None, False), 0.0)])
    asyncio.run(scenario())
    assert len(inner.sent) == 1

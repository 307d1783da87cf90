"""Requests that a worker finishes without their client, on an event loop."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from datetime import timedelta

import pytest

from retrysafe import GLOBAL, AsyncIdempotency, BodyKey, Ending, Policy
from retrysafe.errors import InvalidInput, PolicyInvalid
from retrysafe.http import (
    HeaderKey,
    IdempotencyMiddleware,
    Resumable,
    Rule,
    StatusRule,
    Streaming,
    api_key,
    resumed_caller,
)
from retrysafe.observe import EventKind
from retrysafe.stores import Condition, MemoryStore
from retrysafe.testing import ManualClock
from retrysafe.workers import WorkerPolicy
from tests.http.driving import ask

LEASE = timedelta(seconds=30)
POLICY = Policy(lease=LEASE)
WORKER = WorkerPolicy(back_off=timedelta(0))


def on_a_loop(scenario):
    """A test in an event loop of its own."""

    @functools.wraps(scenario)
    def run(*args, **kwargs):
        asyncio.run(scenario(*args, **kwargs))

    return run


class Died(asyncio.CancelledError):
    """The end of the process, as the application meets it."""


def account(request):
    """Whose request it is: an identity, never the token."""
    token = request.headers.get("Authorization")
    return None if token is None else token.removeprefix("Bearer ")


class Shop:
    """A store, the web processes in front of it and the worker behind it."""

    def __init__(self, rule: Rule | None = None, **options) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(now_ms=self.clock)
        self.rule = rule or Rule(path="/charges", resumable=True)
        self.options = {"caller": account} | options
        # What a step did, what the endpoint saw, and what it does at the end of an attempt.
        self.effects: list[str] = []
        self.seen: list[dict] = []
        self.endings: list[object] = []
        self.events: list = []

    async def endpoint(self, scope, receive, send):
        message = await receive()
        attempt = scope["state"]["idempotency"]
        headers = dict(scope["headers"])
        seen = {
            "attempt": attempt.number,
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"],
            "body": message["body"],
            "caller": resumed_caller(scope),
            "headers": headers,
        }
        self.seen.append(seen)
        charge = await attempt.step("charge", self.charge, seen["body"].decode())
        ending = self.endings.pop(0) if self.endings else 201
        if isinstance(ending, BaseException):
            raise ending
        status = ending
        if status == "auth":
            who = resumed_caller(scope) or headers.get(b"authorization")
            status = 401 if who is None else 201
        body = json.dumps({"charge": charge}).encode()
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", b"application/json"), (b"location", b"/charges/1")],
            }
        )
        await send({"type": "http.response.body", "body": body})

    async def charge(self, body: str) -> int:
        self.effects.append(body)
        return len(self.effects)

    def process(self) -> tuple[IdempotencyMiddleware, AsyncIdempotency]:
        """The application in a process of its own, as far as retrysafe can tell."""
        idem = AsyncIdempotency(
            self.store,
            policy=POLICY,
            observers=[self.events.append],
            cache=False,
            secret="0123456789abcdef",
        )
        return IdempotencyMiddleware(self.endpoint, idem, rules=[self.rule], **self.options), idem

    async def die(self, **asked) -> None:
        """A request whose process dies after its step; its lease runs out."""
        app, _ = self.process()
        self.endings.insert(0, Died())
        with pytest.raises(asyncio.CancelledError):
            await ask(app, **asked)
        self.clock.advance(LEASE)

    async def work(self, outer=lambda app: app):
        """A look of a worker, with the application and what stands around it."""
        app, idem = self.process()
        report = (await idem.worker(WORKER, app=outer(app)).run_once())["recovery"]
        await idem.close()
        return report


@on_a_loop
async def test_a_request_is_finished_from_its_last_step_and_its_status_shows_the_response():
    """The worker sends what the client sent; the step that ran does not run again."""
    shop = Shop(Rule(path="/charges", resumable=Resumable(headers=("X-Tenant",))))
    await shop.die(path="/charges?x=1&y=%20", x_tenant="t-1", x_other="o", cookie="c=1")
    report = await shop.work()
    assert (report.resumed, report.failed) == (1, 0)
    first, second = shop.seen
    for name in ("method", "path", "query", "body"):
        assert first[name] == second[name]
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert (first["caller"], second["caller"]) == (None, "alice")
    assert set(second["headers"]) == {
        *(b"content-type", b"content-length", b"idempotency-key", b"x-tenant"),
    }
    assert len(shop.effects) == 1
    app, _ = shop.process()
    status = await ask(app, "GET", "/idempotency-status/k-1", key=None, body=b"")
    assert (status.status, status.json) == (201, {"charge": 1})
    replay = await ask(app, path="/charges?x=1&y=%20")
    assert replay.is_replay
    assert replay.headers["location"] == "/charges/1"
    assert len(shop.seen) == 2


@on_a_loop
async def test_the_status_of_a_request_that_was_cut_off_promises_its_end():
    """A client that was told 202 need not send it again: it is to ask again."""
    shop = Shop()
    await shop.die()
    app, _ = shop.process()
    status = await ask(app, "GET", "/idempotency-status/k-1", key=None, body=b"")
    assert (status.json["state"], status.headers["retry-after"]) == ("abandoned", "5")
    assert "worker finishes it" in status.json["detail"]


@on_a_loop
async def test_nothing_that_proves_who_calls_is_stored():
    """Neither the token nor the cookie is anywhere in what is stored of the request."""
    shop = Shop()
    await shop.die(caller="t0ken", cookie="session=s3cret", x_api_key="s3cret")
    _, idem = shop.process()
    stored = await idem.read("k-1", caller="t0ken")
    kept = stored.arguments.head + stored.arguments.body
    assert b"s3cret" not in kept
    assert b"Bearer" not in kept
    assert b"authorization" not in kept


@pytest.mark.parametrize(
    "name",
    ["Authorization", "Cookie", "Proxy-Authorization", "X-API-Key", "X-Auth-Token", "X-Session-Id"],
)
def test_a_credential_is_never_on_the_list(name):
    """Refused when the rule is made, with what to do instead."""
    with pytest.raises(PolicyInvalid, match="resumed_caller"):
        Resumable(headers=(name,))


def test_the_header_of_the_callers_credential_is_never_on_the_list():
    """Whatever its name is."""
    rule = Rule(resumable=Resumable(headers=("X-Who",)))
    with pytest.raises(PolicyInvalid, match="X-Who holds the credential"):
        Shop(rule, caller=api_key("X-Who")).process()


def test_what_cannot_be_resumed_is_refused_at_set_up():
    """A transaction, a stream, an unprotected route; and headers that are none."""
    for options in (
        {"transaction": lambda: None},
        {"streaming": Streaming.PASS},
        {"protected": False},
    ):
        with pytest.raises(PolicyInvalid, match="resumable=True is for requests that run"):
            Rule(resumable=True, **options)
    for headers in ("X-Tenant", 7, ("no name",), ("Content-Length",)):
        with pytest.raises(PolicyInvalid):
            Resumable(headers=headers)
    with pytest.raises(PolicyInvalid, match="accepts"):
        Resumable(accepts=1)
    with pytest.raises(PolicyInvalid, match="resumable"):
        Rule(resumable="yes")


def test_a_function_and_a_route_of_one_name_are_refused():
    """A worker could not tell which of the two a record is of."""
    idem = AsyncIdempotency(MemoryStore(), caller=GLOBAL)

    @idem.resumable("POST /charges")
    async def charge():
        return 1

    with pytest.raises(InvalidInput, match="another name"):
        IdempotencyMiddleware(
            None, idem, caller=GLOBAL, rules=[Rule(path="/charges", methods="POST", resumable=True)]
        )


@on_a_loop
async def test_a_request_over_the_limit_is_refused_and_nothing_runs():
    """413 by its declared length, by its body, and by what is stored beside it."""
    policy = Policy(lease=LEASE, arguments_limit_bytes=400)
    shop = Shop(Rule(path="/charges", resumable=True, policy=policy))
    app, _ = shop.process()
    for body, path in ((b"x" * 401, "/charges"), (b"x", "/charges?" + "q" * 400)):
        reply = await ask(app, path=path, body=body)
        assert (reply.status, reply.problem) == (413, "body-too-large")
        assert "400" in reply.json["detail"]
    assert not shop.seen
    assert (await ask(app, body=b"x" * 100)).status == 201


@on_a_loop
async def test_a_401_of_a_resumed_request_is_never_stored(caplog):
    """It is reported, the key stays pending, and a mended authentication finishes it."""
    stored = StatusRule(kept=[401, 403])
    policy = POLICY.with_changes(unlisted=Ending.FAILED)
    shop = Shop(Rule(path="/charges", resumable=True, stored=stored, policy=policy))
    await shop.die()
    for status in (401, 403, 503):
        shop.endings.append(status)
        with caplog.at_level(logging.WARNING, "retrysafe"):
            report = await shop.work()
        assert (report.resumed, report.failed) == (0, 1)
        assert str(status) in caplog.text
        postponed = [event for event in shop.events if event.kind is EventKind.POSTPONED]
        assert str(status) in postponed[-1].detail
        caplog.clear()
        shop.clock.advance(LEASE)
    assert (await shop.work()).resumed == 1
    assert len(shop.effects) == 1


@on_a_loop
async def test_an_authentication_around_the_protection_that_refuses_is_reported(caplog):
    """The request never reaches its route: nothing is stored, and the attempt counts."""
    shop = Shop()
    await shop.die()

    def locked(app):
        async def authenticated(scope, receive, send):
            if not any(name == b"authorization" for name, _ in scope["headers"]):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body"})
                return
            await app(scope, receive, send)

        return authenticated

    with caplog.at_level(logging.WARNING, "retrysafe"):
        report = await shop.work(locked)
    assert report.failed == 1
    assert "did not reach its route: the application answered 401" in caplog.text
    assert "resumed_caller" in caplog.text
    assert len(shop.seen) == 1
    shop.clock.advance(LEASE)
    assert (await shop.work()).resumed == 1


@on_a_loop
async def test_a_request_that_is_refused_for_ever_is_given_up_in_the_end():
    """The attempt limit bounds it, as it bounds operations that kill their workers."""
    shop = Shop(Rule(path="/charges", resumable=True, policy=Policy(lease=LEASE, attempt_limit=3)))
    await shop.die()
    for _ in range(3):
        shop.endings.append(401)
        await shop.work()
        shop.clock.advance(LEASE)
    _, idem = shop.process()
    assert (await idem.read("k-1", caller="alice")).condition is Condition.FAILED
    assert len(shop.seen) == 3


@on_a_loop
async def test_no_client_can_pretend_to_be_resumed():
    """Neither by a header of any spelling nor by text where the object should be."""
    shop = Shop(caller=lambda request: resumed_caller(request) or account(request))
    app, _ = shop.process()
    reply = await ask(
        app, caller=None, scope={"retrysafe.resumed": "alice"}, retrysafe_resumed="alice"
    )
    assert (reply.status, reply.problem) == (401, "caller-unknown")
    assert not shop.seen


@on_a_loop
@pytest.mark.parametrize("other", [[], [Rule(path="/charges", name="other")]])
async def test_a_request_whose_rule_has_moved_runs_neither_without_a_claim_nor_under_another(
    other, caplog
):
    """A deploy has given its name to another path: each attempt would have run it once more."""
    shop = Shop(Rule(path="/charges", name="charge", resumable=True))
    await shop.die()
    shop.options["caller"] = lambda request: "anybody"
    moved = Rule(path="/v2/charges", name="charge", resumable=True)
    idem = AsyncIdempotency(shop.store, policy=POLICY, cache=False)
    app = IdempotencyMiddleware(shop.endpoint, idem, rules=[moved, *other], **shop.options)
    with caplog.at_level(logging.WARNING, "retrysafe"):
        report = (await idem.worker(WORKER, app=app).run_once())["recovery"]
    await idem.close()
    assert (report.failed, len(shop.seen)) == (1, 1)
    assert "Keep a rule of that name for the path" in caplog.text


@on_a_loop
async def test_a_request_that_runs_without_its_rule_is_not_sent_again(caplog):
    """A deploy has taken the rule away where no middleware sees that: it runs once at most."""
    shop = Shop()
    await shop.die()
    ran = []

    def bare(app):
        async def endpoint(scope, receive, send):
            ran.append(scope["path"])
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body"})

        return endpoint

    with caplog.at_level(logging.WARNING, "retrysafe"):
        assert (await shop.work(bare)).failed == 1
    assert "It may have run, and is not sent again" in caplog.text
    shop.clock.advance(LEASE)
    await shop.work(bare)
    assert len(ran) == 1
    _, idem = shop.process()
    assert (await idem.read("k-1", caller="alice")).condition is Condition.FAILED


@on_a_loop
async def test_a_worker_without_an_application_claims_nothing():
    """It reports the key, and uses up no attempt."""
    shop = Shop()
    await shop.die()
    _, idem = shop.process()
    report = (await idem.worker(WORKER).run_once())["abandoned"]
    assert report.reported == 1
    (abandoned,) = [event for event in shop.events if event.kind is EventKind.ABANDONED]
    assert "--app" in abandoned.detail
    assert (await idem.read("k-1", caller="alice")).record.attempt == 1


@on_a_loop
async def test_every_first_request_is_accepted_where_the_rule_says_so():
    """202 as soon as the key is claimed, without a word of the client; so are duplicates."""
    shop = Shop(Rule(path="/charges", resumable=Resumable(accepts=True)))
    gate = asyncio.Event()

    async def slow(body):
        await gate.wait()
        shop.effects.append(body)
        return 1

    shop.charge = slow
    app, idem = shop.process()
    for _ in range(2):
        reply = await ask(app)
        assert (reply.status, reply.json["state"]) == (202, "running")
        assert reply.headers["location"] == "/idempotency-status/k-1"
        assert "preference-applied" not in reply.headers
    gate.set()
    await idem.close()
    assert (await ask(app, "GET", "/idempotency-status/k-1", key=None)).status == 201
    assert len(shop.effects) == 1


@on_a_loop
async def test_two_workers_and_a_client_who_comes_back_run_it_once():
    """Whoever takes the claim over runs it; the others find it taken."""
    shop = Shop()
    await shop.die()
    inside, gate = asyncio.Event(), asyncio.Event()
    plain = shop.endpoint

    async def slow(scope, receive, send):
        inside.set()
        await gate.wait()
        await plain(scope, receive, send)

    shop.endpoint = slow
    first = asyncio.create_task(shop.work())
    await inside.wait()
    second = await shop.work()
    app, _ = shop.process()
    retry = await ask(app)
    gate.set()
    assert (await first).resumed == 1
    assert second.resumed == 0
    assert (retry.status, retry.problem) == (409, "in-flight")
    assert len(shop.effects) == 1
    assert [seen["attempt"] for seen in shop.seen] == [1, 2]


@on_a_loop
async def test_a_key_that_was_made_from_the_request_keeps_its_own_window():
    """The window of the source that made the key counts, not that of keys that clients send."""
    source = HeaderKey(otherwise=BodyKey(window=timedelta(minutes=5)))
    shop = Shop(Rule(path="/charges", key=source, resumable=True))
    await shop.die(key=None)
    assert (await shop.work()).resumed == 1
    app, _ = shop.process()
    assert (await ask(app, key=None)).is_replay
    shop.clock.advance(timedelta(minutes=6))
    assert not (await ask(app, key=None)).is_replay
    assert [seen["attempt"] for seen in shop.seen] == [1, 2, 1]


@on_a_loop
async def test_a_mounted_application_is_reached_by_its_whole_path():
    """What the server and the routers in front have put into the scope comes out the same."""
    shop = Shop()
    app, _ = shop.process()
    shop.endings.insert(0, Died())
    scope = {"path": "/api/charges", "raw_path": b"/api/ch%61rges", "root_path": "/api"}
    with pytest.raises(asyncio.CancelledError):
        await ask(app, scope=scope)
    shop.clock.advance(LEASE)
    assert (await shop.work()).resumed == 1
    assert shop.seen[1]["path"] == "/api/charges"


@on_a_loop
async def test_what_stands_around_the_protection_may_fail_after_the_response(caplog):
    """The response is the outcome; that nobody could be sent it is told."""
    shop = Shop()
    await shop.die()

    def clumsy(app):
        async def failing(scope, receive, send):
            await app(scope, receive, send)
            raise RuntimeError("late")

        return failing

    with caplog.at_level(logging.WARNING, "retrysafe"):
        assert (await shop.work(clumsy)).resumed == 1
    assert "failed after its response" in caplog.text


@on_a_loop
async def test_what_the_application_raises_is_judged_by_its_policy():
    """As in any run: a terminal error is stored, and the next one finds it."""
    policy = POLICY.with_changes(terminal=(KeyError,))
    shop = Shop(Rule(path="/charges", resumable=True, policy=policy))
    await shop.die()
    shop.endings.append(KeyError("no such customer"))
    assert (await shop.work()).failed == 1
    app, _ = shop.process()
    assert (await ask(app)).problem == "operation-failed"
    assert len(shop.seen) == 2


@on_a_loop
async def test_a_worker_that_gives_up_ends_the_run_and_leaves_the_key_to_its_lease():
    """Its next attempt is another worker's."""
    shop = Shop()
    await shop.die()
    inside, plain = asyncio.Event(), shop.endpoint
    cancelled = []

    async def endless(scope, receive, send):
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(scope["path"])
            raise

    shop.endpoint = endless
    app, idem = shop.process()
    working = asyncio.create_task(idem.worker(WORKER, app=app).run())
    await inside.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert cancelled == ["/charges"]
    shop.clock.advance(LEASE)
    shop.endpoint = plain
    assert (await shop.work()).resumed == 1
    assert len(shop.effects) == 1


@on_a_loop
async def test_a_resumed_response_past_its_limits_is_done_and_ends():
    """It has no reader, and might go on for ever."""
    policy = POLICY.with_changes(outcome_limit_bytes=100)
    shop = Shop(Rule(path="/charges", resumable=True, policy=policy))
    await shop.die()
    ended = []

    async def endless(scope, receive, send):
        await scope["state"]["idempotency"].step("charge", shop.charge, "")
        await send({"type": "http.response.start", "status": 201, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 50, "more_body": True})
        finally:
            ended.append(scope["path"])

    shop.endpoint = endless
    assert (await shop.work()).resumed == 1
    assert ended == ["/charges"]
    app, _ = shop.process()
    assert (await ask(app)).problem == "outcome-unavailable"


@on_a_loop
async def test_a_time_limit_around_the_protection_does_not_cut_the_run_off():
    """As with a client that has gone: else what takes longer would never be finished."""
    shop = Shop()
    await shop.die()
    has_given_up, plain = asyncio.Event(), shop.endpoint

    async def slow(scope, receive, send):
        await has_given_up.wait()
        await plain(scope, receive, send)

    def impatient(app):
        async def limited(scope, receive, send):
            try:
                async with asyncio.timeout(0):
                    await app(scope, receive, send)
            except TimeoutError:
                await send({"type": "http.response.start", "status": 504, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                has_given_up.set()

        return limited

    shop.endpoint = slow
    assert (await shop.work(impatient)).resumed == 1
    app, _ = shop.process()
    assert (await ask(app)).is_replay


@on_a_loop
async def test_a_run_that_is_cut_off_has_no_ending_whatever_its_policy_says():
    """Nobody knows how far it got: only its lease frees the key."""
    policy = POLICY.with_changes(unlisted=Ending.FAILED)
    shop = Shop(Rule(path="/charges", resumable=True, policy=policy))
    await shop.die()
    shop.endings.append(asyncio.CancelledError())
    assert (await shop.work()).failed == 1
    shop.clock.advance(LEASE)
    assert (await shop.work()).resumed == 1
    assert len(shop.effects) == 1


@on_a_loop
async def test_a_worker_keeps_nothing_of_a_response_that_does_not_end():
    """It is done, and nobody reads it: neither its body nor its run stays in memory."""
    shop = Shop()
    await shop.die()

    async def streaming(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await send({"type": "http.response.body", "body": b"data", "more_body": True})

    shop.endpoint = streaming
    app, idem = shop.process()
    await idem.worker(WORKER, app=app).run_once()
    await idem.close()
    assert not app._runs

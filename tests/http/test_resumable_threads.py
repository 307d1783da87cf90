"""Requests that a worker finishes without their client, in threads: WSGI and Flask."""

from __future__ import annotations

import json
import logging
import threading
from datetime import timedelta

import pytest
from flask import Flask, g, jsonify, request

from retrysafe import Idempotency, Policy, current_attempt
from retrysafe.contrib.flask import Retrysafe
from retrysafe.errors import PolicyInvalid, StoreUnavailable
from retrysafe.http import Resumable, Rule, WSGIIdempotencyMiddleware, resumed_caller
from retrysafe.observe import EventKind
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock
from retrysafe.workers import WorkerPolicy
from tests.http.driving import ask_wsgi

LEASE = timedelta(seconds=30)
POLICY = Policy(lease=LEASE)
WORKER = WorkerPolicy(back_off=timedelta(0))


class Died(BaseException):
    """The end of the process, as the application meets it."""


def account(request):
    """Whose request it is: an identity, never the token."""
    token = request.headers.get("Authorization")
    return None if token is None else token.removeprefix("Bearer ")


class Shop:
    """A store, the web processes in front of it and the worker behind it."""

    def __init__(self, **rule) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(now_ms=self.clock)
        self.rule = {"resumable": True} | rule
        self.effects: list[str] = []
        self.seen: list[tuple] = []
        self.endings: list[object] = []
        self.events: list = []

    def idem(self) -> Idempotency:
        return Idempotency(self.store, policy=POLICY, observers=[self.events.append], cache=False)

    def serve(self, environ, body: bytes) -> tuple[int, bytes]:
        """What every endpoint does: a step, then the ending of the attempt."""
        attempt = current_attempt()
        path = environ["SCRIPT_NAME"] + environ["PATH_INFO"]
        headers = {name for name in environ if name.startswith("HTTP_")}
        told = (attempt.number, path, environ["QUERY_STRING"], body, resumed_caller(environ))
        self.seen.append((*told, headers))
        charge = attempt.step("charge", self.charge, body.decode())
        ending = self.endings.pop(0) if self.endings else 201
        if isinstance(ending, BaseException):
            raise ending
        return ending, json.dumps({"charge": charge}).encode()

    def charge(self, body: str) -> int:
        self.effects.append(body)
        return len(self.effects)

    def plain(self, environ, start_response):
        status, body = self.serve(environ, environ["wsgi.input"].read())
        start_response(f"{status} Done", [("Content-Type", "application/json")])
        return [body]

    def process(self):
        """The application in a process of its own, as far as retrysafe can tell."""
        idem, rules = self.idem(), [Rule(path="/charges", **self.rule)]
        return WSGIIdempotencyMiddleware(self.plain, idem, caller=account, rules=rules), idem

    def die(self, **asked) -> None:
        """A request whose process dies after its step; its lease runs out."""
        self.endings.insert(0, Died())
        with pytest.raises(Died):
            ask_wsgi(self.process()[0], **asked)
        self.clock.advance(LEASE)

    def work(self, outer=lambda app: app):
        app, idem = self.process()
        return idem.worker(WORKER, app=outer(app)).run_once()["recovery"]


class FlaskShop(Shop):
    """The same by Flask's own integration, with a view that has the rule."""

    def process(self):
        idem, app, retrysafe = self.idem(), Flask(__name__), Retrysafe()
        retrysafe.init_app(app, idem, caller=account)

        @app.before_request
        def authenticate():
            g.who = resumed_caller(request) or request.headers.get("Authorization")
            return None if g.who else ("who are you?", 401)

        @app.post("/charges")
        @retrysafe.idempotent(**self.rule)
        def charge():
            status, body = self.serve(request.environ, request.get_data())
            return jsonify(json.loads(body)), status

        # As `retrysafe worker --app` does: no request has come yet.
        app.extensions["retrysafe"].refresh()
        return app, idem


@pytest.mark.parametrize("kind", [Shop, FlaskShop])
def test_a_request_is_finished_from_its_last_step_and_its_status_shows_the_response(kind):
    """The worker sends what the client sent; the step that ran does not run again."""
    shop = kind(resumable=Resumable(headers=("X-Tenant",)))
    environ = {"SCRIPT_NAME": "/api", "HTTP_HOST": "shop.example:8080"}
    shop.die(path="/charges?x=%20", environ=environ, x_tenant="t", cookie="c=1")
    report = shop.work()
    assert (report.resumed, report.failed) == (1, 0)
    first, second = shop.seen
    assert first[1:4] == second[1:4]
    assert second[1] == "/api/charges"
    assert (first[0], second[0]) == (1, 2)
    assert (first[4], second[4]) == (None, "alice")
    assert second[5] == {"HTTP_HOST", "HTTP_IDEMPOTENCY_KEY", "HTTP_X_TENANT"}
    assert len(shop.effects) == 1
    app, _ = shop.process()
    status = ask_wsgi(app, "GET", "/idempotency-status/k-1", key=None, body=b"")
    assert (status.status, status.json) == (201, {"charge": 1})
    replay = ask_wsgi(app, path="/charges?x=%20", environ=environ)
    assert replay.is_replay
    assert len(shop.seen) == 2


@pytest.mark.parametrize("kind", [Shop, FlaskShop])
def test_a_401_of_a_resumed_request_is_never_stored(kind, caplog):
    """It is reported, the key stays pending, and a mended authentication finishes it."""
    shop = kind()
    shop.die()
    for status in (401, 403, 503):
        shop.endings.append(status)
        with caplog.at_level(logging.WARNING, "retrysafe"):
            report = shop.work()
        assert (report.resumed, report.failed) == (0, 1)
        assert f"answered with {status}" in caplog.text
        postponed = [event for event in shop.events if event.kind is EventKind.POSTPONED]
        assert str(status) in postponed[-1].detail
        caplog.clear()
        shop.clock.advance(LEASE)
    assert shop.work().resumed == 1
    assert len(shop.effects) == 1


def test_a_request_that_does_not_reach_its_route_is_reported(caplog):
    """By a refusal or an error of what stands around it; nothing of that is stored."""
    shop = Shop()
    shop.die()

    def locked(app):
        def authenticated(environ, start_response):
            if "HTTP_AUTHORIZATION" not in environ:
                start_response("401 Who", [])
                return []
            return app(environ, start_response)

        return authenticated

    def broken(app):
        def failing(environ, start_response):
            raise PermissionError

        return failing

    for outer, did in ((locked, "answered 401"), (broken, "raised PermissionError")):
        with caplog.at_level(logging.WARNING, "retrysafe"):
            assert shop.work(outer).failed == 1
        assert f"did not reach its route: the application {did}" in caplog.text
        shop.clock.advance(LEASE)
    assert shop.work().resumed == 1


def test_what_stands_around_the_protection_may_fail_after_the_response(caplog):
    """The response is the outcome; that nobody could be sent it is told."""
    shop = Shop()
    shop.die()

    def clumsy(app):
        def failing(environ, start_response):
            list(app(environ, start_response))
            raise RuntimeError("late")

        return failing

    with caplog.at_level(logging.WARNING, "retrysafe"):
        assert shop.work(clumsy).resumed == 1
    assert "failed after its response" in caplog.text


@pytest.mark.parametrize("other", [[], [Rule(path="/charges", name="other")]])
def test_a_request_whose_rule_has_moved_runs_neither_without_a_claim_nor_under_another(other):
    """A deploy has given its name to another path: each attempt would have run it once more."""
    shop = Shop(name="charge")
    shop.die()
    moved = Rule(path="/v2/charges", name="charge", resumable=True)
    idem = shop.idem()
    app = WSGIIdempotencyMiddleware(
        shop.plain, idem, caller=lambda request: "anybody", rules=[moved, *other]
    )
    report = idem.worker(WORKER, app=app).run_once()["recovery"]
    assert (report.failed, len(shop.seen)) == (1, 1)


def test_what_the_application_raises_is_judged_by_its_policy():
    """As in any run: a terminal error is stored, and the next one finds it."""
    shop = Shop(policy=POLICY.with_changes(terminal=(KeyError,)))
    shop.die()
    shop.endings.append(KeyError("no such customer"))
    assert shop.work().failed == 1
    app, _ = shop.process()
    assert ask_wsgi(app).problem == "operation-failed"
    assert len(shop.seen) == 2


def test_no_client_can_pretend_to_be_resumed():
    """Neither by a header nor by text where the object should be."""
    shop = FlaskShop()
    app, _ = shop.process()
    forged = {"retrysafe.resumed": "alice", "HTTP_RETRYSAFE_RESUMED": "alice"}
    assert ask_wsgi(app, caller=None, environ=forged).status == 401
    assert not shop.seen


def test_a_first_request_is_accepted_while_its_thread_goes_on():
    """202 as soon as the key is claimed; the run ends by itself, once."""
    shop = Shop(resumable=Resumable(accepts=True))
    gate = threading.Event()

    def slow(body):
        assert gate.wait(30)
        shop.effects.append(body)
        return 1

    shop.charge = slow
    app, idem = shop.process()
    for _ in range(2):
        reply = ask_wsgi(app)
        assert (reply.status, reply.json["state"]) == (202, "running")
        assert reply.headers["location"] == "/idempotency-status/k-1"
    gate.set()
    idem.close()
    assert ask_wsgi(shop.process()[0], "GET", "/idempotency-status/k-1", key=None).status == 201
    assert len(shop.effects) == 1


def test_nothing_is_promised_of_a_run_without_a_claim():
    """No status page would know of it, and no worker would finish it."""

    class Down(MemoryStore):
        async def commit(self, claims, settlements):
            raise StoreUnavailable("down")

    has_answer = threading.Event()

    def application(environ, start_response):
        has_answer.wait(0.2)  # As long as a 202 would take to leave.
        start_response("201 Created", [])
        return [b"{}"]

    rule = Rule(path="/charges", resumable=Resumable(accepts=True))
    app = WSGIIdempotencyMiddleware(
        application, Idempotency(Down()), caller=account, rules=[rule], fail_open=True
    )
    status = ask_wsgi(app).status
    has_answer.set()
    assert status == 201


def test_a_worker_that_stood_still_looks_at_its_lease_before_the_application_runs():
    """In the layers around the protection, between its claim and the run."""
    shop = Shop()
    shop.die()

    def standing_still(app):
        def stand_still(environ, start_response):
            environ["retrysafe.resumed"].attempt._lease.revoke()
            return app(environ, start_response)

        return stand_still

    report = shop.work(standing_still)
    assert (report.resumed, report.lost) == (0, 1)
    assert len(shop.seen) == 1


def test_a_client_of_a_resumable_route_may_prefer_to_be_accepted():
    """And may wait a while for the response: it comes in time, or a refusal does."""
    shop = Shop()
    app, _ = shop.process()
    reply = ask_wsgi(app, prefer="respond-async, wait=30")
    assert reply.status == 201
    assert ask_wsgi(app, prefer="respond-async, wait=30", body=b"{}").status == 422
    shop.endings.append(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        ask_wsgi(app, key='"k-2"', prefer="respond-async, wait=30")


def test_a_view_cannot_answer_before_it_has_run():
    """Refused at set-up, with what can."""
    with pytest.raises(PolicyInvalid, match="WSGIIdempotencyMiddleware"):
        FlaskShop(resumable=Resumable(accepts=True)).process()


def test_a_resumed_response_past_its_limits_is_done_and_ends():
    """It has no reader, and might go on for ever."""
    shop = Shop(policy=POLICY.with_changes(outcome_limit_bytes=100))
    shop.die()
    ended = []

    def endless(environ, start_response):
        current_attempt().step("charge", shop.charge, "")
        start_response("201 Made", [])
        try:
            while True:
                yield b"x" * 50
        finally:
            ended.append(environ["PATH_INFO"])

    shop.plain = endless
    assert shop.work().resumed == 1
    assert ended == ["/charges"]
    assert ask_wsgi(shop.process()[0]).problem == "outcome-unavailable"

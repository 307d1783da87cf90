"""Properties of resumed requests that hold because of single lines; see `test_guards`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from retrysafe import Ending
from retrysafe.errors import PolicyInvalid
from retrysafe.http import Resumable, Rule, StatusRule, resumed_caller
from retrysafe.http.request import PROTECTED_NAME
from retrysafe.stores import Condition
from tests.http.driving import ask
from tests.http.test_resumable_requests import LEASE, POLICY, Died, Shop, account, on_a_loop


async def _ends_as(status: int, **rule) -> Condition:
    """What a key is after its resumed run was answered like this."""
    shop = Shop(Rule(path="/charges", resumable=True, **rule))
    await shop.die()
    shop.endings.append(status)
    await shop.work()
    shop.clock.advance(LEASE)
    _, idem = shop.process()
    return (await idem.read("k-1", caller="alice")).condition


@on_a_loop
async def test_a_refusal_of_a_resumed_request_is_never_stored():
    """Also where the rule keeps such responses: they are those of clients."""
    stored = StatusRule(kept=[401, 403])
    assert await _ends_as(401, stored=stored) is Condition.ABANDONED
    assert await _ends_as(403, stored=stored) is Condition.ABANDONED


@on_a_loop
async def test_a_refusal_is_no_failure_whatever_the_policy_says_of_exceptions():
    policy = POLICY.with_changes(unlisted=Ending.FAILED)
    assert await _ends_as(401, policy=policy) is Condition.ABANDONED


@on_a_loop
async def test_a_resumed_request_that_would_free_its_key_is_tried_again():
    """Released, it would wait for a client who was told that it is being done."""
    assert await _ends_as(503) is Condition.ABANDONED


@on_a_loop
async def test_what_others_put_into_a_scope_makes_no_resumed_request():
    shop = Shop(caller=lambda request: resumed_caller(request) or account(request))
    app, _ = shop.process()
    forged = SimpleNamespace(caller="alice")
    reply = await ask(app, caller=None, scope={"retrysafe.resumed": forged})
    assert reply.status == 401


@on_a_loop
async def test_a_stored_request_holds_no_credential():
    shop = Shop()
    await shop.die(cookie="session=s3cret")
    _, idem = shop.process()
    stored = await idem.read("k-1", caller="alice")
    assert b"s3cret" not in stored.arguments.head


def test_no_credential_can_be_listed():
    with pytest.raises(PolicyInvalid):
        Resumable(headers=("Cookie",))


class Copies(Shop):
    """A route of many paths, and an application that sends copies of a request's scope."""

    def __init__(self) -> None:
        super().__init__(Rule(path="/charges/{id}", resumable=True))
        # Which paths have run, and what copies were answered.
        self.paths: list[str] = []
        self.answers: list[int] = []
        self.app = None

    async def copy(self, scope, receive, path: str) -> None:
        async def note(message):
            if "status" in message:
                self.answers.append(message["status"])

        copied = {key: value for key, value in scope.items() if key != PROTECTED_NAME}
        await self.app(copied | {"path": path, "raw_path": path.encode()}, receive, note)

    async def endpoint(self, scope, receive, send):
        self.paths.append(scope["path"])
        if len(self.paths) == 1:
            raise Died
        if len(self.paths) == 2 and self.sends_copies:
            await self.copy(scope | {"state": {}}, receive, scope["path"])
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body"})

    sends_copies = False

    def around(self, app):
        """The application itself, for what it sends to itself."""
        self.app = app
        return app


@on_a_loop
async def test_a_request_inside_a_resumed_one_does_not_run_under_its_claim():
    """Also one that is its copy: it would be a second run of one attempt."""
    shop = Copies()
    shop.sends_copies = True
    await shop.die(path="/charges/1")
    assert (await shop.work(shop.around)).resumed == 1
    assert (shop.paths, shop.answers) == (["/charges/1"] * 2, [401])


@on_a_loop
async def test_a_resumed_request_runs_at_its_own_path():
    """A layer around the protection may send another one of the same route first."""
    shop = Copies()
    await shop.die(path="/charges/1")

    def asking_first(app):
        shop.app = app

        async def ask_first(scope, receive, send):
            await shop.copy(scope, receive, "/charges/2")
            await app(scope, receive, send)

        return ask_first

    assert (await shop.work(asking_first)).resumed == 1
    assert (shop.paths, shop.answers) == (["/charges/1"] * 2, [401])

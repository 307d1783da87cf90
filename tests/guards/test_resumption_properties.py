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


@on_a_loop
async def test_another_request_inside_a_resumed_one_does_not_run_under_its_claim():
    """An application may send itself a copy of the scope, for another path of the route."""
    shop = Shop(Rule(path="/charges/{id}", resumable=True))
    inner: list[int] = []

    async def endpoint(scope, receive, send):
        if scope["path"] == "/charges/1" and not shop.seen:
            shop.seen.append({})
            raise Died
        if scope["path"] == "/charges/1":
            copied = {key: value for key, value in scope.items() if key != PROTECTED_NAME}

            async def note(message):
                inner.append(message.get("status", 0))

            await protected[-1](copied | {"path": "/charges/2", "state": {}}, receive, note)
        else:
            inner.append(-1)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body"})

    shop.endpoint = endpoint
    protected: list = []

    def noted(app):
        protected.append(app)
        return app

    await shop.die(path="/charges/1")
    assert (await shop.work(noted)).resumed == 1
    assert inner[0] == 401
    assert -1 not in inner

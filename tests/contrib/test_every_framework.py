"""What an endpoint with a rule of its own owes its clients, in every framework alike."""

from __future__ import annotations

import asyncio

import pytest

from retrysafe import GLOBAL
from tests.contrib.conftest import is_replay, problem
from tests.http.driving import ask


@pytest.mark.parametrize("path", ["/charges", "/sync-charges"])
def test_an_endpoint_runs_once_and_knows_its_attempt(visit, path):
    """A retry gets the first response; async and plain endpoints find the attempt in the request's
    state and in the context; background tasks run once."""

    async def scenario(shop):
        first, second = await shop.post(path), await shop.post(path)
        assert (first.status_code, second.status_code) == (201, 201)
        assert first.content == second.content
        assert (is_replay(first), is_replay(second)) == (False, True)
        assert shop.till.attempts == [(1, 1)]
        assert shop.till.background == ([1] if path == "/charges" else [])
        if path == "/charges":
            assert second.headers["location"] == "/charges/1"
            assert shop.till.threads == {"MainThread"}
        else:
            assert "MainThread" not in shop.till.threads

    visit(scenario)


def test_a_key_is_required_where_the_endpoint_says_so(visit):
    """400 before anything runs, and 401 for a caller that is not known."""

    async def scenario(shop):
        missing = await shop.post(key=None)
        assert (missing.status_code, problem(missing)) == (400, "key-missing")
        unknown = await shop.client.post("/charges", headers={"Idempotency-Key": "k"})
        assert (unknown.status_code, problem(unknown)) == (401, "caller-unknown")
        assert shop.till.runs == []

    visit(scenario)


def test_a_key_is_optional_where_the_endpoint_says_so(visit):
    """Without a key it runs each time, with one it runs once."""

    async def scenario(shop):
        assert [(await shop.post("/notes", None)).json()["run"] for _ in range(2)] == [1, 2]
        assert [(await shop.post("/notes")).json()["run"] for _ in range(2)] == [3, 3]

    visit(scenario)


@pytest.mark.parametrize("path", ["/open", "/plain"])
def test_other_endpoints_pass_untouched(visit, path):
    """Taken out by a rule next to the endpoint, or never taken in: keys mean nothing there."""

    async def scenario(shop):
        assert [(await shop.post(path)).json()["run"] for _ in range(2)] == [1, 2]

    visit(scenario)


def test_another_request_under_the_key_is_refused(visit):
    """422 for another body, another endpoint and another path parameter; nothing runs."""

    async def scenario(shop):
        await shop.post()
        for path, body in (("/charges", {"amount": 8}), ("/notes", {"amount": 7})):
            reply = await shop.post(path, json=body)
            assert (reply.status_code, problem(reply)) == (422, "key-reused")
        assert (await shop.post("/v1/refunds/1", '"r-1"')).status_code == 201
        reply = await shop.post("/v1/refunds/2", '"r-1"')
        assert problem(reply) == "key-reused"
        assert shop.till.runs == ["charge", "refund"]

    visit(scenario)


def test_keys_of_two_callers_never_meet(visit):
    async def scenario(shop):
        await shop.post()
        assert not is_replay(await shop.post(caller="bob"))
        assert len(shop.till.runs) == 2

    visit(scenario)


def test_a_duplicate_of_a_running_request_is_told_to_come_back(visit):
    """409 with Retry-After while the first one runs; afterwards the first response."""

    async def scenario(shop):
        shop.till.started, shop.till.go_on = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(shop.post())
        await shop.till.started.wait()
        duplicate = await shop.post()
        assert (duplicate.status_code, problem(duplicate)) == (409, "in-flight")
        assert int(duplicate.headers["retry-after"]) >= 1
        shop.till.go_on.set()
        assert (await first).status_code == 201
        assert is_replay(await shop.post())
        assert shop.till.runs == ["charge"]

    visit(scenario)


def test_an_exception_that_the_application_answers_is_an_outcome(visit):
    """What an exception handler makes of it is stored like any response below 500."""

    async def scenario(shop):
        replies = [await shop.post(json={"amount": 7, "outcome": "decline"}) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [402, 402]
        assert [is_replay(reply) for reply in replies] == [False, True]
        assert replies[1].json() == {"declined": True}
        assert len(shop.till.runs) == 1

    visit(scenario)


@pytest.mark.parametrize("outcome", ["error", "crash"])
def test_a_failure_of_the_server_frees_the_key(visit, outcome):
    """A 500, sent or made from an exception that nobody handles, is not replayed."""

    async def scenario(shop):
        replies = [await shop.post(json={"amount": 7, "outcome": outcome}) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [500, 500]
        assert [number for number, _ in shop.till.attempts] == [1, 2]

    visit(scenario)


def test_a_stream_is_stored_whole(visit):
    async def scenario(shop):
        first, second = await shop.post("/stream"), await shop.post("/stream")
        assert first.text == second.text == "0 of run 1\n1 of run 1\n2 of run 1\n"
        assert is_replay(second)

    visit(scenario)


def test_events_pass_and_are_not_sent_again(visit):
    """Server-sent events go out as they come; a retry is told that they are done."""

    async def scenario(shop):
        first, second = await shop.post("/events"), await shop.post("/events")
        assert b"data: 1" in first.content
        assert (second.status_code, problem(second)) == (409, "outcome-unavailable")
        assert shop.till.runs == ["events"]

    visit(scenario)


@pytest.mark.parametrize("path", ["/orders", "/sync-orders"])
def test_row_and_response_are_one_transaction(visit, path):
    """The response is stored by the endpoint's own commit, and replayed."""

    async def scenario(shop):
        first, second = await shop.post(path), await shop.post(path)
        assert (first.status_code, first.json()) == (201, {"order": "pen"})
        assert (second.status_code, second.content) == (201, first.content)
        assert is_replay(second)
        assert second.headers.get("location") == first.headers.get("location")
        assert shop.till.orders() == ["pen"]

    visit(scenario)


@pytest.mark.parametrize("path", ["/orders", "/sync-orders"])
def test_what_is_rolled_back_is_not_replayed(visit, path):
    """The transaction failed after the response was written in it: nothing stands, and a retry
    completes in another one."""

    async def scenario(shop):
        shop.till.is_failing = True
        assert (await shop.post(path)).status_code == 500
        assert shop.till.orders() == []
        shop.till.is_failing = False
        again = await shop.post(path)
        assert (again.status_code, is_replay(again)) == (201, False)
        assert is_replay(await shop.post(path))
        assert shop.till.orders() == ["pen"]
        assert shop.till.runs == ["order", "order"]

    visit(scenario)


def test_a_rule_may_bring_the_transaction(visit):
    """The endpoint writes on the attempt's connection; a failure rolls back and frees the key, and
    a response commits."""

    async def scenario(shop):
        shop.till.is_failing = True
        assert (await shop.post("/atomic-orders")).status_code == 500
        assert shop.till.orders() == []
        shop.till.is_failing = False
        first, second = await shop.post("/atomic-orders"), await shop.post("/atomic-orders")
        assert (first.status_code, first.json()) == (201, {"run": 2})
        assert (first.content, is_replay(second)) == (second.content, True)
        assert shop.till.orders() == ["hat"]

    visit(scenario)


def test_the_policy_page_lists_the_endpoints(visit):
    """Every endpoint with its rule, under its whole path; those that only read are not there."""

    async def scenario(shop):
        page = await shop.client.get("/idempotency-policy", headers={"Accept": "application/json"})
        routes = {route["path"]: route for route in page.json()["routes"]}
        assert len(routes) == len(page.json()["routes"])
        refunds = next(path for path in routes if path.startswith("/v1/refunds/"))
        assert {path: routes[path]["key"] for path in routes} == {
            "/charges": "required",
            "/sync-charges": "required",
            "/notes": "optional",
            "/open": "off",
            refunds: "required",
            "/stream": "required",
            "/events": "required",
            "/orders": "required",
            "/sync-orders": "required",
            "/atomic-orders": "required",
        }
        assert routes["/charges"]["methods"] == ["POST"]
        assert routes["/charges"]["retention_seconds"] == 86_400
        assert routes[refunds]["retention_seconds"] == 7 * 86_400
        assert "{number" in refunds
        assert (await shop.client.head("/idempotency-policy")).status_code == 200
        assert (await shop.client.post("/idempotency-policy")).status_code == 405

    visit(scenario)


@pytest.mark.parametrize("readers", [False, lambda request: request.header(b"x-staff") == b"yes"])
def test_the_policy_page_can_be_for_some_or_for_nobody(visit, readers):
    """Others find nothing there; the status page stays."""

    async def scenario(shop):
        assert (await shop.client.get("/idempotency-policy")).status_code == 404
        staff = await shop.client.get("/idempotency-policy", headers={"X-Staff": "yes"})
        assert staff.status_code == (200 if readers else 404)
        await shop.post()
        mine = {"Authorization": "Bearer alice"}
        status = await shop.client.get("/idempotency-status/k-1", headers=mine)
        assert status.status_code == 201

    visit(scenario, policy_page=readers)


def test_problems_lead_to_the_policy_page(visit):
    """From below a router too: the page is the application's."""

    async def scenario(shop):
        for path in ("/charges", "/v1/refunds/1"):
            reply = await shop.post(path, None)
            assert reply.json()["type"] == "/idempotency-policy#key-missing"
            assert reply.json()["instance"] == path
            assert (await shop.client.get("/idempotency-policy")).status_code == 200

    visit(scenario)


def test_the_status_page_shows_the_callers_own_key(visit):
    """Also a key with slashes; another caller is told that there is no such key."""

    async def scenario(shop):
        await shop.post(key='"a/b c/"')
        path = "/idempotency-status/a%2Fb%20c%2F"
        mine = await shop.client.get(path, headers={"Authorization": "Bearer alice"})
        assert mine.status_code == 201
        assert mine.json()["amount"] == 7
        other = await shop.client.get(path, headers={"Authorization": "Bearer bob"})
        assert (other.status_code, problem(other)) == (404, "key-unknown")
        nothing = await shop.client.get(
            "/idempotency-statusa", headers={"Authorization": "Bearer a"}
        )
        assert nothing.status_code == 404
        assert "problem" not in nothing.headers["content-type"]

    visit(scenario)


def test_reading_is_never_protected(visit):
    async def scenario(shop):
        reply = await shop.client.get("/v1/refunds/4")
        assert (reply.status_code, reply.json()) == (200, {"id": 4})

    visit(scenario)


def test_one_namespace_for_everybody_can_be_asked_for(visit):
    """With GLOBAL as the caller, nobody has to say who they are."""

    async def scenario(shop):
        replies = [
            await shop.client.post("/notes", headers={"Idempotency-Key": "k"}) for _ in range(2)
        ]
        assert is_replay(replies[1])

    visit(scenario, caller=GLOBAL)


def test_a_closed_application_refuses(visit):
    """503 while the server shuts down; the same application can be started again, as tests do."""

    async def scenario(shop):
        await shop.retrysafe.close()
        reply = await shop.post()
        assert (reply.status_code, problem(reply)) == (503, "closing")
        async with shop.retrysafe.lifespan(shop.app):
            first, second = [await shop.post() for _ in range(2)]
            assert (first.status_code, second.content) == (201, first.content)
            assert is_replay(second)
        assert problem(await shop.post(key='"k-2"')) == "closing"

    visit(scenario)


def test_a_key_that_comes_to_an_endpoint_without_a_rule_is_reported(visit):
    """Where the framework shows us such endpoints, but for those that are taken out on purpose.

    Starlette does not: put the middleware around the application there.
    """

    async def scenario(shop):
        for _ in range(2):
            assert (await shop.post("/plain")).status_code < 300
            assert (await shop.post("/open")).status_code < 300
        logged = shop.retrysafe.protection.ignored_keys._logged
        assert logged == (set() if shop.framework == "starlette" else {("POST", "/plain")})

    visit(scenario)


def test_a_method_in_lower_case_does_not_pass_the_rule_by(visit):
    """Whether the framework serves it or refuses it, it runs once."""

    async def scenario(shop):
        replies = [
            await ask(shop.app, method, "/charges", key="k", body=b'{"amount": 7}')
            for method in ("post", "post", "POST", "POST")
        ]
        assert {reply.status for reply in replies} <= {201, 405}
        assert shop.till.runs == ["charge"]
        assert replies[-1].is_replay

    visit(scenario)

"""The demo's contract, row by row, on SQLite and on PostgreSQL, over a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from html import unescape

import httpx
import pytest

from tests.demo.server import (
    BODIES,
    LEASE_SECONDS,
    PATIENCE_SECONDS,
    headers_of,
    new_text,
    problem_of,
)

CROWD = 100
# Slow enough that the whole crowd has come before the first one is done.
SLOW_MS = 1500


@pytest.fixture(params=["charges", "orders"])
def path(request):
    return request.param


# Most tests are about what charges and orders share; these are about checkouts too.
EVERY_POST = pytest.mark.parametrize("path", BODIES, indirect=True)


@pytest.fixture
def customer():
    return new_text("customer")


@pytest.fixture
def body(path, customer):
    return BODIES[path] | {"customer": customer}


@pytest.fixture
def key():
    return new_text("key")


async def crowd(demo, path, key, body, **headers):
    """A hundred identical requests at the same time."""
    limits = httpx.Limits(max_connections=CROWD, max_keepalive_connections=CROWD)
    async with httpx.AsyncClient(
        base_url=demo.url, timeout=PATIENCE_SECONDS, limits=limits
    ) as client:
        return await asyncio.gather(
            *(
                client.post(f"/{path}", headers=headers_of(key, **headers), json=body)
                for _ in range(CROWD)
            )
        )


# First call, replay, mismatch.


def test_a_first_call_is_executed_and_a_retry_is_replayed(demo, path, body, customer, key):
    """201 with a Location that can be read; the retry gets the same, and one execution shows."""
    first, second = demo.post(path, key, body), demo.post(path, key, body)
    assert (first.status_code, second.status_code) == (201, 201)
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert first.content == second.content
    assert first.headers["location"] == second.headers["location"]
    (entry,) = demo.entries(path, customer)
    assert entry["outcome"] == "ok"
    assert entry.items() >= body.items()
    assert first.json() == entry
    assert demo.client.get(first.headers["location"]).json() == entry
    assert demo.entries("effects", customer) == [entry]


@EVERY_POST
def test_another_request_under_the_same_key_is_a_mismatch(demo, path, body, customer, key):
    """422 as a problem, and nothing is executed."""
    demo.post(path, key, body)
    field = {"charges": "amount", "orders": "quantity", "checkouts": "items"}[path]
    reply = demo.post(path, key, body | {field: 2})
    assert (reply.status_code, problem_of(reply)) == (422, "key-reused")
    assert reply.json()["retryable"] is False
    assert len(demo.entries(path, customer)) == 1


def test_keys_belong_to_the_bearer_of_a_token(demo, path, body, customer, key):
    """The same key of two callers is two operations."""
    assert demo.post(path, key, body, caller="alice").status_code == 201
    other = demo.post(path, key, body, caller="bob")
    assert other.status_code == 201
    assert "idempotent-replayed" not in other.headers
    assert len(demo.entries(path, customer)) == 2


def test_the_charge_and_the_order_of_one_key_do_not_mix(demo, customer, key):
    """One key is one request, whatever the path."""
    assert demo.post("charges", key, BODIES["charges"]).status_code == 201
    assert problem_of(demo.post("orders", key, BODIES["orders"])) == "key-reused"


# Refusals before anything runs.


@EVERY_POST
def test_a_request_without_key_or_caller_is_refused(demo, path, body, customer):
    """A problem says what is missing, and nothing is executed."""
    me = {"Authorization": "Bearer me"}
    key = {"Idempotency-Key": '"k"'}
    for headers, refusal in (
        (me, (400, "key-missing")),
        (me | {"Idempotency-Key": '"open'}, (400, "key-invalid")),
        (me | {"Idempotency-Key": '""'}, (400, "key-invalid")),
        (key, (401, "caller-unknown")),
        (key | {"Authorization": "Basic YTpi"}, (401, "caller-unknown")),
    ):
        reply = demo.client.post(f"/{path}", headers=headers, json=body)
        assert (reply.status_code, problem_of(reply)) == refusal
    assert demo.entries("effects", customer) == []


def test_a_body_that_makes_no_sense_is_refused(demo, path, body, customer, key):
    """422 names the fault and repeats no value; it is an answer like others, so it is replayed."""
    for value in (-1, "many", None, 10**30):
        field = "amount" if path == "charges" else "quantity"
        replies = [demo.post(path, f"{key}{value}", body | {field: value}) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [422, 422]
        assert replies[0].json()["title"] == "The request is invalid"
        assert replies[0].json()["errors"][0]["where"] == f"body/{field}"
        assert replies[1].headers["idempotent-replayed"] == "true"
    assert demo.entries(path, customer) == []


def test_a_field_that_nobody_reads_does_no_harm(demo, path, body, customer, key):
    """Clients send more than a server knows; what counts is read, and all of it is the request."""
    reply = demo.post(path, key, body | {"note": "for my records"})
    assert reply.status_code == 201
    assert demo.post(path, key, body | {"note": "another one"}).status_code == 422
    assert len(demo.entries(path, customer)) == 1


@pytest.mark.parametrize("media_type", [None, "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_said_to_be_json_is_refused_with_a_hint(
    demo, path, body, customer, key, media_type
):
    """422 says which header is missing, as for `curl -d` without one."""
    headers = headers_of(key) | ({} if media_type is None else {"Content-Type": media_type})
    reply = demo.client.post(f"/{path}", headers=headers, content=json.dumps(body))
    assert reply.status_code == 422
    assert "Content-Type: application/json" in reply.json()["detail"]
    assert demo.entries(path, customer) == []


def test_what_the_framework_refuses_is_a_problem_too(demo, key):
    """A broken body, a path that nobody serves and a wrong method have the form of the others."""
    headers = headers_of(key, content_type="application/json")
    broken = demo.client.post("/charges", headers=headers, content=b"\xff{")
    nowhere = demo.client.get("/nowhere")
    wrong = demo.client.delete("/effects")
    replies = (broken, nowhere, wrong)
    assert [reply.status_code for reply in replies] == [400, 404, 405]
    assert [problem_of(reply) for reply in replies] == [""] * 3
    assert wrong.headers["allow"] == "GET"


# Outcomes.


def test_a_decline_is_kept(demo, path, body, customer, key):
    """402, and the same 402 for every retry; it was executed once."""
    first = demo.post(path, key, body | {"outcome": "decline"})
    second = demo.post(path, key, body | {"outcome": "decline"})
    assert (first.status_code, second.status_code) == (402, 402)
    assert second.headers["idempotent-replayed"] == "true"
    assert first.content == second.content
    assert [entry["outcome"] for entry in demo.entries(path, customer)] == ["decline"]


def test_an_error_frees_the_key(demo, path, body, customer, key):
    """500 is not kept: the retry is executed. An order that failed leaves nothing behind."""
    failed = [demo.post(path, key, body | {"outcome": "error"}) for _ in range(2)]
    assert [reply.status_code for reply in failed] == [500, 500]
    assert all("idempotent-replayed" not in reply.headers for reply in failed)
    # The outcome is no part of the request, so this is a retry.
    retry = demo.post(path, key, body)
    assert retry.status_code == 201
    assert "idempotent-replayed" not in retry.headers
    outcomes = [entry["outcome"] for entry in demo.entries(path, customer)]
    assert outcomes == (["error", "error", "ok"] if path == "charges" else ["ok"])


# In flight.


def test_of_a_hundred_identical_requests_one_is_executed(demo, path, body, customer, key):
    """The others are told to come back, within the lease; a later retry gets the response."""
    replies = asyncio.run(crowd(demo, path, key, body | {"delay_ms": SLOW_MS}))
    made = [reply for reply in replies if reply.status_code == 201]
    refused = [reply for reply in replies if reply.status_code == 409]
    assert (len(made), len(refused)) == (1, CROWD - 1)
    assert {problem_of(reply) for reply in refused} == {"in-flight"}
    assert all(1 <= int(reply.headers["retry-after"]) <= LEASE_SECONDS for reply in refused)
    assert len(demo.entries(path, customer)) == 1
    assert demo.post(path, key, body).content == made[0].content


def test_a_hundred_that_prefer_to_wait_get_the_same_response(demo, path, body, customer, key):
    """One executes, and the identical bytes reach all of them."""
    replies = asyncio.run(crowd(demo, path, key, body | {"delay_ms": SLOW_MS}, Prefer="wait=60"))
    assert {reply.status_code for reply in replies} == {201}
    assert len({reply.content for reply in replies}) == 1
    assert len({reply.headers["location"] for reply in replies}) == 1
    replays = [reply for reply in replies if "idempotent-replayed" in reply.headers]
    assert len(replays) == CROWD - 1
    assert len(demo.entries(path, customer)) == 1


def test_another_request_under_a_running_key_is_a_mismatch(demo, path, body, key):
    """422 also while the first one runs."""

    async def scenario():
        async with httpx.AsyncClient(base_url=demo.url, timeout=PATIENCE_SECONDS) as client:

            def post(body):
                return client.post(f"/{path}", headers=headers_of(key), json=body)

            slow = [asyncio.create_task(post(body | {"delay_ms": SLOW_MS})) for _ in range(2)]
            # The one that is refused says that the other one runs.
            await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            other = await post(body | {"customer": "somebody-else"})
            return await asyncio.gather(*slow), other

    slow, other = asyncio.run(scenario())
    assert sorted(reply.status_code for reply in slow) == [201, 409]
    assert (other.status_code, problem_of(other)) == (422, "key-reused")


def test_different_requests_run_side_by_side(demo, path, body, customer):
    """A slow request is in nobody's way but its own duplicates'."""

    async def scenario():
        async with httpx.AsyncClient(base_url=demo.url, timeout=PATIENCE_SECONDS) as client:
            return await asyncio.gather(
                *(
                    client.post(
                        f"/{path}",
                        headers=headers_of(new_text("key")),
                        json=body | {"delay_ms": 50},
                    )
                    for _ in range(20)
                )
            )

    replies = asyncio.run(scenario())
    assert {reply.status_code for reply in replies} == {201}
    assert len(demo.entries(path, customer)) == 20


def test_a_slow_order_does_not_cost_a_charge_its_lease(demo, customer):
    """On SQLite an open order locks the file; a charge that runs meanwhile ends all the same."""

    async def scenario():
        async with httpx.AsyncClient(base_url=demo.url, timeout=PATIENCE_SECONDS) as client:

            def post(path, delay_ms):
                body = BODIES[path] | {"customer": customer, "delay_ms": delay_ms}
                return client.post(f"/{path}", headers=headers_of(new_text("key")), json=body)

            return await asyncio.gather(post("charges", 200), post("orders", 2000))

    assert [reply.status_code for reply in asyncio.run(scenario())] == [201, 201]
    assert len(demo.entries("effects", customer)) == 2


# Reading.


def test_the_ledger_is_read_by_customer(demo, path, body, customer):
    """Each customer's executions in order; without a customer, everybody's."""
    other = new_text("other")
    for name in (customer, other, customer):
        demo.post(path, new_text("key"), body | {"customer": name})
    assert [entry["customer"] for entry in demo.entries(path, customer)] == [customer] * 2
    everybody = demo.client.get(f"/{path}").json()
    assert [entry["customer"] for entry in everybody][-3:] == [customer, other, customer]
    assert demo.client.get("/charges/nothing").status_code == 404
    assert demo.client.get(f"/{path}", params={"customer": "a\x00b"}).status_code == 422


def test_the_policy_is_published(demo):
    """It names every route, and what a crash means for each."""
    page = demo.client.get("/idempotency-policy")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    content = demo.client.get("/idempotency-policy", headers={"Accept": "application/json"}).json()
    routes = {route["path"]: route for route in content["routes"]}
    assert {path: route["is_atomic"] for path, route in routes.items()} == {
        "/charges": False,
        "/orders": True,
        "/checkouts": False,
    }
    for path in ("/charges", "/checkouts"):
        assert routes[path]["lease_seconds"] == LEASE_SECONDS
    assert {route["key"] for route in routes.values()} == {"required"}


def test_the_front_page_has_a_line_to_paste_for_every_call(demo):
    """The lines work, and the page loads nothing: neither scripts nor anything from elsewhere."""
    page = demo.client.get("/").text
    lines = [unescape(line) for line in re.findall("<pre>(.*?)</pre>", page)]
    statuses = [
        subprocess.run(
            ["bash", "-c", f"{line} -s -o /dev/null -w '%{{http_code}}'"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        ).stdout
        for line in lines
    ]
    assert statuses == ["201", "201", "422", "201", "201", "200", "200", "200", "200"]
    # It works offline: whatever it loads comes from the demo itself.
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert loaded
    for path in loaded:
        assert demo.client.get(path).status_code == 200, path
        assert re.match("/[^/]", path), path
    assert set(re.findall("https?://[^/ ]*", page)) == {demo.url}
    assert demo.client.get("/docs").status_code == 404


def test_the_api_is_described_with_its_key_and_its_refusals(demo):
    """A client that reads the description knows what to send and what to expect."""
    document = demo.client.get("/openapi.json").json()
    for path in ("/charges", "/orders", "/checkouts"):
        post = document["paths"][path]["post"]
        parameters = {item["name"]: item["required"] for item in post["parameters"]}
        assert parameters == {"Idempotency-Key": True, "Prefer": False}
        assert set(post["responses"]) >= {"201", "400", "401", "409", "422", "503"}
        # Nobody could read a status before a transaction has ended.
        assert ("202" in post["responses"]) is (path != "/orders")
        assert ("402" in post["responses"]) is (path != "/checkouts")
        assert post["security"] == [{"BearerToken": []}]
    scheme = document["components"]["securitySchemes"]["BearerToken"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")


def test_a_client_that_prefers_so_is_answered_as_described(demo, customer, key):
    """202 with the members of the description, and the status where it says."""
    described = demo.client.get("/openapi.json").json()["paths"]["/charges"]["post"]
    schema = described["responses"]["202"]["content"]["application/json"]["schema"]
    body = BODIES["charges"] | {"customer": customer, "delay_ms": SLOW_MS}
    accepted = demo.post("charges", key, body, Prefer="respond-async")
    assert accepted.status_code == 202
    assert set(accepted.json()) == set(schema["required"])
    assert accepted.headers["Location"] == accepted.json()["status_url"]


def test_metrics_count_what_the_demo_did(demo, customer, key):
    """An execution and its replay, under the operation's route; the size of the store as well."""

    def counted(result):
        text = httpx.get(f"{demo.url}/metrics", timeout=PATIENCE_SECONDS).text
        name = f'retrysafe_calls_total{{operation="POST /charges",result="{result}"}} '
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    body = BODIES["charges"] | {"customer": customer}
    before = counted("executed"), counted("replayed")
    for _ in range(2):
        httpx.post(f"{demo.url}/charges", headers=headers_of(key), json=body)
    assert (counted("executed"), counted("replayed")) == (before[0] + 1, before[1] + 1)
    assert "retrysafe_store_rows{" in httpx.get(f"{demo.url}/metrics").text

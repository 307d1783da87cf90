"""While the first request runs: conflicts, waits, 202 with a status URL, crowds, other owners."""

from __future__ import annotations

from dataclasses import replace

from tests.http_cases.acts import Act
from tests.http_cases.cases import (
    ANY,
    ASGI,
    PROCESSES,
    WSGI,
    Answered,
    Begin,
    ClaimElsewhere,
    Crowd,
    Finish,
    Flood,
    Operate,
    Ran,
    Refused,
    Release,
    Replay,
    Start,
    Until,
    case,
    get,
    post,
)

IN_FLIGHT = Refused(
    problem="in-flight",
    key="k",
    says="The first request with this key has not ended. Nothing was run; send the same",
)
WAIT = (("Prefer", "wait=10"),)
NO_WAIT = (("Prefer", "wait=0"),)
ASYNC = (("Prefer", "respond-async"),)
WAIT_OR_ASYNC = (("Prefer", "wait=10, respond-async"),)
STATUS = "/idempotency-status/k"
ACCEPTED = Answered(
    status=202,
    headers={
        "Location": STATUS,
        "Retry-After": ANY,
        "Cache-Control": "no-store",
        "Preference-Applied": "respond-async",
        "Idempotent-Replayed": None,
    },
    json={"state": "running", "key": "k", "status_url": STATUS},
)
RUNNING = Answered(
    status=200,
    headers={"Retry-After": ANY, "Cache-Control": "no-store", "Idempotent-Replayed": None},
    json={"state": "running", "key": "k", "attempt": 1},
)
ACCEPTED_BY_RULE = replace(ACCEPTED, headers={**ACCEPTED.headers, "Preference-Applied": None})
_HOLDS_A_THREAD = {WSGI: "a wait would hold one of the server's threads"}
_NEEDS_A_LOOP = {
    WSGI: "a WSGI server's thread has nobody else to run the application: it answers at the end"
}


def _ended(*, with_status: int = 201):
    return Release("first"), Finish("first"), Ran(status=with_status)


CASES = (
    case(
        "running-conflict",
        "A duplicate of a running request gets 409 with Retry-After, and runs nothing",
        *(
            Begin("first", post()),
            post(),
            IN_FLIGHT,
            post(),
            IN_FLIGHT,
            *_ended(),
            post(),
            Replay(),
        ),
    ),
    case(
        "running-other-key",
        "Another key is not in the way",
        *(Begin("first", post()), post(key='"other"'), Ran(), *_ended()),
    ),
    case(
        "running-other-caller",
        "The same key of another caller is not in the way",
        *(Begin("first", post()), post(caller="bob"), Ran(), *_ended()),
    ),
    case(
        "running-frees",
        "A duplicate after a failure runs; before it, it conflicts",
        *(Begin("first", post(act=Act(status=500))), post(), IN_FLIGHT),
        *(*_ended(with_status=500), post(), Ran(attempt=2)),
    ),
    case(
        "running-elsewhere",
        "A key that another process holds conflicts until its lease ends or an operator frees it",
        *(ClaimElsewhere(post("/uncached/charges")), post("/uncached/charges"), IN_FLIGHT),
        *(Operate("force release"), post("/uncached/charges"), Ran()),
    ),
    case(
        "running-elsewhere-waiting",
        "A wait for another process's run ends with its lease or its release",
        *(
            ClaimElsewhere(post("/uncached/charges")),
            Start("second", post("/uncached/charges", headers=WAIT)),
        ),
        *(Operate("force release"), Finish("second"), Ran()),
    ),
    case(
        "wait",
        "A duplicate that prefers to wait gets the first response",
        *(Begin("first", post()), Start("second", post(headers=WAIT)), *_ended()),
        *(Finish("second"), Replay(headers={"Preference-Applied": "wait=10"})),
    ),
    case(
        "wait-on-a-loop",
        "On an event loop a duplicate may wait where no rule speaks of it",
        *(Begin("first", post("/charges/7")), Start("second", post("/charges/7", headers=WAIT))),
        *(*_ended(), Finish("second"), Replay(headers={"Preference-Applied": "wait=10"})),
        without=_HOLDS_A_THREAD,
    ),
    case(
        "wait-in-a-thread",
        "In threads nobody waits unless the rule says so: 409 at once",
        *(Begin("first", post("/charges/7")), post("/charges/7", headers=WAIT)),
        *(replace(IN_FLIGHT, headers={"Preference-Applied": None}), *_ended()),
        without={ASGI: "a wait on an event loop holds no thread"},
    ),
    case(
        "wait-of-failure",
        "Who waited for a run that failed is told of it, and may send the request again",
        Begin("first", post(act=Act(fails="before"))),
        *(Release("first"), Until("in-flight", post()), Ran(attempt=2)),
    ),
    case(
        "wait-zero",
        "A wait of nothing conflicts at once",
        Begin("first", post("/waiting")),
        *(post("/waiting", headers=(("Prefer", "wait=0"),)), IN_FLIGHT, *_ended()),
    ),
    case(
        "wait-runs-out",
        "A wait that runs out conflicts",
        Begin("first", post("/impatient")),
        post("/impatient"),
        IN_FLIGHT,
        *_ended(),
    ),
    case(
        "wait-is-limited",
        "A client waits no longer than the route allows",
        Begin("first", post("/impatient")),
        post("/impatient", headers=(("Prefer", "wait=100000"),)),
        IN_FLIGHT,
        *_ended(),
    ),
    case(
        "wait-by-rule",
        "On a route that waits, a duplicate needs no preference",
        *(Begin("first", post("/waiting")), Start("second", post("/waiting")), *_ended()),
        *(Finish("second"), Replay(headers={"Preference-Applied": None})),
    ),
    case(
        "wait-of-first",
        "The first request may say that it would wait; it runs at once",
        *(post(headers=WAIT), Ran(headers={"Preference-Applied": "wait=10"})),
        *(post(headers=WAIT), Replay(headers={"Preference-Applied": "wait=10"})),
    ),
    case(
        "wait-malformed",
        "A preference that cannot be understood is ignored",
        Begin("first", post()),
        *(post(headers=(("Prefer", "wait=soon"),)), IN_FLIGHT),
        *(post(headers=(("Prefer", "wait=-1"),)), IN_FLIGHT),
        *(post(headers=(("Prefer", "wait"),)), IN_FLIGHT),
        *(post(headers=(("Prefer", "handling=strict"),)), IN_FLIGHT, *_ended()),
    ),
    case(
        "wait-first-counts",
        "Of a preference that is sent twice the first counts",
        Begin("first", post("/waiting")),
        *(post("/waiting", headers=(("Prefer", "wait=0, wait=10"),)), IN_FLIGHT),
        *(post("/waiting", headers=(("Prefer", "wait=0"), ("Prefer", "wait=10"))), IN_FLIGHT),
        *_ended(),
    ),
    case(
        "wait-among-others",
        "A preference may stand among others, quoted and with parameters",
        Begin("first", post()),
        Start("second", post(headers=(("Prefer", 'foo="a,b"; c=d, wait="10"; x'),))),
        *(*_ended(), Finish("second"), Replay(headers={"Preference-Applied": "wait=10"})),
    ),
    case(
        "async-duplicate",
        "A duplicate that prefers it gets 202 with the URL of the outcome",
        *(Begin("first", post()), post(headers=ASYNC), ACCEPTED, get(STATUS), RUNNING),
        *(*_ended(), get(STATUS), Replay()),
    ),
    case(
        "async-first",
        "A first request that prefers it gets 202 at once, and runs on",
        *(Begin("first", post(headers=ASYNC)), Finish("first"), ACCEPTED),
        *(post(), IN_FLIGHT, get(STATUS), RUNNING, Release("first")),
        *(post(headers=WAIT), Answered(status=201, headers={"Idempotent-Replayed": "true"})),
        *(get(STATUS), Answered(status=201, headers={"Location": "/made/1"}, json={"run": 1})),
        without=_NEEDS_A_LOOP,
    ),
    case(
        "async-first-synchronously",
        "Where nobody else can run it, a first request is answered when it has ended",
        *(post(headers=ASYNC), Ran(), get(STATUS), Replay()),
        without={ASGI: "there the request runs on in a task of its own"},
    ),
    case(
        "async-finished",
        "A finished request is replayed, not accepted again",
        *(post(), Ran(), post(headers=ASYNC), Replay()),
    ),
    case(
        "async-mismatch",
        "Another request is refused, also when it prefers 202",
        *(Begin("first", post()), post(body=b"{}", headers=ASYNC)),
        *(Refused(problem="key-reused"), *_ended()),
    ),
    case(
        "async-escaped-key",
        "The status URL of a key with odd characters is escaped",
        Begin("first", post(key='"a/b?c d%"')),
        post(key='"a/b?c d%"', headers=ASYNC),
        Answered(
            status=202,
            headers={"Location": "/idempotency-status/a%2Fb%3Fc%20d%25"},
            json={"key": "a/b?c d%"},
        ),
        *(get("/idempotency-status/a%2Fb%3Fc%20d%25"), Answered(status=200), *_ended()),
        *(get("/idempotency-status/a%2Fb%3Fc%20d%25"), Replay()),
    ),
    case(
        "async-mounted",
        "The status URL of a mounted application has its prefix",
        Begin("first", post("/uncached/charges")),
        post("/uncached/charges", headers=ASYNC),
        Answered(status=202, headers={"Location": "/uncached/idempotency-status/k"}),
        *(get("/uncached/idempotency-status/k"), RUNNING, *_ended()),
        *(get("/uncached/idempotency-status/k"), Replay()),
    ),
    case(
        "accept-duplicate",
        "On a route that accepts, a duplicate gets 202 without asking for it, and then the replay",
        *(Begin("first", post("/accepting")), post("/accepting"), ACCEPTED_BY_RULE),
        *(get(STATUS), RUNNING, post("/accepting"), ACCEPTED_BY_RULE, *_ended()),
        *(get(STATUS), Replay(), post("/accepting"), Replay()),
    ),
    case(
        "accept-first",
        "On a route that accepts, a first request is answered when it has ended",
        *(post("/accepting"), Ran(), post("/accepting"), Replay(), get(STATUS), Replay()),
    ),
    case(
        "accept-mismatch",
        "On a route that accepts, another request is refused all the same",
        *(Begin("first", post("/accepting")), post("/accepting", body=b"{}")),
        *(Refused(problem="key-reused"), *_ended()),
        *(post("/accepting", body=b"{}"), Refused(problem="key-reused")),
    ),
    case(
        "accept-other-caller",
        "What a route accepts is told to its own caller only",
        *(Begin("first", post("/accepting")), post("/accepting"), ACCEPTED_BY_RULE),
        *(get(STATUS, caller="bob"), Refused(problem="key-unknown"), get(STATUS), RUNNING),
        *(get(STATUS, caller=None), Refused(problem="caller-unknown"), *_ended()),
        *(get(STATUS, caller="bob"), Refused(problem="key-unknown")),
    ),
    case(
        "accept-wait",
        "On a route that accepts, a duplicate that prefers to wait gets the first response",
        *(Begin("first", post("/accepting")), Start("second", post("/accepting", headers=WAIT))),
        *(*_ended(), Finish("second"), Replay(headers={"Preference-Applied": "wait=10"})),
    ),
    case(
        "accept-wait-runs-out",
        "On a route that accepts, a wait that was asked for and runs out conflicts",
        *(Begin("first", post("/accepting-soon")), post("/accepting-soon"), ACCEPTED_BY_RULE),
        post("/accepting-soon", headers=WAIT),
        replace(IN_FLIGHT, headers={"Preference-Applied": "wait=0"}),
        *_ended(),
    ),
    case(
        "accept-no-wait",
        "On a route that accepts, a duplicate that prefers not to wait gets 202",
        *(Begin("first", post("/accepting")), post("/accepting", headers=NO_WAIT)),
        replace(ACCEPTED, headers={**ACCEPTED.headers, "Preference-Applied": "wait=0"}),
        *_ended(),
    ),
    case(
        "accept-preferred-wait-runs-out",
        "On a route that accepts, a wait before a 202 that was asked for ends with it",
        *(Begin("first", post("/accepting-soon")), post("/accepting-soon", headers=WAIT_OR_ASYNC)),
        *(ACCEPTED, *_ended()),
    ),
    case(
        "accept-preferred",
        "On a route that accepts, a preference for 202 is followed and said to be",
        *(Begin("first", post("/accepting")), post("/accepting", headers=ASYNC), ACCEPTED),
        *(*_ended(), post("/accepting", headers=ASYNC), Replay()),
    ),
    case(
        "accept-freed",
        "What was accepted and failed may be sent again; the status says so",
        *(Begin("first", post("/accepting", act=Act(status=500))), post("/accepting")),
        *(ACCEPTED_BY_RULE, *_ended(with_status=500), get(STATUS)),
        *(Answered(status=200, json={"state": "released"}), post("/accepting"), Ran(attempt=2)),
    ),
    case(
        "accept-elsewhere",
        "A route accepts what another process runs, as well",
        *(ClaimElsewhere(post("/uncached/accepting")), post("/uncached/accepting")),
        Answered(status=202, headers={"Location": "/uncached/idempotency-status/k"}),
        *(get("/uncached/idempotency-status/k"), Answered(status=200, json={"state": "running"})),
        *(Operate("force release"), post("/uncached/accepting"), Ran()),
    ),
    case(
        "crowd-of-100",
        "Of 100 simultaneous requests one runs, and 99 get 409 with Retry-After",
        *(Crowd(100, post(), IN_FLIGHT), post(), Replay()),
    ),
    case(
        "crowd-of-100-waiting",
        "Of 100 simultaneous requests that wait one runs, and 99 get the identical response",
        *(Crowd(100, post(headers=WAIT), Replay(), waits=True), post(), Replay()),
    ),
    case(
        "crowd-of-1000",
        "1,000 duplicates of a running request, and of a finished one, leave the store alone",
        Begin("first", post("/counted/charges")),
        Flood(1000, post("/counted/charges"), IN_FLIGHT, 8),
        *_ended(),
        Flood(1000, post("/counted/charges"), Replay(), 8),
        without={PROCESSES: "processes know each other's runs from the store only"},
    ),
)

"""What the middleware serves itself, the policy page and the status of a key, and what not."""

from __future__ import annotations

from tests.http_cases.acts import Act
from tests.http_cases.cases import (
    PROBLEMS,
    Answered,
    Ran,
    Refused,
    Replay,
    Untouched,
    case,
    get,
    post,
    send,
)
from tests.http_cases.configuration import OUTCOME_LIMIT_BYTES

POLICY = "/idempotency-policy"
STATUS = "/idempotency-status/k"
HTML = "text/html; charset=utf-8"
JSON = (("Accept", "application/json"),)

CASES = (
    case(
        "policy-page",
        "The policy is published, to everybody, with every route and every problem",
        get(POLICY, caller=None),
        Answered(
            status=200,
            headers={"Content-Type": HTML, "Vary": "accept"},
            holds=(
                "/charges/{id}",
                "/strict",
                "Keys of different callers never meet.",
                *(f'id="{slug}"' for slug in PROBLEMS),
            ),
        ),
    ),
    case(
        "policy-of-everybody",
        "The policy says so when all callers share one namespace",
        get(f"/everybody{POLICY}", caller=None),
        Answered(
            status=200,
            holds=("All callers share one namespace of keys",),
            lacks=("never meet",),
        ),
        get(f"/everybody{POLICY}", caller=None, headers=JSON),
        Answered(status=200, holds=('"namespace": "global"',)),
    ),
    case(
        "policy-json",
        "Programs get the policy as JSON",
        get(POLICY, caller=None, headers=JSON),
        Answered(
            status=200,
            headers={"Content-Type": "application/json"},
            holds=(
                '"retention_seconds": 86400.0',
                f"{POLICY}#key-reused",
                '"namespace": "caller"',
            ),
            json={"replay_header": "Idempotent-Replayed"},
        ),
    ),
    case(
        "policy-browser",
        "Who takes HTML gets HTML, even when JSON would do",
        get(POLICY, headers=(("Accept", "text/html, application/json;q=0.9"),)),
        Answered(status=200, headers={"Content-Type": HTML}),
    ),
    case(
        "policy-head",
        "HEAD of the policy has the headers and no body",
        get(POLICY, method="HEAD"),
        Answered(status=200, headers={"Content-Type": HTML}, is_empty=True),
    ),
    case(
        "policy-mounted",
        "A mounted application has its policy below its prefix",
        get(f"/everybody{POLICY}", headers=JSON),
        Answered(status=200, holds=(f"/everybody{POLICY}#key-reused",)),
    ),
    case(
        "policy-posted",
        "Only GET and HEAD of the policy are answered; the rest is the application's",
        *(post(POLICY), Untouched()),
        without={
            "litestar": "Litestar has one handler for a path, and answers 405",
            **dict.fromkeys(
                ("django", "django-async", "drf"), "Django has one view for a URL, and answers 405"
            ),
        },
    ),
    case(
        "status-unknown",
        "An unknown key has no status",
        get(STATUS),
        Refused(problem="key-unknown", key="k"),
    ),
    case(
        "status-malformed",
        "A key that cannot be has no status",
        *(get("/idempotency-status/"), Refused(problem="key-unknown")),
        *(get("/idempotency-status/" + "x" * 256), Refused(problem="key-unknown")),
    ),
    case(
        "status-done",
        "The status of a finished key is its response",
        *(post(act=Act(status=402)), Ran(status=402), get(STATUS), Replay()),
    ),
    case(
        "status-head",
        "HEAD of a status has no body",
        *(post(), Ran(), get(STATUS, method="HEAD")),
        Answered(status=201, headers={"Location": "/made/1"}, is_empty=True),
    ),
    case(
        "status-freed",
        "The status of a freed key says that the request may be sent again",
        *(post(act=Act(status=500)), Ran(status=500), get(STATUS)),
        Answered(status=200, json={"state": "released", "attempt": 1}, lacks=("received",)),
        *(post(), Ran(attempt=2)),
    ),
    case(
        "status-withheld",
        "The status of a key whose response was not kept says so",
        post("/brief", act=Act(body=b"x" * (OUTCOME_LIMIT_BYTES + 1), content_type="text/plain")),
        Ran(),
        *(get(STATUS), Refused(problem="outcome-unavailable", key="k")),
    ),
    case(
        "status-exhausted",
        "The status of a key without attempts left says so",
        *(post("/twice", act=Act(status=500)), Ran(status=500)),
        *(post("/twice", act=Act(status=500)), Ran(status=500, attempt=2)),
        *(post("/twice"), Refused(problem="attempts-exhausted")),
        *(get(STATUS), Refused(problem="attempts-exhausted", key="k")),
    ),
    case(
        "safe-head",
        "HEAD of a protected path is untouched",
        get("/charges", method="HEAD", key='"k"', act=Act(status=200)),
        Untouched(status=200),
        get("/charges", method="HEAD", key='"k"', act=Act(status=200)),
        Untouched(status=200),
    ),
    case(
        "safe-options",
        "OPTIONS of a protected path is untouched, also without credentials",
        get("/charges", method="OPTIONS", caller=None, act=Act(status=200)),
        Untouched(status=200),
    ),
    case(
        "safe-get",
        "GET of a protected path is untouched",
        *(get("/charges/1", act=Act(status=200)), Untouched(status=200)),
        *(get("/charges/1", act=Act(status=500)), Untouched(status=500)),
    ),
    case(
        "safe-after-post",
        "A GET with the key of a POST is no mismatch",
        *(post(), Ran(), get("/charges", key='"k"', act=Act(status=200)), Untouched(status=200)),
        *(send("POST"), Replay()),
    ),
)

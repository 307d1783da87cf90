"""Outcomes: what is stored and replayed byte for byte, what frees the key, what is withheld."""

from __future__ import annotations

import gzip

from tests.http_cases.acts import Act
from tests.http_cases.cases import (
    ASGI,
    DJANGO,
    FRAMEWORK,
    HTTP_2,
    WSGI,
    Broken,
    Operate,
    Ran,
    Refused,
    Replay,
    case,
    post,
    send,
)
from tests.http_cases.configuration import OUTCOME_LIMIT_BYTES

UNAVAILABLE = Refused(problem="outcome-unavailable", key="k")


def _stored(status: int, promise: str):
    """The status is stored: the retry would end otherwise, and does not run."""
    return case(
        f"outcome-{status}-stored",
        promise,
        *(post(act=Act(status=status)), Ran(status=status), post(), Replay()),
    )


def _freed(status: int, promise: str):
    return case(
        f"outcome-{status}-frees",
        promise,
        *(post(act=Act(status=status)), Ran(status=status)),
        *(post(), Ran(attempt=2), post(), Replay(run=2)),
    )


def _exact(name: str, promise: str, act: Act, **more):
    return case(
        f"replay-{name}",
        promise,
        *(post(act=act), Ran(status=act.status), post(), Replay(), post(), Replay()),
        **more,
    )


CASES = (
    case(
        "replay",
        "A retry gets the first status, body and headers, and says that it is a replay",
        *(
            post(),
            Ran(headers={"Idempotent-Replayed": None}),
            post(),
            Replay(headers={"Location": "/made/1"}),
        ),
    ),
    case(
        "replay-every-method",
        "Every state-changing method is protected",
        *(send("PUT", key='"put"'), Ran(), send("PUT", key='"put"'), Replay(run=1)),
        *(send("PATCH", key='"patch"'), Ran(), send("PATCH", key='"patch"'), Replay(run=2)),
        *(send("DELETE", key='"delete"'), Ran(), send("DELETE", key='"delete"'), Replay(run=3)),
    ),
    case(
        "replay-delete-without-body",
        "A DELETE without a body is protected",
        *(send("DELETE", body=b"", content_type=None), Ran()),
        *(send("DELETE", body=b"", content_type=None), Replay()),
    ),
    case(
        "replay-uncached",
        "A replay from the store is the same as one from memory",
        *(post("/uncached/charges"), Ran(), post("/uncached/charges"), Replay()),
        *(post("/uncached/charges"), Replay()),
    ),
    _exact(
        "binary",
        "Every byte comes back",
        Act(body=bytes(range(256)) * 4, content_type="application/octet-stream"),
    ),
    _exact("empty", "An empty body is an outcome", Act(status=200, body=b"")),
    _exact("falsy", "A body of null is an outcome", Act(status=200, body=b"null")),
    _exact("zero", "A body of 0 is an outcome", Act(status=200, body=b"0")),
    _exact("204", "204 comes back without a body", Act(status=204)),
    _exact("304", "304 comes back without a body", Act(status=304)),
    _exact(
        "unicode",
        "Text comes back in its own encoding",
        Act(body="caf\u00e9".encode("latin-1"), content_type="text/plain; charset=iso-8859-1"),
    ),
    _exact(
        "chunks", "A body in many pieces comes back whole", Act(body=b"0123456789" * 100, chunks=10)
    ),
    _exact("chunks-of-json", "JSON in pieces comes back whole", Act(chunks=3)),
    _exact(
        "compressed",
        "A compressed response comes back as it was, not packed again",
        Act(
            body=gzip.compress(b"x" * 1000, mtime=0),
            headers=(("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding")),
        ),
    ),
    _exact(
        "headers",
        "Headers that clients need come back",
        Act(
            headers=(
                ("ETag", '"v1"'),
                ("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT"),
                ("Link", '</made/1>; rel="self"'),
                ("Cache-Control", "no-store"),
                ("Content-Language", "de"),
                ("Content-Disposition", 'attachment; filename="receipt.pdf"'),
            )
        ),
    ),
    _exact(
        "header-twice",
        "A header on several lines comes back on several lines",
        Act(headers=(("Link", "<a>"), ("Link", "<b>"))),
        without=dict.fromkeys(DJANGO, "a response of Django has one line for a header"),
    ),
    _exact(
        "header-latin-1",
        "A header beyond ASCII comes back as it was",
        Act(headers=(("Content-Disposition", 'attachment; filename="caf\u00e9"'),)),
    ),
    _exact(
        "kilobytes",
        "A response of some kilobytes comes back",
        Act(body=b"0123456789abcdef" * 300, content_type="text/plain"),
    ),
    case(
        "replay-extra-headers",
        "A route can keep more headers; without that they belong to the first client",
        *(post("/totals", key='"a"'), Ran(headers={"X-Total": "1000"})),
        *(post("/totals", key='"a"'), Replay(headers={"X-Total": "1000"})),
        *(post(key='"b"'), Ran(headers={"X-Total": "1000"})),
        *(post(key='"b"'), Replay(run=2, headers={"X-Total": None})),
    ),
    case(
        "replay-no-cookie",
        "Cookies of the first client never reach a second one",
        *(
            post(),
            Ran(headers={"Set-Cookie": "session=secret"}),
            post(),
            Replay(headers={"Set-Cookie": None}),
        ),
    ),
    case(
        "replay-no-tracing",
        "Trace and request ids belong to one request",
        post(),
        Ran(headers={"Traceparent": "*", "X-Request-Id": "*", "Server-Timing": "*"}),
        post(),
        Replay(headers={"Traceparent": None, "X-Request-Id": None, "Server-Timing": None}),
    ),
    case(
        "replay-no-hop-by-hop",
        "Headers of one connection are not stored",
        *(post(act=Act(headers=(("Keep-Alive", "timeout=7"),))), Ran()),
        *(post(), Replay(headers={"Keep-Alive": None})),
        without={
            HTTP_2: "HTTP/2 forbids such headers",
            WSGI: "PEP 3333 forbids applications to send such headers",
        },
    ),
    case(
        "replay-of-another-connection",
        "A replay does not depend on what the retry's application would say",
        *(post(act=Act(status=200, body=b"first", content_type="text/plain")), Ran(status=200)),
        *(
            post(act=Act(status=409, body=b"second")),
            Replay(headers={"Content-Type": "text/plain"}),
        ),
    ),
    case(
        "replay-accept-does-not-count",
        "A retry that asks for another type gets the first response",
        *(post(headers=(("Accept", "application/json"),)), Ran()),
        *(post(headers=(("Accept", "text/html"),)), Replay()),
    ),
    _stored(200, "200 is stored"),
    _stored(202, "202 of the application is stored"),
    _stored(302, "A redirect is stored, with its Location"),
    _stored(400, "A refusal of the application is stored"),
    _stored(401, "401 of the application is stored"),
    _stored(402, "A decline is stored"),
    _stored(404, "404 of the application is stored"),
    _stored(409, "409 of the application is stored"),
    _stored(422, "422 of the application is stored"),
    _freed(408, "408 asks for a retry, so it frees the key"),
    _freed(425, "425 asks for a retry, so it frees the key"),
    _freed(429, "429 asks for a retry, so it frees the key"),
    _freed(500, "500 frees the key"),
    _freed(502, "502 frees the key"),
    _freed(503, "503 frees the key"),
    _freed(504, "504 frees the key"),
    case(
        "outcome-rule-keeps",
        "A route can store a status that would free the key",
        *(post("/statuses", act=Act(status=503)), Ran(status=503), post("/statuses"), Replay()),
    ),
    case(
        "outcome-rule-frees",
        "A route can free the key on a status that would be stored",
        *(
            post("/statuses", act=Act(status=404)),
            Ran(status=404),
            post("/statuses"),
            Ran(attempt=2),
        ),
    ),
    case(
        "outcome-429-keeps-its-advice",
        "A response that frees the key reaches its client with every header",
        *(post(act=Act(status=429, headers=(("Retry-After", "7"),))), Ran(status=429)),
        *(post(), Ran(attempt=2)),
    ),
    case(
        "outcome-exception-frees",
        "An exception is the server's 500 and frees the key",
        *(post(act=Act(fails="before")), Broken(), post(), Ran(attempt=2), post(), Replay(run=2)),
    ),
    case(
        "outcome-exception-midway",
        "A handler that raises after it began to respond sends nothing, and frees the key",
        *(post(act=Act(fails="midway", chunks=3)), Broken(), post(), Ran(attempt=2)),
        *(post(), Replay(run=2)),
    ),
    case(
        "outcome-exception-final",
        "Where exceptions are final, a retry is told so and runs nothing",
        *(post("/final", act=Act(fails="before")), Broken()),
        *(post("/final"), Refused(problem="operation-failed", key="k")),
        *(post("/final"), Refused(problem="operation-failed", key="k")),
        without={"django-rules": "Django answers exceptions inside: its 500 is the outcome"},
    ),
    case(
        "outcome-attempts-exhausted",
        "After the last attempt nothing runs any more",
        *(post("/twice", act=Act(status=500)), Ran(status=500)),
        *(post("/twice", act=Act(status=503)), Ran(status=503, attempt=2)),
        *(post("/twice"), Refused(problem="attempts-exhausted", key="k")),
        *(post("/twice"), Refused(problem="attempts-exhausted", key="k")),
    ),
    case(
        "outcome-second-attempt-stored",
        "The outcome of the attempt that succeeded is the one that is replayed",
        *(post("/twice", act=Act(status=500)), Ran(status=500), post("/twice"), Ran(attempt=2)),
        *(post("/twice"), Replay(run=2)),
    ),
    case(
        "outcome-withheld",
        "A response over the limit is sent; a retry is told that it was not kept, and runs nothing",
        post("/brief", act=Act(body=b"x" * (OUTCOME_LIMIT_BYTES + 1), content_type="text/plain")),
        Ran(),
        *(post("/brief"), UNAVAILABLE, post("/brief"), UNAVAILABLE),
    ),
    case(
        "outcome-within-limit",
        "A response within the limit is kept",
        *(
            post(
                "/brief", act=Act(body=b"x" * (OUTCOME_LIMIT_BYTES // 2), content_type="text/plain")
            ),
            Ran(),
        ),
        *(post("/brief"), Replay()),
    ),
    case(
        "outcome-withheld-then-another-request",
        "Another request is refused as such, also when the outcome was not kept",
        post("/brief", act=Act(body=b"x" * 1000, content_type="text/plain")),
        Ran(),
        *(post("/brief", body=b"{}"), Refused(problem="key-reused")),
    ),
    case(
        "outcome-withheld-error-frees",
        "A large response that frees the key frees it",
        post("/brief", act=Act(status=500, body=b"x" * 1000, content_type="text/plain")),
        Ran(status=500),
        *(post("/brief"), Ran(attempt=2), post("/brief"), Replay(run=2)),
    ),
    case(
        "outcome-expired",
        "Past its window a key is new",
        *(post("/uncached/charges"), Ran(), Operate("expire"), post("/uncached/charges"), Ran()),
        *(post("/uncached/charges"), Replay(run=2)),
    ),
    case(
        "outcome-expired-other-request",
        "Past its window a key may be used for another request",
        *(post("/uncached/charges"), Ran(), Operate("expire")),
        *(post("/uncached/charges", body=b"{}"), Ran()),
    ),
    case(
        "outcome-written",
        "What a WSGI application writes the old way is stored like the rest",
        *(post(act=Act(writes=True, chunks=3)), Ran(), post(), Replay()),
        without={ASGI: "only WSGI has it", FRAMEWORK: "frameworks do not use it"},
    ),
)

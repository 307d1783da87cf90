"""Abuse: bodies of every size and framing, clients that leave, streams, stores that fail."""

from __future__ import annotations

from dataclasses import replace

from tests.http_cases.acts import Act
from tests.http_cases.cases import (
    DJANGO_WSGI,
    FRAMEWORK,
    HTTP_2,
    PROCESSES,
    WSGI,
    Answered,
    Begin,
    Break,
    Broken,
    Continue,
    CutOff,
    Finish,
    HangUp,
    Heal,
    Quiet,
    Ran,
    Reached,
    Receives,
    Refused,
    Release,
    Replay,
    Start,
    Until,
    Untouched,
    Upgrade,
    case,
    get,
    post,
)
from tests.http_cases.configuration import REQUEST_LIMIT_BYTES
from tests.http_cases.controlled_store import DOWN, HELD, NEXT_ANSWER, SETTLEMENTS

WAIT = (("Prefer", "wait=10"),)
TOO_LARGE = Refused(problem="body-too-large", says=f"{REQUEST_LIMIT_BYTES}", key="k")
UNAVAILABLE = Refused(problem="store-unavailable", key="k")
WITHHELD = Refused(problem="outcome-unavailable", key="k")
_NO_CHUNKS = dict.fromkeys(
    DJANGO_WSGI, "behind WSGI, Django reads no body that does not tell its length"
)
_NO_CONTINUE = {HTTP_2: "the HTTP/2 client of the tests does not wait for interim responses"}
_BINARY = "application/octet-stream"
_EVENTS = "text/event-stream"
_LARGE = b"0123456789" * 100_000
# The first of its pieces is over the limit of /brief.
_LONG = Act(body=b"x" * 2_000, chunks=2, content_type="text/plain")
IN_FLIGHT = Refused(problem="in-flight", key="k")
# The outcome of a run whose own client was not there to see it.
KEPT = Answered(
    status=201,
    headers={"Idempotent-Replayed": "true", "Location": "/made/1", "Set-Cookie": None},
    json={"run": 1, "attempt": 1},
)
REPLAYED_UNPROTECTED = Replay(headers={"Idempotency-Protected": "false"})
UNPROTECTED = Untouched(headers={"Idempotency-Protected": "false"})


def _of_size(size: int, **more):
    return post("/small", body=b"x" * size, content_type=_BINARY, **more)


CASES = (
    # Bodies.
    case("body-at-the-limit", "A body at the limit is taken", _of_size(REQUEST_LIMIT_BYTES), Ran()),
    case(
        "body-over-the-limit",
        "A body over the limit is refused with 413; nothing runs",
        _of_size(REQUEST_LIMIT_BYTES + 1),
        TOO_LARGE,
    ),
    case(
        "body-over-the-limit-is-not-remembered",
        "A refusal for its size leaves the key free",
        *(_of_size(REQUEST_LIMIT_BYTES + 1), TOO_LARGE, _of_size(10), Ran()),
    ),
    case(
        "body-chunked",
        "A chunked body is taken, and is the same as one with its length",
        post(pieces=5),
        Ran(),
        post(),
        Replay(),
        post(pieces=2),
        Replay(),
        without=_NO_CHUNKS,
    ),
    case(
        "body-chunked-at-the-limit",
        "A chunked body at the limit is taken",
        _of_size(REQUEST_LIMIT_BYTES, pieces=4),
        Ran(),
        without=_NO_CHUNKS,
    ),
    case(
        "body-chunked-over-the-limit",
        "A chunked body over the limit is refused with 413, though nobody said its length",
        *(_of_size(REQUEST_LIMIT_BYTES + 1, pieces=4), TOO_LARGE),
        without=_NO_CHUNKS,
    ),
    case(
        "body-chunked-empty",
        "A chunked body without a byte is an empty body",
        post(body=b"", pieces=1),
        Ran(),
        post(body=b""),
        Replay(),
    ),
    case(
        "body-large",
        "A body of a megabyte arrives whole",
        post(body=_LARGE, content_type=_BINARY),
        Ran(),
        post(body=_LARGE, content_type=_BINARY),
        Replay(),
    ),
    case(
        "body-large-chunked",
        "A chunked body of a megabyte arrives whole",
        post(body=_LARGE, content_type=_BINARY, pieces=50),
        Ran(),
        post(body=_LARGE, content_type=_BINARY),
        Replay(),
        without=_NO_CHUNKS,
    ),
    case(
        "body-empty",
        "A request without a body is protected",
        post(body=b"", content_type=None),
        Ran(),
        post(body=b"", content_type=None),
        Replay(),
    ),
    case(
        "body-binary",
        "A binary body arrives whole",
        post(body=bytes(range(256)) * 40, content_type=_BINARY),
        Ran(),
    ),
    case(
        "continue",
        "A body that waits for 100 Continue is protected like any other",
        Continue(post()),
        Ran(),
        Continue(post()),
        Replay(),
        post(),
        Replay(),
        without=_NO_CONTINUE,
    ),
    case(
        "continue-refused",
        "A request that is refused by its head does not wait for its body",
        Continue(post(key=None)),
        Refused(problem="key-missing"),
        Continue(post(caller=None)),
        Refused(problem="caller-unknown"),
        without=_NO_CONTINUE,
    ),
    # Clients that leave.
    case(
        "leaving-in-the-body",
        "A client that leaves in the middle of its body has asked for nothing",
        CutOff(post()),
        post(),
        Ran(),
        post(),
        Replay(),
    ),
    case(
        "leaving-in-a-chunked-body",
        "The same for a chunked body",
        CutOff(post(pieces=2)),
        post(),
        Ran(),
        post(),
        Replay(),
        without=_NO_CHUNKS,
    ),
    case(
        "leaving-while-running",
        "A client that leaves while its request runs changes nothing: the outcome is stored",
        *(Begin("first", post()), HangUp("first"), Release("first")),
        *(Until("in-flight", post()), KEPT, post(), KEPT),
    ),
    case(
        "leaving-midway",
        "A client that leaves while the response is being made changes nothing",
        Start("first", post(act=Act(chunks=3, pause="midway"))),
        *(Reached("midway"), HangUp("first"), Release("midway")),
        *(Until("in-flight", post()), KEPT),
    ),
    case(
        "leaving-while-waiting",
        "A duplicate that leaves while it waits disturbs nobody",
        *(Begin("first", post()), Start("second", post(headers=WAIT)), HangUp("second")),
        *(Release("first"), Finish("first"), Ran(), post(), Replay()),
    ),
    case(
        "leaving-a-failure",
        "A run that fails after its client has left frees its key",
        *(Begin("first", post(act=Act(fails="before"))), HangUp("first"), Release("first")),
        *(Until("in-flight", post()), Ran(attempt=2)),
    ),
    # Streams.
    case(
        "stream-unprotected",
        "A stream on an unprotected path passes as it comes",
        Start(
            "first",
            get("/elsewhere", act=Act(status=200, body=b"onetwo", chunks=2, pause="between")),
        ),
        *(Reached("between"), Receives("first", b"one"), Release("between")),
        *(Finish("first"), Untouched(status=200)),
    ),
    case(
        "events-unprotected",
        "Server-sent events on an unprotected path pass as they come",
        Start(
            "first",
            get(
                "/charges",
                act=Act(
                    status=200,
                    body=b"data: 1\n\ndata: 2\n\n",
                    chunks=2,
                    pause="between",
                    content_type=_EVENTS,
                ),
            ),
        ),
        *(Reached("between"), Receives("first", b"data: 1\n\n"), Release("between")),
        *(Finish("first"), Untouched(status=200)),
    ),
    case(
        "events-protected",
        "Server-sent events on a protected path pass as they come, and are remembered as done",
        Start(
            "first",
            post(
                act=Act(
                    status=200,
                    body=b"data: 1\n\ndata: 2\n\n",
                    chunks=2,
                    pause="between",
                    content_type=_EVENTS,
                )
            ),
        ),
        *(Reached("between"), Receives("first", b"data: 1\n\n")),
        *(Release("between"), Finish("first"), Ran(status=200)),
        *(post(), WITHHELD, post(), WITHHELD),
    ),
    case(
        "events-duplicate",
        "While server-sent events are on their way, a duplicate is told that they are done",
        Start(
            "first",
            post(
                act=Act(
                    status=200,
                    body=b"data: 1\n\ndata: 2\n\n",
                    chunks=2,
                    pause="between",
                    content_type=_EVENTS,
                )
            ),
        ),
        *(Reached("between"), Receives("first", b"data: 1\n\n"), post(), WITHHELD),
        *(Release("between"), Finish("first"), Ran(status=200)),
    ),
    case(
        "long-response",
        "A response past its limit is remembered as done, and the rest passes as it comes",
        Start("first", post("/brief", act=replace(_LONG, pause="between"))),
        *(Reached("between"), Receives("first", b"x" * 1_000), post("/brief"), WITHHELD),
        *(Release("between"), Finish("first"), Ran(), post("/brief"), WITHHELD),
    ),
    case(
        "long-response-fails-midway",
        "One that fails after that breaks off, and is done",
        *(post("/brief", act=replace(_LONG, fails="midway")), Broken()),
        *(post("/brief"), WITHHELD, post("/brief"), WITHHELD),
        without={HTTP_2: "the server of the tests leaves such a stream open without a word"},
    ),
    case(
        "long-response-left",
        "One whose client has left is done",
        Start("first", post("/brief", act=replace(_LONG, pause="between"))),
        *(Reached("between"), Receives("first", b"x" * 1_000), HangUp("first")),
        *(Release("between"), post("/brief"), WITHHELD),
    ),
    case(
        "long-response-frees",
        "One whose status frees the key frees it",
        *(post("/brief", act=replace(_LONG, status=503)), Ran(status=503)),
        *(post("/brief"), Ran(attempt=2)),
    ),
    case(
        "short-response-fails-midway",
        "A response that fails before its end, and within its limit, frees the key",
        post("/brief", act=replace(_LONG, body=b"x" * 100, fails="midway")),
        *(Broken(), post("/brief"), Ran(attempt=2), post("/brief"), Replay(run=2)),
    ),
    case(
        "stream-by-rule",
        "A route that passes streams sends them as they come, and remembers them as done",
        Start(
            "first",
            post(
                "/streams",
                act=Act(body=b"onetwo", chunks=2, pause="between", content_type="text/plain"),
            ),
        ),
        *(Reached("between"), Receives("first", b"one"), Release("between")),
        *(Finish("first"), Ran(), post("/streams"), WITHHELD),
    ),
    case(
        "stream-by-rule-fails-at-once",
        "A stream that fails before it began frees its key",
        *(post("/streams", act=Act(fails="before")), Broken(), post("/streams"), Ran(attempt=2)),
    ),
    case(
        "stream-by-rule-frees",
        "A streamed response with a status that frees the key frees it",
        *(post("/streams", act=Act(status=503)), Ran(status=503), post("/streams"), Ran(attempt=2)),
    ),
    case(
        "stream-by-rule-fails-midway",
        "A stream that fails on its way breaks off; it is done from its first byte",
        post(
            "/streams", act=Act(body=b"onetwo", chunks=2, fails="midway", content_type="text/plain")
        ),
        *(Broken(), post("/streams"), WITHHELD, post("/streams"), WITHHELD),
        without={HTTP_2: "the server of the tests leaves such a stream open without a word"},
    ),
    case(
        "events-fail-midway",
        "The same for server-sent events",
        post(act=Act(body=b"onetwo", chunks=2, fails="midway", content_type=_EVENTS)),
        *(Broken(), post(), WITHHELD),
        without={HTTP_2: "the server of the tests leaves such a stream open without a word"},
    ),
    case(
        "stream-by-rule-fails-midway-frees",
        "A stream that fails on its way frees its key, if its status does",
        post(
            "/streams",
            act=Act(
                status=503, body=b"onetwo", chunks=2, fails="midway", content_type="text/plain"
            ),
        ),
        *(Broken(), post("/streams"), Ran(attempt=2)),
        without={HTTP_2: "the server of the tests leaves such a stream open without a word"},
    ),
    case(
        "stream-left",
        "A stream whose client has left is done when its run is",
        Start(
            "first",
            post(
                "/streams",
                act=Act(body=b"onetwo", chunks=2, pause="between", content_type="text/plain"),
            ),
        ),
        *(Reached("between"), Receives("first", b"one"), HangUp("first"), Release("between")),
        *(Until("in-flight", post("/streams")), WITHHELD),
    ),
    case(
        "websocket",
        "Websockets are untouched",
        Upgrade("/charges"),
        get("/charges"),
        Untouched(),
        without={
            WSGI: "WSGI has no websockets",
            HTTP_2: "the tests open websockets over HTTP/1.1",
            FRAMEWORK: "the reference application in plain ASGI has the route",
        },
    ),
    # Two protections around one application.
    case(
        "nested",
        "A request that is protected twice runs once, and is replayed",
        *(post("/nested/charges"), Ran(), post("/nested/charges"), Replay()),
        *(post("/nested/charges", body=b"{}"), Refused(problem="key-reused", key="k")),
    ),
    case(
        "nested-in-flight",
        "A duplicate of a request that is protected twice conflicts while that runs, not longer",
        *(Begin("first", post("/nested/charges")), post("/nested/charges"), IN_FLIGHT),
        *(Release("first"), Finish("first"), Ran(), post("/nested/charges"), Replay()),
    ),
    case(
        "nested-failure-frees",
        "What frees a key frees it for both",
        *(post("/nested/charges", act=Act(status=500)), Ran(status=500)),
        *(post("/nested/charges"), Ran(attempt=2), post("/nested/charges"), Replay(run=2)),
    ),
    case(
        "nested-natural-key",
        "The same for a key that is made from the request",
        *(post("/nested/natural/7", key=None), Ran(), post("/nested/natural/7", key=None)),
        Replay(),
    ),
    # Stores.
    case(
        "store-down",
        "While the store is down, requests are refused with 503 and nothing runs",
        Break(DOWN),
        post("/faulty/charges"),
        UNAVAILABLE,
        Heal(),
        post("/faulty/charges"),
        Ran(),
        post("/faulty/charges"),
        Replay(),
    ),
    case(
        "store-down-finished",
        "A replay that the process remembers needs no store",
        *(post("/faulty/charges"), Ran(), Break(DOWN), post("/faulty/charges"), Replay()),
        without={PROCESSES: "the other process has to ask the store"},
    ),
    case(
        "store-down-heads",
        "Refusals by the head need no store",
        Break(DOWN),
        post("/faulty/charges", key=None),
        Refused(problem="key-missing"),
        post("/faulty/charges", caller=None),
        Refused(problem="caller-unknown"),
    ),
    case(
        "store-down-unprotected",
        "Unprotected requests need no store",
        Break(DOWN),
        post("/faulty/elsewhere"),
        Untouched(),
        get("/faulty/charges"),
        Untouched(),
    ),
    case(
        "store-down-status",
        "The status of a key cannot be told while the store is down",
        Break(DOWN),
        get("/faulty/idempotency-status/k"),
        UNAVAILABLE,
    ),
    case(
        "store-answer-lost",
        "An answer of the store that is lost once costs nothing",
        Break(NEXT_ANSWER),
        post("/faulty/charges"),
        Ran(),
        post("/faulty/charges"),
        Replay(),
    ),
    case(
        "store-slow",
        "While the store is slow, duplicates wait for its answer and one runs",
        *(
            Break(HELD, "claim"),
            Start("first", post("/faulty/charges", headers=WAIT)),
            Reached("claim"),
        ),
        *(Start("second", post("/faulty/charges", headers=WAIT)), Release("claim")),
        *(Finish("first"), Ran(), Finish("second"), Replay()),
        without={PROCESSES: "another process asks the store by itself, and may be answered first"},
    ),
    case(
        "store-loses-outcome",
        "An outcome that cannot be stored is told as such, and the key stays blocked",
        *(
            Break(SETTLEMENTS),
            post("/faulty/charges"),
            Refused(problem="outcome-not-stored", has_run=True),
        ),
        *(Heal(), post("/faulty/charges"), Refused(problem="in-flight")),
    ),
    case(
        "breaker-opens",
        "After failures in a row the store is left alone; one request tries when the time is over",
        Break(DOWN),
        *(post("/breaker/charges"), UNAVAILABLE, post("/breaker/charges"), UNAVAILABLE),
        *(
            Quiet(post("/breaker/charges"), UNAVAILABLE),
            Quiet(post("/breaker/charges"), UNAVAILABLE),
        ),
        *(Heal(), Until("store-unavailable", post("/breaker/charges")), Ran()),
        *(post("/breaker/charges"), Replay()),
    ),
    case(
        "failing-open",
        "Where that is asked for, requests run unprotected while the store is down, and say so",
        *(Break(DOWN), post("/failing-open/charges"), UNPROTECTED),
        *(
            Quiet(post("/failing-open/charges", key='"second"'), UNPROTECTED),
            Quiet(post("/failing-open/charges", key='"third"'), UNPROTECTED),
        ),
        *(Heal(), Until("unprotected", post("/failing-open/charges", key='"{next}"')), Ran()),
        *(post("/failing-open/charges", key='"fourth"'), Ran()),
        *(post("/failing-open/charges", key='"fourth"'), Replay(run=-1)),
    ),
    case(
        "failing-open-again",
        "What ran unprotected is replayed by its process, as long as the store is down and after",
        *(Break(DOWN), post("/failing-open/charges"), UNPROTECTED),
        Quiet(post("/failing-open/charges"), REPLAYED_UNPROTECTED),
        Quiet(post("/failing-open/charges", body=b"{}"), Refused(problem="key-reused")),
        *(Heal(), Until("unprotected", post("/failing-open/charges", key='"{next}"')), Ran()),
        *(post("/failing-open/charges"), REPLAYED_UNPROTECTED),
        without={PROCESSES: "the other process does not know what this one ran"},
    ),
    case(
        "failing-open-at-once",
        "Of simultaneous requests one runs unprotected, and the others get 409",
        Break(DOWN),
        *(Begin("first", post("/failing-open/charges")), post("/failing-open/charges"), IN_FLIGHT),
        *(post("/failing-open/charges", headers=(("Prefer", "respond-async"),)), IN_FLIGHT),
        *(Release("first"), Finish("first"), UNPROTECTED),
        *(post("/failing-open/charges"), REPLAYED_UNPROTECTED),
        *(Heal(), Until("unprotected", post("/failing-open/charges", key='"{next}"')), Ran()),
        without={PROCESSES: "the other process does not know what this one runs"},
    ),
    case(
        "failing-open-while-running",
        "A service that fails open does not run what it is running already",
        *(Begin("first", post("/failing-open/charges")), Break(DOWN)),
        *(post("/failing-open/charges", key='"other"'), UNPROTECTED),
        *(post("/failing-open/charges"), IN_FLIGHT),
        *(Heal(), Release("first"), Finish("first")),
        Answered(status=201, json={"run": 1, "attempt": 1}),
        *(post("/failing-open/charges"), KEPT),
        without={PROCESSES: "the other process does not know what this one runs"},
    ),
    case(
        "failing-open-outcome-lost",
        "A run whose outcome could not be stored says so, and its process replays it",
        *(Break(SETTLEMENTS), post("/failing-open/charges")),
        Refused(problem="outcome-not-stored", has_run=True),
        *(Heal(), Until("unprotected", post("/failing-open/charges", key='"{next}"')), Ran()),
        post("/failing-open/charges"),
        Answered(
            status=201,
            json={"run": 1, "attempt": 1},
            headers={"Idempotent-Replayed": "true", "Idempotency-Protected": "false"},
        ),
        without={PROCESSES: "the other process does not know what this one ran"},
    ),
)

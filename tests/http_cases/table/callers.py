"""Callers: whose key it is, and what nobody else may see."""

from __future__ import annotations

from tests.http_cases.cases import (
    Answered,
    Begin,
    Finish,
    Ran,
    Refused,
    Release,
    Replay,
    case,
    get,
    post,
)

UNKNOWN = Refused(problem="caller-unknown", headers={"WWW-Authenticate": "Bearer"})
STATUS = "/idempotency-status/k"


def _as(name: str, value: str, path: str):
    return post(path, caller=None, headers=((name, value),))


CASES = (
    case(
        "caller-scopes-keys",
        "The same key and request of two callers are two operations",
        *(post(caller="alice"), Ran(), post(caller="bob"), Ran()),
        *(post(caller="alice"), Replay(run=1), post(caller="bob"), Replay(run=2)),
    ),
    case(
        "caller-mismatch-is-scoped",
        "Another caller's key is not in the way of another request",
        *(post(caller="alice"), Ran(), post(caller="bob", body=b"{}"), Ran()),
    ),
    case(
        "caller-missing",
        "A request that does not say who calls is refused with 401",
        *(post(caller=None), UNKNOWN),
    ),
    case(
        "caller-missing-is-not-remembered",
        "A refusal for a missing caller is not remembered",
        *(post(caller=None), UNKNOWN, post(), Ran()),
    ),
    case(
        "caller-malformed",
        "Credentials of another scheme, or empty ones, tell nobody",
        *(_as("Authorization", "Basic YTpi", "/charges"), UNKNOWN),
        *(_as("Authorization", "Bearer", "/charges"), UNKNOWN),
        *(_as("Authorization", "Bearer a b", "/charges"), UNKNOWN),
    ),
    case(
        "caller-scheme-any-case",
        "The scheme's name may be written in any case",
        *(_as("Authorization", "bearer t-{play}", "/charges"), Ran()),
        *(_as("Authorization", "BEARER t-{play}", "/charges"), Replay()),
    ),
    case(
        "caller-key-first",
        "A missing key is told before a missing caller",
        *(post(key=None, caller=None), Refused(problem="key-missing")),
    ),
    case(
        "caller-global",
        "A namespace for everybody must be asked for, and then is one",
        *(post("/everybody/charges", key='"{play}"', caller="alice"), Ran()),
        *(post("/everybody/charges", key='"{play}"', caller="bob"), Replay()),
        *(post("/everybody/charges", key='"{play}"', caller=None), Replay()),
    ),
    case(
        "caller-header",
        "A caller can be taken from a header that a gateway sets",
        *(_as("X-Account", "a-{play}", "/accounts/charges"), Ran()),
        *(_as("X-Account", "a-{play}", "/accounts/charges"), Replay()),
        *(_as("X-Account", "b-{play}", "/accounts/charges"), Ran()),
        post("/accounts/charges"),
        Refused(problem="caller-unknown", headers={"WWW-Authenticate": "Account"}),
    ),
    case(
        "caller-basic",
        "A caller can be the user of basic authentication, whatever the password",
        *(_as("Authorization", "Basic dXNlcjphOg==", "/users/charges"), Ran()),
        *(_as("Authorization", "Basic dXNlcjpi", "/users/charges"), Replay()),
        *(_as("Authorization", "Basic b3RoZXI6YQ==", "/users/charges"), Ran()),
        _as("Authorization", "Basic ???", "/users/charges"),
        Refused(problem="caller-unknown", headers={"WWW-Authenticate": "Basic"}),
    ),
    case(
        "caller-status",
        "The status of a key is shown to its own caller only",
        *(post(), Ran(), get(STATUS), Replay()),
        *(get(STATUS, caller="bob"), Refused(problem="key-unknown")),
        *(get(STATUS, caller=None), UNKNOWN),
    ),
    case(
        "caller-status-running",
        "That a key is running is told to its own caller only",
        *(Begin("first", post()), get(STATUS), Answered(status=200, json={"state": "running"})),
        *(get(STATUS, caller="bob"), Refused(problem="key-unknown")),
        *(Release("first"), Finish("first"), Ran()),
    ),
)

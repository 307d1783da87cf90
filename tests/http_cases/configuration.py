"""How the reference application is protected: its rules, and the places where it is mounted.

Every server and every framework gets the same. A mount is the whole application again, under a
path of its own and with a store of its own, because its options hold for a whole application or
because its cases break its store.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from retrysafe import FOREVER, GLOBAL, BodyKey, Ending, FingerprintRule, InFlight, Policy
from retrysafe.http import (
    ACCEPT,
    Breaker,
    FieldsKey,
    HeaderKey,
    Limits,
    Rule,
    StatusRule,
    Streaming,
    basic_user,
    bearer_token,
    gateway_header,
)
from retrysafe.stores import SqliteStore
from tests.http_cases.controlled_store import ControlledStore

DIRECTORY_VARIABLE = "RETRYSAFE_CASES_DIRECTORY"
APPLICATION_VARIABLE = "RETRYSAFE_CASES_APPLICATION"
MOUNTS_VARIABLE = "RETRYSAFE_CASES_MOUNTS"
SECRET = b"a secret for the body keys of the table of cases"
LEASE_SECONDS = 10

POLICY = Policy(
    lease=timedelta(seconds=LEASE_SECONDS),
    wait_limit=timedelta(seconds=LEASE_SECONDS),
    settle_patience=timedelta(milliseconds=200),
)
# What a case of an outage waits for until the breaker lets one request try. Long enough for two
# requests in between on a machine that is busy with other work.
BREAKER_OPEN_SECONDS = 3.0
REQUEST_LIMIT_BYTES = 64
OUTCOME_LIMIT_BYTES = 512

NUMBERED_PATH = "/numbered/{id}"
RULES = (
    Rule(path="/charges", wait=True),
    Rule(path="/charges/{id}"),
    Rule(path="/charges/{id}/refunds"),
    Rule(path="/strict", strict=True),
    Rule(path="/optional", required=False),
    Rule(path="/posts-only", methods=("POST",)),
    Rule(path="/v1/open", protected=False),
    Rule(path="/v1/*"),
    Rule(path="/small", request_limit_bytes=REQUEST_LIMIT_BYTES),
    Rule(path="/brief", policy=POLICY.with_changes(outcome_limit_bytes=OUTCOME_LIMIT_BYTES)),
    Rule(path="/waiting", policy=POLICY.with_changes(in_flight=InFlight.WAIT)),
    Rule(
        path="/impatient",
        policy=POLICY.with_changes(in_flight=InFlight.WAIT, wait_limit=timedelta(milliseconds=100)),
    ),
    Rule(path="/accepting", in_flight=ACCEPT, wait=True),
    Rule(
        path="/accepting-soon",
        policy=POLICY.with_changes(in_flight=InFlight.WAIT, wait_limit=timedelta(milliseconds=100)),
        in_flight=ACCEPT,
        wait=True,
    ),
    Rule(path="/twice", policy=POLICY.with_changes(release_limit=2)),
    Rule(path="/final", policy=POLICY.with_changes(unlisted=Ending.FAILED)),
    Rule(path="/statuses", stored=StatusRule(kept={503}, freed={404})),
    Rule(path="/totals", headers=("X-Total",)),
    Rule(path="/excluding", fingerprint=FingerprintRule(exclude=("/sent_at", "/meta/id"))),
    Rule(path="/including", fingerprint=FingerprintRule(include=("/amount", "/currency"))),
    Rule(
        path="/headed",
        fingerprint=FingerprintRule(
            headers=("If-Match", "X-Tenant"), exclude_query=("ts",), media_type_parameters=True
        ),
    ),
    Rule(path="/natural", key=FieldsKey("/customer", "/order", window=FOREVER)),
    Rule(path="/natural/{id}", key=FieldsKey("{id}", window=FOREVER)),
    # Frameworks that have converters make a whole number of this one.
    Rule(path=NUMBERED_PATH, key=FieldsKey("{id}", window=FOREVER)),
    Rule(path="/typed/{id}", key=FieldsKey("{id:int}", "/order:int", "/by:uuid", window=FOREVER)),
    Rule(path="/hashed", key=BodyKey(window=timedelta(minutes=5))),
    Rule(
        path="/shared",
        key=HeaderKey(otherwise=BodyKey(window=timedelta(minutes=5), intent="X-Intent")),
    ),
    Rule(
        path="/intents",
        key=BodyKey(window=timedelta(minutes=5), intent="/intent"),
        fingerprint=FingerprintRule(include=("/amount",)),
    ),
    Rule(
        path="/hashed-fields",
        key=BodyKey(window=timedelta(minutes=5)),
        fingerprint=FingerprintRule(exclude=("/sent_at",)),
    ),
    Rule(path="/streams", streaming=Streaming.PASS),
)


# More than the crowds of all cases that play at the same time.
LIMITS = Limits(waiters=1_000)
# Every method that the cases send, for frameworks whose routes name them.
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")


def options_of(rule: Rule) -> dict[str, Any]:
    """The rule without its path, for frameworks whose endpoints carry their own rules."""
    return {item.name: getattr(rule, item.name) for item in fields(rule) if item.name != "path"}


@dataclass(frozen=True)
class Mount:
    """The application once more: where it is, and what its middleware is made with."""

    prefix: str
    options: Callable[[], dict[str, Any]]
    has_cache: bool = True
    # Whether a second middleware with the same rules and the same store is around it.
    is_nested: bool = False

    def __post_init__(self) -> None:
        own = self.options
        object.__setattr__(self, "options", lambda: {"limits": LIMITS, **own()})

    @property
    def name(self) -> str:
        return self.prefix.strip("/") or "main"

    def store(self) -> ControlledStore:
        """A store of its own, in the directory of the server."""
        return ControlledStore(
            SqliteStore(store_path(directory(), self.name)), directory(), self.name
        )

    def face_options(self) -> dict[str, Any]:
        """What its `Idempotency` or `AsyncIdempotency` is made with, beside the store."""
        return {"policy": POLICY, "secret": SECRET, "cache": self.has_cache}

    def middleware_options(self) -> dict[str, Any]:
        """What its middleware is made with, beside the application and that object."""
        return {"rules": RULES, **self.options()}


# The longest prefix first; the application itself is what is left.
MOUNTS = (
    Mount("/everybody", lambda: {"caller": GLOBAL}),
    Mount("/accounts", lambda: {"caller": gateway_header("X-Account"), "challenge": "Account"}),
    Mount("/users", lambda: {"caller": basic_user, "challenge": "Basic"}),
    # Its breaker never opens: these cases are about the store alone.
    Mount("/faulty", lambda: {"caller": bearer_token, "breaker": Breaker(failures_limit=10**9)}),
    Mount(
        "/breaker",
        lambda: {
            "caller": bearer_token,
            "breaker": Breaker(failures_limit=2, open_seconds=BREAKER_OPEN_SECONDS),
        },
    ),
    Mount(
        "/failing-open",
        lambda: {
            "caller": bearer_token,
            "fail_open": True,
            "breaker": Breaker(failures_limit=1, open_seconds=BREAKER_OPEN_SECONDS),
        },
    ),
    Mount("/uncached", lambda: {"caller": bearer_token}, has_cache=False),
    Mount("/counted", lambda: {"caller": bearer_token}),
    Mount("/nested", lambda: {"caller": bearer_token}, is_nested=True),
    Mount("", lambda: {"caller": bearer_token}),
)


def mount_of(path: str) -> Mount:
    """The mount that a path belongs to."""
    return next(
        mount
        for mount in MOUNTS
        if not mount.prefix or path == mount.prefix or path.startswith(mount.prefix + "/")
    )


def directory() -> Path:
    """Where the server and the tests meet."""
    return Path(os.environ[DIRECTORY_VARIABLE])


def store_path(where: Path, mount_name: str) -> Path:
    """The file of a mount's store."""
    return where / f"{mount_name}.db"

"""The idempotency policy that an API publishes, made from the rules that are in force.

Owns the words and the shape of that page, for people and for programs. Nothing on it is written by
hand per application, so it cannot disagree with what the server does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from html import escape
from typing import Any, Final

from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import KEY_LIMIT_CHARACTERS
from retrysafe.core.policy import FOREVER, InFlight
from retrysafe.errors import InvalidInput, PolicyInvalid
from retrysafe.http.durations import spoken
from retrysafe.http.key_sources import HeaderKey, described
from retrysafe.http.problems import KINDS
from retrysafe.http.request import Request
from retrysafe.http.responses import NO_STORE, STORED_HEADERS, Response
from retrysafe.http.routes import Route
from retrysafe.http.rules import ACCEPT, Streaming, responds_async

_HEADER: Final = described(HeaderKey())
# What the page says of a route whose requests pass untouched.
_OFF: Final = "off"
_OTHERWISE: Final = f"{_HEADER}, or else "
_NAMESPACES: Final = {
    "caller": "Keys of different callers never meet.",
    "global": "All callers share one namespace of keys: send keys that nobody else comes upon, "
    "such as random UUIDs.",
}


# Who may read the page: everybody, nobody, or those of whom a function of the request says so.
PolicyReaders = bool | Callable[[Request], bool]


def checked_readers(readers: object) -> PolicyReaders:
    """Who may read the page; raises `PolicyInvalid` for what cannot say it."""
    if isinstance(readers, bool):
        return readers
    # A coroutine is true, whatever it would come to.
    if not callable(readers) or inspect.iscoroutinefunction(readers):
        raise PolicyInvalid(
            "policy_page is True, False for no page, or a plain function of the request that says "
            f"who may read it, got {readers!r}"
        )
    return readers


def may_read(readers: PolicyReaders, request: Request) -> bool:
    """Whether this request may read the page; raises `InvalidInput` for an unclear answer."""
    if isinstance(readers, bool):
        return readers
    answer = readers(request)
    if not isinstance(answer, bool):
        raise InvalidInput(f"the function policy_page says True or False, got {answer!r}")
    return answer


def policy_response(
    routes: Iterable[Route],
    accept: bytes | None,
    *,
    policy_url: str,
    status_url: str,
    has_callers: bool,
    is_public: bool = True,
) -> Response:
    """The page as HTML, or as JSON for clients that ask for it and not for HTML.

    `has_callers` says that each caller has keys of its own, `is_public` that a shared cache may
    keep the page.
    """
    content = policy_content(
        routes, policy_url=policy_url, status_url=status_url, has_callers=has_callers
    )
    wanted = (accept or b"").lower()
    if b"application/json" in wanted and b"text/html" not in wanted:
        body, kind = json.dumps(content).encode(), b"application/json"
    else:
        body, kind = _html(content).encode(), b"text/html; charset=utf-8"
    return Response(
        200,
        [
            (b"content-type", kind),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"max-age=60") if is_public else NO_STORE,
            (b"vary", b"accept"),
        ],
        body,
    )


def policy_content(
    routes: Iterable[Route], *, policy_url: str, status_url: str, has_callers: bool
) -> dict[str, Any]:
    """Everything on the page, as plain data."""
    return {
        "key": {
            "header": "Idempotency-Key",
            "syntax": "a string in double quotes, as in RFC 8941",
            "characters_limit": KEY_LIMIT_CHARACTERS,
            "namespace": "caller" if has_callers else "global",
        },
        "replay_header": "Idempotent-Replayed",
        "status_url": f"{status_url}{{key}}",
        "routes": [_route(route) for route in routes],
        "problems": [
            {
                "type": f"{policy_url}#{kind.slug}",
                "code": kind.code,
                "status": kind.status,
                "title": kind.title,
                "meaning": kind.meaning,
                "retryable": kind.retryable,
            }
            for kind in KINDS
        ],
    }


def _route(route: Route) -> dict[str, Any]:
    rule, policy = route.rule, route.policy
    shown: dict[str, Any] = {
        "path": rule.path or "*",
        "methods": list(rule.methods),
        "key": _key_word(route),
    }
    if not rule.protected:
        return shown
    is_forever = policy.active_window == FOREVER
    return shown | {
        "key_source": described(route.rule.key),
        "takes_header": route.has_header_key,
        "bare_keys": not rule.strict,
        # None: for ever.
        "retention_seconds": None if is_forever else policy.active_window.total_seconds(),
        "response_retention_seconds": min(
            policy.active_window, policy.audit_window
        ).total_seconds(),
        "in_flight": (ACCEPT if route.accepts_duplicates else policy.in_flight).value,
        "wait_limit_seconds": policy.wait_seconds,
        "responds_async": responds_async(rule),
        # Whether every first request is answered with 202.
        "accepts": route.accepts_first,
        "same_request": _counted(route.fingerprint),
        "freed_statuses": _ranges(rule.stored.freed_statuses),
        "nothing_happened_statuses": sorted(rule.nothing_happened),
        "stored_headers": sorted(name.decode() for name in STORED_HEADERS | route.codec.extra),
        "response_is_kept": rule.streaming is Streaming.BUFFER,
        "request_limit_bytes": rule.request_limit_bytes,
        "response_limit_bytes": policy.outcome_limit_bytes,
        "attempts_limit": policy.attempt_limit,
        "releases_limit": policy.release_limit,
        "is_atomic": rule.transaction is not None,
        "lease_seconds": None if rule.transaction else policy.lease.total_seconds(),
    }


def _key_word(route: Route) -> str:
    """Whether clients must send a key; "off" where requests pass untouched."""
    if not route.rule.protected:
        return _OFF
    is_either = route.has_header_key and route.maker is not None
    return "optional" if is_either or not route.rule.required else "required"


def _counted(fingerprint: FingerprintRule) -> str:
    """What two requests have in common that count as the same."""
    query = "the query"
    if fingerprint.exclude_query:
        query += f" (without {', '.join(fingerprint.exclude_query)})"
    head = ["the method", "the path", query]
    if fingerprint.headers:
        word = "header" if len(fingerprint.headers) == 1 else "headers"
        head.append(f"the {word} {', '.join(fingerprint.headers)}")
    if fingerprint.media_type_parameters:
        head.append("the parameters of the media type")
    body = "the body"
    if fingerprint.include:
        body = f"these fields: {', '.join(fingerprint.include)}"
    elif fingerprint.exclude:
        body += f" without these fields: {', '.join(fingerprint.exclude)}"
    return f"{', '.join(head)} and {body}"


def _duration(seconds: float | None) -> timedelta:
    return FOREVER if seconds is None else timedelta(seconds=seconds)


def _attempts(route: dict[str, Any]) -> str:
    crashed = f"{route['attempts_limit']:,} at most that are cut off"
    limit = route["releases_limit"]
    freed = "any number" if limit is None else f"{limit:,} at most"
    return f"{crashed}; {freed} that fail and leave the key free"


def _ranges(statuses: Iterable[int]) -> list[str]:
    """Consecutive numbers as one text: 500-599 instead of a hundred lines."""
    ranges: list[list[int]] = []
    for status in statuses:
        if ranges and ranges[-1][1] == status - 1:
            ranges[-1][1] = status
        else:
            ranges.append([status, status])
    return [f"{low}-{high}" if high > low else f"{low}" for low, high in ranges]


def _html(content: dict[str, Any]) -> str:
    routes = "\n".join(_html_route(route) for route in content["routes"])
    problems = "\n".join(
        f'<section id="{escape(item["type"].partition("#")[2])}"><h3>{item["status"]} '
        f"{escape(item['title'])}</h3><p><code>{escape(item['code'])}</code></p>"
        f"<p>{escape(item['meaning'])}</p><p>"
        + ("The same request may be sent again." if item["retryable"] else "Do not retry.")
        + "</p></section>"
        for item in content["problems"]
    )
    key = content["key"]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Idempotency policy</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 1rem }}
dt {{ font-weight: 600 }} code {{ background: #8882; padding: 0 .25em }}
</style>
</head>
<body>
<h1>Idempotency policy</h1>
<p>Requests that change something may be sent again safely when they carry an
<code>{escape(key["header"])}</code> header: {escape(key["syntax"])}, of 1 to
{key["characters_limit"]} characters. Use a new key for every new operation, and the same key with
the same request for a retry. A retry gets the first response again, marked with
<code>{escape(content["replay_header"])}: true</code>. {_NAMESPACES[key["namespace"]]}</p>
<p>While the first request runs, <code>Prefer: wait=N</code> waits up to N seconds for its
response.{_html_async(content)}</p>
<h2>Routes</h2>
<p>The first one that matches counts.</p>
{routes}
<h2>Problems</h2>
<p>Refusals are <code>application/problem+json</code>; <code>code</code> names the reason for
programs, and <code>retryable</code> says whether the same request may be sent again.</p>
{problems}
</body>
</html>
"""


def _html_async(content: dict[str, Any]) -> str:
    """What is said of 202, where a route answers with it."""
    routes = content["routes"]
    if not any(route.get("responds_async") or route.get("accepts") for route in routes):
        return ""
    return (
        " Where the route says so, <code>Prefer: respond-async</code> is answered with 202 and a "
        f"URL such as <code>{escape(content['status_url'])}</code>, where the outcome can be read."
    )


def _html_route(route: dict[str, Any]) -> str:
    title = f"<h3><code>{escape(' '.join(route['methods']))} {escape(route['path'])}</code></h3>"
    if route["key"] == _OFF:
        return f"<section>{title}<p>Not protected; keys are ignored.</p></section>"
    if route["in_flight"] == ACCEPT.value:
        in_flight = (
            "202 with the URL where its outcome can be read, unless it prefers to wait; "
            "409 with Retry-After when that wait runs out"
        )
    else:
        in_flight = (
            f"waits up to {route['wait_limit_seconds']:g} s for the first response, then 409"
            if route["in_flight"] == InFlight.WAIT.value
            else "409 with Retry-After"
        )
        if route["responds_async"]:
            in_flight += ", or 202 for those who prefer respond-async"
    kept = (
        "every response except the statuses " + ", ".join(route["freed_statuses"])
        if route["response_is_kept"]
        else "only that the request was carried out; responses are streamed"
    )
    lines = {
        "The first request gets": "202 with the URL where its outcome can be read"
        if route["accepts"]
        else "its response",
        "Key": f"{route['key']}, in {_HEADER}",
        "Keys without quotes": "accepted" if route["bare_keys"] else "refused",
        "Remembered for": spoken(_duration(route["retention_seconds"])),
        "Responses are kept for": spoken(_duration(route["response_retention_seconds"])),
        "While the first request runs": in_flight,
        "The same request means the same": route["same_request"],
        "Kept": kept,
        "Largest request body": f"{route['request_limit_bytes']:,} bytes",
        "Largest kept response": f"{route['response_limit_bytes']:,} bytes",
        "Attempts": _attempts(route),
    }
    if route["takes_header"]:
        if route["key_source"] != _HEADER:
            lines["Without a key"] = (
                f"repeated requests are recognised {route['key_source'].removeprefix(_OTHERWISE)}"
            )
    else:
        # Nothing is sent that could be missing or written in two ways.
        del lines["Keys without quotes"]
        lines["Key"] = f"none is sent; repeated requests are recognised by {route['key_source']}"
    if route["nothing_happened_statuses"]:
        statuses = ", ".join(map(str, route["nothing_happened_statuses"]))
        lines["Corrected requests"] = (
            f"accepted after {statuses}, unless an earlier attempt ended in any other way, or a "
            "part of the work is done"
        )
    lines["After a crash"] = (
        "the key is free at once: the work and its response are one transaction"
        if route["is_atomic"]
        else f"the key is free after {route['lease_seconds']:g} s at most"
    )
    shown = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines.items()
    )
    return f"<section>{title}<dl>{shown}</dl></section>"

"""Requests made to be dear: does any input take more than its share of time, or break the layer?

Attacked is everything that retrysafe reads from outside: headers, bodies, queries, paths, and what
the client and webhooks read from servers. Work must grow in proportion to the input, limits must
refuse with a clear 400 or 413 and run nothing, large bodies must not hold the event loop, and no
byte of a client may become a header line of its own. `tests/http_cases` plays the same bodies on
every server and framework.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import inspect
import io
import pkgutil
import re
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

import retrysafe
from retrysafe import AsyncIdempotency, BodyKey, Idempotency
from retrysafe.core.keys import canonical
from retrysafe.http import HeaderKey, IdempotencyMiddleware, Rule, bearer_token
from retrysafe.http.callers import basic_user, gateway_header
from retrysafe.http.headers import HEADER_LIMIT_BYTES, parse_key, parse_prefer
from retrysafe.http.large_bodies import LARGE_BODY_BYTES
from retrysafe.http.protection import Protection
from retrysafe.http.request import Request
from retrysafe.http.routes import Route
from retrysafe.http.wsgi import WSGIIdempotencyMiddleware
from retrysafe.runtime.calls import calls_of
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.memory.store import MemoryStore
from tests.attacks.growth import FACTOR, LIMIT, growth
from tests.attacks.hostile_inputs import BODIES, FILLERS, OTHERS, headers, mark
from tests.attacks.patterns import attacks
from tests.http.building import JSON, request
from tests.http.driving import ask, ask_wsgi


@pytest.mark.parametrize(("make", "size"), BODIES.values(), ids=BODIES)
def test_the_time_for_a_body_grows_in_proportion_to_it(make, size):
    """Eight times the body is at most about eight times the work; a square would be 64."""
    assert growth(make, mark, size) < LIMIT


@pytest.mark.parametrize("filler", FILLERS, ids=repr)
def test_the_time_for_a_header_grows_in_proportion_to_it(filler):
    """The same for keys, preferences, content types and credentials, up to their limits."""
    size = HEADER_LIMIT_BYTES // 8 - 16
    for make in headers(filler).values():
        for strict in (False, True):
            assert (
                growth(make, lambda lines, strict=strict: parse_key(lines, strict=strict), size)
                < LIMIT
            )
    for shape in (b"%b", b'a="%b"', b'"%b', b"a=b;%b", b"wait=%b", b"%b,a", b'a="b",%b'):
        assert growth(lambda n, shape=shape: [shape % (filler * n)[:n]], parse_prefer, size) < LIMIT
    for shape in ("%b", 'multipart/form-data; a="%b"', "application/json;%b", "a/b; a=%b"):
        made = shape.encode()
        assert growth(lambda n, made=made: _typed(made % (filler * n)[:n]), mark, size) < LIMIT
    for caller in (bearer_token, basic_user, gateway_header("x-account")):
        for scheme in (b"", b"Bearer ", b"Basic ", b"Bearer a"):
            assert (
                growth(
                    lambda n, scheme=scheme: _authorized(scheme + (filler * n)[:n]), caller, 5_000
                )
                < LIMIT
            )


def _typed(line):
    return request(b"1", None, headers=((b"content-type", line),))


def _authorized(line):
    return request(headers=((b"authorization", line), (b"x-account", line)))


@pytest.mark.parametrize(("make", "work"), OTHERS.values(), ids=OTHERS)
def test_the_time_for_anything_else_from_outside_grows_in_proportion(make, work):
    """Paths against rules, lengths, and what servers answer to the client and to webhooks."""
    assert growth(make, work, 2_000) < LIMIT


# Patterns as a class.


def _modules():
    for package in ("http", "client", "relay", "contrib", "core", "demo"):
        found = importlib.import_module(f"retrysafe.{package}")
        yield found
        for info in pkgutil.walk_packages(found.__path__, f"{found.__name__}."):
            if "migrations" in info.name or info.name.endswith(
                ("django.urls", "django.operations")
            ):
                continue
            yield importlib.import_module(info.name)


# What begins anew at every place of a text; the others begin once.
_SEARCHES = ("search", "sub", "split", "finditer", "findall")


def _patterns():
    """Every pattern of these modules, with the way in which it is used."""
    named = {}
    for module in _modules():
        for name, value in list(vars(module).items()):
            if type(value) is re.Pattern:
                source = inspect.getsource(module)
                is_searched = any(f"{name}.{way}(" in source for way in _SEARCHES)
                named[f"{module.__name__}.{name}"] = value, is_searched
    return named


# A square of this many characters takes tens of milliseconds, a pass over them microseconds.
_SUSPECT_SIZE, _SUSPECT_SECONDS = 2_000, 0.002


def _slowest(pattern, *, is_searched):
    """An attack under which the pattern grows as a square, and by how much; None without one."""
    method = pattern.search if is_searched else pattern.fullmatch
    for make in attacks(pattern):
        attack = make(_SUSPECT_SIZE)
        begun = time.thread_time()
        method(attack)
        if time.thread_time() - begun > _SUSPECT_SECONDS:
            measured = growth(make, method, _SUSPECT_SIZE // FACTOR)
            if measured >= LIMIT:
                return attack[:20], measured
    return None


def test_no_pattern_is_quadratic():
    """Every compiled pattern of the packages that read from outside, with strings made from it."""
    found = _patterns()
    assert "retrysafe.http.headers._STRING_ITEM" in found
    slow = {name: _slowest(pattern, is_searched=used) for name, (pattern, used) in found.items()}
    assert {name: told for name, told in slow.items() if told is not None} == {}


@pytest.mark.parametrize(
    ("pattern", "is_searched"),
    [
        (rb"([a-z]+):[ \t]*+(.*?)[ \t]*+", False),
        (r"(?P<a>[^/]+)-(?P<b>[^/]+)", False),
        (r"\s+$", True),
    ],
)
def test_a_quadratic_pattern_is_found(pattern, is_searched):
    """The search for them finds the pattern that froze a loop for seconds, and its relatives."""
    assert _slowest(re.compile(pattern, re.DOTALL), is_searched=is_searched) is not None


def test_all_patterns_are_where_the_search_looks():
    """No module that reads from outside makes a pattern elsewhere than at its top."""
    root = Path(retrysafe.__file__).parent
    for package in ("http", "client", "relay", "contrib"):
        for path in (root / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            at_top = {
                id(call)
                for node in tree.body
                for call in ast.walk(node)
                if isinstance(node, ast.Assign | ast.AnnAssign)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
                    assert ast.unparse(node.func) == "re.compile", (path, node.lineno)
                    assert id(node) in at_top, (path, node.lineno)


# What a large body does to the loop.


def scenario(function):
    """Runs an async test in a loop of its own."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        asyncio.run(function(*args, **kwargs))

    return run


class _Recording:
    """Notes in which thread a fingerprint is made."""

    def __init__(self, monkeypatch):
        self.threads = []
        made = Protection.call

        def call(protection, plan):
            self.threads.append(threading.get_ident())
            return made(protection, plan)

        monkeypatch.setattr(Protection, "call", call)


async def _answering(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"made"})


def _protected(app=_answering, **more):
    idempotency = AsyncIdempotency(MemoryStore())
    return IdempotencyMiddleware(app, idempotency, caller=bearer_token, **more)


def _asking(app):
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://test",
        headers={"idempotency-key": '"k"', "authorization": "Bearer a", "content-type": JSON},
    )


@pytest.mark.parametrize("is_large", [False, True])
@scenario
async def test_a_large_body_is_compared_beside_the_loop(is_large, monkeypatch):
    """From the limit on, a body is read in another thread; a smaller one costs no hop."""
    seen = _Recording(monkeypatch)
    body = b"[1" + b" " * (LARGE_BODY_BYTES - 3 - (not is_large)) + b"]"
    async with _asking(_protected()) as client:
        first, second = [await client.post("/charges", content=body) for _ in range(2)]
    assert (first.status_code, second.headers["idempotent-replayed"]) == (201, "true")
    # The second is answered without any, as the same request as the first.
    assert [ident != threading.get_ident() for ident in seen.threads[:1]] == [is_large]


@pytest.mark.parametrize("is_large", [False, True])
@scenario
async def test_a_large_query_is_compared_beside_the_loop(is_large, monkeypatch):
    """It counts with the body: a client may put there what it would put here."""
    seen = _Recording(monkeypatch)
    query = b"a=" + b"%41" * ((LARGE_BODY_BYTES + 2) // 3)
    app = _protected()
    for path in ("/charges?a=1", "/charges?" + query.decode())[is_large:][:1]:
        reply = await ask(app, path=path, body=b"{}")
        assert reply.status == 201
    assert [ident != threading.get_ident() for ident in seen.threads] == [is_large]


@pytest.mark.parametrize(
    ("body", "most"),
    [
        (b"[1, 2", 1),
        (b'{"a": 1, "a": 2}', 1),
        (b"[1, 2] 3", 1),
        (b"[NaN]", 1),
        (b"\xff", 0),
        # A number that is longer than Python reads at once is met at the end of what was read.
        (b"[1, " + b"9" * 5_000, 2),
    ],
)
@pytest.mark.parametrize("source", [HeaderKey(), BodyKey()], ids=["header", "body"])
def test_broken_json_is_read_once(body, most, source, monkeypatch):
    """For the key and the fingerprint together, whatever is wrong with it."""
    reads = []
    for name in ("_decode", "_decode_long"):
        decode = getattr(canonical, name)

        def counted(text, decode=decode):
            reads.append(text)
            return decode(text)

        monkeypatch.setattr(canonical, name, counted)
    with Idempotency(MemoryStore(), secret=b"s" * 32) as idem:
        app = WSGIIdempotencyMiddleware(
            _created, idem, caller=bearer_token, rules=[Rule(key=source)]
        )
        key = "k" if isinstance(source, HeaderKey) else None
        assert ask_wsgi(app, body=body, key=key).status == 201
    assert len(reads) <= most


def _created(environ, start_response):
    start_response("201 Created", [])
    return [b""]


@scenario
async def test_the_loop_runs_while_a_hostile_body_is_read(monkeypatch):
    """While the worker is busy with a body, others are answered: nobody waits for its end."""
    is_reading, may_end = threading.Event(), threading.Event()
    made = Protection.call

    def call(protection, plan):
        if len(plan.request.body) >= LARGE_BODY_BYTES:
            is_reading.set()
            assert may_end.wait(30)
        return made(protection, plan)

    monkeypatch.setattr(Protection, "call", call)
    async with _asking(_protected()) as client:
        large = asyncio.create_task(client.post("/a", content=b" " * LARGE_BODY_BYTES))
        assert await asyncio.to_thread(is_reading.wait, 30)
        assert (
            await client.post("/b", content=b"{}", headers={"idempotency-key": "b"})
        ).status_code == 201
        assert not large.done()
        may_end.set()
        assert (await large).status_code == 201


def test_long_integers_are_linear_without_the_limit_of_python():
    """A process that lifts Python's limit on digits does not make long numbers quadratic."""
    earlier = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert growth(lambda n: request(b"9" * n), mark, 20_000) < LIMIT
        assert canonical.canonical_bytes(canonical.parse(b"[1200, -7]")) == b"[5:#12e25:#-7e0"
    finally:
        sys.set_int_max_str_digits(earlier)


# What a client sends must not become a header of its own.


HOSTILE_PREFIX = '/t\r\nX-Injected: 1\r\n\r\n/\x00\x1b\x7f\udcff é"<>;'


def _is_clean(lines):
    return all(
        name.isascii() and not set(value) & {0, 10, 13} and value.isascii() for name, value in lines
    )


def test_no_byte_of_a_path_becomes_a_header_line():
    """Where the mount is chosen by the client, links and locations are written percent-encoded."""
    idempotency = AsyncIdempotency(MemoryStore())
    protection = Protection(calls_of(idempotency).settings, caller=bearer_token)

    async def nobody(request):
        return None

    asked = [("k" * 300, "Bearer a"), ('"k"', None), ('"k"', "Bearer a")]
    for key, token in asked:
        headers = [(b"idempotency-key", key.encode())]
        if token:
            headers.append((b"authorization", token.encode()))
        made = Request("POST", HOSTILE_PREFIX + "/charges", b"", headers)
        plan = protection.begin(Route(Rule(), calls_of(idempotency).settings), made, HOSTILE_PREFIX)
        if token and key == '"k"':
            plan.key = 'k"\\ ;<>'
            answers = [
                protection.answers.accepted(plan, timedelta(seconds=1)),
                protection.refusals.cut_off(made, HOSTILE_PREFIX),
            ]
        else:
            answers = [plan]
        for answer in answers:
            assert _is_clean(answer.headers)
            # Some of it is in there, so the check above has seen it.
            assert any(b"%0D%0AX-Injected" in value for _, value in answer.headers)
    for path in (protection.pages.policy_path, protection.pages.status_path + "\r\nX-Injected: 1"):
        made = Request("GET", HOSTILE_PREFIX + path, b"", [(b"accept", b"\r\nX-Injected: 1")])
        shown = run_sync(
            protection.pages.page(
                path, made, HOSTILE_PREFIX, caller_of=nobody, read=None, run_times=None
            )
        )
        assert _is_clean(shown.headers)


@pytest.mark.parametrize("length", ["9" * 5_000, "²", "-1", "1e3", " ", "+5", "0x5"])
def test_a_length_that_is_no_length_is_never_an_error(length):
    """More digits than Python reads, and digits that are none: refused, or left to the server."""
    idempotency = Idempotency(MemoryStore())
    started = []
    app = WSGIIdempotencyMiddleware(
        lambda environ, start: (start("201 Created", []) and []) or [b""],
        idempotency,
        caller=bearer_token,
    )
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/c",
        "CONTENT_LENGTH": length,
        "HTTP_AUTHORIZATION": "Bearer a",
        "HTTP_IDEMPOTENCY_KEY": "k",
        "wsgi.input": io.BytesIO(b"12345"),
        "wsgi.input_terminated": True,
    }
    b"".join(app(environ, lambda status, headers: started.append(status)))
    assert started == ["413 Request Entity Too Large" if length.startswith("9") else "201 Created"]

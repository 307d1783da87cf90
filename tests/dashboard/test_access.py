"""Who may look and who may act: every way in that an attacker would try is closed."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from urllib.parse import urlencode

import pytest

from retrysafe import Idempotency, Policy
from retrysafe.dashboard import Dashboard, access, pages
from retrysafe.dashboard.web import Request
from retrysafe.errors import InvalidInput
from retrysafe.stores import Condition, open_store

TOKEN = "a long enough token"
KEY = 'invoice "><script>alert(1)</script>'
FORM = "application/x-www-form-urlencoded"


@pytest.fixture
def store(tmp_path):
    return open_store(f"sqlite:///{tmp_path}/keys.db")


@pytest.fixture
def idem(store):
    made = Idempotency(store, caller="<b>acme</b>", policy=Policy(lease=timedelta(minutes=5)))
    made.run(KEY, charge, "<i>4242</i>")
    return made


def charge(card: str) -> dict[str, str]:
    return {"card": card, "Secret": "hush"}


def get(dashboard: Dashboard, path: str, query: str = "", **headers: str):
    named = {"host": "shop.test"} | {name.replace("_", "-"): text for name, text in headers.items()}
    return dashboard.respond(Request("GET", path, "/ops", query, named, client="10.0.0.1"))


def post(dashboard: Dashboard, path: str, form: dict[str, str], **headers: str):
    named = {"host": "shop.test"} | {name.replace("_", "-"): text for name, text in headers.items()}
    body = urlencode(form).encode()
    return dashboard.respond(Request("POST", path, "/ops", "", named, body, client="10.0.0.1"))


def signed_in(dashboard: Dashboard) -> str:
    response = post(dashboard, "/login", {"token": TOKEN})
    assert (response.status, response.headers["location"]) == (303, "/ops/")
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path=/ops" in cookie
    return cookie.partition(";")[0]


def mark_of(dashboard: Dashboard, cookie: str) -> str:
    page = get(dashboard, "/", cookie=cookie).body.decode()
    return re.search(r'name="mark" value="([0-9a-f]{64})"', page)[1]


def key_form(**more: str) -> dict[str, str]:
    return {"key": KEY, "caller": "<b>acme</b>", "command": "expire"} | more


def test_nobody_reads_a_dashboard_that_names_nobody(store):
    with pytest.raises(InvalidInput, match="nobody could read"):
        Dashboard(store)
    with pytest.raises(InvalidInput, match="at least 16"):
        Dashboard(store, token="short")


@pytest.mark.parametrize("path", ["/", "/keys", "/key", "/outbox", "/nowhere"])
def test_without_token_every_page_leads_to_the_sign_in(store, idem, path):
    response = get(Dashboard(store, token=TOKEN), path, f"key={KEY}")
    assert (response.status, response.headers["location"]) == (303, "/ops/login")
    assert not response.body


def test_authorize_lets_somebody_read_and_the_token_act(store, idem):
    seen = []
    dashboard = Dashboard(store, token=TOKEN, authorize=lambda raw: seen.append(raw) or "ann")
    assert get(dashboard, "/").status == 200
    assert post(dashboard, "/key", key_form(is_confirmed="1", reason="x")).status == 403
    assert seen
    assert idem.read(KEY).condition is Condition.SUCCEEDED


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.test"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "http://[broken"},
    ],
)
def test_a_form_of_another_site_changes_nothing(store, idem, headers):
    """Even with the cookie and the right mark, as a page that can read neither cannot send."""
    dashboard = Dashboard(store, token=TOKEN)
    cookie = signed_in(dashboard)
    form = key_form(mark=mark_of(dashboard, cookie), is_confirmed="1", reason="why not")
    assert post(dashboard, "/key", form, cookie=cookie, **headers).status == 403
    assert idem.read(KEY).condition is Condition.SUCCEEDED
    assert post(dashboard, "/login", {"token": TOKEN}, **headers).status == 403


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic YW5uOmh1c2g="}])
@pytest.mark.parametrize("mark", ["", "0" * 64, "é"])
def test_a_form_without_its_mark_changes_nothing(store, idem, mark, headers):
    """Nor does it where a browser adds what it signs in to a proxy with, to every request."""
    dashboard = Dashboard(store, token=TOKEN)
    form = key_form(mark=mark, is_confirmed="1", reason="why not")
    assert post(dashboard, "/key", form, cookie=signed_in(dashboard), **headers).status == 403
    assert idem.read(KEY).condition is Condition.SUCCEEDED


def test_an_action_is_asked_about_needs_a_reason_and_is_done(store, idem):
    dashboard = Dashboard(store, token=TOKEN)
    cookie = signed_in(dashboard)
    form = key_form(mark=mark_of(dashboard, cookie))
    asked = post(dashboard, "/key", form, cookie=cookie)
    assert asked.status == 200
    assert b"runs the operation again" in asked.body
    refused = post(dashboard, "/key", form | {"is_confirmed": "1", "reason": " "}, cookie=cookie)
    assert refused.status == 400
    assert idem.read(KEY).condition is Condition.SUCCEEDED
    # What the table refuses is told, and is no failure of the server.
    again = form | {"command": "release", "is_confirmed": "1", "reason": "again"}
    assert post(dashboard, "/key", again, cookie=cookie).status == 409
    done = post(dashboard, "/key", form | {"is_confirmed": "1", "reason": "again"}, cookie=cookie)
    assert done.status == 303
    assert done.headers["location"].startswith("/ops/key?")
    assert idem.read(KEY).condition is Condition.OUTLIVED


def test_a_key_that_has_changed_since_it_was_shown_is_left(store, idem):
    """What somebody saw fail has succeeded since: expired, it would run twice."""
    dashboard = Dashboard(store, token=TOKEN)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    answers = iter([OSError("down"), "paid"])

    def pay():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(OSError, match="down"):
        idem.run("order", pay, request=None)
    form = {"key": "order", "caller": "<b>acme</b>", "command": "expire"}
    asked = post(dashboard, "/key", form, **bearer).body.decode()
    assert "which is released" in asked
    form["seen"] = re.search(r'name="seen" value="([^"]+)"', asked)[1]
    assert idem.run("order", pay, request=None) == "paid"
    done = post(dashboard, "/key", form | {"is_confirmed": "1", "reason": "x"}, **bearer)
    assert done.status == 409
    assert b"has changed since somebody looked" in done.body
    assert idem.read("order").condition is Condition.SUCCEEDED
    form["seen"] = "nonsense"
    assert (
        post(dashboard, "/key", form | {"is_confirmed": "1", "reason": "x"}, **bearer).status == 400
    )


def test_all_that_match_are_changed_and_nothing_else(store, idem):
    """As many as were agreed to, by the filters that were shown, with the reason kept."""
    dashboard = Dashboard(store, token=TOKEN, authorize=lambda raw: "ann")
    for number in range(3):
        idem.run(f"order {number}", charge, "x")
    cookie = signed_in(dashboard)
    form = {"key": "order", "command": "expire", "mark": mark_of(dashboard, cookie)}
    asked = post(dashboard, "/keys", form, cookie=cookie)
    assert b"Expire 3 keys" in asked.body
    looked_at_ms = re.search(rb'name="looked_at_ms" value="(\d+)"', asked.body)[1].decode()
    while time.time() * 1000 < int(looked_at_ms) + 2:
        pass
    idem.run("order 3", charge, "x")
    agreed = form | {"looked_at_ms": looked_at_ms, "is_confirmed": "1", "reason": "wrong prices"}
    assert post(dashboard, "/keys", agreed | {"count": "4"}, cookie=cookie).status == 303
    conditions = [idem.read(f"order {number}").condition for number in range(4)]
    assert conditions == [Condition.OUTLIVED] * 3 + [Condition.SUCCEEDED]
    assert idem.read(KEY).condition is Condition.SUCCEEDED
    where = urlencode({"key": "order 0", "caller": "<b>acme</b>"})
    page = get(dashboard, "/key", where, cookie=cookie).body.decode()
    assert "expire by ann" in page
    assert "wrong prices" in page


@pytest.mark.parametrize(
    "form",
    [
        {"command": "expire"},
        {"command": "force release", "key": "inv"},
        {"command": "expire", "key": "nothing starts so"},
        {"command": "expire", "key": "inv", "is_confirmed": "1", "reason": "x", "count": "-1"},
        {"command": "expire", "key": "inv", "is_confirmed": "1", "count": "1"},
    ],
)
def test_what_is_not_agreed_to_changes_nothing(store, idem, form):
    dashboard = Dashboard(store, token=TOKEN)
    response = post(dashboard, "/keys", form, authorization=f"Bearer {TOKEN}")
    assert response.status == 400
    assert idem.read(KEY).condition is Condition.SUCCEEDED


@pytest.mark.parametrize("number", ["", "-1", "1e3", "9" * 19, "\u0663"])
def test_an_entry_that_no_store_can_have_is_refused(store, number):
    dashboard = Dashboard(store, token=TOKEN)
    form = {"id": number, "command": "retry", "is_confirmed": "1", "reason": "x"}
    assert post(dashboard, "/outbox", form, authorization=f"Bearer {TOKEN}").status == 400


def test_pages_go_on_and_filters_combine(store, idem):
    dashboard = Dashboard(store, is_open_on_loopback=True)
    for number in range(120):
        idem.run(f"order {number}", charge, "x")
    seen, query = [], "key=order&condition=succeeded"
    while query:
        page = get(dashboard, "/keys", query, host="localhost").body.decode()
        seen += re.findall(r">(order \d+)<", page)
        found = re.search(r'href="/ops/keys\?([^"]+after=[^"]+)"', page)
        query = found[1].replace("&amp;", "&") if found else ""
    assert sorted(seen) == sorted(f"order {number}" for number in range(120))
    for query in ("key=order&operation=other", "key=order&minutes=5", "key=order&caller=other"):
        assert b"No key matches" in get(dashboard, "/keys", query, host="localhost").body


def test_a_script_acts_with_a_bearer_token_alone(store, idem):
    dashboard = Dashboard(store, token=TOKEN)
    form = key_form(is_confirmed="1", reason="again")
    wrong = post(dashboard, "/key", form, authorization="Bearer wrong")
    assert wrong.status == 303
    assert idem.read(KEY).condition is Condition.SUCCEEDED
    assert post(dashboard, "/key", form, authorization=f"Bearer {TOKEN}").status == 303
    assert idem.read(KEY).condition is Condition.OUTLIVED


def test_sessions_end_and_cannot_be_forged(store, monkeypatch):
    dashboard = Dashboard(store, token=TOKEN)
    cookie = signed_in(dashboard)
    assert get(dashboard, "/", cookie=cookie).status == 200
    name, _, value = cookie.partition("=")
    expires, nonce, signature = value.split(".")
    for forged in (
        "",
        "..",
        f"{int(expires) + 1}.{nonce}.{signature}",
        f"9999999999.{nonce}.é",
        f"{expires}.{nonce}.{signature[:-1]}",
    ):
        assert get(dashboard, "/", cookie=f"{name}={forged}").status == 303, forged
    assert get(Dashboard(store, token=TOKEN + "!"), "/", cookie=cookie).status == 303
    real = access.time.time
    monkeypatch.setattr(access.time, "time", lambda: real() + access.SESSION_SECONDS + 1)
    assert get(dashboard, "/", cookie=cookie).status == 303


def test_guessing_is_slowed_down_and_does_not_end_sessions(store, monkeypatch):
    dashboard = Dashboard(store, token=TOKEN)
    cookie = signed_in(dashboard)
    for _ in range(access.TRIES_OF_ONE):
        assert post(dashboard, "/login", {"token": "wrong"}).status == 401
    limited = post(dashboard, "/login", {"token": TOKEN})
    assert (limited.status, limited.headers["retry-after"]) == (429, "60")
    assert get(dashboard, "/", cookie=cookie).status == 200
    real = access.time.monotonic
    monkeypatch.setattr(access.time, "monotonic", lambda: real() + 61)
    assert post(dashboard, "/login", {"token": TOKEN}).status == 303


def test_addresses_without_end_are_counted_together(store):
    dashboard = Dashboard(store, token=TOKEN)
    headers = {"host": "shop.test"}
    for number in range(access.TRIES_OF_ALL):
        request = Request("POST", "/login", "", "", headers, b"token=no", client=f"10.0.{number}")
        assert dashboard.respond(request).status == 401
    request = Request("POST", "/login", "", "", headers, b"token=no", client="elsewhere")
    assert dashboard.respond(request).status == 429
    # A reader with a wrong bearer token is counted as well.
    assert get(dashboard, "/", authorization="Bearer no").status == 429


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("evil.test", 421),
        ("localhost.evil.test", 421),
        ("127.0.0.1.evil.test", 421),
        ("", 421),
        ("[broken", 421),
        ("user@evil.test", 421),
    ],
)
def test_open_reading_answers_to_loopback_hosts_only(store, host, status):
    """A site whose name leads to this machine cannot read through the visitor's browser."""
    dashboard = Dashboard(store, is_open_on_loopback=True)
    assert get(dashboard, "/", host=host).status == status
    assert get(dashboard, "/static/htmx.min.js", host=host).status == status


def test_open_reading_acts_for_nobody(store, idem):
    dashboard = Dashboard(store, is_open_on_loopback=True)
    form = key_form(is_confirmed="1", reason="x")
    assert post(dashboard, "/key", form, host="localhost").status == 403
    # Not with the empty token either.
    headers = {"host": "localhost", "authorization": "Bearer "}
    assert post(dashboard, "/key", form, **headers).status == 403
    assert post(dashboard, "/login", {"token": ""}, host="localhost").status == 401
    assert idem.read(KEY).condition is Condition.SUCCEEDED


def test_nothing_stored_becomes_markup_and_no_page_can_be_framed(store, idem):
    dashboard = Dashboard(store, is_open_on_loopback=True, show_bodies=True)
    where = urlencode({"key": KEY, "caller": "<b>acme</b>"})
    for path, query in (("/", ""), ("/keys", ""), ("/keys", where), ("/key", where)):
        response = get(dashboard, path, query, host="localhost")
        assert response.status == 200
        for markup in (b"<script>alert", b"<b>acme", b"<i>4242"):
            assert markup not in response.body, (path, query)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["cache-control"] == "no-store"
        assert not re.search(rb"<script(?![^>]+src=)|\son\w+=|<style|\sstyle=", response.body)


def test_bodies_are_hidden_unless_asked_for_and_fields_can_be_redacted(store, idem):
    where = urlencode({"key": KEY, "caller": "<b>acme</b>"})

    def page(**options) -> bytes:
        dashboard = Dashboard(store, is_open_on_loopback=True, **options)
        return get(dashboard, "/key", where, host="localhost").body

    assert b"4242" not in page()
    assert b"hush" not in page()
    assert b"4242" in page(show_bodies=True)
    redacted = page(show_bodies=True, redact=["SECRET"])
    assert b"4242" in redacted
    assert b"hush" not in redacted


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/static/../app.py", "", 404),
        ("/static/%2e%2e/app.py", "", 404),
        ("/static/templates/page.html", "", 404),
        ("/keys", "condition=nonsense", 400),
        ("/keys", "key=" + "x" * 100_000, 200),
        ("/keys", "&".join("a=1" for _ in range(1_000)), 400),
        ("/keys", "key=%ff", 400),
        ("/keys", "after=1-zz", 400),
        ("/keys", "after=99999999999999999999999999-00", 400),
        ("/keys", "after=1-00", 400),
        ("/keys", "minutes=-1", 400),
        ("/keys", "key=%00", 400),
        ("/keys", "minutes=%D9%A3", 400),
        ("/key", "", 400),
        ("/key", "key=%00", 400),
        ("/key", "key=unknown", 404),
        ("/outbox", "condition=nonsense", 400),
    ],
)
def test_what_no_page_sends_is_refused_in_words(store, path, query, status):
    dashboard = Dashboard(store, is_open_on_loopback=True)
    response = get(dashboard, path, query, host="localhost")
    assert response.status == status
    assert response.body


def test_the_overview_tells_how_the_store_is_doing_and_asks_it_rarely(store, idem, monkeypatch):
    dashboard = Dashboard(store, is_open_on_loopback=True)
    asked = []
    real = pages.figures.stats_of
    monkeypatch.setattr(pages.figures, "stats_of", lambda of: asked.append(of) or real(of))
    for _ in range(3):
        page = get(dashboard, "/", host="localhost").body.decode()
        assert "about 1 rows" in page
        assert "sweep lag" in page
    assert len(asked) == 1


def test_only_get_and_post_are_answered(store):
    dashboard = Dashboard(store, is_open_on_loopback=True)
    request = Request("DELETE", "/keys", "", "", {"host": "localhost"})
    assert dashboard.respond(request).status == 405

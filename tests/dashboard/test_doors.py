"""The dashboard inside of other applications: ASGI, WSGI, mounted and alone."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from retrysafe import Idempotency
from retrysafe.dashboard import Dashboard
from retrysafe.dashboard.web import BODY_LIMIT_BYTES
from retrysafe.errors import InvalidInput
from retrysafe.stores import MemoryStore, open_store

TOKEN = "a long enough token"


@pytest.fixture
def store():
    store = MemoryStore()
    Idempotency(store, caller="acme").run("invoice 1", dict)
    return store


def browser(app, base: str = "http://shop.test") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url=base, follow_redirects=True)


@pytest.mark.parametrize("root", ["", "/ops/keys"])
def test_mounted_in_an_asgi_application_or_alone(store, root):
    """Signs in and looks at a key, as a browser does: only by the links of the pages."""
    app = FastAPI()
    app.mount(root, Dashboard(store, token=TOKEN).asgi)

    async def walk() -> None:
        async with browser(app if root else Dashboard(store, token=TOKEN).asgi) as client:
            first = await client.get(f"{root}/")
            assert first.url.path == f"{root}/login"
            page = await client.post(f"{root}/login", data={"token": TOKEN})
            assert (page.status_code, page.url.path) == (200, f"{root}/")
            assert f'href="{root}/keys"' in page.text
            assert f'src="{root}/static/htmx.min.js"' in page.text
            found = await client.get(f"{root}/keys", params={"key": "inv"})
            assert f'href="{root}/key?key=invoice+1&amp;caller=acme"' in found.text
            named = {"key": "invoice 1", "caller": "acme"}
            assert (await client.get(f"{root}/key", params=named)).is_success
            large = await client.post(f"{root}/login", content=b"x" * (BODY_LIMIT_BYTES + 1))
            assert large.status_code == 413
            assert (await client.head(f"{root}/keys")).content == b""

    asyncio.run(walk())


def test_it_takes_part_in_the_lifespan_of_its_server(store):
    said: list[str] = []
    told = iter(("lifespan.startup", "lifespan.shutdown"))

    async def receive() -> dict[str, str]:
        return {"type": next(told)}

    async def send(message: dict[str, str]) -> None:
        said.append(message["type"])

    asyncio.run(Dashboard(store, token=TOKEN).asgi({"type": "lifespan"}, receive, send))
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_mounted_in_a_wsgi_application(store):
    dashboard = Dashboard(store, token=TOKEN)
    client = Client(DispatcherMiddleware(Flask(__name__), {"/ops": dashboard.wsgi}))
    assert client.get("/ops/").location == "/ops/login"
    page = client.post("/ops/login", data={"token": TOKEN}, follow_redirects=True)
    assert page.status_code == 200
    assert 'href="/ops/keys"' in page.text
    assert "invoice 1" in client.get("/ops/keys?key=inv").text
    assert client.head("/ops/keys").data == b""
    large = {"CONTENT_LENGTH": str(BODY_LIMIT_BYTES + 1), "wsgi.input": io.BytesIO()}
    assert dashboard.wsgi.answer({"REQUEST_METHOD": "POST", **large}).status == 413


def test_a_store_of_an_event_loop_is_refused_with_the_way_out():
    suspending = open_store("postgresql://nobody@localhost/none", is_async=True)
    with pytest.raises(InvalidInput, match="pass the store's URL"):
        Dashboard(suspending, token=TOKEN)


def test_a_store_that_is_down_is_told_in_words():
    dashboard = Dashboard("postgresql://nobody@localhost:1/none", is_open_on_loopback=True)

    async def look() -> httpx.Response:
        async with browser(dashboard.asgi, "http://localhost") as client:
            return await client.get("/")

    response = asyncio.run(look())
    assert response.status_code == 503
    assert "cannot be read" in response.text
    dashboard.close()


DJANGO = """
from urllib.parse import urlencode

import django
from django.conf import settings
from django.test import Client
from django.urls import include, path

settings.configure(
    SECRET_KEY="x" * 60,
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes"],
    MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware", "__main__.as_somebody"],
)
django.setup()

from retrysafe import Idempotency
from retrysafe.dashboard import Dashboard
from retrysafe.dashboard.django import staff_name, urls
from retrysafe.stores import MemoryStore


class User:
    is_active = True

    def __init__(self, is_staff):
        self.is_staff = is_staff

    def get_username(self):
        return "ann"


def as_somebody(get_response):
    def middleware(request):
        request.user = User(request.headers.get("who") == "staff")
        return get_response(request)

    return middleware


store = MemoryStore()
Idempotency(store, caller="acme").run("invoice 1", dict)
dashboard = Dashboard(store, token="a long enough token", authorize=staff_name)
urlpatterns = [path("ops/", include(urls(dashboard)))]
settings.LOGIN_URL = "/admin/login"
client = Client(enforce_csrf_checks=True)
try:
    stranger = client.get("/ops/keys")
    assert stranger.status_code == 302, stranger
except Exception as error:
    # The admin, whose sign-in a stranger is sent to, is not part of this project.
    assert "admin" in str(error), error
staff = {"who": "staff"}
page = client.get("/ops/keys?key=inv", headers=staff)
assert page.status_code == 200, page
assert b'href="/ops/key?key=invoice+1&amp;caller=acme"' in page.content
assert page.headers["X-Frame-Options"] == "DENY"
form = {"key": "invoice 1", "caller": "acme", "command": "expire"}
form = urlencode(form | {"reason": "x", "is_confirmed": "1"})
FORM = "application/x-www-form-urlencoded"
assert client.post("/ops/key", form, FORM, headers=staff).status_code == 403
token = staff | {"authorization": "Bearer a long enough token"}
assert client.post("/ops/key", form, FORM, headers=token).status_code == 303
assert b"outlived" in client.get("/ops/keys?key=inv", headers=staff).content
"""


def test_mounted_in_django_staff_reads_and_the_token_acts(tmp_path):
    """In a process of its own: Django is set up once in each."""
    script = tmp_path / "shop.py"
    script.write_text(DJANGO)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr

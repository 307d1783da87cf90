"""The store in a database of the project: in its tests, and outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from urllib.parse import urlsplit

import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured

from retrysafe.contrib.django import databases
from retrysafe.stores.postgres.urls import postgres_url
from tests.docs.documents import ROOT

SETTINGS = "tests.contrib.django_project.settings"


def manage(folder, database, *arguments):
    """`manage.py` of the project, in a process of its own."""
    environment = {
        **os.environ,
        "SHOP_DATABASE": json.dumps(database),
        "DJANGO_SETTINGS_MODULE": SETTINGS,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    environment.pop("RETRYSAFE_STORE", None)
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def postgres_database(url, name="postgres"):
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": parts.username,
        "HOST": parts.hostname,
        "PORT": str(parts.port),
        # It is connected to for making the test database.
        "TEST": {"NAME": "test_django_shop"},
    }


@pytest.mark.parametrize(
    ("kind", "is_atomic"), [("memory", False), ("file", True), ("postgres", True)]
)
def test_the_tests_of_a_project_pass(kind, is_atomic, tmp_path, request):
    """In `TestCase`s and `TransactionTestCase`s, with and without `ATOMIC_REQUESTS`; no test finds
    the keys of another, and the test database can be dropped."""
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db")}
    if kind == "file":
        database["TEST"] = {"NAME": str(tmp_path / "test.db")}
    if kind == "postgres":
        server = request.getfixturevalue("postgres_server")
        database = postgres_database(server.url())
    database["ATOMIC_REQUESTS"] = is_atomic
    code, told = manage(
        tmp_path, database, "-m", "django", "test", "--noinput", "tests.contrib.django_project"
    )
    assert code == 0, told
    assert "Ran 9 tests" in told, told


SERVE = """
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("migrate", verbosity=0)

def post(path):
    headers = {"Authorization": "Bearer alice", "Idempotency-Key": f'"{path}"'}
    reply = Client(headers=headers).post(f"/{path}")
    assert reply.status_code == 201, reply.content
    return "Idempotent-Replayed" in reply

assert [post(path) for path in ("completed", "completed", "atomic", "atomic")] == [0, 1, 0, 1]
"""
FLUSH = """
from retrysafe.contrib.django.configuration import _forget
call_command("flush", interactive=False, verbosity=0)
_forget(setting="RETRYSAFE")  # What this process remembers.
assert not post("completed")
"""


def test_a_server_keeps_its_keys_in_the_projects_database(tmp_path, postgres_server):
    """Where operators find them by `manage.py retrysafe`, and `flush` removes them."""
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db")}
    assert manage(tmp_path, database, "-c", SERVE) == (0, "")
    code, told = manage(tmp_path, database, "-m", "django", "retrysafe", "keys", "list")
    assert code == 0, told
    assert "completed" in told
    assert "atomic" in told
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE django_served")
    database = postgres_database(postgres_server.url(), "django_served")
    code, told = manage(tmp_path, database, "-c", SERVE + FLUSH)
    assert code == 0, told


def test_a_database_that_cannot_hold_a_store_is_told(monkeypatch):
    """At the start, with what to write instead."""
    cases = {
        "is in memory": ("sqlite", {"NAME": "file:x?mode=memory"}),
        "write its URL in RETRYSAFE": ("postgresql", {"OPTIONS": {"service": "shop"}}),
        "a store is in PostgreSQL or SQLite": ("mysql", {}),
    }
    for words, (vendor, options) in cases.items():
        database = SimpleNamespace(vendor=vendor, display_name=vendor, settings_dict=options)
        monkeypatch.setattr(databases, "connections", {"default": database})
        with pytest.raises(ImproperlyConfigured, match=words):
            databases.url_of("default")


def test_the_url_of_a_database_says_what_its_settings_say(monkeypatch):
    options = {
        "NAME": "shop/1",
        "USER": "me@corp",
        "PASSWORD": "p:w",
        "HOST": "/var/run",
        "PORT": 5433,
        "OPTIONS": {"sslmode": "require", "pool": True},
    }
    database = SimpleNamespace(vendor="postgresql", settings_dict=options)
    monkeypatch.setattr(databases, "connections", {"default": database})
    monkeypatch.setattr(databases, "schema_name", lambda: "keys_of_shop")
    url = databases.url_of("default")
    parts = postgres_url(url)
    assert parts.schema_name == "keys_of_shop"
    assert psycopg.conninfo.conninfo_to_dict(parts.for_libpq) == {
        "user": "me@corp",
        "password": "p:w",
        "dbname": "shop/1",
        "host": "/var/run",
        "port": "5433",
        "sslmode": "require",
    }

"""Credentials that clients send, and who reads the store afterwards.

Attacked: a copy of the database, and whatever is logged on the way. What must hold: no shipped
caller leaves a credential there, and with a secret nobody can find out by trying which one it was.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging

import psycopg
import pytest

from retrysafe import AsyncIdempotency
from retrysafe.http import IdempotencyMiddleware, api_key, basic_user, bearer_token
from tests.http.driving import Shop, ask

SECRET = b"0123456789abcdef0123456789abcdef"
# Short, as bad ones are: whoever has a plain digest of it tries all of them.
VALUE = "live_4711"
SENT = [
    (bearer_token, {"authorization": f"Bearer {VALUE}"}),
    (api_key(), {"x_api_key": VALUE}),
    (api_key("X-Shop-Token"), {"x_shop_token": VALUE}),
    (basic_user, {"authorization": "Basic " + base64.b64encode(f"u:{VALUE}".encode()).decode()}),
]


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path):
    """A store, and how to read all that it holds as bytes."""
    if request.param == "sqlite":
        path = tmp_path / "keys.db"
        return f"sqlite:///{path}", lambda: b"".join(
            file.read_bytes() for file in sorted(tmp_path.iterdir())
        )
    url = request.getfixturevalue("migrated_url")
    return url, lambda: _rows_of(url)


def _rows_of(url):
    location, _, schema = url.partition("?schema=")
    with psycopg.connect(location) as connection:
        names = connection.execute(
            "select format('%%I.%%I', schemaname, tablename) from pg_tables where schemaname = %s",
            (schema,),
        ).fetchall()
        found = [
            row[0].encode()
            for (name,) in names
            for row in connection.execute(f"select t::text from {name} t").fetchall()
        ]
    assert found
    return b"".join(found)


def _requested(url, caller, headers, secret):
    """Runs, replays and refuses a request."""

    async def scenario():
        shop = Shop()
        async with AsyncIdempotency(url, secret=secret) as idem:
            app = IdempotencyMiddleware(shop.asgi, idem, caller=caller)
            replies = [await ask(app, caller=None, **headers) for _ in range(2)]
            refused = await ask(app, caller=None, body=b"{}", **headers)
        assert [reply.status for reply in replies] == [201, 201]
        assert (replies[1].is_replay, refused.status) == (True, 422)
        assert len(shop.runs) == 1

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(("caller", "headers"), SENT, ids=["bearer", "key", "other key", "basic"])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "keyed"])
def test_a_copy_of_the_store_and_the_log_hold_no_credential(place, caplog, caller, headers, secret):
    """Nor, with a secret, any digest that could be compared with one of a guessed credential."""
    url, read = place
    with caplog.at_level(logging.DEBUG, "retrysafe"):
        _requested(url, caller, headers, secret)
    held = read() + caplog.text.encode()
    assert VALUE.encode() not in held
    assert base64.b64encode(f"u:{VALUE}".encode()) not in held
    plain = hashlib.sha256(VALUE.encode()).hexdigest()[:40].encode()
    empty = hmac.digest(b"", VALUE.encode(), "sha256").hex()[:40].encode()
    is_digest = secret is None and caller is not basic_user
    assert (plain in held, empty in held) == (is_digest, False)

"""URLs: what libpq takes is taken by both drivers, and what nobody can connect with is told."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
import sqlalchemy

from retrysafe import AsyncIdempotency, Idempotency, InvalidInput
from retrysafe.errors import StoreUrlInvalid
from retrysafe.stores import open_store
from retrysafe.stores.postgres import urls
from retrysafe.stores.postgres.naming import RESERVED_WORDS, checked_schema_name
from retrysafe.stores.postgres.urls import without_password
from tests.servers.fixtures import migrated

SECRET = "s3cret"

# What libpq knows; a server that speaks plain TCP without passwords can serve all of it.
SERVED = [
    "connect_timeout=3",
    "keepalives=1&keepalives_idle=30&keepalives_interval=5&keepalives_count=3",
    "tcp_user_timeout=3000",
    "channel_binding=prefer",
    "channel_binding=disable",
    "gssencmode=disable",
    "gssencmode=prefer",
    "sslcertmode=allow&sslsni=1&sslcompression=0",
    "load_balance_hosts=random",
    "client_encoding=auto",
    "application_name=me&fallback_application_name=us",
    "options=-c%20statement_timeout%3D5000",
    "sslmode=prefer",
    "sslmode=disable",
    "target_session_attrs=read-write",
]


async def run_async(url):
    async with AsyncIdempotency(url, caller="a") as idem:
        return await idem.run("k", asyncio.sleep, 0, 7)


@pytest.mark.parametrize("options", SERVED)
def test_both_drivers_take_what_libpq_takes(migrated_url, options):
    """One URL in the environment serves the threads and the event loops of a deployment."""
    url = f"{migrated_url}&{options}"
    with Idempotency(url, caller="s") as idem:
        assert idem.run("k", lambda: 7, request=None) == 7
    assert asyncio.run(run_async(url)) == 7


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("channel_binding=require", "cannot do channel_binding=require"),
        ("gssencmode=require", "cannot do gssencmode=require"),
        ("sslcertmode=require", "cannot do sslcertmode=require"),
        ("sslsni=0", "cannot do sslsni=0"),
        ("require_auth=scram-sha-256", "cannot do require_auth;"),
        ("requirepeer=postgres", "cannot do requirepeer;"),
        ("hostaddr=127.0.0.1", "cannot do hostaddr;"),
        (f"scram_client_key={SECRET}", "cannot do scram_client_key;"),
    ],
)
def test_no_promise_of_the_url_is_dropped_in_silence(options, shown):
    """asyncpg cannot keep to it, so it is refused there, and left to libpq elsewhere."""
    url = f"postgresql://app@127.0.0.1:1/db?{options}"
    with pytest.raises(StoreUrlInvalid, match="AsyncIdempotency connects through asyncpg") as told:
        open_store(url, is_async=True)
    assert shown in str(told.value)
    assert SECRET not in str(told.value)
    assert options in urls.postgres_url(url).for_libpq


def test_every_name_that_libpq_knows_is_judged():
    """A name that asyncpg does not know would reach the server as a setting, and be refused."""
    # By asyncpg's documentation; the server itself takes the last one.
    known = {
        *("host", "port", "user", "password", "passfile", "dbname", "service", "krbsrvname"),
        *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "gsslib"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version", "sslnegotiation"),
        *("target_session_attrs", "options"),
    }
    names = {item.keyword.decode() for item in psycopg.pq.Conninfo.get_defaults()}
    assert {"sslmode", "channel_binding", "keepalives"} < names
    passed_on = set()
    for name in names - {"connect_timeout", "sslmode", "port"}:
        try:
            made = urls.postgres_url(f"postgresql://h/db?{name}=x").for_asyncpg
        except StoreUrlInvalid:
            continue
        if name in made:
            passed_on.add(name)
    assert passed_on - known == set()


def test_the_limit_on_connecting_is_the_urls():
    """Both drivers get it from the pool's options, which would otherwise override it."""
    url = urls.postgres_url("postgresql://h/db?connect_timeout=3&pool=2&prepared=off")
    assert url.pool.connect_timeout.total_seconds() == 3
    assert (url.pool.size_limit, url.pool.has_prepared_statements) == (2, False)
    assert url.for_libpq == url.for_asyncpg == "postgresql://h/db"


def test_urls_of_sqlalchemy_serve_both_kinds_of_objects(migrated_url):
    """The driver is SQLAlchemy's own affair, and so are its names for options."""
    for driver in ("asyncpg", "psycopg"):
        url = migrated_url.replace("://", f"+{driver}://")
        with Idempotency(url, caller=driver) as idem:
            assert idem.run("k", lambda: 7, request=None) == 7
        assert asyncio.run(run_async(url)) == 7
    store = open_store("postgresql+asyncpg://h/x?ssl=disable&prepared_statement_cache_size=0")
    assert "sslmode=disable" in store._connector._servers._urls[0]
    with pytest.raises(StoreUrlInvalid, match="hide_password=False"):
        Idempotency(sqlalchemy.make_url("postgresql://h/x"), caller="s")


@pytest.mark.parametrize(
    ("url", "means"),
    [
        ("postgresql:///db", {"dbname": "db"}),
        ("postgresql:///db?host=/tmp&pool=2", {"dbname": "db", "host": "/tmp"}),
        ("postgresql://u:p%2Fq@h:1/db", {"password": "p/q", "host": "h", "port": "1"}),
        ("postgresql://u:p#q@h/db?schema=s", {"password": "p#q", "host": "h", "dbname": "db"}),
        ("postgresql://h/db?password=a+b%20c&schema=s", {"password": "a+b c"}),
    ],
)
def test_libpq_reads_what_was_written(url, means):
    """Taking retrysafe's own options out changes nothing else: slashes, hashes, pluses, spaces."""
    read = psycopg.conninfo.conninfo_to_dict(urls.postgres_url(url).for_libpq)
    assert read.items() >= means.items()
    assert not {"schema", "pool"} & read.keys()


GOOD = [
    "postgresql://",
    "postgresql:///db",
    "postgresql://h:5432,h2:65535,h3/db",
    "postgresql://[::1]:5432/db",
    "postgresql://[::1]/db",
    "postgresql://%2Fvar%2Frun/db",
    "postgresql://u:p%40ss%25@h:/db",
    "postgres:///db?host=/tmp,/run&port=5432,5433",
    "postgresql+asyncpg://u:p@h/db?ssl=require&prepared_statement_cache_size=0",
    "postgresql+psycopg://u:p@h/db",
    "postgresql+psycopg_async://u:p@h/db",
    "postgres+psycopg2://u:p@h/db",
]


@pytest.mark.parametrize("url", GOOD)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_means_a_server_is_taken(url, is_async):
    """Several hosts, sockets, brackets and escapes are libpq's way to write them."""
    assert open_store(url, is_async=is_async).location


BAD = [
    (f"postgresql://u:{SECRET}@[bad", "cannot be read"),
    (f"postgresql://u:{SECRET}@h\udcff/db", "cannot be read"),
    (f"postgresql://u:{SECRET}@h:notaport/x", "a port is a number from 1 to 65535"),
    (f"postgresql://u:{SECRET}@h:99999/x", "a port is a number"),
    (f"postgresql://u:{SECRET}@h:0/x", "a port is a number"),
    (f"postgresql://u:{SECRET}@h:5432,h2:no/x", "a port is a number"),
    (f"postgresql://u:{SECRET}@[::1]x/x", "an IPv6 address in brackets"),
    (f"postgresql://u:{SECRET}@::1/x", "a port is a number"),
    (f"postgresql://u:{SECRET}/{SECRET}@h/x", "a password as %XX"),
    (f"postgresql://u:{SECRET}?{SECRET}@h/x", "as %XX"),
    (f"postgresql://u:12?{SECRET}@h/x", "a question mark"),
    (f"postgresql://u:12?a/{SECRET}@h/x", "a question mark"),
    (f"postgresql://u:{SECRET}@{SECRET}@h:no/x", "a name or password as %40"),
    (f"postgresql://u:{SECRET}@{SECRET}@h/x", "a name or password as %40"),
    (f"postgresql://me@corp:{SECRET}@h/x", "a name or password as %40"),
    (f"postgresql://me@{SECRET}@h/x", "a name or password as %40"),
    (f"postgresql://u:a@h:{SECRET}/x", "a port is a number"),
    (f"postgresql://u:a@h:1,h2:{SECRET}/x", "a port is a number"),
    (f"postgresql://u:a@[::1]:{SECRET}/x", "a port is a number"),
    (f"postgresql://u:{SECRET}/x", "a port is a number"),
    (f"postgresql://u:a@h:{SECRET}%/x", "write a % in a name or password as %25"),
    (f"postgresql+pg8000://u:{SECRET}@h/x", "leave it out"),
    (f"postgresql+asyncpg://u:{SECRET}@h/x?ssl=true", "sslmode is one of disable, allow"),
    ("postgresql+asyncpg://u:***@h/x", "render_as_string(hide_password=False)"),
    (f"mysql+psycopg://u:{SECRET}@h/x", "names no store"),
    (f"postgresql:/u:{SECRET}@h/x", "names no store"),
    (f"u:{SECRET}@h/x", "names no store"),
    (f"host=h password = '{SECRET} {SECRET}' dbname=x", "names no store"),
    (f"postgresql://u:{SECRET}%@h/x", "write a % in a name or password as %25"),
    (f"postgresql://u:{SECRET}@h/x%00", "NUL"),
    (f"postgresql://u:{SECRET}@h/x\x00", "NUL"),
    (f"postgresql://u:{SECRET}@h/x?port=no", "a port is a number"),
    (f"postgresql://u:{SECRET}@h/x?pool=²", "pool is a number from 1 up"),
    (f"postgresql://u:{SECRET}@h/x?pool=0", "pool is a number from 1 up"),
    (f"postgresql://h/x?password={SECRET}&pool={'9' * 5000}", "pool is a number from 1 up"),
    (f"postgresql://u:{SECRET}@h/x?prepared=maybe", "prepared is on or off"),
    (f"postgresql://u:{SECRET}@h/x?connect_timeout=0", "connect_timeout is a number of seconds"),
    (f"postgresql://u:{SECRET}@h/x?connect_timeout=soon", "connect_timeout is a number"),
    (f"postgresql://u:{SECRET}@h/x?sslmode=on", "sslmode is one of disable, allow"),
    (f"postgresql://u:{SECRET}@h/x?schema=order", "PostgreSQL reserves it"),
    (f"postgresql://u:{SECRET}@h/x?schema=Shop", "cannot be a schema name"),
]


@pytest.mark.parametrize(("url", "words"), BAD, ids=lambda item: ascii(item)[:60])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_nobody_can_connect_with_is_told_at_once(url, words, is_async):
    """Trying again would not help; and no message shows a password."""
    with pytest.raises(StoreUrlInvalid) as told:
        open_store(url, is_async=is_async)
    assert words in str(told.value)
    assert SECRET not in str(told.value)
    assert told.value.retryable is False


def test_an_option_that_libpq_does_not_know_is_reported():
    """A slip of the pen is not an outage."""
    with pytest.raises(StoreUrlInvalid, match=r"check the names of its options \(ssl_mode\)"):
        open_store(f"postgresql://u:{SECRET}@h/db?ssl_mode=require")


def test_what_is_shown_of_a_url_has_no_password():
    """Also where the password is an option, or holds what it should have escaped."""
    assert without_password("postgresql://u:p@h:1/db?x=y") == "postgresql://u:***@h:1/db?x=y"
    assert without_password("postgresql://u@h:1/db") == "postgresql://u@h:1/db"
    assert without_password("postgresql://u:p/a:s@h/db") == "postgresql://u:***@h/db"
    assert without_password("postgresql://u:p/a@s@h/db") == "postgresql://***@h/db"
    assert without_password("postgresql://u@c:p@h/db") == "postgresql://***@h/db"
    assert without_password("postgresql://u%3Ap@h/db") == "postgresql://u:***@h/db"
    assert without_password("postgresql:///u:p@h/db") == "postgresql://***@h/db"
    assert without_password("postgresql://h:p,[::1]:5/d:b") == "postgresql://h:***,[::1]:5/d:b"
    assert without_password("postgresql://[::1]:p?x=y") == "postgresql://[::1]:***?x=y"
    shown = without_password("postgresql://h/db?password=p&sslpassword=q&schema=s")
    assert shown == "postgresql://h/db?password=***&sslpassword=***&schema=s"
    assert without_password("postgresql://h/db?PASSWORD=p&x=y").endswith("?PASSWORD=***&x=y")
    assert without_password("sqlite:///a:b@c.db") == "sqlite:///a:b@c.db"


# Names of schemas.


def test_words_of_the_language_are_no_schema_names(connection):
    """All that this server reserves are refused, and nothing that it takes."""
    rows = connection.execute("SELECT word, catcode FROM pg_get_keywords()").fetchall()
    reserved = {word for word, code in rows if code in "RT"}
    assert reserved <= RESERVED_WORDS
    assert not RESERVED_WORDS & {word for word, code in rows if code not in "RT"}
    for word in (*reserved, "pg_x", "pg_"):
        with pytest.raises(InvalidInput, match="PostgreSQL reserves it: use another one"):
            checked_schema_name(word)


@pytest.mark.parametrize("word", ["values", "if", "begin", "name"])
def test_words_that_are_not_reserved_are_names(postgres_server, connection, word):
    """They mean something only where no schema can be named."""
    url = f"{postgres_server.url()}?schema={word}"
    try:
        with Idempotency(migrated(url), caller="a") as idem:
            assert [idem.run("k", lambda: 7, request=None) for _ in range(2)] == [7, 7]
            assert idem.sweep().keys == 0
    finally:
        connection.execute(f"DROP SCHEMA IF EXISTS {word} CASCADE")

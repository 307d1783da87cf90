"""The same schema through Alembic and through Django, with the tools themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from alembic import command
from alembic.config import Config

from retrysafe import InvalidInput
from retrysafe.contrib.alembic import upgrade
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import schema
from tests.docs.documents import ROOT

# As Alembic's own templates do it: `generic` for blocking drivers, `async` for the others.
ENV = """
import asyncio
from alembic import context
from sqlalchemy import create_engine, pool
from sqlalchemy.ext.asyncio import create_async_engine

url = context.config.get_main_option("sqlalchemy.url")

def run(connection):
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()

async def run_async():
    engine = create_async_engine(url, poolclass=pool.NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()

if context.is_offline_mode():
    context.configure(url=url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
elif context.config.get_main_option("template") == "async":
    asyncio.run(run_async())
else:
    with create_engine(url, poolclass=pool.NullPool).connect() as connection:
        run(connection)
"""
REVISION = """
from alembic import op
from retrysafe.contrib.alembic import upgrade as upgrade_retrysafe

revision = "{revision}"
down_revision = {down}

def upgrade():
    upgrade_retrysafe(op, version={version}, schema="{schema}")
"""
MANAGE = """
import sys
import django
from django.conf import settings

def database(name):
    return {"ENGINE": sys.argv[1], "NAME": name, "HOST": "127.0.0.1", "PORT": sys.argv[3],
            "USER": "retrysafe"}

class Router:
    def allow_migrate(self, db, app_label, **hints):
        return db == "default" if app_label == "retrysafe" else None

settings.configure(
    INSTALLED_APPS=["retrysafe.contrib.django"],
    DATABASES={"default": database(sys.argv[2]), "analytics": database(sys.argv[2] + "_2")},
    DATABASE_ROUTERS=["__main__.Router"],
    RETRYSAFE_SCHEMA=sys.argv[4],
    USE_TZ=True,
)
django.setup()
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", *sys.argv[5:]])
"""


def pending(url):
    store = postgres_store(url, is_async=False)
    try:
        return run_sync(store.pending_migrations())
    finally:
        run_sync(store.close())


@pytest.fixture
def name(postgres_url):
    return parse_qs(urlsplit(postgres_url).query)["schema"][0]


@pytest.fixture
def database(postgres_server, name):
    """A database of its own: both tools keep their history in the public schema."""
    made = f"tools_{name}"
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {made}")
        yield made
        connection.execute(f"DROP DATABASE {made}")


@pytest.fixture
def url(postgres_server, database, name):
    return f"{postgres_server.url(database)}?schema={name}"


@pytest.fixture
def connection_to(postgres_server, database):
    """A plain connection to the tools' database."""
    with psycopg.connect(postgres_server.url(database), autocommit=True) as made:
        yield made


@pytest.fixture
def dump(postgres_server):
    def run(database, schema_name):
        done = subprocess.run(
            [
                postgres_server.binaries / "pg_dump",
                *("--schema-only", "--schema", schema_name),
                *("--dbname", postgres_server.url(database)),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        lines = done.stdout.splitlines()
        return [line for line in lines if not line.startswith(("\\restrict", "\\unrestrict"))]

    return run


@pytest.fixture
def expected(postgres_url, name, dump):
    """What `retrysafe migrate` makes."""
    store = postgres_store(postgres_url, is_async=False)
    run_sync(store.migrate())
    run_sync(store.close())
    return dump("postgres", name)


# Alembic.


@pytest.fixture(
    params=[("generic", "psycopg"), ("async", "psycopg"), ("async", "asyncpg")], ids="-".join
)
def project(request, tmp_path, name, postgres_server, database):
    """A project with one revision per migration of retrysafe."""
    template, driver = request.param
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENV)
    for version in range(1, len(schema.MIGRATIONS) + 1):
        down = None if version == 1 else f"r{version - 1}"
        text = REVISION.format(
            revision=f"r{version}", down=repr(down), version=version, schema=name
        )
        (tmp_path / "versions" / f"r{version}.py").write_text(text)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "os")
    config.set_main_option("template", template)
    engine = postgres_server.url(database).replace("postgresql:", f"postgresql+{driver}:")
    config.set_main_option("sqlalchemy.url", engine)
    return config


def test_alembic_makes_the_identical_schema(project, database, name, url, expected, dump):
    """`retrysafe migrate --check` finds nothing to do after it."""
    command.upgrade(project, "head")
    assert dump(database, name) == expected
    assert pending(url) == []
    command.upgrade(project, "head")


def test_alembic_offline_prints_sql_that_makes_the_identical_schema(
    project, database, name, url, expected, dump, capsys, postgres_server
):
    """For people who hand SQL to their administrators."""
    command.upgrade(project, "head", sql=True)
    printed = capsys.readouterr().out
    assert "BEGIN;" in printed
    done = subprocess.run(
        [postgres_server.binaries / "psql", "-v", "ON_ERROR_STOP=1", postgres_server.url(database)],
        input=printed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert dump(database, name) == expected
    assert pending(url) == []


def test_alembic_takes_over_a_schema_that_is_there(project, url):
    """A database made by `retrysafe migrate` joins the history without a change."""
    store = postgres_store(url, is_async=False)
    run_sync(store.migrate())
    run_sync(store.close())
    command.upgrade(project, "head")
    assert pending(url) == []


def test_one_line_brings_all_versions(project, tmp_path, url, name):
    """Also to a history that has some already; a later release needs the same line again."""
    for file in (tmp_path / "versions").glob("*.py"):
        file.unlink()
    text = REVISION.replace("version={version}, ", "")
    for number, down in ((1, None), (2, "r1")):
        revision = text.format(revision=f"r{number}", down=repr(down), schema=name)
        (tmp_path / "versions" / f"r{number}.py").write_text(revision)
    command.upgrade(project, "head")
    assert pending(url) == []


def test_alembic_takes_back_a_revision_that_fails(project, url, name, connection_to):
    """A migration is part of the revision's transaction, whatever the driver sends it by."""
    with connection_to.transaction():
        connection_to.execute(f"CREATE SCHEMA {name}; CREATE TABLE {name}.outbox (mine integer)")
    with pytest.raises(Exception, match="already exists"):
        command.upgrade(project, "head")
    assert connection_to.execute(f"SELECT to_regclass('{name}.keys')").fetchone() == (None,)
    assert len(pending(url)) == len(schema.MIGRATIONS)


def test_alembic_refuses_a_version_that_does_not_exist():
    """A revision written for a later release says so before it does anything."""
    with pytest.raises(InvalidInput, match="this release knows"):
        upgrade(None, version=len(schema.MIGRATIONS) + 1)


def test_a_migration_cannot_be_skipped(monkeypatch):
    """Their order is part of what they mean."""
    first = schema.MIGRATIONS[0]
    later = type(first)(2, "later", "-- oldest schema that still works: 1\n", 1)
    monkeypatch.setattr(schema, "MIGRATIONS", [first, later])
    answers = {"count": [(0,)], "advisory": [(None,)]}

    def query(sql):
        return next(rows for word, rows in answers.items() if word in sql)

    assert schema.is_due(1, "retrysafe", query)
    with pytest.raises(InvalidInput, match="1 comes before 2"):
        schema.is_due(2, "retrysafe", query)


# Django.


@pytest.fixture
def manage(postgres_server, name, database):
    """Runs a management command in a process of its own, as Django's settings are global."""

    def run(*args, engine="django.db.backends.postgresql", database_name=database):
        done = subprocess.run(
            [
                *(sys.executable, "-W", "error", "-c", MANAGE, engine, str(database_name)),
                *(str(postgres_server.port), name, *args),
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_django_makes_the_identical_schema(manage, database, name, url, expected, dump):
    """`manage.py migrate` applies and notes the same; the second time there is nothing to do."""
    assert "Applying retrysafe.0001_initial... OK" in manage("migrate", "retrysafe")
    assert dump(database, name) == expected
    assert pending(url) == []
    assert "No migrations to apply" in manage("migrate", "retrysafe")
    assert "No changes detected" in manage("makemigrations", "--check")


def test_django_prints_the_sql(manage, postgres_server, database, name, url, expected, dump):
    """`sqlmigrate` gives SQL that makes the identical schema."""
    with psycopg.connect(postgres_server.url(database), autocommit=True) as connection:
        for version in range(1, len(schema.MIGRATIONS) + 1):
            connection.execute(manage("sqlmigrate", "retrysafe", f"{version:04d}"))
    assert dump(database, name) == expected
    assert pending(url) == []


def test_django_takes_over_a_schema_that_is_there(manage, url):
    """A database made by `retrysafe migrate` joins the history without a change."""
    store = postgres_store(url, is_async=False)
    run_sync(store.migrate())
    run_sync(store.close())
    assert "OK" in manage("migrate", "retrysafe")
    assert pending(url) == []


def test_django_leaves_other_databases_alone(manage, tmp_path):
    """With a second database of another kind, its part of the migration does nothing."""
    path = tmp_path / "other.db"
    printed = manage(
        "migrate", "retrysafe", engine="django.db.backends.sqlite3", database_name=path
    )
    assert "OK" in printed


@pytest.fixture
def second_database(postgres_server, database):
    """What the project's router keeps for other applications."""
    made = f"{database}_2"
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {made}")
        yield made
        connection.execute(f"DROP DATABASE {made}")


def test_django_leaves_databases_alone_that_a_router_keeps_for_others(
    manage, postgres_server, second_database, name, url
):
    """The router decides, whether the migration is applied or printed."""
    assert "OK" in manage("migrate", "retrysafe", "--database", "analytics")
    printed = manage("sqlmigrate", "retrysafe", "0001", "--database", "analytics")
    assert "CREATE TABLE" not in printed
    with psycopg.connect(postgres_server.url(second_database)) as connection:
        found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,))
        assert found.fetchall() == []
    assert len(pending(url)) == len(schema.MIGRATIONS)
    assert "OK" in manage("migrate", "retrysafe")
    assert pending(url) == []


def test_there_is_a_django_migration_for_every_migration():
    """Numbers and names agree, so that nobody has to compare contents."""
    folder = ROOT / "src" / "retrysafe" / "contrib" / "django" / "migrations"
    files = sorted(path.stem for path in folder.glob("0*.py"))
    assert files == [f"{item.version:04d}_{item.name}" for item in schema.MIGRATIONS]
    for item in schema.MIGRATIONS:
        text = (folder / f"{item.version:04d}_{item.name}.py").read_text()
        assert f"ApplyMigration({item.version})" in text

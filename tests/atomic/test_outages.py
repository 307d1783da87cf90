"""Which errors of a database a retry can cure, whoever raises them."""

from __future__ import annotations

import sqlite3

import asyncpg
import psycopg
import pytest
import sqlalchemy.exc

from retrysafe.transactions import is_outage


def sqlite_error(code):
    error = sqlite3.OperationalError("told by its code")
    error.sqlite_errorcode = code
    return error


def wrapped(error):
    return sqlalchemy.exc.DBAPIError("SELECT 1", {}, error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("no route"),
        TimeoutError("no connection in time"),
        psycopg.OperationalError("connection failed"),
        psycopg.errors.AdminShutdown("57P01"),
        psycopg.errors.SerializationFailure("40001"),
        psycopg.errors.TooManyConnections("53300"),
        psycopg.errors.LockNotAvailable("55P03"),
        psycopg.errors.ReadOnlySqlTransaction("25006"),
        asyncpg.exceptions.ConnectionDoesNotExistError("08003"),
        asyncpg.exceptions.DeadlockDetectedError("40P01"),
        asyncpg.exceptions.InterfaceError("connection is closed"),
        wrapped(psycopg.errors.AdminShutdown("57P01")),
        sqlalchemy.exc.OperationalError("SELECT 1", {}, Exception()),
        sqlite_error(sqlite3.SQLITE_BUSY),
        sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT),
        sqlite_error(sqlite3.SQLITE_FULL),
        sqlite_error(sqlite3.SQLITE_CANTOPEN),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}: {error}"[:60],
)
def test_an_outage_is_recognised(error):
    """The server was out of reach, out of resources or gave up; nothing is wrong with the call."""
    assert is_outage(error)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("missing argument"),
        psycopg.errors.UniqueViolation("23505"),
        psycopg.errors.UndefinedTable("42P01"),
        asyncpg.exceptions.NotNullViolationError("23502"),
        wrapped(psycopg.errors.UndefinedTable("42P01")),
        sqlite_error(sqlite3.SQLITE_ERROR),
        sqlite3.IntegrityError("UNIQUE constraint failed"),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}: {error}"[:60],
)
def test_a_fault_of_the_program_is_no_outage(error):
    """Trying again would only fail again."""
    assert not is_outage(error)

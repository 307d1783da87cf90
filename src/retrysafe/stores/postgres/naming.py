"""Which names a schema may have: it becomes part of every statement, without quotes."""

from __future__ import annotations

import re
from typing import Final

from retrysafe.errors import InvalidInput

_SCHEMA_NAME: Final = re.compile(r"^[a-z_][a-z0-9_]{0,47}\Z")
# What PostgreSQL reads as part of its own language wherever a schema could be named, by
# pg_get_keywords() of all versions that the tests run on.
_WORDS: Final = """
all analyse analyze and any array as asc asymmetric authorization binary both case cast check
collate collation column concurrently constraint create cross current_catalog current_date
current_role current_schema current_time current_timestamp current_user default deferrable desc
distinct do else end except false fetch for foreign freeze from full grant group having ilike in
initially inner intersect into is isnull join lateral leading left like limit localtime
localtimestamp natural not notnull null offset on only or order outer overlaps placing primary
references returning right select session_user similar some symmetric system_user table
tablesample then to trailing true union unique user using variadic verbose when where window
with
"""
RESERVED_WORDS: Final = frozenset(_WORDS.split())


def migrate_command(location: str, schema: str) -> str:
    """What brings a schema up to date; the location has no password, which the user adds."""
    option = "" if schema == "retrysafe" else f"?schema={schema}"
    return f"'retrysafe migrate --store \"{location}{option}\"' with the password of your own URL"


def checked_schema_name(name: str) -> str:
    """The name itself; raises `InvalidInput`, because it becomes part of statements."""
    if not _SCHEMA_NAME.match(name):
        raise InvalidInput(
            f"{name!r} cannot be a schema name: use up to 48 lower-case letters, digits and _"
        )
    if name in RESERVED_WORDS or name.startswith("pg_"):
        raise InvalidInput(
            f"{name!r} cannot be a schema name, because PostgreSQL reserves it: use another one, "
            f"such as {name.removeprefix('pg_') or 'app'}_keys"
        )
    return name

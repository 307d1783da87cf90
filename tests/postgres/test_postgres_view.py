"""JSON outcomes can be queried, a bad body breaks no query, and replay stays byte for byte."""

from __future__ import annotations

import pytest

from retrysafe.core.model import Decision, Payload, SettleKind
from retrysafe.testing.suite.probe import key_of

# Spaces, a duplicate name, an escape and a number that jsonb would all write differently.
ODD = b'{"a":1.0, "a" : 2,\n "t":"\\u00e9", "n": 1e2 }'
BODIES = {
    "odd": Payload("json.1", b"", ODD),
    "list": Payload("json.1", b"", b"[1, 2]"),
    "null": Payload("json.1", b"", b"null"),
    "bytes": Payload("bytes.1", b"", b'{"looks": "like JSON"}'),
    "cut": Payload("json.1", b"", b'{"a":'),
    "not text": Payload("json.1", b"", b"\xff\xfe"),
    "empty": Payload("json.1", b"", b""),
    "zero": Payload("json.1", b"", b'{"a": "\\u0000"}'),
    "huge number": Payload("json.1", b"", b"1e1000000"),
    "deep": Payload("json.1", b"", b"[" * 200_000 + b"]" * 200_000),
}
SHOWN = {"odd": {"a": 2, "t": "é", "n": 100}, "list": [1, 2], "null": None}


@pytest.fixture
def filled(desk):
    for text, payload in BODIES.items():
        key = key_of(text)
        desk.end(SettleKind.COMPLETE, desk.hold(key), key, payload=payload)
    desk.hold(key_of("running"))
    return desk


def test_the_view_shows_json_as_jsonb_and_everything_else_as_nothing(filled):
    """One query over all records works, whatever is stored among them."""
    rows = filled.sql("SELECT key, state, jsonb_typeof(body_json), body_json FROM {schema}.records")
    assert {key for key, *_ in rows} == {*BODIES, "running"}
    for key, state, kind, body in rows:
        assert state == ("pending" if key == "running" else "succeeded")
        assert (kind is not None) == (key in SHOWN), key
        assert body == SHOWN.get(key)


def test_bodies_can_be_filtered_by_their_content(filled):
    """An outcome is found by a value in it."""
    found = filled.sql(
        "SELECT key FROM {schema}.records WHERE body_json ->> 't' = 'é' "
        "AND (body_json ->> 'n')::numeric = 100"
    )
    assert found == [("odd",)]


@pytest.mark.parametrize("text", BODIES)
def test_replay_gives_the_bytes_that_were_stored(filled, text):
    """The view reads; the stored bytes are the truth, with their spaces and duplicate names."""
    answer = filled.claim(key_of(text))
    assert (answer.decision, answer.payload) == (Decision.REPLAY, BODIES[text])


def test_the_function_is_kept_out_of_parallel_plans(desk):
    """Before PostgreSQL 17 a caught error in a parallel plan breaks the whole query."""
    rows = desk.sql(
        "SELECT provolatile, proparallel FROM pg_proc "
        "WHERE oid = '{schema}.body_json(text, bytea)'::regprocedure"
    )
    assert rows == [("i", "u")]

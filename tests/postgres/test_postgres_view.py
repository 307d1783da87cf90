"""JSON outcomes can be queried, a bad body breaks no query, and replay stays byte for byte."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from retrysafe import Key
from retrysafe.core.model import Decision, Payload, SettleKind
from retrysafe.runtime.drive import run_sync
from retrysafe.testing.suite.probe import ACTIVE_MS, key_of
from tests.docs.documents import ROOT, blocks

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


# The audit.


def sweep(desk):
    while run_sync(desk.store.sweep(100)).has_more:
        pass


def test_the_audit_shows_what_the_sweep_has_left(filled):
    """The records are gone; every outcome is found by the digest of its key, JSON as jsonb."""
    filled.clock.advance(timedelta(milliseconds=ACTIVE_MS))
    sweep(filled)
    assert filled.sql("SELECT key FROM {schema}.records") == [("running",)]
    rows = filled.sql(
        "SELECT digest, state, jsonb_typeof(body_json), body_json, body, form FROM {schema}.audit"
    )
    found = {bytes(digest): rest for digest, *rest in rows}
    assert len(found) == len(BODIES)
    for text, payload in BODIES.items():
        state, kind, shown, body, form = found[key_of(text).digest]
        assert (state, bytes(body), form) == ("succeeded", payload.body, payload.form)
        assert (kind is not None) == (text in SHOWN), text
        assert shown == SHOWN.get(text)


def test_the_audit_tells_every_ending_of_every_life(desk):
    """Attempts, states, tokens and instants are those of the attempts, not of the record now."""
    key = key_of("k")
    ends = []
    for kind in (SettleKind.RELEASE, SettleKind.COMPLETE, SettleKind.FAIL):
        token = desk.hold(key)
        assert desk.end(kind, token, key) is Decision.APPLY
        ends.append((token, desk.clock()))
        # Past the active window of the success, so that what follows is another life.
        desk.clock.advance(timedelta(milliseconds=1 if kind is SettleKind.RELEASE else ACTIVE_MS))
    rows = desk.sql(
        "SELECT token, settled_at, audit_ends_at > settled_at, state, attempt "
        "FROM {schema}.audit WHERE digest = %s ORDER BY settled_at",
        key.digest,
    )
    assert [(bytes(row[0]), row[1]) for row in rows] == [
        (token, datetime.fromtimestamp(at_ms / 1000, UTC)) for token, at_ms in ends
    ]
    assert [row[2:] for row in rows] == [
        (True, "released", 1),
        (True, "succeeded", 2),
        (True, "failed", 1),
    ]


def test_one_key_is_found_in_the_audit_through_an_index(desk):
    """No matter how much is kept: each day is asked by its index."""
    desk.done(3)
    (key,) = desk.done()
    desk.sql("SET enable_seqscan = off")
    plan = desk.sql(
        f"EXPLAIN SELECT * FROM {{schema}}.audit WHERE digest = '\\x{key.digest.hex()}'"
    )
    desk.sql("RESET enable_seqscan")
    assert not [line for (line,) in plan if "Seq Scan" in line]


def test_the_documented_queries_work(desk):
    """Those of the guide, on the key that it names."""
    key = Key("order-1001", caller="account-7")
    desk.end(
        SettleKind.COMPLETE, desk.hold(key), key, payload=Payload("json.1", b"", b'{"paid": 500}')
    )
    queries = [
        "\n".join(item.lines).replace("retrysafe.", f"{desk.schema}.")
        for item in blocks(ROOT / "docs" / "postgresql.md")
        if item.info == "sql" and "SELECT" in item.lines[0]
    ]
    assert len(queries) == 3
    # The clock of the tests stands at noon, on whichever side of the server's.
    queries[1] = queries[1].replace("settled_at >", "settled_at + interval '1 day' >")
    first, second, third = (desk.sql(query) for query in queries)
    assert [(row[0], row[-1]) for row in first] == [("order-1001", "500")]
    assert second == [(key.digest.hex(), 1, "succeeded", "500")]
    assert [(row[0], row[1], row[3]) for row in third] == [(1, "succeeded", {"paid": 500})]

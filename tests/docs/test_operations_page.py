"""The questions of support on the operations page: each is asked on both stores and answered."""

from __future__ import annotations

import re
import sqlite3
import time

import psycopg
import pytest

from retrysafe import Key
from retrysafe.core.model import OperatorCommand, OperatorNote, Payload, SettleKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.sqlite import SqliteStore
from retrysafe.testing.suite.probe import Probe, request
from tests.docs.documents import ROOT, blocks

ASKED = Key("order-1001", caller="account-7")
DECLINED = Key("order-1002", caller="account-7")
STUCK = Key("order-1003", caller="account-7")


def questions(word):
    """The queries on a store's views, in the order of the page."""
    found = ["\n".join(item.lines) for item in blocks(ROOT / "docs/operations.md")]
    return [text for text in found if f"FROM {word}" in text and "SELECT" in text]


def answers(store, ask, page):
    """Brings a store into the state that the page speaks of; what each question is answered."""
    probe = Probe(store, lambda: int(time.time() * 1000), run_sync)

    def settled(key, status, body, kind=SettleKind.COMPLETE):
        asked = request(key, operation="POST /charges/{id}")
        probe.ask(asked)
        head = b"%d\ncontent-type\napplication/json" % status
        probe.end(kind, asked.token, key, payload=Payload("http.1", head, body))

    settled(ASKED, 201, b'{"id": "ch_42"}')
    settled(DECLINED, 402, b'{"error": "card"}', SettleKind.FAIL)
    probe.ask(request(STUCK, lease_ms=-2_000, operation="POST /charges/{id}"))
    probe.ask(request(Key("job", caller="batch"), operation="Nightly A /job"))
    return [ask(text) for text in page]


def test_the_questions_on_postgresql(migrated_url):
    """Status, method, path, duration and JSON are columns; who released what is one as well."""
    store = postgres_store(migrated_url, is_async=False)
    page = questions("retrysafe.")
    assert len(page) == 6
    with psycopg.connect(migrated_url.partition("?")[0], autocommit=True) as connection:
        ask = lambda text: connection.execute(  # noqa: E731 — the way to ask.
            text.replace("retrysafe.", f"{store.schema_name}.")
        ).fetchall()
        first, second, third, fourth, fifth, _ = answers(store, ask, page)
        note = OperatorNote("kim", "refunded")
        run_sync(store.operate(ASKED, OperatorCommand.EXPIRE, note))
        (action,) = ask(page[5])
    run_sync(store.close())
    (answer,) = first
    assert answer[:5] == ("succeeded", 1, 201, "POST", "/charges/{id}")
    assert (answer[6] >= 0, answer[7]) == (True, {"id": "ch_42"})
    assert [(row[0], row[1], row[4]) for row in second] == [("order-1002", 402, "card")]
    assert [row[:3] for row in third] == [("account-7", "order-1001", "succeeded")]
    assert [row[1] for row in fourth] == ["order-1003"]
    assert [row[:3] for row in fifth] == [("POST /charges/{id}", 2, 1)]
    assert action[1:] == ("kim", "expire", "account-7", "order-1001", "succeeded", "refunded")


def test_the_questions_on_sqlite(tmp_path):
    """The same columns; what is no HTTP request has none of them."""
    store = SqliteStore(tmp_path / "keys.db")
    page = questions("retrysafe_")
    assert len(page) == 5
    with sqlite3.connect(tmp_path / "keys.db") as connection:
        ask = lambda text: connection.execute(text).fetchall()  # noqa: E731 — the way to ask.
        first, second, third, fourth, fifth = answers(store, ask, page)
        job = ask("SELECT method, path, status FROM retrysafe_records WHERE caller = 'batch'")
    connection.close()
    run_sync(store.close())
    (answer,) = first
    assert answer[:4] == ("succeeded", 201, "POST", "/charges/{id}")
    assert answer[5] == '{"id":"ch_42"}'
    assert [(row[0], row[1], row[3]) for row in second] == [("order-1002", 402, "card")]
    assert [row[:3] for row in third] == [("account-7", "order-1001", "succeeded")]
    assert [row[1] for row in fourth] == ["order-1003"]
    assert [row[:3] for row in fifth] == [("POST /charges/{id}", 2, 1)]
    assert job == [(None, None, None)]


@pytest.mark.parametrize("head", [b"", b"2", b"999", b"abc", b"\xff\xff\xff"])
def test_a_damaged_response_breaks_no_question(tmp_path, migrated_url, head):
    """It has no status, and every other row still has one."""
    payload = Payload("http.1", head, b"{")
    sqlite = SqliteStore(tmp_path / "keys.db")
    postgres = postgres_store(migrated_url, is_async=False)
    for store in (sqlite, postgres):
        probe = Probe(store, lambda: int(time.time() * 1000), run_sync)
        probe.end(SettleKind.COMPLETE, probe.hold(ASKED), ASKED, payload=payload)
    with psycopg.connect(migrated_url.partition("?")[0]) as connection:
        query = f"SELECT status, body_json FROM {postgres.schema_name}.records"
        assert connection.execute(query).fetchall() == [(None, None)]
    with sqlite3.connect(tmp_path / "keys.db") as connection:
        query = "SELECT status, body_json FROM retrysafe_audit"
        assert connection.execute(query).fetchall() == [(None, None)]
    connection.close()
    for store in (sqlite, postgres):
        run_sync(store.close())


def test_the_page_says_what_to_do_when_an_alert_fires():
    """Each alert of the rules has its row."""
    rules = (ROOT / "docs/monitoring/alerts.yml").read_text(encoding="utf-8")
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    alerts = re.findall(r"alert: (\w+)", rules)
    assert len(alerts) > 10
    assert [name for name in alerts if f"`{name}`" not in page] == []

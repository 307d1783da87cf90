"""Log lines: fields for machines, one line for an incident, callers as digests."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from pythonjsonlogger.json import JsonFormatter

from retrysafe import Idempotency
from retrysafe.core.events import Event, EventKind, caller_digest
from retrysafe.core.keys.key import Key
from retrysafe.errors import KeyReused, StoreUnavailable
from retrysafe.observe import EventLog
from retrysafe.observe.logs import INCIDENT_SECONDS, INCIDENTS_LIMIT
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a handler of the logger `retrysafe` writes, with the formatter that a test sets."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("retrysafe")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def formatted(stream: io.StringIO, formatter: logging.Formatter) -> None:
    for handler in logging.getLogger("retrysafe").handlers:
        if getattr(handler, "stream", None) is stream:
            handler.setFormatter(formatter)


def by_structlog() -> logging.Formatter:
    processors = [
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.JSONRenderer(),
    ]
    return structlog.stdlib.ProcessorFormatter(processors=processors)


@pytest.mark.parametrize("formatter", [JsonFormatter, by_structlog])
def test_formatters_find_the_fields(written, formatter):
    """A JSON line has the key, the operation and a digest of the caller, each by itself."""
    formatted(written, formatter())
    with Idempotency("memory://", caller="ada@example.org") as idem:
        idem.run("k", int, "1")
        with pytest.raises(KeyReused):
            idem.run("k", int, "2")
    (line,) = [json.loads(text) for text in written.getvalue().splitlines()]
    assert line["retrysafe_kind"] == "mismatched"
    assert line["retrysafe_key"] == "k"
    assert line["retrysafe_operation"] == "builtins.int"
    assert line["retrysafe_caller"] == caller_digest("ada@example.org")
    assert "ada@example.org" not in written.getvalue()


def test_callers_are_shown_to_those_who_ask_for_them(caplog):
    """An EventLog of one's own takes the place of the one that every object has."""
    observers = [EventLog(shows_callers=True)]
    with Idempotency("memory://", caller="ada", observers=observers) as idem:
        idem.run("k", int, "1")
        with pytest.raises(KeyReused):
            idem.run("k", int, "2")
    (record,) = caplog.records
    assert record.retrysafe_caller == "ada"
    assert record.levelno == logging.WARNING


def test_an_outage_is_one_line(caplog):
    """However often the store is asked, and whoever asks."""
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="commit", times=None)
    with Idempotency(store, caller="c") as idem:
        for number in range(3):
            with pytest.raises(StoreUnavailable):
                idem.run(f"k-{number}", int)
    assert [record.retrysafe_kind for record in caplog.records] == ["store unavailable"]


def test_an_incident_that_goes_on_is_logged_again_with_its_count(caplog):
    now = [0.0]
    log = EventLog(monotonic=lambda: now[0])
    told = [Event(EventKind.MISMATCHED, Key("k", caller="c"), name) for name in ("pay", "ship")]
    for _ in range(5):
        for event in told:
            log(event)
    assert [record.retrysafe_operation for record in caplog.records] == ["pay", "ship"]
    now[0] = INCIDENT_SECONDS
    log(told[0])
    assert caplog.records[-1].retrysafe_more == 4
    assert "(4 more like it since the last line)" in caplog.messages[-1]


def test_what_is_remembered_of_incidents_is_bounded(caplog):
    log = EventLog()
    for number in range(INCIDENTS_LIMIT + 10):
        log(Event(EventKind.RENEWAL_FAILED, Key(f"k-{number}", caller="c")))
    assert len(log._incidents) == INCIDENTS_LIMIT
    assert len(caplog.records) == INCIDENTS_LIMIT + 10


def test_at_debug_a_call_is_summed_up(caplog):
    """Its last event has its result, its time and what it raised."""
    with (
        caplog.at_level(logging.DEBUG, "retrysafe"),
        Idempotency("memory://", caller="c") as idem,
        pytest.raises(ValueError, match="invalid literal"),
    ):
        idem.run("k", int, "no number")
    answered = caplog.records[-1]
    assert answered.retrysafe_kind == "answered"
    assert (answered.retrysafe_result, answered.retrysafe_ending) == ("released", "released")
    assert answered.retrysafe_error == "ValueError"
    assert answered.retrysafe_seconds >= 0

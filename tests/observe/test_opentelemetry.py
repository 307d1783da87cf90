"""OpenTelemetry: the same counts as Prometheus, and spans that find their first execution."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from retrysafe import AsyncIdempotency, Idempotency, Policy, current_attempt, step
from retrysafe.core.events import Event, EventKind, Progress, trace_of
from retrysafe.core.keys.key import Key
from retrysafe.errors import KeyReused
from retrysafe.http import IdempotencyMiddleware, bearer_token
from retrysafe.observe.labels import OPERATIONS_LIMIT
from retrysafe.observe.opentelemetry import OpenTelemetryMetrics, OpenTelemetryTraces
from retrysafe.relay import Relay
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore, open_store
from retrysafe.testing import FaultyStore, Moment
from tests.consumers.scripted import Threads, message


class Traced:
    """Traces that end in memory."""

    def __init__(self, **options) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = OpenTelemetryTraces(self.provider)

    @property
    def spans(self):
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced():
    made = Traced()
    yield made
    made.provider.shutdown()
    assert not trace.get_current_span().get_span_context().is_valid, "a span stayed current"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request, tmp_path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("migrated_url")
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'keys.db'}"


def test_a_replay_links_to_the_first_execution(traced, url):
    """From memory and from the store, and the trace is stored with the claim."""
    store = open_store(url)
    for has_cache in (True, False):
        options = {"caller": "ada", "cache": has_cache, "observers": [traced.observer]}
        with Idempotency(store, **options) as idem:
            assert idem.run("k", int, name="pay") == 0
            assert idem.run("k", int, name="pay") == 0
    run_sync(store.close())
    first, *replays = traced.spans
    assert first.name == "retrysafe pay"
    assert first.attributes["retrysafe.result"] == "executed"
    assert first.attributes["retrysafe.caller"] != "ada"
    assert first.links == ()
    assert len(replays) == 3
    for span in replays:
        (link,) = span.links
        assert link.context.span_id == first.context.span_id
        assert link.context.trace_id == first.context.trace_id
        assert span.attributes["retrysafe.result"] == "replayed"


def test_what_the_operation_does_belongs_to_its_span(traced):
    """Steps too; and outside of the call nothing does."""
    tracer = traced.provider.get_tracer("user")

    @step("charge")
    def charge() -> int:
        with tracer.start_as_current_span("call the bank"):
            return 7

    def pay() -> int:
        return charge()

    with Idempotency("memory://", caller="c", observers=[traced.observer]) as idem:
        idem.run("k", pay, name="pay", request=None)
    bank, charging, paying = traced.spans
    assert (bank.parent.span_id, charging.parent.span_id) == (
        charging.context.span_id,
        paying.context.span_id,
    )
    assert charging.name == "retrysafe.step charge"


def test_spans_tell_how_a_call_ended(traced):
    """A refused duplicate is no error of the service; an operation that raised is."""
    with Idempotency("memory://", caller="c", observers=[traced.observer]) as idem:
        with pytest.raises(ValueError, match="invalid"):
            idem.run("k", int, "x")
        idem.run("l", int, "1")
        with pytest.raises(KeyReused):
            idem.run("l", int, "2")

        def failing() -> None:
            @step("broken")
            def broken() -> None:
                raise OSError("no")

            broken()

        with pytest.raises(OSError, match="no"):
            idem.run("m", failing)
    released, _, mismatched, broken, _ = traced.spans
    assert (released.status.status_code, released.attributes["error.type"]) == (
        StatusCode.ERROR,
        "ValueError",
    )
    assert mismatched.status.status_code is StatusCode.UNSET
    assert mismatched.attributes["retrysafe.result"] == "mismatched"
    assert broken.attributes["error.type"] == "OSError"


def test_nothing_is_stored_of_a_trace_that_is_not_sampled():
    traced = Traced(sampler=ALWAYS_OFF)
    store = MemoryStore()
    with Idempotency(store, caller="c", observers=[traced.observer]) as idem:
        idem.run("k", int)
    stored = run_sync(store.read(Key("k", caller="c")))
    assert trace_of(stored.record.owner) == ""
    assert traced.spans == ()


def test_a_message_is_processed_in_the_trace_that_sent_it(traced):
    """By the conventions for messages: a consumer's span, with its queue and its id."""
    way = Threads(MemoryStore(), caller="c", observers=[traced.observer])
    sender = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    judge = way.judge(lambda _: None, queue="nats:ORDERS/billing")
    way.run(judge.handle(message("7", headers={"traceparent": sender})))
    way.run(way.judge(lambda _: None, queue="amqp:orders").handle(message("8")))
    way.close()
    sent, alone = traced.spans
    assert (sent.name, sent.kind) == ("process ORDERS", SpanKind.CONSUMER)
    assert f"{sent.context.trace_id:032x}" in sender
    assert f"{sent.links[0].context.span_id:016x}" in sender
    assert sent.attributes["messaging.system"] == "nats"
    assert sent.attributes["messaging.destination.name"] == "ORDERS"
    assert sent.attributes["messaging.consumer.group.name"] == "billing"
    assert sent.attributes["messaging.message.id"] == "7"
    assert alone.attributes["messaging.system"] == "rabbitmq"
    assert alone.links == ()


class Target:
    """A target with methods of its own."""

    def __init__(self, waits) -> None:
        self.waits = waits
        self.is_closed = False

    async def deliver(self, delivery) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True


def test_a_delivery_has_a_span(traced):
    """Of functions, of async functions and of targets; one that fails is an error."""
    store = open_store("memory://")
    with Idempotency(store, caller="c", secret="s" * 32) as idem:
        for number in range(4):
            idem.run(
                f"k-{number}",
                lambda: current_attempt().outbox.stage("paid", {"n": 1}),
                request=1,
                name="p",
            )

    def failing(delivery) -> None:
        raise OSError("away")

    async def delivered(delivery) -> None:
        pass

    Relay(store, traced.observer.delivering(failing)).drain()
    spans = traced.spans
    assert {span.name for span in spans} == {"send paid"}
    assert {span.kind for span in spans} == {SpanKind.PRODUCER}
    assert {span.status.status_code for span in spans} == {StatusCode.ERROR}
    wrapped = traced.observer.delivering(delivered)
    assert asyncio.iscoroutinefunction(wrapped)
    target = Target(store.capabilities.waits)
    traced_target = traced.observer.delivering(target)
    delivery = type("D", (), {"topic": "t", "key": "k", "body": b"", "attempt": 1})
    asyncio.run(wrapped(delivery))
    asyncio.run(traced_target.deliver(delivery))
    asyncio.run(traced_target.close())
    assert target.is_closed
    assert [span.name for span in traced.spans[-2:]] == ["send t", "send t"]


def test_an_http_call_has_one_span_however_it_ends(traced):
    """Also one that fails open: it begins in one task and ends in another."""

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def main() -> None:
        store = FaultyStore(MemoryStore())
        idem = AsyncIdempotency(store, secret="s" * 32, observers=[traced.observer])
        protected = IdempotencyMiddleware(app, idem, caller=bearer_token, fail_open=True)
        transport = httpx.ASGITransport(protected)
        async with idem, httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            headers = {"Idempotency-Key": '"k"', "Authorization": "Bearer b"}
            await client.post("/pay", headers=headers)
            await client.post("/pay", headers=headers)
            store.fail(Moment.BEFORE, method="commit", times=None)
            await client.post("/pay", headers={**headers, "Idempotency-Key": '"l"'})

    asyncio.run(main())
    results = [span.attributes["retrysafe.result"] for span in traced.spans]
    assert results == ["executed", "replayed", "unprotected"]
    assert len(traced.spans[1].links) == 1


def test_an_owner_that_is_no_trace_is_no_link(traced):
    """Stored by somebody else, or cut short."""
    observer = traced.observer
    for stored in ("", "nonsense", "0-0", "xyz-1"):
        progress = Progress(float)
        observer(Event(EventKind.CALLED, Key("k", caller="c"), "pay", call=progress))
        progress.replays(stored)
        progress.end(None)
        observer(Event(EventKind.ANSWERED, Key("k", caller="c"), "pay", call=progress))
        assert traced.spans[-1].links == ()
    observer(Event(EventKind.ANSWERED, Key("k", caller="c"), "pay", call=progress))


# Metrics.


def points(reader: InMemoryMetricReader) -> dict[str, list]:
    data = reader.get_metrics_data()
    return {
        metric.name: [
            (dict(point.attributes), getattr(point, "value", getattr(point, "count", None)))
            for point in metric.data.data_points
        ]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_metrics_have_the_names_of_prometheus_with_dots(url):
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observer = OpenTelemetryMetrics(provider)
    policy = Policy(terminal=ValueError)
    with Idempotency(url, caller="c", policy=policy, observers=[observer]) as idem:
        idem.run("k", int, name="pay")
        idem.run("k", int, name="pay")
        with pytest.raises(ValueError, match="invalid"):
            idem.run("l", int, "x", name="pay")
        running = []
        hold = lambda: running.append(points(reader)["retrysafe.pending"])  # noqa: E731
        idem.run("m", hold, name="hold", request=None)
        observer(Event(EventKind.TAKEN_OVER, Key("k", caller="c"), "pay"))
        observer(Event(EventKind.LOOKED, Key("k", caller="c"), count=3))
        observer(Event(EventKind.SWEPT, Key("k", caller="c"), count=3))
        found = points(reader)
    assert running == [[({}, 1)]]
    assert ({"operation": "pay", "result": "executed"}, 1) in found["retrysafe.calls"]
    assert ({"operation": "pay", "result": "replayed"}, 1) in found["retrysafe.calls"]
    assert found["retrysafe.dedup_ratio"][0][0] == {"operation": "pay"}
    assert ({"operation": "pay", "ending": "failed"}, 1) in found["retrysafe.operation.duration"]
    assert found["retrysafe.claim.duration"] == [({}, 3)]
    assert found["retrysafe.takeovers"] == [({"operation": "pay"}, 1)]
    assert found["retrysafe.abandoned"] == [({}, 3)]
    assert found["retrysafe.sweep.lag"][0][1] < 60
    assert {"table": "keys"} in [labels for labels, _ in found["retrysafe.store.rows"]]
    assert found["retrysafe.outbox.waiting"] == [({}, 0)]
    assert [labels for labels, _ in found["retrysafe.pending.age"]] == [
        {"quantile": "0.5"},
        {"quantile": "0.95"},
        {"quantile": "0.99"},
    ]
    provider.shutdown()


def test_metrics_without_a_store_have_no_gauges_of_one():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    OpenTelemetryMetrics(provider)
    found = points(reader)
    assert "retrysafe.store.rows" not in found
    assert found["retrysafe.pending"] == [({}, 0)]
    provider.shutdown()


def test_operations_past_the_limit_share_an_attribute():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observer = OpenTelemetryMetrics(provider)
    for number in range(OPERATIONS_LIMIT + 5):
        progress = Progress(float)
        progress.end(None)
        observer(Event(EventKind.ANSWERED, Key("k", caller="c"), f"op-{number}", call=progress))
    found = points(reader)
    assert ({"operation": "(other)", "result": "executed"}, 5) in found["retrysafe.calls"]
    assert len(observer._all) == OPERATIONS_LIMIT + 1
    provider.shutdown()

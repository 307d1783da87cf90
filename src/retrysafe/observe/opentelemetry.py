"""Metrics and traces for OpenTelemetry, by its API alone: the SDK is the application's choice.

Owns the names of instruments, spans and attributes; messages follow the messaging conventions. Keys
and callers are never attributes of metrics. A span has its key, which is for people who look at one
call, and the digest of its caller.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from retrysafe.core.events import Event, EventKind, Progress, Result
from retrysafe.extras import missing_extra
from retrysafe.observe.gauges import StoreGauges, Watched
from retrysafe.observe.labels import OperationNames
from retrysafe.observe.quantiles import QUANTILES, quantile
from retrysafe.observe.running import RunningSet
from retrysafe.observe.windows import DedupWindow

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import (
        Link,
        Span,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
        TracerProvider,
    )

    from retrysafe.observe.deliveries import traced_target
except ModuleNotFoundError as error:
    raise missing_extra("retrysafe.observe.opentelemetry", "opentelemetry", error) from error

__all__ = ["OpenTelemetryMetrics", "OpenTelemetryTraces"]

_NAME: Final = "retrysafe"
# What a span is an error for: the caller did not get what it came for, by no wish of its own.
_ERRORS: Final = frozenset(
    {Result.LOST, Result.WITHHELD, Result.EXHAUSTED, Result.STORE_UNAVAILABLE, Result.RELEASED}
)

Observations = Iterable[Observation]


class OpenTelemetryMetrics:
    """An observer that counts; pass it in `observers`. One for each store, as its gauges are."""

    kinds = frozenset(
        {
            EventKind.ANSWERED,
            EventKind.CLAIMED,
            EventKind.TAKEN_OVER,
            EventKind.LOOKED,
            EventKind.SWEPT,
        }
    )

    def __init__(self, meter_provider: MeterProvider | None = None) -> None:
        """The application's own provider, unless one is given."""
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
        self._running = RunningSet()
        self._names = OperationNames()
        self._dedup = DedupWindow()
        self._store: StoreGauges | None = None
        # Duplicates and all calls by operation, for the ratio.
        self._lock = threading.Lock()
        self._duplicates: Counter[str] = Counter()
        self._all: Counter[str] = Counter()
        self._abandoned: int | None = None
        self._swept_monotonic: float | None = None

        def seconds(name: str, text: str) -> Callable[..., None]:
            return meter.create_histogram(f"retrysafe.{name}", "s", text).record

        self._count = meter.create_counter("retrysafe.calls", "{call}", "Protected calls.").add
        self._count_takeover = meter.create_counter(
            "retrysafe.takeovers", "{claim}", "Claims that were taken over after their lease."
        ).add
        self._operation = seconds("operation.duration", "How long operations ran.")
        self._claim = seconds("claim.duration", "How long the store took for claims.")
        self._settle = seconds("settle.duration", "How long the store took for endings.")
        self._wait = seconds("wait.duration", "How long duplicates waited.")
        for name, unit, text, observe in (
            ("dedup_ratio", "1", "Duplicates of the last minutes.", self._ratios),
            ("pending", "{operation}", "Operations under way.", self._pending),
            ("pending.age", "s", "For how long they have been.", self._ages),
            ("abandoned", "{key}", "Keys whose lease has ended.", self._abandoned_keys),
            ("store.rows", "{row}", "About how many rows there are.", self._rows),
            ("store.size", "By", "How large it is, with indexes.", self._sizes),
            ("store.rows_projected", "{row}", "Rate times window.", self._projected),
            ("sweep.lag", "s", "Since the sweep had nothing left.", self._sweep_lag),
            ("outbox.waiting", "{entry}", "Entries that wait.", self._outbox("waiting")),
            ("outbox.dead", "{entry}", "Entries that were given up.", self._outbox("dead")),
            ("outbox.oldest", "s", "How late the first is.", self._outbox("oldest_seconds")),
        ):
            meter.create_observable_gauge(f"retrysafe.{name}", [observe], unit, text)

    def watch(self, watched: Watched) -> None:
        """Takes the gauges of a store from the object that is observed; called by that object."""
        self._store = StoreGauges(watched)

    def __call__(self, event: Event) -> None:
        """Counts one event."""
        kind, operation = event.kind, self._names.label(event.operation)
        if kind is EventKind.ANSWERED:
            self._answered(event.call, operation)
        elif kind is EventKind.LOOKED:
            self._abandoned = event.count
        elif kind is EventKind.SWEPT:
            self._swept_monotonic = time.monotonic()
        else:
            self._running.add(event.call)
            if kind is EventKind.TAKEN_OVER:
                self._count_takeover(1, {"operation": operation})

    def _answered(self, call: Progress, operation: str) -> None:
        self._running.remove(call)
        result = call.result
        assert result is not None  # It has ended.
        with self._lock:
            self._all[operation] += 1
            if result is Result.REPLAYED or result is Result.IN_FLIGHT:
                self._duplicates[operation] += 1
        self._count(1, {"operation": operation, "result": result.value})
        if call.claim_seconds is not None:
            self._claim(call.claim_seconds)
        if call.settle_seconds is not None:
            self._settle(call.settle_seconds)
        if call.wait_seconds is not None:
            self._wait(call.wait_seconds)
        if call.operation_seconds is not None and call.ending:
            labels = {"operation": operation, "ending": call.ending}
            self._operation(call.operation_seconds, labels)

    # Gauges, asked for by the reader of the SDK.

    def _ratios(self, options: CallbackOptions) -> Observations:
        with self._lock:
            counted = {
                operation: (float(self._duplicates[operation]), float(calls))
                for operation, calls in self._all.items()
            }
        for operation, ratio in self._dedup.ratios(time.monotonic(), counted).items():
            yield Observation(ratio, {"operation": operation})

    def _pending(self, options: CallbackOptions) -> Observations:
        yield Observation(len(self._running.ages_seconds()))

    def _ages(self, options: CallbackOptions) -> Observations:
        ages = self._running.ages_seconds()
        for part in QUANTILES:
            yield Observation(quantile(ages, part), {"quantile": f"{part:g}"})

    def _abandoned_keys(self, options: CallbackOptions) -> Observations:
        if self._abandoned is not None:
            yield Observation(self._abandoned)

    def _sweep_lag(self, options: CallbackOptions) -> Observations:
        if self._swept_monotonic is not None:
            yield Observation(time.monotonic() - self._swept_monotonic)

    def _rows(self, options: CallbackOptions) -> Observations:
        for name, table in self._tables():
            if name != "file":
                yield Observation(table.rows, {"table": name})

    def _sizes(self, options: CallbackOptions) -> Observations:
        for name, table in self._tables():
            if table.size_bytes is not None:
                yield Observation(table.size_bytes, {"table": name})

    def _projected(self, options: CallbackOptions) -> Observations:
        if self._store is not None:
            for name, rows in self._store.rows_projected().items():
                yield Observation(rows, {"table": name})

    def _outbox(self, name: str) -> Callable[[CallbackOptions], Observations]:
        def observe(options: CallbackOptions) -> Observations:
            size = None if self._store is None else self._store.size()
            if size is not None:
                yield Observation(getattr(size, f"outbox_{name}"))

        return observe

    def _tables(self) -> Iterator[tuple[str, Any]]:
        size = None if self._store is None else self._store.size()
        if size is not None:
            yield from size.tables.items()


class OpenTelemetryTraces:
    """An observer that makes a span of every protected call, and one of every step in it.

    The span is the current one while the operation runs, so that what the operation does belongs to
    it. A replay links to the span of the first execution.
    """

    kinds = frozenset(
        {EventKind.CALLED, EventKind.ANSWERED, EventKind.STEP_BEGAN, EventKind.STEP_ENDED}
    )

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """The application's own provider, unless one is given."""
        self._tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)

    def __call__(self, event: Event) -> None:
        """Begins or ends a span."""
        kind = event.kind
        if kind is EventKind.CALLED:
            self._begin(event)
        elif kind is EventKind.ANSWERED:
            self._end(event)
        elif kind is EventKind.STEP_BEGAN:
            name = f"retrysafe.step {event.detail}"
            span = self._tracer.start_span(
                name,
                attributes={"retrysafe.step": event.detail, "retrysafe.attempt": event.attempt},
            )
            self._enter(event.call, event.detail, span)
        else:
            self._end_step(event)

    def _end_step(self, event: Event) -> None:
        span = self._leave(event.call, event.detail)
        if span is None:
            return
        if event.error:
            span.set_status(Status(StatusCode.ERROR, event.error))
            span.set_attribute("error.type", event.error)
        span.end()

    # The span of a call.

    def _begin(self, event: Event) -> None:
        name, kind, parent = f"retrysafe {event.operation}", SpanKind.INTERNAL, None
        attributes: dict[str, Any] = {
            "retrysafe.operation": event.operation,
            "retrysafe.key": event.key.text,
            "retrysafe.caller": event.caller,
        }
        links: list[Link] = []
        message = event.call.message
        if message is not None:
            kind = SpanKind.CONSUMER
            consumer, _, group = message.destination.partition("/")
            system, _, destination = consumer.partition(":")
            name = f"process {destination}"
            attributes |= {
                "messaging.system": _SYSTEMS.get(system, system),
                "messaging.destination.name": destination,
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
            }
            if group:
                attributes["messaging.consumer.group.name"] = group
            if message.identity is not None:
                attributes["messaging.message.id"] = message.identity
            # By whom it was sent: the parent where nothing else is, and a link in any case.
            sent = propagate.extract(dict(message.headers))
            sender = trace.get_current_span(sent).get_span_context()
            if sender.is_valid:
                links.append(Link(sender))
                if not trace.get_current_span().get_span_context().is_valid:
                    parent = sent
        span = self._tracer.start_span(
            name, context=parent, kind=kind, attributes=attributes, links=links
        )
        own = span.get_span_context()
        if own.is_valid and own.trace_flags.sampled:
            # Stored with the claim, for the links of later replays.
            event.call.trace = f"{own.trace_id:032x}-{own.span_id:016x}"
        self._enter(event.call, "", span)

    def _end(self, event: Event) -> None:
        call = event.call
        span = self._leave(call, "")
        if span is None:
            return  # A key that no rule reads: nothing of it was followed.
        result = call.result
        assert result is not None  # It has ended.
        span.set_attribute("retrysafe.result", result.value)
        span.set_attribute("retrysafe.attempt", event.attempt)
        span.set_attribute("retrysafe.source", event.source)
        if call.ending:
            span.set_attribute("retrysafe.ending", call.ending)
        first = _span_context(call.first_trace)
        if first is not None:
            span.add_link(first, {"retrysafe.link": "first execution"})
        if call.error:
            span.set_attribute("error.type", call.error)
        if result in _ERRORS:
            span.set_status(Status(StatusCode.ERROR, result.value))
        span.end()

    # Which span is the current one.

    def _enter(self, call: Progress, name: str, span: Span) -> None:
        if call.notes is None:
            call.notes = {}
        token = context.attach(trace.set_span_in_context(span))
        call.notes[self, name] = span, token

    def _leave(self, call: Progress, name: str) -> Span | None:
        span, token = (call.notes or {}).pop((self, name), (None, None))
        # A call that was given up by one task may be ended by another, where it was never current.
        if span is not None and trace.get_current_span() is span:
            context.detach(token)
        return span  # type: ignore[no-any-return]

    # Deliveries.

    def delivering(self, target: Any) -> Any:
        """The target of a relay, with a span around each of its deliveries: `Relay(store, …)`."""
        return traced_target(self._tracer, target)


# As the conventions call the brokers.
_SYSTEMS: Final = {"sqs": "aws_sqs", "amqp": "rabbitmq"}


def _span_context(stored: str) -> SpanContext | None:
    """The span that is stored of a run; None for none, and for what is none of ours."""
    trace_id, _, span_id = stored.partition("-")
    try:
        found = SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(1)
        )
    except ValueError:
        return None
    return found if found.is_valid else None

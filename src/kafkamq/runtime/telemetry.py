"""Spans and metrics of handlers through OpenTelemetry, when its SDK is installed.

The names are here and nowhere else. A delivery is a span of its own; it is linked to the span in
which the message was sent, which the header ``traceparent`` names: it travels with every copy, so
all deliveries of a message lead to its sender.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

SCOPE = "kafkamq"
SPAN = "process {queue}"
SENT = "send {queue}"
RECEIVED = "receive {queue}"
# A counter with the attributes queue and outcome, and a histogram of seconds with the same.
HANDLED = "kafkamq.worker.handled"
DURATION = "kafkamq.worker.duration"
ATTRIBUTES = {
    "system": "messaging.system",
    "destination": "messaging.destination.name",
    "operation": "messaging.operation.type",
    "id": "messaging.message.id",
    "partition": "messaging.destination.partition.id",
    "offset": "messaging.kafka.offset",
    "deliveries": "kafkamq.delivery_count",
    "queue": "kafkamq.queue",
    "outcome": "kafkamq.outcome",
    "count": "messaging.batch.message_count",
}


def is_available() -> bool:
    try:
        return find_spec("opentelemetry.sdk") is not None
    except ModuleNotFoundError:
        return False


def trace_headers(queue_id: str | None = None) -> dict[str, bytes]:
    """Return headers for ``send`` that name the span that is current; empty without the SDK or a
    span.

    With a queue's name they name a span of this send, ``send QUEUE``, which begins and ends here.
    """
    if not is_available():
        return {}
    from opentelemetry import propagate, trace

    carrier: dict[str, str] = {}
    if queue_id is None:
        propagate.inject(carrier)
    else:
        with trace.get_tracer(SCOPE).start_as_current_span(
            SENT.format(queue=queue_id),
            kind=trace.SpanKind.PRODUCER,
            attributes=_about(queue_id, "send"),
        ):
            propagate.inject(carrier)
    return {name: value.encode() for name, value in carrier.items()}


def _about(queue_id: str, operation: str) -> dict[str, Any]:
    return {
        ATTRIBUTES["system"]: "kafka",
        ATTRIBUTES["operation"]: operation,
        ATTRIBUTES["destination"]: queue_id,
        ATTRIBUTES["queue"]: queue_id,
    }


class Telemetry:
    """Spans and metrics of one worker, by the providers that the application has set."""

    def __init__(self) -> None:
        from opentelemetry import metrics, trace

        self._trace = trace
        self._tracer = trace.get_tracer(SCOPE)
        meter = metrics.get_meter(SCOPE)
        self._handled = meter.create_counter(HANDLED, unit="{message}")
        self._duration = meter.create_histogram(DURATION, unit="s")

    @contextmanager
    def delivery(self, message: Any, began_s: float | None = None) -> Iterator[list[str]]:
        """Yield a span around a handler; the caller puts the outcome into the list.

        Of one that was called elsewhere: ``began_s``, by ``time.monotonic()``.
        """
        outcome = ["ack"]
        now_s = time.monotonic()
        if began_s is None:
            began_s = now_s
        queue = message.queue_id
        place = message.message_id
        attributes = {
            **_about(queue, "process"),
            ATTRIBUTES["id"]: message.id,
            ATTRIBUTES["partition"]: str(place.partition),
            ATTRIBUTES["offset"]: place.offset,
            ATTRIBUTES["deliveries"]: message.delivery_count,
        }
        with self._tracer.start_as_current_span(
            SPAN.format(queue=queue),
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=self._links(message.headers),
            start_time=time.time_ns() - int((now_s - began_s) * 1e9),
        ) as span:
            yield outcome
            span.set_attribute(ATTRIBUTES["outcome"], outcome[0])
            if outcome[0] not in ("ack", "reject"):
                span.set_status(self._trace.StatusCode.ERROR, outcome[0])
        labels = {ATTRIBUTES["queue"]: queue, ATTRIBUTES["outcome"]: outcome[0]}
        self._handled.add(1, labels)
        self._duration.record(time.monotonic() - began_s, labels)

    def received(self, queue_id: str, count: int, began_ns: int) -> None:
        """A batch came from its consumer; ``began_ns`` is by ``time.time_ns()``."""
        attributes = {**_about(queue_id, "receive"), ATTRIBUTES["count"]: count}
        self._tracer.start_span(
            RECEIVED.format(queue=queue_id),
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
            start_time=began_ns,
        ).end()

    def _links(self, headers: Mapping[str, bytes | None]) -> list[Any]:
        from opentelemetry import propagate

        carrier = {
            name: value.decode("ascii", "replace")
            for name, value in headers.items()
            if value is not None and name in ("traceparent", "tracestate")
        }
        if "traceparent" not in carrier:
            return []
        context = self._trace.get_current_span(propagate.extract(carrier)).get_span_context()
        return [self._trace.Link(context)] if context.is_valid else []

"""Spans and metrics of workers, as an application's own providers see them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.contract import handlers

from kafkamq import Message, Nack, Worker, trace_headers
from kafkamq.runtime import telemetry
from kafkamq.testing import Clock, MemoryService


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    found = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[found])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    yield found
    provider.shutdown()


def test_a_delivery_in_a_process_is_a_span_here(spans: InMemorySpanExporter) -> None:
    service = MemoryService()
    queue = service.queue("mail", max_deliveries=1)
    queue.handler(processes=1)(handlers.raise_odd)
    for body in (b"1", b"2"):
        queue.producer().send(body)
    with Worker(service) as worker:
        while worker.handled < 2:
            assert not worker.wait(0.01)
    found = [span for span in spans.get_finished_spans() if span.name == "process mail"]
    assert sorted(span.attributes["kafkamq.outcome"] for span in found) == ["ack", "error"]
    assert all(span.start_time < span.end_time for span in found)


def test_spans_and_metrics(spans: InMemorySpanExporter, reader: InMemoryMetricReader) -> None:
    clock = Clock()
    service = MemoryService(clock=clock)
    queue = service.queue("mail", max_deliveries=3)
    counts = []

    @queue.handler()
    def handle(message: Message) -> object:
        counts.append(message.delivery_count)
        return Nack(delay=1.0) if message.delivery_count == 1 else None

    headers = trace_headers("mail")
    assert set(headers) == {"traceparent"}
    queue.producer().send(b"x", headers=headers)
    with Worker(service) as worker:
        while not worker.handled:
            assert not worker.wait(0.01)
        clock.advance(1.0)
        while worker.handled < 2:
            assert not worker.wait(0.01)
    assert counts == [1, 2]

    by_name: dict[str, list] = {}
    for span in spans.get_finished_spans():
        by_name.setdefault(span.name, []).append(span)
    assert set(by_name) == {"send mail", "receive mail", "process mail"}
    (sent,) = by_name["send mail"]
    first, second = by_name["process mail"]
    for span, count, outcome in ((first, 1, "nack"), (second, 2, "ack")):
        (link,) = span.links
        assert link.context.trace_id == sent.context.trace_id
        assert link.context.span_id == sent.context.span_id
        assert span.context.trace_id != sent.context.trace_id
        assert span.attributes["kafkamq.delivery_count"] == count
        assert span.attributes["kafkamq.outcome"] == outcome
    assert [each.attributes["messaging.batch.message_count"] for each in by_name["receive mail"]]

    found = {
        metric.name: {
            dict(point.attributes)["kafkamq.outcome"]: point for point in metric.data.data_points
        }
        for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics
        for metric in scope.metrics
    }
    assert set(found) == {telemetry.HANDLED, telemetry.DURATION}
    assert {name: point.value for name, point in found[telemetry.HANDLED].items()} == {
        "nack": 1,
        "ack": 1,
    }
    assert {name: point.count for name, point in found[telemetry.DURATION].items()} == {
        "nack": 1,
        "ack": 1,
    }

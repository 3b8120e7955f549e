"""What was STARTed ahead and never handed out is released before the consumer's clients end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import KafkaError
from tests.unit.worker_parts import InMemory
from tests.waiting import within

from kafkamq.queue.consumer import Consumer
from kafkamq.transport.memory.state import Fault
from kafkamq.types import Outcome

FAR_S = 0.05  # ten times as long as a flush that only sets out
AHEAD = 4
MARKERS = "n.markers"
NOT_RELEASED = "messages could not be released; they come back when their leases end"
BOTH = pytest.mark.parametrize("exactly_once", [False, True])


class Kafka(InMemory):
    """With messages in its queue."""

    def __init__(self) -> None:
        super().__init__()
        producer = self.service.queue("q").producer()
        for number in range(AHEAD + 1):
            producer.send(b"%d" % number).result(within(10))

    def consumer(self, *, exactly_once: bool) -> Consumer:
        """One that has handed out one message, and STARTed the others."""
        queue = self.service.queue("q", exactly_once=exactly_once, receive_buffer=AHEAD + 1)
        consumer = queue.consumer()
        assert consumer.receive(within(30)) is not None
        assert consumer.in_flight == AHEAD + 1
        return consumer

    def answer_produce(self, fault: Fault) -> None:
        """What becomes of each marker from now on."""
        self.faults.plan = lambda kind, _, place: (
            fault if kind == "produce" and place == (MARKERS, 0) else None
        )


@pytest.fixture
def kafka() -> Iterator[Kafka]:
    with closing(Kafka()) as made:
        yield made


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno == logging.WARNING]


@BOTH
def test_a_broker_that_answers_late_has_the_releases(
    kafka: Kafka, caplog: pytest.LogCaptureFixture, *, exactly_once: bool
) -> None:
    consumer = kafka.consumer(exactly_once=exactly_once)
    kafka.answer_produce(Fault(latency_s=FAR_S))
    consumer.close()
    assert kafka.ends(Outcome.RELEASE) == [(0, offset) for offset in (1, 2, 3, 4)]
    assert not warnings_of(caplog)


@BOTH
def test_a_broker_that_never_answers_is_waited_for_until_the_timeout(
    kafka: Kafka, caplog: pytest.LogCaptureFixture, *, exactly_once: bool
) -> None:
    consumer = kafka.consumer(exactly_once=exactly_once)
    kafka.answer_produce(Fault(is_lost=True))
    began_s = time.monotonic()
    consumer.close(0.4)  # no verdict is missing: nothing to raise
    assert time.monotonic() - began_s > 0.3
    assert warnings_of(caplog) == [NOT_RELEASED]


@BOTH
def test_a_release_that_the_broker_refuses_is_told_and_not_waited_for(
    kafka: Kafka, caplog: pytest.LogCaptureFixture, *, exactly_once: bool
) -> None:
    consumer = kafka.consumer(exactly_once=exactly_once)
    kafka.answer_produce(Fault(error=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    consumer.close(3600)
    assert warnings_of(caplog) == [NOT_RELEASED]

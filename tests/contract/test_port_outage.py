"""What calls say while no broker answers, and afterwards."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from confluent_kafka import KafkaError
from tests.contract.port import Kafka, Member, Reports, eventually, parts, poll_all, refusal
from tests.waiting import within

from kafkamq.dev import LocalKafka
from kafkamq.dev.environment import cache_dir_from, java_from
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.errors import ErrorWatch
from kafkamq.transport.settings import consumer_settings


@contextmanager
def stoppable(kind: str) -> Iterator[tuple[Kafka, Callable[[], None], Callable[[], None]]]:
    """A cluster, and how its brokers go and come back."""
    with ExitStack() as stack:
        if kind == "memory":
            kafka = Kafka(f"memory://{uuid.uuid4().hex[:8]}", stack)

            def switch(is_down: bool) -> None:
                with kafka.cluster.changed:
                    kafka.cluster.faults.is_down = is_down

            yield kafka, lambda: switch(True), lambda: switch(False)
        else:
            places = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}
            broker = stack.enter_context(LocalKafka(**places))
            yield Kafka(broker.bootstrap_servers, stack), broker.kill, broker.restart


@pytest.mark.parametrize("kind", ["memory", pytest.param("broker", marks=pytest.mark.faults)])
def test_an_outage(kind: str) -> None:
    with stoppable(kind) as (kafka, stop, start):
        topic, reports = kafka.topic(), Reports()
        group = f"port-{uuid.uuid4().hex[:8]}"
        watch = ErrorWatch("nowhere")
        settings = consumer_settings(kafka.config, group_id=group)
        settings["session.timeout.ms"] = 1000 if kafka.is_memory else 6000
        consumer = open_consumer(settings, watch)
        producer = kafka.producer(message_timeout_ms=1000)
        first = parts(topic, 0, offset=1)
        eventually(lambda: consumer.commit(offsets=first, asynchronous=False))
        kafka.fill(topic, 1)
        producer.list_topics(topic, timeout=within(10.0))
        consumer.assign(parts(topic, 0))
        assert consumer.poll(within(10.0)) is not None
        stop()
        producer.produce(topic, b"v", None, 0, on_delivery=reports)
        assert producer.flush(within(10.0)) == 0
        assert reports.codes == ["_MSG_TIMED_OUT"]
        assert consumer.poll(0.5) is None
        assert watch.is_down
        error = refusal(lambda: consumer.list_topics(topic, timeout=0.5))
        assert error.code() == KafkaError._TRANSPORT
        error = refusal(lambda: consumer.committed(parts(topic, 0), timeout=0.5))
        assert error.code() == KafkaError._TIMED_OUT
        error = refusal(
            lambda: consumer.commit(offsets=parts(topic, 0, offset=2), asynchronous=False)
        )
        assert error.code() == KafkaError._WAIT_COORD
        start()
        again = kafka.producer()
        again.produce(topic, b"v", None, 0, on_delivery=reports)
        assert again.flush(within(30.0)) == 0
        assert reports.codes == ["_MSG_TIMED_OUT", ""]
        message = consumer.poll(within(30.0))
        assert message is not None
        assert message.value() == b"v"
        assert consumer.committed(parts(topic, 0), timeout=within(30.0))[0].offset == 1
        consumer.close()


@pytest.mark.parametrize("kind", ["memory", pytest.param("broker", marks=pytest.mark.faults)])
def test_a_member_takes_itself_for_lost_when_nobody_answers(kind: str) -> None:
    with stoppable(kind) as (kafka, stop, start):
        session_ms = 1000 if kafka.is_memory else 6000
        settings: dict[str, object] = {
            "partition_assignment_strategy": "cooperative-sticky",
            "session_timeout_ms": session_ms,
            "heartbeat_interval_ms": 200,
        }
        member = Member(kafka, "member", "port", kafka.topic(2), **settings)
        poll_all([member], lambda: len(member.partitions) == 2)
        stop()
        poll_all([member], lambda: member.what("lost") == [[0, 1]])
        assert member.partitions == set()
        start()
        poll_all([member], lambda: len(member.partitions) == 2, 60.0)

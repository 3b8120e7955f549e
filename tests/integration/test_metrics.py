"""Metrics against a real broker: what happened is what is counted; a held-back log is noticed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from confluent_kafka import Producer
from tests.integration.queue_logs import make_service, receive_all, tracked
from tests.waiting import wait_until, within

from kafkamq.errors import LeaseLostError
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.metrics import catalog
from kafkamq.metrics.catalog import Family, Histogram
from kafkamq.metrics.health import health
from kafkamq.queue.service import Service


def of(family: Family, queue_id: str) -> float:
    """What was counted for a queue, over its partitions."""
    return sum(value for labels, value in family.values().items() if labels[0] == queue_id)


def test_a_queue_counts_what_happens_to_its_messages(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        queue = service.queue(namespace)  # labels do not hold the namespace
        producer = queue.producer()
        for number in range(10):
            producer.send(b"%d" % number)
        producer.flush()
        assert of(catalog.SENT, namespace) == 10
        with queue.consumer() as consumer:
            assert any(state.name == f"worker of {namespace}" for state in health.states())
            messages = receive_all(consumer, 10)
            assert of(catalog.IN_FLIGHT, namespace) == 10
            messages[0].nack(delay=0.0)
            messages[1].reject("for the test")
            for message in messages[2:9]:
                message.ack()
            (again,) = receive_all(consumer, 1)
            again.ack()
            messages[9].ack()
            consumer.flush()
            assert of(catalog.IN_FLIGHT, namespace) == 0
        assert of(catalog.RECEIVED, namespace) == 11
        assert of(catalog.RECEIVED_AGAIN, namespace) == 1
        counted = [of(each, namespace) for each in (catalog.ACKED, catalog.NACKED)]
        assert counted == [9, 1]
        assert of(catalog.REJECTED, namespace) == 1
        took = catalog.HANDLING_SECONDS.distributions()[namespace,]
        assert sum(took.counts) == 11
        wait_until(lambda: sum(catalog.DEAD_LETTERED.values().values()) >= 1)
        wait_until(lambda: sum(catalog.REDELIVERED.values().values()) >= 1)
        wait_until(lambda: set(catalog.LIVE.values().values()) == {1.0})
        wait_until(lambda: set(catalog.LAG.values().values()) == {0.0})
        wait_until(lambda: sum(catalog.IN_PROGRESS.values().values()) == 0)  # its END is read


def test_what_goes_wrong_is_counted(bootstrap: str, namespace: str) -> None:
    """Leases that end, verdicts that come too late, markers that are none."""
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        queue = service.queue(namespace, redelivery_timeout=1.0, max_lease=1.0)
        producer = queue.producer()
        for number in range(5):
            producer.send(b"%d" % number)
        producer.flush()
        assert of(catalog.SENT, namespace) == 5  # which counts what was noted so far
        assert sum(catalog.SEND_SECONDS.distributions()[namespace,].counts) == 5
        late_before = counted(catalog.LATENESS)
        with queue.consumer() as consumer:
            message = consumer.receive(within(30))
            assert message is not None
            wait_until(lambda: time.monotonic() > message.deadline)
            with pytest.raises(LeaseLostError):
                message.ack()
            wait_until(lambda: of(catalog.LEASES_LOST, namespace) >= 1)  # whoever noticed it
        started = of(catalog.RECEIVED, namespace)
        wait_until(lambda: sum(catalog.REDELIVERED.values().values()) >= started)
        wait_until(lambda: counted(catalog.LATENESS) > late_before)
        wait_until(lambda: sum(catalog.POSITION.values().values()) > 0)
        for _ in range(20):
            producer.send(b"again", key=b"one partition")
        producer.flush()
        with service.queue(namespace, redelivery_timeout=600.0).consumer() as consumer:
            receive_all(consumer, 1)[0].reject("for the test", wait=True)
            held = [consumer.receive(within(30))]
            while consumer.in_flight <= len(held):
                held.append(consumer.receive(within(30)))  # until another one is STARTed ahead
                assert held[-1] is not None
            # 600 s, or what is left of R12's 60 s of what has ended beside it
            wait_until(lambda: max(catalog.OLDEST_DEADLINE.values().values(), default=0) > 30)
        assert of(catalog.RELEASED, namespace) >= 1
        other = Producer({"bootstrap.servers": bootstrap})
        other.produce(service.config.marker_topic, b"no marker", partition=1)
        other.flush()
        wait_until(lambda: catalog.MALFORMED.values().get(("1",), 0.0) == 1)


def counted(histogram: Histogram) -> int:
    """All observations."""
    return sum(sum(each.counts) for each in histogram.distributions().values())


def test_an_open_transaction_is_seen_to_hold_readers_back(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service:
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": namespace,
                "transaction.timeout.ms": 60_000,
            }
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(service.config.quarantine_topic, b"not watched")
        producer.produce(service.config.message_topic, b"x", b"nobody", 1)
        producer.produce(service.config.marker_topic, b"x", b"nobody", 0)
        producer.flush()
        with LocalTracker(service.config).in_thread() as tracker:
            stalled, markers = catalog.MESSAGES_LSO_STALLED, catalog.LSO_STALLED
            wait_until(lambda: stalled.values().get(("1",), 0.0) > 0.5)
            wait_until(lambda: markers.values().get(("0",), 0.0) > 0.5)
            assert stalled.values()["0",] == 0.0
            wait_until(lambda: catalog.LIVE.values() == {("0",): 0.0, ("1",): 1.0})
            assert not health.is_ready()  # R17: its own TICK stands behind the open transaction
            producer.abort_transaction(30)
            wait_until(lambda: stalled.values()["1",] == markers.values()["0",] == 0.0)
            wait_until(lambda: tracker.is_live)
            wait_until(health.is_ready)  # its loop may not have turned since


def test_a_tracker_answers_probes(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service:
        _probe(service)


def _probe(service: Service) -> None:
    config = service.config
    command = [sys.executable, "-m", "kafkamq.cli", "tracker", "--engine", "local"]
    where = ["-b", config.bootstrap_servers, "-n", config.namespace, "--metrics-port", "0"]
    with subprocess.Popen([*command, *where], stderr=subprocess.PIPE, text=True) as tracker:
        try:
            assert tracker.stderr is not None
            port = ""
            while not port:
                line = tracker.stderr.readline()
                assert line, "it ended"
                found = re.search(r"http://localhost:(\d+)/metrics", line)
                port = found[1] if found else ""
            wait_until(lambda: _health(port).returncode == 0)
            answer = json.loads(_health(port, "--live").stdout)
            assert answer["ok"]
            assert [loop["name"] for loop in answer["loops"]] == [f"tracker of {config.namespace}"]
        finally:
            tracker.send_signal(signal.SIGTERM)
            tracker.wait(within(30))
    assert _health(port).returncode == 1  # nobody answers


def _health(port: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kafkamq.cli", "health", "--port", port, "--json", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=within(30))

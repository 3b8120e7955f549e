"""LocalKafka against real brokers of its own: its life, its data, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, ShareConsumer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.sure_producer import SureProducer
from tests.waiting import deadline_after, wait_until, within

import kafkamq.dev.broker as module
from kafkamq.dev import LocalKafka, LocalKafkaError, cache_dir_from, java_from
from kafkamq.errors import StateError

OPTIONS = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def create_topic(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1)])[topic].result(within(30))


def produce(bootstrap: str, topic: str, *values: bytes, **settings: str) -> None:
    producer = SureProducer({"bootstrap.servers": bootstrap, **settings})
    for value in values:
        producer.produce(topic, value)
    producer.confirm(30)


def consume(bootstrap: str, topic: str, count: int) -> list[bytes]:
    settings = {"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "group.id": f"{topic}-{time.monotonic_ns()}"})
    consumer.subscribe([topic])
    values: list[bytes] = []
    try:
        deadline = deadline_after(60)
        while len(values) < count and time.monotonic() < deadline:
            for message in consumer.consume(100, timeout=0.5):
                assert message.error() is None, message.error()
                values.append(message.value() or b"")
    finally:
        consumer.close()
    return values


@pytest.fixture(scope="module")
def own_broker() -> Iterator[LocalKafka]:
    """A broker that these tests may kill: not the session's."""
    with LocalKafka(**OPTIONS) as broker:
        yield broker


def test_the_shared_broker_carries_messages(bootstrap: str, namespace: str) -> None:
    create_topic(bootstrap, namespace)
    produce(bootstrap, namespace, b"one", b"two")
    assert consume(bootstrap, namespace, 2) == [b"one", b"two"]


def test_topics_are_not_created_by_accident(bootstrap: str, namespace: str) -> None:
    producer = SureProducer(
        {"bootstrap.servers": bootstrap, "topic.metadata.propagation.max.ms": 500}
    )
    failed: list[object] = []
    producer.produce(namespace, b"x", on_delivery=lambda error, message: failed.append(error))
    producer.flush(within(60))
    assert "UNKNOWN_TOPIC" in str(failed[0]) or "Unknown topic" in str(failed[0])


def test_data_and_address_survive_a_restart_and_a_kill(
    own_broker: LocalKafka, namespace: str
) -> None:
    bootstrap, first_pid = own_broker.bootstrap_servers, own_broker.pid
    create_topic(bootstrap, namespace)
    produce(bootstrap, namespace, b"before")
    own_broker.restart()
    assert own_broker.bootstrap_servers == bootstrap
    assert own_broker.pid != first_pid
    produce(bootstrap, namespace, b"between")
    killed = own_broker.pid
    own_broker.kill()
    assert not is_alive(killed)
    assert not own_broker.is_running
    own_broker.restart()
    assert consume(bootstrap, namespace, 2) == [b"before", b"between"]


def test_a_paused_broker_is_silent_and_comes_back(own_broker: LocalKafka) -> None:
    admin = AdminClient({"bootstrap.servers": own_broker.bootstrap_servers, "log_level": 0})
    assert admin.list_topics(timeout=within(30)).brokers
    own_broker.pause()
    try:
        with pytest.raises(KafkaException):
            admin.list_topics(timeout=1)
    finally:
        own_broker.resume()
    wait_until(lambda: bool(admin.list_topics(timeout=within(30)).brokers))


def test_a_running_broker_is_not_started_twice(own_broker: LocalKafka) -> None:
    with pytest.raises(StateError, match="runs already"):
        own_broker.start()


def test_transactions_end_soon_after_their_timeout(own_broker: LocalKafka, namespace: str) -> None:
    bootstrap = own_broker.bootstrap_servers
    create_topic(bootstrap, namespace)
    settings = {"bootstrap.servers": bootstrap, "transactional.id": namespace}
    abandoned = SureProducer({**settings, "transaction.timeout.ms": 1000})
    abandoned.init_transactions(30)
    abandoned.begin_transaction()
    abandoned.produce(namespace, b"open")
    abandoned.confirm(30)
    produce(bootstrap, namespace, b"after")
    assert consume(bootstrap, namespace, 1) == [b"after"]


def test_share_groups_are_available(own_broker: LocalKafka, namespace: str) -> None:
    bootstrap = own_broker.bootstrap_servers
    create_topic(bootstrap, namespace)
    consumer = ShareConsumer({"bootstrap.servers": bootstrap, "group.id": namespace})
    consumer.subscribe([namespace])
    got: list[bytes | None] = []
    sent = 0
    deadline = deadline_after(60)
    while not got and time.monotonic() < deadline:
        produce(bootstrap, namespace, b"m%d" % sent)  # a new group starts at the end of the log
        sent += 1
        got += [message.value() for message in consumer.poll(timeout=1.0)]
    consumer.close()
    assert got


@pytest.mark.faults
def test_a_folder_is_kept_and_opened_again(tmp_path: Path, namespace: str) -> None:
    with LocalKafka(data_dir=tmp_path / "kafka ä", **OPTIONS) as broker:
        create_topic(broker.bootstrap_servers, namespace)
        produce(broker.bootstrap_servers, namespace, b"kept")
    with LocalKafka(data_dir=tmp_path / "kafka ä", **OPTIONS) as broker:
        assert consume(broker.bootstrap_servers, namespace, 1) == [b"kept"]


def test_a_temporary_folder_goes_with_its_broker() -> None:
    broker = LocalKafka(**OPTIONS).start()
    pid, folder = broker.pid, broker.data_dir
    assert broker.log_path.is_file()
    broker.stop()
    assert not is_alive(pid)
    assert not folder.exists()


def test_a_broker_that_cannot_start_says_why_and_keeps_its_log(tmp_path: Path) -> None:
    broker = LocalKafka(
        data_dir=tmp_path, properties={"socket.request.max.bytes": "many"}, **OPTIONS
    )
    with pytest.raises(LocalKafkaError, match=r"socket\.request\.max\.bytes") as raised:
        broker.start()
    assert str(tmp_path / "broker.log") in str(raised.value)
    assert (tmp_path / "broker.log").is_file()
    assert not broker.is_running


def test_a_broker_that_dies_after_formatting_says_why(tmp_path: Path) -> None:
    broker = LocalKafka(data_dir=tmp_path, properties={"metric.reporters": "no.Such"}, **OPTIONS)
    with pytest.raises(LocalKafkaError, match=r"no\.Such"):
        broker.start()


@pytest.mark.faults
def test_a_taken_port_leads_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    find = module.free_port_pair
    taken = find()
    pairs = iter([taken])
    monkeypatch.setattr(module, "free_port_pair", lambda port: next(pairs, None) or find(port))

    with socket.create_server(("127.0.0.1", taken[0])), LocalKafka(**OPTIONS) as broker:
        assert broker.bootstrap_servers != f"127.0.0.1:{taken[0]}"


def test_any_thread_may_start_it_and_end() -> None:
    broker = LocalKafka(**OPTIONS)
    thread = threading.Thread(target=broker.start)
    thread.start()
    thread.join(within(120))
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        assert admin.list_topics(timeout=within(30)).brokers
    finally:
        broker.stop()


CHILD = """
import os, sys
from kafkamq.dev import LocalKafka, cache_dir_from, java_from
broker = LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ))
with broker:
    print(broker.pid, broker.data_dir, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.faults)]
)
def test_no_broker_outlives_its_parent(ending: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid_text, _, folder = parent.stdout.readline().strip().partition(" ")
        pid = int(pid_text)
        assert is_alive(pid)
        parent.send_signal(ending)
        parent.wait(within(60))
        wait_until(lambda: not is_alive(pid))
        wait_until(lambda: not Path(folder).exists())


def test_no_broker_outlives_its_guard() -> None:
    with LocalKafka(**OPTIONS) as broker:
        pid = broker.pid
        guard = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))


@pytest.mark.faults  # only for its time: another version's jars, two starts
def test_kafka_3_9_works(namespace: str) -> None:
    with LocalKafka("3.9.1", **OPTIONS) as broker:
        bootstrap = broker.bootstrap_servers
        create_topic(bootstrap, namespace)
        produce(bootstrap, namespace, b"old")
        assert consume(bootstrap, namespace, 1) == [b"old"]
        broker.kill()
        broker.restart()
        assert consume(bootstrap, namespace, 1) == [b"old"]

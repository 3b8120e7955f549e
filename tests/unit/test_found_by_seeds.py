"""What clients do when a cluster in memory fails them; the simulator's seeds found these."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from confluent_kafka import KafkaError

from kafkamq.claims.engine import Fence
from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, FencedError, LeaseLostError
from kafkamq.markers.positions import Positions
from kafkamq.markers.tracker.reading import MessageLookup
from kafkamq.markers.tracker.records import Ticker
from kafkamq.queue.backend import Connections
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.service import Service
from kafkamq.transport import clients, transactions
from kafkamq.transport.admin import Admin, uuid_bytes
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.log_reader import Patience
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster
from kafkamq.transport.memory.producer import Producer
from kafkamq.transport.memory.state import Fault
from kafkamq.transport.record import Record
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import MessageId


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[MemoryKafka]:
    name = f"faults-{request.node.name}"
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
    yield cluster_of(f"memory://{name}")
    forget_cluster(name)


def config_of(cluster: MemoryKafka) -> ServiceConfig:
    return ServiceConfig(bootstrap_servers=f"memory://{cluster.name}", namespace="n")


def test_the_ends_of_logs_are_not_told_in_time(cluster: MemoryKafka) -> None:
    with Admin(config_of(cluster), timeout_s=0.5) as admin:
        assert admin.log_ends("n.markers") == {0: (0, 0)}
        cluster.faults.is_down = True
        with pytest.raises(DeadlineExceededError):
            admin.log_ends("n.markers")


def test_ticks_that_are_all_refused_at_once_do_not_spin(cluster: MemoryKafka) -> None:
    refused = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    asked: list[object] = []

    def plan(kind: str, *_: object) -> Fault | None:
        asked.append(kind)
        return Fault(error=refused) if kind == "produce" else None

    cluster.faults.plan = plan
    ticker = Ticker(config_of(cluster))
    with pytest.raises((BrokerError, DeadlineExceededError)):
        ticker.tick_all([0], engine="e", epoch=1, timeout_s=1.0)
    assert 2 <= asked.count("produce") <= 20
    ticker.close()


def test_a_transactional_producer_that_failed_for_good_says_that_it_needs_another(
    cluster: MemoryKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Producer] = []

    def kept(*args: object, **kwargs: object) -> object:
        made.append(clients.open_producer(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(transactions, "open_producer", kept)
    producer = TransactionalProducer(config_of(cluster), "t")
    producer.init()
    producer.begin()
    made[0].fail(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
    with pytest.raises(BrokerError):
        producer.produce(("n.messages", 0, None, b"x", ()))
    assert not producer.is_ready
    producer.init()
    assert producer.is_ready
    producer.close()


def test_a_transaction_whose_abort_is_fenced_is_not_called_aborted(cluster: MemoryKafka) -> None:
    """It would be repeated behind what the later producer of its id has done."""
    refused = KafkaError(KafkaError.INVALID_TIMESTAMP)
    producer = TransactionalProducer(config_of(cluster), "t")
    producer.init()
    producer.begin()
    producer.produce(("n.messages", 0, None, b"x", ()))
    producer.flush()
    cluster.faults.plan = lambda kind, *_: Fault(error=refused) if kind == "produce" else None
    producer.produce(("n.messages", 0, None, b"y", ()))
    producer.flush()
    later = TransactionalProducer(config_of(cluster), "t")
    later.init()
    with pytest.raises(FencedError):
        producer.commit()
    assert not producer.is_ready
    later.close()
    producer.close()


def test_a_topic_that_a_broker_has_not_heard_of_is_asked_for_again(cluster: MemoryKafka) -> None:
    told = iter([1, 0])  # of the messages and the markers; then all is known
    cluster.faults.told = lambda _, count: next(told, count)
    facts = Namespace(config_of(cluster)).facts()
    assert (facts.message_partitions, facts.marker_partitions) == (1, 1)


def test_a_thread_that_asks_for_topics_ends_with_its_service(cluster: MemoryKafka) -> None:
    """While no broker answers it would ask on, with one client after the other."""
    connections = Connections(config_of(cluster))
    connections.namespace.facts()
    cluster.faults.is_down = True
    before = set(threading.enumerate())
    connections.namespace.refresh_if_old(0.0)
    (asking,) = set(threading.enumerate()) - before
    connections.close(5.0)
    assert not asking.is_alive()
    connections.namespace.refresh_if_old(0.0)
    assert set(threading.enumerate()) <= before, "nobody asks again"


@pytest.mark.parametrize("lagging", ["partitions", "ids"])
def test_a_payload_is_not_lost_because_a_broker_tells_less(
    cluster: MemoryKafka, lagging: str
) -> None:
    """R13, R18: a topic loses no partitions, and one without an id counts as the same."""
    config = config_of(cluster)
    cluster.add_partitions("n.messages", 1)
    topic_id = uuid_bytes(cluster.topics["n.messages"].topic_id)
    writer = clients.open_producer({"bootstrap.servers": config.bootstrap_servers})
    writer.produce("n.messages", b"payload", b"q", 1)
    wanted = [(MessageId(1, 0, topic_id, 1), 1)]
    answers = iter([True])
    admin = Admin(config)
    lookup = MessageLookup(config, Patience(), admin)

    def look() -> list[tuple[Sequence[Record | None], bool]]:
        return lookup.read(wanted, deadline_s=time.monotonic() + 30, max_bytes=10_000)

    if lagging == "partitions":
        cluster.faults.told = lambda *_: 1
        for _ in range(2):  # whoever settles asks again
            assert look() == [((), True)]
        cluster.faults.told = None
        lookup.topic("n.messages", max_age_s=0.0)
    else:
        cluster.faults.has_ids = lambda: next(answers, False)
    (((found,), is_awaited),) = look()
    assert not is_awaited
    assert found is not None
    assert found.value() == b"payload"
    lookup.close()
    admin.close()
    writer.close()


def test_a_record_of_many_that_the_client_refuses_as_too_large_is_counted(
    cluster: MemoryKafka,
) -> None:
    producer = TransactionalProducer(config_of(cluster), "t", message_max_bytes=10_000)
    producer.init()
    producer.begin()
    messages = [{"value": b"x" * size, "key": None} for size in (1, 20_000)]
    with pytest.raises(BrokerError):
        producer.produce_many("n.messages", 0, messages, timeout_s=5.0)
    assert producer.too_large == 1
    producer.close()


def test_positions_whose_writing_was_interrupted_are_written_by_the_next_call(
    cluster: MemoryKafka,
) -> None:
    def interrupt(_: object) -> bool:
        cluster.faults.is_full = None
        raise KeyboardInterrupt

    positions = Positions(config_of(cluster), "g", "q")
    positions.note({0: 5}, b"t" * 16)
    cluster.faults.is_full = interrupt
    with pytest.raises(KeyboardInterrupt):
        positions.write()
    assert cluster.topics["n.ledger"].partitions[0].end == 0
    positions.close()
    ends = [each.end for each in cluster.topics["n.ledger"].partitions]
    assert sum(ends) == 1


def test_a_claim_that_ends_beside_its_outputs_ends_them_and_their_client(
    cluster: MemoryKafka,
) -> None:
    """Its client was closed under the application."""
    cluster.create_topic("outputs", 1)
    fence = Fence(config_of(cluster), "group", "work", 0, b"")
    fence.init(5.0)

    def write() -> None:
        with fence.transaction() as producer:
            fence.close()
            producer.produce(("outputs", 0, None, b"a former owner's", ()))

    for _ in range(2):
        with pytest.raises(LeaseLostError):
            write()
    assert not fence.is_usable
    log = cluster.topics["outputs"].partitions[0]
    assert log.read(0, 10, is_committed=True)[0] == []


def test_a_partition_without_a_leader_has_no_bounds(cluster: MemoryKafka) -> None:
    """Where nobody leads it the client says -1001, which would be a log that was truncated."""
    cluster.faults.offline.add(("n.markers", 0))
    with Admin(config_of(cluster), timeout_s=0.5) as admin:
        for ask in (
            partial(admin.log_bounds, "n.markers", [0]),
            partial(admin.log_ends, "n.markers"),
        ):
            with pytest.raises((BrokerError, DeadlineExceededError)) as caught:
                ask()
            assert is_retriable(caught.value)
        cluster.faults.offline.clear()
        assert admin.log_bounds("n.markers", [0]) == {0: (0, 0)}

"""Where a stream's batches begin and end, when brokers do not agree about the topic."""

from __future__ import annotations

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.source import streaming
from kafkamq.spark.source.streaming import StreamOffsets, StreamReader
from kafkamq.transport.log_reader import LogRange

TOPIC = "orders"


class Cluster:
    """Tells what the broker that happens to answer knows; every log ends at ``end``."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.topic_id = "aa" * 16
        self.end = 1000

    def partition_count(self, topic: str) -> int:
        return self.partitions

    def log_ends(self, topic: str, numbers: list[int]) -> dict[int, int]:
        assert all(number < self.partitions for number in numbers), "an unknown partition"
        return dict.fromkeys(numbers, self.end)

    def log_starts(self, topic: str, numbers: list[int]) -> dict[int, int]:
        return dict.fromkeys(numbers, 0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(partitions=6)
    monkeypatch.setattr(streaming, "log_reader", lambda config: found)
    monkeypatch.setattr(streaming, "topic_id", lambda options: found.topic_id)
    monkeypatch.setattr(streaming, "TOPOLOGY_S", -1.0)  # each batch looks
    return found


def stream(**options: str) -> StreamReader:
    given = {"topic": TOPIC, **options}
    service = ServiceConfig(bootstrap_servers="x:1")
    return StreamReader(parse_source_options(given, service), StructType())


def batch(reader: StreamReader, start: StreamOffsets) -> tuple[StreamOffsets, list[LogRange]]:
    end = reader.latestOffset(start, ReadAllAvailable())
    return end, [task.wanted for task in reader.partitions(start, end)]


@pytest.mark.parametrize("chosen", [{}, {"partitions": "0,5"}])
def test_a_broker_that_knows_fewer_partitions_rewinds_none(
    cluster: Cluster, chosen: dict[str, str]
) -> None:
    reader = stream(**chosen)
    at, _ = batch(reader, reader.initialOffset())
    cluster.partitions, cluster.end = 4, 1001  # another broker answers; it lags behind
    stale, tasks = batch(reader, at)
    assert set(stale[TOPIC]) == set(at[TOPIC])
    assert all((each.start, each.end) == (1000, 1001) for each in tasks)
    cluster.partitions, cluster.end = 6, 1002
    _, tasks = batch(reader, stale)
    assert {each.partition: each.start for each in tasks} == {
        number: 1001 if number < 4 else 1000 for number in map(int, at[TOPIC])
    }


def test_the_first_offsets_keep_what_was_named_beyond_a_brokers_knowledge(cluster: Cluster) -> None:
    cluster.partitions = 1
    reader = stream(startingoffsets='{"orders": {"0": 7, "1": 900}}')
    at = reader.initialOffset()
    assert at[TOPIC] == {"0": 7, "1": 900}
    cluster.partitions = 2
    _, tasks = batch(reader, at)
    assert {each.partition: each.start for each in tasks} == {0: 7, 1: 900}


def test_a_topic_recreated_with_fewer_partitions_is_no_lag(cluster: Cluster) -> None:
    reader = stream(failondataloss="false")
    at, _ = batch(reader, reader.initialOffset())
    cluster.partitions, cluster.topic_id, cluster.end = 2, "bb" * 16, 10
    end, tasks = batch(reader, at)
    assert end[TOPIC] == {"0": 10, "1": 10}
    assert [(each.start, each.end) for each in tasks] == [(0, 10), (0, 10)]


def test_a_broker_that_tells_no_topic_id_does_not_make_the_stream_forget_it(
    cluster: Cluster,
) -> None:
    at, _ = batch(stream(), stream().initialOffset())
    known, cluster.topic_id = cluster.topic_id, ""
    end, _ = batch(stream(), at)  # of a driver that has started again
    assert known in str(end)


def test_a_checkpoint_of_another_topic_is_refused(cluster: Cluster) -> None:
    """All of this one would be read again, beside the checkpoint's position."""
    reader = stream()
    at, _ = batch(reader, reader.initialOffset())
    other = stream(topic="invoices")
    for call in (
        lambda: other.latestOffset(at, ReadAllAvailable()),
        lambda: other.partitions(at, at),
    ):
        with pytest.raises(ConfigError, match=r"of topic orders, .* reads invoices: name another"):
            call()


def claimed(partitions: str, starts: str) -> StreamReader:
    """Claim as the options of ``claimed_assign`` say."""
    return stream(partitions=partitions, startingoffsets=f'{{"{TOPIC}": {starts}}}')


@pytest.mark.parametrize(
    ("partitions", "starts", "why"),
    [
        ("1,2", '{"1": 1000, "2": 100}', r"partitions 0,1, the query reads 1,2"),
        ("0", '{"0": 1000}', r"partitions 0,1, the query reads 0"),
        ("0,1", '{"0": 1000, "1": 1001}', r"at 1000 in orders\[1\], .* at 1001: others"),
    ],
)
def test_the_checkpoint_of_other_claims_is_refused(
    cluster: Cluster, partitions: str, starts: str, why: str
) -> None:
    """It would be read from offset 0, or what another driver has done would be done again."""
    before = claimed("0,1", '{"0": 7, "1": 7}')
    at, _ = batch(before, before.initialOffset())
    other = claimed(partitions, starts)
    for call in (
        lambda: other.latestOffset(at, ReadAllAvailable()),
        lambda: other.partitions(at, at),
    ):
        with pytest.raises(ConfigError, match=why):
            call()


def test_the_checkpoint_of_the_same_claims_goes_on(cluster: Cluster) -> None:
    before = claimed("0,1", '{"0": 7, "1": 7}')
    at, _ = batch(before, before.initialOffset())
    cluster.end = 1002
    _, tasks = batch(claimed("0,1", '{"0": 1000, "1": 900}'), at)
    assert {each.partition: each.start for each in tasks} == {0: 1000, 1: 1000}

"""A worker process of Spark that settles for more partitions than it keeps producers."""

from __future__ import annotations

import pytest

from kafkamq.config import ServiceConfig
from kafkamq.errors import FencedError
from kafkamq.markers.tracker.ledger import MAX_OPEN, LedgerKey, read_positions
from kafkamq.queue.topics import create_topics
from kafkamq.spark.tracker.partition_ledgers import PartitionLedgers

PARTITIONS = MAX_OPEN + 4


def write(ledgers: PartitionLedgers, partition: int, batch: int) -> None:
    with ledgers.using(partition) as own:
        own.begin()
        own.commit(1000 * batch + partition, batch=batch, rows_done=0)


def test_ledgers_that_rested_go_on_where_they_were(bootstrap: str, namespace: str) -> None:
    config = ServiceConfig(bootstrap_servers=bootstrap, namespace=namespace)
    create_topics(config, partitions=1, marker_partitions=PARTITIONS)
    keys = [LedgerKey.of_markers(config, number) for number in range(PARTITIONS)]
    ours = PartitionLedgers(config, engine="spark", epoch=1)
    other = PartitionLedgers(config, engine="spark", epoch=1)  # another process of the same start
    for batch in (1, 2):
        for partition in range(PARTITIONS):
            write(ours, partition, batch)
    write(other, 0, 3)
    with ours.using(0) as own:  # it rested, and does not hold what it was then
        assert own.last is not None
        assert own.last.batch == 3
    found = read_positions(config, keys)
    assert [found[key].batch for key in keys] == [3, *[2] * (PARTITIONS - 1)]
    later = PartitionLedgers(config, engine="spark", epoch=2)
    write(later, 1, 1)
    with pytest.raises(FencedError, match="started later"), ours.using(1):
        pass
    for each in (ours, other, later):
        each.close()
        each.close()

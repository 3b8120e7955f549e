"""The broker goes away under a local tracker: killed and back, frozen and back.

And under its transactions: brokers, and what stands before them, close connections that rest.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.tracker_logs import Logs
from tests.waiting import wait_until

from kafkamq.config import TrackerConfig
from kafkamq.dev import LocalKafka, cache_dir_from, java_from
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.transport.commits import metadata_of
from kafkamq.transport.record import TopicPartition
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import Outcome


@pytest.fixture
def broker() -> Iterator[LocalKafka]:
    with LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as broker:
        yield broker


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kill", "pause"])
def test_an_outage_delays_and_neither_loses_nor_repeats(
    broker: LocalKafka, namespace: str, kind: str
) -> None:
    logs = Logs(broker.bootstrap_servers, namespace)
    with LocalTracker(logs.config, TrackerConfig(max_offsets_per_commit=50)).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        ids = logs.send(4000)
        logs.start(*ids, timeout_ms=1000)
        wait_until(lambda: len(logs.copied()) > 100)  # it is firing
        if kind == "kill":
            broker.kill()
            time.sleep(2)
            broker.start()
        else:
            broker.pause()
            time.sleep(12)  # longer than the transaction's timeout
            broker.resume()
        wait_until(lambda: len(logs.ends(Outcome.REDELIVERED)) >= len(ids), timeout_s=90)
        late = logs.send(1)
        logs.start(*late, timeout_ms=500)
        wait_until(lambda: set(late) <= set(logs.ends(Outcome.REDELIVERED)), timeout_s=60)
    expected = Counter((id_.partition, id_.offset) for id_ in [*ids, *late])
    assert Counter(logs.copied()) == expected
    assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter([*ids, *late])


def _connections(port: int) -> dict[int, int]:
    """Descriptors of this process's connections to a port, by their inodes."""
    found = {}
    for each in Path("/proc/self/fd").iterdir():
        try:
            status = each.stat()
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(each.name))) as copy:
                if copy.getpeername()[1:2] == (port,):
                    found[status.st_ino] = int(each.name)
        except OSError:  # closed meanwhile, or not connected
            continue
    return found


def test_a_transaction_begins_after_connections_that_rested_were_closed(
    bootstrap: str, namespace: str
) -> None:
    logs = Logs(bootstrap, namespace)
    port = int(bootstrap.rpartition(":")[2])
    topic, group = logs.config.marker_topic, f"kafkamq.{namespace}"
    members = metadata_of(logs.config, group)
    others = set(_connections(port))
    producer = TransactionalProducer(logs.config, group)
    producer.init()
    try:
        for number in range(4):
            with producer.transaction():
                producer.produce((topic, 0, None, b"", ()))
                producer.send_offsets([TopicPartition(topic, 0, number)], members)
            ours = {inode: fd for inode, fd in _connections(port).items() if inode not in others}
            others.update(ours)
            for descriptor in ours.values():
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)  # as if the broker had closed it
            wait_until(lambda: set(_connections(port)) - others, "the client is connected again")
    finally:
        producer.close()
